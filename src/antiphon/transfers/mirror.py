"""Keeping the JSONL file of every active session up to date, for `session.transcripts.mirror`.

A derived copy, written a moment after the commits it shows and never read back: a file that a crash left behind
is written anew the next time its session changes. Files are appended to in a thread, so a slow disk delays
nobody but the mirror. Where events were dropped, the rows say what may have changed meanwhile.

What is deleted from the store is deleted here, whoever wrote the file, an export too: the words of a deleted session
stay in no file of this folder. It goes by the record of what was deleted and not by what the store does not know, so
that the files of others, and of a store that was lost or set back to a backup, are left alone. How far that record has
been gone by stands in a file of the folder: what was deleted before there was a mirror keeps the exports made of it.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from antiphon.bus import Event, EventBus, Gap, SessionChanged
from antiphon.clock import Clock, SystemClock
from antiphon.engine import sessions, transcripts
from antiphon.engine.transcripts import Entry
from antiphon.engine.words import FORGOTTEN
from antiphon.errors import AntiphonError
from antiphon.keys import parse
from antiphon.store import Row, Store, Tx
from antiphon.store.listing import Wish, page
from antiphon.transfers import jsonl
from antiphon.transfers.exports import SESSION_ID, SQL, Draft, entry_at

log = logging.getLogger(__name__)

DELAY = 0.25  # seconds that a change may wait for others to be written with it
MARGIN = 10_000  # milliseconds that a row's time may be behind its event
PAGE = 200
MARK = ".mirrored"  # the file that says since when, in milliseconds
FILES = 4096  # whose place is remembered, the most recently changed ones


@dataclass(slots=True)
class _Place:
    """How far a file has got: the last number in it, and that entry's id. At 0 it is begun anew."""

    seq: int = 0
    entry: str | None = None


class Mirror:
    """`run` writes until it is cancelled; `flush` writes what is due now."""

    def __init__(self, store: Store, bus: EventBus, folder: Path, clock: Clock | None = None) -> None:
        self._store = store
        self._bus = bus
        self._folder = folder
        self._clock = clock or SystemClock()
        self._changed: set[str] = set()
        self._places: dict[str, _Place] = {}
        self._missed = True  # whatever happened before it listened
        self._due: float | None = None
        self._since = now = self._clock.now()
        """What was deleted before then has been looked at, or was when nothing was mirrored."""
        # The two latest: what was not yet heard when one began is no older than the one before it.
        self._begun = deque([now, now], maxlen=2)

    async def run(self) -> None:
        async with self._bus.listen("sessions") as events:
            self._due = asyncio.get_running_loop().time()
            try:
                while True:
                    self._hear(await events.get(self._left()))
                    if self._left() == 0:
                        await self._flush_whole()
            finally:  # whoever ends this flushes once more
                while (event := await events.get(0)) is not None:
                    self._hear(event)

    def _hear(self, event: Event | None) -> None:
        if isinstance(event, SessionChanged):
            self._changed.add(event.session_key)
        elif isinstance(event, Gap):
            self._missed = True
        else:
            return
        if self._due is None:
            self._due = asyncio.get_running_loop().time() + DELAY

    def _left(self) -> float | None:
        """Seconds until something has to be written, or None while nothing has changed."""
        return None if self._due is None else max(0.0, self._due - asyncio.get_running_loop().time())

    async def _flush_whole(self) -> None:
        """To its end even when cancelled: a file that is being appended to must not be begun anew meanwhile."""
        flushing = asyncio.create_task(self.flush())
        try:
            await asyncio.shield(flushing)
        finally:
            await flushing

    async def flush(self) -> None:
        self._due = None
        if self._missed:
            await self._rescan()
        if not self._missed:
            self._begun.append(self._clock.now())
        while self._changed:
            key = self._changed.pop()
            try:
                await self._update(key)
            except (AntiphonError, OSError):
                log.exception(
                    "The transcript file of %r could not be written; it is tried at its next change", key
                )

    async def _rescan(self) -> None:
        """Events were dropped: whatever was active since then may have changed, and any session may be gone."""
        try:
            since = self._begun[0] - MARGIN
            self._changed |= await self._active_since(since)
            mark = await asyncio.to_thread(_marked, self._folder)
            self._since = self._since if mark is None else min(mark, self._clock.now())
            if await self._remove(FORGOTTEN):
                self._since = max(self._since, since)
                await asyncio.to_thread(_mark, self._folder, self._since)
        except (AntiphonError, OSError):
            log.exception("What changed unheard could not be found out; that is tried at the next change")
            return
        self._missed = False

    async def _active_since(self, time: int) -> set[str]:
        keys: set[str] = set()
        cursor: tuple[int, str] | None = None
        while True:
            wish = Wish(limit=PAGE, active_since=time, archived=True, cursor=cursor)
            rows = await self._store.read(page, wish)
            keys.update(row.key for row in rows)
            if len(rows) < PAGE:
                return keys
            cursor = rows[-1].updated_at, rows[-1].key

    async def _update(self, key: str) -> None:
        await self._remove(f"{FORGOTTEN}{key} ")  # also where the key stands for another session now
        for row in await self._store.read(_recent, key):
            if SESSION_ID.fullmatch(row["named_session_id"]):
                await self._write(row["named_session_id"], row["named_transcript"], row["started_at"])

    async def _remove(self, prefix: str) -> bool:
        """Remove the files of what was deleted, as far as the record of it begins like that; whether all are gone."""
        after, until = prefix, prefix[:-1] + chr(ord(prefix[-1]) + 1)
        clean = True
        while True:
            rows = await self._store.read(_forgotten, after, until, self._since)
            gone = [row["session_id"] for row in rows if SESSION_ID.fullmatch(row["session_id"])]
            if gone:
                clean &= await asyncio.to_thread(_unlink, self._folder, gone)
            for session_id in gone:
                self._places.pop(session_id, None)
            if len(rows) < PAGE:
                return clean
            after = rows[-1]["id"]

    async def _write(self, session_id: str, transcript: int, started_at: int) -> None:
        place = self._places.pop(session_id, None) or _Place()
        self._places[session_id] = _Place()  # for the case that it cannot be written completely
        while True:
            fresh = place.seq == 0
            entries = await self._store.read(transcripts.after, transcript, place.seq, PAGE, tools=True)
            lines = [jsonl.header(session_id, started_at, "")] if fresh else []
            for entry in entries:
                lines.append(await self._line(transcript, entry, place) or b"")
            if lines:
                await asyncio.to_thread(_append, self._folder, session_id, b"".join(lines), fresh)
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


async def _forgotten(tx: Tx, after: str, until: str, since: int) -> list[Row]:
    return await tx.all(SQL.forgotten, after=after, until=until, since=since, limit=PAGE)


def _append(folder: Path, session_id: str, content: bytes, fresh: bool) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | (os.O_TRUNC if fresh else os.O_APPEND)
    file = os.open(folder / f"{session_id}.jsonl", flags, 0o600)
    with os.fdopen(file, "wb") as opened:
        opened.write(content)


def _unlink(folder: Path, session_ids: Sequence[str]) -> bool:
    clean = True
    for session_id in session_ids:
        try:
            (folder / f"{session_id}.jsonl").unlink(missing_ok=True)
        except OSError:
            clean = False
            log.exception(
                "The transcript file of the deleted %r could not be removed; that is tried at the next start",
                session_id,
            )
    return clean


def _marked(folder: Path) -> int | None:
    try:
        return int((folder / MARK).read_bytes())
    except (FileNotFoundError, ValueError):
        return None


def _mark(folder: Path, since: int) -> None:
    with Draft(folder / MARK) as draft:
        draft.write(b"%d\n" % since)


def leave(folder: Path) -> None:
    """It is not mirrored now: what is deleted meanwhile keeps its files, also when it is mirrored again."""
    with suppress(OSError):  # there is none, most of the time
        (folder / MARK).unlink()
