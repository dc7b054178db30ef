"""Firing jobs when their time has come.

One task sleeps until the earliest slot and fires what is due. It keeps nothing: which slots are due is in the rows,
and the commit of a firing is what makes it happen once, so that it may be killed, late or woken in vain.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from contextlib import suppress
from typing import TYPE_CHECKING

from antiphon.bus import EventBus, SessionChanged
from antiphon.clock import Clock
from antiphon.engine.idempotency import IdempotentCommand
from antiphon.engine.jobs import firings, jobs
from antiphon.engine.jobs.firings import BUSY_REASON, FiringResult
from antiphon.engine.jobs.jobs import FiringContext
from antiphon.errors import AntiphonError
from antiphon.store import Store

if TYPE_CHECKING:
    from antiphon.engine.engine import Engine

log = logging.getLogger(__name__)

MAX_SLEEP_SECONDS = 30.0  # seconds of sleep; the wall clock may be set meanwhile
SHARED_STORE_POLL_SECONDS = 2.0  # the same, where others share the store: one may have added a job, and died
UNFIRED_JOB_RETRY_SECONDS = 1.0  # seconds until jobs are looked at again that are due and could not be fired


class Scheduler:
    def __init__(
        self, *, terms: FiringContext, store: Store, bus: EventBus, clock: Clock, engine: Engine
    ) -> None:
        self.terms = terms
        self._store = store
        self._bus = bus
        self._clock = clock
        self._engine = engine
        self._max_sleep_seconds = SHARED_STORE_POLL_SECONDS if store.shared else MAX_SLEEP_SECONDS
        self._changed = asyncio.Event()

    @property
    def enabled(self) -> bool:
        return self.terms.config.cron.enabled

    async def run(self) -> None:
        """Look, sleep, look again, until cancelled."""
        while True:
            self._changed.clear()
            pause = await self._fire_and_compute_sleep()
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._changed.wait()

    def wake(self) -> None:
        """Jobs have changed: the earliest slot may be another one."""
        self._changed.set()

    async def fire_due_jobs(self) -> None:
        """Fire everything that is due now, as far as there is room for its runs.

        A job whose session has no room holds up no other; only when no job may run, the rest need not be tried.
        """
        if not self.enabled:
            return
        for job_id in await self._store.read(firings.list_due_jobs, self._clock.now()):
            try:
                fired = await self.fire_if_due(job_id)
            except AntiphonError as error:
                log.error("Job %r could not be fired: %s", job_id, error)
            except Exception:
                log.exception("Job %r could not be fired", job_id)
            else:
                if fired.reason == BUSY_REASON:
                    return  # The others keep their slots, too.

    async def fire_if_due(self, job_id: str) -> FiringResult:
        """Fire a job if it is due."""
        return await self._publish_firing(
            await self._store.tx(firings.fire_if_due, self.terms, job_id, self._clock.now())
        )

    async def fire_on_request(self, job_id: str, command: IdempotentCommand, *, force: bool) -> FiringResult:
        """Fire a job because somebody asks for it; with `force` it need not be due."""
        run_id = f"cron:{job_id}:force:{uuid.uuid4()}" if force else None
        now = self._clock.now()
        return await self._publish_firing(
            await self._store.tx(firings.fire_on_request, self.terms, job_id, run_id, command, now)
        )

    async def _publish_firing(self, fired: FiringResult) -> FiringResult:
        """After the commit; if this is never reached, the engine finds the run by itself."""
        if fired.accepted and fired.accepted.new:
            await self._engine.dispatch_accepted_run(fired.accepted)
            self._bus.publish(
                "sessions", SessionChanged(session_key=fired.accepted.session_key, reason="cron")
            )
        return fired

    async def _fire_and_compute_sleep(self) -> float:
        """Fire what is due; how many seconds to sleep then."""
        now = self._clock.now()
        try:
            await self.fire_due_jobs()
            _, next_at = await self._store.read(jobs.load_overview)
        except AntiphonError as error:
            log.error("%s", error)
            return UNFIRED_JOB_RETRY_SECONDS
        except Exception:
            log.exception("The scheduler failed; it looks again in %.1f s", UNFIRED_JOB_RETRY_SECONDS)
            return UNFIRED_JOB_RETRY_SECONDS
        if next_at is None or not self.enabled:
            return self._max_sleep_seconds
        if next_at <= now:
            # It is due and has not been fired: there was no room, here or in its session.
            return UNFIRED_JOB_RETRY_SECONDS
        return min(self._max_sleep_seconds, max(0, next_at - self._clock.now()) / 1000)
