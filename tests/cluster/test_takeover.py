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


async def begin(singing: ReplicaSet, seconds: float, key: str = "run") -> ReplicaProcess:
    """A run in the middle of its words; who says them."""
    for session in (HERE, THERE):
        await singing.ask_until_done("open", session=session)
    await singing.ask_until_done("submit", session=HERE, text=script(seconds), key=key)
    await singing.until_rows("SELECT 1 FROM runs WHERE origin = 'tell' AND state = 'ok'")
    return await singing.owner_of(key)


async def taken_from(singing: ReplicaSet, owner: ReplicaProcess, seconds: float, key: str = "run") -> None:
    """Until another one has it."""
    sql = "SELECT 1 FROM runs r JOIN owners o ON o.id = r.owner WHERE r.id = $1 AND right(o.name, length($2)) <> $2"
    await singing.until_rows(sql, key, f":{owner.pid}", seconds=seconds)


def told_once(singing: ReplicaSet, key: str = "run") -> None:
    """The run has come to its end once, with everything it was to do, and nothing else has happened."""
    book = StoreSnapshot(singing.home)
    run = book.run(key)
    assert run is not None and (run["state"], run["reply"]) == ("ok", WORDS)
    assert [entry["role"] for entry in book.entries(run)] == ["user", "assistant", "toolResult", "assistant"]
    assert [run["state"] for run in book.runs if run["origin"] == "tell"] == ["ok"]
    assert always(singing.home, [key]) == []


@pytest.mark.requirement("G1", "G3", "G9", "S4")
async def test_what_a_killed_replica_was_doing_is_carried_on_soon(tmp_path: Path, postgres: Postgres) -> None:
    """The lane is given to another one, which has not had to look for it."""
    async with open_replica_set(tmp_path, postgres, patience={"sweep": 600.0}) as singing:
        owner = await begin(singing, 3.0)
        waiting = asyncio.create_task(_others(singing, owner)[0].ask("wait", run="run", seconds=BOUND))
        await owner.kill()
        await taken_from(singing, owner, BOUND)
        # Whoever waited for it elsewhere is told, and has not had to ask again.
        assert (await waiting)["reply"] == WORDS
        told_once(singing)


@pytest.mark.requirement("G1", "G3", "G13")
@pytest.mark.parametrize("sweep", [0.5, 600.0], ids=["finds out", "is fenced"])
async def test_who_slept_longer_than_its_lease_changes_nothing(
    tmp_path: Path, postgres: Postgres, sweep: float
) -> None:
    """It looks at what it has and lets go of what it lost; if it never looks, its commit is refused."""
    async with open_replica_set(tmp_path, postgres, patience={"sweep": sweep}) as singing:
        owner = await begin(singing, 2.0)
        owner.pause()
        await taken_from(singing, owner, BOUND)
        await _others(singing, owner)[0].ask("wait", run="run", seconds=BOUND)
        before = await singing.look("SELECT * FROM messages ORDER BY transcript, seq")
        owner.resume()
        await singing.until(lambda: "'run' was taken over" in owner.read_log(), what="it finds out")
        assert await singing.look("SELECT * FROM messages ORDER BY transcript, seq") == before
        # It is as good as any other again.
        await owner.ask("submit", session=HERE, text="say again", key="again")
        assert (await owner.ask("wait", run="again", seconds=BOUND))["reply"] == "again"
        told_once(singing)


@pytest.mark.requirement("G1", "G9")
async def test_who_leaves_hands_over_at_once_what_it_cannot_end(tmp_path: Path, postgres: Postgres) -> None:
    """A lease so long that nobody can have waited for it."""
    async with open_replica_set(tmp_path, postgres, bus={"ackWaitSeconds": 60}) as singing:
        owner = await begin(singing, 4.0)
        leaving = asyncio.create_task(owner.leave())
        await taken_from(singing, owner, DRAIN + 5 + HANDOVER)
        assert await leaving == 0
        assert (await singing.wait_for_run_end("run"))["reply"] == WORDS
        # To leave is nobody's failure: it does not count as an attempt.
        assert (await singing.look("SELECT attempts FROM runs WHERE id = 'run'"))[0]["attempts"] == 1
        told_once(singing)


@pytest.mark.requirement("G1")
async def test_who_leaves_ends_what_is_nearly_done(tmp_path: Path, postgres: Postgres) -> None:
    async with open_replica_set(tmp_path, postgres, bus={"drainSeconds": BOUND}) as singing:
        owner = await begin(singing, 3.0)
        assert await owner.leave() == 0
        (run,) = await singing.look("SELECT state FROM runs WHERE id = 'run'")
        assert run["state"] == "ok"
        assert not any("is carried on" in voice.read_log() for voice in singing.voices)
        told_once(singing)


@pytest.mark.requirement("G1", "G9", "S9")
@pytest.mark.timeout(180)
async def test_all_are_replaced_one_after_the_other_and_no_request_fails(
    tmp_path: Path, postgres: Postgres
) -> None:
    async with open_replica_set(tmp_path, postgres) as singing:
        load, wind = Load(singing, plan(7, 1000)), FaultInjector(singing)
        working = asyncio.create_task(load.run())
        for number in range(3):
            await wind.inject_faults([Fault(0.5, "leave", number, 0.0)])
        load.stop.set()
        await working
        assert set(singing.refused) <= {"unavailable"}
        assert [await voice.leave() for voice in singing.voices] == [0, 0, 0]
        assert load.wrong() == []


@pytest.mark.requirement("G38")
@pytest.mark.timeout(180)
async def test_one_subscription_sees_everything_while_others_are_killed(
    tmp_path: Path, postgres: Postgres
) -> None:
    async with open_replica_set(tmp_path, postgres) as singing:
        load, wind = Load(singing, plan(8, 1000)), FaultInjector(singing)
        working = asyncio.create_task(load.run())
        steady, moody = singing.voices[0], singing.voices[1:]
        await singing.until_rows("SELECT 1 FROM sessions WHERE key = 'agent:helper:main'")
        watcher = Watcher(singing, "agent:helper:main", at=steady)
        watching = asyncio.create_task(watcher.watch())
        for number in (1, 2, 1):
            await wind.inject_faults([Fault(0.5, "kill", number, 0.0)])
        load.stop.set()
        await working
        await singing.until(watcher.up_to_date, what="it has seen everything")
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        assert (watcher.moves, len(watcher.seen) > 0) == (0, True)
        assert len(moody) == 2 and watcher.wrong(StoreSnapshot(singing.home)) == []


@pytest.mark.requirement("S4", "G16")
async def test_waits_and_stops_work_wherever_they_are_asked_for(tmp_path: Path, postgres: Postgres) -> None:
    """Nobody looks for stops here: who plays the run is told."""
    async with open_replica_set(tmp_path, postgres, patience={"sweep": 600.0}) as singing:
        owner = await begin(singing, BOUND)
        one, other = _others(singing, owner)
        waiting = asyncio.create_task(one.ask("wait", run="run", seconds=BOUND))
        assert await other.ask("stop", session=HERE) == {"run_ids": ["run"]}
        view: dict[str, Any] = await waiting
        assert view["state"] == "cancelled"


def _others(singing: ReplicaSet, owner: ReplicaProcess) -> list[ReplicaProcess]:
    return [voice for voice in singing.voices if voice is not owner]
