"""Reconciles a client's copy of a conversation with the transcript, and finds calls of the client's own tools."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import TypeAlias

from antiphon.engine.runs.context import ENTRIES_PER_PAGE
from antiphon.engine.runs.run_queue import RunOptions, decode_options
from antiphon.engine.sessions import transcripts
from antiphon.messages import AssistantMessage, CompactionEntry, TextBlock, ToolCall, ToolResult, UserMessage
from antiphon.store import Row, Tx
from antiphon.store.queries import Queries

SQL = Queries("transcripts")
RUNS_SQL = Queries("runs")
MAX_ENTRIES_COMPARED = 1000  # entries of a session compared with the earlier messages of a request
MAX_BYTES_COMPARED = 8 * 2**20
MAX_ALIGNMENT_ATTEMPTS = 32  # positions in the client's messages tried as the start of the compared entries


async def load_client_calls(tx: Tx, run_id: str) -> list[ToolCall]:
    """Return the calls of client-side tools that a run ended with."""
    row = await tx.one(RUNS_SQL.last_answer, id=run_id)
    options = decode_options(row["options"]) if row else None
    answer = transcripts.decode_or_none(row) if row else None
    if options is None or not isinstance(answer, AssistantMessage):
        return []
    return [call for call in answer.tool_calls if call.name in options.tool_names]


async def find_unknown_messages(
    tx: Tx, transcript: int, options: RunOptions
) -> Sequence[UserMessage | AssistantMessage | ToolResult]:
    """Return the earlier messages of a request, starting with the first one that the session lacks.

    Once they are appended, the session has all of them in the client's order. Other entries between them (tool steps,
    messages of other clients) are ignored. An answer that differs from the session's is added with its question.
    """
    if not options.earlier:
        return []
    earlier = options.earlier
    identities = [_identify(message) for message in earlier]
    entries, complete = await _load_latest_entries(tx, transcript)
    count = _count_known(identities, entries, complete=complete)
    if (
        0 < count < len(earlier)
        and isinstance(earlier[count], AssistantMessage)
        and identities[count - 1] not in entries[-1]
    ):
        # Without its question, a differing answer would be read as part of the latest one.
        while count and isinstance(earlier[count - 1], UserMessage):
            count -= 1
    return earlier[count:]


MessageIdentity: TypeAlias = tuple[str, str | bytes]


def _count_known(
    earlier: Sequence[MessageIdentity], known: Sequence[frozenset[MessageIdentity]], *, complete: bool
) -> int:
    """Count the leading messages that occur among the entries, in this order.

    If the session has older entries than these, messages before the first match are assumed to be among the older ones.
    """
    if complete:
        return _count_in_order(earlier, known)
    anywhere = frozenset[MessageIdentity]().union(*known)
    starts = (at for at, identity in enumerate(earlier) if identity in anywhere)
    best = 0
    for start in islice(starts, MAX_ALIGNMENT_ATTEMPTS):
        best = max(best, start + _count_in_order(earlier[start:], known))
        if best == len(earlier):
            break
    return best


def _count_in_order(earlier: Sequence[MessageIdentity], known: Sequence[frozenset[MessageIdentity]]) -> int:
    count = 0
    for entry in known:
        if count < len(earlier) and earlier[count] in entry:
            count += 1
    return count


async def _load_latest_entries(tx: Tx, transcript: int) -> tuple[list[frozenset[MessageIdentity]], bool]:
    """Return the identities of the latest entries, oldest first, and whether these are all entries."""
    rows: list[Row] = []
    before, size, complete = transcripts.AFTER_LAST_SEQ, 0, False
    while not complete and len(rows) < MAX_ENTRIES_COMPARED and size < MAX_BYTES_COMPARED:
        page = await tx.all(SQL.tail, transcript=transcript, since=1, before=before, limit=ENTRIES_PER_PAGE)
        rows += page
        complete = len(page) < ENTRIES_PER_PAGE
        size += sum(len(row["body"]) for row in page)
        before = page[-1]["seq"] if page else before
    return _identify_entries(reversed(rows)), complete


def _identify_entries(rows: Iterable[Row]) -> list[frozenset[MessageIdentity]]:
    entries: list[frozenset[MessageIdentity]] = []
    run: int | None = None
    steps = hashlib.sha256()
    for row in rows:
        message = transcripts.decode_or_none(row)
        if message is None:
            continue
        if row["run"] is None or row["run"] != run:
            run, steps = row["run"], hashlib.sha256()
        if isinstance(message, AssistantMessage):
            steps.update(_remove_whitespace(message.text))
            # A client that received the steps of a run as a stream has them as one text.
            entries.append(
                frozenset(
                    [
                        _identify_answer(message.text),
                        ("answer", steps.digest()),
                        *(("call", call.id) for call in message.tool_calls),
                    ]
                )
            )
        elif not isinstance(message, CompactionEntry):
            entries.append(frozenset([_identify(message)]))
    return entries


def _identify(message: UserMessage | AssistantMessage | ToolResult) -> MessageIdentity:
    """Return the identity of a client's message. One tool call suffices, since the model chose the ids."""
    match message:
        case ToolResult():
            return "result", message.tool_call_id
        case AssistantMessage():
            calls = message.tool_calls
            return ("call", calls[0].id) if calls else _identify_answer(message.text)
        case UserMessage():
            blocks = (
                [TextBlock(text=message.content)] if isinstance(message.content, str) else message.content
            )
            return "user", "\n".join(b.text if isinstance(b, TextBlock) else b.data for b in blocks).strip()


def _identify_answer(text: str) -> MessageIdentity:
    return "answer", hashlib.sha256(_remove_whitespace(text)).digest()


def _remove_whitespace(text: str) -> bytes:
    """Return a text without white space, which clients trim and which separates the steps of an answer."""
    return "".join(text.split()).encode(errors="surrogatepass")
