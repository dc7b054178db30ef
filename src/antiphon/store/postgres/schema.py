"""Bringing a PostgreSQL database to the schema this version was written for, one process at a time.

The schema says which is the oldest Antiphon that can work on it, so that replicas can be replaced one by one: the
version before keeps working after the first new one has migrated, and one that is older than that refuses to start.
"""

from __future__ import annotations

import asyncio
import logging
from time import monotonic

from antiphon.errors import StoreError
from antiphon.store.migrations import Migration, migrations, missing
from antiphon.store.postgres.connection import Connection, Link, pg

log = logging.getLogger(__name__)

MOVING = "moving"
"""A table that is there while another database is moved into this one; see `target`."""
STEP_SECONDS = 3600.0  # for one statement of a migration, and for those of another process
_LOCK = 0x414E5450  # "ANTP": the advisory lock under which one process at a time migrates
_BEGIN = "BEGIN; SET LOCAL statement_timeout = 0; SET LOCAL lock_timeout = 0"


async def prepare(link: Link | Connection, *, migrate: bool, moving: bool = False) -> None:
    """Bring the database up to date, one process at a time; one from the future is refused untouched.

    So is one that another database is being moved into, but by whoever is `moving`.
    """
    if not moving and await link.fetchval("SELECT to_regclass($1)::text", MOVING) is not None:
        raise StoreError(
            "Another database is being moved into this one, and that is not finished.",
            "Give the command that moves it again: it goes on where it stopped.",
        )
    until = monotonic() + STEP_SECONDS
    while left := await _left(link):
        if not migrate:
            present = left[0].version - 1
            raise StoreError(
                f"The database has schema {present}, this Antiphon needs {left[-1].version}.",
                "Start `antiphon up` once with the right to migrate it.",
            )
        if not await _step(link):
            await _others(until)


async def begin_alone(link: Link | Connection) -> None:
    """Begin a transaction in which nobody migrates but whoever has it; waits for others."""
    await link.execute(f"{_BEGIN}; SELECT pg_advisory_xact_lock({_LOCK})", timeout=STEP_SECONDS)


async def _others(until: float) -> None:
    if monotonic() > until:
        raise StoreError(
            "Another process has been migrating the database for an hour.",
            "Look for what it waits for, or end it: a migration that is cut off leaves nothing behind.",
        )
    await asyncio.sleep(0.1)


async def _step(link: Link | Connection) -> bool:
    """Apply the next migration; False if somebody else is at it, or was in the way."""
    await link.execute(_BEGIN)
    try:
        mine = await link.fetchval(f"SELECT pg_try_advisory_xact_lock({_LOCK})")
        if mine and (left := await _left(link)):
            log.info("Bringing the database to schema %d", left[0].version)
            await _apply(link, left[0])
        await link.execute("COMMIT")
    except pg.DeadlockDetectedError:  # with a process that works on the database meanwhile
        await link.execute("ROLLBACK")
        return False
    return mine


async def _left(link: Link | Connection) -> list[Migration]:
    present, oldest = await _schema(link)
    return missing(present, oldest, migrations("postgres"))


async def _schema(link: Link | Connection) -> tuple[int, int]:
    """The schema that is there, and the oldest that an Antiphon has to know to work on it."""
    if await link.fetchval("SELECT to_regclass('schema_version')") is None:
        return 0, 0
    row = await link.fetchrow("SELECT version, oldest FROM schema_version")
    return (row["version"], row["oldest"]) if row else (0, 0)


async def _apply(link: Link | Connection, migration: Migration) -> None:
    if migration.version == 1:
        await link.execute("CREATE TABLE schema_version (version INTEGER NOT NULL, oldest INTEGER NOT NULL)")
        await link.execute("INSERT INTO schema_version (version, oldest) VALUES (0, 0)")
    for statement in migration.statements():
        await link.execute(statement, timeout=STEP_SECONDS)
    await link.execute(
        "UPDATE schema_version SET version = $1, oldest = $2", migration.version, migration.oldest
    )
