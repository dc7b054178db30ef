"""The broadcast of events goes on after any failure in it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from itertools import chain
from pathlib import Path

import pytest

from antiphon.bus.local import LocalBus
from antiphon.gateway import hub
from antiphon.gateway.auth import Authenticator, ClientIdentity
from antiphon.gateway.ws import frames
from antiphon.runtimes import Prompt
from support.gateway_ws import open_gateway

pytestmark = [pytest.mark.anyio, pytest.mark.requirement("W3")]


async def test_what_fails_once_is_logged_and_begins_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failing = [True]

    def still_knows(self: Authenticator, identity: ClientIdentity) -> bool:
        if failing.pop() if failing else False:
            raise OSError("the disk is gone for a moment")
        return True

    monkeypatch.setattr(frames, "TICK_INTERVAL_MS", 20)
    monkeypatch.setattr(hub, "REVOCATION_CHECK_SECONDS", 0.02)
    monkeypatch.setattr(hub, "RESTART_DELAY_SECONDS", 0.0)
    monkeypatch.setattr(Authenticator, "is_still_valid", still_knows)
    with caplog.at_level(logging.ERROR):
        async with open_gateway(tmp_path) as gateway, gateway.client() as client:
            await client.take("tick", 3)
            await client.call("chat.send", sessionKey="main", message="x", idempotencyKey="k1")
            assert (await client.event("chat", state="final"))["runId"] == "k1"
    assert "restarting it" in caplog.text


async def test_a_wait_without_an_event_forgets_no_run(tmp_path: Path) -> None:
    """A listener may return None, and what was streamed of the runs in progress is still known."""
    go_on = asyncio.Event()

    async def speaks(prompt: Prompt) -> AsyncGenerator[str]:
        yield "one "
        await go_on.wait()
        yield "two"

    async with open_gateway(tmp_path, speaks) as gateway, gateway.client(caps=["chat-deltas"]) as client:
        await client.call("chat.send", sessionKey="main", message="x", idempotencyKey="k1")
        await client.event("chat", state="delta")
        bus = gateway.app.bus
        assert isinstance(bus, LocalBus)
        for listener in chain.from_iterable(bus._listeners.values()):  # pyright: ignore[reportPrivateUsage]
            listener._wake()  # pyright: ignore[reportPrivateUsage]
        go_on.set()
        final = await client.event("chat", state="final")
        pieces = client.list_events("chat", state="delta")
        assert "".join(piece["deltaText"] for piece in pieces) == "one two"
        assert [piece["seq"] for piece in (*pieces, final)] == list(range(1, len(pieces) + 2))
