"""Lanes that several replicas share: who has one, who gets it next, and what the death of anything costs."""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from antiphon.errors import BusError, ConfigError
from antiphon.lanes.nats import NatsLanes
from antiphon.nats import connection
from antiphon.nats.connection import NatsServers
from cluster.servers import NatsServer, nats_cluster, nats_server, together
from lanes.work import BOUND, Work

pytestmark = pytest.mark.anyio

ACK_WAIT = 1.0
Make = Callable[..., NatsLanes]


@pytest.fixture
async def make(nats: NatsServer) -> AsyncIterator[Make]:
    """Replicas that share a namespace, on the shared server unless given another."""
    namespace = uuid.uuid4().hex
    made: list[NatsLanes] = []

    def one(servers: NatsServers | None = None, **given: Any) -> NatsLanes:
        given = {"namespace": namespace, "ack_wait": ACK_WAIT, **given}
        made.append(NatsLanes(servers or nats.servers(), **given))
        return made[-1]

    yield one
    for lanes in made:
        await lanes.stop(0)
        await lanes.close()


async def vanish(lanes: NatsLanes) -> None:
    """As a killed process: nothing is said, nothing is renewed."""
    await lanes._connection.stop()  # pyright: ignore[reportPrivateUsage]


async def stop_renewing(lanes: NatsLanes) -> None:
    """As a process that was paused for too long."""
    await connection.cancel_tasks(lanes._background_tasks[0])  # pyright: ignore[reportPrivateUsage]


def manager(lanes: NatsLanes) -> Any:
    client = lanes._connection.client  # pyright: ignore[reportPrivateUsage]
    assert client is not None
    return client.jsm()  # pyright: ignore[reportUnknownMemberType]


def stream(lanes: NatsLanes) -> str:
    return lanes._queue.stream  # pyright: ignore[reportPrivateUsage]


async def held(lanes: NatsLanes) -> int:
    """Lanes that are active, by the server's count."""
    return (await manager(lanes).stream_info(stream(lanes))).state.messages


async def sweep(work: Work, *replicas: NatsLanes, true: Callable[[], bool], seconds: float = BOUND) -> None:
    """Activate lanes that have work and no owner, as the sweeper does, until something is true."""
    async with asyncio.timeout(seconds):
        while not true():
            for lane, jobs in list(work.jobs.items()):
                if jobs and not work.active[lane]:
                    await replicas[0].activate(lane)
            try:
                await work.until(true, 0.2)
            except TimeoutError:
                continue


async def holding(work: Work, *replicas: NatsLanes, lane: int = 1) -> asyncio.Event:
    """The first replica is in the middle of a drain of the lane when the others join."""
    work.hold = asyncio.Event()
    work.jobs[lane] += 1
    for number, replica in enumerate(replicas):
        await replica.start(work.drain("abc"[number]), work.waiting)
        if number == 0:
            await replica.activate(lane)
            await work.until(lambda: work.active[lane] == 1)
    return work.hold


@pytest.mark.requirement("G13")
async def test_the_lane_of_a_vanished_replica_is_taken_over_in_time(make: Make) -> None:
    work, a, b = Work(), make(), make()
    await holding(work, a, b)
    before = asyncio.get_running_loop().time()
    await vanish(a)
    await work.until(lambda: work.by[1] == ["a", "b"])
    assert asyncio.get_running_loop().time() - before < ACK_WAIT + 1


@pytest.mark.requirement("G9")
async def test_a_lane_stays_with_one_replica_while_it_is_alive(make: Make) -> None:
    work, a, b = Work(), make(slots=1), make()
    hold = await holding(work, a, b)
    with pytest.raises(TimeoutError):
        await work.until(lambda: work.looks[1] > 1, 2.5 * ACK_WAIT)
    await b.activate(1)
    hold.set()
    await work.until(lambda: work.done[1] == 1)
    assert work.doubled == 0


async def test_replicas_share_the_work_and_lose_none(make: Make) -> None:
    """Every hint is given by another replica than before, at any moment of a drain."""
    work = Work()
    work.hold = asyncio.Event()  # until every lane has an owner: one more than two of them have places for
    replicas = [make(slots=3), make(slots=3), make(slots=3)]
    for name, replica in zip("abc", replicas, strict=True):
        await replica.start(work.drain(name), work.waiting)
    for number in range(600):
        lane = number % 7
        work.jobs[lane] += 1
        await replicas[number % 3].activate(lane)
        if number == 6:
            await work.until(lambda: work.active.total() == 7)
            work.hold.set()
        if number % 5 == 0:
            await asyncio.sleep(0)
    await work.until(lambda: work.done.total() == 600)
    assert work.doubled == 0
    assert len({name for names in work.by.values() for name in names}) == 3


async def test_a_hint_rejected_just_before_the_lane_is_released_is_not_lost(make: Make) -> None:
    work, a, b = Work(), make(ack_wait=30), make(ack_wait=30, slots=1)
    last_look, go_on = asyncio.Event(), asyncio.Event()
    drain = work.drain("a")

    async def late(lane: int) -> None:
        await drain(lane)
        last_look.set()
        await go_on.wait()

    await a.start(late, work.waiting)
    await a.activate(1)
    await asyncio.wait_for(last_look.wait(), BOUND)
    await b.start(work.drain("b"), work.waiting)
    work.jobs[1] += 1
    await b.activate(1)
    await asyncio.wait_for(b._connection.confirm_flushed(await b._connection.wait_until_connected()), BOUND)  # pyright: ignore[reportPrivateUsage]
    go_on.set()
    await work.until(lambda: work.done[1] == 1)


async def test_a_replica_takes_no_more_lanes_than_it_has_slots(make: Make) -> None:
    work, a = Work(), make(slots=3)
    work.hold = asyncio.Event()
    await a.start(work.drain(), work.waiting)
    for lane in range(10):
        work.jobs[lane] += 1
        await a.activate(lane)
    await work.until(lambda: work.active.total() == 3)
    with pytest.raises(TimeoutError):
        await work.until(lambda: work.active.total() > 3, 0.3)
    work.hold.set()
    await work.until(lambda: work.done.total() == 10)
    assert work.most == 3


@pytest.mark.requirement("G12")
async def test_a_resting_lane_occupies_no_slot(make: Make) -> None:
    """One slot: the first lane waits for the second, which can only run if the first does not count."""
    a, second = make(slots=1), asyncio.Event()
    first = asyncio.Event()

    async def drain(lane: int) -> bool:
        if lane == 2:
            second.set()
            return False
        a.set_resting(lane, resting=True)
        await second.wait()
        a.set_resting(lane, resting=False)
        first.set()
        return False

    await a.start(drain)
    await a.activate(1)
    await a.activate(2)
    await asyncio.wait_for(first.wait(), BOUND)
    assert a._resting == set()  # pyright: ignore[reportPrivateUsage]


async def test_a_busy_lane_does_not_starve_the_others(make: Make) -> None:
    """One slot, one lane that always has more: it goes to the end of the queue each time it is given back."""
    a = make(slots=1)
    turns: list[int] = []
    ended, first = asyncio.Event(), asyncio.Event()

    async def drain(lane: int) -> bool:
        turns.append(lane)
        first.set()
        if lane == 9:
            ended.set()
        await asyncio.sleep(0)
        return lane == 1

    await a.start(drain)
    await a.activate(1)
    await asyncio.wait_for(first.wait(), BOUND)
    for lane in range(2, 10):
        await a.activate(lane)
    await asyncio.wait_for(ended.wait(), BOUND)
    assert [lane for lane in turns if lane != 1] == list(range(2, 10))


async def test_a_replica_that_stops_hands_over_at_once(make: Make) -> None:
    work, a, b = Work(), make(ack_wait=60), make(ack_wait=60)
    await holding(work, a, b)
    await a.stop(0)
    await a.close()
    await work.until(lambda: work.by[1] == ["a", "b"], 3)


async def test_a_lane_that_arrives_while_stopping_is_given_back(make: Make) -> None:
    work, a, b = Work(), make(ack_wait=60), make(ack_wait=60)
    hold = await holding(work, a)
    stopping = asyncio.create_task(a.stop(BOUND))
    for _ in range(3):
        await asyncio.sleep(0)
    await b.start(work.drain("b"), work.waiting)
    for lane in range(2, 20):
        work.jobs[lane] += 1
        await b.activate(lane)
    await work.until(lambda: len(work.by) == 19, 5)
    hold.set()
    await asyncio.wait_for(stopping, BOUND)
    await work.until(lambda: work.done.total() == 19)
    assert work.by == {1: ["a"], **{lane: ["b"] for lane in range(2, 20)}}


async def test_a_redelivered_message_becomes_the_new_lease(make: Make) -> None:
    work, a = Work(), make()
    hold = await holding(work, a)
    lease = a._leases[1]  # pyright: ignore[reportPrivateUsage]
    await stop_renewing(a)
    with pytest.raises(TimeoutError):
        await work.until(lambda: work.looks[1] > 1, ACK_WAIT + 0.5)
    assert a._leases[1] is not lease  # pyright: ignore[reportPrivateUsage]
    hold.set()
    await work.until(lambda: work.looks[1] == 2 and not work.active[1])
    assert work.doubled == 0


async def test_an_expired_lease_does_not_acknowledge_anothers_lane(make: Make) -> None:
    work, a, b = Work(), make(slots=1), make(slots=1)
    zombie = await holding(work, a, b)
    owner = work.hold = asyncio.Event()
    await stop_renewing(a)
    await work.until(lambda: work.by[1] == ["a", "b"])
    drains = [replica._tasks[1] for replica in (a, b)]  # pyright: ignore[reportPrivateUsage]
    zombie.set()
    await asyncio.wait_for(asyncio.wait(drains[:1]), BOUND)
    assert await held(b) == 1
    owner.set()
    await asyncio.wait_for(asyncio.wait(drains[1:]), BOUND)
    assert await held(b) == 0


@pytest.mark.requirement("G16")
async def test_a_drain_is_abandoned_on_any_replica(make: Make) -> None:
    work, a, b = Work(), make(ack_wait=60), make(ack_wait=60)
    await holding(work, a, b)
    work.hold = None
    await b.abandon(1)
    await work.until(lambda: work.looks[1] == 2 and work.done[1] == 1, 5)


async def test_the_server_may_die_and_come_back(make: Make) -> None:
    work = Work()
    with nats_server() as server:
        a, b = make(server.servers()), make(server.servers())
        await a.start(work.drain("a"), work.waiting)
        await b.start(work.drain("b"), work.waiting)
        for life in range(3):
            for lane in range(20):
                work.jobs[lane] += 1
                await a.activate(lane)
            if life < 2:
                await asyncio.to_thread(server.restart)
        await sweep(work, a, b, true=lambda: work.done.total() == 60)


async def test_a_lease_outlives_the_server(make: Make) -> None:
    """The stream is on disk, and the owner of a lane keeps it: no other process looks."""
    work = Work()
    with nats_server() as server:
        a, b = make(server.servers(), ack_wait=4), make(server.servers(), ack_wait=4)
        hold = await holding(work, a, b)
        await asyncio.to_thread(server.restart)
        with pytest.raises(TimeoutError):
            await work.until(lambda: work.looks[1] > 1, 6)
        hold.set()
        await work.until(lambda: work.done[1] == 1)


async def test_without_a_server_hints_neither_fail_nor_wait(make: Make) -> None:
    work = Work()
    with nats_server() as server:
        a = make(server.servers())
        await a.start(work.drain(), work.waiting)
        await asyncio.to_thread(server.kill)
        before = asyncio.get_running_loop().time()
        for lane in range(1000):
            await a.activate(lane)
        await a.abandon(7)
        assert asyncio.get_running_loop().time() - before < 0.5
        for lane in range(50):
            work.jobs[lane] += 1
        await asyncio.to_thread(server.start)
        await sweep(work, a, true=lambda: work.done.total() == 50)
        await asyncio.to_thread(server.kill)
        await asyncio.wait_for(a.stop(0), BOUND)
        await asyncio.wait_for(a.close(), BOUND)


async def test_a_silent_server_is_given_up(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has our connection and says nothing: hints do not wait for it, and work goes on when it wakes."""
    monkeypatch.setattr(connection, "PING_INTERVAL_SECONDS", 1)
    work = Work()
    with nats_server() as server:
        a = make(server.servers())
        await a.start(work.drain(), work.waiting)
        server.pause()
        for lane in range(1000):
            await a.activate(lane)
        async with asyncio.timeout(BOUND):
            while a.is_connected:  # noqa: ASYNC110 - no event announces it
                await asyncio.sleep(0)
        server.resume()
        work.jobs[1] += 1
        await sweep(work, a, true=lambda: work.done[1] == 1)


@pytest.mark.parametrize("loss", ["purged", "deleted", "consumer", "disk"])
async def test_the_stream_may_be_lost(make: Make, loss: str) -> None:
    """It is made again without a crash, and costs at most a sweep."""
    work = Work()
    with nats_server() as server:
        a, b = make(server.servers()), make(server.servers())
        hold = await holding(work, a, b)
        if loss == "purged":
            await manager(a).purge_stream(stream(a))
        elif loss == "deleted":
            await manager(a).delete_stream(stream(a))
        elif loss == "consumer":
            await manager(a).delete_consumer(stream(a), "replicas")
        else:
            await asyncio.to_thread(server.lose_everything)
        for lane in range(2, 30):
            work.jobs[lane] += 1
            await b.activate(lane)
        hold.set()
        await sweep(work, b, true=lambda: work.done.total() == 29)


async def test_a_stream_that_differs_is_adapted(make: Make) -> None:
    neighbour, a, b = make(namespace=uuid.uuid4().hex), make(ack_wait=5), make(ack_wait=2)
    work = Work()
    await neighbour.start(work.drain())
    name = stream(b)
    subjects = [f"{name.removesuffix('-lanes')}.lane.*"]
    await manager(neighbour).add_stream(name=name, subjects=subjects, retention="workqueue")
    await a.start(work.drain())
    await b.start(work.drain())
    found = (await manager(b).stream_info(name)).config
    assert (found.max_msgs_per_subject, found.discard, found.discard_new_per_subject) == (1, "new", True)
    consumer = (await manager(b).consumer_info(name, "replicas")).config
    assert consumer.ack_wait == 2 and consumer.max_ack_pending == -1


async def test_namespaces_on_one_server_are_separate(make: Make) -> None:
    one, other = Work(), Work()
    a, b = make(), make(namespace=uuid.uuid4().hex)
    await a.start(one.drain(), one.waiting)
    await b.start(other.drain(), other.waiting)
    one.jobs[1] += 1
    await a.activate(1)
    await one.until(lambda: one.done[1] == 1)
    assert other.looks == Counter()


@pytest.mark.parametrize("death", ["leader", "other"])
async def test_a_cluster_survives_the_death_of_a_server(make: Make, death: str) -> None:
    work = Work()
    with nats_cluster() as servers:
        given = together(servers)
        a, b = (make(given, replicas=3, connect_timeout=20, ack_wait=2) for _ in range(2))
        hold = await holding(work, a, b)
        leader = (await manager(a).stream_info(stream(a))).cluster.leader
        victim = next(
            server for number, server in enumerate(servers) if (f"n{number}" == leader) == (death == "leader")
        )
        await asyncio.to_thread(victim.kill)
        hold.set()
        for lane in range(2, 30):
            work.jobs[lane] += 1
            await a.activate(lane)
        # Electing another leader takes many seconds, and twice as many if the votes are split.
        await sweep(work, b, true=lambda: work.done.total() == 29, seconds=60)


async def test_unusable_servers_are_reported_in_one_sentence(make: Make) -> None:
    work = Work()
    with pytest.raises(BusError, match=r"could not store the queue of lanes: replicas > 1 .*\. Check stream"):
        await make(replicas=3, connect_timeout=0).start(work.drain())
    with pytest.raises(ConfigError, match="namespace"):
        make(namespace="a.b")
    with (
        nats_server(jetstream=False) as server,
        pytest.raises(BusError, match=r"JetStream does not answer\. Enable it"),
    ):
        await make(server.servers(), connect_timeout=0).start(work.drain())
