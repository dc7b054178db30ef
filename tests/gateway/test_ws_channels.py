"""Chat channels on the wire: their state, pairings, and posting to a chat."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.gateway_ws import open_gateway

pytestmark = [pytest.mark.anyio, pytest.mark.requirement("W2")]

UNREACHABLE = "http://127.0.0.1:9"


@pytest.mark.requirement("N7")
async def test_a_channel_that_cannot_connect_is_down_with_the_reason(tmp_path: Path) -> None:
    settings = {"channels": {"telegram": {"botToken": "123456:secret-token", "apiRoot": UNREACHABLE}}}
    async with open_gateway(tmp_path, settings=settings) as gateway, gateway.client() as client:
        shown = await client.call("channels.status")
        assert (shown["channelOrder"], shown["channelLabels"]) == (["telegram"], {"telegram": "Telegram"})
        assert shown["channelDefaultAccountId"] == {"telegram": "default"}
        [account] = shown["channelAccounts"]["telegram"]
        assert account["state"] in {"starting", "down"} and not account["connected"]
        assert (await client.call("channels.status", channel="discord"))["channelOrder"] == []
        masked = await client.call("config.get")
        assert "secret-token" not in str(masked) + str(shown)


@pytest.mark.requirement("CH18")
async def test_pairings_are_listed_approved_and_revoked(tmp_path: Path) -> None:
    settings = {"channels": {"telegram": {"botToken": "123456:t", "apiRoot": UNREACHABLE}}}
    async with open_gateway(tmp_path, settings=settings) as gateway, gateway.client() as client:
        assert await client.call("pairing.list") == {"pairings": []}
        wrong = await client.refused("pairing.approve", channel="telegram", code="ABCDEFGH")
        assert wrong["details"]["type"] == "not_found"
        missing = await client.refused("pairing.revoke", channel="telegram", sender="7")
        assert missing["details"]["type"] == "not_found"
        other = await client.refused("pairing.approve", channel="discord", code="ABCDEFGH")
        assert "'discord' is not configured" in other["message"]


@pytest.mark.requirement("N4")
async def test_a_text_for_a_chat_is_kept_until_its_channel_is_connected(tmp_path: Path) -> None:
    settings = {"channels": {"telegram": {"botToken": "123456:t", "apiRoot": UNREACHABLE}}}
    async with open_gateway(tmp_path, settings=settings) as gateway, gateway.client() as client:
        for _ in range(2):
            sent = await client.call("send", to="7", message="dinner", idempotencyKey="k1")
            assert (sent["channel"], sent["status"]) == ("telegram", "queued")
        [delivery] = (await client.call("deliveries.list"))["deliveries"]
        assert (delivery["state"], delivery["to"], delivery["text"]) == ("pending", "7", "dinner")
        for wrong in ({"channel": "discord", "message": "x"}, {"mediaUrl": "http://a/b", "message": "x"}, {}):
            refused = await client.refused("send", to="7", idempotencyKey="k2", **wrong)
            assert refused["code"] == "INVALID_REQUEST", wrong
