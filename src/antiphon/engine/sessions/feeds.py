"""Following a session: what came after a sequence number, then what is new, without gap or repeat.

Rows are the truth and the bus only says when to look: a feed listens first, reads what is there, and reads
again whenever an event shows a hole, is a `Gap`, or has been silent for a while.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator

import msgspec

from antiphon.bus import Event, EventBus, Gap, MessageAppended, SessionChanged
from antiphon.engine.sessions import session_rows, transcripts
from antiphon.engine.sessions.transcripts import Entry, Page
from antiphon.store import Row, Store, Tx

IDLE_REREAD_SECONDS = 5.0  # seconds of silence after which the rows are read anyway
FEED_PAGE_ENTRIES = 200


class _FeedPosition(msgspec.Struct):
    """Where a feed is: the transcript it reads and the last number it has given out."""

    session: int
    key: str
    transcript: int
    session_id: str
    seq: int
    gone: bool = False


async def follow_session(
    store: Store, bus: EventBus, topic: str, session: Row, after: int
) -> AsyncGenerator[Event]:
    """Every entry after `after` exactly once and in order, and live events between them.

    Ends when the session is gone, which is the last thing it tells.
    """
    place = _FeedPosition(session["id"], session["key"], session["transcript"], session["session_id"], after)
    async with bus.listen(topic) as events:
        async for appended in _read_missed(store, place):
            yield appended
        while not place.gone:
            event = await events.get(IDLE_REREAD_SECONDS)
            if event is None or isinstance(event, Gap) or _requires_reread(event, place):
                async for appended in _read_missed(store, place):
                    yield appended
            elif isinstance(event, MessageAppended):
                if event.session_id == place.session_id and event.seq == place.seq + 1:
                    place.seq = event.seq
                    yield event
            else:
                yield event


def _requires_reread(event: Event, place: _FeedPosition) -> bool:
    """Whether this event shows that entries before it were missed, or that the transcript has come to its end."""
    if isinstance(event, SessionChanged):
        return event.reason in {"renewed", "delete"}
    if not isinstance(event, MessageAppended):
        return False
    return event.session_id != place.session_id or event.seq > place.seq + 1


async def _read_missed(store: Store, place: _FeedPosition) -> AsyncGenerator[Event]:
    while True:
        current, page = await store.read(_read_snapshot, place.session, place.transcript, place.seq)
        for entry in page.entries:
            place.seq = entry.seq
            yield _build_appended_event(place, entry)
        if page.has_more:
            continue
        if current is None:
            place.gone = True
            yield SessionChanged(session_key=place.key, reason="delete")
            return
        if current["transcript"] == place.transcript:
            return
        yield _switch_transcript(place, current)


async def _read_snapshot(tx: Tx, session: int, transcript: int, seq: int) -> tuple[Row | None, Page]:
    """The session as it is now, and what it has said; of one snapshot, so that nothing comes between them."""
    page = await transcripts.read_page_after(tx, transcript, seq, FEED_PAGE_ENTRIES, tools=True)
    return await tx.one(session_rows.SQL.by_id, id=session), page


def _switch_transcript(place: _FeedPosition, current: Row) -> SessionChanged:
    """Another conversation goes on. What a restored one has was given out when it was said."""
    restored = current["transcript"] < place.transcript
    place.transcript, place.session_id = current["transcript"], current["session_id"]
    place.seq = current["last_seq"] if restored else 0
    return SessionChanged(session_key=place.key, reason="renewed", session_id=place.session_id, seq=place.seq)


def _build_appended_event(place: _FeedPosition, entry: Entry) -> MessageAppended:
    return MessageAppended(
        session_key=place.key,
        session_id=place.session_id,
        seq=entry.seq,
        entry=entry.id,
        body=entry.body,
        run_id=entry.run_id,
        internal=entry.is_internal,
    )
