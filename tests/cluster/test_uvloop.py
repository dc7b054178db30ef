"""A connection to NATS on the event loop that a gateway runs on, whose transports fail in words of their own."""

from __future__ import annotations

import asyncio
from typing import Any

import uvloop

from antiphon.nats.connection import NatsConnection, NatsServers, subscribe
from cluster.servers import nats_server

BOUND = 20.0


async def lose(url: str) -> set[str]:
    """Names of what goes on of a connection that broke with something still to be written."""
    heard: list[object] = []
    clients: list[Any] = []

    async def hear(message: object) -> None:
        heard.append(message)

    async def joined(client: Any) -> None:
        clients.append(client)
        again.set()
        await subscribe(client, "x", hear)

    def troubled(error: Exception) -> None:
        """A message is sent between the loss and its detection."""
        clients[0]._pending, clients[0]._pending_data_size = [b"PUB x 1\r\n1\r\n"], 10

    again = asyncio.Event()
    link = NatsConnection(
        NatsServers(url=url),
        name="lost",
        on_connected=joined,
        on_disconnected=lambda: None,
        on_error=troubled,
    )
    before = asyncio.all_tasks()
    await link.start()
    (lost,) = clients
    ours = asyncio.all_tasks() - before
    again.clear()
    await lost.publish("x", b"1")
    lost._transport._io_writer.transport.abort()
    async with asyncio.timeout(BOUND):
        await again.wait()
        assert await link.confirm_flushed(await link.wait_until_connected())
    left = {str(task.get_coro()).split()[2] for task in ours if not task.done()}
    await link.stop()
    assert await link.confirm_flushed(lost) is False
    return left


def test_a_connection_lost_while_writing_leaks_no_task() -> None:
    with nats_server() as server, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(lose(server.url)) <= {"NatsConnection._keep_connected"}
