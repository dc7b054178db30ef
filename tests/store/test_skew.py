"""What must not happen at once although no row is changed by both: on PostgreSQL, from two stores on one database."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from antiphon import keys
from antiphon.engine.collaboration import chains
from antiphon.engine.sessions import search, session_rows
from antiphon.errors import WaitCycle
from antiphon.messages import UserMessage
from antiphon.store import Row, Tx
from antiphon.store.postgres import PgStore
from antiphon.store.queries import Query
from cluster.database import Postgres

pytestmark = pytest.mark.anyio
BOUND = 20.0


@pytest.fixture
async def pair(postgres: Postgres, tmp_path: Path) -> AsyncGenerator[tuple[PgStore, PgStore]]:
    server = await postgres.database(tmp_path)
    one, other = await PgStore.open(server), await PgStore.open(server)
    yield one, other
    await one.close()
    await other.close()
    await asyncio.to_thread(postgres.drop_all)


async def founded(tx: Tx, name: str) -> Row:
    return await session_rows.create_session(tx, keys.parse(f"agent:main:dashboard:{name}"), 1)


async def said(tx: Tx, session: int, text: str) -> None:
    await session_rows.append_note(tx, session, UserMessage(content=text, timestamp=1), 1)


@pytest.mark.requirement("S7")
async def test_two_waits_that_would_deadlock_are_not_both_started(pair: tuple[PgStore, PgStore]) -> None:
    one, other = pair
    for number in range(5):
        ids = [(await one.tx(founded, f"{number}-{side}"))["id"] for side in "ab"]
        runs = [await one.tx(_running, session) for session in ids]

        async def wait(
            store: PgStore, mine: int, theirs: int, ids: list[int], runs: list[tuple[int, str]]
        ) -> None:
            await store.tx(
                chains.record_wait, runs[mine][0], ids[mine], runs[theirs][1], ids[theirs], 10**13, 1
            )

        outcomes = await asyncio.wait_for(
            asyncio.gather(wait(one, 0, 1, ids, runs), wait(other, 1, 0, ids, runs), return_exceptions=True),
            BOUND,
        )
        assert [type(outcome) for outcome in outcomes].count(WaitCycle) == 1, outcomes


async def _running(tx: Tx, session: int) -> tuple[int, str]:
    insert = Query(
        "test.running",
        "INSERT INTO runs (id, session, origin, digest, input, state, created_at)"
        " VALUES (:id, :session, 'chat', '', '', 'running', 1) RETURNING n, id",
    )
    row = await tx.one(insert, id=f"r{session}", session=session)
    assert row is not None
    return row["n"], row["id"]


async def test_words_of_a_deleted_session_are_not_indexed_beside_its_deletion(
    pair: tuple[PgStore, PgStore],
) -> None:
    one, other = pair
    for number in range(5):
        session = await one.tx(founded, f"gone{number}")
        for part in range(20):
            await one.tx(said, session["id"], f"secret{number} {part}")
        outcomes = await asyncio.wait_for(
            asyncio.gather(
                one.tx(search.index_entries, 100),
                other.tx(session_rows.delete_session, session["id"], session["key"], 1),
                return_exceptions=True,
            ),
            BOUND,
        )
        assert not any(isinstance(outcome, BaseException) for outcome in outcomes), outcomes
        await one.tx(search.index_entries, 100)
        assert await one.read(_words_left) == 0
        await asyncio.wait_for(
            search.catch_up_index(one), BOUND
        )  # ends, although a message of a number below is gone


async def _words_left(tx: Tx) -> int:
    row = await tx.one(Query("test.words", "SELECT count(*) AS words FROM message_words"))
    assert row is not None
    return row["words"]


async def test_store_identities_differ(
    pair: tuple[PgStore, PgStore], postgres: Postgres, tmp_path: Path
) -> None:
    one, other = pair
    stranger = await PgStore.open(await postgres.database(tmp_path / "stranger"))
    assert one.identity == other.identity != stranger.identity
    await stranger.close()
