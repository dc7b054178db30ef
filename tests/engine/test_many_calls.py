"""Answers that ask for many tools at once: how many are run, how many at a time, and in how many commits."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from antiphon.engine import runs
from antiphon.engine.toolbox import Call, Result
from antiphon.engine.transcripts import Entry
from antiphon.engine.turns import MAX_CONCURRENT_CALLS
from antiphon.messages import Assistant, Message, ToolResult
from antiphon.runtimes import Prompt
from antiphon.runtimes.tool_calls import KEPT_TOOL_CALLS, MAX_TOOL_CALLS_PER_ANSWER
from antiphon.store import Tx
from stage import MAIN, OPERATOR, calls, soon, staged, text, tool, until

pytestmark = [pytest.mark.anyio, pytest.mark.requirement("G10")]


async def test_of_too_many_calls_the_first_are_run_and_the_model_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once = most = 0
    ran: list[str] = []
    commits: list[int] = []
    results: list[ToolResult] = []

    async def work(call: Call) -> Result:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        await asyncio.sleep(0)
        at_once -= 1
        ran.append(call.call_id)
        return Result(text="done")

    async def agent(prompt: Prompt) -> Assistant:
        results[:] = [message for message in prompt.messages if isinstance(message, ToolResult)]
        return text("fine") if results else calls(*["work"] * 50_000)

    commit = runs.commit

    async def counted(tx: Tx, claim: runs.Claim, messages: Sequence[Message], now: int) -> list[Entry]:
        commits.append(len(messages))
        return await commit(tx, claim, messages, now)

    monkeypatch.setattr(runs, "commit", counted)
    async with staged(tmp_path, agent, tools=[tool("work", work)]) as stage:
        assert (await stage.ask("go")).reply == "fine"
    assert len(ran) == MAX_TOOL_CALLS_PER_ANSWER
    assert most == MAX_CONCURRENT_CALLS
    assert len(results) == KEPT_TOOL_CALLS
    assert len(commits) < MAX_TOOL_CALLS_PER_ANSWER / 2
    (refused,) = [result for result in results if result.is_error]
    assert f"more than {MAX_TOOL_CALLS_PER_ANSWER} tool calls" in refused.text
    assert refused.tool_call_id not in ran


async def test_a_result_is_committed_while_others_are_still_at_work(tmp_path: Path) -> None:
    slow = asyncio.Event()

    async def quick(call: Call) -> Result:
        return Result(text="quick")

    async def wait(call: Call) -> Result:
        await soon(slow)
        return Result(text="slow")

    async def agent(prompt: Prompt) -> Assistant:
        asked = any(isinstance(message, ToolResult) for message in prompt.messages)
        return text("fine") if asked else calls("wait", "quick", "quick")

    async with staged(tmp_path, agent, tools=[tool("quick", quick), tool("wait", wait)]) as stage:
        run = await stage.say("go")

        async def two_are_there() -> bool:
            return [entry["role"] for entry in await stage.transcript()].count("toolResult") == 2

        await until(two_are_there)
        slow.set()
        assert (await stage.ended(run)).reply == "fine"


async def test_what_is_done_when_a_run_is_stopped_stays_done(tmp_path: Path) -> None:
    begun = asyncio.Event()

    async def quick(call: Call) -> Result:
        return Result(text="quick")

    async def wait(call: Call) -> Result:
        begun.set()
        await asyncio.Event().wait()
        raise AssertionError

    async def agent(prompt: Prompt) -> Assistant:
        return calls("wait", "quick", "quick")

    async with staged(tmp_path, agent, tools=[tool("quick", quick), tool("wait", wait)]) as stage:
        run = await stage.say("go")
        await soon(begun)
        await stage.operations.stop(OPERATOR, MAIN)
        assert (await stage.ended(run)).state == "cancelled"
        results = [entry for entry in await stage.transcript() if entry["role"] == "toolResult"]
        assert sorted(entry.get("interrupted", False) for entry in results) == [False, False, True]
