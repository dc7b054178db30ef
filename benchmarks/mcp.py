"""What MCP and ACP cost: nothing without servers, little to serve sessions, to call a tool, to run a program's turn.

uv run python benchmarks/mcp.py            all of it, about a minute
uv run python benchmarks/mcp.py --quick    small sizes
uv run python benchmarks/mcp.py calls      only this part
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2

sys.path.append(sys.path.pop(0))  # else this file would be the library of its name
sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.support.mcp_servers import SCRIPTED_SERVER_FILE, run_http_server

from antiphon.access import Caller
from antiphon.app import open_app
from antiphon.clock import SystemClock
from antiphon.config import parse
from antiphon.engine.toolbox import Toolbox, ToolRequest
from antiphon.mcp.servers import McpServers
from antiphon.operations.types import IncomingMessage
from antiphon.runtimes import Prompt
from antiphon.runtimes.function import FunctionRuntime
from antiphon.store.sqlite.store import SqliteStore
from antiphon.workspace.sandbox import Sandboxes
from core import fill_sessions
from figures import Figure, at_most, main, timed
from gateway import Up, up

COUNTS = {"starts": 9, "sessions": 2_000, "calls": 400, "turns": 400}
QUICK = {"starts": 3, "sessions": 500, "calls": 100, "turns": 100}
TURNS_PER_SERIES = 10
MAIN = Caller.agent("main", "agent:main:main")
OPERATOR = Caller.operator()
SCRIPTED_AGENT_FILE = SCRIPTED_SERVER_FILE.with_name("scripted_acp_agent.py")
REVISION = "2026-07-28"
CLIENT_META = {
    "io.modelcontextprotocol/protocolVersion": REVISION,
    "io.modelcontextprotocol/clientInfo": {"name": "benchmark", "version": "1"},
    "io.modelcontextprotocol/clientCapabilities": {},
}
IMPORTED = """
import asyncio, resource, sys, tempfile, time
began = time.perf_counter()
from pathlib import Path
from antiphon.app import open_app
from antiphon.config import parse
async def run():
    async with open_app(parse({config})[0], Path(tempfile.mkdtemp())):
        print((time.perf_counter() - began) * 1000, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
        print(sum(name == "mcp" or name.startswith(("mcp.", "antiphon.mcp")) for name in sys.modules))
asyncio.run(run())
"""


def _build_call(number: int, tool: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    params = {"name": tool, "arguments": arguments, "_meta": CLIENT_META}
    return {"jsonrpc": "2.0", "id": number, "method": "tools/call", "params": params}


def _open_app_in_process(config: Mapping[str, Any]) -> tuple[float, float, int]:
    """Milliseconds until an app is open, its memory in MiB, and how many modules of MCP it has imported."""
    ran = subprocess.run(
        [sys.executable, "-c", IMPORTED.replace("{config}", repr(config))],
        capture_output=True,
        text=True,
        check=True,
    )
    started, memory, modules = ran.stdout.split()
    return float(started), float(memory), int(modules)


async def nothing(counts: dict[str, int]) -> list[Figure]:
    """Alternately without the section, and with a server that is switched off."""
    plain: list[tuple[float, float, int]] = []
    unused: list[tuple[float, float, int]] = []
    off = {"mcp": {"servers": {"off": {"command": "prog", "disabled": True}}}}
    for _ in range(counts["starts"]):
        plain.append(await asyncio.to_thread(_open_app_in_process, {}))
        unused.append(await asyncio.to_thread(_open_app_in_process, off))
    return [
        at_most("modules of MCP in an app without servers", max(each[2] for each in plain + unused), "", 1),
        at_most("an app without servers is open, best", min(each[0] for each in plain), "ms", 2000),
        at_most(
            "more for a server that is switched off",
            min(each[0] for each in unused) - min(each[0] for each in plain),
            "ms",
            50,
        ),
        at_most(
            "more memory for it", min(each[1] for each in unused) - min(each[1] for each in plain), "MiB", 1
        ),
    ]


@asynccontextmanager
async def _gateway(sessions: int) -> AsyncGenerator[tuple[Up, Path]]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        await (await SqliteStore.open(path / "antiphon.db")).close()
        fill_sessions(path / "antiphon.db", sessions)
        async with up(path, {"gateway": {"auth": {"mode": "none"}}}) as running:
            yield running, path


async def lists(counts: dict[str, int]) -> list[Figure]:
    """A `sessions_list` of a client, as a request to `/mcp` and through `antiphon mcp serve`."""
    arguments = {"limit": 20}
    async with _gateway(counts["sessions"]) as (running, path):
        url = f"http://127.0.0.1:{running.port}/mcp"
        headers = {
            "accept": "application/json, text/event-stream",
            "mcp-protocol-version": REVISION,
            "mcp-method": "tools/call",
            "mcp-name": "sessions_list",
        }
        async with httpx2.AsyncClient(trust_env=False, headers=headers) as http:

            async def ask() -> None:
                response = await http.post(url, json=_build_call(1, "sessions_list", arguments))
                _check_listed(_read_answer(response))

            before = running.process.memory_info().rss
            began = time.perf_counter()
            await ask()  # imports the library
            first = (time.perf_counter() - began) * 1000
            times = await timed(ask, counts["calls"])
            grown = (running.process.memory_info().rss - before) / 2**20
        over_stdio, started = await _list_over_stdio(path, arguments, counts["calls"])
    return [
        at_most("sessions_list through /mcp, p50", statistics.median(times), "ms", 12),
        at_most("sessions_list through stdio, p50", statistics.median(over_stdio), "ms", 12),
        at_most("start of `antiphon mcp serve` to its first answer", started, "ms", 2000),
        at_most("the first request to /mcp, which imports the library", first, "ms", 3000),
        at_most("memory of the gateway for it", grown, "MiB", 60),
    ]


def _read_answer(response: httpx2.Response) -> dict[str, Any]:
    text = response.text
    if response.headers["content-type"].startswith("text/event-stream"):
        text = next(line for line in text.splitlines() if line.startswith("data: {")).removeprefix("data: ")
    return json.loads(text)


def _check_listed(answer: dict[str, Any]) -> None:
    assert len(answer["result"]["structuredContent"]["sessions"]) == 20, answer


async def _list_over_stdio(
    state_dir: Path, arguments: Mapping[str, Any], calls: int
) -> tuple[list[float], float]:
    began = time.perf_counter()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "antiphon", "mcp", "serve", "--state-dir", str(state_dir)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=2**20,
    )
    assert process.stdin is not None and process.stdout is not None
    stdin, stdout, number = process.stdin, process.stdout, 0

    async def ask() -> None:
        nonlocal number
        number += 1
        stdin.write(json.dumps(_build_call(number, "sessions_list", arguments)).encode() + b"\n")
        _check_listed(json.loads(await stdout.readline()))

    try:
        await ask()
        started = (time.perf_counter() - began) * 1000
        return await timed(ask, calls), started
    finally:
        stdin.close()
        await process.wait()


async def calls(counts: dict[str, int]) -> list[Figure]:
    """A call of a tool by an agent, less what the same server needs for the same request without us."""
    figures: list[Figure] = []
    argv = [sys.executable, "-I", "-S", str(SCRIPTED_SERVER_FILE), "plain"]
    async with run_http_server() as http:
        servers = {"s": {"command": argv[0], "args": argv[1:]}, "h": {"url": http.url}}
        async with (
            _tools(servers) as call,
            _raw_program(argv) as ask_program,
            _raw_address(http.url) as ask_address,
        ):
            for name, ours, theirs in (
                ("stdio", lambda: call("mcp__s__echo", {"a": 1}), ask_program),
                ("HTTP", lambda: call("mcp__h__add", {"a": 1, "b": 2}), ask_address),
            ):
                own: list[float] = []
                added: list[float] = []
                for _ in range(5):  # alternately, since other work on the machine comes and goes
                    own.append(statistics.median(await timed(theirs, counts["calls"] // 5)))
                    added.append(statistics.median(await timed(ours, counts["calls"] // 5)) - own[-1])
                what = f"a call over {name} adds to {statistics.median(own):.2f} ms, p50"
                figures.append(at_most(what, statistics.median(added), "ms", 5))
    return figures


@asynccontextmanager
async def _tools(
    servers: Mapping[str, Any],
) -> AsyncGenerator[Callable[[str, Mapping[str, Any]], Awaitable[None]]]:
    config, _ = parse({"mcp": {"servers": servers}})
    toolbox, number = Toolbox(), 0
    with tempfile.TemporaryDirectory() as folder:
        client = McpServers(
            config, Path(folder), SystemClock(), toolbox, Sandboxes(config, Path(folder)).wrap
        )
        try:
            await client.load()
            await client.prepare_run(config.get_agent("main").tools.selection)

            async def call(name: str, arguments: Mapping[str, Any]) -> None:
                nonlocal number
                number += 1
                request = ToolRequest(
                    caller=MAIN, run_id="benchmark", call_id=str(number), arguments=dict(arguments)
                )
                assert not (await toolbox.tools[name].invoke(request)).is_error

            yield call
        finally:
            await client.aclose()


@asynccontextmanager
async def _raw_program(argv: list[str]) -> AsyncGenerator[Callable[[], Awaitable[None]]]:
    process = await asyncio.create_subprocess_exec(
        *argv, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, env=dict(os.environ)
    )
    assert process.stdin is not None and process.stdout is not None
    stdin, stdout = process.stdin, process.stdout

    async def ask() -> None:
        stdin.write(json.dumps(_build_call(1, "echo", {"a": 1})).encode() + b"\n")
        assert b'"result"' in await stdout.readline()

    try:
        yield ask
    finally:
        stdin.close()
        await process.wait()


@asynccontextmanager
async def _raw_address(url: str) -> AsyncGenerator[Callable[[], Awaitable[None]]]:
    headers = {
        "accept": "application/json, text/event-stream",
        "mcp-protocol-version": REVISION,
        "mcp-method": "tools/call",
        "mcp-name": "add",
    }
    async with httpx2.AsyncClient(trust_env=False, headers=headers) as http:

        async def ask() -> None:
            response = await http.post(url, json=_build_call(1, "add", {"a": 1, "b": 2}))
            assert "result" in _read_answer(response), response.text

        yield ask


async def turns(counts: dict[str, int]) -> list[Figure]:
    """The gateway's CPU time for a turn of a minimal ACP program, less that for one of a Python function.

    A function reads the history in every turn and a program does not, so the function's sessions are short.
    """

    async def answer(_: Prompt) -> str:
        return "/"

    program = {"command": sys.executable, "args": ["-I", "-S", str(SCRIPTED_AGENT_FILE)], "cwd": "/"}
    agents = [{"id": "main"}, {"id": "coder", "runtime": {"type": "acp", "acp": program}}]
    config, _ = parse({"agents": {"list": agents}})
    functions = {"main": FunctionRuntime(answer)}
    own: list[float] = []
    added: list[float] = []
    walls: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        async with open_app(config, Path(folder), functions=functions) as app:

            async def turn(session: str) -> None:
                message = IncomingMessage(session=session, content="cwd")
                accepted = await app.operations.messages.submit(OPERATOR, message)
                view = await app.operations.runs.wait(OPERATOR, accepted.run_id, 60)
                assert (view.reply or "").strip() == "/", view

            async def measure(session: str) -> float:
                before = time.process_time()
                walls[:] = await timed(lambda: turn(session), TURNS_PER_SERIES)
                return (time.process_time() - before) * 1000 / TURNS_PER_SERIES

            await turn("agent:coder:main")  # imports the library and starts the process
            for number in range(
                counts["turns"] // TURNS_PER_SERIES
            ):  # alternately, for other work comes and goes
                await turn(f"agent:main:direct:{number}")  # creates the session
                own.append(await measure(f"agent:main:direct:{number}"))
                added.append(await measure("agent:coder:main") - own[-1])
    what = f"CPU that an ACP program adds to {statistics.median(own):.2f} ms"
    return [
        at_most(what, statistics.median(added), "ms", 10),
        at_most("… its turn, wall clock, p50", statistics.median(walls), "ms", 50),
    ]


if __name__ == "__main__":
    main(__doc__, {"nothing": nothing, "lists": lists, "calls": calls, "turns": turns}, COUNTS, QUICK)
