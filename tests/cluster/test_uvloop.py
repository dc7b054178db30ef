"""Connections to NATS on the event loop that a gateway runs on, whose transports fail in words of their own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import pytest
import uvloop

from antiphon.bus import SessionChanged
from antiphon.bus.nats import NatsBus
from antiphon.natslink import Servers
from cluster.proxy import Proxy
from cluster.servers import nats_server

BOUND = 20.0
CUTS = 20
EVENT = SessionChanged(session_key="k", reason="r")


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(BOUND):
        while not true():
            await asyncio.sleep(0)


async def suffer(port: int) -> tuple[int, int]:
    """How many tasks there are before and after connections that broke with something still to be written."""
    async with Proxy(port) as proxy:
        bus = NatsBus(Servers(url=f"nats://127.0.0.1:{proxy.port}"))
        await bus.start()
        async with bus.listen("session.*"):
            await until(lambda: bus.connected)
            before = len(asyncio.all_tasks())
            for made in range(proxy.connections, proxy.connections + CUTS):
                for _ in range(200):
                    bus.publish("sessions", EVENT)
                await asyncio.sleep(0)
                proxy.cut()
                await until(lambda made=made: proxy.connections > made and bus.connected)
            after = len(asyncio.all_tasks())
        await bus.stop()
    return before, after


def test_lost_connections_leave_nothing_behind(caplog: pytest.LogCaptureFixture) -> None:
    with (
        nats_server() as server,
        caplog.at_level(logging.ERROR, "asyncio"),
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        before, after = runner.run(suffer(server.port))
    assert after < before + CUTS / 2
    assert "never retrieved" not in caplog.text
