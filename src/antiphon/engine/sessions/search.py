"""Full-text search of messages: the index, which follows the transcripts with a durable cursor, and queries.

Entries are not indexed when they are appended. `index_entries` indexes the next entries after the cursor and advances
it in the same commit, so a crash repeats or skips none. That requires ids to become visible in order: SQLite has one
writer at a time, and a message gets its id inside that writer's transaction. PostgreSQL assigns ids before the commit,
so there an append records which entries are to be indexed, and the cursor stays before the first such record.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from time import monotonic
from typing import NamedTuple

import msgspec

from antiphon.store import Row, Store, Tx
from antiphon.store.fulltext import FulltextQuery, FulltextVector, fold_text
from antiphon.store.queries import Queries

SQL = Queries("search")
INDEX_INTERVAL_SECONDS = 1.0
INDEX_BATCH_ENTRIES = 100  # per transaction; takes some ten milliseconds, during which other writers may wait
MAX_ENTRIES_INDEXED_BY_SEARCH = 2 * INDEX_BATCH_ENTRIES  # before it looks for matches
MAX_INDEXED_BYTES_PER_ENTRY = 64 * 1024
MAX_INDEX_BATCH_CHARACTERS = 512 * 1024  # a batch is full after this, however few its entries
# For words that never occur together, an index scans all their entries until one list ends. So every entry has a word
# for its block, and a search scans a few blocks at a time, as many as its time budget allows.
ENTRIES_PER_BLOCK = 65_536
MAX_BLOCKS_PER_WINDOW = 64
SEARCH_BUDGET_SECONDS = 0.05  # no further block is started after this
MAX_QUERY_CHARACTERS, MAX_QUERY_WORDS = 4096, 32
MIN_PREFIX_CHARACTERS = 3  # prefixes of this length are indexed; shorter ones match too many words
MAX_COMPLETIONS = 100  # of a prefix that are searched as separate words

_INDEX_FETCH_ROWS = 25  # bodies in memory at once; one may contain megabytes of images
_INDEX_REST_FACTOR = 4  # length of the pause after a batch, relative to its duration, for other writers
_SNIPPET_CHARACTERS, _SNIPPET_LEAD_CHARACTERS = 240, 80  # the whole snippet, and its part before the match
_CONTROL_TO_SPACE_TABLE = dict.fromkeys(range(32), " ")
_WORD_PATTERN = re.compile(r"[^\W_]+")
_PIECE_PATTERN = re.compile(r'"([^"]*)"|([^\s"]+)')
_PREFIX_PATTERN = re.compile(rf"[^\W_]{{{MIN_PREFIX_CHARACTERS},}}$")


# --- the index ---


class _IndexedBlock(msgspec.Struct):
    type: str = ""
    text: str = ""


class _IndexedBody(msgspec.Struct):
    """The fields of an entry that search needs; all others are skipped when decoding."""

    content: str | list[_IndexedBlock] = ""


_body_decoder = msgspec.json.Decoder(_IndexedBody)


async def load_index_position(tx: Tx) -> tuple[int, int]:
    """Return the ids of the last indexed entry and of the last entry."""
    row = await tx.one(SQL.index_position)
    assert row is not None
    return row["last"], row["head"]


async def index_entries(tx: Tx, maximum: int) -> int:
    """Index up to `maximum` entries after the cursor. Returns the id of the last indexed entry."""
    cursor, _ = await load_index_position(tx)
    room = MAX_INDEX_BATCH_CHARACTERS
    while maximum > 0 and room > 0:
        rows = await tx.all(
            SQL.unindexed, after=cursor, limit=min(_INDEX_FETCH_ROWS, maximum), block=ENTRIES_PER_BLOCK
        )
        if not rows:
            break
        for row in rows:
            words = _extract_words(row)
            if words:
                vector = FulltextVector(words, row["scope"])
                await tx.do(SQL.insert, id=row["id"], words=words, scope=row["scope"], vector=vector)
                room -= len(words)
            cursor = row["id"]
        maximum -= len(rows)
    await tx.do(SQL.advance, message=cursor)
    return cursor


async def catch_up_index(store: Store) -> None:
    """Index the entries that are missing now, leaving most of the writer's time to others.

    Entries that are added meanwhile are left for the next time: following them one by one would cost a commit for each.
    """
    last, head = await store.read(load_index_position)
    while last < head:
        began = monotonic()
        indexed = await store.tx(index_entries, INDEX_BATCH_ENTRIES)
        if indexed <= last:
            return  # the missing entries were deleted
        last = indexed
        if last < head:
            await asyncio.sleep(_INDEX_REST_FACTOR * (monotonic() - began))


async def index_for_seconds(store: Store, seconds: float) -> bool:
    """Index missing entries without pauses for about `seconds`. Returns whether there may be more."""
    until = monotonic() + seconds
    while monotonic() < until:
        last, head = await store.read(load_index_position)
        if last >= head or await store.tx(index_entries, INDEX_BATCH_ENTRIES) <= last:
            return False
    return True


async def delete_from_index(tx: Tx, key: str) -> None:
    """Remove the messages of a key from the index; call this before they are deleted."""
    await tx.do(SQL.delete_of_session, key=key)


def _extract_words(row: Row) -> str:
    """Return the text of an entry on one line; empty if it is damaged or belongs to no session."""
    if row["role"] == "compaction" or row["scope"] is None:
        return ""
    try:
        content = _body_decoder.decode(row["body"]).content
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        return ""
    if not isinstance(content, str):
        content = " ".join(block.text for block in content if block.type == "text")
    text = content.encode(errors="replace")[:MAX_INDEXED_BYTES_PER_ENTRY].decode(errors="ignore")
    return " ".join(text.translate(_CONTROL_TO_SPACE_TABLE).split())


# --- queries ---


class SearchQuery(msgspec.Struct, frozen=True, kw_only=True):
    """A search request. An entry must match at least one word of every group in `scopes`."""

    query: str
    limit: int
    scopes: Sequence[Sequence[str]] = ()
    viewer: str | None = None
    """The session whose descendants are marked in the rows."""
    can_match: Callable[[Row, FulltextQuery], bool] | None = None
    """A filter for entries that the index finds; rejected ones do not count towards the limit."""


def make_session_scope(session: int) -> str:
    return f"s{session}"


def make_descendants_scope(session: int) -> str:
    return f"b{session}"


def make_block_scope(block: int) -> str:
    return f"w{block}"


def make_agent_scope(agent_id: str) -> str:
    return f"a{agent_id.encode().hex()}"


MESSAGE_SCOPE = "said"


class SearchResult(NamedTuple):
    """Matching entries, newest first; whether the search was complete; and the query that found them."""

    rows: list[Row]
    complete: bool
    match: FulltextQuery


async def find_entries(tx: Tx, request: SearchQuery) -> SearchResult:
    """Return at most `limit` matching entries, newest first.

    The last word may also match as a prefix, but only if whole words do not fill the page and time is left.
    """
    pieces = _parse_query(request.query)
    match = FulltextQuery("words", [piece.text for piece in pieces], scopes=request.scopes)
    if not pieces or not all(request.scopes):
        return SearchResult([], True, match)
    until = monotonic() + SEARCH_BUDGET_SECONDS
    found = await _search_backwards(tx, match, request, until)
    if len(found.rows) == request.limit or not found.complete:
        return found
    wider = await _build_prefix_match(tx, pieces, request)
    if wider is None:
        return found
    if monotonic() > until:
        return found._replace(complete=False)
    # For many words, starting a query costs most, so a few wide windows are cheapest.
    begun = await _search_backwards(tx, wider, request, until, wide=MAX_BLOCKS_PER_WINDOW // 4)
    return begun if begun.complete else _merge_results(found, begun, request.limit)


def _merge_results(found: SearchResult, begun: SearchResult, limit: int) -> SearchResult:
    """Merge a complete search for whole words with an incomplete one for prefixes."""
    rows = {row["id"]: row for row in (*found.rows, *begun.rows)}
    newest = sorted(rows.values(), key=lambda row: -row["id"])
    return SearchResult(newest[:limit], False, begun.match)


async def _search_backwards(
    tx: Tx, match: FulltextQuery, request: SearchQuery, until: float, wide: int = 1
) -> SearchResult:
    """Search backwards in growing windows, starting with `wide` blocks.

    Stops when the page is full, everything was searched or time is up.
    """
    upto, _ = await load_index_position(tx)
    rows: list[Row] = []
    while True:
        began = monotonic()
        newest = upto // ENTRIES_PER_BLOCK
        oldest = max(0, newest + 1 - wide)
        blocks = [make_block_scope(n) for n in range(newest, oldest - 1, -1)]
        here = msgspec.structs.replace(match, scopes=[*match.scopes, blocks])
        after = oldest * ENTRIES_PER_BLOCK - 1
        left = request.limit - len(rows)
        found = await tx.all(SQL.find, match=here, after=after, upto=upto, limit=left, viewer=request.viewer)
        rows += (
            found if request.can_match is None else [row for row in found if request.can_match(row, match)]
        )
        is_page = len(found) == left
        if len(rows) == request.limit or (oldest == 0 and not is_page):
            return SearchResult(rows, True, match)
        now = monotonic()
        if now > until:
            return SearchResult(rows, False, match)
        if is_page:  # some were filtered out: continue after the last one
            upto = found[-1]["id"] - 1
            continue
        wide = _widen_window(wide, (now - began) * ENTRIES_PER_BLOCK / (upto - after), until - now)
        upto = after


def _widen_window(wide: int, each: float, left: float) -> int:
    """Return up to twice as many blocks, as long as they fit into the time left at twice the cost per block."""
    fitting = int(left / (2 * each)) if each else MAX_BLOCKS_PER_WINDOW
    return max(1, min(2 * wide, fitting, MAX_BLOCKS_PER_WINDOW))


class _QueryPiece(NamedTuple):
    """A word or quoted phrase as written. The tokenizer splits it in the same way as indexed texts."""

    text: str
    quoted: bool


def _parse_query(query: str) -> list[_QueryPiece]:
    """Split a query into words and phrases, without index syntax and limited to `MAX_QUERY_WORDS`."""
    text = query[:MAX_QUERY_CHARACTERS].encode(errors="replace").decode().translate(_CONTROL_TO_SPACE_TABLE)
    starts = [word.start() for word in _WORD_PATTERN.finditer(text)]
    if len(starts) > MAX_QUERY_WORDS:
        text = text[: starts[MAX_QUERY_WORDS]]
    pieces = [
        _QueryPiece(found[1] or found[2] or "", found[2] is None) for found in _PIECE_PATTERN.finditer(text)
    ]
    return [piece for piece in pieces if _WORD_PATTERN.search(piece.text)]


async def _build_prefix_match(
    tx: Tx, pieces: Sequence[_QueryPiece], request: SearchQuery
) -> FulltextQuery | None:
    """Return a query in which the last word is a prefix; None if that would find nothing new.

    The index supports prefixes itself, but then collects all entries of all such words before it returns the first. So
    its own prefix search is only used if more than `MAX_COMPLETIONS` words begin with the prefix.
    """
    *others, last = pieces
    word = None if last.quoted else _PREFIX_PATTERN.search(last.text)
    terms = await _load_completions(tx, word[0]) if word else []
    if word is None or not terms or terms == [word[0].lower()]:
        return None
    if len(terms) > MAX_COMPLETIONS:
        return FulltextQuery("words", [piece.text for piece in pieces], beginning=True, scopes=request.scopes)
    either = [f"{last.text[: word.start()]}{term}" for term in terms]
    return FulltextQuery("words", [piece.text for piece in others], either=either, scopes=request.scopes)


async def _load_completions(tx: Tx, word: str) -> list[str]:
    """Return indexed terms with this prefix, with and without diacritics: the tokenizer strips only some of them."""
    found: dict[str, None] = {}
    for first in dict.fromkeys([word.lower(), fold_text(word)]):
        rows = await tx.all(
            SQL.completions, least=first, most=f"{first}\U0010ffff", limit=MAX_COMPLETIONS + 1
        )
        found |= dict.fromkeys(row["term"] for row in rows)
    return list(found)


def cut_snippet(text: str, at: int) -> str:
    """Return the part of a text around a position."""
    if len(text) <= _SNIPPET_CHARACTERS:
        return text
    width = _SNIPPET_CHARACTERS - 2
    start = max(0, min(at - _SNIPPET_LEAD_CHARACTERS, len(text) - width))
    cut = text[start : start + width].strip()
    return f"{'…' if start else ''}{cut}{'…' if start + width < len(text) else ''}"
