"""Transcript entries: appending them, and reading them by cursor.

`seq` counts 1, 2, 3 … within a transcript. The owner of the lane reserves the numbers in the session row, so each
transcript has one writer and no gaps. Entries are never changed.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, cast

import msgspec

from antiphon.engine.outbox import sanitize
from antiphon.errors import InvalidInput
from antiphon.messages import (
    AssistantMessage,
    Message,
    ToolCall,
    ToolResult,
    decode_message,
    encode_message,
    get_role,
    is_failed_entry,
    is_tool_entry,
)
from antiphon.store import Row, Tx
from antiphon.store.queries import Queries, Query

SQL = Queries("transcripts")
AFTER_LAST_SEQ = 2**62  # greater than every sequence number
MAX_PAGE_BYTES = 4 * 2**20  # total size of the bodies of a page; a larger entry forms a page by itself
ROWS_PER_FETCH = 64  # limits the memory for large rows besides the page
MAX_ENTRIES_SCANNED = 5000  # per filtered page
DEFAULT_HISTORY_ENTRIES, MAX_HISTORY_ENTRIES = 50, 1000
ANNOUNCE_STEP_KIND = "announce_step"
EXCHANGE_RUN_PREFIXES = ("announce:", "turn:")
"""Prefixes of the ids of runs that answer in a conversation between sessions, where control tokens have a meaning."""
MAX_TOKEN_CHARACTERS = 1000
"""Maximum length of an answer that is only control tokens. A longer one is shown."""

EntryRole: TypeAlias = Literal["user", "assistant", "toolResult", "compaction"]


class HistoryFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Which entries of a transcript to read."""

    limit: int = DEFAULT_HISTORY_ENTRIES
    include_tools: bool = False
    """Include tool results. Ignored if `roles`, `tool` or `errors` is set, which decide that themselves."""
    before: int | None = None
    after: int | None = None
    roles: tuple[str, ...] | None = None
    since: int | None = None
    """Only entries written then or later, in milliseconds."""
    errors: bool = False
    """Only failures: answers that ended in an error or were aborted, and errors of tools."""
    tool: str | None = None
    """Only answers that called this tool, and its results."""

    without_internal: bool = False
    """Only the visible conversation, as people see it (see `is_internal_entry` and `remove_control_tokens`)."""

    @property
    def is_narrow(self) -> bool:
        """Whether most of a transcript may be skipped, so that the search for matches has to be bounded."""
        narrowed = self.roles is not None or self.since is not None or self.errors or self.tool is not None
        return narrowed or self.without_internal

    @property
    def hides_results(self) -> bool:
        return not (self.include_tools or self.errors or self.roles is not None or self.tool is not None)


class Entry(msgspec.Struct, frozen=True):
    """A stored entry: its number, its id and its raw JSON."""

    seq: int
    id: str
    role: str
    body: str
    created_at: int
    run_id: str | None = None
    """Set only when a page is read."""
    shown: int = 1
    """Set only when a page is read: 0 if the entry is an announcement or report that was not delivered."""

    @property
    def is_internal(self) -> bool:
        """Whether the entry is hidden from people (`is_internal_entry`)."""
        return not self.shown or is_internal_entry(self.role, self.body)


class Page(NamedTuple):
    """Entries, oldest first, and the number to continue from if there are more in the direction of reading."""

    entries: list[Entry]
    cursor: int | None

    @property
    def has_more(self) -> bool:
        return self.cursor is not None


async def append(
    tx: Tx, transcript: int, last_seq: int, run: int | None, messages: Sequence[Message], now: int
) -> list[Entry]:
    """Append `messages` so that the last one gets the number `last_seq`, which the caller has reserved."""
    entries: list[Entry] = []
    for seq, message in enumerate(messages, last_seq - len(messages) + 1):
        entry = new_entry(seq, get_role(message), encode_message(message), now)
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


async def read_page_before(tx: Tx, transcript: int, seq: int, limit: int, *, tools: bool) -> Page:
    """Return the last entries before `seq`: at most `limit`, and at most `MAX_PAGE_BYTES`."""
    page = await _read_page(
        tx, SQL.page_before if tools else SQL.page_before_without_tools, transcript, seq, limit
    )
    page.entries.reverse()
    return page


async def read_page_after(tx: Tx, transcript: int, seq: int, limit: int, *, tools: bool) -> Page:
    """Return the first entries after `seq`: at most `limit`, and at most `MAX_PAGE_BYTES`."""
    return await _read_page(
        tx, SQL.page_after if tools else SQL.page_after_without_tools, transcript, seq, limit
    )


async def _read_page(tx: Tx, query: Query, transcript: int, seq: int, limit: int) -> Page:
    """Read a page in the order and direction of the query. It has at least one entry, if any exist."""
    found: list[Entry] = []
    size = 0
    while True:
        count = min(ROWS_PER_FETCH, limit + 1 - len(found))  # one more, to know whether the page is the last
        rows = await tx.all(query, transcript=transcript, seq=seq, limit=count)
        for row in rows:
            entry = Entry(*row)
            size += _count_bytes(entry.body)
            if found and (size > MAX_PAGE_BYTES or len(found) == limit):
                return Page(found, found[-1].seq)
            found.append(entry)
        if len(rows) < count:
            return Page(found, None)
        seq = found[-1].seq


async def read_filtered_page(tx: Tx, transcript: int, filter: HistoryFilter, limit: int) -> Page:
    """Return a page of the entries that match `filter`. It may be empty and not the last, as the scan is bounded."""
    end = await load_last_seq(tx, transcript)
    if filter.after is not None:
        edge = min(filter.after + MAX_ENTRIES_SCANNED, end)
        page = await _read_filtered_range(
            tx, SQL.page_after_filtered, transcript, filter, filter.after, edge, limit
        )
        return page if page.has_more or edge >= end else Page(page.entries, edge)
    seq = end + 1 if filter.before is None else min(filter.before, end + 1)
    edge = max(seq - MAX_ENTRIES_SCANNED, 1)
    page = await _read_filtered_range(tx, SQL.page_before_filtered, transcript, filter, seq, edge, limit)
    page.entries.reverse()
    return page if page.has_more or edge == 1 else Page(page.entries, edge)


async def _read_filtered_range(
    tx: Tx, query: Query, transcript: int, filter: HistoryFilter, start: int, edge: int, limit: int
) -> Page:
    """Read matching entries from `start` to `edge`, in the order of the query. All scanned bytes are counted."""
    narrowing = {
        "hidden": "toolResult" if filter.hides_results else "",
        "roles": None if filter.roles is None else msgspec.json.encode(filter.roles).decode(),
        "since": -AFTER_LAST_SEQ if filter.since is None else filter.since,
    }
    found: list[Entry] = []
    seq, size = start, 0
    while rows := await tx.all(
        query, transcript=transcript, seq=seq, edge=edge, limit=ROWS_PER_FETCH, **narrowing
    ):
        for row in rows:
            entry = Entry(*row)
            size += _count_bytes(entry.body)
            if seq != start and (size > MAX_PAGE_BYTES or len(found) == limit):
                return Page(found, seq)
            if _matches_filter(entry, filter):
                found.append(entry)
            seq = entry.seq
    return Page(found, None)


def _matches_filter(entry: Entry, filter: HistoryFilter) -> bool:
    """Whether an entry passes the filters that need its body."""
    if filter.without_internal and entry.is_internal:
        return False
    if filter.errors and not is_failed_entry(entry.role, entry.body):
        return False
    return filter.tool is None or is_tool_entry(filter.tool, entry.role, entry.body)


def _count_bytes(body: str) -> int:
    """Return the size of a body in bytes; checking for ASCII, the common case, is free."""
    return len(body) if body.isascii() else len(body.encode())


async def read_entries_after(tx: Tx, transcript: int, seq: int, limit: int, *, tools: bool) -> list[Entry]:
    """Return `limit` entries after `seq`, whatever their size, oldest first; fewer only at the end."""
    query = SQL.page_after if tools else SQL.page_after_without_tools
    return [Entry(*row) for row in await tx.all(query, transcript=transcript, seq=seq, limit=limit)]


async def load_latest_entries(tx: Tx, transcripts: Sequence[int], max_bytes: int) -> dict[int, Entry]:
    """Return the last entry of each transcript that is not a tool result; one longer than `max_bytes` has no body."""
    listed = msgspec.json.encode(transcripts).decode()
    rows = await tx.all(SQL.latest_entries, transcripts=listed, max_bytes=max_bytes)
    return {transcript: Entry(*entry) for transcript, *entry in rows}


async def load_last_seq(tx: Tx, transcript: int) -> int:
    row = await tx.one(SQL.last_seq, transcript=transcript)
    return row["last_seq"] if row else 0


async def load_open_calls(tx: Tx, transcript: int, first_seq: int) -> list[ToolCall]:
    """Return the tool calls of a run's last answer that have no result yet."""
    rows = await tx.all(SQL.since_last_answer, transcript=transcript, first=first_seq)
    return find_unanswered_calls([message for row in rows if (message := decode_or_none(row)) is not None])


def decode_or_none(row: Row) -> Message | None:
    """Decode an entry; None for a damaged one, so that it cannot block its session.

    `antiphon doctor` reports damaged entries.
    """
    try:
        return decode_message(row["body"])
    except InvalidInput:
        return None


def find_unanswered_calls(messages: Sequence[Message]) -> list[ToolCall]:
    """Return calls without a result, in the order in which they were made."""
    answered = {message.tool_call_id for message in messages if isinstance(message, ToolResult)}
    calls = [
        call for message in messages if isinstance(message, AssistantMessage) for call in message.tool_calls
    ]
    return [call for call in calls if call.id not in answered]


# --- internal entries ---


class _EntryBody(msgspec.Struct, frozen=True):
    """The relevant fields of an entry, even if another program wrote it and it is no valid `Message`."""

    content: Any = None
    provenance: Any = None


_entry_body_decoder = msgspec.json.Decoder(_EntryBody)


def is_internal_entry(role: str, body: str) -> bool:
    """Whether an entry is internal by its content. `Entry.is_internal` also considers its delivery.

    Internal are: answers that are only control tokens, the prompts of announce steps, announcements that were not
    posted, and reports whose delivery was blocked. They stay in the transcript under their numbers, so that it is
    complete; views for people leave them out.
    """
    # Every control token and the kind of announce steps contain an underscore, however they are encoded.
    if role not in {"user", "assistant"} or ("_" not in body and "\\u" not in body and body.isascii()):
        return False
    try:
        entry = _entry_body_decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError):
        return False
    if role == "user":
        kind = _get_provenance_kind(entry.provenance)
        return kind == ANNOUNCE_STEP_KIND or (kind is not None and _is_silence(entry.content))
    return _is_silence(entry.content)


def _get_provenance_kind(provenance: object) -> object:
    """Return the kind of provenance; None for text typed by a person, which is always shown."""
    return cast("dict[str, object]", provenance).get("kind") if isinstance(provenance, dict) else None


def _is_silence(content: object) -> bool:
    text = content if isinstance(content, str) else _extract_text(content)
    return bool(text and len(text) <= MAX_TOKEN_CHARACTERS and text.strip()) and sanitize.is_silence(text)


def _extract_text(content: object) -> str:
    """Return the text of blocks; empty if any block is neither text nor thinking."""
    blocks = cast("list[object]", content) if isinstance(content, list) else []
    texts: list[str] = []
    for each in blocks:
        block = cast("dict[str, object]", each) if isinstance(each, dict) else {}
        text = block.get("text")
        if block.get("type") == "text" and isinstance(text, str):
            texts.append(text)
        elif block.get("type") != "thinking":
            return ""
    return "".join(texts)


def remove_control_tokens(entry: Entry) -> Entry:
    """Return an entry as people see it: an announcement or a reply turn without the control tokens in its text."""
    if entry.role != "assistant" or not (entry.run_id or "").startswith(EXCHANGE_RUN_PREFIXES):
        return entry
    try:
        body = msgspec.json.decode(entry.body, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError):
        return entry
    content = body.get("content")
    if not isinstance(content, list):
        return entry
    blocks = [_clean_text_block(block) for block in cast("list[object]", content)]
    if blocks == content:
        return entry
    return msgspec.structs.replace(entry, body=msgspec.json.encode({**body, "content": blocks}).decode())


def _clean_text_block(block: object) -> object:
    if not isinstance(block, dict):
        return block
    fields = cast("dict[str, object]", block)
    text = fields.get("text")
    if fields.get("type") != "text" or not isinstance(text, str) or not sanitize.has_control_token(text):
        return fields
    return {**fields, "text": sanitize.remove_control_tokens(text)}
