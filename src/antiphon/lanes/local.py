"""Lanes of one process: an asyncio task per active lane, nothing at all for an idle one."""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Collection

from antiphon.errors import AntiphonError
from antiphon.lanes import Drain, HasWaitingWork

log = logging.getLogger(__name__)

CANCEL_WAIT_SECONDS = (
    5.0  # seconds a cancelled drain may take to end; something in it may not know how to stop
)


async def wind_down(drains: Collection[asyncio.Task[None]], grace: float) -> None:
    """Let them end by themselves for so many seconds, then cancel them, and wait for none for ever."""
    if drains and grace > 0:
        await asyncio.wait(drains, timeout=grace)
    for drain in drains:
        drain.cancel()
    if drains:
        await asyncio.wait(drains, timeout=CANCEL_WAIT_SECONDS)


class LocalLanes:
    """At most one drain per lane at a time; an activation during a drain causes one more look."""

    def __init__(self) -> None:
        self._drain: Drain | None = None
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._again: set[int] = set()
        self._stuck: set[asyncio.Task[None]] = set()

    @property
    def active_count(self) -> int:
        return len(self._tasks)

    async def start(self, drain: Drain, waiting: HasWaitingWork | None = None) -> None:
        self._drain = drain  # Within a process no hint gets lost, so there is nothing to ask.

    async def activate(self, lane: int) -> None:
        if self._drain is None:
            return
        if lane in self._tasks:
            self._again.add(lane)
        else:
            # A context of its own: whoever gave the hint may be another session's run, whose variables are not ours.
            self._tasks[lane] = asyncio.create_task(
                self._run(lane, self._drain), name=f"lane-{lane}", context=contextvars.Context()
            )

    async def abandon(self, lane: int) -> None:
        self._again.discard(lane)
        if task := self._tasks.pop(lane, None):
            self._stuck.add(task)
            task.add_done_callback(self._stuck.discard)
            task.cancel()

    def set_resting(self, lane: int, *, resting: bool) -> None:
        """There are places for all."""

    async def stop(self, grace: float) -> None:
        self._drain = None
        await wind_down([*self._tasks.values(), *self._stuck], grace)

    async def close(self) -> None:
        """There is nobody else."""

    async def _run(self, lane: int, drain: Drain) -> None:
        try:
            while True:
                self._again.discard(lane)
                try:
                    if await drain(lane):
                        self._again.add(lane)
                        await asyncio.sleep(0)  # It was given back for others to have their turn.
                except AntiphonError as error:
                    log.error("%s", error)
                except Exception:
                    log.exception("Lane %d stopped; it is looked at again by the sweeper", lane)
                if not self._owns(lane) or lane not in self._again or self._drain is None:
                    return
        finally:
            if self._owns(lane):
                self._again.discard(lane)
                del self._tasks[lane]

    def _owns(self, lane: int) -> bool:
        """False for a drain that was abandoned: the lane is somebody else's then."""
        return self._tasks.get(lane) is asyncio.current_task()
