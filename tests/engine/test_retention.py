"""Retention with a clock that is moved: years pass in a test."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from antiphon.bus import SessionChanged
from antiphon.clock import ManualClock
from antiphon.engine.runs import run_queue
from antiphon.engine.runs.run_queue import Submission
from antiphon.engine.sessions import retention
from antiphon.engine.sessions.retention import RetentionPolicy
from antiphon.engine.supervisor import EngineTimings
from antiphon.errors import NotFound
from antiphon.messages import UserMessage
from antiphon.operations.types import ListFilter
from antiphon.runtimes import Prompt
from support.app_fixture import MAIN, OPERATOR, AppFixture, open_app_fixture

pytestmark = pytest.mark.anyio

QUIET = EngineTimings(lease_seconds=10**7, sweep_interval_seconds=3600, retention_interval_seconds=3600)
RETENTION = RetentionPolicy(archive_after_days=30, delete_archived_after_days=365)


async def echo(prompt: Prompt) -> str:
    return "ok"


async def apply_retention(
    app: AppFixture, clock: ManualClock, policy: RetentionPolicy = RETENTION
) -> list[str]:
    """Apply a policy; return the keys of the sessions that were archived or deleted."""
    return [removed.key for removed in await retention.apply_retention(app.store, policy, clock.now())]


@pytest.mark.requirement("G21", "G27")
async def test_archiving_hides_and_keeps(tmp_path: Path) -> None:
    clock = ManualClock()
    async with open_app_fixture(tmp_path, echo, clock=clock, timings=QUIET) as app:
        for peer in ("old", "young"):
            await app.ask("hello", f"agent:main:direct:{peer}")
        clock.advance(days=20)
        await app.ask("hello again", "agent:main:direct:young")
        clock.advance(days=10, seconds=-1)
        assert await apply_retention(app, clock) == []  # one second short of it
        clock.advance(seconds=2)
        assert await apply_retention(app, clock) == ["agent:main:direct:old"]
        assert await apply_retention(app, clock) == []

        async def listed(archived: bool) -> set[str]:
            page = await app.operations.sessions.list(OPERATOR, ListFilter(include_archived=archived))
            return {row.key for row in page.sessions}

        assert await listed(archived=False) == {"agent:main:direct:young"}
        assert await listed(archived=True) == {"agent:main:direct:young", "agent:main:direct:old"}
        assert len(await app.transcript("agent:main:direct:old")) == 2
        # Speaking to it brings it back.
        await app.ask("are you there", "agent:main:direct:old")
        assert len(await listed(archived=False)) == 2


@pytest.mark.requirement("G21", "G27", "G28")
async def test_deleting_takes_the_words_and_leaves_the_ledger(tmp_path: Path) -> None:
    clock = ManualClock()
    async with open_app_fixture(tmp_path, echo, clock=clock, timings=QUIET) as app:
        await app.create(MAIN)
        await app.create("agent:main:direct:gone", MAIN)
        run_id = (await app.ask("a secret", "agent:main:direct:gone")).run_id
        first = await app.operations.sessions.describe(OPERATOR, "agent:main:direct:gone")
        await app.operations.conversations.renew(OPERATOR, "agent:main:direct:gone")
        await app.ask("another secret", "agent:main:direct:gone")
        clock.advance(days=31)
        await app.ask("alive")
        await apply_retention(app, clock)
        clock.advance(days=365, seconds=-1)
        await apply_retention(app, clock, RetentionPolicy(delete_archived_after_days=365))
        assert app.rows("SELECT 1 FROM sessions WHERE key = 'agent:main:direct:gone'")
        clock.advance(seconds=2)
        gone = await apply_retention(app, clock, RetentionPolicy(delete_archived_after_days=365))
        assert gone == ["agent:main:direct:gone"]
        for reference in ("agent:main:direct:gone", first.session_id):
            with pytest.raises(NotFound):
                await app.operations.sessions.describe(OPERATOR, reference)
        with pytest.raises(NotFound):
            await app.operations.runs.get(OPERATOR, run_id)
        for table in ("messages", "runs", "transcripts", "session_names"):
            assert "secret" not in str(app.rows(f"SELECT * FROM {table}"))  # noqa: S608
            assert "gone" not in str(app.rows(f"SELECT * FROM {table}"))  # noqa: S608
        assert app.rows("SELECT * FROM lineage") == []
        assert len(await app.transcript()) == 2
        # The key is free, and what comes under it is a new conversation.
        assert (await app.ask("hello", "agent:main:direct:gone")).state == "ok"
        assert len(await app.transcript("agent:main:direct:gone")) == 2


@pytest.mark.requirement("G27")
async def test_only_the_idle_are_touched(tmp_path: Path) -> None:
    clock = ManualClock()
    begun, release = asyncio.Event(), asyncio.Event()

    async def agent(prompt: Prompt) -> str:
        begun.set()
        await release.wait()
        return "ok"

    async with open_app_fixture(tmp_path, agent, clock=clock, timings=QUIET) as app:
        run_id = await app.say("one", timeout_seconds=360 * 86_400)
        await asyncio.wait_for(begun.wait(), 10)
        clock.advance(days=100)
        assert await apply_retention(app, clock) == []
        release.set()
        assert (await app.wait_for_end(run_id)).state == "ok"
        # A message that waits, and that no process has taken up yet, keeps its session too.
        message = UserMessage(content="two", timestamp=clock.now())
        session = app.rows("SELECT id FROM sessions")[0]["id"]
        waiting = Submission(run_id="two", session=session, session_key=MAIN, origin="chat", message=message)
        await app.store.tx(run_queue.submit, waiting, clock.now())
        clock.advance(days=31)
        assert await apply_retention(app, clock) == []
    async with open_app_fixture(tmp_path, agent, clock=clock, timings=QUIET) as app:
        await app.wait_for_end("two")
        clock.advance(days=31)
        assert await apply_retention(app, clock) == [MAIN]


@pytest.mark.requirement("G21")
async def test_many_are_swept_in_bounded_transactions(tmp_path: Path) -> None:
    clock = ManualClock()
    async with open_app_fixture(tmp_path, echo, clock=clock, timings=QUIET) as app:
        keys = [
            f"agent:main:direct:{number:04}"
            for number in range(2 * retention.MAX_SESSIONS_PER_TRANSACTION + 3)
        ]
        await asyncio.gather(*(app.create(key) for key in keys))
        clock.advance(days=31)
        assert sorted(await apply_retention(app, clock)) == keys
        clock.advance(days=366)
        assert sorted(await apply_retention(app, clock)) == keys
        assert app.rows("SELECT 1 FROM sessions") == []


@pytest.mark.requirement("G21")
async def test_by_default_nothing_is_ever_touched_and_the_chore_runs(tmp_path: Path) -> None:
    clock = ManualClock()
    brisk = EngineTimings(lease_seconds=10**7, sweep_interval_seconds=3600, retention_interval_seconds=0.005)
    async with open_app_fixture(tmp_path, echo, clock=clock, timings=brisk) as app:
        await app.ask("hello")
        [session] = app.rows("SELECT session_id FROM sessions")
        clock.advance(days=10_000)
        assert await apply_retention(app, clock, RetentionPolicy()) == []
    async with (
        open_app_fixture(tmp_path, echo, clock=clock, timings=brisk, retention=RETENTION) as app,
        app.bus.listen("sessions") as events,
    ):
        assert await events.get(10) == SessionChanged(
            session_key=MAIN, reason="retention", session_id=session["session_id"]
        )
        assert app.rows("SELECT key FROM sessions WHERE archived = 1") == [{"key": MAIN}]
