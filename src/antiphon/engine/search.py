"""Searching what was said: the index of words, kept up behind a durable cursor, and finding entries in it.

Nothing is indexed when it is appended. `index` takes the next entries after the cursor and moves it in the same
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
from antiphon.store.queries import Queries
from antiphon.store.words import Match, Vector, folded

SQL = Queries("search")
EVERY = 1.0  # seconds between looks for something to index
BATCH = 100  # entries in one transaction; some ten milliseconds, for which others may have to wait
LITTLE = 2 * BATCH  # entries that a search indexes itself
ENTRY_BYTES = 64 * 1024  # of one entry's text that are indexed
BATCH_CHARS = 512 * 1024  # after which a batch is full, however few its entries
# An index goes through all entries of words that never meet, unless one of the words ends: so every entry has a word
# for the block that it is in, and a search looks through some blocks after the others, as many as there is time for.
BLOCK = 65_536  # entries
BLOCKS = 64  # that are looked through at once, at most
BUDGET = 0.05  # seconds after which no other block is begun
QUERY_CHARS, QUERY_WORDS = 4096, 32
SHORTEST_BEGINNING = 3  # letters; those are in the index as such, fewer would begin too many words
COMPLETIONS = 100  # words that are looked for one by one where a beginning stands for them

_STEP = 25  # bodies in memory at once; one may be an image of megabytes
_REST = 4  # times as long as a batch took: the writer is there for others, all the more when it is busy
_SNIPPET, _BEFORE = 240, 80  # characters, and how many of them stand before the match
_BLANKS = dict.fromkeys(range(32), " ")
_WORD = re.compile(r"[^\W_]+")
_PIECE = re.compile(r'"([^"]*)"|([^\s"]+)')
_BEGINNING = re.compile(rf"[^\W_]{{{SHORTEST_BEGINNING},}}$")


# --- the index ---


class _Block(msgspec.Struct):
    type: str = ""
    text: str = ""


class _Body(msgspec.Struct):
    """What a search needs of an entry; everything else is skipped unread."""

    content: str | list[_Block] = ""


_body = msgspec.json.Decoder(_Body)


async def place(tx: Tx) -> tuple[int, int]:
    """The last entry that is indexed, and the last there is."""
    row = await tx.one(SQL.place)
    assert row is not None
    return row["last"], row["head"]


async def index(tx: Tx, most: int) -> int:
    """Index up to `most` entries after the cursor; the last entry that is indexed then."""
    cursor, _ = await place(tx)
    room = BATCH_CHARS
    while most > 0 and room > 0:
        rows = await tx.all(SQL.unindexed, after=cursor, limit=min(_STEP, most), block=BLOCK)
        if not rows:
            break
        for row in rows:
            words = _words(row)
            if words:
                vector = Vector(words, row["scope"])
                await tx.do(SQL.insert, id=row["id"], words=words, scope=row["scope"], vector=vector)
                room -= len(words)
            cursor = row["id"]
        most -= len(rows)
    await tx.do(SQL.advance, message=cursor)
    return cursor


async def catch_up(store: Store) -> None:
    """Index what is missing, if anything is, leaving most of the writer's time to others."""
    while True:
        last, head = await store.read(place)
        if last >= head:
            return
        began = monotonic()
        if await store.tx(index, BATCH) <= last:
            return  # what was missing is gone
        await asyncio.sleep(_REST * (monotonic() - began))


async def hurry(store: Store, seconds: float) -> bool:
    """Index what is missing for about so long, leaving no time to others; whether there may be more."""
    until = monotonic() + seconds
    while monotonic() < until:
        last, head = await store.read(place)
        if last >= head or await store.tx(index, BATCH) <= last:
            return False
    return True


async def forget(tx: Tx, key: str) -> None:
    """Before the messages of a key are removed: their words."""
    await tx.do(SQL.forget, key=key)


def _words(row: Row) -> str:
    """The text of an entry on one line; nothing for one that is damaged, or that no session leads to."""
    if row["role"] == "compaction" or row["scope"] is None:
        return ""
    try:
        content = _body.decode(row["body"]).content
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        return ""
    if not isinstance(content, str):
        content = " ".join(block.text for block in content if block.type == "text")
    text = content.encode(errors="replace")[:ENTRY_BYTES].decode(errors="ignore")
    return " ".join(text.translate(_BLANKS).split())


# --- finding ---


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """What to look for. Of every group of `scopes` at least one word must fit; no group is no limit."""

    query: str
    limit: int
    scopes: Sequence[Sequence[str]] = ()
    viewer: str | None = None
    """The session whose descendants are marked as such in the rows."""
    keep: Callable[[Row, Match], bool] | None = None
    """A filter for entries that the index finds; the others do not count towards the limit."""


def of_session(session: int) -> str:
    return f"s{session}"


def below_session(session: int) -> str:
    return f"b{session}"


def of_block(block: int) -> str:
    return f"w{block}"


def of_agent(agent_id: str) -> str:
    return f"a{agent_id.encode().hex()}"


SAID = "said"


class Found(NamedTuple):
    """Entries, the latest first; whether nothing was left out on the way to them; and what they were found by."""

    rows: list[Row]
    complete: bool
    match: Match


async def find(tx: Tx, wish: Wish) -> Found:
    """At most `limit` entries.

    The last word may be the beginning of one, but is only taken for it where whole words do not fill the page, and
    while there is time.
    """
    pieces = _pieces(wish.query)
    match = Match("words", [piece.text for piece in pieces], scopes=wish.scopes)
    if not pieces or not all(wish.scopes):
        return Found([], True, match)
    until = monotonic() + BUDGET
    found = await _walk(tx, match, wish, until)
    if len(found.rows) == wish.limit or not found.complete:
        return found
    wider = await _beginning(tx, pieces, wish)
    if wider is None:
        return found
    if monotonic() > until:
        return found._replace(complete=False)
    # Most of the cost of many words is to begin: few wide windows are the cheapest.
    begun = await _walk(tx, wider, wish, until, wide=BLOCKS // 4)
    return begun if begun.complete else _merged(found, begun, wish.limit)


def _merged(found: Found, begun: Found, limit: int) -> Found:
    """Whole words were looked for everywhere, beginnings only as far as there was time."""
    rows = {row["id"]: row for row in (*found.rows, *begun.rows)}
    newest = sorted(rows.values(), key=lambda row: -row["id"])
    return Found(newest[:limit], False, begun.match)


async def _walk(tx: Tx, match: Match, wish: Wish, until: float, wide: int = 1) -> Found:
    """Backwards in widening windows, the first so many blocks, until the page is full, all was seen or time is up."""
    upto, _ = await place(tx)
    rows: list[Row] = []
    while True:
        began = monotonic()
        newest = upto // BLOCK
        oldest = max(0, newest + 1 - wide)
        blocks = [of_block(n) for n in range(newest, oldest - 1, -1)]
        here = msgspec.structs.replace(match, scopes=[*match.scopes, blocks])
        after = oldest * BLOCK - 1
        left = wish.limit - len(rows)
        found = await tx.all(SQL.find, match=here, after=after, upto=upto, limit=left, viewer=wish.viewer)
        rows += found if wish.keep is None else [row for row in found if wish.keep(row, match)]
        is_page = len(found) == left
        if len(rows) == wish.limit or (oldest == 0 and not is_page):
            return Found(rows, True, match)
        now = monotonic()
        if now > until:
            return Found(rows, False, match)
        if is_page:  # some did not count: continue after the last one
            upto = found[-1]["id"] - 1
            continue
        wide = _wider(wide, (now - began) * BLOCK / (upto - after), until - now)
        upto = after


def _wider(wide: int, each: float, left: float) -> int:
    """Twice as many blocks, if they end in time though each of them should take twice as long."""
    fitting = int(left / (2 * each)) if each else BLOCKS
    return max(1, min(2 * wide, fitting, BLOCKS))


class _Piece(NamedTuple):
    """A word or a quoted phrase, as it was written. The tokenizer takes it apart as it did the texts."""

    text: str
    quoted: bool


def _pieces(query: str) -> list[_Piece]:
    """What a query asks for, with nothing left in it that is special to the index; of very many words the first."""
    text = query[:QUERY_CHARS].encode(errors="replace").decode().translate(_BLANKS)
    starts = [word.start() for word in _WORD.finditer(text)]
    if len(starts) > QUERY_WORDS:
        text = text[: starts[QUERY_WORDS]]
    pieces = [_Piece(found[1] or found[2] or "", found[2] is None) for found in _PIECE.finditer(text)]
    return [piece for piece in pieces if _WORD.search(piece.text)]


async def _beginning(tx: Tx, pieces: Sequence[_Piece], wish: Wish) -> Match | None:
    """A match in which the last word stands for all that begin so; None where that would find nothing new.

    The index can do that by itself, but then gathers every entry of every such word before it gives the first: so
    it is only left to it where there are very many such words, or few letters, for which it is prepared.
    """
    *others, last = pieces
    word = None if last.quoted else _BEGINNING.search(last.text)
    terms = await _completions(tx, word[0]) if word else []
    if word is None or not terms or terms == [word[0].lower()]:
        return None
    if len(terms) > COMPLETIONS:
        return Match("words", [piece.text for piece in pieces], beginning=True, scopes=wish.scopes)
    either = [f"{last.text[: word.start()]}{term}" for term in terms]
    return Match("words", [piece.text for piece in others], either=either, scopes=wish.scopes)


async def _completions(tx: Tx, word: str) -> list[str]:
    """Terms that begin so. The tokenizer strips some letters of their marks and leaves others: either is looked for."""
    found: dict[str, None] = {}
    for least in dict.fromkeys([word.lower(), folded(word)]):
        rows = await tx.all(SQL.completions, least=least, most=f"{least}\U0010ffff", limit=COMPLETIONS + 1)
        found |= dict.fromkeys(row["term"] for row in rows)
    return list(found)


def snippet(text: str, at: int) -> str:
    """What stands around a place in a text."""
    if len(text) <= _SNIPPET:
        return text
    width = _SNIPPET - 2
    start = max(0, min(at - _BEFORE, len(text) - width))
    cut = text[start : start + width].strip()
    return f"{'…' if start else ''}{cut}{'…' if start + width < len(text) else ''}"
