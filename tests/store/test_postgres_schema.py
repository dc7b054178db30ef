"""The schema of a PostgreSQL database: brought up to date by one process at a time, while others go on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock
from uuid import uuid4

import pytest

from antiphon.access import Caller
from antiphon.app import open_app_operations
from antiphon.config import Config
from antiphon.engine.sessions import search
from antiphon.errors import StoreError, StoreNewer
from antiphon.operations.types import IncomingMessage
from antiphon.store import Tx
from antiphon.store.migrations import Migration, load_migrations
from antiphon.store.postgres import PgStore, schema
from antiphon.store.postgres.connection import PgServer
from antiphon.store.queries import Query
from cluster.database import PASSWORD, Postgres

pytestmark = pytest.mark.anyio

BOUND = 60.0
KNOWN = load_migrations("postgres")
NEWEST = KNOWN[-1].version
OPERATOR = Caller.operator()
MAIN = "agent:main:main"
QUESTION = '{"role":"user","content":"say hello","timestamp":1}'
HOUSE = [  # A session with a run that was cut off and one that waits, as every version has had them.
    statement.replace("QUESTION", QUESTION)
    for statement in (
        "INSERT INTO transcripts (session_id, key, reason, started_at) VALUES ('t', 'agent:main:main', 'new', 1)",
        "INSERT INTO sessions (key, session_id, transcript, agent_id, kind, last_seq, lane_epoch, created_at,"
        " updated_at) VALUES ('agent:main:main', 't', 1, 'main', 'main', 1, 1, 1, 1)",
        "INSERT INTO messages (transcript, seq, entry, role, run, body, created_at)"
        " VALUES (1, 1, 'e', 'user', 1, 'QUESTION', 1)",
        "INSERT INTO runs (id, session, origin, digest, input, state, epoch, attempts, transcript, first_seq,"
        " deadline_at, created_at, started_at)"
        " VALUES ('cut', 1, 'chat', '', 'QUESTION', 'running', 1, 1, 1, 1, 99999999999999, 1, 1)",
        "INSERT INTO runs (id, session, origin, digest, input, state, deadline_at, created_at)"
        " VALUES ('waiting', 1, 'chat', '', 'QUESTION', 'queued', 99999999999999, 1)",
        "INSERT INTO usage (at, run_id, session_key, session_id, root_key, agent_id, input, output, cache_read,"
        " cache_write) VALUES (1, 'cut', '', '', '', '', 5, 0, 0, 0)",
    )
]
ADDED = Migration(
    NEWEST + 1,
    "more",
    "ALTER TABLE sessions ADD COLUMN newer TEXT;\nALTER TABLE runs ADD COLUMN newer BIGINT DEFAULT 7;\n"
    "ALTER TABLE messages ADD COLUMN newer TEXT;\nCREATE TABLE newer (id INTEGER PRIMARY KEY);\n",
)


@pytest.fixture
async def empty(postgres: Postgres) -> AsyncGenerator[PgServer]:
    """A database that was never used."""
    name = f"empty{uuid4().hex}"
    await told(postgres.server("postgres"), f'CREATE DATABASE "{name}"')
    yield postgres.server(name)
    await told(postgres.server("postgres"), f'DROP DATABASE "{name}" WITH (FORCE)')


async def told(server: PgServer, *statements: str) -> list[dict[str, Any]]:
    """What the last one gives."""
    connection = await server.connect()
    try:
        for statement in statements[:-1]:
            await connection.execute(statement)
        return [dict(cast("dict[str, Any]", row)) for row in await connection.fetch(statements[-1])]
    finally:
        await connection.close(timeout=5)


@contextmanager
def knowing(known: list[Migration]) -> Generator[None]:
    """An Antiphon of another version."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schema, "load_migrations", Mock(return_value=known))
        yield


@asynccontextmanager
async def opened(server: PgServer, **options: Any) -> AsyncGenerator[PgStore]:
    store = await asyncio.wait_for(PgStore.open(server, **options), BOUND)
    try:
        yield store
    finally:
        await asyncio.wait_for(store.close(), BOUND)


async def migrated(server: PgServer, known: list[Migration] | None = None) -> None:
    with knowing(KNOWN if known is None else known):
        async with opened(server):
            pass


async def everything(server: PgServer) -> dict[str, list[dict[str, Any]]]:
    tables = await told(server, "SELECT tablename AS name FROM pg_tables WHERE schemaname = 'public'")
    return {row["name"]: await told(server, f'SELECT * FROM "{row["name"]}"') for row in tables}  # noqa: S608


async def schema_of(server: PgServer) -> tuple[int, int]:
    [row] = await told(server, "SELECT version, oldest FROM schema_version")
    return row["version"], row["oldest"]


def on(server: PgServer) -> Config:
    return Config.model_validate({"store": {"url": server.url, "password": PASSWORD}})


async def converses(server: PgServer, path: Path) -> None:
    """A question is asked, answered and found again."""
    async with open_app_operations(on(server), path) as operations:
        ticket = await operations.messages.submit(
            OPERATOR, IncomingMessage(session=MAIN, content="say good morning")
        )
        view = await operations.runs.wait(OPERATOR, ticket.run_id, BOUND)
        assert (view.state, view.reply) == ("ok", "good morning")


# --- forward ---


@pytest.mark.requirement("G45")
async def test_processes_that_migrate_at_once_do_it_once(empty: PgServer) -> None:
    async def started() -> int:
        async with opened(empty, writers=1, readers=1) as store:
            return await store.read(_version)

    versions = await asyncio.wait_for(asyncio.gather(*(started() for _ in range(6))), BOUND)
    assert versions == [NEWEST] * 6
    assert await schema_of(empty) == (NEWEST, KNOWN[-1].oldest_compatible_version)


async def _version(tx: Tx) -> int:
    row = await tx.one(Query("test.version", "SELECT version FROM schema_version"))
    assert row
    return row["version"]


@pytest.mark.requirement("G45")
@pytest.mark.parametrize("start", range(1, NEWEST))
async def test_each_version_takes_over_what_the_ones_before_it_left(
    empty: PgServer, start: int, tmp_path: Path
) -> None:
    await migrated(empty, KNOWN[:start])
    await told(empty, *HOUSE)
    before = await everything(empty)
    for upto in range(start + 1, NEWEST + 1):
        await migrated(empty, KNOWN[:upto])
        assert await schema_of(empty) == (upto, KNOWN[upto - 1].oldest_compatible_version)
    after = await everything(empty)
    assert [row["message"] for row in after["unindexed"]] == ([1] if start < 8 else []), "it is indexed again"
    for name in before.keys() - {"schema_version", "unindexed"}:
        now = [
            {column: row[column] for column in old}
            for row, old in zip(after[name], before[name], strict=True)
        ]
        assert now == before[name], name
    async with open_app_operations(on(empty), tmp_path) as operations:
        for run in ("cut", "waiting"):
            view = await operations.runs.wait(OPERATOR, run, BOUND)
            assert (view.state, view.reply) == ("ok", "hello")
    await converses(empty, tmp_path)


@pytest.mark.requirement("G45", "W2")
async def test_what_schema_7_has_indexed_and_still_indexes_is_found_once(empty: PgServer) -> None:
    """Before the migration, and after it by a replica that has not been replaced yet."""
    await migrated(empty, KNOWN[:7])
    indexed = "INSERT INTO message_words (rowid, words, vector) VALUES ({n}, 'said {n}', $$'said':1 '~s1' '~said'$$)"
    message = (
        "INSERT INTO messages (transcript, seq, entry, role, body, created_at)"
        """ VALUES (1, {n}, 'e', 'user', '{{"role":"user","content":"said {n}","timestamp":1}}', 1)"""
    )
    await told(empty, *HOUSE[:2], message.format(n=1), indexed.format(n=1))
    async with opened(empty) as store:
        assert await store.read(search.load_index_position) == (0, 1)
        await search.catch_up_index(store)
        await told(empty, message.format(n=2), indexed.format(n=2))
        rows, complete, _ = await store.read(
            search.find_entries, search.SearchQuery(query="said", limit=5, scopes=[["s1"]])
        )
        assert ([row["words"] for row in rows], complete) == (["said 2", "said 1"], True)


@pytest.mark.requirement("G45")
async def test_a_migration_that_fails_leaves_the_version_before(empty: PgServer) -> None:
    await migrated(empty)
    before = await everything(empty)
    broken = ADDED._replace(
        script="CREATE TABLE half (id INTEGER);\nALTER TABLE nowhere ADD COLUMN x TEXT;\n"
    )
    with pytest.raises(StoreError, match="nowhere"):
        await migrated(empty, [*KNOWN, broken])
    assert await everything(empty) == before
    await migrated(empty, [*KNOWN, ADDED])
    assert await schema_of(empty) == (NEWEST + 1, NEWEST)


@pytest.mark.requirement("G45")
async def test_a_read_only_open_changes_nothing(empty: PgServer) -> None:
    await migrated(empty, KNOWN[:2])
    before = await everything(empty)
    with pytest.raises(StoreError, match="has schema 2") as refused:
        await PgStore.open(empty, migrate=False)
    assert "antiphon up" in refused.value.hint
    assert await everything(empty) == before


@pytest.mark.requirement("G45")
async def test_what_runs_meanwhile_does_not_notice(empty: PgServer) -> None:
    """Replicas of the version before are at work while the first of the new ones migrates."""
    await migrated(empty)
    await told(empty, *HOUSE)
    text = "UPDATE sessions SET last_seq = last_seq + 1 WHERE id = 1 RETURNING *"

    async def step(tx: Tx) -> int:
        await tx.all(Query("test.runs", "SELECT * FROM runs"))
        row = await tx.one(Query("test.step", text))
        assert row
        return row["last_seq"]

    async with opened(empty, writers=4) as store:
        stop = asyncio.Event()

        async def load() -> list[int]:
            seen: list[int] = []
            while not stop.is_set():
                seen.append(await store.tx(step))
            return seen

        loads = [asyncio.create_task(load()) for _ in range(8)]
        try:
            await migrated(empty, [*KNOWN, ADDED])
            await store.tx(step)
        finally:
            stop.set()
        seen = [n for values in await asyncio.wait_for(asyncio.gather(*loads), BOUND) for n in values]
        assert len(seen) == len({*seen}) > 0
        assert await schema_of(empty) == (NEWEST + 1, NEWEST)


# --- and back ---


@pytest.mark.requirement("G45")
async def test_the_version_before_works_on_the_schema_after(empty: PgServer, tmp_path: Path) -> None:
    await migrated(empty, [*KNOWN, ADDED])
    await converses(empty, tmp_path)
    assert await schema_of(empty) == (NEWEST + 1, NEWEST)


@pytest.mark.requirement("G45")
async def test_a_version_that_is_too_old_refuses_and_touches_nothing(empty: PgServer, tmp_path: Path) -> None:
    breaking = ADDED._replace(script=f"-- oldest: {NEWEST + 1}\n{ADDED.script}")
    await migrated(empty, [*KNOWN, breaking])
    await told(empty, *HOUSE)
    before = await everything(empty)
    with pytest.raises(StoreNewer, match=f"schema {NEWEST + 1}"):
        async with open_app_operations(on(empty), tmp_path):
            pass
    for migrate in (True, False):
        with pytest.raises(StoreNewer):
            await PgStore.open(empty, migrate=migrate)
    assert await everything(empty) == before


@pytest.mark.requirement("G45")
async def test_another_programs_tables_are_not_migrated(empty: PgServer) -> None:
    await told(
        empty, "CREATE TABLE sessions (theirs TEXT)", "INSERT INTO sessions VALUES ('x') RETURNING theirs"
    )
    with pytest.raises(StoreError, match="already exists"):
        await PgStore.open(empty)
    assert await everything(empty) == {"sessions": [{"theirs": "x"}]}


def test_a_migration_says_which_version_can_still_work_on_it() -> None:
    assert [migration.oldest_compatible_version for migration in KNOWN] == [
        min(step.version - 1, 8) for step in KNOWN
    ]
    assert ADDED._replace(script="-- oldest: 3\nSELECT 1;\n").oldest_compatible_version == 3
