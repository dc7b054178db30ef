"""Runs that a process may have died of, one at a time.

A crash interrupts everything that is under way and does not say which run it was. One that has been interrupted
several times without getting on is suspected, and suspects are not begun beside each other: so a run that kills its
process at once is put aside without those that were there. One that takes longer, or that waited for another session,
may take those down that were begun meanwhile.
"""

from __future__ import annotations

import asyncio
import logging

log = logging.getLogger(__name__)

MIN_SUSPECT_INTERRUPTIONS = 3  # interruptions; so many leave two tries alone
MAX_TURN_SECONDS = (
    15.0  # seconds after which the next one may begin beside it: nobody waits for a long answer
)
ALL_SUSPECTS_START_SECONDS = (
    60.0  # seconds in which every one of many has begun; most that kill their process do so at once
)


def compute_turn_seconds(left: float, behind: int) -> float:
    """The seconds of one who has so many behind it, of those in which all are to begin."""
    return min(MAX_TURN_SECONDS, max(0.0, left) / (1 + behind))


class CrashQuarantine:
    def __init__(self) -> None:
        self._place = asyncio.Lock()
        self._waiting = 0
        self._until = 0.0
        self._lane: int | None = None
        self._over: asyncio.TimerHandle | None = None

    async def enter(self, lane: int) -> None:
        """Wait for the place, and have it for a while."""
        loop = asyncio.get_running_loop()
        if not self._waiting:
            self._until = loop.time() + ALL_SUSPECTS_START_SECONDS
            if self._place.locked():
                log.warning("Runs that were interrupted several times are begun one after the other")
        self._waiting += 1
        try:
            await self._place.acquire()
        finally:
            self._waiting -= 1
        self._lane = lane
        seconds = compute_turn_seconds(self._until - loop.time(), self._waiting)
        self._over = loop.call_later(seconds, self.leave, lane)

    def leave(self, lane: int) -> None:
        """Let the next one begin if this lane has the place: its run gets on, has ended, takes long or waits itself."""
        if self._lane == lane and self._over:
            self._over.cancel()
            self._lane = self._over = None
            self._place.release()
