"""Fires jobs when they are due.

One task sleeps until the earliest slot and fires the jobs that are due. It has no state: due slots are in the rows, and
the commit of a firing makes it happen once, so the task may be killed, late or woken needlessly.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from contextlib import suppress
from typing import TYPE_CHECKING

from antiphon.bus import SESSION_CHANGES_TOPIC, EventBus, SessionChanged
from antiphon.clock import Clock
from antiphon.engine.idempotency import IdempotentCommand
from antiphon.engine.jobs import firings, jobs
from antiphon.engine.jobs.firings import BUSY_REASON, FiringResult
from antiphon.engine.jobs.jobs import FiringContext
from antiphon.errors import AntiphonError
from antiphon.store import Store

if TYPE_CHECKING:
    from antiphon.engine.worker import Worker

log = logging.getLogger(__name__)

MAX_SLEEP_SECONDS = 30.0  # the wall clock may be changed meanwhile
SHARED_STORE_POLL_SECONDS = 2.0  # the same for a shared store: another replica may add a job and die
UNFIRED_JOB_RETRY_SECONDS = 1.0  # for jobs that are due and could not be fired


class Scheduler:
    def __init__(
        self, *, context: FiringContext, store: Store, bus: EventBus, clock: Clock, worker: Worker
    ) -> None:
        self.context = context
        self._store = store
        self._bus = bus
        self._clock = clock
        self._worker = worker
        self._max_sleep_seconds = SHARED_STORE_POLL_SECONDS if store.shared else MAX_SLEEP_SECONDS
        self._changed = asyncio.Event()

    @property
    def enabled(self) -> bool:
        return self.context.config.cron.enabled

    async def run(self) -> None:
        """Fire due jobs and sleep until the next slot, until cancelled."""
        while True:
            self._changed.clear()
            pause = await self._fire_and_compute_sleep()
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._changed.wait()

    def wake(self) -> None:
        """Recompute the earliest slot, because jobs have changed."""
        self._changed.set()

    async def fire_due_jobs(self) -> None:
        """Fire all jobs that are due now, as far as the limits of their sessions and of concurrent runs allow.

        A full session does not delay other jobs; at the limit of concurrent runs, the rest is not tried.
        """
        if not self.enabled:
            return
        for job_id in await self._store.read(firings.list_due_jobs, self._clock.now()):
            try:
                fired = await self.fire_if_due(job_id)
            except AntiphonError as error:
                log.error("Failed to fire job %r: %s", job_id, error)
            except Exception:
                log.exception("Failed to fire job %r", job_id)
            else:
                if fired.reason == BUSY_REASON:
                    return  # the others keep their slots, too

    async def fire_if_due(self, job_id: str) -> FiringResult:
        """Fire a job if it is due."""
        return await self._publish_firing(
            await self._store.tx(firings.fire_if_due, self.context, job_id, self._clock.now())
        )

    async def fire_on_request(self, job_id: str, command: IdempotentCommand, *, force: bool) -> FiringResult:
        """Fire a job on request; with `force` it need not be due."""
        run_id = f"cron:{job_id}:force:{uuid.uuid4()}" if force else None
        now = self._clock.now()
        return await self._publish_firing(
            await self._store.tx(firings.fire_on_request, self.context, job_id, run_id, command, now)
        )

    async def _publish_firing(self, fired: FiringResult) -> FiringResult:
        """Dispatch the run and publish events after the commit; after a crash, the engine finds the run itself."""
        if fired.accepted and fired.accepted.new:
            await self._worker.dispatch_accepted_run(fired.accepted)
            self._bus.publish(
                SESSION_CHANGES_TOPIC, SessionChanged(session_key=fired.accepted.session_key, reason="cron")
            )
        return fired

    async def _fire_and_compute_sleep(self) -> float:
        """Fire due jobs. Returns the seconds to sleep afterwards."""
        now = self._clock.now()
        try:
            await self.fire_due_jobs()
            _, next_at = await self._store.read(jobs.load_overview)
        except AntiphonError as error:
            log.error("%s", error)
            return UNFIRED_JOB_RETRY_SECONDS
        except Exception:
            log.exception("Scheduler failed; retrying in %.1f s", UNFIRED_JOB_RETRY_SECONDS)
            return UNFIRED_JOB_RETRY_SECONDS
        if next_at is None or not self.enabled:
            return self._max_sleep_seconds
        if next_at <= now:
            # It is due and was not fired: its session is full, or too many jobs are running.
            return UNFIRED_JOB_RETRY_SECONDS
        return min(self._max_sleep_seconds, max(0, next_at - self._clock.now()) / 1000)
