"""Retention: old sessions are archived and, if configured, deleted much later.

Archiving hides a session and deletes nothing. Only idle sessions are changed, a bounded number per transaction, and
time comes from the engine's clock, so that tests can simulate years. Records of finished exchanges, tasks, deliveries,
chains and commands are deleted after the same time as archived sessions.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple, TypeAlias

import msgspec

from antiphon.clock import MILLISECONDS_PER_DAY
from antiphon.engine.sessions import session_rows
from antiphon.store import Store, Tx
from antiphon.store.listing import SESSION_KINDS
from antiphon.store.queries import Queries, Query

MAX_SESSIONS_PER_TRANSACTION = 50  # a long transaction would delay all other commits
MAX_RECORDS_PER_SWEEP = 1000  # of each kind; the rest waits for the next sweep

SQL = Queries("retention")
OLD_RECORD_QUERIES = (
    SQL.delete_old_exchanges,
    SQL.delete_old_tasks,
    SQL.delete_old_delivery_parts,
    SQL.delete_old_deliveries,
    SQL.delete_old_chains,
    SQL.delete_old_commands,
)


class RemovedSession(NamedTuple):
    """A session that was archived or deleted, and the conversation that it had."""

    key: str
    session_id: str


RetentionScript: TypeAlias = Callable[[Tx, str, int, int], Coroutine[Any, Any, list[RemovedSession]]]


class RetentionPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Days without activity before archiving, days in the archive before deleting; None means never."""

    archive_after_days: float | None = None
    delete_archived_after_days: float | None = None


async def apply_retention(store: Store, policy: RetentionPolicy, now: int) -> list[RemovedSession]:
    """Apply a policy to all sessions. Returns the sessions archived or deleted."""
    changed: list[RemovedSession] = []
    archive_before = _compute_cutoff(policy.archive_after_days, now)
    delete_before = _compute_cutoff(policy.delete_archived_after_days, now)
    for kind in SESSION_KINDS:
        if archive_before is not None:
            changed += await _run_in_batches(store, _archive_stale_sessions, kind, archive_before, now)
        if delete_before is not None:
            changed += await _run_in_batches(store, _delete_expired_sessions, kind, delete_before, now)
    if delete_before is not None:
        for query in OLD_RECORD_QUERIES:
            await store.tx(_delete_old_records, query, delete_before)
    return changed


def _compute_cutoff(days: float | None, now: int) -> int | None:
    return None if days is None else now - round(days * MILLISECONDS_PER_DAY)


async def _run_in_batches(
    store: Store, script: RetentionScript, kind: str, before: int, now: int
) -> list[RemovedSession]:
    changed: list[RemovedSession] = []
    while True:
        batch = await store.tx(script, kind, before, now)
        changed += batch
        if len(batch) < MAX_SESSIONS_PER_TRANSACTION:
            return changed


async def _archive_stale_sessions(tx: Tx, kind: str, before: int, now: int) -> list[RemovedSession]:
    rows = await session_rows.list_unused_sessions(tx, kind, before, MAX_SESSIONS_PER_TRANSACTION)
    for row in rows:
        await session_rows.archive_session(tx, row["id"], now)
    return [RemovedSession(row["key"], row["session_id"]) for row in rows]


async def _delete_expired_sessions(tx: Tx, kind: str, before: int, now: int) -> list[RemovedSession]:
    rows = await session_rows.list_expired_sessions(tx, kind, before, MAX_SESSIONS_PER_TRANSACTION)
    for row in rows:
        await session_rows.delete_session(tx, row["id"], row["key"], now)
    return [RemovedSession(row["key"], row["session_id"]) for row in rows]


async def _delete_old_records(tx: Tx, query: Query, before: int) -> None:
    await tx.do(query, before=before, limit=MAX_RECORDS_PER_SWEEP)
