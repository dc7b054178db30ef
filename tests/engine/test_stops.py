"""Stopping, and everything that must not be stopped by it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from antiphon.bus import StopAsked
from antiphon.bus.local import LocalBus
from antiphon.engine import runs
from antiphon.engine.engine import STOPS, Pace
from antiphon.engine.toolbox import Call, Result
from antiphon.messages import Assistant, Text, ToolCall
from antiphon.runtimes import Deltas, Prompt
from stage import MAIN, OPERATOR, calls, raw, soon, staged, text, tool, until

pytestmark = pytest.mark.anyio

CHILD = "agent:main:subagent:11111111-1111-1111-1111-111111111111"
QUICK = Pace(sweep=0.05, stop_grace=0.2)


class Waiting:
    """An agent whose steps begin and then wait."""

    def __init__(self) -> None:
        self.begun: dict[str, asyncio.Event] = {}
        self.cancelled = 0

    def started(self, key: str) -> asyncio.Event:
        return self.begun.setdefault(key, asyncio.Event())

    async def __call__(self, prompt: Prompt) -> str:
        self.started(prompt.session_key).set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return "never"


@pytest.mark.requirement("G16")
async def test_stopping_one_run_stops_that_one(tmp_path: Path) -> None:
    agent = Waiting()
    async with staged(tmp_path, agent) as stage:
        first, second = await stage.say("one"), await stage.say("two")
        await stage.create(CHILD, MAIN)
        child = await stage.say("below", CHILD)
        await soon(agent.started(CHILD))
        assert (await stage.operations.stop(OPERATOR, MAIN, "no-such-run")).run_ids == []
        assert (await stage.operations.stop(OPERATOR, MAIN, second)).run_ids == [second]
        states = {run: (await stage.operations.run(OPERATOR, run)).state for run in (first, second, child)}
        assert states == {first: "running", second: "cancelled", child: "running"}
        third = await stage.say("three")
        stopped = await stage.operations.stop(OPERATOR, MAIN, first)
        assert sorted(stopped.run_ids) == sorted([first, child])
        assert (await stage.ended(child)).state == "cancelled"
        assert (await stage.operations.run(OPERATOR, third)).state in {"queued", "running"}


@pytest.mark.requirement("G16")
async def test_a_stop_is_obeyed_though_its_hint_was_lost(tmp_path: Path) -> None:
    class Deaf(LocalBus):
        def publish(self, topic: str, event: object) -> None:
            if not isinstance(event, StopAsked):
                super().publish(topic, event)  # type: ignore[arg-type]

    agent = Waiting()
    async with staged(tmp_path, agent, bus=Deaf(), pace=Pace(sweep=0.05, stop_grace=60)) as stage:
        run_id = await stage.say("one")
        await soon(agent.started(MAIN))
        await stage.operations.stop(OPERATOR, MAIN)
        assert (await stage.ended(run_id)).state == "cancelled"
        assert agent.cancelled == 1


@pytest.mark.requirement("G16")
async def test_a_thousand_stops_at_once_all_arrive(tmp_path: Path) -> None:
    """More than a listener holds: it is told of the gap and reads the rows."""
    agent = Waiting()
    async with staged(tmp_path, agent, bus=LocalBus(buffer=4), pace=Pace(sweep=60)) as stage:
        stage.bus.publish(STOPS, StopAsked(run_id="nobody"))
        keys = [f"agent:main:dashboard:{number}" for number in range(20)]
        ids = [await stage.say("go", key) for key in keys]
        for key in keys:
            await soon(agent.started(key))
        for key in keys:
            row = raw(stage.path, "SELECT id FROM sessions WHERE key = ?", key)[0]
            await stage.store.tx(runs.cancel, row["id"], None, stage.clock.now())
        for run_id in ids:
            stage.bus.publish(STOPS, StopAsked(run_id=run_id))
        for run_id in ids:
            assert (await stage.ended(run_id)).state == "cancelled"


@pytest.mark.requirement("G21")
async def test_a_damaged_entry_keeps_no_run_from_ending(tmp_path: Path) -> None:
    begun = asyncio.Event()

    async def stuck(call: Call) -> Result:
        if call.call_id == "second":
            begun.set()
            await asyncio.Event().wait()
        return Result(text="done")

    async def agent(prompt: Prompt) -> Assistant:
        blocks = [ToolCall(id=name, name="stuck", arguments={}) for name in ("first", "second")]
        return Assistant(content=[*blocks], timestamp=1)

    async with staged(tmp_path, agent, tools=[tool("stuck", stuck)], pace=QUICK) as stage:
        run_id = await stage.say("go")
        await soon(begun)

        async def stored() -> bool:
            return bool(raw(stage.path, "SELECT 1 FROM messages WHERE role = 'toolResult'"))

        await until(stored)
        raw(stage.path, "UPDATE messages SET body = '{torn' WHERE role = 'toolResult'")
        await stage.operations.stop(OPERATOR, MAIN)
        assert (await stage.ended(run_id)).state == "cancelled"


@pytest.mark.requirement("G2")
async def test_many_expired_runs_brick_no_lane(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "SKIPS", 3)
    agent = Waiting()
    async with staged(tmp_path, agent) as stage:
        first = await stage.say("one")
        await soon(agent.started(MAIN))
        late = [await stage.say(f"late {number}") for number in range(8)]
        raw(stage.path, "UPDATE runs SET created_at = 1 WHERE state = 'queued'")
        await stage.operations.stop(OPERATOR, MAIN, first)
        assert (await stage.ended(first)).state == "cancelled"
    async with staged(tmp_path, agent, pace=QUICK) as stage:
        assert {(await stage.ended(run_id)).state for run_id in late} == {"timeout"}


@pytest.mark.requirement("G17")
async def test_a_stop_during_a_commit_stores_nothing_twice(tmp_path: Path) -> None:
    """The answer is on its way to the disk when the stop comes: it is kept once, and not again as what was left."""
    deciding = asyncio.Event()

    class Agent:
        reads_history = True
        context_window = None

        async def step(self, prompt: Prompt, deltas: Deltas) -> Assistant:
            deltas.text("Let me look.")
            deciding.set()
            block = ToolCall(id="c", name="look", arguments={})
            return Assistant(content=[Text(text="Let me look."), block], timestamp=1, stop_reason="toolUse")

        async def close(self) -> None: ...

    async def look(call: Call) -> Result:
        await asyncio.Event().wait()
        return Result(text="never")

    async with staged(tmp_path, Agent(), tools=[tool("look", look)]) as stage:
        run_id = await stage.say("go")
        await soon(deciding)
        await stage.operations.stop(OPERATOR, MAIN)
        assert (await stage.ended(run_id)).state == "cancelled"
        said = [str(entry) for entry in await stage.transcript() if "Let me look." in str(entry)]
        assert len(said) == 1


@pytest.mark.requirement("G5")
async def test_calls_of_a_run_never_share_a_key(tmp_path: Path) -> None:
    keys: list[str] = []

    async def act(call: Call) -> Result:
        keys.append(call.key)
        return Result(text="done", details={"big": "x" * 5000})

    async def agent(prompt: Prompt) -> Assistant:
        done = sum(entry.__struct_config__.tag == "toolResult" for entry in prompt.messages)
        if done >= 3:
            return text("all \ud83d done".encode(errors="replace").decode())
        block = ToolCall(id="same", name="act", arguments={})
        return Assistant(content=[block, block] if done == 0 else [block], timestamp=done)

    async with staged(tmp_path, agent, tools=[tool("act", act)]) as stage:
        assert (await stage.ask("go")).state == "ok"
        assert len(set(keys)) == 3
        results = [entry for entry in await stage.transcript() if entry["role"] == "toolResult"]
        assert all("details" not in entry for entry in results)  # too much to keep


async def test_a_tool_that_returns_half_a_character_is_understood(tmp_path: Path) -> None:
    async def odd(call: Call) -> Result:
        return Result(text="half \ud83d")

    async def agent(prompt: Prompt) -> Assistant:
        return calls("odd") if len(prompt.messages) == 1 else text("fine")

    async with staged(tmp_path, agent, tools=[tool("odd", odd)]) as stage:
        assert (await stage.ask("go")).reply == "fine"
