"""Retries crash suspects one at a time.

A crash interrupts every active run and does not show which one caused it. A run that was interrupted several times
without progress is a suspect, and suspects are not started concurrently. So a run that kills its process immediately
is quarantined without affecting the others. A run that kills it later, or after waiting for another session, may still
interrupt suspects that were started in the meantime.
"""

from __future__ import annotations

import asyncio
import logging

log = logging.getLogger(__name__)

MIN_SUSPECT_INTERRUPTIONS = 3  # leaves two attempts in quarantine
MAX_TURN_SECONDS = 15.0  # then the next suspect may start as well, so a long answer does not block the others
ALL_SUSPECTS_START_SECONDS = 60.0  # all suspects start within this time; most crashes happen immediately


def compute_turn_seconds(left: float, behind: int) -> float:
    """Return how long a suspect runs alone, given the time left and the number of suspects waiting behind it."""
    return min(MAX_TURN_SECONDS, max(0.0, left) / (1 + behind))


class CrashQuarantine:
    def __init__(self) -> None:
        self._slot = asyncio.Lock()
        self._waiting = 0
        self._until = 0.0
        self._lane: int | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def enter(self, lane: int) -> None:
        """Wait until no other suspect has the slot, then hold it for a limited time."""
        loop = asyncio.get_running_loop()
        if not self._waiting:
            self._until = loop.time() + ALL_SUSPECTS_START_SECONDS
            if self._slot.locked():
                log.warning("Starting runs that were interrupted several times one at a time")
        self._waiting += 1
        try:
            await self._slot.acquire()
        finally:
            self._waiting -= 1
        self._lane = lane
        seconds = compute_turn_seconds(self._until - loop.time(), self._waiting)
        self._timer = loop.call_later(seconds, self.leave, lane)

    def leave(self, lane: int) -> None:
        """Release the slot if this lane holds it: its run made progress, ended, takes long or waits for another."""
        if self._lane == lane and self._timer:
            self._timer.cancel()
            self._lane = self._timer = None
            self._slot.release()
