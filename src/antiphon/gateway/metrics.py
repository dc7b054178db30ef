"""Figures for Prometheus; every gateway has a registry of its own.

Three kinds, and only the first may be added up over replicas. What this process does: sockets, requests, its loop. What
live events tell, which every replica hears of all of them: hints, so after a gap some are missing. What the rows say
of the whole (`antiphon_store_…`, `antiphon_replicas`): the same from whichever replica is asked.

Labels are words of ours (an outcome, a route, a status), never something that a client wrote, so their number is
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
from antiphon.bus import EVERY_SESSION, Event, Gap, MessageAppended, RunChanged
from antiphon.errors import AntiphonError
from antiphon.gateway.gateway import Gateway
from antiphon.gateway.replies import SAFE, Slots
from antiphon.gateway.subscriptions import READER
from antiphon.operations.standings import Standing

log = logging.getLogger(__name__)

UNDER_WAY = ("queued", "running")
MOST_RUNS = 100_000  # that are remembered as being under way
BEAT = 1.0  # seconds between two looks at how late the loop is
STORE_TIME = 2.0  # seconds in which the store has to answer, as for `/readyz`
FRESH = 2.0  # seconds for which the store's answer is told again
STARTS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
"""Seconds. From what an idle gateway takes to what a takeover takes, and beyond."""


class _Moment(NamedTuple):
    state: str
    at: float


class Metrics:
    def __init__(self, gateway: Gateway, slots: Slots) -> None:
        self._gateway = gateway
        self._registry = registry = CollectorRegistry()
        self._states: dict[str, _Moment] = {}
        """Of the runs that are under way, as far as was heard."""
        self._tally: Tally[str] = Tally()
        self._runs = Counter("antiphon_runs", "Runs that ended.", ["outcome"], registry=registry)
        self._messages = Counter("antiphon_messages_appended", "Transcript entries.", registry=registry)
        self._requests = Counter(
            "antiphon_http_requests", "Answers over HTTP.", ["method", "route", "status"], registry=registry
        )
        self._lag = Gauge("antiphon_event_loop_lag_seconds", "How late the loop is.", registry=registry)
        self.sockets = Gauge("antiphon_sockets", "Connected WebSockets.", registry=registry)
        """For the WebSocket door to set."""
        streams = Gauge("antiphon_streams", "Open streams and waits over HTTP.", registry=registry)
        streams.set_function(lambda: slots.taken)
        for state in UNDER_WAY:
            gauge = Gauge(f"antiphon_runs_{state}", f"Runs that are {state}.", registry=registry)
            gauge.set_function(lambda state=state: self._tally[state])
        self._starts = Histogram(
            "antiphon_run_start_seconds",
            "From a run's acceptance to its start, behind others of its session or not.",
            buckets=STARTS,
            registry=registry,
        )
        self._whole = _Whole(gateway)
        registry.register(self._whole)
        registry.register(_Refusals(gateway))
        ProcessCollector(registry=registry)

    async def get_metrics(self, caller: Caller, request: Request) -> Response:
        access.require_scope(caller, "read")
        await self._whole.look()
        text = generate_latest(self._registry)
        return Response(text, headers={**SAFE, "Content-Type": CONTENT_TYPE_LATEST})

    def answered(self, method: str, route: str, status: int) -> None:
        """`route` is the template of the path; a method is one that some route takes."""
        self._requests.labels(method, route, str(status)).inc()

    @asynccontextmanager
    async def watching(self) -> AsyncGenerator[None]:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._hear()), group.create_task(self._beat())]
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()

    async def _hear(self) -> None:
        async with self._gateway.house.bus.listen(EVERY_SESSION) as events:
            while True:
                if (event := await events.get()) is not None:
                    self.heard(event)

    async def _beat(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + BEAT
            await asyncio.sleep(BEAT)
            self._lag.set(max(0.0, loop.time() - due))

    def heard(self, event: Event) -> None:
        if isinstance(event, MessageAppended):
            self._messages.inc()
        elif isinstance(event, RunChanged):
            self._move(event.run_id, event.state)
        elif isinstance(event, Gap):  # which of them have ended since is not known
            self._states.clear()
            self._tally.clear()

    def _move(self, run_id: str, state: str) -> None:
        now = asyncio.get_running_loop().time()
        if (before := self._states.pop(run_id, None)) is not None:
            self._tally[before.state] -= 1
            if (before.state, state) == UNDER_WAY:
                self._starts.observe(now - before.at)
        if state not in UNDER_WAY:
            self._runs.labels(state).inc()
        elif len(self._states) < MOST_RUNS:
            self._states[run_id] = _Moment(state, now)
            self._tally[state] += 1


class _Whole(Collector):
    """What the rows say of all replicas, as of a moment ago, and how long the store took to say it."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._standing: Standing | None = None
        self._took = 0.0
        self._until = 0.0
        self._alone = asyncio.Lock()

    async def look(self) -> None:
        """Several who ask at once share an answer; never raises."""
        loop = asyncio.get_running_loop()
        async with self._alone:
            began = loop.time()
            if began < self._until:
                return
            try:
                async with asyncio.timeout(STORE_TIME):
                    self._standing = await self._gateway.house.operations.standing(READER)
            except (AntiphonError, TimeoutError) as error:
                log.warning("The store did not answer: %s", error or "it took too long")
                self._standing = None
            self._took = loop.time() - began
            self._until = loop.time() + FRESH

    def collect(self) -> Iterable[Metric]:
        yield _gauge("antiphon_build_info", "The version that runs.", {__version__: 1}, "version")
        heard = self._gateway.house.links.connected()
        yield _gauge("antiphon_bus_connected", "Whether other replicas can be heard.", heard)
        yield _gauge("antiphon_store_up", "Whether the store answered.", self._standing is not None)
        yield _gauge("antiphon_store_answer_seconds", "How long the store took to answer.", self._took)
        if self._standing is not None:
            yield from _figures(self._standing)


def _figures(standing: Standing) -> Iterable[Metric]:
    runs = {"queued": standing.queued, "running": standing.running, "abandoned": standing.abandoned}
    yield _gauge("antiphon_store_runs", "Runs that are not over; up to 10,000 are counted.", runs, "state")
    words = "How long the oldest run waits that nothing but a replica is missing for."
    yield _gauge("antiphon_store_idle_seconds", words, standing.idle_seconds)
    kept = {"pending": standing.pending, "ambiguous": standing.ambiguous, "dead": standing.dead}
    yield _gauge("antiphon_store_deliveries", "Words that did not reach people (yet).", kept, "state")
    yield _gauge("antiphon_replicas", "Gateways whose lease is valid.", standing.replicas)


def _gauge(name: str, words: str, value: float | dict[str, int], label: str = "") -> Metric:
    if not isinstance(value, dict):
        return GaugeMetricFamily(name, words, value=float(value))
    family = GaugeMetricFamily(name, words, labels=[label])
    for word, number in value.items():
        family.add_metric([word], number)
    return family


class _Refusals(Collector):
    """Wrong secrets, which the guard counts for every door."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def collect(self) -> Iterable[Metric]:
        yield CounterMetricFamily(
            "antiphon_auth_failures", "Wrong credentials.", value=self._gateway.guard.refused
        )
