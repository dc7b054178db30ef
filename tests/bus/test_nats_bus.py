"""Events that cross from replica to replica: in order, once, and with a gap wherever some may be missing."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
import pytest

from antiphon.bus import (
    Delivered,
    Delta,
    Event,
    Gap,
    Listener,
    MessageAppended,
    RunChanged,
    RunUsage,
    SessionChanged,
    StopRequested,
    ToolPhase,
    run_topic,
)
from antiphon.bus import nats as module
from antiphon.bus.nats import NatsBus
from antiphon.nats.connection import NatsServers
from cluster.servers import NatsServer, nats_cluster, nats_server, together

pytestmark = pytest.mark.anyio

BOUND = 15.0
Make = Callable[..., Awaitable[NatsBus]]


@pytest.fixture
async def make(nats: NatsServer) -> AsyncIterator[Make]:
    """Replicas that share a namespace, on the shared server unless given another."""
    namespace = uuid.uuid4().hex
    made: list[NatsBus] = []

    async def one(servers: NatsServers | None = None, **given: Any) -> NatsBus:
        given = {"namespace": namespace, **given}
        bus = NatsBus(servers or nats.servers(), **given)
        made.append(bus)
        await bus.start()
        return bus

    yield one
    for bus in made:
        await bus.stop()


def event(number: int) -> Event:
    return Delta(session_key="k", run_id="r", number=number)


async def taken(listener: Listener, count: int) -> list[Event | None]:
    return [await listener.get(BOUND) for _ in range(count)]


async def until(listener: Listener, wanted: Event) -> list[Event]:
    """Everything up to an event, without it."""
    before: list[Event] = []
    async with asyncio.timeout(BOUND):
        while (one := await listener.get(BOUND)) != wanted:
            assert one is not None
            before.append(one)
    return before


async def again(bus: NatsBus, listener: Listener, publisher: NatsBus, topic: str, number: int) -> list[Event]:
    """Publish until it is heard, as something that happens again and again; what was heard before."""
    heard: list[Event] = []
    async with asyncio.timeout(BOUND):
        while True:
            publisher.publish(topic, event(number))
            one = await listener.get(0.1)
            if one == event(number):
                return heard
            if one is not None:
                heard.append(one)


async def test_every_kind_of_event_arrives_as_it_was(make: Make) -> None:
    a, b = await make(), await make()
    usage = RunUsage(input=1, output=2, cost=None)
    sent: list[Event] = [
        MessageAppended(
            session_key="k", session_id="s", seq=1, entry="e", body='{"role":"user"}', run_id="ä"
        ),
        RunChanged(session_key="k", run_id="r", state="ok", reply="Ja.", usage=usage, ended_at=5),
        Delta(session_key="k", run_id="r", number=1, text="x", restart=True),
        ToolPhase(session_key="k", run_id="r", call_id="c", name="n", phase="start"),
        Delivered(session_key="k", key="d", run_id=None, kind="announce", text="t"),
        StopRequested(run_id="r"),
        SessionChanged(session_key="k", reason="create"),
        Gap(),
    ]
    async with b.listen("session.7") as one, b.listen("session.*") as all_of_them:
        for each in sent:
            a.publish("session.7", each)
        assert await taken(one, len(sent)) == sent
        assert await taken(all_of_them, len(sent)) == sent


async def test_what_is_published_after_the_listener_entered_arrives_and_nothing_twice(make: Make) -> None:
    """No pause between entering and publishing, and the same process hears its own once."""
    a, b = await make(), await make()
    for number in range(50):
        topic = f"session.{number}"
        async with b.listen(topic) as far, a.listen(topic) as near:
            a.publish(topic, event(number))
            b.publish(topic, event(-1))
            assert sorted([str(one) for one in await taken(far, 2)]) == sorted(
                [str(event(number)), str(event(-1))]
            )
            assert len(await taken(near, 2)) == 2
            assert await near.get(0.001) is None and await far.get(0.001) is None


async def test_the_order_of_a_publisher_is_kept(make: Make) -> None:
    a, b, c = [await make(buffer=10_000) for _ in range(3)]
    async with c.listen("session.*") as listener:
        for number in range(2000):
            a.publish(f"session.{number % 3}", Delta(session_key="a", run_id="r", number=number))
            b.publish(f"session.{number % 3}", Delta(session_key="b", run_id="r", number=number))
            if number % 100 == 0:
                await asyncio.sleep(0)
        got = await taken(listener, 4000)
    for key in "ab":
        assert [one.number for one in got if isinstance(one, Delta) and one.session_key == key] == list(
            range(2000)
        )


@pytest.mark.parametrize("name", ["a.b c*>", "*", ">", "ä" * 300, "x" * 5000, "..", "\r\nPUB x 0", "*.*"])
async def test_ids_of_runs_may_be_any_text(make: Make, name: str) -> None:
    a, b = await make(), await make()
    async with b.listen(run_topic(name)) as listener, b.listen(run_topic("other")) as other:
        a.publish(run_topic(name), event(1))
        assert await listener.get(BOUND) == event(1)
        a.publish(run_topic("other"), event(2))
        assert await other.get(BOUND) == event(2)


async def test_namespaces_on_one_server_do_not_share_events(make: Make) -> None:
    a, b, stranger = await make(), await make(), await make(namespace=uuid.uuid4().hex)
    async with b.listen("sessions") as listener:
        stranger.publish("sessions", event(1))
        a.publish("sessions", event(2))
        assert await listener.get(BOUND) == event(2)


async def test_an_event_that_is_too_large_is_a_gap(make: Make) -> None:
    a, b = await make(), await make()
    large = MessageAppended(session_key="k", session_id="s", seq=1, entry="e", body="x" * 2_000_000)
    async with b.listen("session.1") as far, a.listen("session.1") as near:
        a.publish("session.1", large)
        a.publish("session.1", event(2))
        assert await taken(near, 2) == [large, event(2)]
        assert await taken(far, 2) == [Gap(), event(2)]


async def test_a_hole_in_a_publishers_sequence_is_a_gap(make: Make) -> None:
    """Wherever between two servers it got lost."""
    a, b = await make(), await make()
    async with b.listen("session.*") as every, b.listen("session.1") as one, b.listen("sessions") as other:
        a.publish("session.1", event(1))
        assert [await every.get(BOUND), await one.get(BOUND)] == [event(1), event(1)]
        a._last_numbers["session.*"] += 1  # pyright: ignore[reportPrivateUsage]
        a.publish("session.2", event(3))
        assert await taken(every, 2) == [Gap(), event(3)]
        assert await one.get(BOUND) == Gap()
        a.publish("sessions", event(4))
        assert await other.get(BOUND) == event(4)


async def test_an_unreadable_event_is_a_gap(make: Make) -> None:
    a, b = await make(), await make()
    client = a._connection.client  # pyright: ignore[reportPrivateUsage]
    assert client is not None
    async with b.listen("sessions") as listener:
        subject = b._build_subject("sessions")  # pyright: ignore[reportPrivateUsage]
        for data in (b"", b"\xff\x00", msgspec.msgpack.encode(["p", 1, {"event": "of-tomorrow"}])):
            await client.publish(subject, data)
            assert await listener.get(BOUND) == Gap()
        a.publish("sessions", event(1))
        assert await listener.get(BOUND) == event(1)


async def test_a_publisher_that_drops_events_sends_a_gap(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = await make(), await make()
    monkeypatch.setattr(module, "MAX_OUTGOING_BYTES", 2000)
    async with b.listen("session.1") as listener:
        for number in range(1000):  # without giving the sender a turn
            a.publish("session.1", event(number))
        before = await until(listener, event(999))
        assert Gap() in before and len(before) < 500


async def test_a_reconnect_delivers_a_gap_to_both_sides(make: Make) -> None:
    """Those who were away, and those who listened to them."""
    with nats_server() as server:
        a, b = await make(server.servers()), await make(server.servers())
        async with b.listen("session.1") as far, a.listen("session.2") as near, b.listen("run.x"):
            await asyncio.to_thread(server.restart)
            heard = await again(b, far, a, "session.1", 7)
            assert Gap() in heard
            assert Gap() in await again(a, near, b, "session.2", 8)


async def test_a_publisher_that_was_disconnected_sends_a_gap(make: Make) -> None:
    a, b = await make(), await make()
    async with b.listen("session.1") as listener:
        client = a._connection.client  # pyright: ignore[reportPrivateUsage]
        assert client is not None
        await client.close()
        a.publish("session.1", event(1))  # no other connection receives it
        assert await listener.get(BOUND) == Gap()
        assert await again(b, listener, a, "session.1", 2) == []


async def test_without_a_server_local_events_are_delivered(make: Make) -> None:
    with nats_server() as server:
        a, b = await make(server.servers()), await make(server.servers())
        await asyncio.to_thread(server.kill)
        async with asyncio.timeout(BOUND):
            async with a.listen("sessions") as near, b.listen("sessions") as far:
                a.publish("sessions", event(1))
                assert await near.get(BOUND) == event(1)
                await asyncio.to_thread(server.start)
                assert await far.get(BOUND) == Gap()  # it was published while no listener could be reached
                assert await near.get(BOUND) == Gap()
                assert await again(b, far, a, "sessions", 2) in ([], [Gap()])


async def test_a_listener_that_enters_during_a_connect_is_subscribed(make: Make) -> None:
    a, b = await make(), await make()
    joined = b._connection._on_connected  # pyright: ignore[reportPrivateUsage]
    inside, go_on = asyncio.Event(), asyncio.Event()

    async def slowly(client: Any) -> None:
        await joined(client)
        inside.set()
        await go_on.wait()

    b._connection._on_connected = slowly  # pyright: ignore[reportPrivateUsage]
    client = b._connection.client  # pyright: ignore[reportPrivateUsage]
    assert client is not None
    await client.close()
    await asyncio.wait_for(inside.wait(), BOUND)
    async with b.listen("sessions") as listener:
        go_on.set()
        a.publish("sessions", event(1))
        assert await listener.get(BOUND) == event(1)


async def test_the_last_listener_removes_the_subscription(make: Make) -> None:
    a = await make()
    client = a._connection.client  # pyright: ignore[reportPrivateUsage]
    assert client is not None
    before = len(client._subs)  # pyright: ignore[reportPrivateUsage]
    for number in range(20):
        async with a.listen(f"run.{number}"), a.listen(f"run.{number}"):
            assert len(client._subs) == before + 1  # pyright: ignore[reportPrivateUsage]
        await asyncio.wait(a._tasks, timeout=BOUND)  # pyright: ignore[reportPrivateUsage]
    assert len(client._subs) == before  # pyright: ignore[reportPrivateUsage]
    assert a._interests == {}  # pyright: ignore[reportPrivateUsage]


async def test_events_cross_a_cluster_and_the_death_of_one_of_its_servers(make: Make) -> None:
    with nats_cluster() as servers:
        a, b = await make(servers[0].servers()), await make(together(servers[1:]))
        async with b.listen("session.*") as listener:
            await again(b, listener, a, "session.1", 1)
            client = b._connection.client  # pyright: ignore[reportPrivateUsage]
            assert client is not None and client.connected_url is not None
            victim = next(server for server in servers if server.port == client.connected_url.port)
            await asyncio.to_thread(victim.kill)
            assert Gap() in await again(b, listener, a, "session.1", 2)
