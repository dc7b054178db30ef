"""Keeps the JSONL file of every session up to date, for `session.transcripts.mirror`.

The files are a derived copy, written shortly after the commits and never read back. Changes of about one second are
read together and appended in a thread, so a slow disk delays only the mirror. A view that needs a missing file has it
written first (`TranscriptFiles`). After dropped events, the rows show what may have changed; files that are missing or
older than their session, after a crash or an import, are rewritten one after the other.

A session deleted from the store is deleted here too, even if an export wrote the file. This follows the record of
deletions, not what is missing in the store, so that foreign files, and those of a store that was lost or restored from
a backup, stay. A file in the folder marks how far that record was processed: exports of sessions deleted before the
mirror was enabled stay.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from antiphon.bus import Event, EventBus, Gap, SessionChanged
from antiphon.clock import Clock, SystemClock
from antiphon.engine.sessions import transcripts
from antiphon.engine.sessions.transcripts import Entry
from antiphon.engine.validation import DELETED_TRANSCRIPT_PREFIX
from antiphon.errors import AntiphonError
from antiphon.store import Row, Store, Tx
from antiphon.store.listing import SessionListQuery, SessionListRow, load_session_page
from antiphon.store.transcript_files import SESSION_ID_PATTERN, TranscriptFiles
from antiphon.transfers import jsonl, sessions_index
from antiphon.transfers.exports import SQL, AtomicFile, find_entry_at

log = logging.getLogger(__name__)

WRITE_DELAY_SECONDS = 1.0  # collects changes that are written together
EVENT_POLL_SECONDS = 0.05  # interval for draining events; waking up on every event would slow down each turn
CLOCK_MARGIN_MILLISECONDS = 10_000  # how far a row's time may be behind its event
MIRRORED_ROWS_PER_PAGE = 200
MARK_FILE_NAME = ".mirrored"  # contains the time, in milliseconds, up to which deletions were processed
MAX_REMEMBERED_FILES = 4096  # files whose position is remembered, the most recently changed ones
CATCH_UP_PAUSE_SECONDS = 0.05  # between two outdated files


class _FilePosition(msgspec.Struct):
    """How far a file was written: its last entry's number and id. At 0 it is rewritten."""

    seq: int = 0
    entry: str | None = None
    ended: bool = False
    """The conversation has ended and gets no entries, unless it is restored."""


class _PendingEntries(NamedTuple):
    """Entries that a file still lacks; `more` if further ones follow."""

    session_id: str
    header: bytes
    """Empty if the file is continued."""
    entries: list[Entry]
    first_kept: dict[int, str | None]
    """The first entry that each compaction kept, by the compaction's number."""
    ended: bool
    more: bool


class _FileAppend(NamedTuple):
    session_id: str
    content: bytes
    is_new: bool


class TranscriptMirror:
    """Mirrors transcripts: `run` writes until it is cancelled; `flush` writes pending changes now."""

    def __init__(self, store: Store, bus: EventBus, folder: Path, clock: Clock | None = None) -> None:
        self._store = store
        self._bus = bus
        self._folder = folder
        self._clock = clock or SystemClock()
        self.files = TranscriptFiles(folder, self.write)
        self._changed: dict[str, bool] = {}
        """Keys of changed sessions, and whether more than new messages may have changed."""
        self._lock = asyncio.Lock()  # one writer at a time
        self._positions: dict[str, _FilePosition] = {}
        self._has_missed_events = True  # events from before it started listening
        self._write_at: float | None = None
        self._since = now = self._clock.now()
        """Deletions before this time were processed, or happened while nothing was mirrored."""
        # The last two starts of a flush: an event not received before one of them is no older than the one before.
        self._flush_starts = deque([now, now], maxlen=2)

    async def run(self) -> None:
        async with self._bus.listen("sessions") as events:
            self._write_at = asyncio.get_running_loop().time()
            catching_up = asyncio.create_task(self._catch_up())
            try:
                while True:
                    if (left := self._seconds_until_write()) is None:
                        self._handle_event(await events.get())
                        continue
                    await asyncio.sleep(min(left, EVENT_POLL_SECONDS))
                    while (event := await events.get(0)) is not None:
                        self._handle_event(event)
                    if self._seconds_until_write() == 0:
                        await _run_to_completion(self.flush())
            finally:  # the caller flushes once more after the end
                catching_up.cancel()
                await asyncio.gather(catching_up, return_exceptions=True)
                while (event := await events.get(0)) is not None:
                    self._handle_event(event)

    def _handle_event(self, event: Event | None) -> None:
        if isinstance(event, SessionChanged):
            key = event.session_key
            self._changed[key] = self._changed.get(key, False) or event.reason != "message"
        elif isinstance(event, Gap):
            self._has_missed_events = True
        else:
            return
        if self._write_at is None:
            self._write_at = asyncio.get_running_loop().time() + WRITE_DELAY_SECONDS

    def _seconds_until_write(self) -> float | None:
        """Returns the seconds until the next write is due; None while nothing has changed."""
        return (
            None if self._write_at is None else max(0.0, self._write_at - asyncio.get_running_loop().time())
        )

    async def flush(self) -> None:
        self._write_at = None
        async with self._lock:
            if self._has_missed_events:
                await self._rescan()
            if not self._has_missed_events:
                self._flush_starts.append(self._clock.now())
            while self._changed:
                changed, self._changed = self._changed, {}
                await self._write_changes(changed)

    async def write(self, keys: Iterable[str]) -> None:
        """Writes the files of these sessions now."""
        async with self._lock:
            changed = {key: self._changed.pop(key, False) for key in keys}
            await self._write_changes(changed)

    async def _catch_up(self) -> None:
        """Writes files that are missing or older than their session, slowly: after imports and crashes."""
        cursor: tuple[int, str] | None = None
        try:
            while True:
                await asyncio.sleep(CATCH_UP_PAUSE_SECONDS)
                rows = await self._store.read(
                    load_session_page,
                    SessionListQuery(limit=MIRRORED_ROWS_PER_PAGE, archived=True, cursor=cursor),
                )
                for key in await asyncio.to_thread(_find_outdated, self._folder, rows):
                    await _run_to_completion(self.write([key]))
                    await asyncio.sleep(CATCH_UP_PAUSE_SECONDS)
                if len(rows) < MIRRORED_ROWS_PER_PAGE:
                    return
                cursor = rows[-1].updated_at, rows[-1].key
        except (AntiphonError, OSError):
            log.exception("Looking for missing transcript files failed; retrying at the next start")

    async def _rescan(self) -> None:
        """Finds changes after dropped events: sessions active since then may have changed, and any may be deleted."""
        try:
            since = self._flush_starts[0] - CLOCK_MARGIN_MILLISECONDS
            for key in await self._load_active_since(since):
                self._changed.setdefault(key, False)
            mark = await asyncio.to_thread(_read_mark, self._folder)
            self._since = self._since if mark is None else min(mark, self._clock.now())
            if await self._remove_deleted(DELETED_TRANSCRIPT_PREFIX):
                self._since = max(self._since, since)
                await asyncio.to_thread(_write_mark, self._folder, self._since)
        except (AntiphonError, OSError):
            log.exception("Looking for missed changes of sessions failed; retrying at the next change")
            return
        self._has_missed_events = False

    async def _load_active_since(self, time: int) -> set[str]:
        keys: set[str] = set()
        cursor: tuple[int, str] | None = None
        while True:
            query = SessionListQuery(
                limit=MIRRORED_ROWS_PER_PAGE, active_since=time, archived=True, cursor=cursor
            )
            rows = await self._store.read(load_session_page, query)
            keys.update(row.key for row in rows)
            if len(rows) < MIRRORED_ROWS_PER_PAGE:
                return keys
            cursor = rows[-1].updated_at, rows[-1].key

    async def _write_changes(self, changed: Mapping[str, bool]) -> None:
        """Writes new entries. A session that fails neither holds up others nor ends the mirror."""
        try:
            for key, may_be_deleted in changed.items():
                if may_be_deleted:  # also if the key now belongs to another session
                    await self._remove_deleted(f"{DELETED_TRANSCRIPT_PREFIX}{key} ")
            left = list(changed)
            while left:
                pending, done = await self._store.read(_load_pending, left, changed, self._positions)
                has_more = await self._append_pending(pending)
                left = left[done:] if not has_more else left
        except Exception:
            if len(changed) > 1:
                for key, may_be_deleted in changed.items():
                    await self._write_changes({key: may_be_deleted})
                return
            log.exception("Writing transcript files failed; retrying when their sessions change again")

    async def _remove_deleted(self, prefix: str) -> bool:
        """Removes the files of deleted sessions whose record begins with `prefix`; returns whether all are removed."""
        after, until = prefix, prefix[:-1] + chr(ord(prefix[-1]) + 1)
        all_removed = True
        while True:
            rows = await self._store.read(_load_deleted, after, until, self._since)
            session_ids = [
                row["session_id"] for row in rows if SESSION_ID_PATTERN.fullmatch(row["session_id"])
            ]
            if session_ids:
                all_removed &= await asyncio.to_thread(_unlink_files, self._folder, session_ids)
            for session_id in session_ids:
                self._positions.pop(session_id, None)
                self.files.discard(session_id)
            if len(rows) < MIRRORED_ROWS_PER_PAGE:
                return all_removed
            after = rows[-1]["id"]

    async def _append_pending(self, pending: Sequence[_PendingEntries]) -> bool:
        """Appends entries to their files; returns whether more remain to be written."""
        additions: list[_FileAppend] = []
        positions: dict[str, _FilePosition] = {}
        for item in pending:
            position = self._positions.pop(item.session_id, None) or _FilePosition()
            self._positions[item.session_id] = _FilePosition()  # in case it is not written completely
            content = b"".join(
                [
                    item.header,
                    *(_encode_next_line(entry, position, item.first_kept) for entry in item.entries),
                ]
            )
            position.ended = item.ended and not item.more
            positions[item.session_id] = position
            if content:
                additions.append(_FileAppend(item.session_id, content, bool(item.header)))
        failed = await asyncio.to_thread(_write_files, self._folder, additions) if additions else {}
        for session_id, position in positions.items():
            if session_id in failed:
                self.files.discard(session_id)
            else:
                self._positions[session_id] = position
                self.files.add(session_id)
        while len(self._positions) > MAX_REMEMBERED_FILES:
            del self._positions[next(iter(self._positions))]  # rewritten when it changes again
        return any(failed.get(item.session_id, item.more) for item in pending)


def _encode_next_line(entry: Entry, position: _FilePosition, first_kept: Mapping[int, str | None]) -> bytes:
    line = jsonl.encode_entry(entry, position.entry, first_kept.get(entry.seq))
    position.seq = entry.seq
    if line is None:
        return b""
    position.entry = entry.id
    return line


async def _load_pending(
    tx: Tx, keys: Sequence[str], changed: Mapping[str, bool], positions: Mapping[str, _FilePosition]
) -> tuple[list[_PendingEntries], int]:
    """Loads the entries that the first keys' files lack, about a page; also returns how many keys that covers."""
    pending: list[_PendingEntries] = []
    entries = 0
    for number, key in enumerate(keys):
        if entries >= MIRRORED_ROWS_PER_PAGE:
            return pending, number
        rows = [] if changed[key] else await tx.all(SQL.current_conversation, key=key)
        if not rows or rows[0]["session_id"] not in positions:  # another conversation may just have ended
            rows = await tx.all(SQL.recent_conversations, key=key)
        for row in rows:
            position = positions.get(row["session_id"]) or _FilePosition()
            ended = row["ended_at"] is not None
            if SESSION_ID_PATTERN.fullmatch(row["session_id"]) and not (ended and position.ended):
                pending.append(await _load_pending_entries(tx, row, position))
                entries += len(pending[-1].entries)
    return pending, len(keys)


async def _load_pending_entries(tx: Tx, row: Row, position: _FilePosition) -> _PendingEntries:
    found = await transcripts.read_entries_after(
        tx, row["id"], position.seq, MIRRORED_ROWS_PER_PAGE, tools=True
    )
    first_kept: dict[int, str | None] = {}
    for entry in found:
        if (seq := jsonl.get_first_kept_seq(entry)) is not None:
            first_kept[entry.seq] = await find_entry_at(tx, row["id"], seq)
    header = b""
    if position.seq == 0:
        header = jsonl.encode_header(
            row["session_id"], row["started_at"], sessions_index.get_working_directory(row)
        )
    return _PendingEntries(
        row["session_id"],
        header,
        found,
        first_kept,
        row["ended_at"] is not None,
        len(found) == MIRRORED_ROWS_PER_PAGE,
    )


async def _run_to_completion(writing: Coroutine[Any, Any, None]) -> None:
    """Finishes writing even when cancelled: a file must not be rewritten while it is still being appended to."""
    task = asyncio.create_task(writing)
    try:
        await asyncio.shield(task)
    finally:
        await task


async def _load_deleted(tx: Tx, after: str, until: str, since: int) -> list[Row]:
    return await tx.all(
        SQL.deleted_conversations, after=after, until=until, since=since, limit=MIRRORED_ROWS_PER_PAGE
    )


def _write_files(folder: Path, additions: Sequence[_FileAppend]) -> dict[str, bool]:
    """Appends to files; returns those that failed, and whether rewriting them at once helps."""
    failed: dict[str, bool] = {}
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for session_id, content, is_new in additions:
        flags = os.O_WRONLY | os.O_NOFOLLOW | (os.O_CREAT | os.O_TRUNC if is_new else os.O_APPEND)
        try:
            file = os.open(f"{folder}/{session_id}.jsonl", flags, 0o600)
            try:
                written = os.write(file, content)
                while written < len(content):
                    written += os.write(file, content[written:])
            finally:
                os.close(file)
        except OSError as error:
            failed[session_id] = isinstance(error, FileNotFoundError) and not is_new
            if not failed[session_id]:
                log.exception(
                    "Writing the transcript file of %r failed; retrying at its next change",
                    session_id,
                )
    return failed


def _find_outdated(folder: Path, rows: Sequence[SessionListRow]) -> list[str]:
    """Returns the keys of sessions whose file is missing, or was last written before the session changed."""
    return [
        row.key
        for row in rows
        if SESSION_ID_PATTERN.fullmatch(row.session_id) and _get_written_at(folder, row) < row.updated_at
    ]


def _get_written_at(folder: Path, row: SessionListRow) -> int:
    """Returns the file's modification time in milliseconds; -1 if it does not exist."""
    try:
        return (folder / f"{row.session_id}.jsonl").stat().st_mtime_ns // 1_000_000
    except OSError:
        return -1


def _unlink_files(folder: Path, session_ids: Sequence[str]) -> bool:
    all_removed = True
    for session_id in session_ids:
        try:
            (folder / f"{session_id}.jsonl").unlink(missing_ok=True)
        except OSError:
            all_removed = False
            log.exception(
                "Removing the transcript file of the deleted %r failed; retrying at the next start",
                session_id,
            )
    return all_removed


def _read_mark(folder: Path) -> int | None:
    try:
        return int((folder / MARK_FILE_NAME).read_bytes())
    except (FileNotFoundError, ValueError):
        return None


def _write_mark(folder: Path, since: int) -> None:
    with AtomicFile(folder / MARK_FILE_NAME) as draft:
        draft.write(b"%d\n" % since)


def remove_mark(folder: Path) -> None:
    """Removes the mark when mirroring is disabled: files of sessions deleted meanwhile are never removed."""
    with suppress(OSError):  # usually it does not exist
        (folder / MARK_FILE_NAME).unlink()
