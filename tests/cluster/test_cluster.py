"""Three replicas in all weathers: nothing is lost or repeated, and all clients get all events in order.

What is checked is read from the database when every replica has left. `--storm 600` goes on for that long, with
further seeds; what the weather was is written into the report.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count
from pathlib import Path
from time import monotonic

import pytest

from chaos.scenario import Planned
from cluster.database import Postgres
from cluster.load import Load, plan
from support.faults import KINDS, FaultInjector, plan_faults
from support.replicas import ReplicaSet, open_replica_set

pytestmark = pytest.mark.anyio

MESSAGES = 2000  # that are at hand; as many as there is time for are sent
FIRST = 100  # seed of a storm
Record = Callable[[str, object], None]


async def suffer(home: Path, postgres: Postgres, seed: int, faults: int) -> tuple[Load, FaultInjector]:
    """A load under a forecast; what came of it has been checked."""
    async with open_replica_set(home, postgres, seed=seed) as replica_set:
        load, wind = Load(replica_set, plan(seed, MESSAGES)), FaultInjector(replica_set)
        blowing = asyncio.create_task(wind.inject_faults(plan_faults(seed, faults)))
        working = asyncio.create_task(load.run())
        try:
            await asyncio.wait({blowing, working}, return_when=asyncio.FIRST_COMPLETED)
            assert not working.done() or working.exception(), "the load was over before the weather was"
            await blowing
            load.stop.set()
            await working
        finally:
            for task in (blowing, working):
                task.cancel()
            await asyncio.gather(blowing, working, return_exceptions=True)
        await _leave(replica_set)
        replica_set.count()
        wrong = load.wrong()
        assert not wrong, f"seed {seed}, {wind.report()}:\n" + "\n".join(wrong)
    return load, wind


async def _leave(replica_set: ReplicaSet) -> None:
    """When those that are gone have been forgotten, the others leave in good order."""
    await replica_set.until(
        lambda: len(replica_set.rows("SELECT id FROM owners")) == 3, what="the dead are forgotten"
    )
    assert [await replica.leave() for replica in replica_set.replicas] == [0, 0, 0]
    for replica in replica_set.replicas:
        assert "Traceback" not in replica.read_log(), replica.read_log()


def report(load: Load, wind: FaultInjector, seed: int, seconds: float) -> str:
    """What was done and what came of it, in a line."""
    runs, taken_up = (load.replica_set.tally[name] for name in ("runs", "taken up"))
    return (
        f"seed {seed}, {seconds:.0f} s: {len(load.accepted)} messages, {runs} runs, {taken_up} taken up by others, "
        f"{load.replica_set.tally['fenced']} fenced, accepted in {load.longest:.1f} s at most; "
        f"watchers moved {sum(watcher.moves for watcher in load.watchers)} times; {wind.report()}"
    )


@pytest.mark.requirement("G1", "G2", "G3", "G5", "G9", "G13", "G38", "S4", "S5", "S6", "S9", "P4", "P5")
@pytest.mark.timeout(240)
async def test_random_faults_lose_and_repeat_nothing(
    tmp_path: Path, postgres: Postgres, record_property: Record
) -> None:
    began = monotonic()
    load, wind = await suffer(tmp_path / "weather", postgres, 1, len(KINDS))
    assert {fault.kind for fault in wind.done} == set(KINDS)
    assert load.replica_set.tally["taken up"], "nothing was under way when the weather was bad"
    record_property("report", report(load, wind, 1, monotonic() - began))


TAMPERED = {
    "came before": (
        "UPDATE runs SET first_seq = first_seq + {}, last_seq = last_seq + {} WHERE id = 'm0'",
        90,
        -90,
    ),
    "is dated": (
        "UPDATE messages SET created_at = created_at + {} WHERE role = 'assistant'",
        30_000,
        -30_000,
    ),
    "was seen": ("UPDATE messages SET entry = {} WHERE seq = 2", "'x' || entry", "substr(entry, 2)"),
    "is not in the store": ("UPDATE runs SET id = {} WHERE first_seq = 3", "'other'", "'m1'"),
    "is still running": ("UPDATE runs SET state = {} WHERE id = 'm1'", "'running'", "'ok'"),
}
"""What is then found, what is changed, and how it is undone."""


async def test_the_invariant_checks_can_fail(tmp_path: Path, postgres: Postgres) -> None:
    """A database in which one thing is wrong does not pass."""
    session = "agent:main:direct:s0"
    texts = [Planned(f"m{number}", session, f"say {number}", "ok", 1) for number in range(2)]
    async with open_replica_set(tmp_path, postgres, size=1) as replica_set:
        load = Load(replica_set, texts)
        await load.run()
        await replica_set.replicas[0].leave()
        assert load.wrong() == []
        for found, (sql, done, undone) in TAMPERED.items():
            replica_set.rows(sql.format(done, done))
            assert any(found in line for line in load.wrong()), (found, load.wrong())
            replica_set.rows(sql.format(undone, undone))
        assert load.wrong() == []


def test_a_fault_plan_is_the_same_for_the_same_seed() -> None:
    assert plan_faults(3, 40) == plan_faults(3, 40) != plan_faults(4, 40)
    assert {fault.kind for fault in plan_faults(3, len(KINDS))} == set(KINDS)


@pytest.mark.requirement("G1", "G2", "G3", "G5", "G9", "G13", "G38", "S4", "S5", "S6", "S9", "P4", "P5")
@pytest.mark.timeout(0)
async def test_a_long_run_of_random_faults(
    tmp_path: Path, postgres: Postgres, request: pytest.FixtureRequest, capfd: pytest.CaptureFixture[str]
) -> None:
    """Round after round, each with its own database, so that a failure can still be inspected."""
    seconds = float(request.config.getoption("--storm") or 0)
    if not seconds:
        pytest.skip("only with --storm SECONDS")
    told = request.config.pluginmanager.get_plugin("terminalreporter")
    until = monotonic() + seconds
    for seed in count(FIRST):
        began = monotonic()
        load, wind = await suffer(tmp_path / f"storm-{seed}", postgres, seed, 2 * len(KINDS))
        if told is not None:
            with capfd.disabled():
                told.write_line(report(load, wind, seed, monotonic() - began))
        if monotonic() >= until:
            break
