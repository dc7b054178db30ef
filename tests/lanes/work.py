"""Work for lanes: jobs that stand for rows, and a drain that works them off as the engine does."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

BOUND = 15.0


class Work:
    """What several replicas share as they share a database. Every wait is for something that happens here."""

    def __init__(self) -> None:
        self.jobs: Counter[int] = Counter()
        self.done: Counter[int] = Counter()
        self.active: Counter[int] = Counter()
        self.looks: Counter[int] = Counter()
        self.by: dict[int, list[str]] = {}
        self.most = 0
        self.doubled = 0
        self.hold: asyncio.Event | None = None
        self._changed = asyncio.Condition()

    def drain(self, name: str = "a") -> Callable[[int], asyncio.Future[None]]:
        def drain(lane: int) -> asyncio.Future[None]:
            return asyncio.ensure_future(self._drain(lane, name))

        return drain

    async def _drain(self, lane: int, name: str) -> None:
        self.active[lane] += 1
        self.doubled += self.active[lane] > 1
        self.most = max(self.most, sum(self.active.values()))
        self.looks[lane] += 1
        self.by.setdefault(lane, []).append(name)
        await self._tell()
        try:
            if self.hold:
                await self.hold.wait()
            while self.jobs[lane]:
                self.jobs[lane] -= 1
                await asyncio.sleep(0)
                self.done[lane] += 1
            await asyncio.sleep(0)  # the moment between the last look and going idle
        finally:
            self.active[lane] -= 1
            await self._tell()

    async def waiting(self, lane: int) -> bool:
        return self.jobs[lane] > 0

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def until(self, true: Callable[[], bool], bound: float = BOUND) -> None:
        async with asyncio.timeout(bound), self._changed:
            await self._changed.wait_for(true)
