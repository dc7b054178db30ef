"""The replicas that share the store, from their own heartbeats."""

from __future__ import annotations

from antiphon import access
from antiphon.access import Caller
from antiphon.engine import replicas
from antiphon.operations.context import OperationContext
from antiphon.store import Row
from antiphon.views import ReplicaView


class ReplicaOperations(OperationContext):
    async def list_replicas(self, caller: Caller) -> list[ReplicaView]:
        """Return the replicas in the order in which they started; for operators."""
        access.require_operator(caller, "list")
        now = self._clock.now()
        return [_build_replica_view(row, now) for row in await self._store.read(replicas.list_replicas, now)]


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
        watching=bool(row["watching"]),
    )
