"""Waits for conditions on a store, which only a commit can change."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from support.app_fixture import BOUND


class CommitWatcher:
    """An `on_commit` callback that checks pending conditions after each commit."""

    def __init__(self) -> None:
        self._next = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def __call__(self, phase: str) -> None:
        """Called on the thread of the store's writer."""
        if phase == "after":
            self._loop.call_soon_threadsafe(self._wake_all)

    def _wake_all(self) -> None:
        # One event per commit, so that no waiter can clear an event that another one has not seen.
        reached, self._next = self._next, asyncio.Event()
        reached.set()

    async def until(self, condition: Callable[[], Awaitable[bool]], seconds: float | None = BOUND) -> None:
        async with asyncio.timeout(seconds):
            while True:
                following = self._next
                if await condition():
                    return
                await following.wait()
