"""`antiphon mcp serve`: the way that programs take which start MCP servers as commands."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from antiphon.mcp.server import stdio
from cli.gateways import token, up
from cli.terminal import BOUND, Program
from support.mcp_clients import GENERATIONS, Generation, Json, start_mcp, use_tool

pytestmark = [pytest.mark.anyio, pytest.mark.requirement("M2", "R")]

HELPER = "agent:helper:main"
CONFIG: Json = {
    "agents": {"list": [{"id": "main", "default": True}, {"id": "helper"}]},
    "tools": {"sessions": {"visibility": "all"}, "agentToAgent": {"enabled": True}},
}
INITIALIZE: Json = {
    "jsonrpc": "2.0",
    "id": 0,
    "method": "initialize",
    "params": {
        "protocolVersion": "2025-11-25",
        "capabilities": {},
        "clientInfo": {"name": "test", "version": "1"},
    },
}


def request(id: int, method: str, **params: Any) -> Json:
    return {"jsonrpc": "2.0", "id": id, "method": method, "params": params}


def call(id: int, tool: str, **arguments: Any) -> Json:
    return request(id, "tools/call", name=tool, arguments=arguments)


def serve(program: Program, *messages: Json | str, options: tuple[str, ...] = ()) -> dict[Any, Json]:
    """Give it these messages and the end of input; return what it answers, by id."""
    lines = [message if isinstance(message, str) else json.dumps(message) for message in messages]
    done = program.run("mcp", "serve", *options, stdin="".join(f"{line}\n" for line in lines))
    assert done.code == 0, done.err
    answers = [json.loads(line) for line in done.out.rstrip("\n").split("\n")]
    assert len({answer["id"] for answer in answers}) == len(answers)
    return {answer["id"]: answer for answer in answers}


@pytest.mark.requirement("S1", "S2", "P2", "H1", "L1")
@pytest.mark.parametrize("generation", GENERATIONS)
async def test_a_program_lists_sends_spawns_and_reads(program: Program, generation: Generation) -> None:
    """The whole way: what it did is where the person looks."""
    program.configure(CONFIG)
    with up(program):
        command = [*program.command, "mcp", "serve"]
        async with start_mcp(command, program.environ, generation) as client:
            assert client.protocol_version == generation
            assert (await use_tool(client, "sessions_list"))["count"] == 0
            sent = await use_tool(
                client, "sessions_send", agentId="helper", message="say pong", timeoutSeconds=BOUND
            )
            assert (sent["status"], sent["reply"]) == ("ok", "pong")
            read = await use_tool(client, "sessions_history", sessionKey=HELPER)
            assert [item["role"] for item in read["messages"]][:2] == ["user", "assistant"]
            spawned = await use_tool(client, "sessions_spawn", task="say 42", label="sum")
            assert spawned["status"] == "accepted"
        shown = program.run("sessions", "history", HELPER, "--json").json
        assert "say pong" in json.dumps(shown)
        assert "pong" in program.run("sessions", "history", HELPER).out
        until = time.monotonic() + BOUND
        while "42" not in (report := program.run("sessions", "history", "main").out):
            assert time.monotonic() < until, report
        assert "sum" in program.run("subagents", "list").out


def test_a_session_is_acted_as(program: Program) -> None:
    program.configure({**CONFIG, "tools": {"sessions": {"visibility": "self"}}})
    with up(program):
        listed = call(1, "sessions_list")
        answers = serve(program, INITIALIZE, listed, options=("--as", "agent:helper:dashboard:ü 1"))
        [row] = answers[1]["result"]["structuredContent"]["sessions"]
        assert row["key"] == "agent:helper:dashboard:ü 1"


@pytest.mark.parametrize("wrong", ["{not json", "[" * 5000])
def test_everything_received_is_answered_before_it_ends(program: Program, wrong: str) -> None:
    program.configure(CONFIG)
    with up(program):
        calls = [call(number, "sessions_list") for number in range(1, 30)]
        sent = call(30, "sessions_send", agentId="helper", message="say hi", timeoutSeconds=30)
        answers = serve(program, INITIALIZE, "", *calls, sent, request(31, "no/such"), wrong)
        assert answers.keys() == {*range(32), None}
        assert answers[0]["result"]["protocolVersion"] == "2025-11-25"
        assert all("structuredContent" in answers[number]["result"] for number in range(1, 31))
        assert answers[30]["result"]["structuredContent"]["reply"] == "hi"
        assert answers[31]["error"]["code"] == -32601
        assert answers[None]["error"]["code"] == -32700


def test_separators_of_lines_in_a_message_pass_unchanged(program: Program) -> None:
    text = "one\u2028two\u2029three\x85four\x0cfive\x1csix"
    program.configure(CONFIG)
    with up(program):
        serve(
            program, INITIALIZE, call(1, "sessions_send", agentId="helper", message=text, timeoutSeconds=30)
        )
        answer = serve(program, INITIALIZE, call(1, "sessions_history", sessionKey=HELPER))[1]
        assert "result" in answer, answer
        assert text in [entry["content"] for entry in answer["result"]["structuredContent"]["messages"]]


def test_a_notification_with_a_wrong_id_is_ignored(program: Program) -> None:
    program.configure(CONFIG)
    with up(program):
        wrong = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": {"a": 1}}}
        assert serve(program, INITIALIZE, wrong, request(1, "tools/list")).keys() == {0, 1}


@pytest.mark.requirement("W7")
def test_without_a_gateway_the_error_says_how_to_start_one(program: Program) -> None:
    program.configure(CONFIG)
    done = program.run("mcp", "serve", stdin=f"{json.dumps(INITIALIZE)}\n")
    [answer] = [json.loads(line) for line in done.out.splitlines()]
    assert (answer["id"], answer["error"]["code"]) == (0, -32603)
    assert "Start one with `antiphon up`" in answer["error"]["message"]
    assert "`antiphon up`" in done.err
    assert done.code != 0


def test_a_refused_token_is_an_answer(program: Program, tmp_path: Path) -> None:
    program.configure(CONFIG)
    path = tmp_path / "token"
    path.write_text("wrong")
    with up(program) as gateway:
        options = ("--url", gateway.url, "--token-file", str(path))
        answers = serve(program, INITIALIZE, options=options)
        assert "unauthorized" in answers[0]["error"]["message"].lower()
        path.write_text(token(program))
        assert "result" in serve(program, INITIALIZE, options=options)[0]


async def test_the_gateway_may_be_restarted_meanwhile(program: Program) -> None:
    program.configure(CONFIG)
    command = [*program.command, "mcp", "serve"]
    with up(program) as first:
        async with start_mcp(command, program.environ, "2025-11-25") as client:
            await use_tool(client, "sessions_send", agentId="helper", message="say hi")
            assert first.stop() == 0
            from mcp.shared.exceptions import MCPError

            with pytest.raises(MCPError, match="antiphon up"):
                await client.call_tool("sessions_list", {})
            with up(program) as second:  # at another address
                assert second.url != first.url
                assert (await use_tool(client, "sessions_list"))["count"] == 1


def test_a_wait_can_be_dropped(program: Program) -> None:
    """A cancelled request is not answered, and its run goes on."""
    program.configure(CONFIG)
    with up(program):
        process = program.start("mcp", "serve")
        assert process.stdin is not None
        assert process.stdout is not None

        def send(message: Mapping[str, Any]) -> None:
            assert process.stdin is not None
            process.stdin.write(json.dumps(message) + "\n")
            process.stdin.flush()

        send(INITIALIZE)
        assert json.loads(process.stdout.readline())["id"] == 0
        words = "slow 3 a b c"
        send(
            call(1, "sessions_send", agentId="helper", message=words, timeoutSeconds=300, idempotencyKey="k")
        )
        program.until_answering()
        cancelled = {"method": "notifications/cancelled", "params": {"requestId": 1}}
        send({"jsonrpc": "2.0", **cancelled})
        send(call(2, "sessions_send", agentId="helper", message=words, timeoutSeconds=60, idempotencyKey="k"))
        answer = json.loads(process.stdout.readline())
        assert (answer["id"], answer["result"]["structuredContent"]["status"]) == (2, "ok")
        out, err = process.communicate(timeout=BOUND)
        assert (out, err, process.returncode) == ("", "", 0)


def test_it_starts_without_the_protocols_library(program: Program) -> None:
    script = (
        "import antiphon.cli.mcp, antiphon.mcp.server.stdio, sys;"
        "print([name for name in ('mcp', 'mcp_types', 'pydantic') if name in sys.modules])"
    )
    import subprocess
    import sys

    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_headers_are_written_as_the_specification_says() -> None:
    from mcp.shared.inbound import decode_header_value

    encode = stdio._encode_header  # pyright: ignore[reportPrivateUsage]
    for value in ("sessions_list", "a b", " a", "a ", "ü", "=?base64?YQ==?=", "", "line\nbreak", "\x7f"):
        header = encode(value)
        assert header.isascii()
        assert header == header.strip()
        assert decode_header_value(header) == value
