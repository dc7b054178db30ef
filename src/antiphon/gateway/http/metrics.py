"""Prometheus metrics. Each gateway has its own registry.

Process metrics (sockets, requests, event loop) can be summed over replicas. Metrics from live events cannot, since
every replica receives all events; after a gap some are missing. Metrics from stored rows (`antiphon_store_…`,
`antiphon_replicas`) are the same on every replica. Label values are never taken from clients, so their number is
bounded.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter as Tally
from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager
from typing import NamedTuple

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from antiphon import __version__, access
from antiphon.access import Caller
from antiphon.bus import EVERY_SESSION_TOPIC, Event, Gap, MessageAppended, RunChanged
from antiphon.errors import AntiphonError
from antiphon.gateway.http.responses import SECURITY_HEADERS, StreamSlots
from antiphon.gateway.state import READ_ONLY_CALLER, GatewayState
from antiphon.operations.types import SystemStatus

log = logging.getLogger(__name__)

ACTIVE_RUN_STATES = ("queued", "running")
MAX_TRACKED_RUNS = 100_000  # runs in progress
LOOP_LAG_INTERVAL_SECONDS = 1.0  # between two measurements
STORE_TIMEOUT_SECONDS = 2.0  # for the store to answer, as for `/readyz`
STORE_CACHE_SECONDS = 2.0  # how long the store's answer is reused
RUN_START_BUCKETS_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
"""From the start time on an idle gateway to that after a takeover, and beyond."""


class _TrackedRun(NamedTuple):
    state: str
    at: float


class Metrics:
    def __init__(self, gateway: GatewayState, slots: StreamSlots) -> None:
        self._gateway = gateway
        self._registry = registry = CollectorRegistry()
        self._tracked_runs: dict[str, _TrackedRun] = {}
        """Runs in progress, as far as events have been received."""
        self._active_run_counts: Tally[str] = Tally()
        self._runs = Counter("antiphon_runs", "Ended runs.", ["outcome"], registry=registry)
        self._messages = Counter("antiphon_messages_appended", "Transcript entries.", registry=registry)
        self._requests = Counter(
            "antiphon_http_requests", "HTTP responses.", ["method", "route", "status"], registry=registry
        )
        self._lag = Gauge("antiphon_event_loop_lag_seconds", "Delay of the event loop.", registry=registry)
        self.sockets = Gauge("antiphon_sockets", "Connected WebSockets.", registry=registry)
        """Set by the WebSocket server."""
        streams = Gauge("antiphon_streams", "Open streams and waits over HTTP.", registry=registry)
        streams.set_function(lambda: slots.open_count)
        for state in ACTIVE_RUN_STATES:
            gauge = Gauge(f"antiphon_runs_{state}", f"Runs that are {state}.", registry=registry)
            gauge.set_function(lambda state=state: self._active_run_counts[state])
        self._starts = Histogram(
            "antiphon_run_start_seconds",
            "Time from a run's acceptance to its start, including the wait for other runs of its session.",
            buckets=RUN_START_BUCKETS_SECONDS,
            registry=registry,
        )
        self._store_collector = _StoreCollector(gateway)
        registry.register(self._store_collector)
        registry.register(_AuthFailureCollector(gateway))
        ProcessCollector(registry=registry)

    async def get_metrics(self, caller: Caller, request: Request) -> Response:
        access.require_scope(caller, "read")
        await self._store_collector.refresh()
        text = generate_latest(self._registry)
        return Response(text, headers={**SECURITY_HEADERS, "Content-Type": CONTENT_TYPE_LATEST})

    def count_response(self, method: str, route: str, status: int) -> None:
        """Count a response. `route` is a path template and `method` one of a known set, to bound the labels."""
        self._requests.labels(method, route, str(status)).inc()

    @asynccontextmanager
    async def run_watchers(self) -> AsyncGenerator[None]:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._listen()), group.create_task(self._measure_loop_lag())]
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()

    async def _listen(self) -> None:
        async with self._gateway.app.bus.listen(EVERY_SESSION_TOPIC) as events:
            while True:
                if (event := await events.get()) is not None:
                    self.record_event(event)

    async def _measure_loop_lag(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + LOOP_LAG_INTERVAL_SECONDS
            await asyncio.sleep(LOOP_LAG_INTERVAL_SECONDS)
            self._lag.set(max(0.0, loop.time() - due))

    def record_event(self, event: Event) -> None:
        if isinstance(event, MessageAppended):
            self._messages.inc()
        elif isinstance(event, RunChanged):
            self._record_run_state(event.run_id, event.state)
        elif isinstance(event, Gap):  # it is unknown which runs have ended since
            self._tracked_runs.clear()
            self._active_run_counts.clear()

    def _record_run_state(self, run_id: str, state: str) -> None:
        now = asyncio.get_running_loop().time()
        if (before := self._tracked_runs.pop(run_id, None)) is not None:
            self._active_run_counts[before.state] -= 1
            if (before.state, state) == ACTIVE_RUN_STATES:
                self._starts.observe(now - before.at)
        if state not in ACTIVE_RUN_STATES:
            self._runs.labels(state).inc()
        elif len(self._tracked_runs) < MAX_TRACKED_RUNS:
            self._tracked_runs[run_id] = _TrackedRun(state, now)
            self._active_run_counts[state] += 1


class _StoreCollector(Collector):
    """Cached metrics about all replicas from stored rows, and how long the store took to answer."""

    def __init__(self, gateway: GatewayState) -> None:
        self._gateway = gateway
        self._status: SystemStatus | None = None
        self._answer_seconds = 0.0
        self._fresh_until = 0.0
        self._refresh_lock = asyncio.Lock()

    async def refresh(self) -> None:
        """Query the store unless the cache is fresh. Concurrent callers share one answer; never raises."""
        loop = asyncio.get_running_loop()
        async with self._refresh_lock:
            began = loop.time()
            if began < self._fresh_until:
                return
            try:
                async with asyncio.timeout(STORE_TIMEOUT_SECONDS):
                    self._status = await self._gateway.app.operations.status.get(READ_ONLY_CALLER)
            except (AntiphonError, TimeoutError) as error:
                log.warning("The store did not answer: %s", error or "it took too long")
                self._status = None
            self._answer_seconds = loop.time() - began
            self._fresh_until = loop.time() + STORE_CACHE_SECONDS

    def collect(self) -> Iterable[Metric]:
        yield _build_gauge("antiphon_build_info", "The running version.", {__version__: 1}, "version")
        is_connected = self._gateway.app.coordination.is_connected()
        yield _build_gauge("antiphon_bus_connected", "Whether other replicas can be reached.", is_connected)
        yield _build_gauge("antiphon_store_up", "Whether the store answered.", self._status is not None)
        yield _build_gauge(
            "antiphon_store_answer_seconds", "How long the store took to answer.", self._answer_seconds
        )
        if self._status is not None:
            yield from _collect_store_metrics(self._status)


def _collect_store_metrics(status: SystemStatus) -> Iterable[Metric]:
    runs = {"queued": status.queued, "running": status.running, "abandoned": status.abandoned}
    yield _build_gauge(
        "antiphon_store_runs", "Runs that have not ended; at most 10,000 are counted.", runs, "state"
    )
    description = "Waiting time of the oldest run that could start if a replica took it."
    yield _build_gauge("antiphon_store_idle_seconds", description, status.oldest_unclaimed_run_seconds)
    deliveries = {
        "pending": status.pending,
        "ambiguous": status.ambiguous,
        "dead": status.dead,
        "expired": status.expired,
    }
    yield _build_gauge(
        "antiphon_store_deliveries", "Deliveries that have not reached people.", deliveries, "state"
    )
    yield _build_gauge("antiphon_replicas", "Gateways whose lease is valid.", status.replicas)


def _build_gauge(name: str, description: str, value: float | dict[str, int], label: str = "") -> Metric:
    if not isinstance(value, dict):
        return GaugeMetricFamily(name, description, value=float(value))
    family = GaugeMetricFamily(name, description, labels=[label])
    for label_value, number in value.items():
        family.add_metric([label_value], number)
    return family


class _AuthFailureCollector(Collector):
    """Failed authentications of all transports, as counted by the authenticator."""

    def __init__(self, gateway: GatewayState) -> None:
        self._gateway = gateway

    def collect(self) -> Iterable[Metric]:
        yield CounterMetricFamily(
            "antiphon_auth_failures", "Wrong credentials.", value=self._gateway.authenticator.refused_count
        )
