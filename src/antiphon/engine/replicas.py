"""The processes that share a store, as transaction scripts: their leases, and which of them looks after the whole.

A run's lease is its owner's: one heartbeat renews them all. The watch is kept by one replica at a time and passes to
another when it is silent; two that both believe to have it do each other no harm, only twice the work.
"""

from __future__ import annotations

import msgspec

from antiphon.store import Row, Tx
from antiphon.store.queries import Queries

SQL = Queries("replicas")


class Replica(msgspec.Struct, frozen=True, kw_only=True):
    """What a process says of itself. `id` is new with every start."""

    id: str
    name: str = ""
    address: str | None = None
    version: str = ""
    started_at: int = 0


async def renew_lease(tx: Tx, replica: Replica, until: int, now: int, *, alone: bool = False) -> None:
    """One write keeps every run of this process; `alone` means no other process can be alive."""
    if alone:
        await tx.do(SQL.drop_others, id=replica.id)
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
    """Those that are gone and whose runs have all been taken over; how many they were."""
    gone = await tx.all(SQL.expired, now=now)
    for row in gone:
        await tx.do(SQL.drop, id=row["id"])
    return len(gone)


async def release_lease(tx: Tx, owner: str) -> None:
    await tx.do(SQL.excuse, owner=owner)
    await tx.do(SQL.leave_watch, owner=owner)
    await tx.do(SQL.drop, id=owner)


async def acquire_coordinator_lease(tx: Tx, owner: str, until: int, now: int) -> bool:
    """Whether this one has the watch until then."""
    return bool(await tx.do(SQL.keep_watch, owner=owner, until=until, now=now))


async def list_replicas(tx: Tx, now: int) -> list[Row]:
    return await tx.all(SQL.listed, now=now)
