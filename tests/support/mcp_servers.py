"""MCP servers for tests: the real one as a process on stdio or HTTP, and the client of a gateway in this process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from antiphon.access import Caller
from antiphon.clock import SystemClock
from antiphon.config import Config, parse
from antiphon.engine.toolbox import Toolbox, ToolOutput, ToolRequest
from antiphon.mcp.servers import McpServers
from antiphon.workspace.sandbox import Sandboxes

SERVER_FILE = Path(__file__).with_name("mcp_server.py")
SCRIPTED_SERVER_FILE = Path(__file__).with_name("scripted_mcp_server.py")
BOUND = 60.0  # seconds after which any wait of a test is a failure
MAIN = Caller.agent("main", "agent:main:main")


def describe_stdio_server(**settings: Any) -> dict[str, Any]:
    """Return the configuration of the real server as a program."""
    return {"command": sys.executable, "args": [str(SERVER_FILE), "stdio"], **settings}


def describe_scripted_server(mode: str, **settings: Any) -> dict[str, Any]:
    """Return the configuration of a server that starts fast and behaves as `mode` says."""
    return {"command": sys.executable, "args": ["-I", "-S", str(SCRIPTED_SERVER_FILE), mode], **settings}


class HttpServer:
    """The real server on HTTP, which can be killed and started again on the same port."""

    def __init__(self, variables: Mapping[str, str], mode: str) -> None:
        self._mode = mode
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self._variables = variables
        self._process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/mcp"

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(SERVER_FILE),
            self._mode,
            str(self.port),
            env={**os.environ, **self._variables},
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        async with asyncio.timeout(BOUND):
            while not await self._is_listening():  # the server does not say when it is ready
                assert self._process.returncode is None
                await asyncio.sleep(0.05)

    async def _is_listening(self) -> bool:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", self.port)
        except OSError:
            return False
        writer.close()
        return True

    async def stop(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(signal.SIGKILL)
            await self._process.wait()


@asynccontextmanager
async def run_http_server(mode: str = "http", **variables: str) -> AsyncGenerator[HttpServer]:
    server = HttpServer(variables, mode)
    try:
        await server.start()
        yield server
    finally:
        await server.stop()


class ClientFixture:
    """The MCP servers of a gateway, without the gateway."""

    def __init__(self, servers: McpServers, toolbox: Toolbox, config: Config) -> None:
        self.servers = servers
        self.toolbox = toolbox
        self.config = config
        self._calls = 0

    @property
    def states(self) -> dict[str, str]:
        return {each["name"]: each["state"] for each in self.servers.describe()}

    async def prepare(self) -> None:
        """Do what a run does before it starts."""
        await self.servers.prepare_run(self.config.get_agent("main").tools.selection)

    async def call(self, name: str, /, *, caller: Caller = MAIN, **arguments: Any) -> ToolOutput:
        self._calls += 1
        request = ToolRequest(caller=caller, run_id="run", call_id=f"call{self._calls}", arguments=arguments)
        async with asyncio.timeout(BOUND):
            return await self.toolbox.tools[name].invoke(request)


@asynccontextmanager
async def open_client(
    state_dir: Path, servers: Mapping[str, Any], **config: Any
) -> AsyncGenerator[ClientFixture]:
    """Use servers as a gateway with this configuration does."""
    parsed, _ = parse({"mcp": {"servers": servers}, **config})
    toolbox = Toolbox()
    client = McpServers(parsed, state_dir, SystemClock(), toolbox, Sandboxes(parsed, state_dir).wrap)
    try:
        await client.load()
        yield ClientFixture(client, toolbox, parsed)
    finally:
        await client.aclose()


def find_processes(text: str) -> list[int]:
    """Return the processes whose command line or environment has a text."""
    found: list[int] = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            facts = (folder / "cmdline").read_bytes() + (folder / "environ").read_bytes()
            state = (folder / "stat").read_bytes().rpartition(b")")[2].split()[0]
        except OSError:
            continue
        if text.encode() in facts and state != b"Z" and int(folder.name) != os.getpid():
            found.append(int(folder.name))
    return found


def find_command_lines(text: str) -> list[bytes]:
    """Return the command lines, which every user can read, that have a text."""
    found: list[bytes] = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found.append(file.read_bytes())
    return [line for line in found if text.encode() in line]


async def wait_until(condition: Any, what: str) -> None:
    """Wait for an observable fact."""
    async with asyncio.timeout(BOUND):
        while not condition():  # noqa: ASYNC110 - processes and files do not tell
            await asyncio.sleep(0.02)
    assert condition(), what
