"""Following a session: what came after a sequence number, then what is new, without gap or repeat.

Rows are the truth and the bus only says when to look: a feed listens first, reads what is there, and reads
again whenever an event shows a hole, is a `Gap`, or has been silent for a while.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator

import msgspec

from antiphon.bus import Event, EventBus, Gap, MessageAppended, SessionChanged
from antiphon.engine import sessions, transcripts
from antiphon.engine.transcripts import Entry, Page
from antiphon.store import Row, Store, Tx

LOOK_AGAIN = 5.0  # seconds of silence after which the rows are read anyway
PAGE = 200


class _Place(msgspec.Struct):
    """Where a feed is: the transcript it reads and the last number it has given out."""

    session: int
    key: str
    transcript: int
    session_id: str
    seq: int
    gone: bool = False


async def follow(store: Store, bus: EventBus, topic: str, session: Row, after: int) -> AsyncGenerator[Event]:
    """Every entry after `after` exactly once and in order, and live events between them.

    Ends when the session is gone, which is the last thing it tells.
    """
    place = _Place(session["id"], session["key"], session["transcript"], session["session_id"], after)
    async with bus.listen(topic) as events:
        async for appended in _missed(store, place):
            yield appended
        while not place.gone:
            event = await events.get(LOOK_AGAIN)
            if event is None or isinstance(event, Gap) or _skips(event, place):
                async for appended in _missed(store, place):
                    yield appended
            elif isinstance(event, MessageAppended):
                if event.session_id == place.session_id and event.seq == place.seq + 1:
                    place.seq = event.seq
                    yield event
            else:
                yield event


def _skips(event: Event, place: _Place) -> bool:
    """Whether this event shows that entries before it were missed, or that the transcript has come to its end."""
    if isinstance(event, SessionChanged):
        return event.reason in {"renewed", "delete"}
    if not isinstance(event, MessageAppended):
        return False
    return event.session_id != place.session_id or event.seq > place.seq + 1


async def _missed(store: Store, place: _Place) -> AsyncGenerator[Event]:
    while True:
        current, page = await store.read(_look, place.session, place.transcript, place.seq)
        for entry in page.entries:
            place.seq = entry.seq
            yield _appended(place, entry)
        if page.more:
            continue
        if current is None:
            place.gone = True
            yield SessionChanged(session_key=place.key, reason="delete")
            return
        if current["transcript"] == place.transcript:
            return
        yield _moved(place, current)


async def _look(tx: Tx, session: int, transcript: int, seq: int) -> tuple[Row | None, Page]:
    """The session as it is now, and what it has said; of one snapshot, so that nothing comes between them."""
    page = await transcripts.page_after(tx, transcript, seq, PAGE, tools=True)
    return await tx.one(sessions.SQL.by_id, id=session), page


def _moved(place: _Place, current: Row) -> SessionChanged:
    """Another conversation goes on. What a restored one has was given out when it was said."""
    restored = current["transcript"] < place.transcript
    place.transcript, place.session_id = current["transcript"], current["session_id"]
    place.seq = current["last_seq"] if restored else 0
    return SessionChanged(session_key=place.key, reason="renewed", session_id=place.session_id, seq=place.seq)


def _appended(place: _Place, entry: Entry) -> MessageAppended:
    return MessageAppended(
        session_key=place.key,
        session_id=place.session_id,
        seq=entry.seq,
        entry=entry.id,
        body=entry.body,
        run_id=entry.run_id,
        internal=entry.internal,
    )
