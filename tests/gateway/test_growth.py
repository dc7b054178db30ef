"""A gateway that has served many clients is as it was before: only those that are connected use memory."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import pytest
from websockets.server import ServerProtocol

from antiphon.bus.local import LocalBus
from antiphon.gateway.http.limits import LimitedHttpProtocol
from antiphon.gateway.ws.connection import PROCESS_SEND_QUEUE_TOTAL, WebSocketConnection
from antiphon.gateway.ws.protocol import LimitedWebSocketProtocol
from support.app_fixture import OPERATOR, wait_until
from support.gateway_ws import TEST_CLIENT, TUI_CLIENT, Client, GatewayFixture

pytestmark = [pytest.mark.anyio, pytest.mark.requirement("W2")]

ROUNDS = 12
CLIENTS = 8  # at once, in every round
TURNS = 3  # of each of them
SESSIONS = [f"agent:main:dashboard:grow{number}" for number in range(CLIENTS)]
SLACK = CLIENTS  # objects of a kind that may be more: caches that were not full yet


def files() -> int:
    """That this process has open, where that can be told."""
    folder = Path("/proc/self/fd")
    return len(list(folder.iterdir())) if folder.is_dir() else 0


def listeners(gateway: GatewayFixture) -> int:
    assert isinstance(gateway.app.bus, LocalBus)
    return sum(gateway.app.bus.count_listeners().values())


def held(gateway: GatewayFixture) -> dict[str, int]:
    """Objects that live as long as a client is connected or a run is active."""
    hub = gateway.served.hub
    parts: dict[str, Iterable[object]] = {
        "connections": hub.connections,
        "runs": hub.run_streams._runs,  # pyright: ignore[reportPrivateUsage]
        "changes": hub.session_changes._changes_by_session,  # pyright: ignore[reportPrivateUsage]
        "channels": hub.subscriptions._followed_sessions,  # pyright: ignore[reportPrivateUsage]
        "joined": hub.subscriptions._sessions_by_connection,  # pyright: ignore[reportPrivateUsage]
    }
    counts = {name: len(list(part)) for name, part in parts.items()}
    counts["waiting_bytes"] = PROCESS_SEND_QUEUE_TOTAL.waiting_bytes
    return {**counts, "listeners": listeners(gateway), "tasks": len(asyncio.all_tasks()), "files": files()}


def objects() -> Counter[str]:
    """Instances of our own types that are alive."""
    gc.collect()
    return Counter(name for it in gc.get_objects() if (name := kind_of(it)).startswith("antiphon."))


def kind_of(thing: object) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


async def visit(
    gateway: GatewayFixture, session: str, number: str, *, cut: bool, client_description: dict[str, str]
) -> None:
    """One client: it subscribes, says some things, waits for the answers, asks for what never comes, and goes."""
    await gateway.operations.sessions.open(OPERATOR, session)
    async with gateway.client(client=client_description) as client:
        await client.call("sessions.subscribe")
        await client.call("sessions.messages.subscribe", key=session, afterSeq=0)
        for turn in range(TURNS):
            await say(client, session, f"{number}-{turn}")
        await client.start("agent.wait", {"runId": f"{number}-never", "timeoutMs": 60_000})
        await client.settled()
        await emptied(lambda: count_held_run_ends(gateway))
        if cut:
            client.abort()
            await client.closed()


def count_held_run_ends(gateway: GatewayFixture) -> dict[str, int]:
    """Of clients that answer pings, as these do."""
    found: Counter[str] = Counter()
    for connection in gateway.served.hub.connections:
        found["unread runs"] += len(connection._unread_runs)  # pyright: ignore[reportPrivateUsage]
        found["held events"] += len(connection._held_events)  # pyright: ignore[reportPrivateUsage]
    return dict(+found)


async def say(client: Client, session: str, key: str) -> None:
    await client.call("chat.send", sessionKey=session, message=f"say {key}", idempotencyKey=key)
    assert (await client.call("agent.wait", runId=key))["status"] == "ok"
    await client.event("chat", runId=key, state="final")


async def serve_round(gateway: GatewayFixture, number: int) -> None:
    visits = (
        visit(
            gateway,
            session,
            f"{number}-{place}",
            cut=bool((number + place) % 2),
            client_description=TUI_CLIENT if place % 4 > 1 else TEST_CLIENT,
        )
        for place, session in enumerate(SESSIONS)
    )
    await asyncio.gather(*visits)


async def emptied(left: Callable[[], dict[str, int]]) -> None:
    """Until nothing is left, or what is left is told; for some work goes on in the background for a while."""

    async def nothing() -> bool:
        return left() == {}

    with suppress(TimeoutError):
        await wait_until(nothing)
    assert left() == {}


async def test_nothing_is_left_of_clients_that_are_gone(gateway: GatewayFixture) -> None:
    idle = held(gateway)
    # A reader opens the database and its log when it is first needed, which may be any time.
    idle["files"] += 8

    def left() -> dict[str, int]:
        return {name: count for name, count in held(gateway).items() if count > idle[name]}

    await serve_round(gateway, 0)  # what is created once is created now
    await emptied(left)
    before = objects()
    for number in range(1, ROUNDS + 1):
        await serve_round(gateway, number)
    await emptied(left)
    await emptied(lambda: {kind: more for kind, more in (objects() - before).items() if more > SLACK})
    assert (await gateway.operations.sessions.get_summary(OPERATOR)).sessions == CLIENTS


@pytest.mark.requirement("W1", "SEC14")
async def test_what_a_connection_held_is_freed_without_the_collector(gateway: GatewayFixture) -> None:
    """However it ended: the collector looks so seldom that what it would find could be gigabytes."""

    def left() -> dict[str, int]:
        kinds = (LimitedWebSocketProtocol, ServerProtocol, LimitedHttpProtocol, WebSocketConnection)
        found = Counter(type(it).__name__ for it in gc.get_objects() if issubclass(type(it), kinds))
        return dict(found - idle)

    async def holds_events() -> bool:
        return "held events" in count_held_run_ends(gateway)

    idle: Counter[str] = Counter()
    gc.collect()
    idle = Counter(left())
    gc.disable()
    try:
        for cut in (True, False):
            for first in (None, '{"type":"req"', " " * 70_000, "not JSON"):
                async with gateway.connect_unauthenticated() as peer:
                    if first:
                        await peer.send(first)
                    if cut:
                        peer.abort()
                    if cut or first:
                        await peer.closed()
            async with gateway.client() as client:
                await client.call("health")
                if cut:
                    client.abort()
                    await client.closed()
            async with gateway.client(client=TUI_CLIENT) as client:
                client.collect_pongs()
                await client.call("chat.send", sessionKey=SESSIONS[0], message="x", idempotencyKey=f"{cut}")
                await wait_until(holds_events)
                if cut:
                    client.abort()
                    await client.closed()
        await emptied(left)
    finally:
        gc.enable()
