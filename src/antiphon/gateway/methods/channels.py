"""Methods for chat channels: their state, pairings, and posting to a chat by its address."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from antiphon.access import ADMIN_SCOPE, READ_SCOPE, WRITE_SCOPE
from antiphon.channel_manifest import load_manifest
from antiphon.engine.outbox.delivery_rows import Destination
from antiphon.errors import InvalidInput
from antiphon.gateway.methods.registry import MethodCall, NoParams, rpc_method
from antiphon.gateway.ws.frames import IdempotencyKey, Params, SessionReference

ShortName = Annotated[str, Meta(min_length=1, max_length=200)]


class ChannelStatusParams(Params, frozen=True):
    probe: bool = False
    timeout_ms: Annotated[int, Meta(ge=0)] | None = None
    channel: str | None = None


@rpc_method("channels.status", READ_SCOPE, ChannelStatusParams)
async def get_channel_status(call: MethodCall, params: ChannelStatusParams) -> dict[str, Any]:
    """Return the accounts of the configured channels. The web chat needs none."""
    host = call.gateway.app.channels
    accounts = await host.describe() if host else []
    accounts = [account for account in accounts if params.channel in (None, account.channel)]
    names = list(dict.fromkeys(account.channel for account in accounts))
    manifests = {name: load_manifest(name) for name in names}
    sections = call.config.channel_sections
    by_channel = {name: [account for account in accounts if account.channel == name] for name in names}
    return {
        "ts": call.now,
        "channelOrder": names,
        "channelLabels": {name: manifest.label for name, manifest in manifests.items() if manifest},
        "channels": {
            name: {"configured": True, "running": any(account.state == "ready" for account in found)}
            for name, found in by_channel.items()
        },
        "channelAccounts": {
            name: [
                {
                    **msgspec.to_builtins(account),
                    "enabled": True,
                    "configured": True,
                    "running": account.state in ("ready", "degraded"),
                    "connected": account.state == "ready",
                    "lastError": account.reason,
                }
                for account in found
            ]
            for name, found in by_channel.items()
        },
        "channelDefaultAccountId": {name: sections[name].default_account_id for name in names},
    }


@rpc_method("pairing.list", ADMIN_SCOPE)
async def list_pairings(call: MethodCall, params: NoParams) -> dict[str, Any]:
    """Return the people who may write directly to an account, and those who ask to."""
    return {"pairings": await call.operations.pairings.list(call.caller)}


class PairingApproveParams(Params, frozen=True):
    channel: ShortName
    code: ShortName
    account_id: ShortName | None = None


@rpc_method("pairing.approve", ADMIN_SCOPE, PairingApproveParams)
async def approve_pairing(call: MethodCall, params: PairingApproveParams) -> dict[str, Any]:
    view = await call.operations.pairings.approve(call.caller, params.channel, params.code, params.account_id)
    return {"ok": True, "pairing": view}


class PairingRevokeParams(Params, frozen=True):
    channel: ShortName
    sender: ShortName
    account_id: ShortName | None = None


@rpc_method("pairing.revoke", ADMIN_SCOPE, PairingRevokeParams)
async def revoke_pairing(call: MethodCall, params: PairingRevokeParams) -> dict[str, Any]:
    await call.operations.pairings.revoke(call.caller, params.channel, params.sender, params.account_id)
    return {"ok": True}


class ChannelSendParams(Params, frozen=True):
    to: Annotated[str, Meta(min_length=1, max_length=500)]
    idempotency_key: IdempotencyKey
    message: str | None = None
    channel: str | None = None
    account_id: ShortName | None = None
    thread_id: ShortName | None = None
    session_key: SessionReference | None = None
    agent_id: str | None = None
    media_url: str | None = None
    media_urls: list[str] = []
    reply_to_id: str | None = None


@rpc_method("send", WRITE_SCOPE, ChannelSendParams)
async def send_to_channel(call: MethodCall, params: ChannelSendParams) -> dict[str, Any]:
    """Post a text to a chat. It is durable when this answers; `deliveries.list` shows what became of it."""
    channel = (params.channel or _choose_channel(call)).lower()
    if params.media_url or params.media_urls or params.reply_to_id:
        raise InvalidInput(
            "Only texts can be sent, and no answers to one message.",
            "Leave mediaUrl, mediaUrls and replyToId out.",
            field="mediaUrl",
        )
    if channel not in call.config.enabled_channels:
        raise InvalidInput(
            f"unknown channel: {channel[:80]}.",
            "Use a configured one: `antiphon channels list`. chat.send talks to a session.",
            field="channel",
        )
    destination = Destination(
        channel=channel,
        to=params.to,
        account_id=params.account_id or call.config.channel_sections[channel].default_account_id,
        thread_id=params.thread_id,
    )
    session = params.session_key or (f"agent:{params.agent_id}:main" if params.agent_id else "main")
    view = await call.operations.posts.post_to_chat(
        call.caller, params.message or "", params.idempotency_key, destination, session
    )
    return {
        "runId": params.idempotency_key,
        "messageId": view.delivery_key,
        "channel": view.channel,
        "status": view.status,
        "sessionKey": view.session_key,
    }


def _choose_channel(call: MethodCall) -> str:
    names = list(call.config.enabled_channels)
    return names[0] if len(names) == 1 else "none"
