"""Answers that ask for many tools at once: how many are run, how many at a time, and in how many commits."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from antiphon.engine.runs import lifecycle
from antiphon.engine.runs.run_loop import MAX_CONCURRENT_CALLS_PER_ANSWER
from antiphon.engine.sessions.transcripts import Entry
from antiphon.engine.toolbox import ToolOutput, ToolRequest
from antiphon.messages import AssistantMessage, Message, ToolResult
from antiphon.runtimes import Prompt
from antiphon.runtimes.tool_calls import MAX_KEPT_TOOL_CALLS, MAX_TOOL_CALLS_PER_ANSWER
from antiphon.store import Tx
from support.app_fixture import (
    MAIN,
    OPERATOR,
    make_answer,
    make_tool,
    make_tool_calls,
    open_app_fixture,
    wait_for_event,
    wait_until,
)

pytestmark = [pytest.mark.anyio, pytest.mark.requirement("G10")]


async def test_of_too_many_calls_the_first_are_run_and_the_model_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once = most = 0
    ran: list[str] = []
    commits: list[int] = []
    results: list[ToolResult] = []

    async def work(call: ToolRequest) -> ToolOutput:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        await asyncio.sleep(0)
        at_once -= 1
        ran.append(call.call_id)
        return ToolOutput(text="done")

    async def agent(prompt: Prompt) -> AssistantMessage:
        results[:] = [message for message in prompt.messages if isinstance(message, ToolResult)]
        return make_answer("fine") if results else make_tool_calls(*["work"] * 50_000)

    commit = lifecycle.commit_messages

    async def counted(tx: Tx, claim: lifecycle.Claim, messages: Sequence[Message], now: int) -> list[Entry]:
        commits.append(len(messages))
        return await commit(tx, claim, messages, now)

    monkeypatch.setattr(lifecycle, "commit_messages", counted)
    async with open_app_fixture(tmp_path, agent, tools=[make_tool("work", work)]) as app:
        assert (await app.ask("go")).reply == "fine"
    assert len(ran) == MAX_TOOL_CALLS_PER_ANSWER
    assert most == MAX_CONCURRENT_CALLS_PER_ANSWER
    assert len(results) == MAX_KEPT_TOOL_CALLS
    assert len(commits) < MAX_TOOL_CALLS_PER_ANSWER / 2
    (refused,) = [result for result in results if result.is_error]
    assert f"more than {MAX_TOOL_CALLS_PER_ANSWER} tool calls" in refused.text
    assert refused.tool_call_id not in ran


async def test_a_result_is_committed_while_others_are_still_at_work(tmp_path: Path) -> None:
    slow = asyncio.Event()

    async def quick(call: ToolRequest) -> ToolOutput:
        return ToolOutput(text="quick")

    async def wait(call: ToolRequest) -> ToolOutput:
        await wait_for_event(slow)
        return ToolOutput(text="slow")

    async def agent(prompt: Prompt) -> AssistantMessage:
        asked = any(isinstance(message, ToolResult) for message in prompt.messages)
        return make_answer("fine") if asked else make_tool_calls("wait", "quick", "quick")

    async with open_app_fixture(
        tmp_path, agent, tools=[make_tool("quick", quick), make_tool("wait", wait)]
    ) as app:
        run = await app.say("go")

        async def two_are_there() -> bool:
            return [entry["role"] for entry in await app.transcript()].count("toolResult") == 2

        await wait_until(two_are_there)
        slow.set()
        assert (await app.wait_for_end(run)).reply == "fine"


async def test_what_is_done_when_a_run_is_stopped_stays_done(tmp_path: Path) -> None:
    begun = asyncio.Event()

    async def quick(call: ToolRequest) -> ToolOutput:
        return ToolOutput(text="quick")

    async def wait(call: ToolRequest) -> ToolOutput:
        begun.set()
        await asyncio.Event().wait()
        raise AssertionError

    async def agent(prompt: Prompt) -> AssistantMessage:
        return make_tool_calls("wait", "quick", "quick")

    async with open_app_fixture(
        tmp_path, agent, tools=[make_tool("quick", quick), make_tool("wait", wait)]
    ) as app:
        run = await app.say("go")
        await wait_for_event(begun)
        await app.operations.runs.stop(OPERATOR, MAIN)
        assert (await app.wait_for_end(run)).state == "cancelled"
        results = [entry for entry in await app.transcript() if entry["role"] == "toolResult"]
        assert sorted(entry.get("interrupted", False) for entry in results) == [False, False, True]
