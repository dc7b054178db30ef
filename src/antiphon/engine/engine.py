"""The engine of one process: a worker that executes runs, and a supervisor that finds abandoned work.

It has no state whose loss matters: the lease in the store shows other processes which runs this one executes, and the
epoch in every commit makes an error harmless.
"""

from __future__ import annotations

import asyncio
import logging
import uuid

from antiphon.bus import EventBus
from antiphon.clock import Clock
from antiphon.engine.events import EventPublisher
from antiphon.engine.outbox.sender import Outbox
from antiphon.engine.replicas import Replica
from antiphon.engine.sessions.retention import RetentionPolicy
from antiphon.engine.supervisor import EngineTimings, Supervisor
from antiphon.engine.worker import RunSetupLoader, Worker
from antiphon.errors import StoreError
from antiphon.lanes import LaneEngine
from antiphon.store import Store

log = logging.getLogger(__name__)


class Engine:
    def __init__(
        self,
        *,
        store: Store,
        lanes: LaneEngine,
        bus: EventBus,
        clock: Clock,
        load_run_setup: RunSetupLoader,
        outbox: Outbox,
        timings: EngineTimings | None = None,
        retention: RetentionPolicy | None = None,
        max_run_seconds: float = 172_800.0,
        is_only_replica: bool = True,
        replica: Replica | None = None,
    ) -> None:
        timings = timings or EngineTimings()
        replica = replica or Replica(id=uuid.uuid4().hex, started_at=clock.now())
        events = EventPublisher(bus)
        self._lanes = lanes
        self._outbox = outbox
        self.owner = replica.id
        self.worker = Worker(
            store=store,
            lanes=lanes,
            bus=bus,
            clock=clock,
            events=events,
            outbox=outbox,
            load_run_setup=load_run_setup,
            owner=replica.id,
            max_attempts=timings.max_attempts,
            max_run_ms=round(max_run_seconds * 1000),
        )
        self.supervisor = Supervisor(
            store=store,
            lanes=lanes,
            clock=clock,
            events=events,
            worker=self.worker,
            timings=timings,
            retention_policy=retention or RetentionPolicy(),
            is_only_replica=is_only_replica,
            replica=replica,
        )
        self._background_tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Take the lease, look for work left by an earlier process, and start the background tasks."""
        await self.supervisor.acquire_leases()
        await self._lanes.start(self.worker.drain_lane, self.worker.has_work)
        await self.supervisor.wake_idle_lanes(older_than_seconds=0)
        background = [
            *self.supervisor.build_periodic_tasks(),
            self.worker.listen_for_stops(),
            self._outbox.run(self.owner),
        ]
        self._background_tasks = [asyncio.create_task(task) for task in background]

    async def stop(self, grace: float = 0.0) -> None:
        """Stop. Runs that do not end in time stay `running` in the store and are resumed by another process."""
        self.worker.is_stopping = True
        await self._lanes.stop(grace)
        for task in self._background_tasks:
            task.cancel()
        await asyncio.gather(*self._background_tasks, return_exceptions=True)
        try:
            await self.supervisor.release_lease()
        except StoreError as error:
            log.error("Failed to release the lease; it expires by itself: %s", error)
        finally:
            await self._lanes.close()
