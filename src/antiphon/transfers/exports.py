"""Writes conversations to files: `sessions.json` and one `<sessionId>.jsonl` each, in one directory.

A file appears complete or not at all, is readable by its owner only, and is written entry by entry, however long the
conversation is. Texts are written as they are: nothing is masked. Provider keys are in the configuration and never in a
transcript.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import msgspec

from antiphon import keys
from antiphon.access import Caller
from antiphon.engine.sessions import session_rows, transcripts
from antiphon.engine.sessions.resolver import SessionResolver
from antiphon.engine.sessions.transcripts import Entry
from antiphon.errors import InvalidInput, StoreError
from antiphon.store import Row, Store, Tx
from antiphon.store.queries import Queries
from antiphon.store.transcript_files import SESSION_ID_PATTERN
from antiphon.transfers import jsonl, sessions_index
from antiphon.transfers.sessions_index import ConversationRecord

SQL = Queries("transfers")
INDEX_FILE_NAME = "sessions.json"
EXPORTED_ROWS_PER_PAGE = 200  # entries read at a time


class ExportReport(msgspec.Struct, rename="camel", kw_only=True):
    """The result of an export. `damaged` entries could not be written and are still in the store."""

    directory: str
    files: int = 0
    messages: int = 0
    damaged: int = 0


class AtomicFile:
    """A file that gets its name only once it is complete."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._temporary: Path | None = None
        self._file: BinaryIO | None = None

    def __enter__(self) -> Self:
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            number, name = tempfile.mkstemp(dir=self._path.parent, prefix=f".{self._path.name[:64]}.")
        except OSError as error:
            raise _build_write_error(error, self._path) from error
        self._temporary = Path(name)
        self._file = os.fdopen(number, "wb")
        return self

    def write(self, content: bytes) -> None:
        assert self._file is not None
        try:
            self._file.write(content)
        except OSError as error:
            raise _build_write_error(error, self._path) from error

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._file is not None and self._temporary is not None
        try:
            with self._file as file:
                file.flush()
                os.fsync(file.fileno())
            if kind is None:
                self._temporary.replace(self._path)
        except OSError as failed:
            raise _build_write_error(failed, self._path) from failed
        finally:
            self._temporary.unlink(missing_ok=True)


async def export_named(
    store: Store, resolver: SessionResolver, out: Path, references: Sequence[str]
) -> ExportReport:
    """Writes the conversations that these keys, session ids or labels name, beside existing files."""
    report = ExportReport(directory=str(out))
    # Resolve all of them first: an unknown name is reported before anything is written.
    rows = [await store.read(_load_named_conversation, resolver, reference) for reference in references]
    entries = _read_existing_index(out / INDEX_FILE_NAME)
    for row in rows:
        await _export_conversation(store, row, out, report)
        if row["session_id"] == row["named_session_id"]:
            entries[row["key"]] = sessions_index.build_index_entry(row)
    for key in {row["key"] for row in rows} & entries.keys():
        records = await store.read(_load_conversation_records, key)
        _set_conversations(
            entries[key], [item for item in records if (out / f"{item.session_id}.jsonl").is_file()]
        )
    with AtomicFile(out / INDEX_FILE_NAME) as draft:
        _write_index(draft, entries)
    return report


async def export_all(store: Store, out: Path, *, is_ours: bool = False) -> ExportReport:
    """Writes every conversation in the store, also those that `/new` ended, beside existing files.

    A directory that is `is_ours` is used by Antiphon only: index entries of sessions that no longer exist are left over
    from an earlier export, and are removed.
    """
    report = ExportReport(directory=str(out))
    entries = {} if is_ours else _read_existing_index(out / INDEX_FILE_NAME)
    records: dict[str, list[ConversationRecord]] = {}
    with AtomicFile(out / INDEX_FILE_NAME) as draft:
        async for row in _iterate_conversations(store):
            await _export_conversation(store, row, out, report)
            records.setdefault(row["key"], []).append(ConversationRecord(row["named_session_id"]))
            if row["session_id"] == row["named_session_id"]:
                entries[row["key"]] = sessions_index.build_index_entry(row)
        for key, items in records.items():
            if len(items) > 1 and key in entries:
                known = {item.session_id: item for item in await store.read(_load_conversation_records, key)}
                _set_conversations(entries[key], [known.get(item.session_id, item) for item in items])
        _write_index(draft, entries)
    return report


def _set_conversations(entry: dict[str, Any], conversations: list[ConversationRecord]) -> None:
    if len(conversations) > 1:
        entry[sessions_index.CONVERSATIONS_FIELD] = msgspec.to_builtins(conversations)


async def _load_conversation_records(tx: Tx, key: str) -> list[ConversationRecord]:
    """Returns the conversations of a key, oldest first."""
    row = await session_rows.find_session(tx, keys.parse(key), None)
    rows = await session_rows.list_transcripts(tx, row) if row else []
    return [ConversationRecord(row["session_id"], row["reason"], row["ended_at"]) for row in reversed(rows)]


async def _export_conversation(store: Store, row: Row, out: Path, report: ExportReport) -> None:
    session_id = row["named_session_id"]
    if not SESSION_ID_PATTERN.fullmatch(session_id):
        raise InvalidInput(
            f"The session id {session_id!r} cannot be a file name.",
            "Start a new conversation under that key with /new, and export that.",
        )
    with AtomicFile(out / f"{session_id}.jsonl") as draft:
        draft.write(
            jsonl.encode_header(session_id, row["started_at"], sessions_index.get_working_directory(row))
        )
        parent: str | None = None
        async for entry in _iterate_entries(store, row["named_transcript"]):
            first_kept = await _find_first_kept_entry(store, row["named_transcript"], entry)
            line = jsonl.encode_entry(entry, parent, first_kept)
            if line is None:
                report.damaged += 1
                continue
            draft.write(line)
            parent = entry.id
            report.messages += 1
    report.files += 1


async def _iterate_entries(store: Store, transcript: int) -> AsyncIterator[Entry]:
    after = 0
    while True:
        page = await store.read(
            transcripts.read_entries_after, transcript, after, EXPORTED_ROWS_PER_PAGE, tools=True
        )
        for entry in page:
            yield entry
        if len(page) < EXPORTED_ROWS_PER_PAGE:
            return
        after = page[-1].seq


async def _iterate_conversations(store: Store) -> AsyncIterator[Row]:
    after = 0
    while True:
        page = await store.read(_load_conversations_after, after)
        for row in page:
            yield row
        if len(page) < EXPORTED_ROWS_PER_PAGE:
            return
        after = page[-1]["named_transcript"]


async def _load_conversations_after(tx: Tx, after: int) -> list[Row]:
    return await tx.all(SQL.conversations, after=after, limit=EXPORTED_ROWS_PER_PAGE)


async def _load_named_conversation(tx: Tx, resolver: SessionResolver, reference: str) -> Row:
    found = await resolver.open(tx, Caller.operator(), "read", reference)
    transcript, _ = session_rows.get_named_transcript(found)
    row = await tx.one(SQL.conversation, transcript=transcript)
    assert row is not None
    return row


async def _find_first_kept_entry(store: Store, transcript: int, entry: Entry) -> str | None:
    seq = jsonl.get_first_kept_seq(entry)
    return None if seq is None else await store.read(find_entry_at, transcript, seq)


async def find_entry_at(tx: Tx, transcript: int, seq: int) -> str | None:
    row = await tx.one(SQL.entry_at, transcript=transcript, seq=seq)
    return row["entry"] if row else None


def _read_existing_index(path: Path) -> dict[str, dict[str, Any]]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, dict[str, Any]])
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.MsgspecError) as error:
        raise InvalidInput(
            f"{str(path)!r} already exists and could not be read ({error}).",
            "Move it away, or choose another directory with --out.",
        ) from error


def _write_index(draft: AtomicFile, entries: dict[str, Any]) -> None:
    separator = b"{\n"
    for key, entry in entries.items():
        draft.write(separator + _encode_member(key, entry))
        separator = b",\n"
    draft.write(b"\n}\n" if entries else b"{}\n")


def _encode_member(key: str, entry: dict[str, Any]) -> bytes:
    return msgspec.json.encode(key) + b": " + msgspec.json.encode(entry)


def _build_write_error(error: OSError, path: Path) -> StoreError:
    return StoreError(
        f"{str(path)!r} could not be written ({os.strerror(error.errno or 0)}).",
        "Free some space or give this user write access, or choose another directory with --out.",
        path=str(path),
    )
