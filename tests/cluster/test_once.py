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
async def test_a_job_fires_once_per_slot_and_goes_on_without_who_added_it(
    tmp_path: Path, postgres: Postgres
) -> None:
    async with open_replica_set(tmp_path, postgres) as singing:
        first = singing.voices[0]
        await first.ask("job", **JOB)
        await singing.until(lambda: len(singing.rows(FIRINGS)) >= SLOTS // 2, what="it fires")
        await first.kill()
        fired = len(singing.rows(FIRINGS))
        await singing.until(lambda: len(singing.rows(FIRINGS)) >= fired + SLOTS // 2, what="it goes on")
        await singing.until(lambda: all(run["state"] == "ok" for run in singing.rows(FIRINGS)[:-1]))
        slots = [int(run["id"].rpartition(":")[2]) for run in singing.rows(FIRINGS)]
        assert len(set(slots)) == len(slots)
        assert slots == sorted(slots)
        # Those that nobody was there for are one firing, for the latest of them.
        assert all((slot - slots[0]) % 1000 == 0 for slot in slots)


@pytest.mark.requirement("G27")
async def test_retention_touches_each_session_once(tmp_path: Path, postgres: Postgres) -> None:
    retention = {"archiveAfterDays": 30}
    async with open_replica_set(
        tmp_path, postgres, session={"retention": retention}, patience={"retention": 0.2, "sweep": 0.2}
    ) as singing:
        for voice in singing.voices:
            voice.begin("changes")
            await singing.until(lambda voice=voice: {"changes": None} in voice.told, what="it listens")
        for number in range(SESSIONS):
            await singing.ask_until_done("open", session=f"agent:main:direct:old-{number}")
        await singing.look("UPDATE sessions SET updated_at = updated_at - $1", OLD)
        await singing.until(
            lambda: len(singing.rows("SELECT 1 FROM sessions WHERE archived = 1")) == SESSIONS,
            what="all are archived",
        )
        for voice in singing.voices:
            await singing.until(lambda voice=voice: len(touched(voice)) == SESSIONS, what="it heard of all")
            assert set(touched(voice).values()) == {1}


def touched(voice: ReplicaProcess) -> Counter[str]:
    return Counter(fact["changes"] for fact in voice.told if fact.get("changes"))
