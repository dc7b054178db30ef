"""The processes and connections of MCP servers: restarts, kills, logins, and how many there are."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from antiphon.errors import McpServerUnavailable, ToolFailed
from antiphon.mcp import servers
from cli.gateways import connect, up
from cli.terminal import Program
from support.mcp_servers import (
    BOUND,
    describe_scripted_server,
    describe_stdio_server,
    find_processes,
    open_client,
    run_http_server,
    wait_until,
)
from support.model_provider import Answer, Call, Provider

pytestmark = [pytest.mark.anyio, pytest.mark.sqlite_only]

SESSIONS, SERVERS = 100, 3
MARK = "MCP_TEST_MARK"


def read_pids(file: Path) -> list[int]:
    return [int(word) for word in file.read_text().split()] if file.exists() else []


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z"
    except OSError:
        return False


def read_parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


# --- restarts and lost connections ---


@pytest.mark.requirement("AT17")
async def test_the_first_call_after_a_restart_succeeds(tmp_path: Path) -> None:
    starts = tmp_path / "starts"
    async with run_http_server() as http:
        servers = {
            "s": describe_scripted_server("plain", env={"STARTS_FILE": str(starts)}),
            "h": {"url": http.url},
        }
        async with open_client(tmp_path, servers) as client:
            await client.prepare()
            for _ in range(3):
                os.kill(read_pids(starts)[-1], signal.SIGKILL)
                await http.stop()
                await http.start()
                assert (await client.call("mcp__s__echo", a=1)).text == '{"a": 1}'
                assert (await client.call("mcp__h__add", a=1, b=2)).text == "3"
            assert client.states == {"s": "ready", "h": "ready"}


@pytest.mark.requirement("AT17")
async def test_a_call_while_a_server_is_down_was_not_sent_and_the_next_one_succeeds(tmp_path: Path) -> None:
    async with run_http_server() as http, open_client(tmp_path, {"h": {"url": http.url}}) as client:
        await client.prepare()
        await http.stop()
        with pytest.raises(McpServerUnavailable, match="connection was refused"):
            await client.call("mcp__h__add", a=1, b=2)
        assert client.states == {"h": "failed"}
        assert client.toolbox.tools["mcp__h__add"].explain_absence("main", is_sandboxed=False) is not None
        await http.start()
        await client.prepare()  # as the next run does
        assert client.toolbox.tools["mcp__h__add"].explain_absence("main", is_sandboxed=False) is None
        assert (await client.call("mcp__h__add", a=1, b=2)).text == "3"


@pytest.mark.requirement("AT17")
async def test_a_call_that_the_server_may_have_received_is_not_repeated(tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    async with run_http_server(CALLS_FILE=str(calls)) as http:
        servers = {"s": describe_stdio_server(env={"CALLS_FILE": str(calls)}), "h": {"url": http.url}}
        async with open_client(tmp_path, servers) as client:
            await client.prepare()
            for number, server in enumerate(("s", "h"), 1):
                with pytest.raises(ToolFailed, match="lost after the request had been sent"):
                    await client.call(f"mcp__{server}__die")
                assert calls.read_text() == "die\n" * number
            assert (await client.call("mcp__s__add", a=1, b=2)).text == "3"


@pytest.mark.requirement("AT17")
async def test_a_trusted_server_is_asked_once_more_with_the_same_key(tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    server = describe_stdio_server(env={"CALLS_FILE": str(calls)})
    servers = {"trusted": {**server, "trust": True}, "plain": server}
    async with open_client(tmp_path, servers) as client:
        await client.prepare()
        done = await client.call("mcp__trusted__die_once", marker=str(tmp_path / "one"))
        assert done.text == "survived"
        first, second = calls.read_text().splitlines()
        assert first == second == "die_once run:call1"
        with pytest.raises(ToolFailed):
            await client.call("mcp__plain__die_once", marker=str(tmp_path / "two"))
        assert len(calls.read_text().splitlines()) == 3


@pytest.mark.requirement("AT17")
async def test_a_connection_that_breaks_harms_no_other_call(tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    async with (
        run_http_server(CALLS_FILE=str(calls)) as http,
        forwarding(http.port, breaking_at=b"777001") as port,
        open_client(tmp_path, {"h": {"url": f"http://127.0.0.1:{port}/mcp"}}) as client,
    ):
        await client.prepare()
        waiting = asyncio.create_task(client.call("mcp__h__wait", seconds=1))
        await wait_until(calls.exists, "the first call has not arrived")
        with pytest.raises(ToolFailed, match="lost after the request had been sent"):
            await client.call("mcp__h__add", a=777001, b=1)
        assert (await waiting).text == "waited"
        assert (await client.call("mcp__h__look")).text == "seen"


@asynccontextmanager
async def forwarding(port: int, *, breaking_at: bytes) -> AsyncGenerator[int]:
    """Forward connections, and break those that send a word."""

    async def copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while (data := await source.read(65536)) and breaking_at not in data:
                target.write(data)
        target.close()

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_server, to_server = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(copy(reader, to_server), copy(from_server, writer))

    async with await asyncio.start_server(forward, "127.0.0.1", 0) as listener:
        yield listener.sockets[0].getsockname()[1]


@pytest.mark.requirement("AT17")
async def test_calls_in_flight_end_when_their_server_is_killed(tmp_path: Path) -> None:
    """Each says that it may have had effects; none hangs, and no caller is cancelled."""
    calls = tmp_path / "calls"
    async with (
        run_http_server(CALLS_FILE=str(calls)) as http,
        open_client(tmp_path, {"h": {"url": http.url}}) as client,
    ):
        await client.prepare()
        waiting = [asyncio.create_task(client.call("mcp__h__wait", seconds=BOUND)) for _ in range(8)]
        await wait_until(lambda: calls.exists() and calls.read_text().count("wait") == 8, "not all arrived")
        await http.stop()
        ended = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(isinstance(each, ToolFailed) and each.data["sent"] for each in ended), ended


# --- one server is down ---


@pytest.mark.requirement("AT18")
async def test_servers_that_are_down_delay_no_other(tmp_path: Path) -> None:
    async def accept_and_say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async with await asyncio.start_server(accept_and_say_nothing, "127.0.0.1", 0) as listener:
        port = listener.sockets[0].getsockname()[1]
        servers = {
            "good": describe_scripted_server("plain"),
            "missing": {"command": "/does/not/exist"},
            "ended": describe_scripted_server("exit"),
            "refused": {"url": "http://127.0.0.1:9/mcp"},
            "silent": describe_scripted_server("silent"),
            "stuck": {"url": f"http://127.0.0.1:{port}/mcp"},
        }
        began = time.monotonic()
        async with open_client(tmp_path, servers) as client:
            assert time.monotonic() - began < 1, "the start waits for servers"
            client.servers.begin_warm_up()
            await wait_until(lambda: client.states["good"] == "ready", "the good server is not ready")
            assert (await client.call("mcp__good__echo", a=1)).text == '{"a": 1}'
            await wait_until(lambda: client.states["refused"] == "failed", "not noticed")
            await wait_until(lambda: client.states["ended"] == "failed", "not noticed")
            reasons = {each["name"]: each.get("reason", "") for each in client.servers.describe()}
            assert "No such file or directory" in reasons["missing"]
            assert "cannot find the database" in reasons["ended"] and "\x1b" not in reasons["ended"]
            assert reasons["refused"] == "the connection was refused or failed"
            assert client.states["silent"] == client.states["stuck"] == "starting"
        assert find_processes(str(tmp_path)) == []


@pytest.mark.requirement("AT18")
async def test_a_server_that_is_slow_to_start_delays_the_runs_of_its_first_seconds_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "FIRST_LISTING_WAIT_SECONDS", 1.0)
    async with open_client(tmp_path, {"silent": describe_scripted_server("silent")}) as client:
        durations: list[float] = []
        for _ in range(2):
            began = time.monotonic()
            await client.prepare()
            durations.append(time.monotonic() - began)
            assert client.states == {"silent": "starting"}
        assert durations[0] >= 1.0 > durations[1] * 2


# --- processes ---


@asynccontextmanager
async def count_processes(mark: str) -> AsyncGenerator[list[int]]:
    """Count the processes of servers all the time."""
    counts: list[int] = []

    async def count() -> None:
        while True:
            pids = await asyncio.to_thread(find_processes, f"{MARK}={mark}")
            counts.append(len(pids))
            await asyncio.sleep(0.02)

    task = asyncio.create_task(count())
    try:
        yield counts
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.requirement("AT16")
async def test_there_are_never_more_processes_than_servers(tmp_path: Path) -> None:
    """A hundred sessions call three servers, one of which ignores its end, while servers and gateways come and go."""
    mark = os.urandom(8).hex()
    starts = tmp_path / "starts"
    env = {MARK: mark, "STARTS_FILE": str(starts)}
    servers = {
        f"s{number}": describe_scripted_server("deaf" if number == 0 else "plain", env=env)
        for number in range(SERVERS)
    }
    async with count_processes(mark) as counts:
        for _ in range(3):
            async with open_client(tmp_path, servers) as client:
                await client.prepare()

                async def call(number: int, client: Any = client) -> None:
                    if number % 20 == 0:
                        with suppress(ProcessLookupError):
                            os.kill(read_pids(starts)[-1], signal.SIGKILL)
                    with suppress(ToolFailed):  # its server was killed meanwhile
                        await client.call(f"mcp__s{number % SERVERS}__echo", number=number)

                await asyncio.gather(*(call(number) for number in range(SESSIONS)))
    assert 0 < max(counts) <= SERVERS, max(counts)
    assert find_processes(f"{MARK}={mark}") == []


@pytest.mark.requirement("AT16")
async def test_nothing_is_left_of_a_server_that_starts_others(tmp_path: Path) -> None:
    mark = os.urandom(8).hex()
    async with open_client(tmp_path, {"s": describe_stdio_server(env={MARK: mark})}) as client:
        await client.prepare()
        orphan = int((await client.call("mcp__s__leave_behind")).text)
        assert is_alive(orphan)
        with pytest.raises(ToolFailed):
            await client.call("mcp__s__die")
        await wait_until(lambda: not is_alive(orphan), "it outlives its server")
        await client.call("mcp__s__leave_behind")
    assert find_processes(f"{MARK}={mark}") == []


KILLED_GATEWAY = """
import asyncio, sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from support.mcp_servers import describe_scripted_server, describe_stdio_server, open_client

async def main():
    servers = {{
        "deaf": describe_scripted_server("deaf", env={env!r}),
        "tree": describe_stdio_server(env={env!r}),
    }}
    async with open_client(Path({state!r}), servers) as client:
        await client.prepare()
        await client.call("mcp__tree__leave_behind")
        print("ready", flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


def start_gateway(state: Path, mark: str) -> subprocess.Popen[str]:
    tests = str(Path(__file__).parents[1])
    program = KILLED_GATEWAY.format(tests=tests, env={MARK: mark}, state=str(state))
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


@pytest.mark.requirement("AT16")
async def test_nothing_survives_a_killed_gateway(tmp_path: Path) -> None:
    """Not even what ignores the end of its input and has left its session."""
    mark = os.urandom(8).hex()
    gateway = await asyncio.to_thread(start_gateway, tmp_path, mark)
    assert len(find_processes(f"{MARK}={mark}")) >= 3
    gateway.kill()
    gateway.communicate()
    await wait_until(lambda: find_processes(f"{MARK}={mark}") == [], "processes are left")


@pytest.mark.requirement("AT16")
async def test_a_start_ends_what_a_killed_gateway_and_its_launcher_left(tmp_path: Path) -> None:
    mark = os.urandom(8).hex()
    gateway = await asyncio.to_thread(start_gateway, tmp_path, mark)
    launchers = [
        pid
        for pid in find_processes("antiphon/child_processes/launcher.py")
        if read_parent(pid) == gateway.pid
    ]
    for pid in [gateway.pid, *launchers]:
        os.kill(pid, signal.SIGKILL)
    gateway.communicate()
    left = [pid for pid in find_processes(f"{MARK}={mark}") if is_alive(pid)]
    assert left, "the test needs a process that its gateway could not end"
    async with open_client(tmp_path, {"s": describe_scripted_server("plain")}) as client:
        await client.prepare()
        assert find_processes(f"{MARK}={mark}") == []


@pytest.mark.requirement("AT16", "AT17")
async def test_a_killed_gateway_reports_its_call_and_starts_anew(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The whole way: kill -9 of `antiphon up` in the middle of a call, and what the model reads then."""
    mark, calls = os.urandom(8).hex(), tmp_path / "calls"
    program = Program(tmp_path, tmp_path_factory.getbasetemp().parent / "antiphon-bytecode")
    server = describe_scripted_server("plain", env={"CALLS_FILE": str(calls), MARK: mark})
    async with Provider().running() as provider:
        program.configure(
            {
                "models": {
                    "providers": {"local": {"baseUrl": f"{provider.url}/v1", "models": [{"id": "m"}]}}
                },
                "mcp": {"servers": {"slow": server}},
            }
        )
        provider.script(
            Answer(calls=(Call("mcp__slow__hang", "{}", "call_1"),)), Answer(text=("I will check.",))
        )
        with up(program) as gateway:
            async with connect(gateway, program) as client:
                sent = await client.call(
                    "chat.send", {"sessionKey": "main", "message": "Go.", "idempotencyKey": "1"}
                )
                await wait_until(calls.exists, "the call has not arrived")
            gateway.stop(signal.SIGKILL)
            await wait_until(
                lambda: find_processes(f"{MARK}={mark}") == [], "the server outlives its gateway"
            )
        with up(program) as gateway:
            async with connect(gateway, program) as client:
                ended = await client.call(
                    "agent.wait", {"runId": sent["runId"], "timeoutMs": int(BOUND * 1000)}, seconds=BOUND
                )
            assert ended["reply"] == "I will check.", ended
            assert gateway.stop() == 0
    assert calls.read_text() == "hang\n"
    result = provider.bodies[-1]["messages"][-1]
    assert result["role"] == "tool" and "interrupted" in result["content"].lower()
    assert find_processes(f"{MARK}={mark}") == []


@pytest.mark.requirement("M1")
def test_a_gateway_without_servers_does_not_import_the_library() -> None:
    program = (
        "import asyncio, sys, tempfile, pathlib\n"
        "from antiphon.app import open_app\n"
        "from antiphon.config import parse\n"
        "async def main():\n"
        "    async with open_app(parse({})[0], pathlib.Path(tempfile.mkdtemp())) as app:\n"
        "        assert app.mcp_servers is None\n"
        "asyncio.run(main())\n"
        "found = [name for name in sys.modules if name == 'mcp' or name.startswith(('mcp.', 'antiphon.mcp'))]\n"
        "assert found == [], found\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=BOUND, check=False
    )
    assert done.returncode == 0, done.stderr
