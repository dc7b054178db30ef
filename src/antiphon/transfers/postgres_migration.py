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

_EMPTY_TARGET_HINT = "Recreate the target (dropdb and createdb) and start again; the source is unchanged."


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
    was_finished: bool = False
    """Whether an earlier migration had already finished."""


ProgressCallback: TypeAlias = Callable[[MigrationProgress], None]


async def migrate_to_postgres(path: Path, server: PgServer, report: ProgressCallback) -> MigrationResult:
    """Copies everything, or the rest of it. The source must not be in use, and is never changed.

    Raises:
        StoreError: one of the two cannot be used, or they differ in the end; the message names the table.
        Conflict: the target holds other data.
    """
    with (
        await asyncio.to_thread(_lock_source, path),
        closing(await asyncio.to_thread(CopySource.open, path)) as source,
    ):
        async with _open_target(server) as target:
            return await _run_migration(source, target, report)


def _lock_source(path: Path) -> AbstractContextManager[object]:
    """Locks the state directory of the source; a database under another name has no gateway to exclude."""
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


async def _run_migration(source: CopySource, target: CopyTarget, report: ProgressCallback) -> MigrationResult:
    tables = await asyncio.to_thread(source.list_tables)
    progress_by_table = await target.begin_copy(tables)
    if progress_by_table is None:
        return await _confirm_already_migrated(source, target, tables, report)
    await _check_copied_rows(source, target, tables, progress_by_table)
    for table in tables:
        progress_by_table[table.name] = await _copy_table(
            source, target, table, progress_by_table.get(table.name, TableProgress()), report
        )
    row_counts = await _compare_tables(source, target, tables, report)
    await target.finish(await asyncio.to_thread(source.load_sequences), tables)
    return MigrationResult(
        tables=row_counts, replaced=sum(each.replaced for each in progress_by_table.values())
    )


async def _confirm_already_migrated(
    source: CopySource, target: CopyTarget, tables: Sequence[Table], report: ProgressCallback
) -> MigrationResult:
    """Confirms a finished migration: the process may have been killed after the last commit, before reporting it."""
    try:
        return MigrationResult(
            tables=await _compare_tables(source, target, tables, report), replaced=0, was_finished=True
        )
    except StoreError as error:
        raise target.build_foreign_error() from error


async def _check_copied_rows(
    source: CopySource,
    target: CopyTarget,
    tables: Sequence[Table],
    progress_by_table: Mapping[str, TableProgress],
) -> None:
    for table in tables:
        progress = progress_by_table.get(table.name)
        if progress and await asyncio.to_thread(source.sum_digests, table, progress.last) != progress.sum:
            raise Conflict(
                f"The database {target.display_name} contains part of another copy, "
                "or the source has changed since: "
                f"its copied rows of the table {table.name!r} no longer match.",
                _EMPTY_TARGET_HINT,
                table=table.name,
            )


async def _copy_table(
    source: CopySource, target: CopyTarget, table: Table, progress: TableProgress, report: ProgressCallback
) -> TableProgress:
    total = await asyncio.to_thread(source.count_rows, table)
    _report_progress(report, "copy", table, progress.sum.rows, total)
    while batch := await asyncio.to_thread(source.load_batch_after, table, progress.last):
        progress = await target.copy_batch(table, progress, batch) or await target.load_progress(table)
        _report_progress(report, "copy", table, progress.sum.rows, total)
    return progress


async def _compare_tables(
    source: CopySource, target: CopyTarget, tables: Sequence[Table], report: ProgressCallback
) -> dict[str, int]:
    """Compares both sides in full and returns the row counts."""
    row_counts: dict[str, int] = {}
    for table in tables:
        source_sum = await asyncio.to_thread(source.sum_digests, table)
        _report_progress(report, "check", table, 0, source_sum.rows)
        target_sum = await target.sum_digests(
            table,
            lambda rows, table=table, total=source_sum.rows: _report_progress(
                report, "check", table, rows, total
            ),
        )
        if source_sum != target_sum:
            raise _build_difference_error(table, source_sum, target_sum)
        row_counts[table.name] = source_sum.rows
    return row_counts


def _build_difference_error(table: Table, source_sum: DigestSum, target_sum: DigestSum) -> StoreError:
    difference = (
        f"{source_sum.rows} rows in the source, {target_sum.rows} in the target"
        if source_sum.rows != target_sum.rows
        else f"{source_sum.rows} rows in both, but not the same ones"
    )
    return StoreError(
        f"The table {table.name!r} differs between source and target: {difference}.",
        _EMPTY_TARGET_HINT,
        table=table.name,
    )


def _report_progress(
    report: ProgressCallback, step: Literal["copy", "check"], table: Table, rows: int, total: int
) -> None:
    report(MigrationProgress(step=step, table=table.name, rows=rows, total=total))
