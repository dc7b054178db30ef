"""Retention: old sessions leave the lists, and much later, if configured, the store.

Archiving hides and deletes nothing. Only sessions that are idle are touched, a bounded number in a transaction,
and the clock is the engine's, so that years pass in a test. What is on record of exchanges, tasks, deliveries, chains
and commands goes by the same time as archived sessions, once it is over.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeAlias

import msgspec

from antiphon.engine import sessions
from antiphon.store import Store, Tx
from antiphon.store.listing import KINDS
from antiphon.store.queries import Queries, Query

DAY = 86_400_000  # milliseconds
BATCH = 50  # sessions in one transaction; a long one would hold up everybody's commits
RECORDS = 1000  # rows of a kind in one sweep; those that are left wait for the next

SQL = Queries("retention")
OVER = (SQL.old_exchanges, SQL.old_tasks, SQL.old_deliveries, SQL.old_chains, SQL.old_commands)

Step: TypeAlias = Callable[[Tx, str, int, int], Awaitable[list[str]]]


class Keep(msgspec.Struct, frozen=True, kw_only=True):
    """Days without activity before archiving, days in the archive before deleting; None is for ever."""

    archive_after_days: float | None = None
    delete_archived_after_days: float | None = None


async def sweep(store: Store, keep: Keep, now: int) -> list[str]:
    """Apply `keep` everywhere; the keys that were touched."""
    touched: list[str] = []
    for kind in KINDS:
        if keep.archive_after_days is not None:
            touched += await _repeat(store, _archive, kind, now - round(keep.archive_after_days * DAY), now)
        if keep.delete_archived_after_days is not None:
            touched += await _repeat(
                store, _delete, kind, now - round(keep.delete_archived_after_days * DAY), now
            )
    if keep.delete_archived_after_days is not None:
        for query in OVER:
            await store.tx(_drop, query, now - round(keep.delete_archived_after_days * DAY))
    return touched


async def _repeat(store: Store, script: Step, kind: str, before: int, now: int) -> list[str]:
    touched: list[str] = []
    while True:
        batch = await store.tx(script, kind, before, now)
        touched += batch
        if len(batch) < BATCH:
            return touched


async def _archive(tx: Tx, kind: str, before: int, now: int) -> list[str]:
    rows = await tx.all(sessions.SQL.stale, kind=kind, before=before, limit=BATCH)
    for row in rows:
        await tx.do(sessions.SQL.archive, id=row["id"], now=now)
    return [row["key"] for row in rows]


async def _delete(tx: Tx, kind: str, before: int, now: int) -> list[str]:
    rows = await tx.all(sessions.SQL.expired, kind=kind, before=before, limit=BATCH)
    for row in rows:
        await sessions.forget(tx, row["id"], row["key"], now)
    return [row["key"] for row in rows]


async def _drop(tx: Tx, query: Query, before: int) -> None:
    await tx.do(query, before=before, limit=RECORDS)
