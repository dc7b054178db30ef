"""A storm: two hundred subscribers whose connections break at random while messages flow and the gateway restarts."""

from __future__ import annotations

import asyncio
import logging
import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake

from support.app_fixture import BOUND, OPERATOR
from support.gateway_ws import GatewayFixture, connect_params, open_gateway

pytestmark = [pytest.mark.anyio, pytest.mark.requirement("W3", "G38")]

SEED = 20260117
CLIENTS = 200
SESSIONS = [f"agent:main:dashboard:storm{n}" for n in range(5)]
MESSAGES = 30  # in each session, half of them before the restart
LONGEST = 60.0  # seconds


class Place:
    """Where the gateway is now; it moves when it restarts."""

    def __init__(self) -> None:
        self.gateway: GatewayFixture | None = None
        self.there = asyncio.Event()

    async def found(self) -> GatewayFixture:
        await self.there.wait()
        assert self.gateway is not None
        return self.gateway


class Subscriber:
    """A client that knows the last number it saw, and comes back with it whenever it was cut off."""

    def __init__(self, place: Place, session: str, chance: random.Random) -> None:
        self.session = session
        self.seen: list[tuple[int, str]] = []
        self.cuts = 0
        self._place = place
        self._chance = chance
        self._ws: ClientConnection | None = None

    async def run(self) -> None:
        while len(self.seen) < MESSAGES:
            with suppress(OSError, ConnectionClosed, InvalidHandshake, TimeoutError):
                await self._visit(await self._place.found())
            await asyncio.sleep(0)

    async def _visit(self, gateway: GatewayFixture) -> None:
        async with connect(
            gateway.served.url,
            compression=None,
            ping_interval=None,
            proxy=None,
            close_timeout=1,
            open_timeout=BOUND,
        ) as ws:
            self._ws = ws
            after = {"key": self.session, "afterSeq": len(self.seen)}
            for number, (method, params) in enumerate(
                (
                    ("connect", connect_params(auth={"token": gateway.owner})),
                    ("sessions.messages.subscribe", after),
                )
            ):
                frame = {"type": "req", "id": str(number), "method": method, "params": params}
                await ws.send(msgspec.json.encode(frame).decode())
            patience = self._chance.randint(1, 20)
            while len(self.seen) < MESSAGES:
                self._hear(msgspec.json.decode(await asyncio.wait_for(ws.recv(), BOUND)))
                patience -= 1
                if patience < 0 and self.cuts < 3:
                    self.cuts += 1
                    ws.transport.abort()

    def _hear(self, frame: dict[str, Any]) -> None:
        if frame.get("ok") is False and frame["error"]["code"] == "UNAVAILABLE":
            raise ConnectionResetError("it is stopping, and says so")  # as any client does: connect again
        assert frame.get("ok", True), frame
        assert frame.get("event") != "session.gap", frame
        if frame.get("event") == "session.message":
            payload = frame["payload"]
            assert payload["sessionKey"] == self.session
            self.seen.append((payload["messageSeq"], payload["message"]["content"][0]["text"]))


async def _flow(gateway: GatewayFixture, numbers: range, chance: random.Random) -> None:
    for number in numbers:
        for session in chance.sample(SESSIONS, len(SESSIONS)):
            await gateway.operations.transcripts.inject(OPERATOR, session, f"{session} {number}")


async def test_every_subscriber_has_every_message_once_and_in_order(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    chance = random.Random(SEED)
    place = Place()
    subscribers = [
        Subscriber(place, SESSIONS[number % len(SESSIONS)], random.Random(chance.random()))
        for number in range(CLIENTS)
    ]
    tasks: list[asyncio.Task[None]] = []
    try:
        async with asyncio.timeout(LONGEST):
            async with open_gateway(tmp_path) as gateway:
                for session in SESSIONS:
                    await gateway.operations.sessions.open(OPERATOR, session)
                place.gateway = gateway
                place.there.set()
                tasks = [asyncio.create_task(subscriber.run()) for subscriber in subscribers]
                await _flow(gateway, range(1, MESSAGES // 2 + 1), chance)
                place.there.clear()
            async with open_gateway(
                tmp_path
            ) as gateway:  # no client has everything yet: half of it was not sent
                place.gateway = gateway
                place.there.set()
                await _flow(gateway, range(MESSAGES // 2 + 1, MESSAGES + 1), chance)
                await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for subscriber in subscribers:
        expected = [(n, f"{subscriber.session} {n}") for n in range(1, MESSAGES + 1)]
        assert subscriber.seen == expected
    assert sum(subscriber.cuts for subscriber in subscribers) > CLIENTS  # or it was no storm
    # A client that disconnects is no reason for a warning.
    ours = [record for record in caplog.records if record.name.startswith("antiphon")]
    assert [record.getMessage() for record in ours if record.levelno >= logging.WARNING] == []
