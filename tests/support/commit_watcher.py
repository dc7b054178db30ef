"""Waiting for what a store comes to hold: whatever changes that is a commit."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from support.app_fixture import BOUND


class CommitWatcher:
    """An `on_commit` for a store, after each of whose commits whoever waits looks again."""

    def __init__(self) -> None:
        self._next = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def __call__(self, phase: str) -> None:
        """On the thread of the store's writer."""
        if phase == "after":
            self._loop.call_soon_threadsafe(self._tell)

    def _tell(self) -> None:
        # One event for each commit, so that nobody who waits can clear what another one has not yet seen.
        told, self._next = self._next, asyncio.Event()
        told.set()

    async def until(self, condition: Callable[[], Awaitable[bool]], seconds: float | None = BOUND) -> None:
        async with asyncio.timeout(seconds):
            while True:
                following = self._next
                if await condition():
                    return
                await following.wait()
