"""The periodic work of one process: leases, the sweep, deadlines, retention, indexing.

The sweep repairs what a crash, a lost event, a stuck tool or a full disk left behind. Work that
only one replica may do is done by the coordinator. The supervisor executes no run; it wakes lanes and ends runs that no
process executes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from antiphon.clock import Clock
from antiphon.engine import replicas
from antiphon.engine.collaboration import chains, subagent_archive
from antiphon.engine.events import EventPublisher
from antiphon.engine.replicas import Replica
from antiphon.engine.runs import completion, endings, lifecycle
from antiphon.engine.sessions import retention, search
from antiphon.engine.worker import Worker
from antiphon.errors import AntiphonError, StoreFull
from antiphon.lanes import LaneEngine
from antiphon.store import Store

log = logging.getLogger(__name__)

IDLE_LANES_PER_PAGE = 1000
COORDINATOR_LEASE_SWEEPS = 3  # the lease of the coordinator lasts this many sweep intervals


class EngineTimings(msgspec.Struct, frozen=True, kw_only=True):
    """Intervals and limits of the engine."""

    lease_seconds: float = 10.0
    sweep_interval_seconds: float = 2.0
    deadline_interval_seconds: float = 0.5
    stop_grace_seconds: float = 2.0
    retention_interval_seconds: float = 600.0
    max_attempts: int = 5


class Supervisor:
    def __init__(
        self,
        *,
        store: Store,
        lanes: LaneEngine,
        clock: Clock,
        events: EventPublisher,
        worker: Worker,
        timings: EngineTimings,
        retention_policy: retention.RetentionPolicy,
        is_only_replica: bool,
        replica: Replica,
    ) -> None:
        self._store = store
        self._lanes = lanes
        self._clock = clock
        self._events = events
        self._worker = worker
        self._timings = timings
        self._retention_policy = retention_policy
        self._is_only_replica = is_only_replica
        self._is_coordinator = is_only_replica
        self._replica = replica

    def build_periodic_tasks(self) -> list[Coroutine[Any, Any, None]]:
        """Return the background tasks, each of which repeats one kind of work until it is cancelled."""
        timings = self._timings
        return [
            self._repeat_every(timings.lease_seconds / 3, self._renew_lease),
            self._repeat_every(timings.sweep_interval_seconds, self._sweep),
            self._repeat_every(
                timings.deadline_interval_seconds, self._expire_queued_work, coordinator_only=True
            ),
            self._repeat_every(
                timings.retention_interval_seconds,
                self._apply_retention,
                coordinator_only=True,
                immediately=True,
            ),
            self._repeat_every(search.INDEX_INTERVAL_SECONDS, self._index_transcripts, coordinator_only=True),
        ]

    async def _repeat_every(
        self,
        seconds: float,
        work: Callable[[], Coroutine[Any, Any, None]],
        *,
        coordinator_only: bool = False,
        immediately: bool = False,
    ) -> None:
        """Repeat some work until cancelled. With `coordinator_only`, skip it while another process is coordinator."""
        while True:
            if not immediately:
                await asyncio.sleep(seconds)
            immediately = False
            if coordinator_only and not self._is_coordinator:
                continue
            try:
                await work()
            except AntiphonError as error:
                if not self._worker.is_already_reported(error):
                    log.error("%s", error)
            except Exception:
                log.exception("Periodic work of the engine failed; retrying in %.1f s", seconds)

    # --- leases ---

    async def acquire_leases(self) -> None:
        """Take the lease of this process, and the coordinator's if it is free: retention needs that at once."""
        await self._renew_lease(is_only_replica=self._is_only_replica)
        self._is_coordinator = self._is_only_replica or await self._acquire_coordinator_lease()

    async def publish_address(self, address: str) -> None:
        """Publish the address at which this process can be reached."""
        self._replica = msgspec.structs.replace(self._replica, address=address)
        await self._renew_lease()

    async def release_lease(self) -> None:
        await self._store.tx(replicas.release_lease, self._replica.id)

    async def _renew_lease(self, *, is_only_replica: bool = False) -> None:
        now = self._clock.now()
        until = now + round(self._timings.lease_seconds * 1000)
        await self._store.tx(replicas.renew_lease, self._replica, until, now, is_only_replica=is_only_replica)

    async def _acquire_coordinator_lease(self) -> bool:
        now = self._clock.now()
        until = now + round(COORDINATOR_LEASE_SWEEPS * self._timings.sweep_interval_seconds * 1000)
        return await self._store.tx(replicas.acquire_coordinator_lease, self._replica.id, until, now)

    # --- the sweep ---

    async def _sweep(self) -> None:
        """Handle what a lost event, a stuck tool or a full disk left behind."""
        await self._worker.cancel_requested_runs()
        await self._reconcile_owned_runs()
        self._is_coordinator = self._is_only_replica or await self._acquire_coordinator_lease()
        if self._is_coordinator:
            await self._sweep_as_coordinator(self._clock.now())

    async def _reconcile_owned_runs(self) -> None:
        """Compare active runs with the store: a run may have been taken over, or be owned but not executed."""
        active_runs = self._worker.active_runs
        active_before = dict(active_runs)
        owned = await self._store.read(lifecycle.load_owned_runs, self._replica.id)
        for run_id, lane in owned.items():
            if run_id not in active_runs:
                await self._lanes.activate(lane)
        for run_id, active in active_before.items():
            if run_id not in owned and active_runs.get(run_id) is active:
                log.info("Run %r was taken over by another process", run_id, extra={"run_id": run_id})
                await self._lanes.abandon(active.lane)
                await self._lanes.activate(active.lane)

    async def _sweep_as_coordinator(self, now: int) -> None:
        """Do the work that only one replica may do."""
        await self._force_end_runs(now - round(self._timings.stop_grace_seconds * 1000), now)
        await self.wake_idle_lanes(older_than_seconds=self._timings.sweep_interval_seconds)
        if await self._store.tx(replicas.delete_expired_replicas, now):
            self._events.publish_gap()
        if await self._store.read(completion.has_stuck_work):
            log.error("Settling stuck exchanges or tasks")
            await self._worker.apply_effects(await self._store.tx(completion.settle_stuck_work, now))
        for removed in await subagent_archive.archive_finished_subagents(self._store, now):
            self._events.publish_removed_session(removed)
        await self._store.tx(chains.delete_expired_waits, now)

    async def _force_end_runs(self, before: int, now: int) -> None:
        """End runs that should have stopped, each separately, so that one failure does not affect the others."""
        overdue = await self._store.read(endings.load_runs_past_stop_grace, before)
        for run_id, lane in overdue.items():
            if run_id in self._worker.run_ids_committing_end:
                continue  # its end is being committed and waits for disk space
            try:
                effects = await self._store.tx(endings.force_end_run, run_id, before, now)
            except StoreFull:
                continue  # no disk space; another one may fit
            except Exception:
                log.exception("Failed to end run %r", run_id, extra={"run_id": run_id})
                continue
            if effects:
                await self._worker.apply_effects(effects)
                await self._lanes.abandon(lane)
                await self._lanes.activate(lane)

    async def wake_idle_lanes(self, older_than_seconds: float) -> None:
        """Activate the lanes with runs that no live process owns and that have waited for this long."""
        now = self._clock.now()
        before = now - round(older_than_seconds * 1000)
        after = 0
        while True:
            lanes = await self._store.read(lifecycle.list_idle_lanes, after, before, now, IDLE_LANES_PER_PAGE)
            for lane in lanes:
                await self._lanes.activate(lane)
            if len(lanes) < IDLE_LANES_PER_PAGE:
                return
            after = lanes[-1]

    # --- deadlines, retention, indexing ---

    async def _expire_queued_work(self) -> None:
        """End queued runs and waiting tasks whose deadline has passed. A read first avoids empty commits."""
        now = self._clock.now()
        if await self._store.read(endings.has_overdue_work, now):
            await self._worker.apply_effects(await self._store.tx(endings.expire_overdue_work, now))

    async def _apply_retention(self) -> None:
        for removed in await retention.apply_retention(
            self._store, self._retention_policy, self._clock.now()
        ):
            self._events.publish_removed_session(removed)

    async def _index_transcripts(self) -> None:
        await search.catch_up_index(self._store)
