"""Brings a PostgreSQL database to the schema of this version, one process at a time.

The schema records the oldest Antiphon that can use it, so that replicas can be replaced one by one: the previous
version keeps working after the first new one has migrated, and anything older refuses to start.
"""

from __future__ import annotations

import asyncio
import logging
from time import monotonic

from antiphon.errors import StoreError
from antiphon.store.migrations import Migration, load_migrations, select_missing_migrations
from antiphon.store.postgres.connection import AsyncpgConnection, PgConnection, pg

log = logging.getLogger(__name__)

COPY_PROGRESS_TABLE = "moving"
"""A table that exists while another database is moved into this one; see `copy_target`."""
MIGRATION_TIMEOUT_SECONDS = 3600.0  # for one statement of a migration, and for waiting on another process
_MIGRATION_LOCK_ID = 0x414E5450  # "ANTP": the advisory lock that a migrating process holds
_BEGIN_SQL = "BEGIN; SET LOCAL statement_timeout = 0; SET LOCAL lock_timeout = 0"


async def prepare_schema(
    connection: PgConnection | AsyncpgConnection, *, migrate: bool, copying: bool = False
) -> None:
    """Migrates the database, one process at a time; one with a newer schema is refused unchanged.

    A database that another is being moved into is refused as well, except with `copying`.
    """
    if (
        not copying
        and await connection.fetchval("SELECT to_regclass($1)::text", COPY_PROGRESS_TABLE) is not None
    ):
        raise StoreError(
            "Another database is being migrated into this one, and that is not finished.",
            "Run the migration command again; it continues where it stopped.",
        )
    until = monotonic() + MIGRATION_TIMEOUT_SECONDS
    while left := await _list_missing_migrations(connection):
        if not migrate:
            present = left[0].version - 1
            raise StoreError(
                f"The database has schema {present}, this Antiphon needs {left[-1].version}.",
                "Start `antiphon up` once with the right to migrate it.",
            )
        if not await _apply_next_migration(connection):
            await _wait_for_others(until)


async def begin_exclusive(connection: PgConnection | AsyncpgConnection) -> None:
    """Begins a transaction that excludes migrations by other processes; waits for theirs."""
    await connection.execute(
        f"{_BEGIN_SQL}; SELECT pg_advisory_xact_lock({_MIGRATION_LOCK_ID})", timeout=MIGRATION_TIMEOUT_SECONDS
    )


async def _wait_for_others(until: float) -> None:
    if monotonic() > until:
        raise StoreError(
            "Another process has been migrating the database for an hour.",
            "Find out what it is waiting for, or stop it: an interrupted migration changes nothing.",
        )
    await asyncio.sleep(0.1)


async def _apply_next_migration(connection: PgConnection | AsyncpgConnection) -> bool:
    """Applies the next migration; returns False if another process is migrating or interfered."""
    await connection.execute(_BEGIN_SQL)
    try:
        mine = await connection.fetchval(f"SELECT pg_try_advisory_xact_lock({_MIGRATION_LOCK_ID})")
        if mine and (left := await _list_missing_migrations(connection)):
            log.info("Bringing the database to schema %d", left[0].version)
            await _apply_migration(connection, left[0])
        await connection.execute("COMMIT")
    except pg.DeadlockDetectedError:  # with a process that is using the database
        await connection.execute("ROLLBACK")
        return False
    return mine


async def _list_missing_migrations(connection: PgConnection | AsyncpgConnection) -> list[Migration]:
    present, oldest = await _load_schema_versions(connection)
    return select_missing_migrations(present, oldest, load_migrations("postgres"))


async def _load_schema_versions(connection: PgConnection | AsyncpgConnection) -> tuple[int, int]:
    """The current schema version, and the oldest version an Antiphon must know to use it."""
    if await connection.fetchval("SELECT to_regclass('schema_version')") is None:
        return 0, 0
    row = await connection.fetchrow("SELECT version, oldest FROM schema_version")
    return (row["version"], row["oldest"]) if row else (0, 0)


async def _apply_migration(connection: PgConnection | AsyncpgConnection, migration: Migration) -> None:
    if migration.version == 1:
        await connection.execute(
            "CREATE TABLE schema_version (version INTEGER NOT NULL, oldest INTEGER NOT NULL)"
        )
        await connection.execute("INSERT INTO schema_version (version, oldest) VALUES (0, 0)")
    for statement in migration.split_statements():
        await connection.execute(statement, timeout=MIGRATION_TIMEOUT_SECONDS)
    await connection.execute(
        "UPDATE schema_version SET version = $1, oldest = $2",
        migration.version,
        migration.oldest_compatible_version,
    )
