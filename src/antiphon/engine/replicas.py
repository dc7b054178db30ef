"""Replicas that share a store, as transaction scripts: their leases, the coordinator, and their work in numbers.

A run has the lease of its owner, so one heartbeat renews all runs of a replica. One replica at a time is the
coordinator; another takes over when its heartbeats stop. Two that both believe they are coordinator do no harm, only
duplicate work.
"""

from __future__ import annotations

import msgspec

from antiphon.store import Row, Tx
from antiphon.store.queries import Queries

SQL = Queries("replicas")
STATUS_SQL = Queries("system_status")


class Replica(msgspec.Struct, frozen=True, kw_only=True):
    """The description of a process. `id` is new with every start."""

    id: str
    name: str = ""
    address: str | None = None
    version: str = ""
    started_at: int = 0


async def renew_lease(
    tx: Tx, replica: Replica, until: int, now: int, *, is_only_replica: bool = False
) -> None:
    """Renew the lease of all runs of this process. `is_only_replica` means that no other process can be alive."""
    if is_only_replica:
        await tx.do(SQL.delete_others, id=replica.id)
    await tx.do(
        SQL.renew,
        id=replica.id,
        until=until,
        now=now,
        name=replica.name,
        address=replica.address,
        version=replica.version,
        started_at=replica.started_at,
    )


async def delete_expired_replicas(tx: Tx, now: int) -> int:
    """Delete expired replicas whose runs have all been taken over. Returns their number."""
    expired = await tx.all(SQL.expired_without_runs, now=now)
    for row in expired:
        await tx.do(SQL.delete, id=row["id"])
    return len(expired)


async def release_lease(tx: Tx, owner: str) -> None:
    await tx.do(SQL.refund_attempts, owner=owner)
    await tx.do(SQL.release_coordinator_lease, owner=owner)
    await tx.do(SQL.delete, id=owner)


async def acquire_coordinator_lease(tx: Tx, owner: str, until: int, now: int) -> bool:
    """Try to become or stay the coordinator until the given time. Returns whether that succeeded."""
    return bool(await tx.do(SQL.renew_coordinator_lease, owner=owner, until=until, now=now))


async def list_replicas(tx: Tx, now: int) -> list[Row]:
    return await tx.all(SQL.list_all, now=now)


async def count_work(tx: Tx, now: int, max_counted: int) -> Row:
    """Return the runs, deliveries and replicas of the whole store by state, each counted up to `max_counted`."""
    row = await tx.one(STATUS_SQL.counts, now=now, most=max_counted)
    assert row is not None
    return row
