"""The state of the whole system from its rows: queued and running runs, deliveries and replicas.

Cheap enough to be polled every few seconds: it reads indexes of unfinished work, and counts no further than
`MAX_ROWS_COUNTED`.
"""

from __future__ import annotations

from antiphon import access
from antiphon.access import Caller
from antiphon.engine import replicas
from antiphon.operations.context import OperationContext
from antiphon.operations.types import ReplicaView, SystemStatus
from antiphon.store import Row

MAX_ROWS_COUNTED = 10_000  # of each kind; larger numbers are not worth the cost of counting


class StatusOperations:
    def __init__(self, context: OperationContext) -> None:
        self._context = context

    async def get(self, caller: Caller) -> SystemStatus:
        """Return the totals; for operators that may read every session."""
        access.require_operator(caller, "list")
        now = self._context.clock.now()
        row = await self._context.store.read(replicas.count_work, now, MAX_ROWS_COUNTED)
        since = row["idle_since"]
        return SystemStatus(
            queued=row["queued"],
            running=row["running"],
            oldest_unclaimed_run_seconds=0.0 if since is None else max(0.0, (now - since) / 1000),
            abandoned=row["abandoned"],
            replicas=row["replicas"],
            pending=row["pending"],
            ambiguous=row["ambiguous"],
            dead=row["dead"],
            expired=row["expired"],
        )

    async def list_replicas(self, caller: Caller) -> list[ReplicaView]:
        """Return the replicas in the order in which they started; for operators."""
        access.require_operator(caller, "list")
        now = self._context.clock.now()
        return [
            _build_replica_view(row, now)
            for row in await self._context.store.read(replicas.list_replicas, now)
        ]


def _build_replica_view(row: Row, now: int) -> ReplicaView:
    return ReplicaView(
        id=row["id"],
        name=row["name"] or row["id"],
        address=row["address"],
        version=row["version"] or None,
        started_at=row["started_at"],
        lanes=row["lanes"],
        lag_ms=max(0, now - row["seen_at"]) if row["seen_at"] is not None else None,
        alive=row["lease_until"] > now,
        is_coordinator=bool(row["watching"]),
    )
