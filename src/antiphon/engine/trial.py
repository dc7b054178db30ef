"""Runs that a process may have died of, one at a time.

A crash interrupts everything that is under way and does not say which run it was. One that has been interrupted
several times without getting on is suspected, and suspects are not begun beside each other: so the next crash counts
against one of them only, and a run that kills its process is put aside without those that were there.
"""

from __future__ import annotations

import asyncio

SUSPECTED = 3  # interruptions; so many leave two tries alone
TURN = 15.0  # seconds after which the next one may begin beside it: nobody waits for a long answer


class Trial:
    def __init__(self) -> None:
        self._place = asyncio.Lock()
        self._lane: int | None = None
        self._over: asyncio.TimerHandle | None = None

    async def enter(self, lane: int) -> None:
        """Wait for the place, and have it for `TURN` at most."""
        await self._place.acquire()
        self._lane = lane
        self._over = asyncio.get_running_loop().call_later(TURN, self.leave, lane)

    def leave(self, lane: int) -> None:
        """Let the next one begin, if this lane has the place: its run gets on, has ended, takes long or waits itself."""
        if self._lane == lane:
            assert self._over
            self._over.cancel()
            self._lane = self._over = None
            self._place.release()
