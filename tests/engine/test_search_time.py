"""How long a search may take: how many passes over the index it makes by a clock of ours, and what it says of it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from antiphon import keys
from antiphon.engine.sessions import search, session_rows
from antiphon.engine.sessions.search import SearchQuery, SearchResult
from antiphon.messages import UserMessage
from antiphon.runtimes import Prompt
from antiphon.store import Row, Store, Tx
from antiphon.store.fulltext import FulltextQuery
from antiphon.store.queries import Query
from support.app_fixture import DATABASE, MAIN, OPERATOR, open_app_fixture
from support.databases import open_test_database

pytestmark = [pytest.mark.anyio, pytest.mark.sqlite_only, pytest.mark.requirement("W2")]

APART = [*(f"even {n}" for n in range(10)), *(f"odd {n}" for n in range(10)), "even oddly"]
QUICK, SLOW = search.SEARCH_BUDGET_SECONDS * 0.4, search.SEARCH_BUDGET_SECONDS * 1.01  # seconds of a pass


class Watched:
    """A transaction in which a pass over the index takes as long as it is told to, by a clock that stands otherwise."""

    def __init__(self, tx: Tx, seconds: float, asked: list[FulltextQuery] | None = None) -> None:
        self._tx = tx
        self._seconds = seconds
        self._asked = asked
        self.now = 0.0
        self.passes = 0

    async def one(self, query: Query, **params: Any) -> Row | None:
        return await self._tx.one(query, **params)

    async def all(self, query: Query, **params: Any) -> Sequence[Row]:
        if query.name == search.SQL.find.name:
            self.passes += 1
            self.now += self._seconds
            if self._asked is not None:
                self._asked.append(params["match"])
        return await self._tx.all(query, **params)


@asynccontextmanager
async def indexed(path: Path, *texts: str) -> AsyncGenerator[Store]:
    store = await open_test_database(path / DATABASE, synchronous="normal")

    async def fill(tx: Tx) -> None:
        row = await session_rows.create_session(tx, keys.parse(MAIN), 1)
        for text in texts:
            await session_rows.append_note(tx, row["id"], UserMessage(content=text, timestamp=1), 1)

    try:
        await store.tx(fill)
        await store.tx(search.index_entries, len(texts))
        yield store
    finally:
        await store.close()


async def searched(
    store: Store, monkeypatch: pytest.MonkeyPatch, query: str, seconds: float, limit: int = 5
) -> tuple[SearchResult, int]:
    """What is found where every pass takes so long, and how many there were."""

    async def find(tx: Tx) -> tuple[SearchResult, int]:
        watched: Any = Watched(tx, seconds)
        monkeypatch.setattr(search, "monotonic", lambda: watched.now)
        return await search.find_entries(watched, SearchQuery(query=query, limit=limit)), watched.passes

    return await store.read(find)


async def test_blocks_are_looked_through_only_while_there_is_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "ENTRIES_PER_BLOCK", 4)
    async with indexed(tmp_path, *APART[:-1]) as store:  # 20 entries, from 1 on: 6 blocks
        found, passes = await searched(store, monkeypatch, '"even" "odd"', SLOW)
        assert (found.rows, found.complete, passes) == ([], False, 1)
        found, passes = await searched(store, monkeypatch, '"even" "odd"', QUICK)
        assert (found.rows, found.complete, passes) == ([], False, 3)
        found, passes = await searched(store, monkeypatch, '"even" "odd"', 0.0)
        assert (found.rows, found.complete, passes) == ([], True, 3), "of one, two and three blocks"


async def test_each_window_has_what_the_one_before_it_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "ENTRIES_PER_BLOCK", 2)
    texts = [f"said {n}" for n in range(1, 20)]
    async with indexed(tmp_path, *texts) as store:
        for most in (1, 2, 3, 64):
            monkeypatch.setattr(search, "MAX_BLOCKS_PER_WINDOW", most)
            found, _ = await searched(store, monkeypatch, '"said"', 0.0, limit=50)
            assert [row["words"] for row in found.rows] == texts[::-1]


def test_a_window_is_as_wide_as_there_is_time_for() -> None:
    assert search._widen_window(1, 0.0, 1.0) == 2  # pyright: ignore[reportPrivateUsage]
    assert search._widen_window(8, 0.01, 1.0) == 16  # pyright: ignore[reportPrivateUsage]
    assert search._widen_window(8, 0.1, 1.0) == 5, "each may take twice as long"  # pyright: ignore[reportPrivateUsage]
    assert search._widen_window(8, 5.0, 1.0) == 1  # pyright: ignore[reportPrivateUsage]
    assert search._widen_window(64, 0.0, 1.0) == search.MAX_BLOCKS_PER_WINDOW  # pyright: ignore[reportPrivateUsage]


async def test_a_block_of_words_that_never_meet_is_not_looked_for_in_the_others(tmp_path: Path) -> None:
    """What makes a block cheap: the index is asked for the block itself, not for a range of what it has found."""
    async with indexed(tmp_path, *APART) as store:
        asked: list[FulltextQuery] = []

        async def find(tx: Tx) -> SearchResult:
            watched: Any = Watched(tx, 0.0, asked)
            return await search.find_entries(watched, SearchQuery(query="even", limit=5))

        assert len((await store.read(find)).rows) == 5
        assert [match.scopes[-1] for match in asked] == [["w0"]]


async def test_beginnings_are_only_looked_for_while_there_is_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with indexed(tmp_path, *APART) as store:
        found, passes = await searched(store, monkeypatch, "even odd", SLOW)
        assert (found.rows, found.complete, passes) == ([], False, 1)  # "even oddly" was not looked for
        found, passes = await searched(store, monkeypatch, "even odd", QUICK)
        assert (len(found.rows), found.complete, passes) == (1, True, 2)
        found, passes = await searched(store, monkeypatch, '"even" "odd"', SLOW)
        assert (found.rows, found.complete, passes) == ([], True, 1)  # no beginning is meant


async def test_what_whole_words_have_found_stays_when_there_is_no_time_for_beginnings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "ENTRIES_PER_BLOCK", 2)
    monkeypatch.setattr(search, "MAX_BLOCKS_PER_WINDOW", 8)
    texts = ["report alpha", *(f"reports {n}" for n in range(30))]
    async with indexed(tmp_path, *texts) as store:
        found, _ = await searched(store, monkeypatch, '"report"', search.SEARCH_BUDGET_SECONDS * 0.15)
        assert ([row["words"] for row in found.rows], found.complete) == (["report alpha"], True)
        found, _ = await searched(store, monkeypatch, "report", search.SEARCH_BUDGET_SECONDS * 0.15, limit=50)
        said = [row["words"] for row in found.rows]
        assert (said[0], said[-1], found.complete) == ("reports 29", "report alpha", False)
        assert len(said) == len(set(said)) < len(texts)
        found, _ = await searched(store, monkeypatch, "report", 0.0, limit=50)
        assert ([row["words"] for row in found.rows], found.complete) == (texts[::-1], True)


def test_the_time_leaves_room_for_a_last_window_below_the_target() -> None:
    """One that is begun at the last moment is as wide as fits twice into what is left."""
    assert 2 * search.SEARCH_BUDGET_SECONDS <= 0.1


async def test_a_page_that_is_full_is_complete_however_long_it_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with indexed(tmp_path, *APART) as store:
        found, passes = await searched(store, monkeypatch, "even", SLOW, limit=5)
        assert (len(found.rows), found.complete, passes) == (5, True, 1)


async def test_who_searched_is_told_that_the_time_was_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def echo(prompt: Prompt) -> str:
        return "an echo"

    async with open_app_fixture(tmp_path, echo) as app:
        await app.ask("even oddly")
        await app.ask("odd")
        page = await app.operations.search.find(OPERATOR, "even odd")
        assert ([hit.snippet for hit in page.results], page.truncated) == (["even oddly"], False)
        monkeypatch.setattr(search, "SEARCH_BUDGET_SECONDS", -1)
        page = await app.operations.search.find(OPERATOR, "even odd")
        assert (page.results, page.truncated) == ([], True)
