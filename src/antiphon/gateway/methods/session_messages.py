"""Methods that send messages to sessions, steer them and stop them."""

from __future__ import annotations

import uuid
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from antiphon import keys
from antiphon.access import WRITE_SCOPE
from antiphon.errors import InvalidInput
from antiphon.gateway import wire
from antiphon.gateway.methods import chat
from antiphon.gateway.methods.registry import MethodCall, qualify_session_key, rpc_method
from antiphon.gateway.wire import ImageAttachment
from antiphon.gateway.ws.frames import IdempotencyKey, Params, SessionReference
from antiphon.messages import AnnounceMode
from antiphon.operations.collaboration_types import SendResult
from antiphon.operations.exchanges import MAX_REPLY_BACK_TURNS
from antiphon.operations.types import (
    DEFAULT_REPLY_TIMEOUT_SECONDS,
    MAX_REPLY_TIMEOUT_SECONDS,
    IncomingMessage,
)
from antiphon.operations.types import SendRequest as Exchange


class SessionMessageParams(Params, frozen=True):
    key: SessionReference
    message: str
    agent_id: str | None = None
    thinking: str | None = None
    attachments: list[ImageAttachment] = []
    timeout_ms: chat.Milliseconds | None = None
    idempotency_key: IdempotencyKey | None = None


class SessionSendParams(SessionMessageParams, frozen=True):
    """With `fromSessionKey`, one session sends to another; the fields after it apply only then."""

    from_session_key: SessionReference | None = None
    timeout_seconds: Annotated[float, Meta(ge=0, le=MAX_REPLY_TIMEOUT_SECONDS)] | None = None
    reply_back: Annotated[int, Meta(ge=0, le=MAX_REPLY_BACK_TURNS)] | None = None
    announce: AnnounceMode | None = None


def _awaits_reply(params: SessionSendParams) -> bool:
    return params.from_session_key is not None and params.timeout_seconds != 0


@rpc_method("sessions.send", WRITE_SCOPE, SessionSendParams, waits=_awaits_reply)
async def send_to_session(call: MethodCall, params: SessionSendParams) -> dict[str, Any] | SendResult:
    """Send a message to an existing session, like `chat.send`, or start an exchange between two sessions."""
    session = qualify_session_key(params.key, params.agent_id)
    if params.from_session_key is not None:
        return await call.operations.exchanges.send(
            call.caller, _build_exchange(params, session), requester=params.from_session_key
        )
    for field in ("timeout_seconds", "reply_back", "announce"):
        if getattr(params, field) is not None:
            name = _get_wire_name(field)
            raise InvalidInput(f"{name!r} is for an exchange.", "Pass fromSessionKey, too.", field=name)
    await call.operations.sessions.describe(call.caller, session)
    return await chat.submit_message(call, _build_message(params, session))


def _build_exchange(params: SessionSendParams, session: str) -> Exchange:
    for field in ("thinking", "attachments", "timeout_ms"):
        if getattr(params, field):
            name = _get_wire_name(field)
            raise InvalidInput(
                f"{name!r} cannot be sent from one session to another.", "Leave it out.", field=name
            )
    return Exchange(
        session=session,
        message=params.message,
        idempotency_key=params.idempotency_key,
        reply_back=params.reply_back,
        announce=params.announce or "target",
        timeout_seconds=DEFAULT_REPLY_TIMEOUT_SECONDS
        if params.timeout_seconds is None
        else params.timeout_seconds,
    )


def _get_wire_name(field: str) -> str:
    return msgspec.structs.fields(SessionSendParams)[
        SessionSendParams.__struct_fields__.index(field)
    ].encode_name


@rpc_method("sessions.steer", WRITE_SCOPE, SessionMessageParams, waits=True)
async def steer_session(call: MethodCall, params: SessionMessageParams) -> dict[str, Any]:
    """Stop the active run and submit this message instead; a rejected message stops nothing."""
    message = _build_message(params, qualify_session_key(params.key, params.agent_id))
    accepted, stopped = await call.operations.messages.steer(call.caller, message)
    return {**chat.build_receipt(call, accepted), "interruptedActiveRun": bool(stopped)}


def _build_message(params: SessionMessageParams, session: str) -> IncomingMessage:
    return IncomingMessage(
        session=session,
        content=wire.build_message_content(params.message, params.attachments),
        idempotency_key=params.idempotency_key or str(uuid.uuid4()),
        thinking=params.thinking or None,
        timeout_seconds=params.timeout_ms / 1000 if params.timeout_ms else None,
    )


class SessionAbortParams(Params, frozen=True):
    key: SessionReference | None = None
    run_id: str | None = None
    agent_id: str | None = None
    clear_queued: bool = False


@rpc_method("sessions.abort", WRITE_SCOPE, SessionAbortParams)
async def abort_session(call: MethodCall, params: SessionAbortParams) -> dict[str, Any]:
    if params.key is None and params.run_id is None:
        raise InvalidInput("Either key or runId is required.", "Pass one.", field="key")
    session = (
        qualify_session_key(params.key, params.agent_id)
        if params.key
        else keys.display_full_key(
            (await call.operations.runs.get(call.caller, params.run_id or "")).session_key
        )
    )
    stopped = await call.operations.runs.stop(call.caller, session, params.run_id)
    aborted = stopped.run_ids[0] if stopped.run_ids else None
    return {"ok": True, "abortedRunId": aborted, "status": "aborted" if aborted else "no-active-run"}
