"""Stopping, and everything that must not be stopped by it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from antiphon import keys
from antiphon.bus import StopRequested
from antiphon.bus.local import LocalBus
from antiphon.engine.runs import endings, lifecycle
from antiphon.engine.runs.effects import NO_EFFECTS, Effects
from antiphon.engine.sessions import session_rows
from antiphon.engine.sessions.session_rows import NewSession
from antiphon.engine.supervisor import EngineTimings
from antiphon.engine.toolbox import ToolOutput, ToolRequest
from antiphon.engine.worker import STOP_TOPIC
from antiphon.messages import AssistantMessage, TextBlock, ToolCall, UserMessage, encode_message
from antiphon.runtimes import Deltas, Prompt
from antiphon.store import Param, Row, Tx
from antiphon.store.queries import Query
from support.app_fixture import (
    DATABASE,
    MAIN,
    OPERATOR,
    make_answer,
    make_tool,
    make_tool_calls,
    open_app_fixture,
    wait_for_event,
    wait_until,
)
from support.databases import open_test_database, query_database

pytestmark = pytest.mark.anyio

CHILD = "agent:main:subagent:11111111-1111-1111-1111-111111111111"
GRANDCHILD = "agent:main:subagent:22222222-2222-2222-2222-222222222222"
QUICK = EngineTimings(sweep_interval_seconds=0.05, stop_grace_seconds=0.2)


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


@pytest.mark.requirement("G16", "G13")
async def test_a_run_of_another_process_in_a_shared_store_is_not_abandoned(tmp_path: Path) -> None:
    agent = Waiting()
    async with open_app_fixture(tmp_path, agent) as app:
        run_id = await app.say("one")
        await wait_for_event(agent.started(MAIN))
        [row] = app.rows("SELECT session FROM runs")
        now = app.clock.now()
        assert await app.store.tx(endings.end_abandoned_run, row["session"], now, shared=True) == NO_EFFECTS
        later = now + 86_400_000  # when the lease would be over
        stopped = await app.store.tx(endings.end_abandoned_run, row["session"], later, shared=True)
        assert [ended.run.run_id for ended in stopped.ended_runs] == [run_id]
        assert (await app.operations.runs.get(OPERATOR, run_id)).state == "cancelled"


@pytest.mark.requirement("G16")
async def test_stopping_one_run_stops_that_one(tmp_path: Path) -> None:
    agent = Waiting()
    async with open_app_fixture(tmp_path, agent) as app:
        first, second = await app.say("one"), await app.say("two")
        await app.create(CHILD, MAIN)
        child = await app.say("below", CHILD)
        await wait_for_event(agent.started(CHILD))
        assert (await app.operations.runs.stop(OPERATOR, MAIN, "no-such-run")).run_ids == []
        assert (await app.operations.runs.stop(OPERATOR, MAIN, second)).run_ids == [second]
        states = {run: (await app.operations.runs.get(OPERATOR, run)).state for run in (first, second, child)}
        assert states == {first: "running", second: "cancelled", child: "running"}
        third = await app.say("three")
        stopped = await app.operations.runs.stop(OPERATOR, MAIN, first)
        assert sorted(stopped.run_ids) == sorted([first, child])
        assert (await app.wait_for_end(child)).state == "cancelled"
        assert (await app.operations.runs.get(OPERATOR, third)).state in {"queued", "running"}


@pytest.mark.requirement("G16")
async def test_a_stop_is_obeyed_though_its_hint_was_lost(tmp_path: Path) -> None:
    class Deaf(LocalBus):
        def publish(self, topic: str, event: object) -> None:
            if not isinstance(event, StopRequested):
                super().publish(topic, event)  # type: ignore[arg-type]

    agent = Waiting()
    async with open_app_fixture(
        tmp_path, agent, bus=Deaf(), timings=EngineTimings(sweep_interval_seconds=0.05, stop_grace_seconds=60)
    ) as app:
        run_id = await app.say("one")
        await wait_for_event(agent.started(MAIN))
        await app.operations.runs.stop(OPERATOR, MAIN)
        assert (await app.wait_for_end(run_id)).state == "cancelled"
        assert agent.cancelled == 1


@pytest.mark.requirement("G16")
async def test_a_thousand_stops_at_once_all_arrive(tmp_path: Path) -> None:
    """More than a listener holds: it is told of the gap and reads the rows."""
    agent = Waiting()
    async with open_app_fixture(
        tmp_path, agent, bus=LocalBus(buffer=4), timings=EngineTimings(sweep_interval_seconds=60)
    ) as app:
        app.bus.publish(STOP_TOPIC, StopRequested(run_id="nobody"))
        keys = [f"agent:main:dashboard:{number}" for number in range(20)]
        ids = [await app.say("go", key) for key in keys]
        for key in keys:
            await wait_for_event(agent.started(key))
        for key in keys:
            row = query_database(app.path, "SELECT id FROM sessions WHERE key = ?", key)[0]
            await app.store.tx(endings.cancel_runs, row["id"], None, app.clock.now())
        for run_id in ids:
            app.bus.publish(STOP_TOPIC, StopRequested(run_id=run_id))
        for run_id in ids:
            assert (await app.wait_for_end(run_id)).state == "cancelled"


class Counting:
    """A transaction that counts what is asked of it."""

    def __init__(self, tx: Tx) -> None:
        self._tx = tx
        self.statements = 0

    async def one(self, query: Query, /, **params: Param) -> Row | None:
        self.statements += 1
        return await self._tx.one(query, **params)

    async def all(self, query: Query, /, **params: Param) -> list[Row]:
        self.statements += 1
        return await self._tx.all(query, **params)

    async def do(self, query: Query, /, **params: Param) -> int:
        self.statements += 1
        return await self._tx.do(query, **params)

    async def lock(self, name: str) -> None:
        await self._tx.lock(name)


async def _stop_counted(tx: Tx, session: int, now: int) -> tuple[Effects, int]:
    counting = Counting(tx)
    stopped = await endings.cancel_runs(counting, session, None, now)
    return stopped, counting.statements


@pytest.mark.requirement("G16", "G22")
async def test_a_stop_costs_the_same_however_many_have_finished_below(tmp_path: Path) -> None:
    agent = Waiting()
    async with open_app_fixture(tmp_path, agent) as app:
        main = await app.create(MAIN)
        await app.create(CHILD, MAIN)
        below = await app.create(GRANDCHILD, CHILD)
        costs: list[int] = []
        for finished in (0, 40):
            for number in range(finished):
                await app.create(f"agent:main:subagent:{number:08d}-1111-1111-1111-111111111111", CHILD)
            run_id = await app.say("below", GRANDCHILD)
            await wait_for_event(agent.started(GRANDCHILD))
            agent.begun.clear()
            stopped, statements = await app.store.tx(_stop_counted, main["id"], app.clock.now())
            assert stopped.stop_requests == [run_id]
            costs.append(statements)
            await app.engine.worker.apply_effects(stopped)
            assert (await app.wait_for_end(run_id)).state == "cancelled"
        assert costs[0] == costs[1]
        assert app.rows("SELECT yielded FROM sessions WHERE id = ?", below["id"]) == [{"yielded": None}]


UNDER_WAY = {
    "queued": "INSERT INTO runs (id, session, origin, digest, input, created_at, deadline_at)"
    " VALUES ('q', ?, 'operator', '', '{}', 1, 9000000000000)",
    "yielded": "UPDATE sessions SET yielded = 'all', yield_run = 'y' WHERE id = ?",
    "asked others": "INSERT INTO tasks (id, digest, requester, requester_key, child, child_key, child_session_id,"
    " agent_id, signature, task, phase, current, options, destination, chain, hop, created_at)"
    " VALUES ('t', '', ?, 'k', 0, 'gone', 'g', 'main', '', 'work', 'running', 't', '{}', '{}', 'c', 1, 1)",
}


@pytest.mark.requirement("G16")
@pytest.mark.parametrize("how", UNDER_WAY)
async def test_a_stop_reaches_what_is_under_way_in_any_sense(tmp_path: Path, how: str) -> None:
    async with open_app_fixture(
        tmp_path, Waiting(), timings=EngineTimings(lease_seconds=3600, sweep_interval_seconds=3600)
    ) as app:
        main = await app.create(MAIN)
        await app.create(CHILD, MAIN)
        below = await app.create(GRANDCHILD, CHILD)
        query_database(app.path, UNDER_WAY[how], below["id"])
        stopped = await app.store.tx(endings.cancel_runs, main["id"], None, app.clock.now())
        assert [ended.run.run_id for ended in stopped.ended_runs] == (["q"] if how == "queued" else [])
        left = "SELECT yielded, yield_run FROM sessions WHERE yielded IS NOT NULL OR yield_run IS NOT NULL"
        assert app.rows(left) == []
        assert app.rows("SELECT id FROM tasks WHERE wakes = 1") == []


@pytest.mark.requirement("G21")
async def test_a_damaged_entry_keeps_no_run_from_ending(tmp_path: Path) -> None:
    begun = asyncio.Event()

    async def stuck(call: ToolRequest) -> ToolOutput:
        if call.call_id == "second":
            begun.set()
            await asyncio.Event().wait()
        return ToolOutput(text="done")

    async def agent(prompt: Prompt) -> AssistantMessage:
        blocks = [ToolCall(id=name, name="stuck", arguments={}) for name in ("first", "second")]
        return AssistantMessage(content=[*blocks], timestamp=1)

    async with open_app_fixture(tmp_path, agent, tools=[make_tool("stuck", stuck)], timings=QUICK) as app:
        run_id = await app.say("go")
        await wait_for_event(begun)

        async def stored() -> bool:
            return bool(query_database(app.path, "SELECT 1 FROM messages WHERE role = 'toolResult'"))

        await wait_until(stored)
        query_database(app.path, "UPDATE messages SET body = '{torn' WHERE role = 'toolResult'")
        await app.operations.runs.stop(OPERATOR, MAIN)
        assert (await app.wait_for_end(run_id)).state == "cancelled"


@pytest.mark.requirement("G2")
async def test_many_expired_runs_brick_no_lane(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "MAX_RUNS_SKIPPED_PER_CLAIM", 3)
    agent = Waiting()
    async with open_app_fixture(tmp_path, agent) as app:
        first = await app.say("one")
        await wait_for_event(agent.started(MAIN))
        late = [await app.say(f"late {number}") for number in range(8)]
        query_database(app.path, "UPDATE runs SET created_at = 1 WHERE state = 'queued'")
        await app.operations.runs.stop(OPERATOR, MAIN, first)
        assert (await app.wait_for_end(first)).state == "cancelled"
    async with open_app_fixture(tmp_path, agent, timings=QUICK) as app:
        assert {(await app.wait_for_end(run_id)).state for run_id in late} == {"timeout"}


@pytest.mark.requirement("G17")
async def test_a_stop_during_a_commit_stores_nothing_twice(tmp_path: Path) -> None:
    """The answer is on its way to the disk when the stop comes: it is kept once, and not again as what was left."""
    deciding = asyncio.Event()

    class Agent:
        reads_history = True
        context_window = None

        async def step(self, prompt: Prompt, deltas: Deltas) -> AssistantMessage:
            deltas.text("Let me look.")
            deciding.set()
            block = ToolCall(id="c", name="look", arguments={})
            return AssistantMessage(
                content=[TextBlock(text="Let me look."), block], timestamp=1, stop_reason="toolUse"
            )

        async def close(self) -> None: ...

    async def look(call: ToolRequest) -> ToolOutput:
        await asyncio.Event().wait()
        return ToolOutput(text="never")

    async with open_app_fixture(tmp_path, Agent(), tools=[make_tool("look", look)]) as app:
        run_id = await app.say("go")
        await wait_for_event(deciding)
        await app.operations.runs.stop(OPERATOR, MAIN)
        assert (await app.wait_for_end(run_id)).state == "cancelled"
        said = [str(entry) for entry in await app.transcript() if "Let me look." in str(entry)]
        assert len(said) == 1


@pytest.mark.requirement("G5")
async def test_calls_of_a_run_never_share_a_key(tmp_path: Path) -> None:
    keys: list[str] = []

    async def act(call: ToolRequest) -> ToolOutput:
        keys.append(call.key)
        return ToolOutput(text="done", details={"big": "x" * 5000})

    async def agent(prompt: Prompt) -> AssistantMessage:
        done = sum(entry.__struct_config__.tag == "toolResult" for entry in prompt.messages)
        if done >= 3:
            return make_answer("all \ud83d done".encode(errors="replace").decode())
        block = ToolCall(id="same", name="act", arguments={})
        return AssistantMessage(content=[block, block] if done == 0 else [block], timestamp=done)

    async with open_app_fixture(tmp_path, agent, tools=[make_tool("act", act)]) as app:
        assert (await app.ask("go")).state == "ok"
        assert len(set(keys)) == 3
        results = [entry for entry in await app.transcript() if entry["role"] == "toolResult"]
        assert all("details" not in entry for entry in results)  # too much to keep


@pytest.mark.requirement("G24")
async def test_a_tool_that_would_end_the_process_fails_and_no_more(tmp_path: Path) -> None:
    async def leaving(call: ToolRequest) -> ToolOutput:
        raise SystemExit(3)

    async def agent(prompt: Prompt) -> AssistantMessage:
        return make_tool_calls("leaving") if len(prompt.messages) == 1 else make_answer("fine")

    async with open_app_fixture(tmp_path, agent, tools=[make_tool("leaving", leaving)]) as app:
        assert (await app.ask("go")).reply == "fine"
        assert "tried to end the process" in (await app.transcript())[2]["content"][0]["text"]


async def test_a_tool_that_returns_half_a_character_is_understood(tmp_path: Path) -> None:
    async def odd(call: ToolRequest) -> ToolOutput:
        return ToolOutput(text="half \ud83d and \ud83d\ude00")

    async def agent(prompt: Prompt) -> AssistantMessage:
        return make_tool_calls("odd") if len(prompt.messages) == 1 else make_answer("fine")

    async with open_app_fixture(tmp_path, agent, tools=[make_tool("odd", odd)]) as app:
        assert (await app.ask("go")).reply == "fine"
        result = (await app.transcript())[2]
        assert result["content"] == [{"type": "text", "text": "half \ufffd and \N{GRINNING FACE}"}]


TASK = Query(
    "test.task",
    "INSERT INTO tasks (id, digest, requester, requester_key, child, child_key, child_session_id, agent_id, signature,"
    " task, phase, current, options, destination, chain, hop, created_at) VALUES (:id, 'd', :requester, :requester_key,"
    " :child, :child_key, :child_session_id, 'main', 'g', 't', 'running', :current, :options, '{}', 'c', 1, 1)"
    " RETURNING n",
)
RUN = Query(
    "test.run",
    "INSERT INTO runs (id, session, origin, digest, input, deadline_at, created_at, task)"
    " VALUES (:id, :session, :origin, 'd', :input, :deadline, 1, :task)",
)


@pytest.mark.requirement("G17", "P6")
async def test_what_ends_with_its_parent_does_not_end_again_by_its_own_deadline(tmp_path: Path) -> None:
    """Both are queued, and the time of both is over."""
    store = await open_test_database(tmp_path / DATABASE, synchronous="normal")

    async def queued(tx: Tx, above: Row, name: str, run_id: str, deadline: int) -> Row:
        child = await session_rows.create_session(
            tx, keys.parse(f"agent:main:subagent:{name}"), 1, NewSession(parent=above["id"])
        )
        task = await tx.one(
            TASK,
            id=f"task {name}",
            requester=above["id"],
            requester_key=above["key"],
            child=child["id"],
            child_key=child["key"],
            child_session_id=child["session_id"],
            current=run_id,
            options='{"announce":"parent"}',
        )
        assert task is not None
        said = encode_message(UserMessage(content="x", timestamp=1))
        origin = "sessions_spawn"
        await tx.do(
            RUN, id=run_id, session=child["id"], origin=origin, input=said, deadline=deadline, task=task["n"]
        )
        return child

    async def family(tx: Tx) -> None:
        top = await session_rows.create_session(tx, keys.parse("agent:main:main"), 1, NewSession())
        await queued(tx, await queued(tx, top, "parent", "first", 1000), "child", "second", 1500)

    await store.tx(family)
    expired = await store.tx(endings.expire_overdue_work, 2000)
    assert [(ended.run.run_id, ended.ending.state) for ended in expired.ended_runs] == [
        ("first", "timeout"),
        ("second", "cancelled"),
    ]
    await store.close()
