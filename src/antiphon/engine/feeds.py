"""Following a session: what came after a sequence number, then what is new, without gap or repeat.

Rows are the truth and the bus only says when to look: a feed listens first, reads what is there, and reads
again whenever an event shows a hole, is a `Gap`, or has been silent for a while.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass

from antiphon.bus import Event, EventBus, Gap, MessageAppended, SessionChanged
from antiphon.engine import sessions, transcripts
from antiphon.engine.transcripts import Entry
from antiphon.store import Row, Store, Tx

LOOK_AGAIN = 5.0  # seconds of silence after which the rows are read anyway
PAGE = 200


@dataclass(slots=True)
class _Place:
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
        current, entries = await store.read(_look, place.session, place.transcript, place.seq)
        for entry in entries:
            place.seq = entry.seq
            yield _appended(place, entry)
        if len(entries) == PAGE:
            continue
        if current is None:
            place.gone = True
            yield SessionChanged(session_key=place.key, reason="delete")
            return
        if current[0] == place.transcript:
            return
        older = (
            current[0] < place.transcript
        )  # an earlier conversation was restored: what it has was given out then
        place.transcript, place.session_id = current
        place.seq = await store.read(transcripts.last_seq, place.transcript) if older else 0
        yield SessionChanged(session_key=place.key, reason="renewed", session_id=place.session_id)


async def _look(
    tx: Tx, session: int, transcript: int, seq: int
) -> tuple[tuple[int, str] | None, list[Entry]]:
    entries = await transcripts.after(tx, transcript, seq, PAGE, tools=True)
    row = await tx.one(sessions.SQL.by_id, id=session)
    return (row["transcript"], row["session_id"]) if row else None, entries


def _appended(place: _Place, entry: Entry) -> MessageAppended:
    return MessageAppended(
        session_key=place.key,
        session_id=place.session_id,
        seq=entry.seq,
        entry=entry.id,
        body=entry.body,
        run_id=entry.run_id,
    )
