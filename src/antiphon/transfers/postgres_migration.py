"""Copies everything from the SQLite database of a state directory into a PostgreSQL database.

Rows are copied in batches in the order of their keys, each in one transaction with its position, so that a killed
migration continues there. At the end both sides are counted and checksummed independently of the copying; gateways
start on the target only after they match.

On resuming, the source up to the last copied key must still match what was copied: a source that was used meanwhile, or
a different one, is detected before anything else happens.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, closing, nullcontext
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from antiphon.errors import Conflict, StoreError
from antiphon.paths import DATABASE_FILE_NAME
from antiphon.store.postgres.connection import CONNECTION_ERRORS, PgServer, pg
from antiphon.store.postgres.copy_target import CopyTarget, TableProgress
from antiphon.store.sqlite.copy_source import CopySource
from antiphon.store.statedir import StateDir
from antiphon.store.table_digests import DigestSum, Table

_EMPTY_TARGET_HINT = "Empty the target (dropdb and createdb) and begin again; the source is as it was."


class MigrationProgress(msgspec.Struct, frozen=True, kw_only=True):
    """How many of a table's rows have been copied, or compared."""

    step: Literal["copy", "check"]
    table: str
    rows: int
    total: int


class MigrationResult(msgspec.Struct, frozen=True, kw_only=True):
    """The rows on the target, verified to be identical to the source."""

    tables: dict[str, int]
    replaced: int
    """Texts in which U+0000, which PostgreSQL cannot store, was replaced by U+FFFD."""
    already: bool = False
    """Whether an earlier migration had already finished."""


ProgressCallback: TypeAlias = Callable[[MigrationProgress], None]


async def migrate_to_postgres(path: Path, server: PgServer, tell: ProgressCallback) -> MigrationResult:
    """Copy everything, or the rest of it. The source must not be in use, and is never changed.

    Raises:
        StoreError: one of the two cannot be used, or they differ in the end; the message names the table.
        Conflict: the target holds other data.
    """
    with (
        await asyncio.to_thread(_own_source, path),
        closing(await asyncio.to_thread(CopySource.open, path)) as source,
    ):
        async with _open_target(server) as target:
            return await _run_migration(source, target, tell)


def _own_source(path: Path) -> AbstractContextManager[object]:
    """Lock the state directory of the source; a copy of a database under another name has no owner to lock out."""
    if path.name == DATABASE_FILE_NAME and path.exists():
        return StateDir.open_locked(path.parent)
    return nullcontext()


@asynccontextmanager
async def _open_target(server: PgServer) -> AsyncGenerator[CopyTarget]:
    target = await CopyTarget.connect(server)
    try:
        yield target
    except (pg.PostgresError, *CONNECTION_ERRORS) as error:
        raise target.translate_error(error) from error
    finally:
        await target.close()


async def _run_migration(source: CopySource, target: CopyTarget, tell: ProgressCallback) -> MigrationResult:
    tables = await asyncio.to_thread(source.list_tables)
    places = await target.begin_copy(tables)
    if places is None:
        return await _confirm_already_migrated(source, target, tables, tell)
    await _check_positions(source, target, tables, places)
    for table in tables:
        places[table.name] = await _copy_table(
            source, target, table, places.get(table.name, TableProgress()), tell
        )
    sums = await _compare_tables(source, target, tables, tell)
    await target.finish(await asyncio.to_thread(source.load_sequences), tables)
    return MigrationResult(tables=sums, replaced=sum(place.replaced for place in places.values()))


async def _confirm_already_migrated(
    source: CopySource, target: CopyTarget, tables: Sequence[Table], tell: ProgressCallback
) -> MigrationResult:
    """Confirm a finished migration: the process may have been killed after the last commit, before reporting it."""
    try:
        return MigrationResult(
            tables=await _compare_tables(source, target, tables, tell), replaced=0, already=True
        )
    except StoreError as error:
        raise target.build_foreign_error() from error


async def _check_positions(
    source: CopySource, target: CopyTarget, tables: Sequence[Table], places: Mapping[str, TableProgress]
) -> None:
    for table in tables:
        place = places.get(table.name)
        if place and await asyncio.to_thread(source.sum_digests, table, place.last) != place.sum:
            raise Conflict(
                f"The database {target.display_name} holds a part of something else, "
                "or the source was used since then: "
                f"what was copied of the table {table.name!r} is not in it any more.",
                _EMPTY_TARGET_HINT,
                table=table.name,
            )


async def _copy_table(
    source: CopySource, target: CopyTarget, table: Table, place: TableProgress, tell: ProgressCallback
) -> TableProgress:
    total = await asyncio.to_thread(source.count_rows, table)
    _report_progress(tell, "copy", table, place.sum.rows, total)
    while batch := await asyncio.to_thread(source.load_batch_after, table, place.last):
        place = await target.copy_batch(table, place, batch) or await target.load_progress(table)
        _report_progress(tell, "copy", table, place.sum.rows, total)
    return place


async def _compare_tables(
    source: CopySource, target: CopyTarget, tables: Sequence[Table], tell: ProgressCallback
) -> dict[str, int]:
    """Compare both sides in full and return the row counts."""
    sums: dict[str, int] = {}
    for table in tables:
        here = await asyncio.to_thread(source.sum_digests, table)
        _report_progress(tell, "check", table, 0, here.rows)
        there = await target.sum_digests(
            table,
            lambda rows, table=table, total=here.rows: _report_progress(tell, "check", table, rows, total),
        )
        if here != there:
            raise _build_difference_error(table, here, there)
        sums[table.name] = here.rows
    return sums


def _build_difference_error(table: Table, here: DigestSum, there: DigestSum) -> StoreError:
    how = (
        f"{here.rows} rows in the source, {there.rows} in the target"
        if here.rows != there.rows
        else f"{here.rows} rows in both, but not the same ones"
    )
    return StoreError(
        f"The table {table.name!r} was not copied faithfully: {how}.", _EMPTY_TARGET_HINT, table=table.name
    )


def _report_progress(
    tell: ProgressCallback, step: Literal["copy", "check"], table: Table, rows: int, total: int
) -> None:
    tell(MigrationProgress(step=step, table=table.name, rows=rows, total=total))
