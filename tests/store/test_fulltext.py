"""Words in the indexes of both databases: each finds what a plain reading of the text finds."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from antiphon.store.fulltext import FulltextQuery, FulltextVector, fold_text, split_words
from cluster.database import Postgres

LETTERS = "aabbcÀàéÉüßœñçřŁØåσςΣωΏйЙ中文0179²_-'\"\\ .,:&|!<>()*~\0\n\t\u0301\u0308"
SCOPES = ["said", "tool", "s1", "s12", "b1", "a00ff", "nothing", "ab"]

texts = st.text(LETTERS, max_size=40)
pieces = st.lists(st.text(LETTERS, min_size=1, max_size=8), max_size=3)
entries = st.lists(st.tuples(texts, st.lists(st.sampled_from(SCOPES), max_size=3, unique=True)), max_size=8)
wishes = st.builds(
    partial(FulltextQuery, "words"),
    phrases=pieces,
    either=pieces,
    beginning=st.booleans(),
    scopes=st.lists(st.lists(st.sampled_from(SCOPES), min_size=1, max_size=2), max_size=2),
)


def fits(wish: FulltextQuery, text: str, scope: Sequence[str]) -> bool:
    """What a match means, said plainly."""
    if not wish.phrases and not wish.either:
        return False
    last = len(wish.phrases) - 1
    return (
        all(has(text, phrase, begun=wish.beginning and n == last) for n, phrase in enumerate(wish.phrases))
        and (not wish.either or any(has(text, phrase) for phrase in wish.either))
        and all(any(word in scope for word in group) for group in wish.scopes)
    )


def has(text: str, phrase: str, *, begun: bool = False) -> bool:
    said, wanted = split_words(text), split_words(phrase)
    if not wanted:
        return False
    for at in range(len(said) - len(wanted) + 1):
        *before, end = said[at : at + len(wanted)]
        if before == wanted[:-1] and (end.startswith(wanted[-1]) if begun else end == wanted[-1]):
            return True
    return False


@dataclass
class Lite:
    connection: sqlite3.Connection

    def found(self, entries: Sequence[tuple[str, Sequence[str]]], wish: FulltextQuery) -> set[int]:
        self.connection.execute("DELETE FROM texts")
        for n, (text, scope) in enumerate(entries):
            # A text with that character in it never gets as far as the index.
            values = (n, text.replace("\0", " "), " ".join(scope))
            self.connection.execute("INSERT INTO texts (rowid, words, scope) VALUES (?, ?, ?)", values)
        rows = self.connection.execute("SELECT rowid FROM texts WHERE texts MATCH ?", (wish,))
        return {row[0] for row in rows}


@pytest.fixture(scope="module")
def lite() -> Iterator[Lite]:
    connection = sqlite3.connect(":memory:", isolation_level=None)
    connection.execute(
        "CREATE VIRTUAL TABLE texts USING fts5 (words, scope, tokenize = 'unicode61 remove_diacritics 2')"
    )
    yield Lite(connection)
    connection.close()


def expected(entries: Sequence[tuple[str, Sequence[str]]], wish: FulltextQuery) -> set[int]:
    return {n for n, (text, scope) in enumerate(entries) if fits(wish, text, scope)}


ASK = """
SELECT n FROM unnest(CAST($1 AS BIGINT[]), CAST($2 AS TEXT[])) AS given (n, vector)
WHERE CAST(vector AS TSVECTOR) @@ CAST(CAST($3 AS TEXT) AS TSQUERY)
"""

never = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@never
@given(entries=entries, wish=wishes)
@example(entries=[("x", ["nothing"])], wish=FulltextQuery("words", ["-"], beginning=True))
@example(entries=[("x", ["said"])], wish=FulltextQuery("words", ["~said"]))
@example(entries=[("a", [])], wish=FulltextQuery("words", [], either=["a"], beginning=True))
@example(entries=[("a", [])], wish=FulltextQuery("words", ["-", "a"]))
@example(entries=[("ΟΔΟΣ", [])], wish=FulltextQuery("words", ["οδοσ"]))
def test_postgres_finds_what_is_there(
    postgres: Postgres, entries: list[tuple[str, list[str]]], wish: FulltextQuery
) -> None:
    vectors = [FulltextVector(text, " ".join(scope)).to_tsvector() for text, scope in entries]
    rows = postgres.rows("words", ASK, list(range(len(vectors))), vectors, wish.to_tsquery())
    assert {row["n"] for row in rows} == expected(entries, wish)


@never
@given(entries=entries, wish=wishes)
@example(entries=[("a", [])], wish=FulltextQuery("words", ["-", "a"]))
@example(entries=[("a", [])], wish=FulltextQuery("words", [], either=["a"], beginning=True))
@example(entries=[("ΟΔΟΣ", [])], wish=FulltextQuery("words", ["οδοσ"]))
def test_sqlite_finds_what_is_there(
    lite: Lite, entries: list[tuple[str, list[str]]], wish: FulltextQuery
) -> None:
    assert lite.found(entries, wish) == expected(entries, wish)


@never
@given(asked=st.sampled_from(SCOPES), mark=st.sampled_from(["", "~", "'~", "scope : ", "\\~", "!"]))
def test_no_word_of_a_user_finds_a_scope(postgres: Postgres, lite: Lite, asked: str, mark: str) -> None:
    entries = [("hello", SCOPES)]
    vector = FulltextVector("hello", " ".join(SCOPES)).to_tsvector()
    for begun in (True, False):
        for wish in (
            FulltextQuery("words", [f"{mark}{asked}"], beginning=begun),
            FulltextQuery("words", [], either=[f"{mark}{asked}"], beginning=begun),
        ):
            assert postgres.rows("words", ASK, [0], [vector], wish.to_tsquery()) == []
            assert lite.found(entries, wish) == set()


hostile = st.text(st.sampled_from("ab'\"\\~:*&|!<->() \0"), min_size=1, max_size=12)


@never
@given(text=hostile, phrase=hostile, scope=hostile)
def test_nothing_breaks_out_of_its_quotes(
    postgres: Postgres, lite: Lite, text: str, phrase: str, scope: str
) -> None:
    """An expression with any content stays one: it is understood, and limited by a scope without members."""
    vector = FulltextVector(text, "mine").to_tsvector()
    for wish in (
        FulltextQuery("words", [phrase], scopes=[["nobodys"]]),
        FulltextQuery("words", ["a", phrase], beginning=True, scopes=[["nobodys"]]),
        FulltextQuery("words", [], either=[phrase, "a"], scopes=[["nobodys"]]),
    ):
        assert postgres.rows("words", ASK, [0], [vector], wish.to_tsquery()) == []
        assert lite.found([(text, ["mine"])], wish) == set()
    odd = FulltextQuery("words", ["a"], scopes=[[scope]])
    assert (
        postgres.rows("words", ASK, [0], [FulltextVector("a", "mine").to_tsvector()], odd.to_tsquery()) == []
    )
    postgres.rows("words", ASK, [0], [FulltextVector("a", scope).to_tsvector()], odd.to_tsquery())


def test_texts_of_any_length_are_indexed(postgres: Postgres) -> None:
    many = " ".join(f"w{n}" for n in range(9_000))
    for text in ("word " * 20_000, "x" * 70_000, many):
        vector = FulltextVector(text, "said").to_tsvector()
        wish = FulltextQuery("words", [text.split()[0]], scopes=[["said"]])
        assert postgres.rows("words", ASK, [1], [vector], wish.to_tsquery()) == [{"n": 1}]


@given(st.text(max_size=60))
def test_folding_again_changes_nothing(text: str) -> None:
    assert split_words(fold_text(text)) == split_words(text)
