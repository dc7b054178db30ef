"""One client's outbox: counted in bytes, by itself and together with all others, and closed with a reason that fits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from antiphon.gateway.ws import connection, frames, protocol
from antiphon.gateway.ws.connection import SendQueueTotal, WebSocketConnection
from support.app_fixture import BOUND, wait_for_event, wait_until
from support.gateway_ws import GatewayFixture

pytestmark = [pytest.mark.anyio, pytest.mark.requirement("W3")]

SLOW = (1008, "slow consumer")


async def ignore(message: dict[str, Any]) -> None: ...


def unread(together: SendQueueTotal) -> WebSocketConnection:
    """Of a client that reads nothing: nobody empties its outbox."""
    return WebSocketConnection("1", ignore, 0, together)


async def test_an_outbox_is_bounded_in_bytes_whatever_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "MAX_BUFFERED_BYTES", 3000)
    one = unread(SendQueueTotal())
    one.enqueue("\N{GRINNING FACE}" * 800)
    assert one.closing is None
    one.enqueue("one more")
    assert one.closing == SLOW


async def test_beyond_what_may_wait_for_all_only_who_has_much_waiting_goes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "MAX_TOTAL_SEND_QUEUE_BYTES", 10_000)
    monkeypatch.setattr(connection, "SMALL_SEND_QUEUE_BYTES", 1000)
    together = SendQueueTotal()
    quick, slow, slower = (unread(together) for _ in range(3))
    quick.enqueue("x" * 500)
    slow.enqueue("x" * 4000)
    slower.enqueue("x" * 9000)
    quick.enqueue("and more")
    assert quick.closing is None
    slower.enqueue("and more")
    assert slower.closing == SLOW
    slow.enqueue("and more")  # there is room again at once
    assert slow.closing is None
    assert 4500 < together.waiting_bytes < 5000


async def test_what_was_sent_or_given_up_does_not_wait_any_more() -> None:
    together = SendQueueTotal()
    sending = asyncio.Event()

    async def stuck(message: dict[str, Any]) -> None:
        sending.set()
        await asyncio.Event().wait()

    for send in (ignore, stuck):
        one = WebSocketConnection("1", send, 0, together)
        writer = asyncio.create_task(one.run_writer())
        for text in ("plain", "\N{GRINNING FACE}" * 100):
            one.enqueue(text)
        assert together.waiting_bytes > 400
        if send is stuck:
            await wait_for_event(sending)
            writer.cancel()
        one.close(1000, "")
        await asyncio.wait({writer}, timeout=BOUND)
        await one.release_resources()
        assert writer.done()
        assert together.waiting_bytes == 0


async def test_a_client_that_is_gone_leaves_nothing_behind(gateway: GatewayFixture) -> None:
    before = connection.PROCESS_SEND_QUEUE_TOTAL.waiting_bytes

    async def gone() -> bool:
        return (
            not gateway.served.hub.connections and connection.PROCESS_SEND_QUEUE_TOTAL.waiting_bytes == before
        )

    async with gateway.client() as client:
        await client.call("sessions.subscribe")
        await client.settled()
    await wait_until(gone)


@pytest.mark.parametrize(
    ("reason", "heard"), [("é" * 150, "é" * 60), ("x" + "é" * 150, "x" + "é" * 59), ("x" * 130, "x" * 120)]
)
async def test_a_long_reason_is_cut_to_what_a_close_frame_holds(
    gateway: GatewayFixture, reason: str, heard: str
) -> None:
    async with gateway.client() as client:
        (one,) = gateway.served.hub.connections
        one.close(1008, reason)
        assert await client.closed() == (1008, heard)


# --- what goes out at once ---


async def test_an_event_goes_out_at_once_and_passes_nothing_that_waits() -> None:
    told: list[str] = []
    taking = True

    def at_once(text: str) -> bool:
        if taking:
            told.append(text)
        return taking

    async def send(message: dict[str, Any]) -> None:
        told.append(message["text"])

    one = WebSocketConnection("1", send, 0, SendQueueTotal(), at_once)
    first, *others = (frames.encode_event("e", n) for n in range(4))
    one.send_event(first)
    assert told == [frames.finish_numbered_event(first, 1)]
    taking = False
    one.send_event(others[0])
    taking = True
    one.send_event(others[1])
    assert len(told) == 1
    writer = asyncio.create_task(one.run_writer())
    await asyncio.sleep(0)
    one.send_event(others[2])
    assert told == [frames.finish_numbered_event(frames.encode_event("e", n), n + 1) for n in range(4)]
    one.close(1000, "")
    one.send_event("nobody hears this")
    await asyncio.wait_for(writer, BOUND)
    assert len(told) == 4


async def test_events_of_any_size_come_whole_and_in_order(gateway: GatewayFixture) -> None:
    async with gateway.client() as client:
        await client.settled()
        (one,) = gateway.served.hub.connections
        around = len(frames.finish_numbered_event(frames.encode_event("sized", {"x": ""}), 1))
        sizes = [edge - around + more for edge in (126, 2**16) for more in range(-4, 4)]
        for size in sizes:
            one.send_event(frames.encode_event("sized", {"x": "x" * size}))
        one.send_event(frames.encode_event("sized", {"x": "\N{GRINNING FACE}" * 100}))
        await client.settled()
        heard = [event["payload"]["x"] for event in client.events if event["event"] == "sized"]
        assert [len(text) for text in heard] == [*sizes, 100]
        numbers = [event["seq"] for event in client.events if "seq" in event]
        assert numbers == list(range(1, len(numbers) + 1))


async def test_a_client_that_lags_gets_everything_later_and_in_order(gateway: GatewayFixture) -> None:
    async with gateway.client() as client:
        await client.settled()
        (one,) = gateway.served.hub.connections
        text = frames.encode_event("sized", {"x": "x" * 100_000})
        for _ in range(200):  # more than sockets hold: the rest waits in the outbox
            one.send_event(text)
        assert connection.PROCESS_SEND_QUEUE_TOTAL.waiting_bytes > 1_000_000
        await client.settled()
        assert len([event for event in client.events if event["event"] == "sized"]) == 200
        numbers = [event["seq"] for event in client.events if "seq" in event]
        assert numbers == list(range(1, len(numbers) + 1))


async def test_where_the_server_offers_no_such_thing_the_outbox_takes_all() -> None:
    assert not protocol.find_send_now({"extensions": {"websocket.http.response": {}}})("text")
    assert not protocol.find_send_now({})("text")


async def test_run_ends_wait_until_a_client_that_needs_it_has_read_the_response() -> None:
    sent: list[str] = []
    pongs: list[Callable[[], None]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message["text"])

    def send_now(text: str) -> bool:
        sent.append(text)
        return True

    def ping(on_pong: Callable[[], None]) -> bool:
        pongs.append(on_pong)
        return True

    one = WebSocketConnection("1", send, 0, SendQueueTotal(), send_now, ping)
    one.hold_run_ends()
    one.send_run_end(["{0"])
    assert sent == ['{0,"seq":1}'], "other clients need no hold"
    one.quirks = connection.ClientQuirks(reads_response_last=True)
    for number in (1, 2):
        one.hold_run_ends()
        await one.send_response(f"response {number}")
        one.send_run_end([f"{{{number}"])
    pongs[0]()
    assert sent[1:] == ["response 1", "response 2"], "the second response may not have been read yet"
    pongs[1]()
    assert sent[3:] == ['{1,"seq":2}', '{2,"seq":3}']
    one.send_run_end(["{3"])
    assert sent[5:] == ['{3,"seq":4}']
