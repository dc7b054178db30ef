"""What is to happen once happens once, however many replicas there are: jobs at their slots, and retention."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from cluster.database import Postgres
from support.replicas import Facts, ReplicaProcess, open_replica_set

pytestmark = pytest.mark.anyio

SLOTS = 6
OLD = 90 * 86_400_000  # milliseconds
SESSIONS = 60  # more than one batch of retention
FIRINGS = "SELECT id, state FROM runs WHERE origin = 'cron' ORDER BY n"
JOB: Facts = {
    "name": "tick",
    "schedule": {"kind": "every", "everyMs": 1000},
    "payload": {"kind": "agentTurn", "message": "say tick"},
}


@pytest.mark.requirement("W5")
async def test_a_job_fires_once_per_slot_and_outlives_the_replica_that_added_it(
    tmp_path: Path, postgres: Postgres
) -> None:
    async with open_replica_set(tmp_path, postgres) as replica_set:
        first = replica_set.replicas[0]
        await first.ask("job", **JOB)
        await replica_set.until(lambda: len(replica_set.rows(FIRINGS)) >= SLOTS // 2, what="it fires")
        await first.kill()
        fired = len(replica_set.rows(FIRINGS))
        await replica_set.until(
            lambda: len(replica_set.rows(FIRINGS)) >= fired + SLOTS // 2, what="it goes on"
        )
        await replica_set.until(lambda: all(run["state"] == "ok" for run in replica_set.rows(FIRINGS)[:-1]))
        slots = [int(run["id"].rpartition(":")[2]) for run in replica_set.rows(FIRINGS)]
        assert len(set(slots)) == len(slots)
        assert slots == sorted(slots)
        # Those missed while no process ran are one firing, for the latest of them.
        assert all((slot - slots[0]) % 1000 == 0 for slot in slots)


@pytest.mark.requirement("G27")
async def test_retention_touches_each_session_once(tmp_path: Path, postgres: Postgres) -> None:
    retention = {"archiveAfterDays": 30}
    async with open_replica_set(
        tmp_path,
        postgres,
        session={"retention": retention},
        timings={"retention_interval_seconds": 0.2, "sweep_interval_seconds": 0.2},
    ) as replica_set:
        for replica in replica_set.replicas:
            replica.begin("changes")
            await replica_set.until(
                lambda replica=replica: {"changes": None} in replica.reports, what="it listens"
            )
        for number in range(SESSIONS):
            await replica_set.ask_until_done("open", session=f"agent:main:direct:old-{number}")
        await replica_set.look("UPDATE sessions SET updated_at = updated_at - $1", OLD)
        await replica_set.until(
            lambda: len(replica_set.rows("SELECT 1 FROM sessions WHERE archived = 1")) == SESSIONS,
            what="all are archived",
        )
        for replica in replica_set.replicas:
            await replica_set.until(
                lambda replica=replica: len(touched(replica)) == SESSIONS, what="it heard of all"
            )
            assert set(touched(replica).values()) == {1}


def touched(replica: ReplicaProcess) -> Counter[str]:
    return Counter(fact["changes"] for fact in replica.reports if fact.get("changes"))
