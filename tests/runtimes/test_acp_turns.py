"""Turns of an agent that is an ACP program: a real process for each session."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from antiphon.access import Caller
from antiphon.workspace.agent_programs import AgentProgramLauncher, PreparedProgram
from support.acp_agents import CODER, OPERATOR, describe_agents, open_acp_app
from support.mcp_servers import find_processes

pytestmark = [pytest.mark.anyio, pytest.mark.sqlite_only]


def summarize(entries: list[dict[str, Any]]) -> list[Any]:
    """Return roles with texts, calls and results."""
    found: list[Any] = []
    for entry in entries:
        content = entry["content"]
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        parts = [
            block.get("text") or block.get("thinking") or f"{block.get('name')}#{block.get('id')}"
            for block in blocks
        ]
        found.append((entry["role"], [part.strip() for part in parts]))
    return found


@pytest.mark.requirement("M3")
async def test_what_a_program_says_and_does_is_in_the_transcript(tmp_path: Path) -> None:
    async with open_acp_app(tmp_path) as app:
        view = await app.ask("think:hmm say:first tool:execute say:last usage")
        assert (view.state, view.reply) == ("ok", "last ")
        assert summarize(await app.transcript()) == [
            ("user", ["think:hmm say:first tool:execute say:last usage"]),
            ("assistant", ["hmm", "first", "execute#call-1-0"]),
            ("toolResult", ["ran"]),
            ("assistant", ["last"]),
        ]
        last = (await app.transcript())[-1]
        assert (last["usage"]["input"], last["usage"]["output"]) == (10, 5)
        assert last["usage"]["cost"]["total"] == 0.25
        await app.ask("say:more usage")
        usage = (await app.transcript())[-1]["usage"]
        assert (usage["input"], usage["output"], usage["cost"]["total"]) == (10, 5, 0.25)
        await app.ask("say:none")
        assert "usage" not in (await app.transcript())[-1]


@pytest.mark.requirement("M3")
async def test_nothing_comes_between_a_call_and_its_result(tmp_path: Path) -> None:
    async with open_acp_app(tmp_path) as app:
        assert await app.reply("parallel late say:done") == "done"
        assert summarize(await app.transcript())[1:] == [
            ("assistant", ["search#one"]),
            ("toolResult", ["found one"]),
            ("assistant", ["begun-one", "search#two"]),
            ("toolResult", ["found two"]),
            ("assistant", ["begun-two", "other#never"]),
            ("toolResult", ["found"]),
            ("assistant", ["done"]),
        ]


@pytest.mark.requirement("M3", "AT19")
async def test_a_session_keeps_its_process_and_every_session_has_its_own(tmp_path: Path) -> None:
    async with open_acp_app(tmp_path) as app:
        first = await app.reply("pid")
        assert await app.reply("pid") == first
        other = await app.reply("pid", "agent:coder:other")
        assert other != first
        assert await app.reply("cwd") == str(tmp_path / "workspaces" / "coder")
    assert find_processes(str(tmp_path)) == []


@pytest.mark.requirement("M3", "AT19")
async def test_the_texts_of_a_prompt_do_not_run_together(tmp_path: Path) -> None:
    async with open_acp_app(tmp_path) as app:
        told: list[str] = json.loads(await app.reply("recall"))
    assert len(told) > 1 and told[-1].endswith("recall")
    assert all(text.endswith("\n\n") for text in told[:-1])


@pytest.mark.requirement("M3", "AT19")
async def test_a_program_without_memory_reads_what_it_has_missed(tmp_path: Path) -> None:
    async with open_acp_app(tmp_path) as app:
        await app.reply("say:the-word-is-blue")
    async with open_acp_app(tmp_path) as app:
        told = await app.reply("recall")
        assert "not in your memory" in told and "the-word-is-blue" in told


@pytest.mark.requirement("M3", "AT19")
async def test_a_program_loads_its_session_after_a_restart(tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    memory.mkdir()
    config = describe_agents({"env": {"ACP_TEST_MEMORY": str(memory)}})
    async with open_acp_app(tmp_path, config) as app:
        await app.reply("say:the-word-is-blue")
    async with open_acp_app(tmp_path, config) as app:
        told = json.loads(await app.reply("recall"))
        assert "say:the-word-is-blue" in told and not any("not in your memory" in text for text in told)
        # What is repeated while the session is loaded is no answer.
        assert [entry["role"] for entry in await app.transcript()] == ["user", "assistant"] * 2
        next(memory.iterdir()).unlink()
    async with open_acp_app(tmp_path, config) as app:
        assert "not in your memory" in await app.reply("recall")


@pytest.mark.requirement("M3", "AT19")
async def test_a_lost_program_is_reported_and_the_next_turn_has_another(tmp_path: Path) -> None:
    config = describe_agents({"env": {"ACP_TEST_MARK": str(tmp_path)}})
    async with open_acp_app(tmp_path, config) as app:
        pid = int(await app.reply("spawn pid"))
        run = await app.say("tool:execute deaf")
        await app.wait_for_entries(5)
        os.kill(pid, signal.SIGKILL)
        view = await app.wait_for_end(run)
        assert (view.state, view.error_code) == ("error", "agent_program_failed")
        assert view.error is not None and "killed by signal 9" in view.error
        assert await app.reply("say:again") == "again"
        view = await app.ask("exit")
        assert view.error is not None and "exit code 7" in view.error and "out of memory" in view.error
        assert await app.reply("say:again") == "again"
    assert find_processes(f"ACP_TEST_MARK={tmp_path}") == []


@pytest.mark.requirement("AT19")
@pytest.mark.parametrize(
    ("mode", "error"),
    [
        ("exit", "exit code 3.*no such model"),
        ("newer", "version 9 of the protocol"),
        ("login", "is not logged in"),
        ("silent", "did not answer 'initialize' within"),
    ],
)
async def test_a_handshake_that_fails_is_a_named_error(
    tmp_path: Path, mode: str, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("antiphon.runtimes.acp.program.INITIALIZE_TIMEOUT_SECONDS", 3.0)
    async with open_acp_app(tmp_path, describe_agents({"env": {"ACP_TEST_MODE": mode}})) as app:
        view = await app.ask("say:hello")
        assert (view.state, view.error_code) == ("error", "agent_program_failed")
        assert view.error is not None and re.search(error, view.error), view.error
        assert find_processes(str(tmp_path)) == []


@pytest.mark.requirement("AT19")
async def test_a_missing_program_is_a_named_error(tmp_path: Path) -> None:
    config = describe_agents({"command": "/does/not/exist", "args": []})
    async with open_acp_app(tmp_path, config) as app:
        view = await app.ask("say:hello")
        assert view.error is not None and "'/does/not/exist' could not be started" in view.error


@pytest.mark.requirement("M3", "AT19")
@pytest.mark.parametrize("step", ["wait", "deaf"])
async def test_a_cancelled_turn_ends_at_once_and_the_session_goes_on(
    tmp_path: Path, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("antiphon.runtimes.acp.sessions.CANCEL_GRACE_SECONDS", 0.5)
    async with open_acp_app(tmp_path) as app:
        before = await app.reply("pid")
        run = await app.say(f"say:partial tool:read {step}")
        await app.wait_for_entries(5)
        await app.app.operations.runs.stop(OPERATOR, CODER, run)
        view = await app.wait_for_end(run)
        assert view.state == "cancelled"
        after = await app.reply("pid")
        assert (after == before) == (step == "wait")


@pytest.mark.requirement("AT19")
async def test_a_turn_without_a_final_text_is_incomplete(tmp_path: Path) -> None:
    async with open_acp_app(tmp_path) as app:
        view = await app.ask("say:before tool:read none")
        assert (view.state, view.error_code) == ("incomplete", "incomplete")
        view = await app.ask("fail")
        assert view.error is not None and "the model is on fire. Try again" in view.error


@pytest.mark.requirement("M3")
async def test_each_turn_of_a_oneshot_program_has_a_process_of_its_own(tmp_path: Path) -> None:
    async with open_acp_app(tmp_path, describe_agents({"mode": "oneshot"})) as app:
        first = await app.reply("pid", CODER)
        assert find_processes(str(tmp_path)) == []
        assert await app.reply("pid") != first


@pytest.mark.requirement("AT19")
async def test_sessions_that_begin_at_once_keep_within_the_limit_of_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare = AgentProgramLauncher.prepare
    is_another_preparing = asyncio.Event()
    preparing = 0

    async def prepare_slowly(self: AgentProgramLauncher, caller: Caller) -> PreparedProgram:
        nonlocal preparing
        preparing += 1
        if preparing > 1:
            is_another_preparing.set()
        with suppress(TimeoutError):
            async with asyncio.timeout(0.5):
                await is_another_preparing.wait()
        preparing -= 1
        return await prepare(self, caller)

    monkeypatch.setattr(AgentProgramLauncher, "prepare", prepare_slowly)
    async with open_acp_app(tmp_path, describe_agents(acp={"maxConcurrentSessions": 1})) as app:
        keys = [f"agent:coder:{name}" for name in "abc"]
        assert await asyncio.gather(*(app.reply("say:done", key) for key in keys)) == ["done"] * 3
    assert not is_another_preparing.is_set()


@pytest.mark.requirement("AT19")
async def test_a_cancelled_turn_makes_room_for_one_that_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("antiphon.runtimes.acp.sessions.CANCEL_GRACE_SECONDS", 0.5)
    async with open_acp_app(tmp_path, describe_agents(acp={"maxConcurrentSessions": 1})) as app:
        deaf = await app.say("tool:read deaf")
        await app.wait_for_entries(3)
        waiting = await app.say("say:done", "agent:coder:other")
        await app.app.operations.runs.stop(OPERATOR, CODER, deaf)
        assert (await app.wait_for_end(waiting)).reply == "done "
