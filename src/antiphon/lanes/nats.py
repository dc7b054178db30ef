"""Lanes of several processes: a JetStream work queue with at most one message per lane.

Activating a lane publishes an empty message to its subject; while one is queued or being processed, the server
rejects another. The process that holds the message runs the lane, extends its lease every third of `ack_wait`, and
acknowledges it when the lane is empty; if the process falls silent, the server redelivers the message to another.
Claims in the store are authoritative: a lost stream costs time, and a message held twice costs only extra work.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import logging
import random
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from antiphon.errors import AntiphonError
from antiphon.lanes import Drain, HasWaitingWork
from antiphon.lanes.local import wind_down
from antiphon.lanes.nats_queue import LaneQueue
from antiphon.nats.connection import (
    NATS_RESPONSE_TIMEOUT_SECONDS,
    NatsConnection,
    NatsServers,
    cancel_tasks,
    list_connection_errors,
)

if TYPE_CHECKING:
    from nats.aio.client import Client

log = logging.getLogger(__name__)

MAX_WAITING_HINTS = 100_000  # lanes waiting to be activated; the supervisor's sweep finds any others
# The usable part of `ack_wait`: the server's clock for a lease starts before its message arrives here
LEASE_SAFETY_FACTOR = 0.8
MESSAGES_PER_YIELD = 256  # messages written before yielding to the event loop


class _Lease(msgspec.Struct):
    """A message that this process holds: its reply subject, and until when the server gives it to no other process."""

    reply: str
    expires_at: float


class NatsLanes:
    """Runs at most one drain per lane and `slots` in all; an activation during a drain makes it check once more."""

    def __init__(
        self,
        servers: NatsServers,
        *,
        namespace: str = "antiphon",
        slots: int = 256,
        ack_wait: float = 10.0,
        replicas: int = 1,
        connect_timeout: float = 10.0,
    ) -> None:
        self._slots = slots
        self._ack_wait = ack_wait
        self._connect_timeout = connect_timeout
        self._drain: Drain | None = None
        self._has_work: HasWaitingWork | None = None
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._leases: dict[int, _Lease] = {}
        self._reactivated: set[int] = set()
        self._resting: set[int] = set()
        self._abandoned: set[asyncio.Task[None]] = set()
        self._slot_freed = asyncio.Event()
        self._waiting_hints: dict[int, None] = {}
        self._has_hints = asyncio.Event()
        self._pulling: asyncio.Task[None] | None = None
        self._background_tasks: list[asyncio.Task[None]] = []
        self._queue = LaneQueue(
            namespace,
            ack_wait,
            replicas,
            on_taken=self._on_lane_taken,
            on_missed=self._queue_hint,
            on_abandoned=self._release_lane,
        )
        self._connection = NatsConnection(
            servers,
            name=f"{namespace} lanes",
            on_connected=self._queue.join,
            on_disconnected=self._queue.leave,
        )

    @property
    def active_count(self) -> int:
        return len(self._tasks)

    @property
    def is_connected(self) -> bool:
        return self._connection.client is not None

    async def start(self, drain: Drain, has_work: HasWaitingWork | None = None) -> None:
        """Connects, or raises `BusError`; afterwards the connection is kept alive indefinitely."""
        await self._connection.start(self._connect_timeout)
        self._drain, self._has_work = drain, has_work
        self._pulling = asyncio.create_task(self._pull_lanes())
        self._background_tasks = [
            asyncio.create_task(self._renew_leases()),
            asyncio.create_task(self._send_hints()),
        ]

    async def activate(self, lane: int) -> None:
        if self._drain is None:
            return
        if lane in self._tasks:
            self._reactivated.add(lane)
        else:
            self._queue_hint(lane)

    async def abandon(self, lane: int) -> None:
        if lane in self._tasks:
            await self._release_lane(lane)
        elif client := self._connection.client:
            with suppress(*list_connection_errors()):
                async with asyncio.timeout(NATS_RESPONSE_TIMEOUT_SECONDS):
                    await self._queue.abandon(client, lane)

    def set_resting(self, lane: int, *, resting: bool) -> None:
        if not resting:
            self._resting.discard(lane)
        elif lane in self._tasks:
            self._resting.add(lane)
            self._slot_freed.set()

    async def stop(self, grace: float) -> None:
        """Stops as `LaneEngine.stop` says; the leases of unfinished lanes are kept until `close`."""
        self._drain = None
        await cancel_tasks(self._pulling)
        closing = asyncio.create_task(self._queue.close())
        await asyncio.wait([closing], timeout=NATS_RESPONSE_TIMEOUT_SECONDS)
        await cancel_tasks(closing)
        await wind_down([*self._tasks.values(), *self._abandoned], grace)

    async def close(self) -> None:
        """Gives every remaining lane to another replica at once."""
        await cancel_tasks(*self._background_tasks)
        await self._give_back(*self._leases.values())
        self._leases.clear()
        if client := self._connection.client:
            await self._connection.confirm_flushed(client)
        await self._connection.stop()

    # --- draining ---

    async def _on_lane_taken(self, lane: int, reply: str) -> None:
        """Takes over the message of a lane; a second message for a lane that is already running is its new lease."""
        lease = _Lease(reply, asyncio.get_running_loop().time() + LEASE_SAFETY_FACTOR * self._ack_wait)
        if self._drain is None:
            await self._give_back(lease)
            return
        self._leases[lane] = lease
        if lane in self._tasks:
            self._reactivated.add(lane)
        else:
            self._tasks[lane] = asyncio.create_task(
                self._run(lane, self._drain), name=f"lane-{lane}", context=contextvars.Context()
            )

    async def _run(self, lane: int, drain: Drain) -> None:
        try:
            while True:
                more_work = await self._drain_until_idle(lane, drain)
                if not self._owns(lane):
                    return
                await self._acknowledge(self._leases.pop(lane, None))
                # A hint sent just before the acknowledgement was rejected, because the lane was still active.
                if more_work or (more_work is False and await self._check_waiting_work(lane)):
                    self._queue_hint(lane)
                if lane not in self._leases:
                    return
        finally:
            if self._owns(lane):
                if lane in self._reactivated:
                    self._reactivated.discard(lane)
                    self._queue_hint(lane)
                del self._tasks[lane]
                self._resting.discard(lane)
                self._slot_freed.set()

    async def _drain_until_idle(self, lane: int, drain: Drain) -> bool | None:
        """Drains until no new hint has come. Returns whether more work is left, or None if that is unknown."""
        while True:
            self._reactivated.discard(lane)
            more_work: bool | None = None
            try:
                more_work = bool(await drain(lane))
            except AntiphonError as error:
                log.error("%s", error)
            except Exception:
                log.exception("Draining lane %d failed; the supervisor's sweep will retry it", lane)
            if more_work or not self._owns(lane) or lane not in self._reactivated or self._drain is None:
                return more_work

    async def _check_waiting_work(self, lane: int) -> bool:
        if self._has_work is None or self._drain is None:
            return False
        try:
            return await self._has_work(lane)
        except AntiphonError as error:
            log.error("%s", error)
        except Exception:
            log.exception("Checking lane %d for more work failed; the supervisor's sweep will check it", lane)
        return False

    def _owns(self, lane: int) -> bool:
        """Whether the current task still runs this lane; False for an abandoned drain."""
        return self._tasks.get(lane) is asyncio.current_task()

    async def _release_lane(self, lane: int) -> None:
        self._reactivated.discard(lane)
        self._resting.discard(lane)
        if task := self._tasks.pop(lane, None):
            self._abandoned.add(task)
            task.add_done_callback(self._abandoned.discard)
            task.cancel()
            self._slot_freed.set()
        if lease := self._leases.pop(lane, None):
            await self._give_back(lease)

    # --- leases ---

    async def _acknowledge(self, lease: _Lease | None) -> None:
        """Acknowledges a lease only while it is valid: later it would take the lane from its new holder."""
        client = self._connection.client
        if lease and client and lease.expires_at > asyncio.get_running_loop().time():
            with suppress(*list_connection_errors()):
                await self._queue.acknowledge(client, lease.reply)

    async def _give_back(self, *leases: _Lease) -> None:
        now = asyncio.get_running_loop().time()
        client = self._connection.client
        if client is None:
            return
        with suppress(*list_connection_errors()):
            async with asyncio.timeout(NATS_RESPONSE_TIMEOUT_SECONDS):
                for lease in leases:
                    if lease.expires_at > now:
                        await self._queue.give_back(client, lease.reply)

    async def _renew_leases(self) -> None:
        """Renews all leases together. If that fails, the drains continue; at worst another replica does extra work."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._ack_wait / 3)
            client = self._connection.client
            if client is None:
                continue
            with suppress(*list_connection_errors()):
                for number, lease in enumerate(list(self._leases.values())):
                    now = loop.time()
                    if lease.expires_at > now:
                        await self._queue.renew_lease(client, lease.reply)
                        lease.expires_at = now + LEASE_SAFETY_FACTOR * self._ack_wait
                    if number % MESSAGES_PER_YIELD == MESSAGES_PER_YIELD - 1:
                        await asyncio.sleep(0)

    # --- background tasks ---

    async def _pull_lanes(self) -> None:
        while True:
            client = await self._connection.wait_until_connected()
            free = self._slots - len(self._tasks) + len(self._resting)
            if free <= 0:
                self._slot_freed.clear()
                await self._slot_freed.wait()
                continue
            try:
                await self._queue.pull_lanes(client, free)
                continue
            except AntiphonError as error:
                log.error("%s", error)
            except list_connection_errors():
                pass  # The connection is being replaced.
            except Exception:
                log.exception("Pulling lanes failed; retrying")
            await asyncio.sleep(random.uniform(0.2, 1.0))  # noqa: S311 - spreads load, guards nothing

    def _queue_hint(self, lane: int) -> None:
        if self._drain is not None and len(self._waiting_hints) < MAX_WAITING_HINTS:
            self._waiting_hints[lane] = None
            self._has_hints.set()

    async def _send_hints(self) -> None:
        while True:
            await self._has_hints.wait()
            client = await self._connection.wait_until_connected()
            self._has_hints.clear()
            try:
                await self._send_waiting_hints(client)
                continue
            except list_connection_errors():
                pass  # The connection is being replaced.
            except Exception:
                log.exception("Activating lanes failed; the supervisor's sweep will activate them")
            await asyncio.sleep(0.05)

    async def _send_waiting_hints(self, client: Client) -> None:
        for number in itertools.count(1):
            if not self._waiting_hints:
                return
            lane = next(iter(self._waiting_hints))
            del self._waiting_hints[lane]
            try:
                await self._queue.add_lane(client, lane)
            except list_connection_errors():
                self._queue_hint(lane)
                raise
            if number % MESSAGES_PER_YIELD == 0:
                await asyncio.sleep(0)
