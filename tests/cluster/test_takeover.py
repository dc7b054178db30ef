"""Replicas that die, sleep or leave: what they were doing is carried on by others, once."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from chaos.scenario import TELL
from chaos.verify import always
from cluster.database import Postgres
from cluster.load import Load, Watcher, plan
from support.faults import Fault, FaultInjector
from support.replicas import BOUND, ReplicaProcess, ReplicaSet, open_replica_set
from support.store_snapshot import StoreSnapshot

pytestmark = pytest.mark.anyio

HERE, THERE = "agent:main:direct:here", "agent:main:direct:there"
DRAIN = 1.0  # as `open_replica_set` has it
HANDOVER = 1.0  # seconds after which another one has what was left to it
WORDS = "one two three four five six seven eight nine ten"


def script(seconds: float) -> str:
    """An effect elsewhere, then words that take their time."""
    return f"call {TELL} {json.dumps({'session': THERE, 'text': 'say heard'})}\nsay {WORDS}\nslow {seconds}"


async def begin(replica_set: ReplicaSet, seconds: float, key: str = "run") -> ReplicaProcess:
    """A run in the middle of its words; who says them."""
    for session in (HERE, THERE):
        await replica_set.ask_until_done("open", session=session)
    await replica_set.ask_until_done("submit", session=HERE, text=script(seconds), key=key)
    await replica_set.until_rows("SELECT 1 FROM runs WHERE origin = 'tell' AND state = 'ok'")
    return await replica_set.owner_of(key)


async def taken_from(
    replica_set: ReplicaSet, owner: ReplicaProcess, seconds: float, key: str = "run"
) -> None:
    """Until another one has it."""
    sql = "SELECT 1 FROM runs r JOIN owners o ON o.id = r.owner WHERE r.id = $1 AND right(o.name, length($2)) <> $2"
    await replica_set.until_rows(sql, key, f":{owner.pid}", seconds=seconds)


def told_once(replica_set: ReplicaSet, key: str = "run") -> None:
    """The run has come to its end once, with everything it was to do, and nothing else has happened."""
    snapshot = StoreSnapshot(replica_set.home)
    run = snapshot.run(key)
    assert run is not None and (run["state"], run["reply"]) == ("ok", WORDS)
    assert [entry["role"] for entry in snapshot.entries(run)] == [
        "user",
        "assistant",
        "toolResult",
        "assistant",
    ]
    assert [run["state"] for run in snapshot.runs if run["origin"] == "tell"] == ["ok"]
    assert always(replica_set.home, [key]) == []


@pytest.mark.requirement("G1", "G3", "G9", "S4")
async def test_runs_of_a_killed_replica_are_resumed_soon(tmp_path: Path, postgres: Postgres) -> None:
    """The lane is given to another one, which has not had to look for it."""
    async with open_replica_set(tmp_path, postgres, timings={"sweep_interval_seconds": 600.0}) as replica_set:
        owner = await begin(replica_set, 3.0)
        waiting = asyncio.create_task(_others(replica_set, owner)[0].ask("wait", run="run", seconds=BOUND))
        await owner.kill()
        await taken_from(replica_set, owner, BOUND)
        # A caller that waited for it elsewhere gets the result without asking again.
        assert (await waiting)["reply"] == WORDS
        told_once(replica_set)


@pytest.mark.requirement("G1", "G3", "G13")
@pytest.mark.parametrize("sweep", [0.5, 600.0], ids=["finds out", "is fenced"])
async def test_a_replica_paused_longer_than_its_lease_changes_nothing(
    tmp_path: Path, postgres: Postgres, sweep: float
) -> None:
    """It looks at what it has and lets go of what it lost; if it never looks, its commit is refused."""
    async with open_replica_set(tmp_path, postgres, timings={"sweep_interval_seconds": sweep}) as replica_set:
        owner = await begin(replica_set, 2.0)
        owner.pause()
        await taken_from(replica_set, owner, BOUND)
        await _others(replica_set, owner)[0].ask("wait", run="run", seconds=BOUND)
        before = await replica_set.look("SELECT * FROM messages ORDER BY transcript, seq")
        owner.resume()
        await replica_set.until(lambda: "'run' was taken over" in owner.read_log(), what="it finds out")
        assert await replica_set.look("SELECT * FROM messages ORDER BY transcript, seq") == before
        # It is as good as any other again.
        await owner.ask("submit", session=HERE, text="say again", key="again")
        assert (await owner.ask("wait", run="again", seconds=BOUND))["reply"] == "again"
        told_once(replica_set)


@pytest.mark.requirement("G1", "G9")
async def test_a_stopping_replica_hands_over_unfinished_runs_at_once(
    tmp_path: Path, postgres: Postgres
) -> None:
    """A lease too long for any test to wait for it."""
    async with open_replica_set(tmp_path, postgres, bus={"ackWaitSeconds": 60}) as replica_set:
        owner = await begin(replica_set, 4.0)
        leaving = asyncio.create_task(owner.leave())
        await taken_from(replica_set, owner, DRAIN + 5 + HANDOVER)
        assert await leaving == 0
        assert (await replica_set.wait_for_run_end("run"))["reply"] == WORDS
        # To leave is no failure: it does not count as an attempt.
        assert (await replica_set.look("SELECT attempts FROM runs WHERE id = 'run'"))[0]["attempts"] == 1
        told_once(replica_set)


@pytest.mark.requirement("G1")
async def test_a_stopping_replica_finishes_runs_that_are_nearly_done(
    tmp_path: Path, postgres: Postgres
) -> None:
    async with open_replica_set(tmp_path, postgres, bus={"drainSeconds": BOUND}) as replica_set:
        owner = await begin(replica_set, 3.0)
        assert await owner.leave() == 0
        (run,) = await replica_set.look("SELECT state FROM runs WHERE id = 'run'")
        assert run["state"] == "ok"
        assert not any("is resumed" in replica.read_log() for replica in replica_set.replicas)
        told_once(replica_set)


@pytest.mark.requirement("G1", "G9", "S9")
@pytest.mark.timeout(180)
async def test_a_rolling_restart_fails_no_request(tmp_path: Path, postgres: Postgres) -> None:
    async with open_replica_set(tmp_path, postgres) as replica_set:
        load, wind = Load(replica_set, plan(7, 1000)), FaultInjector(replica_set)
        working = asyncio.create_task(load.run())
        for number in range(3):
            await wind.inject_faults([Fault(0.5, "leave", number, 0.0)])
        load.stop.set()
        await working
        assert set(replica_set.refused) <= {"unavailable"}
        assert [await replica.leave() for replica in replica_set.replicas] == [0, 0, 0]
        assert load.wrong() == []


@pytest.mark.requirement("G38")
@pytest.mark.timeout(180)
async def test_one_subscription_sees_everything_while_others_are_killed(
    tmp_path: Path, postgres: Postgres
) -> None:
    async with open_replica_set(tmp_path, postgres) as replica_set:
        load, wind = Load(replica_set, plan(8, 1000)), FaultInjector(replica_set)
        working = asyncio.create_task(load.run())
        steady, moody = replica_set.replicas[0], replica_set.replicas[1:]
        await replica_set.until_rows("SELECT 1 FROM sessions WHERE key = 'agent:helper:main'")
        watcher = Watcher(replica_set, "agent:helper:main", at=steady)
        watching = asyncio.create_task(watcher.watch())
        for number in (1, 2, 1):
            await wind.inject_faults([Fault(0.5, "kill", number, 0.0)])
        load.stop.set()
        await working
        await replica_set.until(watcher.up_to_date, what="it has seen everything")
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        assert (watcher.moves, len(watcher.seen) > 0) == (0, True)
        assert len(moody) == 2 and watcher.wrong(StoreSnapshot(replica_set.home)) == []


@pytest.mark.requirement("S4", "G16")
async def test_waits_and_stops_work_wherever_they_are_asked_for(tmp_path: Path, postgres: Postgres) -> None:
    """Nothing polls for stops here: the process of the run is notified."""
    async with open_replica_set(tmp_path, postgres, timings={"sweep_interval_seconds": 600.0}) as replica_set:
        owner = await begin(replica_set, BOUND)
        one, other = _others(replica_set, owner)
        waiting = asyncio.create_task(one.ask("wait", run="run", seconds=BOUND))
        assert await other.ask("stop", session=HERE) == {"run_ids": ["run"]}
        view: dict[str, Any] = await waiting
        assert view["state"] == "cancelled"


def _others(replica_set: ReplicaSet, owner: ReplicaProcess) -> list[ReplicaProcess]:
    return [replica for replica in replica_set.replicas if replica is not owner]
