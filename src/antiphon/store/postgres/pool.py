"""Workers that take scripts off one queue, each an equal share, so that batches grow with the load."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from typing import TypeVar

from antiphon.errors import StoreError, StoreUnsure
from antiphon.store import BoundScript
from antiphon.store.postgres.worker import PgWorker, ScriptJob

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_SCRIPTS_PER_TRANSACTION = 32
MAX_WAITING_SCRIPTS = 20_000  # more are refused


class WorkerPool:
    """A pool of workers. Every accepted script gets an outcome, even if the pool is shut down or cancelled."""

    def __init__(self, workers: Sequence[PgWorker]) -> None:
        self._workers = workers
        self._jobs: deque[ScriptJob] = deque()
        self._idle: deque[asyncio.Future[None]] = deque()
        self._is_closed = False
        self._tasks = [asyncio.create_task(self._run_worker(worker)) for worker in workers]
        self._running_workers = len(self._tasks)

    async def submit(self, run: BoundScript[T]) -> T:
        if self._is_closed:
            raise _build_closed_error()
        if len(self._jobs) >= MAX_WAITING_SCRIPTS:
            raise StoreError(
                f"{MAX_WAITING_SCRIPTS} transactions are already waiting for the database.",
                "Try again in a moment.",
            )
        job = ScriptJob(run, asyncio.get_running_loop().create_future())
        self._jobs.append(job)
        self._wake_worker()
        return await job.future

    async def shut_down(self) -> None:
        """Finishes the waiting scripts, then closes the connections."""
        self._is_closed = True
        while self._idle:
            self._wake_worker()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _wake_worker(self) -> None:
        while self._idle:
            waiting = self._idle.popleft()
            if not waiting.done():
                waiting.set_result(None)
                return

    async def _run_worker(self, worker: PgWorker) -> None:
        try:
            while jobs := await self._take_jobs():
                await self._run_jobs(worker, jobs)
            await worker.close()
        finally:
            worker.drop_connection()
            self._retire_worker()

    async def _run_jobs(self, worker: PgWorker, jobs: Sequence[ScriptJob]) -> None:
        try:
            await worker.run_jobs(jobs)
        except BaseException as error:
            worker.drop_connection()
            for job in jobs:
                job.fail(
                    StoreUnsure(
                        "The store was closed during this request.",
                        "Whether it took effect is unknown.",
                    )
                )
            if not isinstance(error, Exception):
                raise
            log.exception("A database transaction failed unexpectedly")

    def _retire_worker(self) -> None:
        """Ends a worker; the last one fails the scripts that are still waiting."""
        self._running_workers -= 1
        if self._running_workers == 0:
            self._is_closed = True
            while self._jobs:
                self._jobs.popleft().fail(_build_closed_error())

    async def _take_jobs(self) -> list[ScriptJob]:
        while not self._jobs and not self._is_closed:
            waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._idle.append(waiting)
            await waiting
        share = min(MAX_SCRIPTS_PER_TRANSACTION, -(-len(self._jobs) // len(self._workers)))
        return [self._jobs.popleft() for _ in range(share)]


def _build_closed_error() -> StoreError:
    return StoreError("The store is closed.", "Open it again.")
