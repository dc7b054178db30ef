"""The telling of events goes on, whatever fails in it."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from antiphon.gateway import hub
from antiphon.gateway.auth import Authenticator, ClientIdentity
from antiphon.gateway.ws import frames
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
