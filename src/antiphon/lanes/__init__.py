"""Who runs a session.

A lane is a session seen as a queue of runs; it is known by its row number, never by its key. `activate` is a
hint that a lane may have work: it can be repeated, lost or late without harm, because the database decides
what runs (a claim with a fencing epoch) and a sweeper looks again. It never fails a caller who has committed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

Drain = Callable[[int], Awaitable[bool | None]]
"""Work a lane off until the database has nothing more for it. True: it was given back early, and there is more."""

HasWaitingWork = Callable[[int], Awaitable[bool]]
"""Whether the database has work for a lane that nobody is at."""


class LaneEngine(Protocol):
    async def start(self, drain: Drain, waiting: HasWaitingWork | None = None) -> None:
        """Begin. `waiting` is asked after a lane was let go, where a hint can get lost in that moment."""
        ...

    async def activate(self, lane: int) -> None:
        """Idempotent hint. Returns at once and never raises."""
        ...

    async def abandon(self, lane: int) -> None:
        """The lane's drain, wherever it is, is stuck in a run that has been ended: let others have the lane."""
        ...

    def set_resting(self, lane: int, *, resting: bool) -> None:
        """What runs in the lane waits for another lane, or does so no longer: meanwhile it takes nobody's place."""
        ...

    async def stop(self, grace: float) -> None:
        """Take no new lane; give the active ones `grace` seconds, then cancel them, and wait for none for ever."""
        ...

    async def close(self) -> None:
        """After `stop`, when the store knows that this process holds nothing any more: others may have its lanes."""
        ...
