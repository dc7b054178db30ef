"""Searching what was said: the index of words, kept up behind a durable cursor, and finding entries in it.

Nothing is indexed when it is appended. `index` takes the next entries after the cursor and moves it in the same
commit, so a crash repeats or skips none. That needs ids that become visible in their order: SQLite has one writer
at a time, and a message gets its id inside that writer's transaction. PostgreSQL gives out ids before the commit, so
an earlier one may appear after a later one was indexed; there the cursor must not pass the oldest transaction that
is still open (a column with `pg_current_xact_id()`, read up to `pg_snapshot_xmin(pg_current_snapshot())`).
"""

from __future__ import annotations

import asyncio
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic
from typing import NamedTuple

import msgspec

from antiphon.store import Row, Store, Tx
from antiphon.store.queries import Queries

SQL = Queries("search")
EVERY = 1.0  # seconds between looks for something to index
BATCH = 100  # entries in one transaction; some ten milliseconds, for which others may have to wait
LITTLE = 2 * BATCH  # entries that a search indexes itself
ENTRY_BYTES = 64 * 1024  # of one entry's text that are indexed
BATCH_CHARS = 512 * 1024  # after which a batch is full, however few its entries
WINDOW = 100_000  # entries a search looks through before it asks whether there is time for more
BUDGET = 0.15  # seconds; words that are everywhere but never together would take as long as there are entries
QUERY_CHARS, QUERY_WORDS = 4096, 32
SHORTEST_BEGINNING = 3  # letters; those are in the index as such, fewer would begin too many words
COMPLETIONS = 100  # words that are looked for one by one where a beginning stands for them

_STEP = 25  # bodies in memory at once; one may be an image of megabytes
_REST = 4  # times as long as a batch took: the writer is there for others, all the more when it is busy
_SNIPPET, _BEFORE = 240, 80  # characters, and how many of them stand before the match
_BLANKS = dict.fromkeys(range(32), " ")
_MARKS = {2: None, 3: None}
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
        rows = await tx.all(SQL.unindexed, after=cursor, limit=min(_STEP, most))
        if not rows:
            break
        for row in rows:
            words = _words(row)
            if words:
                await tx.do(SQL.insert, id=row["id"], words=words, scope=row["scope"])
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
        await store.tx(index, BATCH)
        await asyncio.sleep(_REST * (monotonic() - began))


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What to look for. Of every group of `scopes` at least one word must fit; no group is no limit."""

    query: str
    limit: int
    scopes: Sequence[Sequence[str]] = ()
    viewer: str | None = None
    """The session whose descendants are marked as such in the rows."""


def of_session(session: int) -> str:
    return f"s{session}"


def below_session(session: int) -> str:
    return f"b{session}"


def of_agent(agent_id: str) -> str:
    return f"a{agent_id.encode().hex()}"


SAID = "said"


async def find(tx: Tx, wish: Wish) -> tuple[list[Row], bool]:
    """At most `limit` entries, the latest first, and whether nothing was left out on the way to them.

    The last word may be the beginning of one, but is only taken for it where whole words do not fill the page.
    """
    pieces = _pieces(wish.query)
    if not pieces or not all(wish.scopes):
        return [], True
    rows, complete = await _walk(tx, _phrases(pieces), wish)
    if len(rows) < wish.limit and complete and (words := await _beginning(tx, pieces)):
        return await _walk(tx, words, wish)
    return rows, complete


async def _walk(tx: Tx, words: str, wish: Wish) -> tuple[list[Row], bool]:
    """Backwards in widening windows, until the page is full, everything was seen or the time is up."""
    match = " AND ".join(
        [f"words : ({words})", *(f"scope : ({' OR '.join(any_of)})" for any_of in wish.scopes)]
    )
    upto, _ = await place(tx)
    width, until = WINDOW, monotonic() + BUDGET
    rows: list[Row] = []
    while True:
        after = max(0, upto - width)
        left = wish.limit - len(rows)
        rows += await tx.all(SQL.find, match=match, after=after, upto=upto, limit=left, viewer=wish.viewer)
        if after == 0 or len(rows) == wish.limit:
            return rows, True
        if monotonic() > until:
            return rows, False
        upto, width = after, 8 * width


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


def _phrases(pieces: Sequence[_Piece]) -> str:
    return " ".join(f'"{piece.text}"' for piece in pieces)


async def _beginning(tx: Tx, pieces: Sequence[_Piece]) -> str | None:
    """The expression in which the last word stands for all that begin so; None where that would find nothing new.

    The index can do that by itself, but then gathers every entry of every such word before it gives the first: so
    it is only left to it where there are very many such words, or few letters, for which it is prepared.
    """
    *others, last = pieces
    word = None if last.quoted else _BEGINNING.search(last.text)
    terms = await _completions(tx, word[0]) if word else []
    if word is None or not terms or terms == [word[0].lower()]:
        return None
    either = " OR ".join(f'"{last.text[: word.start()]}{term}"' for term in terms)
    if len(terms) > COMPLETIONS:
        either = f'"{last.text}" *'
    return f"({_phrases(others)}) AND ({either})" if others else either


async def _completions(tx: Tx, word: str) -> list[str]:
    """Terms that begin so. The tokenizer strips some letters of their marks and leaves others: either is looked for."""
    lower = word.lower()
    bare = "".join(
        letter for letter in unicodedata.normalize("NFD", lower) if not unicodedata.combining(letter)
    )
    found: dict[str, None] = {}
    for least in dict.fromkeys([lower, unicodedata.normalize("NFC", bare)]):
        rows = await tx.all(SQL.completions, least=least, most=f"{least}\U0010ffff", limit=COMPLETIONS + 1)
        found |= dict.fromkeys(row["term"] for row in rows)
    return list(found)


def snippet(marked: str) -> str:
    """What stands around the first match, which is between marks."""
    at = max(0, marked.find("\2"))
    text = marked.translate(_MARKS)
    if len(text) <= _SNIPPET:
        return text
    width = _SNIPPET - 2
    start = max(0, min(at - _BEFORE, len(text) - width))
    cut = text[start : start + width].strip()
    return f"{'…' if start else ''}{cut}{'…' if start + width < len(text) else ''}"
