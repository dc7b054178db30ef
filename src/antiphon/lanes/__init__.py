"""Who runs a session.

A lane is a session seen as a queue of runs; it is known by its row number, never by its key. `activate` is a
hint that a lane may have work: it can be repeated, lost or late without harm, because the database decides
what runs (a claim with a fencing epoch) and a sweeper looks again. It never fails a caller who has committed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

Drain = Callable[[int], Awaitable[None]]
"""Work a lane off until the database has nothing more for it."""


class LaneEngine(Protocol):
    async def start(self, drain: Drain) -> None: ...

    async def activate(self, lane: int) -> None:
        """Idempotent hint. Returns at once and never raises."""
        ...

    async def abandon(self, lane: int) -> None:
        """The lane's drain is stuck in a run that has been ended: let others have the lane without it."""
        ...

    async def stop(self, grace: float) -> None:
        """Take no new lane; give the active ones `grace` seconds, then cancel them, and wait for none for ever."""
        ...
