"""How the whole is doing, as its rows say it: what waits, what is under way, who is there.

Cheap enough to be asked every few seconds: it reads indexes of what is not over, and counts no further than
`MAX_ROWS_COUNTED`.
"""

from __future__ import annotations

import msgspec

from antiphon import access
from antiphon.access import Caller
from antiphon.operations.context import OperationContext
from antiphon.store import Tx
from antiphon.store.queries import Queries

SQL = Queries("standings")
MAX_ROWS_COUNTED = 10_000  # of each kind; "ten thousand wait" is as good an answer as any larger one


class SystemStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Of everybody who shares the store. Counts end at `MAX_ROWS_COUNTED`."""

    queued: int
    running: int
    idle_seconds: float
    """How long the oldest run has waited that waits for nothing but a replica to take it."""
    abandoned: int
    """Runs whose replica is silent and that no other has taken over yet."""
    replicas: int
    pending: int
    ambiguous: int
    dead: int


class SystemStatusOperations(OperationContext):
    async def get_system_status(self, caller: Caller) -> SystemStatus:
        """For whoever may read every session."""
        access.require_operator(caller, "list")
        return await self._store.read(_load_system_status, self._clock.now())


async def _load_system_status(tx: Tx, now: int) -> SystemStatus:
    row = await tx.one(SQL.standing, now=now, most=MAX_ROWS_COUNTED)
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
