"""Runs the gateway: opens the application and serves it on one port until stopped.

The listen address and authentication are set up before the port accepts connections. On shutdown, clients are
notified and streams end; runs in flight are resumed by the next start.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Unpack

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.types import ASGIApp, Receive, Scope, Send

from antiphon.app import App, AppOptions, open_app
from antiphon.config import Config
from antiphon.config.validate import TAILNET_ERROR
from antiphon.errors import ConfigError, Unavailable
from antiphon.event_loop import run_in_background
from antiphon.gateway import discovery
from antiphon.gateway.auth import Authenticator, list_own_origins
from antiphon.gateway.http.limits import create_http_protocol, determine_max_connections
from antiphon.gateway.http.routes import HttpRoutes
from antiphon.gateway.hub import Hub
from antiphon.gateway.program_tools import ProgramToolServer
from antiphon.gateway.shared_tokens import SharedTokens
from antiphon.gateway.state import GatewayState
from antiphon.gateway.tokens import TokenRegistry, build_owner_record
from antiphon.gateway.ws import frames
from antiphon.gateway.ws.protocol import LimitedWebSocketProtocol
from antiphon.gateway.ws.server import WebSocketServer

SHUTDOWN_GRACE_SECONDS = 5  # for open requests to finish on shutdown
LISTEN_BACKLOG_CONNECTIONS = 2048
TCP_USER_TIMEOUT_MS = 30_000  # after which the system drops a peer that acknowledges nothing


class ListeningGateway(msgspec.Struct, frozen=True):
    """A running gateway that accepts connections."""

    url: str
    gateway: GatewayState
    hub: Hub
    ended: asyncio.Task[None]
    """Done when the server has stopped, on request or on its own."""


class _UvicornServer(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Generator[None]:
        """Leave signal handling to the process that runs the gateway."""
        yield


class AsgiApp:
    """The ASGI application: WebSockets go to `ws.server`, everything else to the HTTP routes.

    A WebSocket may be opened at any path, because clients use different ones.
    """

    def __init__(self, gateway: GatewayState, hub: Hub, program_tools: ProgramToolServer) -> None:
        self.http = HttpRoutes(gateway, program_tools)
        self._websocket_server = WebSocketServer(gateway, hub)
        self._http_app: ASGIApp = Starlette(routes=self.http.routes)
        self.http.metrics.sockets.set_function(lambda: len(hub.connections))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._websocket_server if scope["type"] == "websocket" else self._http_app
        await app(scope, receive, send)


@asynccontextmanager
async def serve_gateway(
    config: Config,
    state_dir: Path,
    *,
    port: int | None = None,
    tokens_dir: Path | None = None,
    **options: Unpack[AppOptions],
) -> AsyncGenerator[ListeningGateway]:
    """Open the application and listen until the context exits. Several gateways can share one `tokens_dir`."""
    host = choose_listen_address(config)
    max_connections = determine_max_connections()
    program_tools = ProgramToolServer()
    options["session_tool_server"] = program_tools
    async with open_app(config, state_dir, **options) as opened:
        listener = open_listener(host, config.gateway.port if port is None else port)
        number = listener.getsockname()[1]
        try:
            tokens = await asyncio.to_thread(TokenRegistry.open, tokens_dir or state_dir)
            authenticator = await asyncio.to_thread(
                _build_authenticator, config, opened, tokens, host, number
            )
            gateway = GatewayState(
                app=opened, authenticator=authenticator, state_dir=state_dir, started_at=opened.clock.now()
            )
            async with (
                _refresh_shared_tokens(opened, tokens),
                _serve_app(
                    gateway, program_tools, listener, _format_url(host, number), max_connections
                ) as served,
                opened.run_channels(),
            ):
                yield served
        finally:
            listener.close()


@asynccontextmanager
async def _refresh_shared_tokens(opened: App, tokens: TokenRegistry) -> AsyncGenerator[None]:
    """Load the tokens that replicas share before any request is accepted, and keep them up to date."""
    if not opened.store.shared:
        yield
        return
    shared = SharedTokens(opened.store, tokens)
    await shared.start()
    async with run_in_background(shared.run()):
        yield


@asynccontextmanager
async def _serve_app(
    gateway: GatewayState,
    program_tools: ProgramToolServer,
    listener: socket.socket,
    url: str,
    max_connections: int,
) -> AsyncGenerator[ListeningGateway]:
    hub = Hub(gateway)
    app = AsgiApp(gateway, hub, program_tools)
    async with (
        app.http.open(),
        _run_server(
            gateway, hub, _UvicornServer(_build_uvicorn_config(app, max_connections)), listener, url
        ) as served,
    ):
        await program_tools.attach(gateway, url.replace("ws://", "http://", 1), app.http.build_program_app)
        yield served


@asynccontextmanager
async def _run_server(
    gateway: GatewayState, hub: Hub, server: uvicorn.Server, listener: socket.socket, url: str
) -> AsyncGenerator[ListeningGateway]:
    broadcasting = asyncio.create_task(hub.run())
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        await _wait_until_started(server, task)
        await asyncio.to_thread(
            discovery.write, gateway.state_dir, discovery.DiscoveryRecord(url, os.getpid())
        )
        await gateway.app.publish_address(url)
        gateway.app.preload_libraries()
        gateway.app.examine_commands()
        if gateway.app.mcp_servers is not None:
            gateway.app.mcp_servers.begin_warm_up()
        yield ListeningGateway(url, gateway, hub, task)
    finally:
        with suppress(OSError):
            discovery.remove(gateway.state_dir)
        gateway.closing.set()
        hub.broadcast_shutdown("the gateway is stopping")
        server.should_exit = True
        broadcasting.cancel()
        await asyncio.gather(task, broadcasting, return_exceptions=True)


async def _wait_until_started(server: uvicorn.Server, task: asyncio.Task[None]) -> None:
    while not server.started:
        if task.done():
            raise Unavailable("The gateway did not start.", "See the log for the reason.")
        await asyncio.sleep(0.001)


def _build_uvicorn_config(app: AsgiApp, max_connections: int) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        loop="none",
        http=create_http_protocol(),
        limit_concurrency=max_connections + 1,  # at this count LimitedHttpProtocol closes a connection
        ws=LimitedWebSocketProtocol,
        ws_max_size=frames.MAX_FRAME_BYTES,
        ws_per_message_deflate=False,  # costs memory and time per client, for little gain on one machine
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=SHUTDOWN_GRACE_SECONDS,
        backlog=LISTEN_BACKLOG_CONNECTIONS,
    )


def _build_authenticator(
    config: Config, opened: App, tokens: TokenRegistry, host: str, port: int
) -> Authenticator:
    """Return the authenticator for this configuration. Blocks (files, commands for secrets): call it in a thread."""
    auth = config.gateway.auth
    origins = [*list_own_origins(host, port), *config.gateway.control_ui.allowed_origins]
    return Authenticator(
        mode=auth.mode,
        tokens=tokens,
        owner=build_owner_record(auth.token.reveal()) if auth.token else None,
        password=auth.password.reveal() if auth.password else None,
        origins=origins,
        clock=opened.clock,
    )


def choose_listen_address(config: Config) -> str:
    """Return the host to listen on: loopback unless the configuration sets another.

    Raises:
        ConfigError: the configuration does not determine an address.
    """
    gateway = config.gateway
    match gateway.bind:
        case "loopback" | "auto":
            return "127.0.0.1"
        case "lan":
            return "0.0.0.0"  # noqa: S104 - asked for, and never without auth
        case "custom":
            return gateway.custom_bind_host or "127.0.0.1"
        case "tailnet":
            raise ConfigError(*TAILNET_ERROR, path="gateway.bind")


def open_listener(host: str, port: int) -> socket.socket:
    """Return a socket that is bound and listening.

    Raises:
        ConfigError: this machine does not have the address.
        Unavailable: the port could not be bound.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With an explicit protocol asyncio sets TCP_NODELAY; otherwise Nagle's algorithm delays small responses.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, TCP_USER_TIMEOUT_MS)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        what = f"Cannot listen on {host}:{port} ({error.strerror})."
        if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
            hint = "Set gateway.customBindHost to an address of this machine."
            raise ConfigError(what, hint, path="gateway.customBindHost") from error
        hint = "Stop the process that uses that port, or choose another with --port (0 for any free one)."
        raise Unavailable(what, hint, port=port) from error
    return listener


def _format_url(host: str, port: int) -> str:
    address = "127.0.0.1" if host == "0.0.0.0" else host  # noqa: S104
    return f"ws://[{address}]:{port}" if ":" in address else f"ws://{address}:{port}"
