"""One client's outbox: counted in bytes, by itself and together with all others, and closed with a reason that fits."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from sockets import Gate

from antiphon.gateway import connection, frames
from antiphon.gateway.connection import Connection, Outboxes
from stage import BOUND, soon, until

pytestmark = [pytest.mark.anyio, pytest.mark.requirement("W3")]

SLOW = (1008, "slow consumer")


async def ignore(message: dict[str, Any]) -> None: ...


def unread(together: Outboxes) -> Connection:
    """Of a client that reads nothing: nobody empties its outbox."""
    return Connection("1", ignore, 0, together)


async def test_an_outbox_is_bounded_in_bytes_whatever_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "MAX_BUFFERED", 3000)
    one = unread(Outboxes())
    one.put("\N{GRINNING FACE}" * 800)
    assert one.closing is None
    one.put("one more")
    assert one.closing == SLOW


async def test_beyond_what_may_wait_for_all_only_who_has_much_waiting_goes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "MOST_TOGETHER", 10_000)
    monkeypatch.setattr(connection, "LITTLE", 1000)
    together = Outboxes()
    quick, slow, slower = (unread(together) for _ in range(3))
    quick.put("x" * 500)
    slow.put("x" * 4000)
    slower.put("x" * 9000)
    quick.put("and more")
    assert quick.closing is None
    slower.put("and more")
    assert slower.closing == SLOW
    slow.put("and more")  # there is room again at once
    assert slow.closing is None
    assert 4500 < together.waiting < 5000


async def test_what_was_sent_or_given_up_does_not_wait_any_more() -> None:
    together = Outboxes()
    sending = asyncio.Event()

    async def stuck(message: dict[str, Any]) -> None:
        sending.set()
        await asyncio.Event().wait()

    for send in (ignore, stuck):
        one = Connection("1", send, 0, together)
        writer = asyncio.create_task(one.write())
        for text in ("plain", "\N{GRINNING FACE}" * 100):
            one.put(text)
        assert together.waiting > 400
        if send is stuck:
            await soon(sending)
            writer.cancel()
        one.close(1000, "")
        await asyncio.wait({writer}, timeout=BOUND)
        await one.end()
        assert writer.done()
        assert together.waiting == 0


async def test_a_client_that_is_gone_leaves_nothing_behind(gate: Gate) -> None:
    before = connection.EVERYBODY.waiting

    async def gone() -> bool:
        return not gate.served.hub.connections and connection.EVERYBODY.waiting == before

    async with gate.client() as client:
        await client.call("sessions.subscribe")
        await client.settled()
    await until(gone)


@pytest.mark.parametrize(
    ("reason", "heard"), [("é" * 150, "é" * 60), ("x" + "é" * 150, "x" + "é" * 59), ("x" * 130, "x" * 120)]
)
async def test_a_long_reason_is_cut_to_what_a_close_frame_holds(gate: Gate, reason: str, heard: str) -> None:
    async with gate.client() as client:
        (one,) = gate.served.hub.connections
        one.close(1008, reason)
        assert await client.closed() == (1008, heard)
