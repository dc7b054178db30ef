"""One process, one port: the house behind the doors, listening until told to stop.

Everything is decided before the port is open: where to listen, whom to let in. Stopping says goodbye to clients,
ends streams, and leaves runs in flight for the next start, which takes them up.
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

from antiphon.config import Config
from antiphon.config.checks import TAILNET
from antiphon.errors import ConfigError, Unavailable
from antiphon.gateway import frames, note
from antiphon.gateway.app import App
from antiphon.gateway.auth import Guard, own_origins
from antiphon.gateway.gateway import Gateway
from antiphon.gateway.heads import bounded_protocol, most_connections
from antiphon.gateway.hub import Hub
from antiphon.gateway.line import LineProtocol
from antiphon.gateway.shared_tokens import SharedTokens
from antiphon.gateway.tokens import Tokens, configured
from antiphon.host import House, Options, house

GRACE = 5  # seconds that requests get to end when the process stops
BACKLOG = 2048
STALLED = 30_000  # ms after which the system gives up a peer that takes nothing


class Served(msgspec.Struct, frozen=True):
    """A gateway that is listening."""

    url: str
    gateway: Gateway
    hub: Hub
    ended: asyncio.Task[None]
    """Done when the server has stopped, by itself or because it was told to."""


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Generator[None]:
        """Signals are for whoever runs the process."""
        yield


@asynccontextmanager
async def serving(
    config: Config,
    state_dir: Path,
    *,
    port: int | None = None,
    tokens_dir: Path | None = None,
    **options: Unpack[Options],
) -> AsyncGenerator[Served]:
    """Host the directory and listen, until the context is left. Tokens may be kept elsewhere, for several to share."""
    host = address(config)
    most = most_connections()
    async with house(config, state_dir, **options) as opened:
        listener = listen(host, config.gateway.port if port is None else port)
        number = listener.getsockname()[1]
        try:
            tokens = await asyncio.to_thread(Tokens.open, tokens_dir or state_dir)
            guard = await asyncio.to_thread(_guard, config, opened, tokens, host, number)
            gateway = Gateway(house=opened, guard=guard, state_dir=state_dir, started_at=opened.clock.now())
            async with (
                _refreshing(opened, tokens),
                _listening(gateway, listener, _url(host, number), most) as served,
            ):
                yield served
        finally:
            listener.close()


@asynccontextmanager
async def _refreshing(opened: House, tokens: Tokens) -> AsyncGenerator[None]:
    """The tokens that replicas share, known before anyone is let in and kept up to date."""
    if not opened.store.shared:
        yield
        return
    shared = SharedTokens(opened.store, tokens)
    await shared.start()
    task = asyncio.create_task(shared.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def _listening(
    gateway: Gateway, listener: socket.socket, url: str, most: int
) -> AsyncGenerator[Served]:
    hub = Hub(gateway)
    app = App(gateway, hub)
    async with (
        app.web.open(),
        _answering(gateway, hub, _Server(_settings(app, most)), listener, url) as served,
    ):
        yield served


@asynccontextmanager
async def _answering(
    gateway: Gateway, hub: Hub, server: uvicorn.Server, listener: socket.socket, url: str
) -> AsyncGenerator[Served]:
    telling = asyncio.create_task(hub.run())
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        await _started(server, task)
        await asyncio.to_thread(note.write, gateway.state_dir, note.Note(url, os.getpid()))
        await gateway.house.introduce(url)
        yield Served(url, gateway, hub, task)
    finally:
        with suppress(OSError):
            note.remove(gateway.state_dir)
        gateway.closing.set()
        hub.say_goodbye("the gateway is stopping")
        server.should_exit = True
        telling.cancel()
        await asyncio.gather(task, telling, return_exceptions=True)


async def _started(server: uvicorn.Server, task: asyncio.Task[None]) -> None:
    while not server.started:
        if task.done():
            raise Unavailable("The gateway did not start.", "See the log for the reason.")
        await asyncio.sleep(0.001)


def _settings(app: App, most: int) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        loop="none",
        http=bounded_protocol(),
        limit_concurrency=most + 1,  # the protocol hangs up on one of them at this one
        ws=LineProtocol,
        ws_max_size=frames.MAX_BYTES,
        ws_per_message_deflate=False,  # memory and time for every client, for texts on one machine
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=GRACE,
        backlog=BACKLOG,
    )


def _guard(config: Config, opened: House, tokens: Tokens, host: str, port: int) -> Guard:
    """Reads files and may run commands for secrets, so it is called in a thread."""
    auth = config.gateway.auth
    origins = [*own_origins(host, port), *config.gateway.control_ui.allowed_origins]
    return Guard(
        mode=auth.mode,
        tokens=tokens,
        owner=configured(auth.token.reveal()) if auth.token else None,
        password=auth.password.reveal() if auth.password else None,
        origins=origins,
        clock=opened.clock,
    )


def address(config: Config) -> str:
    """Where to listen: on this machine only, unless the configuration says otherwise.

    Raises:
        ConfigError: which address is meant cannot be told.
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
            raise ConfigError(*TAILNET, path="gateway.bind")


def listen(host: str, port: int) -> socket.socket:
    """
    Raises:
        ConfigError: this machine has no such address, so that no port would do.
        Unavailable: the port cannot be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol named, asyncio sends small answers at once; without it, it leaves them to Nagle.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, STALLED)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        what = f"Cannot listen on {host}:{port} ({error.strerror})."
        if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
            hint = "Put an address of this machine into gateway.customBindHost."
            raise ConfigError(what, hint, path="gateway.customBindHost") from error
        hint = "Stop what uses that port, or choose another with --port (0 takes any free one)."
        raise Unavailable(what, hint, port=port) from error
    return listener


def _url(host: str, port: int) -> str:
    shown = "127.0.0.1" if host == "0.0.0.0" else host  # noqa: S104
    return f"ws://[{shown}]:{port}" if ":" in shown else f"ws://{shown}:{port}"
