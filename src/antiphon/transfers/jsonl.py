"""The transcript file format: one JSON object per line, a header first, entries that name their parent.

Writing gives one line per stored entry. Reading is tolerant: unreadable lines are counted and skipped, abandoned
branches are ignored, and a message of unknown form is kept verbatim. This module opens no file and knows no store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any, TypeAlias, cast

import msgspec

from antiphon import messages
from antiphon.engine.sessions.transcripts import Entry
from antiphon.errors import InvalidInput
from antiphon.validation_errors import replace_lone_surrogates

FORMAT_VERSION = 3
COMPACTION_TYPE = "compaction"
MAX_ROLE_CHARACTERS = 64
_UNIX_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MAX_TIMESTAMP_MILLISECONDS = 253_402_300_799_999  # the last millisecond of the year 9999
_SUMMARY_FIELDS = {"type", "id", "parentId", "timestamp", "summary", "firstKeptEntryId", "tokensBefore"}
_BODY_FIELDS = {"role", "summary", "firstKeptSeq", "tokensBefore", "timestamp"}

LineSource: TypeAlias = Callable[[], Iterable[bytes]]
"""Returns the lines of a file from its beginning, each time it is called."""


def format_timestamp(ms: int) -> str:
    """Formats milliseconds since the epoch as the file format writes them."""
    ms = min(max(ms, 0), _MAX_TIMESTAMP_MILLISECONDS)
    return f"{_format_second(ms // 1000)}.{ms % 1000:03d}Z"


@lru_cache(maxsize=256)  # entries written together are only seconds apart
def _format_second(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).replace(tzinfo=None).isoformat()


def parse_timestamp(value: object) -> int | None:
    """Returns milliseconds since the epoch from a number or an ISO 8601 text, or None."""
    if isinstance(value, bool):
        return None
    if isinstance(value, str):
        try:
            parsed = datetime.fromisoformat(value)
        except ValueError:
            return None
        value = (parsed.replace(tzinfo=parsed.tzinfo or UTC) - _UNIX_EPOCH) // timedelta(milliseconds=1)
    if not isinstance(value, int | float):
        return None
    return int(value) if 0 <= value <= _MAX_TIMESTAMP_MILLISECONDS else None


def encode_header(session_id: str, started_at: int, cwd: str) -> bytes:
    return _encode_line(
        type="session", version=FORMAT_VERSION, id=session_id, timestamp=format_timestamp(started_at), cwd=cwd
    )


def encode_entry(entry: Entry, parent: str | None, first_kept: str | None = None) -> bytes | None:
    """Encodes one stored entry; None if the stored body is not JSON. `first_kept` is for compactions."""
    at = format_timestamp(entry.created_at)
    if entry.role != COMPACTION_TYPE:
        if not _is_object(entry.body):
            return None
        line = _MessageLine(
            "message", entry.id, parent, at, msgspec.Raw(_put_on_one_line(entry.body).encode())
        )
        return msgspec.json.encode(line) + b"\n"
    body = parse_object(entry.body)
    if body is None:
        return None
    rest = {name: value for name, value in body.items() if name not in _BODY_FIELDS}
    return _encode_line(
        type=COMPACTION_TYPE,
        id=entry.id,
        parentId=parent,
        timestamp=at,
        summary=body.get("summary"),
        firstKeptEntryId=first_kept,
        tokensBefore=body.get("tokensBefore"),
        **rest,
    )


def get_first_kept_seq(entry: Entry) -> int | None:
    """Returns the number of the first entry that a compaction kept."""
    seq = (parse_object(entry.body) or {}).get("firstKeptSeq") if entry.role == COMPACTION_TYPE else None
    return seq if isinstance(seq, int) else None


def parse_object(text: str | bytes) -> dict[str, Any] | None:
    """Parses a JSON object; None if it is not one."""
    try:
        found: object = msgspec.json.decode(text)
    except (ValueError, RecursionError):
        return None
    return cast("dict[str, Any]", found) if isinstance(found, dict) else None


class _Object(msgspec.Struct):
    """Any JSON object; its fields are skipped, which is cheaper than building them."""


_object_decoder = msgspec.json.Decoder(_Object)


def _is_object(text: str) -> bool:
    try:
        _object_decoder.decode(text)
    except (ValueError, RecursionError):
        return False
    return True


class _MessageLine(msgspec.Struct, rename="camel"):
    type: str
    id: str
    parent_id: str | None
    timestamp: str
    message: msgspec.Raw


class _EntryLine(msgspec.Struct, rename="camel"):
    type: str
    id: str | None = None
    parent_id: str | msgspec.UnsetType | None = msgspec.UNSET
    timestamp: Any = None
    cwd: str | None = None
    message: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    first_kept_entry_id: str | None = None


_decoder = msgspec.json.Decoder(_EntryLine)


class TranscriptReader:
    """Reads one file twice: first for its structure, then for its entries."""

    def __init__(self, lines: LineSource) -> None:
        self.damaged = 0
        """Lines that could not be read."""
        self.left_out = 0
        """Entries on the branch that are not part of a conversation, such as a change of model."""
        self.started_at: int | None = None
        self.cwd: str | None = None
        self._lines = lines
        self._first_kept_ids: set[str] = set()
        self._branch = self._find_branch()

    def iterate_entries(self) -> Iterator[Entry]:
        """Yields the conversation that ends in the file's last entry, numbered from 1."""
        seqs: dict[str, int] = {}
        seq, at = 0, self.started_at or 0
        for number, raw in enumerate(self._lines()):
            if number not in self._branch:
                continue
            found, raw = _decode_line(raw)  # noqa: PLW2901
            at = parse_timestamp(found.timestamp) or at
            if found.id in self._first_kept_ids:
                seqs[found.id] = seq + 1
            entry = self._build_entry(found, raw, seq + 1, at, seqs)
            if entry is not None:
                seq, at = entry.seq, entry.created_at
                yield entry

    def _find_branch(self) -> set[int]:
        """Returns the numbers of the lines on the path from the last entry to its root."""
        numbers: list[int] = []
        parents: list[int] = []
        index_by_id: dict[str, int] = {}
        for number, raw in enumerate(self._lines()):
            found = self._decode_or_count(raw)
            if found is None:
                continue
            if found.type == "session":
                self._read_header(found)
                continue
            # A missing parent was on a damaged line: the preceding entry replaces it.
            preceding = len(parents) - 1
            known = (
                index_by_id.get(found.parent_id, preceding) if isinstance(found.parent_id, str) else preceding
            )
            parents.append(-1 if found.parent_id is None else known)
            if found.id:
                index_by_id[found.id] = len(numbers)
            if found.first_kept_entry_id:
                self._first_kept_ids.add(found.first_kept_entry_id)
            numbers.append(number)
        return _trace_ancestry(numbers, parents)

    def _decode_or_count(self, raw: bytes) -> _EntryLine | None:
        if not raw.strip():
            return None
        try:
            return _decode_line(raw)[0]
        except (ValueError, RecursionError):
            self.damaged += 1
            return None

    def _read_header(self, found: _EntryLine) -> None:
        self.started_at = parse_timestamp(found.timestamp)
        self.cwd = found.cwd

    def _build_entry(
        self, found: _EntryLine, raw: bytes, seq: int, at: int, seqs: dict[str, int]
    ) -> Entry | None:
        name = (found.id or f"{seq:08x}")[:128]
        if found.type == "message":
            message = _parse_message(bytes(found.message), at)
            if message is None:
                self.damaged += 1
                return None
            return Entry(seq, name, message[0], message[1], at or message[2])
        if found.type == COMPACTION_TYPE:
            kept = seqs.get(found.first_kept_entry_id or "", seq)
            return Entry(seq, name, COMPACTION_TYPE, _build_summary_body(raw, kept, at), at)
        self.left_out += 1
        return None


def _decode_line(raw: bytes) -> tuple[_EntryLine, bytes]:
    """Decodes a line, with unpaired surrogates replaced: programs that cut UTF-16 texts leave them behind.

    Raises:
        ValueError: the line is not an entry.
    """
    try:
        return _decoder.decode(raw), raw
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError:
        repaired_line = replace_lone_surrogates(raw)
        return _decoder.decode(repaired_line), repaired_line


def _trace_ancestry(numbers: list[int], parents: list[int]) -> set[int]:
    branch: set[int] = set()
    index = len(numbers) - 1
    while index >= 0:  # a parent precedes its child, so this ends
        branch.add(numbers[index])
        index = parents[index]
    return branch


def _parse_message(raw: bytes, at: int) -> tuple[str, str, int] | None:
    """Returns role, body and time of a message; the body is repaired only if that makes it readable."""
    body = parse_object(raw)
    role = body.get("role") if body else None
    if (
        body is None
        or not isinstance(role, str)
        or not 0 < len(role) <= MAX_ROLE_CHARACTERS
        or role == COMPACTION_TYPE
    ):
        return None
    sent_at = parse_timestamp(body.get("timestamp")) or 0
    text = raw.decode()
    if not _is_readable(text):
        repaired = msgspec.json.encode(_repair_message(body, role, sent_at or at)).decode()
        text = repaired if _is_readable(repaired) else text
    return role, text, sent_at


def _is_readable(text: str) -> bool:
    try:
        messages.decode_message(text)
    except InvalidInput:
        return False
    return True


def _repair_message(body: dict[str, Any], role: str, at: int) -> dict[str, Any]:
    """Adds what older writers left out: a time, blocks instead of bare text, a tool's name."""
    repaired = {**body, "timestamp": at}
    if role != "user" and isinstance(body.get("content"), str):
        repaired["content"] = [{"type": "text", "text": body["content"]}]
    if role == "toolResult":
        repaired.setdefault("toolName", "unknown")
    return repaired


def _build_summary_body(raw: bytes, first_kept: int, at: int) -> str:
    found = parse_object(raw) or {}
    summary, tokens = found.get("summary"), found.get("tokensBefore")
    rest = {name: value for name, value in found.items() if name not in _SUMMARY_FIELDS}
    body = {
        "role": COMPACTION_TYPE,
        "summary": summary if isinstance(summary, str) else "",
        "firstKeptSeq": first_kept,
        "tokensBefore": tokens if isinstance(tokens, int) else 0,
        "timestamp": at,
    }
    return msgspec.json.encode({**rest, **body}).decode()


def _put_on_one_line(body: str) -> str:
    return msgspec.json.format(body, indent=-1) if "\n" in body or "\r" in body else body


def _encode_line(**fields: Any) -> bytes:
    return msgspec.json.encode(fields) + b"\n"
