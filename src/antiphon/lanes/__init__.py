"""Lanes decide which process runs a session.

A lane is a session seen as a queue of runs; it is identified by its row number, never by its key. `activate` is a
hint that a lane may have work: it can be repeated, lost or late without harm, because the database decides
what runs (a claim with a fencing epoch) and the supervisor's sweep checks again. It never fails a caller that has
committed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

Drain = Callable[[int], Awaitable[bool | None]]
"""Executes the runs of a lane until the database has no more. Returns True if it stopped early and more are left."""

HasWaitingWork = Callable[[int], Awaitable[bool]]
"""Whether the database has work for a lane that no process is running."""


class LaneEngine(Protocol):
    async def start(self, drain: Drain, has_work: HasWaitingWork | None = None) -> None:
        """Starts taking lanes. `has_work` is called after a lane is released, since a hint can get lost then."""
        ...

    async def activate(self, lane: int) -> None:
        """Hints that a lane may have work. Idempotent; returns at once and never raises."""
        ...

    async def abandon(self, lane: int) -> None:
        """Releases a lane whose drain, in whatever process, is stuck in a run that has already been ended."""
        ...

    def set_resting(self, lane: int, *, resting: bool) -> None:
        """Marks a lane as waiting for another lane, or as no longer waiting; a resting lane occupies no slot."""
        ...

    async def stop(self, grace: float) -> None:
        """Takes no new lanes; gives the active ones `grace` seconds, then cancels them, waiting only a bounded time."""
        ...

    async def close(self) -> None:
        """Releases this process's lanes to others. Call it after `stop`, when the store shows that it holds no runs."""
        ...
