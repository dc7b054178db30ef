"""The database of a test: a SQLite file, or a PostgreSQL database instead of each file.

Tests name a path, and the `base` fixture selects what is opened for it, so that one test body runs on both.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable, Iterable
from itertools import count
from pathlib import Path
from typing import Any, Literal

from asyncpg.exceptions import IntegrityConstraintViolationError

from antiphon.config import Config
from antiphon.store import CommitPhase, Store
from antiphon.store.factory import open_store as open_configured
from antiphon.store.postgres import PgStore
from antiphon.store.sqlite.store import SqliteStore
from cluster.database import Postgres

BOUND = 10.0
CONSTRAINT_ERRORS = (sqlite3.IntegrityError, IntegrityConstraintViolationError)
"""Errors of `query_database` for a statement that the schema forbids."""
_IGNORED_TABLES = (
    "watch", "message_words", "search_cursor", "owners", "unindexed", "schema_version", "commits",
    "turnstiles",  # rows that are locks: taking one changes it, even if background work then finds nothing to do
)  # fmt: skip
_POSTGRES_TABLES = "SELECT tablename AS name FROM pg_tables WHERE schemaname = 'public'"


class _Chosen:
    postgres: Postgres | None = None


chosen = _Chosen()


async def open_test_database(
    path: Path,
    *,
    on_commit: Callable[[CommitPhase], None] | None = None,
    synchronous: Literal["full", "normal"] = "full",
    read_only: bool = False,
) -> Store:
    if chosen.postgres is None:
        return await SqliteStore.open(path, on_commit=on_commit, synchronous=synchronous, read_only=read_only)
    server = await chosen.postgres.database(path)
    return await PgStore.open(server, writers=3, readers=1, on_commit=on_commit)


async def open_store(
    config: Config,
    database: Path,
    *,
    read_only: bool = False,
    on_commit: Callable[[CommitPhase], None] | None = None,
) -> Store:
    """Replaces `antiphon.store.factory.open_store`, except for a configured URL."""
    if config.store.url is not None:
        return await open_configured(config, database, read_only=read_only, on_commit=on_commit)
    return await open_test_database(
        database, on_commit=on_commit, synchronous=config.store.synchronous, read_only=read_only
    )


def query_database(path: Path, sql: str, *params: object) -> list[dict[str, Any]]:
    """Run a statement with `?` placeholders, bypassing the store."""
    if chosen.postgres is not None:
        numbers = count(1)
        return chosen.postgres.rows(path, re.sub(r"\?", lambda _: f"${next(numbers)}", sql), *params)
    connection = sqlite3.connect(path, timeout=BOUND)
    connection.row_factory = sqlite3.Row
    try:
        rows = [dict(row) for row in connection.execute(sql, params)]
        connection.commit()
        return rows
    finally:
        connection.close()


def dump_database(path: Path, *, besides: Iterable[str] = ()) -> dict[str, list[tuple[Any, ...]]]:
    """Return every row of every table, except those that background work changes."""
    tables = (
        "SELECT name FROM sqlite_schema WHERE type = 'table'" if chosen.postgres is None else _POSTGRES_TABLES
    )
    names = [row["name"] for row in query_database(path, tables)]
    names = [name for name in names if name not in besides and not name.startswith(_IGNORED_TABLES)]
    contents = _query_all(path, [f'SELECT * FROM "{name}"' for name in names])  # noqa: S608
    return {
        name: sorted((tuple(row.values()) for row in rows), key=repr)
        for name, rows in zip(names, contents, strict=True)
    }


def _query_all(path: Path, statements: list[str]) -> list[list[dict[str, Any]]]:
    if chosen.postgres is not None:
        return chosen.postgres.look(path, *statements)
    return [query_database(path, statement) for statement in statements]
