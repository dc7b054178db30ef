"""Figures for Prometheus, of this gateway alone: it has a registry of its own.

Runs and messages are counted from live events, which are hints: after a gap some are missing. Labels are words of
ours (an outcome, a route, a status), never something that a client wrote, so their number is bounded.
"""

from __future__ import annotations

import asyncio
from collections import Counter as Tally
from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from antiphon import access
from antiphon.access import Caller
from antiphon.bus import EVERY_SESSION, Event, Gap, MessageAppended, RunChanged
from antiphon.gateway.gateway import Gateway
from antiphon.gateway.replies import SAFE, Slots

UNDER_WAY = ("queued", "running")
MOST_RUNS = 100_000  # that are remembered as being under way
BEAT = 1.0  # seconds between two looks at how late the loop is


class Metrics:
    def __init__(self, gateway: Gateway, slots: Slots) -> None:
        self._gateway = gateway
        self._registry = registry = CollectorRegistry()
        self._states: dict[str, str] = {}
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
        registry.register(_Refusals(gateway))
        ProcessCollector(registry=registry)

    async def get_metrics(self, caller: Caller, request: Request) -> Response:
        access.require_scope(caller, "read")
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
        if (before := self._states.pop(run_id, None)) is not None:
            self._tally[before] -= 1
        if state not in UNDER_WAY:
            self._runs.labels(state).inc()
        elif len(self._states) < MOST_RUNS:
            self._states[run_id] = state
            self._tally[state] += 1


class _Refusals(Collector):
    """Wrong secrets, which the guard counts for every door."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def collect(self) -> Iterable[Metric]:
        yield CounterMetricFamily(
            "antiphon_auth_failures", "Wrong credentials.", value=self._gateway.guard.refused
        )
