"""What every event bus promises: the one of a process, and the one of several."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator

import pytest

from antiphon.bus import Delta, Event, EventBus, Gap, SessionChanged
from antiphon.bus.local import LocalBus
from antiphon.bus.nats import NatsBus
from cluster.servers import NatsServer

pytestmark = pytest.mark.anyio

BOUND = 10.0


@pytest.fixture(params=["local", "nats"])
async def bus(request: pytest.FixtureRequest) -> AsyncIterator[EventBus]:
    if request.param == "local":
        yield LocalBus(buffer=4)
        return
    server: NatsServer = request.getfixturevalue("nats")
    made = NatsBus(server.servers(), namespace=uuid.uuid4().hex, buffer=4)
    await made.start()
    yield made
    await made.stop()


def event(number: int) -> Event:
    return Delta(session_key="k", run_id="r", number=number)


async def test_each_listener_gets_each_event_of_its_topic_in_order(bus: EventBus) -> None:
    async with (
        bus.listen("session.1") as one,
        bus.listen("session.1") as two,
        bus.listen("session.2") as other,
    ):
        for number in range(3):
            bus.publish("session.1", event(number))
        bus.publish("session.2", event(9))
        for listener in (one, two):
            assert [await listener.get(BOUND) for _ in range(3)] == [event(n) for n in range(3)]
        assert await other.get(BOUND) == event(9)
        assert await other.get(0.001) is None


async def test_listening_begins_with_the_context_and_ends_with_it(bus: EventBus) -> None:
    bus.publish("t", event(0))
    async with bus.listen("t") as listener:
        assert bus.has_listeners("t")
        bus.publish("t", event(1))
        assert await listener.get(BOUND) == event(1)
        async with bus.listen("t"):
            pass
        assert bus.has_listeners("t")  # the other one has gone, this one is there
        bus.publish("t", event(2))
        assert await listener.get(BOUND) == event(2)
    bus.publish("t", event(3))


async def test_has_listeners_is_false_without_listeners() -> None:
    """The publisher of an event without listeners need not build it."""
    bus = LocalBus()
    assert not bus.has_listeners("t")
    async with bus.listen("t"), bus.listen("session.*"):
        assert bus.has_listeners("t") and bus.has_listeners("session.7")
        assert not bus.has_listeners("run.7") and not bus.has_listeners("sessions")
    assert not bus.has_listeners("t") and not bus.has_listeners("session.7")


async def test_a_listener_wakes_when_something_comes(bus: EventBus) -> None:
    async with bus.listen("t") as listener:
        waiting = asyncio.create_task(listener.get(BOUND))
        await asyncio.sleep(0)
        bus.publish("t", event(1))
        assert await waiting == event(1)


@pytest.mark.requirement("G38")
async def test_a_slow_listener_gets_a_gap_and_delays_no_other(bus: EventBus) -> None:
    """A Gap replaces the events that are dropped; what follows it is in order and complete."""
    async with bus.listen("t") as slow, bus.listen("t") as quick:
        for number in range(50):
            bus.publish("t", event(number))
            assert await quick.get(BOUND) == event(number)
        got: list[Event] = []
        while (one := await slow.get(0.001)) is not None:
            got.append(one)
        assert Gap() in got
        assert len(got) <= 5
        after = got[len(got) - got[::-1].index(Gap()) :]
        assert after == [event(n) for n in range(50 - len(after), 50)]
        bus.publish("t", event(50))
        assert await slow.get(BOUND) == event(50)


async def test_a_wait_that_is_cancelled_takes_nothing(bus: EventBus) -> None:
    async with bus.listen("t") as listener:
        waiting = asyncio.create_task(listener.get(BOUND))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        bus.publish("t", SessionChanged(session_key="k", reason="r"))
        assert await listener.get(BOUND) == SessionChanged(session_key="k", reason="r")


async def test_a_topic_family_covers_exactly_its_topics(bus: EventBus) -> None:
    async with bus.listen("session.*") as listener:
        assert bus.has_listeners("session.7")
        bus.publish("session.7", event(1))
        bus.publish("run.7", event(2))
        bus.publish("sessions", event(3))
        bus.publish("session.8", event(4))
        assert [await listener.get(BOUND), await listener.get(BOUND)] == [event(1), event(4)]
