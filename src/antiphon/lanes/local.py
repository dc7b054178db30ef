"""Lanes of a single process: one asyncio task per active lane, and no cost for an idle one."""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Collection

from antiphon.errors import AntiphonError
from antiphon.lanes import Drain, HasWaitingWork

log = logging.getLogger(__name__)

CANCEL_WAIT_SECONDS = 5.0  # for a cancelled drain; something in it may ignore the cancellation


async def wind_down(drains: Collection[asyncio.Task[None]], grace: float) -> None:
    """Gives the drains `grace` seconds to end by themselves, then cancels them, waiting only a bounded time."""
    if drains and grace > 0:
        await asyncio.wait(drains, timeout=grace)
    for drain in drains:
        drain.cancel()
    if drains:
        await asyncio.wait(drains, timeout=CANCEL_WAIT_SECONDS)


class LocalLanes:
    """Runs at most one drain per lane; an activation during a drain makes it check once more."""

    def __init__(self) -> None:
        self._drain: Drain | None = None
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._reactivated: set[int] = set()
        self._abandoned: set[asyncio.Task[None]] = set()

    @property
    def active_count(self) -> int:
        return len(self._tasks)

    async def start(self, drain: Drain, has_work: HasWaitingWork | None = None) -> None:
        self._drain = drain  # No hint gets lost within one process, so `has_work` is not needed.

    async def activate(self, lane: int) -> None:
        if self._drain is None:
            return
        if lane in self._tasks:
            self._reactivated.add(lane)
        else:
            # A fresh context: the hint may come from another session's run, whose context variables do not apply here.
            self._tasks[lane] = asyncio.create_task(
                self._run(lane, self._drain), name=f"lane-{lane}", context=contextvars.Context()
            )

    async def abandon(self, lane: int) -> None:
        self._reactivated.discard(lane)
        if task := self._tasks.pop(lane, None):
            self._abandoned.add(task)
            task.add_done_callback(self._abandoned.discard)
            task.cancel()

    def set_resting(self, lane: int, *, resting: bool) -> None:
        """Does nothing: a local process has no limit on active lanes."""

    async def stop(self, grace: float) -> None:
        self._drain = None
        await wind_down([*self._tasks.values(), *self._abandoned], grace)

    async def close(self) -> None:
        """Does nothing: no other process could take the lanes."""

    async def _run(self, lane: int, drain: Drain) -> None:
        try:
            while True:
                self._reactivated.discard(lane)
                try:
                    if await drain(lane):
                        self._reactivated.add(lane)
                        await asyncio.sleep(0)  # The drain stopped early to let other lanes run.
                except AntiphonError as error:
                    log.error("%s", error)
                except Exception:
                    log.exception("Draining lane %d failed; the supervisor's sweep will retry it", lane)
                if not self._owns(lane) or lane not in self._reactivated or self._drain is None:
                    return
        finally:
            if self._owns(lane):
                self._reactivated.discard(lane)
                del self._tasks[lane]

    def _owns(self, lane: int) -> bool:
        """Whether the current task still runs this lane; False for an abandoned drain."""
        return self._tasks.get(lane) is asyncio.current_task()
