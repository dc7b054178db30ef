"""Workers that take jobs off one queue: each its share of what is waiting, so that it grows with the load."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from typing import TypeVar

from antiphon.errors import StoreError, StoreUnsure
from antiphon.store.postgres.worker import Bound, Job, Worker

log = logging.getLogger(__name__)

T = TypeVar("T")

BATCH = 32  # scripts in one transaction at most
BACKLOG = 20_000  # scripts that may wait before callers are told to come back


class Crew:
    """Everything that was handed over gets an outcome, also when the crew is dismissed or cancelled."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        self._workers = workers
        self._jobs: deque[Job] = deque()
        self._idle: deque[asyncio.Future[None]] = deque()
        self._dismissed = False
        self._tasks = [asyncio.create_task(self._run(worker)) for worker in workers]
        self._left = len(self._tasks)

    async def hand(self, run: Bound[T]) -> T:
        if self._dismissed:
            raise _closed()
        if len(self._jobs) >= BACKLOG:
            raise StoreError(
                f"{BACKLOG} transactions are already waiting for the database.", "Try again in a moment."
            )
        job = Job(run, asyncio.get_running_loop().create_future())
        self._jobs.append(job)
        self._wake()
        return await job.future

    async def dismiss(self) -> None:
        """Finish what is waiting, then let go of the connections."""
        self._dismissed = True
        while self._idle:
            self._wake()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _wake(self) -> None:
        while self._idle:
            waiting = self._idle.popleft()
            if not waiting.done():
                waiting.set_result(None)
                return

    async def _run(self, worker: Worker) -> None:
        try:
            while jobs := await self._take():
                await self._work(worker, jobs)
            await worker.close()
        finally:
            worker.drop()
            self._leave()

    async def _work(self, worker: Worker, jobs: Sequence[Job]) -> None:
        try:
            await worker.work(jobs)
        except BaseException as error:
            worker.drop()
            for job in jobs:
                job.fail(
                    StoreUnsure(
                        "The store was closed in the middle of this request.",
                        "Whether it took place is not known.",
                    )
                )
            if not isinstance(error, Exception):
                raise
            log.exception("A transaction of the database ended in an unexpected way")

    def _leave(self) -> None:
        """The last one to go tells those that nobody is going to work for."""
        self._left -= 1
        if self._left == 0:
            self._dismissed = True
            while self._jobs:
                self._jobs.popleft().fail(_closed())

    async def _take(self) -> list[Job]:
        while not self._jobs and not self._dismissed:
            waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._idle.append(waiting)
            await waiting
        share = min(BATCH, -(-len(self._jobs) // len(self._workers)))
        return [self._jobs.popleft() for _ in range(share)]


def _closed() -> StoreError:
    return StoreError("The store is closed.", "Open it again.")
