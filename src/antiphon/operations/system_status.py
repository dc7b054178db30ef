"""The state of the whole system from its rows: queued and running runs, deliveries and replicas.

Cheap enough to be polled every few seconds: it reads indexes of unfinished work, and counts no further than
`MAX_ROWS_COUNTED`.
"""

from __future__ import annotations

import msgspec

from antiphon import access
from antiphon.access import Caller
from antiphon.operations.context import OperationContext
from antiphon.store import Tx
from antiphon.store.queries import Queries

SQL = Queries("system_status")
MAX_ROWS_COUNTED = 10_000  # of each kind; larger numbers are not worth the cost of counting


class SystemStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Totals over all replicas that share the store. Counts are capped at `MAX_ROWS_COUNTED`."""

    queued: int
    running: int
    idle_seconds: float
    """How long the oldest run has waited that only needs a replica to take it."""
    abandoned: int
    """Runs whose replica is silent and that no other replica has taken over yet."""
    replicas: int
    pending: int
    ambiguous: int
    dead: int


class SystemStatusOperations(OperationContext):
    async def get_system_status(self, caller: Caller) -> SystemStatus:
        """Return the totals; for operators that may read every session."""
        access.require_operator(caller, "list")
        return await self._store.read(_load_system_status, self._clock.now())


async def _load_system_status(tx: Tx, now: int) -> SystemStatus:
    row = await tx.one(SQL.counts, now=now, most=MAX_ROWS_COUNTED)
    assert row is not None
    since = row["idle_since"]
    return SystemStatus(
        queued=row["queued"],
        running=row["running"],
        idle_seconds=0.0 if since is None else max(0.0, (now - since) / 1000),
        abandoned=row["abandoned"],
        replicas=row["replicas"],
        pending=row["pending"],
        ambiguous=row["ambiguous"],
        dead=row["dead"],
    )
