"""Keeping the JSONL file of every active session up to date, for `session.transcripts.mirror`.

A derived copy, written a moment after the commits it shows and never read back: a file that a crash left behind
is written anew the next time its session changes. Files are appended to in a thread, so a slow disk delays
nobody but the mirror.
"""

from __future__ import annotations

import asyncio
import logging
import os
from dataclasses import dataclass
from pathlib import Path

from antiphon.bus import EventBus, SessionChanged
from antiphon.engine import sessions, transcripts
from antiphon.engine.transcripts import Entry
from antiphon.errors import AntiphonError
from antiphon.keys import parse
from antiphon.store import Row, Store, Tx
from antiphon.transfers import jsonl
from antiphon.transfers.exports import SESSION_ID, SQL, entry_at

log = logging.getLogger(__name__)

QUIET = 0.25  # seconds without news after which what has changed is written
PAGE = 200
FILES = 4096  # whose place is remembered, the most recently changed ones


@dataclass(slots=True)
class _Place:
    """How far a file has got: the last number in it, and that entry's id."""

    seq: int = 0
    entry: str | None = None


class Mirror:
    """`run` writes until it is cancelled; `flush` writes what is due now."""

    def __init__(self, store: Store, bus: EventBus, folder: Path) -> None:
        self._store = store
        self._bus = bus
        self._folder = folder
        self._changed: set[str] = set()
        self._places: dict[str, _Place] = {}

    async def run(self) -> None:
        async with self._bus.listen("sessions") as events:
            while True:
                event = await events.get(QUIET if self._changed else None)
                if isinstance(event, SessionChanged):
                    self._changed.add(event.session_key)
                elif event is None:
                    await self.flush()

    async def flush(self) -> None:
        while self._changed:
            key = self._changed.pop()
            try:
                await self._update(key)
            except (AntiphonError, OSError):
                log.exception(
                    "The transcript file of %r could not be written; it is tried at its next change", key
                )

    async def _update(self, key: str) -> None:
        for row in await self._store.read(_recent, key):
            if SESSION_ID.fullmatch(row["named_session_id"]):
                await self._write(row["named_session_id"], row["named_transcript"], row["started_at"])

    async def _write(self, session_id: str, transcript: int, started_at: int) -> None:
        place = self._places.pop(session_id, None)
        fresh = place is None
        place = place or _Place()
        while True:
            entries = await self._store.read(transcripts.after, transcript, place.seq, PAGE, tools=True)
            lines = [jsonl.header(session_id, started_at, "")] if fresh else []
            for entry in entries:
                lines.append(await self._line(transcript, entry, place) or b"")
            if lines:
                await asyncio.to_thread(_append, self._folder, session_id, b"".join(lines), fresh)
            fresh = False
            if len(entries) < PAGE:
                break
        self._places[session_id] = place
        if len(self._places) > FILES:
            del self._places[next(iter(self._places))]  # written anew when it changes again

    async def _line(self, transcript: int, entry: Entry, place: _Place) -> bytes | None:
        kept = jsonl.first_kept_seq(entry)
        first_kept = None if kept is None else await self._store.read(entry_at, transcript, kept)
        line = jsonl.line(entry, place.entry, first_kept)
        place.seq = entry.seq
        if line is not None:
            place.entry = entry.id
        return line


async def _recent(tx: Tx, key: str) -> list[Row]:
    """The current conversation, and the one before it: `/new` may have ended it before it was written out."""
    found = await sessions.find(tx, parse(key), None)
    if found is None:
        return []
    newest = [row["id"] for row in (await sessions.conversations(tx, found))[:2]]
    rows = [await tx.one(SQL.conversation, transcript=id_) for id_ in {found["transcript"], *newest}]
    return [row for row in rows if row is not None]


def _append(folder: Path, session_id: str, content: bytes, fresh: bool) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | (os.O_TRUNC if fresh else os.O_APPEND)
    file = os.open(folder / f"{session_id}.jsonl", flags, 0o600)
    with os.fdopen(file, "wb") as opened:
        opened.write(content)
