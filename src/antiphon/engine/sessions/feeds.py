"""Follows a session: the entries after a sequence number, then new ones, without gaps or duplicates.

Rows are authoritative and the bus only signals when to read: a feed subscribes first, reads the existing entries, and
reads again whenever an event reveals missed entries, is a `Gap`, or the bus has been silent for a while.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator

import msgspec

from antiphon.bus import Event, EventBus, Gap, MessageAppended, SessionChanged
from antiphon.engine.sessions import session_rows, transcripts
from antiphon.engine.sessions.transcripts import Entry, Page
from antiphon.store import Row, Store, Tx

IDLE_REREAD_SECONDS = 5.0  # of silence, after which the rows are read anyway
FEED_PAGE_ENTRIES = 200


class _FeedPosition(msgspec.Struct):
    """The position of a feed: the transcript it reads and the last number it yielded."""

    session: int
    key: str
    transcript: int
    session_id: str
    seq: int
    gone: bool = False


async def follow_session(
    store: Store, bus: EventBus, topic: str, session: Row, after: int
) -> AsyncGenerator[Event]:
    """Yield every entry after `after` exactly once and in order, with live events between them.

    Ends when the session is deleted; that is the last event.
    """
    position = _FeedPosition(
        session["id"], session["key"], session["transcript"], session["session_id"], after
    )
    async with bus.listen(topic) as events:
        async for appended in _read_missed(store, position):
            yield appended
        while not position.gone:
            event = await events.get(IDLE_REREAD_SECONDS)
            if event is None or isinstance(event, Gap) or _requires_reread(event, position):
                async for appended in _read_missed(store, position):
                    yield appended
            elif isinstance(event, MessageAppended):
                if event.session_id == position.session_id and event.seq == position.seq + 1:
                    position.seq = event.seq
                    yield event
            else:
                yield event


def _requires_reread(event: Event, position: _FeedPosition) -> bool:
    """Whether an event shows that earlier entries were missed, or that the transcript has ended."""
    if isinstance(event, SessionChanged):
        return event.reason in {"renewed", "delete"}
    if not isinstance(event, MessageAppended):
        return False
    return event.session_id != position.session_id or event.seq > position.seq + 1


async def _read_missed(store: Store, position: _FeedPosition) -> AsyncGenerator[Event]:
    while True:
        current, page = await store.read(_read_snapshot, position.session, position.transcript, position.seq)
        for entry in page.entries:
            position.seq = entry.seq
            yield _build_appended_event(position, entry)
        if page.has_more:
            continue
        if current is None:
            position.gone = True
            yield SessionChanged(session_key=position.key, reason="delete")
            return
        if current["transcript"] == position.transcript:
            return
        yield _switch_transcript(position, current)


async def _read_snapshot(tx: Tx, session: int, transcript: int, seq: int) -> tuple[Row | None, Page]:
    """Read the session's row and its next entries in one consistent snapshot."""
    page = await transcripts.read_page_after(tx, transcript, seq, FEED_PAGE_ENTRIES, tools=True)
    return await session_rows.find_by_id(tx, session), page


def _switch_transcript(position: _FeedPosition, current: Row) -> SessionChanged:
    """Move the feed to the session's new transcript. Entries of a restored one were yielded earlier."""
    restored = current["transcript"] < position.transcript
    position.transcript, position.session_id = current["transcript"], current["session_id"]
    position.seq = current["last_seq"] if restored else 0
    return SessionChanged(
        session_key=position.key, reason="renewed", session_id=position.session_id, seq=position.seq
    )


def _build_appended_event(position: _FeedPosition, entry: Entry) -> MessageAppended:
    return MessageAppended(
        session_key=position.key,
        session_id=position.session_id,
        seq=entry.seq,
        entry=entry.id,
        body=entry.body,
        run_id=entry.run_id,
        internal=entry.is_internal,
    )
