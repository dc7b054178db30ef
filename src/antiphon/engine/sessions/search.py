"""Searching what was said: the index of words, kept up behind a durable cursor, and finding entries in it.

Nothing is indexed when it is appended. `index_entries` takes the next entries after the cursor and moves it in the same
commit, so a crash repeats or skips none. That needs ids that become visible in their order: SQLite has one writer
at a time, and a message gets its id inside that writer's transaction. PostgreSQL gives out ids before the commit, so
there an append notes down what is to be indexed, and the cursor stands before the first of these notes.
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
INDEX_INTERVAL_SECONDS = 1.0  # seconds between looks for something to index
INDEX_BATCH_ENTRIES = (
    100  # entries in one transaction; some ten milliseconds, for which others may have to wait
)
MAX_ENTRIES_INDEXED_BY_SEARCH = 2 * INDEX_BATCH_ENTRIES  # entries that a search indexes itself
MAX_INDEXED_BYTES_PER_ENTRY = 64 * 1024  # of one entry's text that are indexed
MAX_INDEX_BATCH_CHARACTERS = 512 * 1024  # after which a batch is full, however few its entries
# An index goes through all entries of words that never meet, unless one of the words ends: so every entry has a word
# for the block that it is in, and a search looks through some blocks after the others, as many as there is time for.
ENTRIES_PER_BLOCK = 65_536  # entries
MAX_BLOCKS_PER_WINDOW = 64  # that are looked through at once, at most
SEARCH_BUDGET_SECONDS = 0.05  # seconds after which no other block is begun
MAX_QUERY_CHARACTERS, MAX_QUERY_WORDS = 4096, 32
MIN_PREFIX_CHARACTERS = 3  # letters; those are in the index as such, fewer would begin too many words
MAX_COMPLETIONS = 100  # words that are looked for one by one where a beginning stands for them

_INDEX_FETCH_ROWS = 25  # bodies in memory at once; one may be an image of megabytes
_INDEX_REST_FACTOR = (
    4  # times as long as a batch took: the writer is there for others, all the more when it is busy
)
_SNIPPET_CHARACTERS, _SNIPPET_LEAD_CHARACTERS = (
    240,
    80,
)  # characters, and how many of them stand before the match
_CONTROL_TO_SPACE_TABLE = dict.fromkeys(range(32), " ")
_WORD_PATTERN = re.compile(r"[^\W_]+")
_PIECE_PATTERN = re.compile(r'"([^"]*)"|([^\s"]+)')
_PREFIX_PATTERN = re.compile(rf"[^\W_]{{{MIN_PREFIX_CHARACTERS},}}$")


# --- the index ---


class _IndexedBlock(msgspec.Struct):
    type: str = ""
    text: str = ""


class _IndexedBody(msgspec.Struct):
    """What a search needs of an entry; everything else is skipped unread."""

    content: str | list[_IndexedBlock] = ""


_body_decoder = msgspec.json.Decoder(_IndexedBody)


async def load_index_position(tx: Tx) -> tuple[int, int]:
    """The last entry that is indexed, and the last there is."""
    row = await tx.one(SQL.place)
    assert row is not None
    return row["last"], row["head"]


async def index_entries(tx: Tx, most: int) -> int:
    """Index up to `most` entries after the cursor; the last entry that is indexed then."""
    cursor, _ = await load_index_position(tx)
    room = MAX_INDEX_BATCH_CHARACTERS
    while most > 0 and room > 0:
        rows = await tx.all(
            SQL.unindexed, after=cursor, limit=min(_INDEX_FETCH_ROWS, most), block=ENTRIES_PER_BLOCK
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
        most -= len(rows)
    await tx.do(SQL.advance, message=cursor)
    return cursor


async def catch_up_index(store: Store) -> None:
    """Index what is missing, if anything is, leaving most of the writer's time to others."""
    while True:
        last, head = await store.read(load_index_position)
        if last >= head:
            return
        began = monotonic()
        if await store.tx(index_entries, INDEX_BATCH_ENTRIES) <= last:
            return  # what was missing is gone
        await asyncio.sleep(_INDEX_REST_FACTOR * (monotonic() - began))


async def index_for_seconds(store: Store, seconds: float) -> bool:
    """Index what is missing for about so long, leaving no time to others; whether there may be more."""
    until = monotonic() + seconds
    while monotonic() < until:
        last, head = await store.read(load_index_position)
        if last >= head or await store.tx(index_entries, INDEX_BATCH_ENTRIES) <= last:
            return False
    return True


async def delete_from_index(tx: Tx, key: str) -> None:
    """Before the messages of a key are removed: their words."""
    await tx.do(SQL.forget, key=key)


def _extract_words(row: Row) -> str:
    """The text of an entry on one line; nothing for one that is damaged, or that no session leads to."""
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


# --- finding ---


class SearchQuery(msgspec.Struct, frozen=True, kw_only=True):
    """What to look for. Of every group of `scopes` at least one word must fit; no group is no limit."""

    query: str
    limit: int
    scopes: Sequence[Sequence[str]] = ()
    viewer: str | None = None
    """The session whose descendants are marked as such in the rows."""
    keep: Callable[[Row, FulltextQuery], bool] | None = None
    """A filter for entries that the index finds; the others do not count towards the limit."""


def make_session_scope(session: int) -> str:
    return f"s{session}"


def make_descendants_scope(session: int) -> str:
    return f"b{session}"


def make_block_scope(block: int) -> str:
    return f"w{block}"


def make_agent_scope(agent_id: str) -> str:
    return f"a{agent_id.encode().hex()}"


SAID_SCOPE = "said"


class SearchResult(NamedTuple):
    """Entries, the latest first; whether nothing was left out on the way to them; and what they were found by."""

    rows: list[Row]
    complete: bool
    match: FulltextQuery


async def find_entries(tx: Tx, wish: SearchQuery) -> SearchResult:
    """At most `limit` entries.

    The last word may be the beginning of one, but is only taken for it where whole words do not fill the page, and
    while there is time.
    """
    pieces = _parse_query(wish.query)
    match = FulltextQuery("words", [piece.text for piece in pieces], scopes=wish.scopes)
    if not pieces or not all(wish.scopes):
        return SearchResult([], True, match)
    until = monotonic() + SEARCH_BUDGET_SECONDS
    found = await _search_backwards(tx, match, wish, until)
    if len(found.rows) == wish.limit or not found.complete:
        return found
    wider = await _build_prefix_match(tx, pieces, wish)
    if wider is None:
        return found
    if monotonic() > until:
        return found._replace(complete=False)
    # Most of the cost of many words is to begin: few wide windows are the cheapest.
    begun = await _search_backwards(tx, wider, wish, until, wide=MAX_BLOCKS_PER_WINDOW // 4)
    return begun if begun.complete else _merge_results(found, begun, wish.limit)


def _merge_results(found: SearchResult, begun: SearchResult, limit: int) -> SearchResult:
    """Whole words were looked for everywhere, beginnings only as far as there was time."""
    rows = {row["id"]: row for row in (*found.rows, *begun.rows)}
    newest = sorted(rows.values(), key=lambda row: -row["id"])
    return SearchResult(newest[:limit], False, begun.match)


async def _search_backwards(
    tx: Tx, match: FulltextQuery, wish: SearchQuery, until: float, wide: int = 1
) -> SearchResult:
    """Backwards in widening windows, the first so many blocks, until the page is full, all was seen or time is up."""
    upto, _ = await load_index_position(tx)
    rows: list[Row] = []
    while True:
        began = monotonic()
        newest = upto // ENTRIES_PER_BLOCK
        oldest = max(0, newest + 1 - wide)
        blocks = [make_block_scope(n) for n in range(newest, oldest - 1, -1)]
        here = msgspec.structs.replace(match, scopes=[*match.scopes, blocks])
        after = oldest * ENTRIES_PER_BLOCK - 1
        left = wish.limit - len(rows)
        found = await tx.all(SQL.find, match=here, after=after, upto=upto, limit=left, viewer=wish.viewer)
        rows += found if wish.keep is None else [row for row in found if wish.keep(row, match)]
        is_page = len(found) == left
        if len(rows) == wish.limit or (oldest == 0 and not is_page):
            return SearchResult(rows, True, match)
        now = monotonic()
        if now > until:
            return SearchResult(rows, False, match)
        if is_page:  # some did not count: continue after the last one
            upto = found[-1]["id"] - 1
            continue
        wide = _widen_window(wide, (now - began) * ENTRIES_PER_BLOCK / (upto - after), until - now)
        upto = after


def _widen_window(wide: int, each: float, left: float) -> int:
    """Twice as many blocks, if they end in time though each of them should take twice as long."""
    fitting = int(left / (2 * each)) if each else MAX_BLOCKS_PER_WINDOW
    return max(1, min(2 * wide, fitting, MAX_BLOCKS_PER_WINDOW))


class _QueryPiece(NamedTuple):
    """A word or a quoted phrase, as it was written. The tokenizer takes it apart as it did the texts."""

    text: str
    quoted: bool


def _parse_query(query: str) -> list[_QueryPiece]:
    """What a query asks for, with nothing left in it that is special to the index; of very many words the first."""
    text = query[:MAX_QUERY_CHARACTERS].encode(errors="replace").decode().translate(_CONTROL_TO_SPACE_TABLE)
    starts = [word.start() for word in _WORD_PATTERN.finditer(text)]
    if len(starts) > MAX_QUERY_WORDS:
        text = text[: starts[MAX_QUERY_WORDS]]
    pieces = [
        _QueryPiece(found[1] or found[2] or "", found[2] is None) for found in _PIECE_PATTERN.finditer(text)
    ]
    return [piece for piece in pieces if _WORD_PATTERN.search(piece.text)]


async def _build_prefix_match(
    tx: Tx, pieces: Sequence[_QueryPiece], wish: SearchQuery
) -> FulltextQuery | None:
    """A match in which the last word stands for all that begin so; None where that would find nothing new.

    The index can do that by itself, but then gathers every entry of every such word before it gives the first: so
    it is only left to it where there are very many such words, or few letters, for which it is prepared.
    """
    *others, last = pieces
    word = None if last.quoted else _PREFIX_PATTERN.search(last.text)
    terms = await _load_completions(tx, word[0]) if word else []
    if word is None or not terms or terms == [word[0].lower()]:
        return None
    if len(terms) > MAX_COMPLETIONS:
        return FulltextQuery("words", [piece.text for piece in pieces], beginning=True, scopes=wish.scopes)
    either = [f"{last.text[: word.start()]}{term}" for term in terms]
    return FulltextQuery("words", [piece.text for piece in others], either=either, scopes=wish.scopes)


async def _load_completions(tx: Tx, word: str) -> list[str]:
    """Terms that begin so. The tokenizer strips some letters of their marks and leaves others: either is looked for."""
    found: dict[str, None] = {}
    for least in dict.fromkeys([word.lower(), fold_text(word)]):
        rows = await tx.all(
            SQL.completions, least=least, most=f"{least}\U0010ffff", limit=MAX_COMPLETIONS + 1
        )
        found |= dict.fromkeys(row["term"] for row in rows)
    return list(found)


def cut_snippet(text: str, at: int) -> str:
    """What stands around a place in a text."""
    if len(text) <= _SNIPPET_CHARACTERS:
        return text
    width = _SNIPPET_CHARACTERS - 2
    start = max(0, min(at - _SNIPPET_LEAD_CHARACTERS, len(text) - width))
    cut = text[start : start + width].strip()
    return f"{'…' if start else ''}{cut}{'…' if start + width < len(text) else ''}"
