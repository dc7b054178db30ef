"""Offers the programs of ACP agents the tools of their own sessions, over MCP.

A program on this machine uses `/mcp` with a secret that is valid only there, only for its session, and only while it
runs. It is told the secret as a header, or starts `antiphon mcp serve`, which reads it from a private file: it is never
in a command line, where every user could read it. A program in a sandbox opens a socket on the loopback inside, which
nothing else can reach, and is answered there without any secret; the rest of the gateway stays out of its reach.

Calls belong to the run of the program's turn, as those of a model do: its chain, its waits, its end. Between turns they
are refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import secrets
import shutil
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
from starlette.types import ASGIApp
from uvicorn.server import ServerState

from antiphon.engine.toolbox import Tool, ToolOutput
from antiphon.errors import Conflict, Forbidden, Unauthorized, Unavailable
from antiphon.gateway.auth import PROGRAM_SECRET_PREFIX, find_bearer_token
from antiphon.gateway.http.limits import create_http_protocol
from antiphon.gateway.http.responses import cancel_and_wait
from antiphon.gateway.mcp import (
    SESSION_INSTRUCTIONS,
    Actor,
    BeginCall,
    McpClient,
    read_session_key,
    select_offered_tools,
)
from antiphon.gateway.state import GatewayState
from antiphon.paths import PROGRAM_SECRETS_DIRECTORY_NAME
from antiphon.runtimes.acp.session_tools import ProgramConnection
from antiphon.runtimes.turns import TurnIdentity
from antiphon.workspace.sandbox_network import TOOLS_HOST, TOOLS_PORT

log = logging.getLogger(__name__)

SERVER_NAME = "antiphon"
MAX_CALLS_PER_PROGRAM = 16  # at the same time
MAX_CONNECTIONS_PER_PROGRAM = 16  # from a sandbox
GATEWAY_START_TIMEOUT_SECONDS = 30.0  # a turn may be resumed before the gateway listens
LISTENER_TIMEOUT_SECONDS = 5.0  # for a socket that was opened before the program answered


class _Endpoint(msgspec.Struct, frozen=True):
    """The gateway, once it listens."""

    gateway: GatewayState
    url: str
    """Of its HTTP, without a path."""
    build_app: Callable[[McpClient], ASGIApp]
    """Builds the application that answers one program in its sandbox."""


class ProgramToolServer:
    """The programs of this gateway that have been offered tools (`SessionToolServer`)."""

    def __init__(self) -> None:
        self._endpoint: asyncio.Future[_Endpoint] = asyncio.get_running_loop().create_future()
        self._programs: dict[bytes, ProgramTools] = {}
        """By the digest of their secret, so that the time of a search tells nothing about a secret."""

    async def attach(
        self, gateway: GatewayState, url: str, build_app: Callable[[McpClient], ASGIApp]
    ) -> None:
        """Begin to offer tools, when the gateway listens. Secrets that a killed one left behind are void."""
        await asyncio.to_thread(shutil.rmtree, _get_secrets_directory(gateway), ignore_errors=True)
        self._endpoint.set_result(_Endpoint(gateway, url, build_app))

    async def open(self, identity: TurnIdentity, connection: ProgramConnection) -> ProgramTools | None:
        await asyncio.wait([self._endpoint], timeout=GATEWAY_START_TIMEOUT_SECONDS)
        if not self._endpoint.done():
            log.warning("The gateway does not listen; %r gets no tools of its session", identity.session_key)
            return None
        endpoint = self._endpoint.result()
        tools = ProgramTools(endpoint.gateway, identity, connection)
        if not endpoint.gateway.app.config.gateway.mcp.enabled or not tools.select_tools():
            return None
        try:
            if connection.is_sandboxed:
                return await self._serve_sandboxed(tools, endpoint, connection)
            return await self._serve_locally(tools, endpoint, connection)
        except OSError as error:
            log.warning("%r gets no tools of its session: %s", identity.session_key, error)
            return None

    async def _serve_locally(
        self, tools: ProgramTools, endpoint: _Endpoint, connection: ProgramConnection
    ) -> ProgramTools:
        secret = PROGRAM_SECRET_PREFIX + secrets.token_urlsafe(32)
        digest, file = _compute_digest(secret), None
        if connection.has_http and connection.keeps_headers_private:
            server = build_http_server(f"{endpoint.url}/mcp", secret)
        else:
            file = _get_secrets_directory(endpoint.gateway) / secrets.token_hex(8)
            await asyncio.to_thread(_write_secret, file, secret)
            server = build_stdio_server(endpoint.url, file)
        self._programs[digest] = tools
        tools.offer(server, lambda: self._programs.pop(digest, None), file)
        return tools

    async def _serve_sandboxed(
        self, tools: ProgramTools, endpoint: _Endpoint, connection: ProgramConnection
    ) -> ProgramTools | None:
        if connection.listener is None or not connection.has_http:
            return None
        await asyncio.wait([connection.listener], timeout=LISTENER_TIMEOUT_SECONDS)
        if not connection.listener.done():
            log.warning("The sandbox of %r opened no socket for its tools", tools.session_key)
            return None
        server = SandboxServer(endpoint.build_app(tools))
        await server.start(connection.listener.result())
        tools.offer(build_http_server(f"http://{TOOLS_HOST}:{TOOLS_PORT}/mcp", None), server.close)
        return tools

    def find(self, headers: Mapping[str, str]) -> ProgramTools | None:
        """Return the running program whose secret a request has.

        Raises:
            Forbidden: the request names another session.
        """
        secret = find_bearer_token(headers)
        if secret is None or not secret.startswith(PROGRAM_SECRET_PREFIX):
            return None
        tools = self._programs.get(_compute_digest(secret))
        if tools is None or not tools.is_valid:
            return None
        if read_session_key(headers) not in (None, tools.session_key):
            raise Forbidden(
                f"This secret is valid for the session {tools.session_key!r} only.",
                "Leave the header X-Antiphon-Session-Key out.",
            )
        return tools


class ProgramTools:
    """A program as a client of MCP: it acts as its session (`OfferedTools`, `McpClient`)."""

    instructions = SESSION_INSTRUCTIONS
    may_act = True

    def __init__(self, gateway: GatewayState, identity: TurnIdentity, connection: ProgramConnection) -> None:
        self.session_key = identity.session_key
        self.server: dict[str, Any] = {}
        self._gateway = gateway
        self._identity = identity
        self._connection = connection
        self._is_in_turn = False
        self._calls: set[asyncio.Task[ToolOutput]] = set()
        self._is_closed = False
        self._release: Callable[[], object] = lambda: None
        self._secret_file: Path | None = None

    def offer(
        self, server: dict[str, Any], release: Callable[[], object], secret_file: Path | None = None
    ) -> None:
        """Set the MCP server that the program is told to use. `release` withdraws it."""
        self.server, self._release, self._secret_file = server, release, secret_file

    @property
    def is_valid(self) -> bool:
        return not self._is_closed and self._connection.is_alive()

    # --- turns ---

    def begin_turn(self, identity: TurnIdentity) -> None:
        self._identity, self._is_in_turn = identity, True

    async def end_turn(self) -> None:
        self._is_in_turn = False
        await cancel_and_wait(*self._calls)

    async def close(self) -> None:
        self._is_closed = True
        self._release()
        await self.end_turn()
        if self._secret_file is not None:
            await asyncio.to_thread(self._secret_file.unlink, missing_ok=True)

    # --- requests ---

    def select_tools(self) -> dict[str, Tool]:
        app, caller = self._gateway.app, self._identity.caller
        offered = select_offered_tools(
            app.config, app.toolbox.tools, self._identity.tool_names & app.toolbox.names
        )
        return {name: tool.adapt_to_agent(caller.agent_id or "") for name, tool in offered.items()}

    async def load_actor(self) -> Actor:
        self.require_valid()
        return Actor(self._identity.caller, self.select_tools(), self._identity.run_id)

    def require_may_act(self) -> None:
        """Do nothing: what a session's agent may do is decided by the tools."""

    def require_valid(self) -> None:
        if not self.is_valid:
            raise Unauthorized(
                "The program that this secret was issued for has ended.", "Start the program again."
            )

    async def make_call(self, call: BeginCall) -> ToolOutput:
        """Await a tool until the turn ends."""
        if not self._is_in_turn:
            raise Conflict(
                f"No turn of the session {self.session_key!r} is running.",
                "Call its tools while you answer a message.",
            )
        if len(self._calls) >= MAX_CALLS_PER_PROGRAM:
            raise Unavailable(
                f"{MAX_CALLS_PER_PROGRAM} calls of this program are waiting.",
                "Wait for one of them to finish.",
            )
        task = asyncio.create_task(call())
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        try:
            await asyncio.wait([task])
        finally:
            await cancel_and_wait(task)
        if task.cancelled():
            raise Conflict("The turn has ended.", "Check what the call has done before you repeat it.")
        return task.result()


class SandboxServer:
    """Answers one program on the socket that it has opened in its sandbox."""

    def __init__(self, app: ASGIApp) -> None:
        self._config = uvicorn.Config(
            app,
            http=create_http_protocol(),
            ws="none",
            lifespan="off",
            limit_concurrency=MAX_CONNECTIONS_PER_PROGRAM + 1,
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
        )
        self._state = ServerState()
        self._server: asyncio.Server | None = None

    async def start(self, listener: socket.socket) -> None:
        """Accept connections. Without `uvicorn.Server`, which would wake up ten times a second for each program."""
        config, state = self._config, self._state
        config.load()
        protocol: Any = config.http_protocol_class
        self._server = await asyncio.get_running_loop().create_server(
            lambda: protocol(config=config, server_state=state, app_state={}), sock=listener
        )

    def close(self) -> None:
        """Stop listening, and drop every connection, which ends what its requests wait for."""
        if self._server is not None:
            self._server.close()
        for connection in list(self._state.connections):
            transport: Any = connection.transport
            with contextlib.suppress(RuntimeError):
                transport.abort()


def build_http_server(url: str, secret: str | None) -> dict[str, Any]:
    headers = [] if secret is None else [{"name": "Authorization", "value": f"Bearer {secret}"}]
    return {"type": "http", "name": SERVER_NAME, "url": url, "headers": headers}


def build_stdio_server(url: str, secret_file: Path) -> dict[str, Any]:
    """Return the bridge of this installation. Without `-P`, a package in the program's directory could replace it."""
    bridge = ["-P", "-m", "antiphon", "mcp", "serve", "--url", url, "--token-file", str(secret_file)]
    return {"name": SERVER_NAME, "command": sys.executable, "args": bridge, "env": []}


def _get_secrets_directory(gateway: GatewayState) -> Path:
    return gateway.state_dir.absolute() / PROGRAM_SECRETS_DIRECTORY_NAME


def _write_secret(file: Path, secret: str) -> None:
    file.parent.mkdir(mode=0o700, exist_ok=True)
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w") as stream:
        stream.write(secret)


def _compute_digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode(errors="surrogatepass")).digest()
