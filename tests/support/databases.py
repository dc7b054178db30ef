"""The database that a test is on: a SQLite file, or a PostgreSQL database for each path that would have been one.

Tests name a path; what is opened for it is chosen by the `base` fixture, so that one test body runs on both.
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
"""What `raw` raises where the schema does not allow it."""
_ASIDE = (
    "watch", "message_words", "search_cursor", "owners", "unindexed", "schema_version", "commits",
    "turnstiles",  # rows that are locks: whoever takes one counts it up, also a chore that then finds nothing to do
)  # fmt: skip
_TABLES = "SELECT tablename AS name FROM pg_tables WHERE schemaname = 'public'"


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
    """Instead of the product's own, where that would open a file."""
    if config.store.url is not None:
        return await open_configured(config, database, read_only=read_only, on_commit=on_commit)
    return await open_test_database(
        database, on_commit=on_commit, synchronous=config.store.synchronous, read_only=read_only
    )


def query_database(path: Path, sql: str, *params: object) -> list[dict[str, Any]]:
    """A statement with `?` for its parameters, past the store."""
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
    """Every row of every table, to see that nothing changed; what a chore writes by itself is left out."""
    tables = "SELECT name FROM sqlite_schema WHERE type = 'table'" if chosen.postgres is None else _TABLES
    names = [row["name"] for row in query_database(path, tables)]
    names = [name for name in names if name not in besides and not name.startswith(_ASIDE)]
    contents = _all(path, [f'SELECT * FROM "{name}"' for name in names])  # noqa: S608
    return {
        name: sorted((tuple(row.values()) for row in rows), key=repr)
        for name, rows in zip(names, contents, strict=True)
    }


def _all(path: Path, statements: list[str]) -> list[list[dict[str, Any]]]:
    if chosen.postgres is not None:
        return chosen.postgres.look(path, *statements)
    return [query_database(path, statement) for statement in statements]
