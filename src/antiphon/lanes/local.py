"""Lanes of one process: an asyncio task per active lane, nothing at all for an idle one."""

from __future__ import annotations

import asyncio
import logging

from antiphon.errors import AntiphonError
from antiphon.lanes import Drain

log = logging.getLogger(__name__)


class LocalLanes:
    """At most one drain per lane at a time; an activation during a drain causes one more look."""

    def __init__(self) -> None:
        self._drain: Drain | None = None
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._again: set[int] = set()

    @property
    def active(self) -> int:
        return len(self._tasks)

    async def start(self, drain: Drain) -> None:
        self._drain = drain

    async def activate(self, lane: int) -> None:
        if self._drain is None:
            return
        if lane in self._tasks:
            self._again.add(lane)
        else:
            self._tasks[lane] = asyncio.create_task(self._run(lane, self._drain), name=f"lane-{lane}")

    async def stop(self, grace: float) -> None:
        self._drain = None
        tasks = list(self._tasks.values())
        if tasks and grace > 0:
            await asyncio.wait(tasks, timeout=grace)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, lane: int, drain: Drain) -> None:
        try:
            while True:
                self._again.discard(lane)
                try:
                    await drain(lane)
                except AntiphonError as error:
                    log.error("%s", error)
                except Exception:
                    log.exception("Lane %d stopped; it is looked at again by the sweeper", lane)
                if lane not in self._again or self._drain is None:
                    return
        finally:
            self._again.discard(lane)
            del self._tasks[lane]
