"""Connects the gateways that share a store: over NATS if `bus.url` is set, else the process is alone."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from antiphon.bus import EventBus
from antiphon.bus.local import LocalBus
from antiphon.config import Config
from antiphon.engine.supervisor import EngineTimings
from antiphon.lanes import LaneEngine
from antiphon.lanes.local import LocalLanes
from antiphon.paths import expand_home
from antiphon.store import Store

if TYPE_CHECKING:
    from antiphon.nats.connection import NatsServers

# Share of the time after which a silent gateway's lanes move to others; its run leases have expired by then
LEASE_FRACTION_OF_ACK_WAIT = 0.6


class CoordinationBackend(msgspec.Struct, frozen=True):
    """Lanes and event bus, the engine timings that suit them, and how long a shutdown waits for active runs."""

    lanes: LaneEngine
    bus: EventBus
    timings: EngineTimings
    drain_seconds: float = 0.0
    is_connected: Callable[[], bool] = lambda: True
    """Returns False while the other gateways are unreachable: work here continues, and they learn of it later."""


@asynccontextmanager
async def open_coordination(config: Config, store: Store) -> AsyncGenerator[CoordinationBackend]:
    """Opens the connection; raises `BusError` if that is not possible.

    Lanes and sessions are identified by row numbers, so only gateways on the same store may share a namespace.
    """
    if config.bus.url is None or config.store.url is None:
        yield CoordinationBackend(LocalLanes(), LocalBus(), EngineTimings())
        return
    from antiphon.bus.nats import NatsBus  # noqa: PLC0415 - an extra
    from antiphon.lanes.nats import NatsLanes  # noqa: PLC0415 - an extra

    settings = config.bus
    namespace = f"{settings.namespace}-{store.identity}"
    bus = NatsBus(build_nats_servers(config), namespace=namespace)
    lanes = NatsLanes(
        build_nats_servers(config),
        namespace=namespace,
        slots=settings.lanes,
        ack_wait=settings.ack_wait_seconds,
        replicas=settings.replicas,
    )
    await bus.start()
    try:
        timings = EngineTimings(lease_seconds=LEASE_FRACTION_OF_ACK_WAIT * settings.ack_wait_seconds)
        yield CoordinationBackend(
            lanes,
            bus,
            timings,
            settings.drain_seconds,
            is_connected=lambda: bus.is_connected and lanes.is_connected,
        )
    finally:
        await bus.stop()


def build_nats_servers(config: Config) -> NatsServers:
    """The NATS servers that `bus.url` names, with the credentials for them."""
    from antiphon.nats.connection import NatsServers  # noqa: PLC0415 - an extra

    settings = config.bus
    assert settings.url is not None
    return NatsServers(
        url=settings.url.reveal(),
        user=settings.user,
        password=settings.password.reveal() if settings.password else None,
        token=settings.token.reveal() if settings.token else None,
        credentials=_expand_optional_path(settings.credentials),
        authority=_expand_optional_path(settings.tls_ca),
    )


def _expand_optional_path(text: str | None) -> Path | None:
    return expand_home(text) if text else None
