"""Scheduled jobs: managed by operators, fired exactly once a slot, also after crashes and changes.

Run as a program, this file is the process of the kill test: see `lives`.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from antiphon.access import READ_SCOPE, WRITE_SCOPE, Caller
from antiphon.app import open_app
from antiphon.bus import Delivered, Listener, SessionChanged, session_topic
from antiphon.clock import ManualClock
from antiphon.config import Config
from antiphon.engine.jobs import firings, jobs
from antiphon.engine.jobs.jobs import AgentTurn, AnnounceDelivery, FiringContext, SystemEvent
from antiphon.engine.jobs.schedule import AtSchedule, CronSchedule, EverySchedule, Schedule
from antiphon.engine.jobs.scheduler import UNFIRED_JOB_RETRY_SECONDS, Scheduler
from antiphon.engine.sessions import retention
from antiphon.engine.sessions.resolver import SessionResolver
from antiphon.engine.sessions.retention import RetentionPolicy
from antiphon.engine.supervisor import EngineTimings
from antiphon.errors import AntiphonError, Conflict, Forbidden, InvalidInput, NotFound, TooLarge
from antiphon.operations.jobs import JobOperations, JobPatch, JobSpec, JobView, parse_job_input
from antiphon.runtimes import Prompt
from chaos.harness import get_store_arguments
from chaos.killer import DatabaseLocation
from support.app_fixture import (
    BOUND,
    DATABASE,
    MAIN,
    OPERATOR,
    AppFixture,
    make_config,
    open_app_fixture,
    wait_until,
)
from support.databases import dump_database, query_database

pytestmark = [pytest.mark.anyio, pytest.mark.requirement("W5")]

START = 1_700_000_000_000
MINUTE = 60_000
HOUR = 60 * MINUTE
QUIET = EngineTimings(lease_seconds=10**7, sweep_interval_seconds=3600, retention_interval_seconds=3600)
WORDS = AgentTurn(message="say good morning")
HOURLY = EverySchedule(every_ms=HOUR)
_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class JobsFixture:
    """An app with jobs, and a clock that is moved by hand."""

    app: AppFixture
    schedules: JobOperations
    scheduler: Scheduler
    clock: ManualClock

    async def add(self, schedule: Schedule = HOURLY, **options: Any) -> JobView:
        name = f"job {next(_numbers)}"
        wanted: dict[str, Any] = {"name": name, "schedule": schedule, "payload": WORDS, **options}
        spec = JobSpec(**wanted)
        return await self.schedules.add(OPERATOR, spec)

    async def get(self, job: JobView) -> JobView:
        return await self.schedules.get(OPERATOR, job.id)

    async def pass_(self, seconds: float) -> None:
        """Time goes by, and the scheduler looks."""
        self.clock.advance(seconds=seconds)
        await self.scheduler.fire_due_jobs()

    async def settle(self) -> None:
        """Until everything that was fired has ended."""
        for run in self.runs():
            await self.app.wait_for_end(run)

    def runs(self) -> list[str]:
        return [row["id"] for row in self.app.rows("SELECT id FROM runs ORDER BY n")]


async def echo(prompt: Prompt) -> str:
    return "good morning"


@asynccontextmanager
async def open_jobs_fixture(
    path: Path, agent: Callable[[Prompt], Any] = echo, *, clock: ManualClock | None = None, **settings: Any
) -> AsyncGenerator[JobsFixture]:
    on_commit = settings.pop("on_commit", None)
    clock = clock or ManualClock(START)
    config = make_config({"cron": {"maxConcurrentRuns": 100}, **settings})
    async with open_app_fixture(
        path, agent, clock=clock, timings=QUIET, config=config, on_commit=on_commit
    ) as app:
        scheduler = Scheduler(
            context=FiringContext(config, SessionResolver(config)),
            store=app.store,
            bus=app.bus,
            clock=clock,
            worker=app.engine.worker,
        )
        schedules = JobOperations(app.operations.context, scheduler)
        yield JobsFixture(app, schedules, scheduler, clock)


# --- firing ---


@pytest.mark.requirement("W2", "G18", "S6")
async def test_an_answer_that_is_to_be_announced_reaches_the_chat_of_the_main_session_once(
    tmp_path: Path,
) -> None:
    async with open_jobs_fixture(tmp_path) as at:
        await at.app.ask("hello")
        row = at.app.rows("SELECT id FROM sessions WHERE key = 'agent:main:main'")[0]
        job = await at.add(delivery=AnnounceDelivery())
        async with at.app.bus.listen(session_topic(row["id"])) as events:
            await at.pass_(3600)
            heard: list[object] = []
            await wait_until(lambda: _delivered(events, heard))
        assert [event.text for event in heard if isinstance(event, Delivered)] == ["good morning"]
        note = (await at.app.transcript())[-1]
        assert note["role"] == "assistant" and note["content"] == [{"type": "text", "text": "good morning"}]
        assert note["provenance"] == {"kind": "cron", "sourceSessionKey": f"agent:main:cron:{job.id}"}
        deliveries = at.app.rows("SELECT key, state, session_key FROM deliveries")
        run_id = f"cron:{job.id}:{START + HOUR}"
        assert deliveries == [
            {"key": f"run:{run_id}", "state": "delivered", "session_key": "agent:main:main"}
        ]


@pytest.mark.requirement("W2", "G1")
async def test_an_answer_for_a_channel_that_is_not_there_is_a_dead_letter(tmp_path: Path) -> None:
    async with open_jobs_fixture(tmp_path) as at:
        await at.add(delivery=AnnounceDelivery(channel="webchat", to="the loft"))
        at.app.rows(
            "UPDATE jobs SET delivery = replace(delivery, 'webchat', 'pigeon')"
        )  # as it was stored once
        await at.pass_(3600)
        await at.settle()

        async def dead() -> bool:
            rows = at.app.rows("SELECT state, error FROM deliveries")
            return [row["state"] for row in rows] == ["dead"] and "'pigeon'" in rows[0]["error"]

        await wait_until(dead)


async def _delivered(events: Listener, heard: list[object]) -> bool:
    heard.append(await events.get(0.1))
    return isinstance(heard[-1], Delivered)


async def test_a_job_fires_into_a_session_of_its_own_and_says_how_it_went(tmp_path: Path) -> None:
    async with open_jobs_fixture(tmp_path) as at, at.app.bus.listen("sessions") as events:
        job = await at.add(name="The morning")
        assert job.schedule == EverySchedule(every_ms=HOUR, anchor_ms=START)
        assert (job.session_target, job.agent_id, job.state.next_run_at_ms) == (
            "isolated",
            "main",
            START + HOUR,
        )
        await at.pass_(3599.999)
        assert at.runs() == []
        await at.pass_(0.001)
        run_id = f"cron:{job.id}:{START + HOUR}"
        assert at.runs() == [run_id]
        key = f"agent:main:cron:{job.id}"
        heard: list[object] = []
        await wait_until(lambda: _heard(events, heard, SessionChanged(session_key=key, reason="cron")))
        view = await at.app.wait_for_end(run_id)
        assert (view.state, view.session_key, view.reply) == ("ok", key, "good morning")
        [said, answer] = await at.app.transcript(key)
        assert (said["content"], said["provenance"]) == ("say good morning", {"kind": "cron"})
        assert answer["role"] == "assistant"
        state = (await at.get(job)).state
        assert (state.last_status, state.last_run_id, state.last_run_at_ms) == ("ok", run_id, START + HOUR)
        assert (state.next_run_at_ms, state.last_error) == (START + 2 * HOUR, None)
        await at.pass_(3600)
        await at.settle()
        assert len(await at.app.transcript(key)) == 4  # one session for all its firings
        session = await at.app.operations.sessions.describe(OPERATOR, key)
        assert (session.kind, session.display_name) == ("cron", "The morning")
        assert at.app.rows("SELECT firings, failures FROM jobs") == [{"firings": 2, "failures": 0}]


async def _heard(events: Any, heard: list[object], wanted: object) -> bool:
    heard.append(await events.get(BOUND))
    return wanted in heard


async def test_a_run_under_way_and_a_run_that_failed_are_told(tmp_path: Path) -> None:
    release = asyncio.Event()

    async def agent(prompt: Prompt) -> str:
        await release.wait()
        raise InvalidInput("It did not work.", "Do something else.")

    async with open_jobs_fixture(tmp_path, agent) as at:
        job = await at.add()
        assert (await at.get(job)).state.last_status is None
        await at.pass_(3600)
        assert (await at.get(job)).state.last_status == "running"
        release.set()
        await at.settle()
        [job] = await at.schedules.list(OPERATOR)
        assert job.state.last_status == "error"
        assert "It did not work." in (job.state.last_error or "")


async def test_slots_that_were_missed_are_one_firing_for_the_latest(tmp_path: Path) -> None:
    clock = ManualClock(START)
    async with open_jobs_fixture(tmp_path, clock=clock) as at:
        every, cron = await at.add(), await at.add(CronSchedule(expr="0 8 * * *", tz="Europe/Berlin"))
        once = await at.add(AtSchedule(at_ms=START + HOUR))
    clock.advance(days=100, seconds=1800)
    async with open_jobs_fixture(tmp_path, clock=clock) as at:
        await at.scheduler.fire_due_jobs()
        await at.scheduler.fire_due_jobs()
        now = clock.now()
        [slot] = [int(run.rpartition(":")[2]) for run in at.runs() if cron.id in run]
        assert 0 <= now - slot < 24 * HOUR
        assert [run for run in at.runs() if cron.id not in run] == [
            f"cron:{every.id}:{START + 2400 * HOUR}",
            f"cron:{once.id}:{START + HOUR}",
        ]
        assert (await at.get(every)).state.next_run_at_ms == START + 2401 * HOUR
        assert (await at.get(cron)).state.next_run_at_ms == slot + 24 * HOUR
        await at.settle()


async def test_a_clock_that_goes_back_repeats_nothing(tmp_path: Path) -> None:
    async with open_jobs_fixture(tmp_path) as at:
        await at.add()
        await at.pass_(3600)
        at.clock.advance(seconds=-3000)
        await at.pass_(2999)
        assert len(at.runs()) == 1
        await at.settle()


async def test_once_is_once(tmp_path: Path) -> None:
    async with open_jobs_fixture(tmp_path) as at:
        kept = await at.add(AtSchedule(at_ms=START + HOUR))
        gone = await at.add(AtSchedule(at="2023-11-14T23:13:20Z"), delete_after_run=True)
        assert gone.state.next_run_at_ms == START + HOUR
        for _ in range(3):
            await at.pass_(3600)
        await at.settle()
        assert sorted(at.runs()) == sorted(f"cron:{job.id}:{START + HOUR}" for job in (kept, gone))
        assert await at.schedules.list(OPERATOR) == []
        [left] = await at.schedules.list(OPERATOR, include_disabled=True)
        assert (left.id, left.enabled, left.state.next_run_at_ms) == (kept.id, False, None)
        assert left.state.last_status == "ok"
        with pytest.raises(NotFound):
            await at.get(gone)
        with pytest.raises(InvalidInput) as refused:
            await at.schedules.update(OPERATOR, kept.id, JobPatch(enabled=True))
        assert refused.value.data["field"] == "schedule"
        again = JobPatch(enabled=True, schedule=AtSchedule(at_ms=at.clock.now()))  # just now is soon enough
        await at.schedules.update(OPERATOR, kept.id, again)
        await at.scheduler.fire_due_jobs()
        await at.settle()
        assert len(at.runs()) == 3


async def test_a_one_time_job_that_could_not_begin_is_not_swept_away(tmp_path: Path) -> None:
    async with open_jobs_fixture(tmp_path) as at:
        await at.app.create(MAIN)
        job = await at.add(AtSchedule(at_ms=START + 1), delete_after_run=True, session_target="session:main")
        at.app.rows("UPDATE sessions SET send_policy = 'deny'")
        await at.pass_(1)
        [job] = await at.schedules.list(OPERATOR, include_disabled=True)
        assert (job.enabled, job.state.last_status) == (False, "error")


@pytest.mark.parametrize(("scope", "key"), [("per-sender", "agent:helper:main"), ("global", "main")])
async def test_main_is_the_agents_main_session(tmp_path: Path, scope: str, key: str) -> None:
    agents = {"list": [{"id": "main"}, {"id": "helper"}]}
    async with open_jobs_fixture(tmp_path, session={"scope": scope}, agents=agents) as at:
        job = await at.add(payload=SystemEvent(text="tea time"), agent_id="Helper")
        assert (job.session_target, job.agent_id) == ("main", "helper")
        await at.add(session_target="main", agent_id="helper")
        named = None
        if scope == "global":
            await at.app.operations.sessions.open(OPERATOR, "main")
            named = await at.add(session_target="session:agent:helper:main")
            assert named.session_target == "session:main"
        await at.pass_(3600)
        await at.settle()
        assert at.app.rows("SELECT key FROM sessions") == [{"key": key}]
        assert len(at.runs()) == (2 if named is None else 3)
        [first, *_] = await at.app.transcript("main" if scope == "global" else key)
        assert first["content"] == "tea time"


async def test_a_session_that_is_gone_or_closed_is_an_error_and_not_the_end(tmp_path: Path) -> None:
    chat = "agent:main:direct:bob"
    async with open_jobs_fixture(tmp_path) as at:
        with pytest.raises(NotFound) as refused:
            await at.add(session_target=f"session:{chat}")
        assert refused.value.data["field"] == "sessionTarget"
        await at.app.create(chat)
        job = await at.add(session_target="session:direct:bob")
        assert job.session_target == f"session:{chat}"
        at.app.rows("UPDATE sessions SET send_policy = 'deny'")
        await at.pass_(3600)
        state = (await at.get(job)).state
        assert (state.last_status, state.last_run_id) == ("error", None)
        assert "send blocked by session policy" in (state.last_error or "")
        assert state.next_run_at_ms == START + 2 * HOUR
        at.app.rows("UPDATE sessions SET send_policy = NULL")
        await at.pass_(3600)
        await at.settle()
        state = (await at.get(job)).state
        assert (state.last_status, state.last_error) == ("ok", None)
        at.clock.advance(days=10)
        keep = RetentionPolicy(archive_after_days=5, delete_archived_after_days=5)
        await retention.apply_retention(at.app.store, keep, at.clock.now())
        at.clock.advance(days=10)
        [removed] = await retention.apply_retention(at.app.store, keep, at.clock.now())
        assert removed.key == chat
        assert (await at.get(job)).state.last_status is None  # the run went with its session
        await at.scheduler.fire_due_jobs()
        state = (await at.get(job)).state
        assert state.last_status == "error" and "was not found" in (state.last_error or "")
        assert at.app.rows("SELECT firings, failures FROM jobs") == [{"firings": 3, "failures": 2}]
        fired = await at.schedules.run(OPERATOR, job.id)
        assert not fired.ran and "was not found" in (fired.reason or "")


async def test_policy_rules_of_the_config_hold_for_jobs(tmp_path: Path) -> None:
    rules = {"rules": [{"action": "deny", "match": {"keyPrefix": "cron:"}}]}
    async with open_jobs_fixture(tmp_path, session={"sendPolicy": rules}) as at:
        job = await at.add()
        await at.pass_(3600)
        assert "send blocked" in ((await at.get(job)).state.last_error or "")


async def test_an_agent_or_a_zone_that_is_no_more_is_an_error_of_the_job(tmp_path: Path) -> None:
    clock = ManualClock(START)
    async with open_jobs_fixture(
        tmp_path, clock=clock, agents={"list": [{"id": "main"}, {"id": "helper"}]}
    ) as at:
        orphan, homeless, fine = await at.add(agent_id="helper"), await at.add(), await at.add()
        lost = '{"kind":"cron","expr":"* * * * *","tz":"Atlantis/Capital"}'
        at.app.rows("UPDATE jobs SET schedule = ? WHERE id = ?", lost, homeless.id)
    async with open_jobs_fixture(tmp_path, clock=clock) as at:
        await at.pass_(3600)
        await at.settle()
        assert at.runs() == [f"cron:{fine.id}:{START + HOUR}"]
        assert "There is no agent 'helper'" in ((await at.get(orphan)).state.last_error or "")
        assert (await at.get(orphan)).enabled
        lost_job = await at.get(homeless)
        assert "There is no time zone" in (lost_job.state.last_error or "") and not lost_job.enabled


async def test_a_full_lane_keeps_the_slot_until_there_is_room(tmp_path: Path) -> None:
    release = asyncio.Event()

    async def agent(prompt: Prompt) -> str:
        await release.wait()
        return "ok"

    async with open_jobs_fixture(tmp_path, agent, store={"laneMaxQueued": 1}) as at:
        active = await at.app.say("one")
        await wait_until(lambda: _state(at, active, "running"))
        await at.app.say("two")
        job = await at.add(session_target="main")
        await at.pass_(3600)
        state = (await at.get(job)).state
        assert (state.last_status, state.last_error) == (None, None), "the slot is kept until there is room"
        release.set()
        await at.settle()
        await at.pass_(0)
        await at.settle()
        assert (await at.get(job)).state.last_status == "ok"


@pytest.mark.requirement("G12")
async def test_a_full_lane_holds_up_no_other_job(tmp_path: Path) -> None:
    release = asyncio.Event()
    group = "agent:main:telegram:group:1"

    async def agent(prompt: Prompt) -> str:
        if prompt.session_key == group:
            await release.wait()
        return "ok"

    async with open_jobs_fixture(tmp_path, agent, store={"laneMaxQueued": 1}) as at:
        await at.app.create(group)
        active = await at.app.say("one", group)
        await wait_until(lambda: _state(at, active, "running"))
        waiting = await at.app.say("two", group)
        stuck = await at.add(session_target=f"session:{group}")
        fine = await at.add()
        for hour in (1, 2):
            await at.pass_(3600)
            await at.app.wait_for_end(f"cron:{fine.id}:{START + hour * HOUR}")
        assert (await at.schedules.run(OPERATOR, stuck.id, "due")).reason == "lane-full"
        assert (await at.get(stuck)).state.last_run_id is None
        # The scheduler is not notified when there is room: it looks again, and not at once.
        assert await at.scheduler._fire_and_compute_sleep() == UNFIRED_JOB_RETRY_SECONDS  # pyright: ignore[reportPrivateUsage]
        release.set()
        for run in (active, waiting):
            await at.app.wait_for_end(run)
        for _ in range(2):
            await at.pass_(1)
        await at.settle()
        assert [run for run in at.runs() if stuck.id in run] == [f"cron:{stuck.id}:{START + 2 * HOUR}"]


async def _state(at: JobsFixture, run_id: str, state: str) -> bool:
    return (await at.app.operations.runs.get(OPERATOR, run_id)).state == state


async def _so_many_ended(at: JobsFixture, many: int) -> bool:
    return len(at.app.rows("SELECT id FROM runs WHERE ended_at IS NOT NULL")) == many


async def test_no_more_runs_at_a_time_than_allowed_and_the_others_keep_their_slots(tmp_path: Path) -> None:
    gate = asyncio.Semaphore(0)

    async def agent(prompt: Prompt) -> str:
        await gate.acquire()
        return "ok"

    async with open_jobs_fixture(tmp_path, agent, cron={"maxConcurrentRuns": 2}) as at:
        added = [await at.add() for _ in range(5)]
        await at.pass_(3600)
        assert at.runs() == [f"cron:{job.id}:{START + HOUR}" for job in added[:2]]
        await at.pass_(10)
        assert len(at.runs()) == 2
        fired = await at.schedules.run(OPERATOR, added[4].id)
        assert (fired.ran, fired.reason) == (False, "busy")
        for done in range(5):
            gate.release()
            await wait_until(
                lambda done=done: _so_many_ended(at, done + 1)
            )  # which of the two it is, is chance
            await at.pass_(10)
            assert len(at.runs()) == min(5, 3 + done)
        assert at.runs() == [f"cron:{job.id}:{START + HOUR}" for job in added]


async def test_nothing_fires_while_it_is_switched_off(tmp_path: Path) -> None:
    clock = ManualClock(START)
    async with open_jobs_fixture(tmp_path, clock=clock, cron={"enabled": False}) as at:
        job = await at.add()
        await at.pass_(7200)
        assert at.runs() == []
        for mode in ("force", "due"):
            fired = await at.schedules.run(OPERATOR, job.id, mode)
            assert (fired.ran, fired.reason) == (False, "cron-disabled")
        status = await at.schedules.get_status(OPERATOR)
        assert (status.enabled, status.jobs, status.next_wake_at) == (False, 1, None)
    async with open_jobs_fixture(tmp_path, clock=clock) as at:
        status = await at.schedules.get_status(OPERATOR)
        assert (status.enabled, status.jobs, status.next_wake_at) == (True, 1, START + HOUR)
        assert msgspec.to_builtins(status) == {"enabled": True, "jobs": 1, "nextWakeAtMs": START + HOUR}
        await at.scheduler.fire_due_jobs()
        await at.settle()
        assert at.runs() == [f"cron:{job.id}:{START + 2 * HOUR}"]


# --- exactly once ---


@pytest.mark.parametrize("phase", ["before", "after"])
async def test_a_firing_is_there_with_its_next_slot_or_neither_is(tmp_path: Path, phase: str) -> None:
    broken = False

    def on_commit(now: str) -> None:
        if broken and now == phase:
            raise OSError("the disk went away")

    clock = ManualClock(START)
    async with open_jobs_fixture(tmp_path, clock=clock, on_commit=on_commit) as at:
        job = await at.add()
        broken = True
        await at.pass_(3600)  # does not raise: the scheduler outlives it
        broken = False
        committed = phase == "after"
        assert at.app.rows("SELECT next_at FROM jobs") == [
            {"next_at": START + (2 if committed else 1) * HOUR}
        ]
        assert len(at.runs()) == int(committed)
    async with open_jobs_fixture(tmp_path, clock=clock) as at:
        await at.scheduler.fire_due_jobs()
        await at.settle()
        assert at.runs() == [f"cron:{job.id}:{START + HOUR}"]


async def lives(home: Path, job_id: str, place: DatabaseLocation | None, kill: int | None) -> None:
    """Host the directory at the hour the job is due, until its run has ended or the process is killed."""
    commits = 0

    def on_commit(phase: str) -> None:
        nonlocal commits
        commits += 1
        if commits == kill:
            os.kill(os.getpid(), signal.SIGKILL)

    config = Config.model_validate(place.settings() if place else {})
    # Who comes after a kill comes when the lease of the dead has run out.
    clock = ManualClock(START + HOUR + (0 if kill else MINUTE))
    async with open_app(config, home, clock=clock, on_commit=on_commit) as opened:
        await wait_until(lambda: _ended(opened.operations.jobs, job_id))


async def _ended(schedules: JobOperations, job_id: str) -> bool:
    return (await schedules.get(OPERATOR, job_id)).state.last_status == "ok"


def play(homes: list[tuple[str, str, list[str]]]) -> None:
    """Each directory gets a process that is killed at its n-th moment, and then one that is not."""
    for number, (home, job_id, there) in enumerate(homes, 1):
        for kill in (number, None):
            if (child := os.fork()) == 0:
                signal.alarm(30)
                asyncio.run(lives(Path(home), job_id, DatabaseLocation.of(there), kill))
                os._exit(0)
            _, status = os.waitpid(child, 0)
            os.write(1, f"{os.waitstatus_to_exitcode(status)}\n".encode())


async def test_killed_around_any_commit_a_slot_is_one_run(tmp_path: Path) -> None:
    # Before and after each of the commits: the lease, the firing, the claim of its run, its end.
    homes: list[tuple[str, str, list[str]]] = []
    for number in range(1, 9):
        home = tmp_path / f"{number}"
        async with open_app(Config(), home, clock=ManualClock(START)) as opened:
            spec = JobSpec(name="hourly", schedule=HOURLY, payload=WORDS)
            job = await opened.operations.jobs.add(OPERATOR, spec)
        homes.append((str(home), job.id, get_store_arguments(home)))
    command = [sys.executable, __file__, json.dumps(homes)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    done = await asyncio.to_thread(
        subprocess.run, command, env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=90
    )
    codes = [int(line) for line in done.stdout.split()]
    assert set(codes[1::2]) == {0} and set(codes[::2]) <= {0, -9}
    assert codes[:8:2] == [-9] * 4  # the firing is the second commit
    for home, job_id, _ in homes:
        path = Path(home) / DATABASE
        fired = {"id": f"cron:{job_id}:{START + HOUR}", "state": "ok"}
        assert query_database(path, "SELECT id, state FROM runs") == [fired], home
        assert query_database(path, "SELECT next_at, firings FROM jobs") == [
            {"next_at": START + 2 * HOUR, "firings": 1}
        ]


# --- the scheduler itself ---


async def test_the_house_fires_by_itself_and_hears_of_new_jobs(tmp_path: Path) -> None:
    clock = ManualClock(START)
    async with open_app(Config(), tmp_path, clock=clock) as opened:
        async with opened.bus.listen("sessions") as events:
            # It sleeps for half a minute unless it is told that there is something to do.
            spec = JobSpec(name="now", schedule=AtSchedule(at_ms=START), payload=WORDS)
            job = await opened.operations.jobs.add(OPERATOR, spec)
            heard: list[object] = []
            wanted = SessionChanged(session_key=f"agent:main:cron:{job.id}", reason="cron")
            await wait_until(lambda: _heard(events, heard, wanted))
        view = await opened.operations.runs.wait(OPERATOR, f"cron:{job.id}:{START}", BOUND)
        assert (view.state, view.reply) == ("ok", "good morning")


async def test_the_scheduler_outlives_what_goes_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("antiphon.engine.jobs.scheduler.UNFIRED_JOB_RETRY_SECONDS", 0.001)
    async with open_jobs_fixture(tmp_path) as at:
        job = await at.add()
        at.clock.advance(seconds=3600)
        troubles: list[BaseException] = [OSError("no"), NotFound("No.", "Try again."), OSError("no")]
        due, overview = firings.list_due_jobs, jobs.load_overview

        async def failing(tx: Any, *arguments: Any) -> Any:
            if troubles:
                raise troubles.pop()
            return await (due(tx, *arguments) if arguments else overview(tx))

        monkeypatch.setattr(firings, "list_due_jobs", failing)
        monkeypatch.setattr(jobs, "load_overview", failing)
        task = asyncio.create_task(at.scheduler.run())
        await wait_until(lambda: _fired(at))
        await at.settle()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert at.runs() == [f"cron:{job.id}:{START + HOUR}"]


async def _fired(at: JobsFixture) -> bool:
    return bool(at.runs())


async def test_one_job_that_cannot_be_read_does_not_hold_up_the_others(tmp_path: Path) -> None:
    async with open_jobs_fixture(tmp_path) as at:
        broken, fine = await at.add(), await at.add()
        at.app.rows("UPDATE jobs SET payload = '{' WHERE id = ?", broken.id)
        await at.pass_(3600)
        assert at.runs() == [f"cron:{fine.id}:{START + HOUR}"]
        await at.settle()


# --- managing ---


async def test_a_forced_run_leaves_the_schedule_alone(tmp_path: Path) -> None:
    async with open_jobs_fixture(tmp_path) as at:
        job = await at.add(enabled=False)
        assert job.state.next_run_at_ms is None
        first, second = [await at.schedules.run(OPERATOR, job.id) for _ in range(2)]
        assert first.ran and second.ran and first.run_id != second.run_id
        assert (first.run_id or "").startswith(f"cron:{job.id}:force:")
        assert first.session_key == f"agent:main:cron:{job.id}"
        assert (await at.schedules.run(OPERATOR, job.id, "due")).reason == "not-due"
        await at.settle()
        after = await at.get(job)
        assert (after.enabled, after.state.next_run_at_ms, after.state.last_status) == (False, None, "ok")
        await at.schedules.update(OPERATOR, job.id, JobPatch(enabled=True))
        assert (await at.schedules.run(OPERATOR, job.id, "due")).reason == "not-due"
        at.clock.advance(seconds=3600)
        await at.schedules.run(OPERATOR, job.id)
        due = await at.schedules.run(OPERATOR, job.id, "due")
        assert due.run_id == f"cron:{job.id}:{START + HOUR}"
        await at.settle()
        found = await at.schedules.list_runs(OPERATOR, job.id)
        assert [run.run_id for run in found] == list(reversed(at.runs())) and len(found) == 4
        assert {run.state for run in found} == {"ok"}
        assert [run.run_id for run in await at.schedules.list_runs(OPERATOR, job.id, 2)] == at.runs()[:1:-1]
        other = await at.add()
        assert await at.schedules.list_runs(OPERATOR, other.id) == []


async def test_what_the_run_is_given_is_what_the_payload_says(tmp_path: Path) -> None:
    async with open_jobs_fixture(tmp_path) as at:
        model = "rehearsal/rehearsal"
        turn = AgentTurn(message="think", model=model, thinking="high", timeout_seconds=90)
        await at.schedules.run(OPERATOR, (await at.add(payload=turn)).id)
        await at.settle()
        [row] = at.app.rows("SELECT origin, model, thinking, deadline_at FROM runs")
        assert row == {"origin": "cron", "model": model, "thinking": "high", "deadline_at": START + 90_000}


async def test_jobs_are_changed_and_removed(tmp_path: Path) -> None:
    async with open_jobs_fixture(tmp_path) as at:
        job = await at.add()
        at.clock.advance(seconds=1800)
        named = await at.schedules.update(OPERATOR, job.id, JobPatch(name="another name"))
        assert (named.name, named.state.next_run_at_ms) == ("another name", START + HOUR)
        assert (named.created_at_ms, named.updated_at_ms) == (START, START + HOUR // 2)
        assert await at.schedules.update(OPERATOR, job.id, JobPatch(schedule=job.schedule)) == named
        faster = await at.schedules.update(
            OPERATOR, job.id, JobPatch(schedule=EverySchedule(every_ms=60_000))
        )
        assert faster.state.next_run_at_ms == START + HOUR // 2 + 60_000
        off = await at.schedules.update(OPERATOR, job.id, JobPatch(enabled=False))
        assert (off.enabled, off.state.next_run_at_ms) == (False, None)
        await at.pass_(3600)
        on = await at.schedules.update(OPERATOR, job.id, JobPatch(enabled=True))
        assert on.state.next_run_at_ms == at.clock.now() + 60_000  # what was missed meanwhile was not wanted
        assert at.runs() == []
        assert await at.schedules.remove(OPERATOR, job.id)
        assert not await at.schedules.remove(OPERATOR, job.id)
        await at.pass_(3600)
        assert at.runs() == []
        for ask in (at.schedules.get, at.schedules.run, at.schedules.list_runs):
            with pytest.raises(NotFound):
                await ask(OPERATOR, job.id)
        with pytest.raises(NotFound):
            await at.schedules.update(OPERATOR, job.id, JobPatch())


async def test_two_jobs_cannot_have_the_same_name(tmp_path: Path) -> None:
    async with open_jobs_fixture(tmp_path) as at:
        first = await at.add(name="report")
        other = await at.add(name="digest")
        spec = JobSpec(name="report", schedule=HOURLY, payload=WORDS)
        for attempt in (
            lambda: at.schedules.add(OPERATOR, spec),
            lambda: at.schedules.update(OPERATOR, other.id, JobPatch(name="report")),
        ):
            with pytest.raises(Conflict, match=first.id) as refused:
                await attempt()
            assert (refused.value.data["field"], refused.value.data["job_id"]) == ("name", first.id)
        assert [job.name for job in await at.schedules.list(OPERATOR, True)] == ["report", "digest"]
        at_once = await asyncio.gather(*(at.add(name="twice") for _ in range(2)), return_exceptions=True)
        assert {type(outcome) for outcome in at_once} == {JobView, Conflict}
        await at.schedules.remove(OPERATOR, first.id)
        await at.schedules.update(OPERATOR, other.id, JobPatch(name="report"))


async def test_jobs_that_share_a_name_since_an_earlier_version_can_still_be_changed(tmp_path: Path) -> None:
    async with open_jobs_fixture(tmp_path) as at:
        first, second = await at.add(name="one"), await at.add(name="two")
        at.app.rows("UPDATE jobs SET name = 'one'")
        changed = await at.schedules.update(OPERATOR, second.id, JobPatch(name="one", enabled=False))
        assert (changed.name, changed.enabled) == ("one", False)
        assert (await at.schedules.run(OPERATOR, first.id)).ran
        await at.settle()


async def test_a_view_has_the_agreed_names(tmp_path: Path) -> None:
    async with open_jobs_fixture(tmp_path) as at:
        job = await at.add(CronSchedule(expr="0 8 * * *", tz="UTC"), name="a job")
        await at.schedules.run(OPERATOR, job.id)
        await at.settle()
        assert msgspec.json.decode(msgspec.json.encode(await at.get(job))) == {
            "id": job.id,
            "name": "a job",
            "enabled": True,
            "schedule": {"kind": "cron", "expr": "0 8 * * *", "tz": "UTC"},
            "sessionTarget": "isolated",
            "payload": {"kind": "agentTurn", "message": "say good morning"},
            "delivery": {"mode": "none"},
            "agentId": "main",
            "deleteAfterRun": False,
            "createdAtMs": START,
            "updatedAtMs": START,
            "state": {
                "nextRunAtMs": job.state.next_run_at_ms,
                "lastRunAtMs": START,
                "lastStatus": "ok",
                "lastRunId": at.runs()[0],
            },
        }


async def test_who_may_do_what(tmp_path: Path) -> None:
    async with open_jobs_fixture(tmp_path) as at:
        job = await at.add()
        before = dump_database(at.app.path)
        s, spec = at.schedules, JobSpec(name="x", schedule=HOURLY, payload=WORDS)
        reading: list[Callable[[Caller], Any]] = [
            s.list, s.get_status, lambda who: s.get(who, job.id), lambda who: s.list_runs(who, job.id),
        ]  # fmt: skip
        changing: list[Callable[[Caller], Any]] = [
            lambda who: s.add(who, spec),
            lambda who: s.update(who, job.id, JobPatch(name="y")),
            lambda who: s.remove(who, job.id),
            lambda who: s.run(who, job.id),
        ]
        agent = Caller.agent("main", MAIN, sandboxed=True)
        refused = [
            *((who, ask) for who in (Caller.operator([]), agent) for ask in [*reading, *changing]),
            *((Caller.operator([scope]), ask) for scope in (READ_SCOPE, WRITE_SCOPE) for ask in changing),
        ]
        for who, ask in refused:
            with pytest.raises(Forbidden):
                await ask(who)
        for ask in reading:
            await ask(Caller.operator([READ_SCOPE]))
        assert dump_database(at.app.path) == before


SPEC: dict[str, Any] = {
    "name": "a job",
    "schedule": {"kind": "every", "everyMs": HOUR},
    "payload": {"kind": "agentTurn", "message": "hello"},
}
BAD: list[tuple[dict[str, Any], str]] = [
    ({"name": ""}, "name"),
    ({"name": "x" * 201}, "name"),
    ({"name": "  "}, "name"),
    ({"name": "a\nb"}, "name"),
    ({"name": "\ud800"}, "name"),
    ({"name": 7}, "name"),
    ({"surprise": 1}, "surprise"),
    ({"enabled": "yes"}, "enabled"),
    ({"schedule": {"kind": "sometimes"}}, "schedule.kind"),
    ({"schedule": {"everyMs": HOUR}}, "schedule.kind"),
    ({"schedule": {"kind": "every"}}, "schedule.everyMs"),
    ({"schedule": {"kind": "every", "everyMs": 999}}, "schedule.everyMs"),
    ({"schedule": {"kind": "every", "everyMs": 10**30}}, "schedule.everyMs"),
    ({"schedule": {"kind": "every", "everyMs": HOUR, "anchorMs": -1}}, "schedule.anchorMs"),
    ({"schedule": {"kind": "every", "everyMs": HOUR, "tz": "UTC"}}, "schedule.tz"),
    ({"schedule": {"kind": "at"}}, "schedule.at"),
    ({"schedule": {"kind": "at", "at": "soon"}}, "schedule.at"),
    ({"schedule": {"kind": "at", "atMs": START - 61_000}}, "schedule"),
    ({"schedule": {"kind": "cron", "expr": "0 0 * *"}}, "schedule.expr"),
    ({"schedule": {"kind": "cron", "expr": "0 0 * *"}, "enabled": False}, "schedule.expr"),
    ({"schedule": {"kind": "cron", "expr": "9" * 5000}}, "schedule.expr"),
    ({"schedule": {"kind": "cron", "expr": "0 0 * * *", "tz": "Mars"}}, "schedule.tz"),
    ({"payload": {"kind": "agentTurn"}}, "payload.message"),
    ({"payload": {"kind": "agentTurn", "message": " "}}, "payload.message"),
    ({"payload": {"kind": "agentTurn", "message": "\ud800"}}, "payload.message"),
    ({"payload": {"kind": "agentTurn", "message": "x", "model": "no/such"}}, "payload.model"),
    ({"payload": {"kind": "agentTurn", "message": "x", "thinking": "hard"}}, "payload.thinking"),
    ({"payload": {"kind": "agentTurn", "message": "x", "timeoutSeconds": 0}}, "payload.timeoutSeconds"),
    ({"payload": {"kind": "systemEvent", "text": ""}, "sessionTarget": "main"}, "payload.text"),
    ({"payload": {"kind": "systemEvent", "text": "x"}, "sessionTarget": "isolated"}, "payload.kind"),
    ({"sessionTarget": "elsewhere"}, "sessionTarget"),
    ({"sessionTarget": "session:"}, "sessionTarget"),
    ({"sessionTarget": "session:global"}, "sessionTarget"),
    ({"sessionTarget": "session:agent:main:nobody"}, "sessionTarget"),
    ({"agentId": "nobody"}, "agentId"),
    ({"agentId": "not an id"}, "agentId"),
    ({"delivery": {"mode": "announce", "channel": "No Channel"}}, "delivery.channel"),
    ({"delivery": {"mode": "announce", "channel": "telegram", "to": "7"}}, "delivery.channel"),
    ({"delivery": {"mode": "announce", "whom": "x"}}, "delivery.whom"),
    ({"delivery": {"mode": "shout"}}, "delivery.mode"),
    ({"delivery": {"mode": "none", "to": "x"}}, "delivery.to"),
    ({"deleteAfterRun": True}, "deleteAfterRun"),
]


@pytest.mark.parametrize(("wrong", "field"), BAD, ids=[json.dumps(wrong)[:60] for wrong, _ in BAD])
async def test_bad_input_names_its_field_and_changes_nothing(
    tmp_path: Path, wrong: dict[str, Any], field: str
) -> None:
    async with open_jobs_fixture(tmp_path) as at:
        job = await at.add()
        before = dump_database(at.app.path)
        with pytest.raises(AntiphonError) as refused:
            await at.schedules.add(OPERATOR, parse_job_input(JobSpec, {**SPEC, **wrong}))
        with pytest.raises(AntiphonError) as changed:
            await at.schedules.update(OPERATOR, job.id, parse_job_input(JobPatch, wrong))
        for error in (refused.value, changed.value):
            assert (error.data["field"], error.who) == (field, "caller")
            assert error.hint
        assert dump_database(at.app.path) == before


async def test_what_was_made_in_python_is_held_to_the_same_rules(tmp_path: Path) -> None:
    async with open_jobs_fixture(tmp_path) as at:
        with pytest.raises(InvalidInput) as refused:
            await at.add(EverySchedule(every_ms=1))
        assert refused.value.data["field"] == "schedule.everyMs"
        with pytest.raises(InvalidInput):
            parse_job_input(JobSpec, [])
        with pytest.raises(InvalidInput):
            await at.schedules.list_runs(OPERATOR, "x", 0)


async def test_there_is_an_end_to_sizes_and_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_jobs_fixture(tmp_path, store={"messageMaxBytes": 1024}) as at:
        await at.add(payload=AgentTurn(message="ä" * 512))
        with pytest.raises(TooLarge) as refused:
            await at.add(payload=AgentTurn(message="ä" * 512 + "x"))
        assert refused.value.data == {"field": "payload.message", "bytes": 1025, "max": 1024}
        monkeypatch.setattr(jobs, "MAX_JOBS", 2)
        await at.add()
        with pytest.raises(Conflict, match="Remove one first"):
            await at.add()
        assert (await at.schedules.get_status(OPERATOR)).jobs == 2


async def test_a_zone_and_an_anchor_that_were_left_open_are_written_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", "Asia/Kathmandu")
    async with open_jobs_fixture(tmp_path) as at:
        assert (await at.add(CronSchedule(expr="0 8 * * *"))).schedule == CronSchedule(
            expr="0 8 * * *", tz="Asia/Kathmandu"
        )
        assert (await at.add(AtSchedule(at="2030-01-01T08:00"))).schedule == AtSchedule(
            at="2030-01-01T08:00:00+05:45"
        )
        for whole in (AtSchedule(at_ms=START + 5), AtSchedule(at="2030-01-01T08:00Z")):
            assert (await at.add(whole)).schedule == whole


if __name__ == "__main__":
    play(json.loads(sys.argv[1]))
