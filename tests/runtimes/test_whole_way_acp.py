"""An ACP program behind a real `antiphon up`: kills of the gateway and of the program, and what goes on afterwards."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from antiphon.client import Client, Site
from cli.gateways import Gateway, token, up
from cli.terminal import Program
from support.acp_agents import BOUND, CODER, describe_agents
from support.mcp_servers import find_processes, wait_until

pytestmark = [pytest.mark.anyio, pytest.mark.sqlite_only]

MARK = "ACP_TEST_MARK"


@asynccontextmanager
async def connect(gateway: Gateway, program: Program) -> AsyncGenerator[Client]:
    async def find() -> Site:
        return Site(gateway.url, token(program))

    async with Client(find) as client:
        yield client


async def send(client: Client, text: str, key: str) -> str:
    sent = await client.call("chat.send", {"sessionKey": CODER, "message": text, "idempotencyKey": key})
    return sent["runId"]


async def wait_for_end(client: Client, run_id: str) -> dict[str, Any]:
    return await client.call(
        "agent.wait", {"runId": run_id, "timeoutMs": int(BOUND * 1000)}, seconds=BOUND + 5
    )


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
