"""What is put away: sub-agents whose time is over, with their files, and records that are no longer needed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from antiphon.access import Caller
from antiphon.clock import ManualClock
from antiphon.engine.collaboration import attachments, subagent_archive
from antiphon.engine.runs import run_queue
from antiphon.engine.runs.run_queue import NOTE_ORIGIN, Submission
from antiphon.engine.sessions import retention, session_rows
from antiphon.engine.sessions.retention import RetentionPolicy
from antiphon.engine.supervisor import EngineTimings
from antiphon.errors import AntiphonError
from antiphon.messages import UserMessage
from antiphon.operations.types import SendRequest
from antiphon.runtimes import Prompt
from antiphon.store import Store
from support.agents_fixture import (
    HELPER,
    MAIN,
    OPERATOR,
    AgentsFixture,
    RecordingChannel,
    ScriptedAgent,
    get_last_user_text,
    make_agents_config,
    open_agents_fixture,
)
from support.app_fixture import wait_for_event

pytestmark = pytest.mark.anyio

SLOW = EngineTimings(
    lease_seconds=10**9, sweep_interval_seconds=3600, retention_interval_seconds=3600
)  # the test sweeps
FILE = {"name": "a.txt", "content": "x"}
YEAR = RetentionPolicy(delete_archived_after_days=365)


def store_of(agents: AgentsFixture) -> Store:
    return agents.operations.context.store


async def spawned(agents: AgentsFixture, **options: Any) -> dict[str, Any]:
    """A child that has done its task, and whose report has been delivered."""
    said = await agents.use("sessions_spawn", **{"task": "dig", **options})
    await agents.wait_until_idle()
    return said


async def sweep(agents: AgentsFixture) -> list[str]:
    now = agents.app.clock.now()
    return [
        removed.key for removed in await subagent_archive.archive_finished_subagents(store_of(agents), now)
    ]


async def queue(agents: AgentsFixture, key: str, run_id: str, origin: str = "chat") -> None:
    """Accepted, and not claimed yet."""
    (row,) = agents.rows("SELECT id FROM sessions WHERE key = ?", key)
    message = UserMessage(content="one more thing", timestamp=1)
    waiting = Submission(run_id=run_id, session=row["id"], session_key=key, origin=origin, message=message)
    await store_of(agents).tx(run_queue.submit, waiting, agents.app.clock.now())


def sessions_like(agents: AgentsFixture, key: str) -> list[dict[str, Any]]:
    return agents.rows("SELECT archived FROM sessions WHERE key = ?", key)


# --- children ---


@pytest.mark.requirement("P7", "G27", "G1")
@pytest.mark.parametrize("cleanup", ["keep", "delete"])
async def test_a_child_with_an_accepted_message_is_put_away_after_it_has_answered(
    tmp_path: Path, cleanup: str
) -> None:
    clock = ManualClock()
    main = ScriptedAgent("found")
    async with open_agents_fixture(
        make_agents_config(), tmp_path, functions={"main": main}, clock=clock, timings=SLOW
    ) as agents:
        await agents.open_sessions(MAIN)
        child = (await spawned(agents, cleanup=cleanup))["childSessionKey"]
        clock.advance(seconds=3600)
        await queue(agents, child, "accepted")
        assert await sweep(agents) == []
        assert sessions_like(agents, child) == [{"archived": 0}]
        await agents.ask("and this", child)
        assert (await agents.wait_for_end("accepted")).reply == "found"
        assert await sweep(agents) == [], "it is looked at again later, not at once"
        clock.advance(seconds=60)
        assert await sweep(agents) == [child]
        assert sessions_like(agents, child) == ([{"archived": 1}] if cleanup == "keep" else [])


@pytest.mark.requirement("P7")
async def test_a_note_keeps_no_child(tmp_path: Path) -> None:
    async with open_agents_fixture(
        make_agents_config(), tmp_path, functions={"main": ScriptedAgent()}, timings=SLOW
    ) as agents:
        await agents.open_sessions(MAIN)
        child = (await spawned(agents, cleanup="delete"))["childSessionKey"]
        await queue(agents, child, "said", NOTE_ORIGIN)
        assert await sweep(agents) == [child]
        assert agents.rows("SELECT id FROM runs WHERE id = 'said'") == []


@pytest.mark.requirement("G1", "G13")
async def test_a_session_with_an_accepted_message_cannot_be_forgotten(tmp_path: Path) -> None:
    """An unchecked request is refused by the store, and changes nothing."""
    async with open_agents_fixture(
        make_agents_config(), tmp_path, functions={"main": ScriptedAgent()}, timings=SLOW
    ) as agents:
        await agents.open_sessions(MAIN)
        child = (await spawned(agents))["childSessionKey"]
        await queue(agents, child, "accepted")
        (row,) = agents.rows("SELECT id FROM sessions WHERE key = ?", child)
        before = agents.rows("SELECT * FROM messages") + agents.rows("SELECT * FROM runs")
        with pytest.raises(AntiphonError):
            await store_of(agents).tx(session_rows.delete_session, row["id"], child, 1)
        assert agents.rows("SELECT * FROM messages") + agents.rows("SELECT * FROM runs") == before


@pytest.mark.requirement("G21")
async def test_a_sweep_puts_a_bounded_number_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subagent_archive, "MAX_TASKS_PER_SWEEP", 2)
    async with open_agents_fixture(
        make_agents_config(), tmp_path, functions={"main": ScriptedAgent()}, timings=SLOW
    ) as agents:
        await agents.open_sessions(MAIN)
        for _ in range(3):
            await spawned(agents, cleanup="delete")
        assert [len(await sweep(agents)) for _ in range(3)] == [2, 1, 0]


# --- their files ---


@pytest.mark.requirement("P7", "P9")
async def test_files_stay_while_their_child_is_at_work(tmp_path: Path) -> None:
    clock = ManualClock()
    begun, release = asyncio.Event(), asyncio.Event()

    async def agent(prompt: Prompt) -> str:
        if get_last_user_text(prompt) == "more":
            begun.set()
            await wait_for_event(release)
        return "found"

    async with open_agents_fixture(
        make_agents_config(), tmp_path, functions={"main": ScriptedAgent(agent)}, clock=clock, timings=SLOW
    ) as agents:
        await agents.open_sessions(MAIN)
        said = await spawned(agents, attachments=[FILE])
        file = (
            tmp_path
            / "workspaces/main/subagents"
            / said["childSessionKey"].rpartition(":")[2]
            / said["attachments"]["relDir"]
            / "a.txt"
        )
        run_id = await agents.say("more", said["childSessionKey"])
        await wait_for_event(begun)
        clock.advance(seconds=3600)
        assert await sweep(agents) == []
        assert file.read_text() == "x"
        release.set()
        await agents.wait_for_end(run_id)
        clock.advance(seconds=60)
        assert await sweep(agents) == [said["childSessionKey"]]
        assert not file.exists()


@pytest.mark.requirement("P7", "P9", "G2")
@pytest.mark.parametrize("cleanup", ["keep", "delete"])
async def test_files_that_a_crash_left_behind_go_with_the_next_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cleanup: str
) -> None:
    clock = ManualClock()

    def die(workspace: Path, folder: str, *, below: str = "") -> None:
        raise SystemError("the process ends here")

    async with open_agents_fixture(
        make_agents_config(), tmp_path, functions={"main": ScriptedAgent()}, clock=clock, timings=SLOW
    ) as agents:
        await agents.open_sessions(MAIN)
        said = await spawned(agents, attachments=[FILE], cleanup=cleanup)
        file = (
            tmp_path
            / "workspaces/main/subagents"
            / said["childSessionKey"].rpartition(":")[2]
            / said["attachments"]["relDir"]
            / "a.txt"
        )
        clock.advance(seconds=3600)
        with monkeypatch.context() as crash:
            crash.setattr(attachments, "remove", die)
            with pytest.raises(SystemError):
                await sweep(agents)
        assert file.exists()
        assert agents.rows("SELECT archived_at FROM tasks") == [{"archived_at": None}]
        await sweep(agents)
        assert not file.exists()
        assert agents.rows("SELECT archived_at FROM tasks") == [{"archived_at": clock.now()}]
        assert sessions_like(agents, said["childSessionKey"]) == (
            [{"archived": 1}] if cleanup == "keep" else []
        )


# --- words ---


@pytest.mark.requirement("G21", "P7")
@pytest.mark.parametrize(
    ("caller", "kept"), [(OPERATOR, ("", None, None)), (Caller.agent("main", MAIN), ("dig", "found"))]
)
async def test_of_a_child_that_a_person_deletes_not_even_the_result_is_kept(
    tmp_path: Path, caller: Caller, kept: tuple[str | None, ...]
) -> None:
    async with open_agents_fixture(
        make_agents_config(), tmp_path, functions={"main": ScriptedAgent("found")}, timings=SLOW
    ) as agents:
        await agents.open_sessions(MAIN)
        other = await spawned(agents, task="another")
        said = await spawned(agents)
        before = dict(task_of(agents, said))
        assert await agents.operations.sessions.delete(caller, said["childSessionKey"])
        after = task_of(agents, said)
        words = ("task", "result", "report")
        assert tuple(after[name] for name in words)[: len(kept)] == kept
        assert {n: v for n, v in after.items() if n not in words} == {
            n: v for n, v in before.items() if n not in words
        }
        assert (task_of(agents, other)["task"], task_of(agents, other)["result"]) == ("another", "found")


def task_of(agents: AgentsFixture, said: dict[str, Any]) -> dict[str, Any]:
    (row,) = agents.rows("SELECT * FROM tasks WHERE id = ?", said["runId"])
    return row


# --- records ---

RECORDS = ("exchanges", "tasks", "deliveries", "chains", "commands")


def counts(agents: AgentsFixture) -> dict[str, int]:
    return {name: len(agents.rows(f"SELECT 1 FROM {name}")) for name in RECORDS}  # noqa: S608


async def busy_day(agents: AgentsFixture) -> str:
    """One record of each kind that will be over, and some that will not; the child that stays."""
    await agents.open_sessions(MAIN, HELPER)
    await agents.operations.exchanges.send(
        OPERATOR, SendRequest(session=HELPER, message="hello", reply_back=0), requester=MAIN
    )
    gone = await spawned(agents, cleanup="delete")
    kept = await spawned(agents)
    assert await sweep(agents) == [gone["childSessionKey"]]
    await agents.operations.sessions.create(OPERATOR, session="agent:main:dashboard:side")
    await agents.operations.sessions.delete(OPERATOR, "agent:main:dashboard:side", key="once")
    return kept["childSessionKey"]


@pytest.mark.requirement("G21", "G24")
async def test_records_that_are_over_go_by_the_same_time_as_archived_sessions(tmp_path: Path) -> None:
    clock = ManualClock()
    cast = make_agents_config("helper", agents={"defaults": {"subagents": {"archiveAfterMinutes": 0}}})
    players = {"main": ScriptedAgent("found"), "helper": ScriptedAgent("hi")}
    async with open_agents_fixture(cast, tmp_path, functions=players, clock=clock, timings=SLOW) as agents:
        kept = await busy_day(agents)
        before = counts(agents)
        assert before["tasks"] == 2 and all(before.values())
        clock.advance(days=365, seconds=-1)
        for keep in (RetentionPolicy(), RetentionPolicy(archive_after_days=10**5), YEAR):
            await retention.apply_retention(store_of(agents), keep, clock.now())
            assert counts(agents) == before
        clock.advance(seconds=2)
        await retention.apply_retention(store_of(agents), YEAR, clock.now())
        assert counts(agents) == {**dict.fromkeys(RECORDS, 0), "tasks": 1}
        assert agents.rows("SELECT child_key FROM tasks") == [{"child_key": kept}], "its child is still there"


@pytest.mark.requirement("G21", "G14", "G7")
async def test_records_that_are_still_needed_stay(tmp_path: Path) -> None:
    clock = ManualClock()
    group = "agent:main:discord:group:g1"
    begun, release = asyncio.Event(), asyncio.Event()

    async def agent(prompt: Prompt) -> str:
        if get_last_user_text(prompt) == "long":
            begun.set()
            await wait_for_event(release)
        return "found"

    doubtful = RecordingChannel(fails=lambda key: RuntimeError("the line went dead"))
    players = {"main": ScriptedAgent(agent)}
    async with open_agents_fixture(
        make_agents_config(),
        tmp_path,
        functions=players,
        channels={"discord": doubtful},
        clock=clock,
        timings=SLOW,
    ) as agents:
        await agents.open_sessions(MAIN, group)
        said = await agents.use("sessions_spawn", group, task="dig", attachments=[FILE])
        await agents.wait_until_idle()
        await agents.operations.sessions.delete(OPERATOR, said["childSessionKey"])
        await agents.use("sessions_spawn", task="long")
        await wait_for_event(begun)
        await queue(agents, group, "waiting")
        for id in ("running", "queued", "task", "over"):
            agents.rows("INSERT INTO chains (id, runs, created_at) VALUES (?, 1, 1)", id)
        agents.rows("UPDATE runs SET chain = state WHERE state IN ('running', 'queued')")
        agents.rows("UPDATE tasks SET chain = 'task' WHERE phase = 'running'")
        clock.advance(days=1)  # the run's own time is two
        at_once = RetentionPolicy(delete_archived_after_days=0.5)
        await retention.apply_retention(store_of(agents), at_once, clock.now())
        assert agents.rows("SELECT state FROM deliveries") == [{"state": "ambiguous"}]
        phases = [row["phase"] for row in agents.rows("SELECT phase FROM tasks ORDER BY n")]
        assert phases == ["settled", "running"], "the files of the first one have not been removed yet"
        assert {row["id"] for row in agents.rows("SELECT id FROM chains")} == {"running", "queued", "task"}
        assert len(await sweep(agents)) == 1
        await retention.apply_retention(store_of(agents), at_once, clock.now())
        assert [row["phase"] for row in agents.rows("SELECT phase FROM tasks")] == ["running"]
        release.set()
        await agents.ask("go on", group)
        await agents.wait_until_idle()


@pytest.mark.requirement("G21")
async def test_a_sweep_takes_a_bounded_number_of_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        retention, "MAX_RECORDS_PER_SWEEP", 4
    )  # a deletion is one, and that of its conversation another
    clock = ManualClock()
    async with open_agents_fixture(
        make_agents_config(), tmp_path, functions={"main": ScriptedAgent()}, clock=clock, timings=SLOW
    ) as agents:
        for number in range(3):
            await agents.operations.sessions.create(OPERATOR, session="agent:main:dashboard:side")
            await agents.operations.sessions.delete(OPERATOR, "agent:main:dashboard:side", key=f"{number}")
            clock.advance(seconds=1)
        clock.advance(days=366)
        await retention.apply_retention(store_of(agents), YEAR, clock.now())
        left = agents.rows("SELECT id FROM commands WHERE digest <> ''")
        assert left == [{"id": "2"}], "the oldest go first"
        await retention.apply_retention(store_of(agents), YEAR, clock.now())
        assert agents.rows("SELECT id FROM commands") == []
