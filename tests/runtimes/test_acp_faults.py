"""ACP programs that break the protocol: the gateway stays responsive, and the session goes on."""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from antiphon.child_processes import pipes, processes
from antiphon.errors import Unavailable
from antiphon.runtimes.acp import turn_recorder
from antiphon.runtimes.acp.program import MAX_OPEN_REQUESTS, find_model
from antiphon.runtimes.acp.turn_recorder import MAX_COMPARED_LINES, render_diff
from antiphon.runtimes.tool_calls import TOO_DEEP_TEXT
from support.acp_agents import describe_agents, open_acp_app
from support.mcp_servers import find_processes

pytestmark = [pytest.mark.anyio, pytest.mark.sqlite_only, pytest.mark.requirement("M3", "AT19")]

FAULTY_AGENT_FILE = Path(__file__).parents[1] / "support" / "faulty_acp_agent.py"
FAULTY = describe_agents({"args": [str(FAULTY_AGENT_FILE)]})
MAX_DIFF_SECONDS = 5.0  # of a comparison that would take minutes


@pytest.mark.parametrize("fault", ["id", "fields", "deep:900", "diff:20000", "tool"])
async def test_a_wrong_message_does_not_end_the_turn(tmp_path: Path, fault: str) -> None:
    async with open_acp_app(tmp_path, FAULTY) as app:
        async with asyncio.timeout(20):
            assert await app.reply(fault) == "end"
        assert await app.reply("say:after") == "after end"


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("error", "a text instead of an object"),
        ("requests:50000", "without waiting for an answer"),
        (f"permissions:{2 * MAX_OPEN_REQUESTS}", "without waiting for an answer"),
        ("alternate:2000", "characters in one turn"),
        ("hold:3", "are too long"),
        ("close", "closed its input"),
    ],
)
async def test_a_fault_that_cannot_be_ignored_ends_the_turn_and_not_the_session(
    tmp_path: Path, fault: str, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turn_recorder, "MAX_TEXT_CHARACTERS_PER_TURN", 100_000)
    monkeypatch.setattr(turn_recorder, "MAX_CALL_BYTES_PER_TURN", 2 * 2**20)
    async with open_acp_app(tmp_path, FAULTY) as app:
        view = await app.ask(fault)
        assert (view.state, view.error_code) == ("error", "agent_program_failed")
        assert view.error is not None and error in view.error
        assert await app.reply("say:after") == "after end"


async def test_a_program_that_reads_nothing_more_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipes, "WRITE_TIMEOUT_SECONDS", 0.5)
    async with open_acp_app(tmp_path, FAULTY) as app:
        assert await app.reply("deaf") == "end"
        view = await app.ask("say:" + "x" * 200_000)  # more than a pipe takes
        assert view.error is not None and "has read nothing" in view.error
        assert await app.reply("say:after") == "after end"


async def test_a_launcher_that_starts_too_late_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it ran on, it would end the programs of the next one, as left behind."""
    owner = f"{hashlib.sha256(os.fsencode(tmp_path)).hexdigest()[:16]}-test"
    async with aclosing(processes.ChildProcesses(tmp_path, "test", adopts=True)) as children:
        command = processes.ChildCommand(argv=["/bin/cat"], cwd="/", env={})
        with monkeypatch.context() as patch:
            patch.setattr(processes, "START_TIMEOUT_SECONDS", 0.0)
            with pytest.raises(Unavailable, match="does not answer"):
                await children.start(command)
        assert find_processes(owner) == []
        assert not (await children.start(command)).exited.is_set()
        assert find_processes(owner) != []


async def test_what_a_program_refused_to_read_is_told_again(tmp_path: Path) -> None:
    async with open_acp_app(tmp_path, FAULTY) as app:
        await app.ask("error:the-word-is-blue")
        first = await app.reply("prompt")
        assert "Instructions for this session" in first and "the-word-is-blue" in first
        await app.ask("error:the-word-is-red")
        second = await app.reply("prompt")
        assert "the-word-is-red" in second and "the-word-is-blue" not in second


async def test_arguments_that_cannot_be_read_again_are_not_stored(tmp_path: Path) -> None:
    async with open_acp_app(tmp_path, FAULTY) as app:
        await app.reply("deep:900")
        [call] = (await app.transcript())[1]["content"]
        assert call["arguments"] == {"input": TOO_DEEP_TEXT}


def test_the_change_of_a_long_file_is_not_compared_line_by_line() -> None:
    lines = [f"line {index * 37 % 131}" for index in range(20 * MAX_COMPARED_LINES)]
    started = time.perf_counter()
    shown = render_diff("file", "\n".join(lines), "\n".join(reversed(lines)))
    assert time.perf_counter() - started < MAX_DIFF_SECONDS
    assert len(shown.splitlines()) > 2 * len(lines) - 10


@pytest.mark.parametrize(("at", "removed", "added"), [(0, 1, 1), (1, 2, 0), (2500, 3, 4), (2999, 1, 2)])
def test_the_change_of_a_long_file_reads_as_that_of_a_short_one(at: int, removed: int, added: int) -> None:
    before = [f"line {index}" for index in range(MAX_COMPARED_LINES + 1000)]
    after = [*before[:at], *(f"new {index}" for index in range(added)), *before[at + removed :]]
    shown = render_diff("file", "\n".join(before), "\n".join(after)).splitlines()
    start, end = max(0, at - 2), at + removed + 2
    assert shown == [
        "--- file",
        "+++ file",
        f"@@ -{start + 1},{len(before[start:end])} +{start + 1},{len(before[start:end]) - removed + added} @@",
        *(f" {line}" for line in before[start:at]),
        *(f"-{line}" for line in before[at : at + removed]),
        *(f"+new {index}" for index in range(added)),
        *(f" {line}" for line in before[at + removed : end]),
    ]


@pytest.mark.parametrize(
    "answer",
    [
        {"models": {"currentModelId": "\x1b[31mred\u202e" + "x" * 1000}},
        {"configOptions": [{"category": "model", "currentValue": "\x1b[31mred\u202e" + "x" * 1000}]},
    ],
)
def test_the_name_of_a_model_is_safe_to_show(answer: dict[str, Any]) -> None:
    name = find_model(answer)
    assert name is not None and name.startswith("[31mredxxx") and len(name) == 200
