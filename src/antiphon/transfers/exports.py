"""Writing conversations to files: `sessions.json` and one `<sessionId>.jsonl` each, in one directory.

A file appears complete or not at all, is readable by its owner only, and is written entry by entry, however
long the conversation is. What was said is written as it was said: nothing is masked. Provider keys are in the
configuration and never in a transcript.
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
from antiphon.engine import sessions, transcripts
from antiphon.engine.door import Door
from antiphon.engine.transcripts import Entry
from antiphon.errors import InvalidInput, StoreError
from antiphon.store import Row, Store, Tx
from antiphon.store.queries import Queries
from antiphon.store.transcript_files import SESSION_ID
from antiphon.transfers import index, jsonl
from antiphon.transfers.index import Told

SQL = Queries("transfers")
INDEX = "sessions.json"
PAGE = 200  # entries read at a time


class Exported(msgspec.Struct, rename="camel", kw_only=True):
    """What an export wrote. `damaged` entries could not be written and are still in the store."""

    directory: str
    files: int = 0
    messages: int = 0
    damaged: int = 0


class Draft:
    """A file under construction, which takes its name when it is complete."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._temporary: Path | None = None
        self._file: BinaryIO | None = None

    def __enter__(self) -> Self:
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            number, name = tempfile.mkstemp(dir=self._path.parent, prefix=f".{self._path.name[:64]}.")
        except OSError as error:
            raise _unwritable(error, self._path) from error
        self._temporary = Path(name)
        self._file = os.fdopen(number, "wb")
        return self

    def write(self, content: bytes) -> None:
        assert self._file is not None
        try:
            self._file.write(content)
        except OSError as error:
            raise _unwritable(error, self._path) from error

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
            raise _unwritable(failed, self._path) from failed
        finally:
            self._temporary.unlink(missing_ok=True)


async def export_named(store: Store, door: Door, out: Path, references: Sequence[str]) -> Exported:
    """Write the conversations that these keys, session ids or labels name, beside what is there already."""
    done = Exported(directory=str(out))
    # All of them first: a name that leads nowhere is told before anything is written.
    rows = [await store.read(_named, door, reference) for reference in references]
    entries = _existing(out / INDEX)
    for row in rows:
        await _export(store, row, out, done)
        if row["session_id"] == row["named_session_id"]:
            entries[row["key"]] = index.entry_of(row)
    for key in {row["key"] for row in rows} & entries.keys():
        told = await store.read(_told, key)
        _tell(entries[key], [item for item in told if (out / f"{item.session_id}.jsonl").is_file()])
    with Draft(out / INDEX) as draft:
        _write_index(draft, entries)
    return done


async def export_all(store: Store, out: Path, *, ours: bool = False) -> Exported:
    """Write every conversation there is, those that `/new` ended too, beside what is there already.

    In a directory that is `ours` nobody else keeps anything: what its index says of sessions that are not here any
    more is left over from an earlier export, and goes.
    """
    done = Exported(directory=str(out))
    entries = {} if ours else _existing(out / INDEX)
    told: dict[str, list[Told]] = {}
    with Draft(out / INDEX) as draft:
        async for row in _conversations(store):
            await _export(store, row, out, done)
            told.setdefault(row["key"], []).append(Told(row["named_session_id"]))
            if row["session_id"] == row["named_session_id"]:
                entries[row["key"]] = index.entry_of(row)
        for key, items in told.items():
            if len(items) > 1 and key in entries:
                known = {item.session_id: item for item in await store.read(_told, key)}
                _tell(entries[key], [known.get(item.session_id, item) for item in items])
        _write_index(draft, entries)
    return done


def _tell(entry: dict[str, Any], conversations: list[Told]) -> None:
    if len(conversations) > 1:
        entry[index.CONVERSATIONS] = msgspec.to_builtins(conversations)


async def _told(tx: Tx, key: str) -> list[Told]:
    """The conversations of a key, oldest first."""
    row = await sessions.find(tx, keys.parse(key), None)
    rows = await sessions.conversations(tx, row) if row else []
    return [Told(row["session_id"], row["reason"], row["ended_at"]) for row in reversed(rows)]


async def _export(store: Store, row: Row, out: Path, done: Exported) -> None:
    session_id = row["named_session_id"]
    if not SESSION_ID.fullmatch(session_id):
        raise InvalidInput(
            f"The session id {session_id!r} cannot be the name of a file.",
            "Start a new conversation under that key with /new, and export that.",
        )
    cwd = index.extra_of(row).get("cwd")
    with Draft(out / f"{session_id}.jsonl") as draft:
        draft.write(jsonl.header(session_id, row["started_at"], cwd if isinstance(cwd, str) else ""))
        parent: str | None = None
        async for entry in _entries(store, row["named_transcript"]):
            kept = await _first_kept(store, row["named_transcript"], entry)
            line = jsonl.line(entry, parent, kept)
            if line is None:
                done.damaged += 1
                continue
            draft.write(line)
            parent = entry.id
            done.messages += 1
    done.files += 1


async def _entries(store: Store, transcript: int) -> AsyncIterator[Entry]:
    after = 0
    while True:
        page = await store.read(transcripts.after, transcript, after, PAGE, tools=True)
        for entry in page:
            yield entry
        if len(page) < PAGE:
            return
        after = page[-1].seq


async def _conversations(store: Store) -> AsyncIterator[Row]:
    after = 0
    while True:
        page = await store.read(_conversations_after, after)
        for row in page:
            yield row
        if len(page) < PAGE:
            return
        after = page[-1]["named_transcript"]


async def _conversations_after(tx: Tx, after: int) -> list[Row]:
    return await tx.all(SQL.conversations, after=after, limit=PAGE)


async def _named(tx: Tx, door: Door, reference: str) -> Row:
    found = await door.open(tx, Caller.operator(), "read", reference)
    transcript, _ = sessions.named(found)
    row = await tx.one(SQL.conversation, transcript=transcript)
    assert row is not None
    return row


async def _first_kept(store: Store, transcript: int, entry: Entry) -> str | None:
    seq = jsonl.first_kept_seq(entry)
    return None if seq is None else await store.read(entry_at, transcript, seq)


async def entry_at(tx: Tx, transcript: int, seq: int) -> str | None:
    row = await tx.one(SQL.entry_at, transcript=transcript, seq=seq)
    return row["entry"] if row else None


def _existing(path: Path) -> dict[str, dict[str, Any]]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, dict[str, Any]])
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.MsgspecError) as error:
        raise InvalidInput(
            f"{str(path)!r} is there already and cannot be read ({error}).",
            "Move it away, or choose another directory with --out.",
        ) from error


def _write_index(draft: Draft, entries: dict[str, Any]) -> None:
    separator = b"{\n"
    for key, entry in entries.items():
        draft.write(separator + _member(key, entry))
        separator = b",\n"
    draft.write(b"\n}\n" if entries else b"{}\n")


def _member(key: str, entry: dict[str, Any]) -> bytes:
    return msgspec.json.encode(key) + b": " + msgspec.json.encode(entry)


def _unwritable(error: OSError, path: Path) -> StoreError:
    return StoreError(
        f"{str(path)!r} cannot be written ({os.strerror(error.errno or 0)}).",
        "Free some space or give this user write access, or choose another directory with --out.",
        path=str(path),
    )
