"""A server that all replicas need is away: they say so, keep what they have accepted, and go on when it is back."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx2
import pytest

from cluster.database import Postgres
from cluster.load import Load, plan
from cluster.servers import nats_cluster
from support.faults import FaultInjector
from support.replicas import BOUND, ReplicaProcess, ReplicaRefused, ReplicaSet, open_replica_set

pytestmark = pytest.mark.anyio

MESSAGES = 12
SESSIONS = 3


async def ready(replica: ReplicaProcess) -> tuple[int, dict[str, Any]]:
    async with httpx2.AsyncClient(timeout=BOUND) as client:
        answer = await client.get(f"{replica.url}/readyz")
    return answer.status_code, answer.json()


async def say(replica_set: ReplicaSet, number: int) -> None:
    session = f"agent:main:direct:s{number % SESSIONS}"
    await replica_set.ask_until_done("submit", session=session, text=f"say {number}", key=f"m{number}")


async def all_said(replica_set: ReplicaSet, count: int) -> None:
    """Everything that was accepted has been answered, in the order of each session."""
    for number in range(count):
        assert (await replica_set.wait_for_run_end(f"m{number}"))["reply"] == str(number)
    sql = "SELECT session, id FROM runs WHERE id LIKE 'm%' ORDER BY session, first_seq"
    lanes: dict[int, list[int]] = {}
    for run in await replica_set.look(sql):
        lanes.setdefault(run["session"], []).append(int(run["id"][1:]))
    assert all(lane == sorted(lane) for lane in lanes.values())


@pytest.mark.requirement("G5", "G9")
@pytest.mark.timeout(180)
async def test_without_the_store_nothing_is_accepted_and_nothing_is_lost(
    tmp_path: Path, postgres: Postgres
) -> None:
    async with open_replica_set(tmp_path, postgres) as replica_set:
        for number in range(MESSAGES):
            await say(replica_set, number)
        await asyncio.to_thread(postgres.kill)
        try:
            asked = [
                replica.ask("submit", 2 * BOUND, session="agent:main:direct:s0", text="say lost")
                for replica in replica_set.replicas
            ]
            answers = await asyncio.gather(*asked, return_exceptions=True)
            health = await asyncio.gather(*map(ready, replica_set.replicas))
        finally:
            await asyncio.to_thread(postgres.start)
        for answer in answers:
            assert isinstance(answer, ReplicaRefused), answer
            assert str(answer).startswith("The database ") and "\n" not in str(answer)
            assert "nothing of this request was kept" in str(answer)
        assert health == [(503, {"ready": False, "failing": ["store"]})] * 3
        await all_said(replica_set, MESSAGES)
        assert await replica_set.look("SELECT 1 FROM runs WHERE input LIKE '%lost%'") == []
        for replica in replica_set.replicas:
            assert await ready(replica) == (200, {"ready": True})


@pytest.mark.requirement("G9")
async def test_without_the_bus_everything_is_accepted_and_done_when_it_is_back(
    tmp_path: Path, postgres: Postgres
) -> None:
    async with open_replica_set(tmp_path, postgres) as replica_set:
        await say(replica_set, 0)
        await asyncio.to_thread(replica_set.nats.kill)
        try:
            for number in range(1, MESSAGES):
                await say(replica_set, number)
            health = await asyncio.gather(*map(ready, replica_set.replicas))
        finally:
            await asyncio.to_thread(replica_set.nats.lose_everything)
        assert health == [(200, {"ready": True, "degraded": ["bus"]})] * 3
        await all_said(replica_set, MESSAGES)


@pytest.mark.requirement("G1", "G9", "G38")
@pytest.mark.timeout(180)
async def test_a_node_of_three_is_killed(tmp_path: Path, postgres: Postgres) -> None:
    """Each of them once, so that also the one that leads goes, and comes back."""
    with nats_cluster() as nodes:
        bus = {"replicas": 3, "url": ",".join(node.url for node in nodes)}
        async with open_replica_set(tmp_path, postgres, bus=bus) as replica_set:
            load, wind = Load(replica_set, plan(9, 1000)), FaultInjector(replica_set)
            working = asyncio.create_task(load.run())
            for node in nodes:
                before = len(load.answered)
                await asyncio.to_thread(node.kill)
                await replica_set.until(
                    lambda before=before: len(load.answered) > before + 5, 3 * BOUND, what="it goes on"
                )
                await asyncio.to_thread(node.start)
            load.stop.set()
            await working
            assert [await replica.leave() for replica in replica_set.replicas] == [0, 0, 0]
            assert (load.wrong(), wind.done) == ([], [])
