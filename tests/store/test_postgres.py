"""The PostgreSQL store: its statements, several processes at once, its clock."""

from __future__ import annotations

import asyncio
import re
import time
from contextlib import suppress
from importlib import resources
from time import monotonic
from typing import Any, cast

import pytest

from antiphon.errors import StoreError
from antiphon.store import Tx, listing
from antiphon.store.postgres import SharedClock
from antiphon.store.postgres.connection import PgServer, pg
from antiphon.store.queries import Queries, Query, translate_to_postgres
from cluster.stores import (
    altered,
    ask,
    increase,
    lease,
    opened,
    owners,
    proxied,
    put,
    within,
)

pytestmark = pytest.mark.anyio


NO_TABLE = Query("test.no_table", "SELECT 1 FROM nowhere")


# --- statements ---


def topics() -> list[str]:
    folder = resources.files("antiphon.store").joinpath("sql", "queries")
    return sorted(item.name.removesuffix(".sql") for item in folder.iterdir())


async def prepared(server: PgServer, texts: dict[str, str]) -> None:
    asked = await server.connect()
    try:
        for name, text in texts.items():
            try:
                await cast("Any", asked).prepare(translate_to_postgres(text)[0])
            except pg.PostgresError as error:
                pytest.fail(f"{name}: {error}")
    finally:
        await asked.close(timeout=5)


@pytest.mark.parametrize("topic", topics())
async def test_every_query_is_understood(server: PgServer, topic: str) -> None:
    queries = [cast("Query", getattr(Queries(topic), name)) for name in sorted(Queries(topic).names())]
    whole = r"(?is)(/\*.*?\*/|\s)*(select|insert|update|delete|with)\b"
    texts = {
        query.name: query.text
        for query in queries
        if "{" not in query.text and re.match(whole, translate_to_postgres(query.text)[0])
    }
    assert texts or topic == "listing"
    await prepared(server, texts)


WISHES = [
    listing.SessionListQuery(limit=5),
    listing.SessionListQuery(limit=5, agents=["a", "b"], own_key="k", descendants=True, archived=True),
    listing.SessionListQuery(limit=5, agents=["a"], own_key="k", kinds=("main", "cron")),
    listing.SessionListQuery(
        limit=5, agents=[f"a{n}" for n in range(listing.MAX_AGENT_STREAMS + 1)], own_key="k"
    ),
    listing.SessionListQuery(limit=5, agents=[], own_key="k", label="l", search="w"),
    listing.SessionListQuery(limit=5, label="l", parent="p", search="some words", kinds=("main",)),
    listing.SessionListQuery(limit=5, parent="p", cursor=(5, "k"), active_since=7, only_agent="a"),
    listing.SessionListQuery(limit=5, search="some words", agents=["a"], own_key="k", descendants=True),
]


async def test_every_list_is_understood(server: PgServer) -> None:
    texts = {
        str(wish): listing.build_page_query(wish, prefix=prefix)[0].text
        for wish in WISHES
        for prefix in (True, False)
    }
    await prepared(server, texts)
    async with opened(server) as store:
        for wish in WISHES:
            assert await within(store.read(listing.load_session_page, wish)) == []


# --- as if one after the other ---


@pytest.mark.requirement("G13")
async def test_increments_of_two_processes_are_all_there(server: PgServer) -> None:
    async with opened(server) as one, opened(server) as other:
        values = await within(
            asyncio.gather(*(store.tx(increase, "n") for _ in range(250) for store in (one, other)))
        )
        assert sorted(values) == list(range(1, 501))
        assert await one.read(lease, "n") == await other.read(lease, "n") == 500


@pytest.mark.requirement("G13")
async def test_no_two_act_on_what_the_other_changes(server: PgServer) -> None:
    """Write skew: each may leave only while the other is there, so that one of them always is."""

    async def leave(tx: Tx, mine: str, other: str) -> bool:
        await tx.lock(f"pair {mine[1:]}")
        if not await lease(tx, other):
            return False
        await put(tx, mine, 0)
        return True

    async with opened(server) as here, opened(server) as there:
        for n in range(25):
            a, b = f"a{n}", f"b{n}"
            await asyncio.gather(here.tx(put, a, 1), there.tx(put, b, 1))
            left = await within(asyncio.gather(here.tx(leave, a, b), there.tx(leave, b, a)))
            assert sorted(left) == [False, True]


@pytest.mark.requirement("G13")
async def test_a_failed_script_does_not_affect_others(server: PgServer) -> None:
    async def refuse(tx: Tx, owner: str) -> str:
        await put(tx, owner)
        raise ValueError(owner)

    names = [f"{n:03}" for n in range(200)]
    async with opened(server, writers=3) as store:
        outcomes = await within(
            asyncio.gather(
                *(store.tx(refuse if n % 9 == 4 else put, name) for n, name in enumerate(names)),
                return_exceptions=True,
            )
        )
        for n, (name, outcome) in enumerate(zip(names, outcomes, strict=True)):
            assert (repr(outcome) == f"ValueError('{name}')") if n % 9 == 4 else outcome == name
        assert await store.read(owners) == [name for n, name in enumerate(names) if n % 9 != 4]


async def test_a_script_is_judged_by_what_was_kept_and_not_by_its_neighbours(server: PgServer) -> None:
    """The second of a batch refuses because of the first, which is then taken back: so it must be asked again."""

    async def first(tx: Tx) -> None:
        await put(tx, "first")
        raise ValueError

    async def second(tx: Tx) -> str:
        assert "first" not in await owners(tx)
        return await put(tx, "second")

    async with opened(server, writers=1) as store:
        results = await within(asyncio.gather(store.tx(first), store.tx(second), return_exceptions=True))
        assert isinstance(results[0], ValueError)
        assert results[1] == "second"
        assert await store.read(owners) == ["second"]


@pytest.mark.requirement("G13")
async def test_what_went_on_after_a_failed_statement_was_not_kept_and_is_not_said_to_be(
    server: PgServer,
) -> None:
    async def stubborn(tx: Tx) -> str:
        await put(tx, "lost")
        try:
            await tx.one(NO_TABLE)
        except pg.PostgresError:
            return "done"
        return "never"

    async def looking(tx: Tx) -> None:
        with suppress(pg.PostgresError):
            await tx.one(NO_TABLE)

    async with opened(server) as store:
        with pytest.raises(StoreError, match="transaction is aborted"):
            await within(store.tx(stubborn))
        with pytest.raises(StoreError, match="rolled a transaction back"):
            await within(store.read(looking))
        results = await within(
            asyncio.gather(
                store.tx(stubborn), *(store.tx(put, f"{n}") for n in range(40)), return_exceptions=True
            )
        )
        assert [str(n) for n in range(40)] == results[1:]
        assert "lost" not in await store.read(owners)


async def test_under_load_scripts_share_transactions(server: PgServer) -> None:
    commits: list[str] = []
    async with opened(server, writers=4, on_commit=commits.append) as store:
        await within(asyncio.gather(*(store.tx(put, f"{n:03}") for n in range(500))))
        assert len(await store.read(owners)) == 500
    assert commits.count("before") == commits.count("after")
    assert 500 / 32 <= commits.count("after") <= 50


async def test_a_migration_elsewhere_does_not_break_what_is_running(server: PgServer) -> None:
    """Statements that were prepared before a column came are prepared again."""
    async with opened(server, writers=1) as store, opened(server, writers=1) as other:
        await store.tx(put, "a")
        everything = "SELECT * FROM owners"
        before = await store.tx(ask, everything)
        await other.tx(ask, "SELECT 1 AS one FROM pg_class LIMIT 1")
        await altered(server, "ALTER TABLE owners ADD COLUMN newer TEXT")
        after = await store.tx(ask, everything)
        assert before and after
        assert len([*after]) == len([*before]) + 1


# --- the clock ---


async def test_wall_clocks_do_not_move_the_shared_clock(
    server: PgServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("antiphon.store.postgres.CLOCK_SYNC_INTERVAL_SECONDS", 0.01)
    real, real_ns = time.time, time.time_ns
    async with opened(server) as store, opened(server) as other:
        seen = [store.clock.now()]
        for moved in (30, -30, 0):
            monkeypatch.setattr(time, "time", lambda moved=moved: real() + moved)
            monkeypatch.setattr(time, "time_ns", lambda moved=moved: real_ns() + moved * 10**9)
            for _ in range(20):
                await store.read(owners)
                seen.append(store.clock.now())
                assert abs(store.clock.now() - real() * 1000) < 1000
                assert abs(store.clock.now() - other.clock.now()) < 500
        assert seen == sorted(seen)


async def test_a_slow_answer_does_not_skew_the_clock(
    server: PgServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("antiphon.store.postgres.MAX_ROUND_TRIP_SECONDS", 0.2)
    clock = SharedClock()
    async with proxied(server, readers=1) as (proxy, store):
        await store.read(clock.synchronize)
        before = clock.now() - monotonic() * 1000
        proxy.delay = 0.5
        await within(store.read(clock.synchronize))
        assert abs(clock.now() - monotonic() * 1000 - before) < 50
        proxy.delay = 0.0
