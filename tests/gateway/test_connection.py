"""One client's outbox: counted in bytes, by itself and together with all others, and closed with a reason that fits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from antiphon.gateway.ws import connection, frames, protocol
from antiphon.gateway.ws.connection import SendQueueTotal, WebSocketConnection
from support.app_fixture import BOUND, wait_for_event, wait_until
from support.gateway_ws import TUI_CLIENT, Client, GatewayFixture

pytestmark = [pytest.mark.anyio, pytest.mark.requirement("W3")]

SLOW = (1008, "slow consumer")


async def ignore(message: dict[str, Any]) -> None: ...


def unread(together: SendQueueTotal) -> WebSocketConnection:
    """Of a client that reads nothing, so that its outbox only grows."""
    return WebSocketConnection("1", ignore, 0, together)


async def test_an_outbox_is_bounded_in_bytes_for_text_of_any_script(monkeypatch: pytest.MonkeyPatch) -> None:
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


# --- ends of runs for a client that reads a response after the events that arrive with it ---


class LateReader:
    """A client that answers pings only when told to, and its connection."""

    def __init__(self) -> None:
        self.sent: list[str] = []
        self.pongs: list[Callable[[], None]] = []
        """Answers to pings that have not been given yet."""
        self.total = SendQueueTotal()
        self.connection = WebSocketConnection("1", self._send, 0, self.total, self._send_now, self._ping)
        self.connection.quirks = connection.ClientQuirks(reads_response_last=True)

    async def _send(self, message: dict[str, Any]) -> None:
        self.sent.append(message["text"])

    def _send_now(self, text: str) -> bool:
        self.sent.append(text)
        return True

    def _ping(self, on_pong: Callable[[], None]) -> bool:
        self.pongs.append(on_pong)
        return True

    async def accept_run(self, name: str) -> None:
        self.connection.hold_run_end(name)
        await self.connection.send_response(f"response {name}")

    def end_run(self, name: str) -> None:
        self.connection.send_event("{" + name, ended_run=name)

    async def answer_ping(self) -> None:
        self.pongs.pop(0)()
        await self.wait_for_writer()

    async def wait_for_writer(self) -> None:
        for _ in range(3):  # callbacks until the woken writer has sent everything
            await asyncio.sleep(0)


@asynccontextmanager
async def open_late_reader() -> AsyncGenerator[LateReader]:
    reader = LateReader()
    writer = asyncio.create_task(reader.connection.run_writer())
    try:
        yield reader
    finally:
        reader.connection.close(1000, "")
        await asyncio.wait_for(writer, BOUND)
        await reader.connection.release_resources()
        assert reader.total.waiting_bytes == 0


async def test_the_end_of_a_run_waits_until_its_response_was_read() -> None:
    async with open_late_reader() as reader:
        await reader.accept_run("a")
        reader.end_run("other")
        assert reader.sent == ["response a", '{other,"seq":1}'], "only accepted runs are held"
        reader.end_run("a")
        await reader.accept_run("b")
        reader.connection.send_event("{start of b")
        reader.end_run("b")
        reader.connection.send_event("{later")
        assert reader.sent[2:] == ["response b"], "no event overtakes the end"
        assert len(reader.pongs) == 1, "one ping at a time"
        await reader.answer_ping()
        assert reader.sent[3:] == ['{a,"seq":2}', '{start of b,"seq":3}'], "the second response may be unread"
        await reader.answer_ping()
        assert reader.sent[5:] == ['{b,"seq":4}', '{later,"seq":5}']
        reader.end_run("c")
        assert reader.sent[7:] == ['{c,"seq":6}']
        assert not reader.pongs


async def test_other_clients_get_the_end_of_a_run_at_once() -> None:
    async with open_late_reader() as reader:
        reader.connection.quirks = connection.NO_QUIRKS
        await reader.accept_run("a")
        reader.end_run("a")
        assert reader.sent == ["response a", '{a,"seq":1}']
        assert not reader.pongs


async def test_a_client_that_answers_pings_one_message_late_gets_all_ends_in_order() -> None:
    async with open_late_reader() as reader:
        for number in range(200):
            await reader.accept_run(f"{number}")
            reader.end_run(f"{number}")
            if number:
                await reader.answer_ping()
        await reader.answer_ping()
        ends = [text for text in reader.sent if text.startswith("{")]
        assert ends == [f'{{{number},"seq":{number + 1}}}' for number in range(200)]


async def test_held_events_count_as_waiting_and_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "MAX_BUFFERED_BYTES", 100_000)
    async with open_late_reader() as reader:
        highest = 0
        for number in range(200):
            await reader.accept_run(f"{number}")
            reader.connection.send_event("{" + "x" * 1000, ended_run=f"{number}")
            highest = max(highest, reader.total.waiting_bytes)
        assert 100_000 < highest < 102_000
        assert reader.connection.closing == SLOW
        assert reader.total.waiting_bytes == 0


async def test_what_is_held_is_sent_before_the_connection_closes() -> None:
    async with open_late_reader() as reader:
        await reader.accept_run("a")
        reader.end_run("a")
        reader.connection.send_event("{shutdown")
        reader.connection.close(1012, "service restart")
        await reader.wait_for_writer()
        assert reader.sent == ["response a", '{a,"seq":1}', '{shutdown,"seq":2}']


async def send_messages(client: Client, count: int) -> list[str]:
    """Send messages at once, and wait until all are accepted."""
    requests = [
        await client.start(
            "chat.send",
            {"sessionKey": f"agent:main:direct:{n % 10}", "message": "x", "idempotencyKey": f"run-{n}"},
        )
        for n in range(count)
    ]
    return [(await client.answer(request)).payload["runId"] for request in requests]


async def test_many_messages_at_once_do_not_exceed_the_limit_of_control_frames(
    gateway: GatewayFixture,
) -> None:
    async with gateway.client(client=TUI_CLIENT) as client:
        for run_id in await send_messages(client, 300):
            await client.event("chat", runId=run_id, state="final")
        assert client.numbers == list(range(1, len(client.numbers) + 1))


async def test_a_client_that_never_answers_pings_gets_the_ends_of_its_runs(
    gateway: GatewayFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "MAX_RUN_END_HOLD_SECONDS", 0.2)
    async with gateway.client(client=TUI_CLIENT) as client:
        pings = client.collect_pongs()
        run_ids = await send_messages(client, 20)
        for run_id in run_ids:
            await client.event("chat", runId=run_id, state="final")
        assert pings


async def test_an_awaited_pong_is_free_once(gateway: GatewayFixture) -> None:
    async with gateway.client(client=TUI_CLIENT) as client:
        pings = client.collect_pongs()
        await send_messages(client, 1)
        await client.settled()
        (payload,) = pings
        del client.ws.protocol.send_frame  # its own again, which sends pongs
        for _ in range(2 * protocol.CONTROL_FRAME_BURST):
            await client.ws.pong(payload)
        assert await client.closed() == (1008, "too many control frames")
