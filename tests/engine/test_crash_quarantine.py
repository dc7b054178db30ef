"""Crash suspects are retried one at a time, without delaying other runs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from antiphon.engine import worker
from antiphon.engine.runs import lifecycle
from antiphon.engine.supervisor import EngineTimings
from antiphon.engine.toolbox import ToolOutput, ToolRequest
from antiphon.lanes.nats import NatsLanes
from antiphon.messages import AssistantMessage
from antiphon.runtimes import Prompt
from cluster.servers import nats_server
from support import app_fixture
from support.app_fixture import (
    DATABASE,
    make_answer,
    make_tool,
    make_tool_calls,
    open_app_fixture,
    wait_for_event,
)
from support.databases import query_database

pytestmark = [pytest.mark.anyio, pytest.mark.requirement("G12", "G24")]

SLOW = EngineTimings(lease_seconds=3600, sweep_interval_seconds=3600)


def session(name: str) -> str:
    return f"agent:main:dashboard:{name}"


async def suspects(path: Path, names: Sequence[str], asking: str | None = None) -> None:
    """These runs, as several crashes have left them: before their first answer, or in a call to `ask`."""
    left = list(names)
    begun = asyncio.Event()

    async def hang(run_id: str) -> ToolOutput:
        left.remove(run_id)
        if not left:
            begun.set()
        await asyncio.Event().wait()
        return ToolOutput(text="never")

    async def agent(prompt: Prompt) -> AssistantMessage:
        return (
            make_tool_calls("ask")
            if prompt.run_id == asking
            else make_answer((await hang(prompt.run_id)).text)
        )

    ask = make_tool("ask", lambda call: hang(call.run_id), settle=True)
    async with open_app_fixture(path, agent, timings=SLOW, tools=[ask]) as app:
        for name in names:
            await app.say(name, session(name), idempotency_key=name)
        await wait_for_event(begun)
    query_database(path / DATABASE, "UPDATE runs SET attempts = ?", lifecycle.MIN_SUSPECT_INTERRUPTIONS)


async def test_one_that_gets_on_makes_room_for_the_next(tmp_path: Path) -> None:
    await suspects(tmp_path, ["a", "b"])
    working, free, other = asyncio.Event(), asyncio.Event(), asyncio.Event()
    seen: list[str] = []

    async def work(call: ToolRequest) -> ToolOutput:
        working.set()
        await wait_for_event(free)
        return ToolOutput(text="x")

    async def agent(prompt: Prompt) -> AssistantMessage:
        seen.append(prompt.run_id)
        if prompt.run_id != seen[0]:
            other.set()
        first = prompt.run_id == seen[0] and not working.is_set()
        return make_tool_calls("work") if first else make_answer("done", stop_reason="stop")

    async with open_app_fixture(tmp_path, agent, timings=SLOW, tools=[make_tool("work", work)]) as app:
        await wait_for_event(working)
        await wait_for_event(other)
        free.set()
        assert {(await app.wait_for_end(name)).state for name in ("a", "b")} == {"ok"}


async def test_one_that_waits_for_another_makes_room_for_it(tmp_path: Path) -> None:
    """A run that was cut off while it waited has nothing to commit before the other one, suspected too, has ended."""
    await suspects(tmp_path, ["a", "b"], asking="a")

    async def ask(call: ToolRequest) -> ToolOutput:
        with app.engine.worker.release_lane_slot(call.run_id):
            return ToolOutput(text=(await app.wait_for_end("b")).reply or "")

    async def agent(prompt: Prompt) -> str:
        return "b's answer" if prompt.run_id == "b" else "done"

    async with open_app_fixture(
        tmp_path, agent, timings=SLOW, tools=[make_tool("ask", ask, settle=True)]
    ) as app:
        assert (await app.wait_for_end("a")).reply == "done"
        result = (await app.transcript(session("a")))[2]
        assert (result["role"], result["content"][0]["text"]) == ("toolResult", "b's answer")


@pytest.mark.parametrize("count", [2, 5, 200, 1000])
async def test_many_have_all_begun_before_long(count: int) -> None:
    """Though none of them gets on: most have done nothing but be there when another one crashed."""
    passed, turns = 0.0, list[float]()
    for behind in reversed(range(1, count)):
        turns.append(worker.compute_turn_seconds(worker.ALL_SUSPECTS_START_SECONDS - passed, behind))
        passed += turns[-1]
    assert passed < worker.ALL_SUSPECTS_START_SECONDS + 0.001
    assert (
        min(turns) > min(worker.MAX_SUSPECT_TURN_SECONDS, worker.ALL_SUSPECTS_START_SECONDS / count) - 0.001
    )


async def test_none_begins_while_the_process_stops(tmp_path: Path) -> None:
    await suspects(tmp_path, ["a", "b"])
    first, free = asyncio.Event(), asyncio.Event()
    seen: list[str] = []

    async def agent(prompt: Prompt) -> str:
        seen.append(prompt.run_id)
        first.set()
        await wait_for_event(free)
        return "ok"

    async with open_app_fixture(tmp_path, agent, timings=SLOW) as app:
        await wait_for_event(first)
        async with asyncio.TaskGroup() as group:
            group.create_task(app.engine.stop(app_fixture.BOUND))
            group.create_task(_soon_after(free))
    assert len(seen) == 1


async def _soon_after(free: asyncio.Event) -> None:
    for _ in range(100):  # until the stop is under way
        await asyncio.sleep(0)
    free.set()


@pytest.mark.sqlite_only  # it is about lanes
async def test_those_that_wait_take_no_place_from_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["a", "b", "c"]
    await suspects(tmp_path, names)
    first, free = asyncio.Event(), asyncio.Event()

    async def agent(prompt: Prompt) -> str:
        if prompt.run_id == "fresh":
            return "hello"
        first.set()
        await wait_for_event(free)
        return "ok"

    with nats_server() as server:
        monkeypatch.setattr(app_fixture, "LocalLanes", lambda: NatsLanes(server.servers(), slots=len(names)))
        async with open_app_fixture(tmp_path, agent, timings=SLOW) as app:
            await wait_for_event(first)
            await app.say("hi", session("fresh"), idempotency_key="fresh")
            assert (await app.wait_for_end("fresh")).reply == "hello"
            free.set()
            for name in names:
                assert (await app.wait_for_end(name)).state == "ok"
