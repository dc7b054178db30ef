"""Transcript entries: appending them, and reading them back by cursor.

`seq` counts 1, 2, 3 … within a transcript. The numbers are reserved on the session row by whoever owns the
lane, so there is one writer and no gap. Entries are never changed.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec

from antiphon.errors import InvalidInput
from antiphon.messages import Assistant, Message, ToolCall, ToolResult, decode, encode
from antiphon.store import Row, Tx
from antiphon.store.queries import Queries

SQL = Queries("transcripts")
END = 2**62  # a sequence number after every other


class Entry(msgspec.Struct, frozen=True):
    """A stored entry: its number, its id and its raw JSON."""

    seq: int
    id: str
    role: str
    body: str
    created_at: int
    run_id: str | None = None
    """Given where it was asked for: when a page is read."""


async def append(
    tx: Tx, transcript: int, last_seq: int, run: int | None, messages: Sequence[Message], now: int
) -> list[Entry]:
    """Write `messages` so that the last one gets `last_seq`, which the caller has reserved."""
    entries: list[Entry] = []
    for seq, message in enumerate(messages, last_seq - len(messages) + 1):
        entry = new_entry(seq, str(message.__struct_config__.tag), encode(message), now)
        await append_raw(tx, transcript, run, entry)
        entries.append(entry)
    return entries


def new_entry(seq: int, role: str, body: str, now: int) -> Entry:
    return Entry(seq, f"{random.getrandbits(32):08x}", role, body, now)


async def append_raw(tx: Tx, transcript: int, run: int | None, entry: Entry) -> None:
    await tx.do(
        SQL.append,
        transcript=transcript,
        seq=entry.seq,
        entry=entry.id,
        role=entry.role,
        run=run,
        body=entry.body,
        now=entry.created_at,
    )


def _entry(row: Row) -> Entry:
    return Entry(*row)


async def before(tx: Tx, transcript: int, seq: int, limit: int, *, tools: bool) -> list[Entry]:
    """Up to `limit` entries before `seq`, oldest first."""
    query = SQL.before if tools else SQL.before_without_tools
    rows = await tx.all(query, transcript=transcript, before=seq, limit=limit)
    return [_entry(row) for row in reversed(rows)]


async def after(tx: Tx, transcript: int, seq: int, limit: int, *, tools: bool) -> list[Entry]:
    """Up to `limit` entries after `seq`, oldest first."""
    query = SQL.after if tools else SQL.after_without_tools
    rows = await tx.all(query, transcript=transcript, after=seq, limit=limit)
    return [_entry(row) for row in rows]


async def last_seq(tx: Tx, transcript: int) -> int:
    row = await tx.one(SQL.last_seq, transcript=transcript)
    return row["last_seq"] if row else 0


async def open_calls(tx: Tx, transcript: int, first_seq: int) -> list[ToolCall]:
    """The tool calls of a run's last answer that have no result yet."""
    rows = await tx.all(SQL.since_last_answer, transcript=transcript, first=first_seq)
    return unanswered([message for row in rows if (message := readable(row)) is not None])


def readable(row: Row) -> Message | None:
    """A damaged entry is passed over, so that it cannot brick its session; `antiphon doctor` names it."""
    try:
        return decode(row["body"])
    except InvalidInput:
        return None


def unanswered(messages: Sequence[Message]) -> list[ToolCall]:
    """Calls without a result, in the order they were made."""
    answered = {message.tool_call_id for message in messages if isinstance(message, ToolResult)}
    calls = [call for message in messages if isinstance(message, Assistant) for call in message.tool_calls]
    return [call for call in calls if call.id not in answered]
