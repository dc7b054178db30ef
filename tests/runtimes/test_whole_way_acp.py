"""An ACP program behind a real `antiphon up`: kills of the gateway and of the program, and what goes on afterwards."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from antiphon.client import Client
from antiphon.gateway.auth import PROGRAM_SECRET_PREFIX
from cli.gateways import connect, up
from cli.terminal import Program
from support.acp_agents import BOUND, CODER, describe_agents
from support.acp_gateways import reply, send, wait_for_end
from support.mcp_servers import find_command_lines, find_processes, wait_until

pytestmark = [pytest.mark.anyio, pytest.mark.sqlite_only]

MARK = "ACP_TEST_MARK"
SCRIPT = Path(__file__).parents[1] / "support" / "scripted_acp_agent.py"


async def read_texts(client: Client) -> list[str]:
    found = await client.call("sessions.history", {"key": CODER, "includeTools": True})
    return [str(entry["content"]) for entry in found["messages"]]


@pytest.mark.requirement("M3", "AT19")
async def test_no_process_survives_a_kill_and_the_turn_goes_on_with_its_memory(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    mark, memory = os.urandom(8).hex(), tmp_path / "memory"
    memory.mkdir()
    program = Program(tmp_path, tmp_path_factory.getbasetemp().parent / "antiphon-bytecode")
    program.configure(describe_agents({"env": {MARK: mark, "ACP_TEST_MEMORY": str(memory)}}))
    with up(program) as gateway:
        async with connect(gateway, program) as client:
            await wait_for_end(client, await send(client, "say:blue", "1"))
            cut_off = await send(client, "spawn tool:execute wait", "2")
            await wait_until(lambda: len(find_processes(f"{MARK}={mark}")) >= 2, "nothing runs")
        gateway.stop(signal.SIGKILL)
        await wait_until(lambda: find_processes(f"{MARK}={mark}") == [], "processes outlive the gateway")
    with up(program) as gateway:
        async with connect(gateway, program) as client:
            await wait_until(lambda: len(find_processes(f"{MARK}={mark}")) >= 2, "the turn is not resumed")
            await client.call("chat.abort", {"sessionKey": CODER, "runId": cut_off})
            await wait_for_end(client, cut_off)
            last = await wait_for_end(client, await send(client, "recall", "3"))
            assert last["status"] == "ok", last
            texts = "".join(await read_texts(client))
            assert "cut off" in texts and "not in your memory" not in texts
        assert gateway.stop() == 0
    assert find_processes(f"{MARK}={mark}") == []


def call(tool: str, **arguments: Any) -> str:
    """Return the step of the test's programs that makes a call."""
    return f"use:{tool}:{json.dumps(arguments, separators=(',', ':'))}"


@pytest.mark.requirement("M3", "AT19", "S1")
@pytest.mark.parametrize("place", ["header", "bridge", "sandbox"])
async def test_a_program_messages_sessions_before_and_after_a_kill_of_the_gateway(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, place: str
) -> None:
    """Each process has a secret of its own, which is in no log, configuration or command line."""
    program = Program(tmp_path, tmp_path_factory.getbasetemp().parent / "antiphon-bytecode")
    sandbox = {"mode": "all" if place == "sandbox" else "off", "sessionToolsVisibility": "all"}
    scripted = {"command": "/usr/bin/python3", "args": ["-I", "-S", "-c", SCRIPT.read_text()]}
    command = {"header": {"agent": "codex"}, "bridge": {}, "sandbox": scripted}[place]
    tools = {"sessions": {"visibility": "all"}, "agentToAgent": {"enabled": True}}
    program.configure(describe_agents(command, {"sandbox": sandbox}, tools=tools))
    secrets: set[str] = set()
    for attempt in "1", "2":
        with up(program) as gateway:
            async with connect(gateway, program) as client:
                listed = await reply(client, call("sessions_list"), f"list{attempt}")
                assert "main" in listed, listed
                quiet = {"replyBack": 0, "announce": "none"}
                message = call("sessions_send", agentId="main", message=f"say-{attempt}", **quiet)
                sent = json.loads(await reply(client, message, f"send{attempt}"))
                assert sent["status"] == "ok" and sent["sessionKey"] == "agent:main:main", sent
                if place == "header":
                    secrets |= set(
                        re.findall(
                            f'{PROGRAM_SECRET_PREFIX}[^"]+', await reply(client, "mcp", f"mcp{attempt}")
                        )
                    )
                    config = await client.call("config.get", {})
                    assert PROGRAM_SECRET_PREFIX not in json.dumps(config)
                assert find_command_lines(PROGRAM_SECRET_PREFIX) == []
            gateway.process.kill()
            _out, log = gateway.process.communicate(timeout=BOUND)
            assert PROGRAM_SECRET_PREFIX not in log
        await wait_until(lambda: find_processes(str(tmp_path)) == [], "processes outlive the gateway")
    assert len(secrets) == (2 if place == "header" else 0)
