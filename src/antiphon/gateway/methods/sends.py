"""Saying something to a session: sending to it, from another one or not, redirecting it, and stopping it."""

from __future__ import annotations

import uuid
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from antiphon import keys
from antiphon.access import WRITE
from antiphon.errors import InvalidInput
from antiphon.gateway import attachments
from antiphon.gateway.attachments import Attachment
from antiphon.gateway.frames import IdempotencyKey, Key, Params
from antiphon.gateway.methods import chat
from antiphon.gateway.methods.registry import Call, method, named
from antiphon.operations import Message
from antiphon.operations import Send as Exchange
from antiphon.operations.exchanges import LONGEST, TIMEOUT, TURNS_MOST
from antiphon.views import Sent


class Said(Params, frozen=True):
    key: Key
    message: str
    agent_id: str | None = None
    thinking: str | None = None
    attachments: list[Attachment] = []
    timeout_ms: chat.Milliseconds | None = None
    idempotency_key: IdempotencyKey | None = None


class Send(Said, frozen=True):
    """With `fromSessionKey` it is one session that sends to another, and what follows is for that."""

    from_session_key: Key | None = None
    timeout_seconds: Annotated[float, Meta(ge=0, le=LONGEST)] | None = None
    reply_back: Annotated[int, Meta(ge=0, le=TURNS_MOST)] | None = None
    announce: Literal["target", "none"] | None = None


def _awaits_reply(params: Send) -> bool:
    return params.from_session_key is not None and params.timeout_seconds != 0


@method("sessions.send", WRITE, Send, waits=_awaits_reply)
async def send(call: Call, params: Send) -> dict[str, Any] | Sent:
    """As chat.send, to a session that exists; or an exchange between two of them."""
    session = named(params.key, params.agent_id)
    if params.from_session_key is not None:
        return await call.operations.send(
            call.caller, _exchange(params, session), requester=params.from_session_key
        )
    for field in ("timeout_seconds", "reply_back", "announce"):
        if getattr(params, field) is not None:
            name = _camel(field)
            raise InvalidInput(f"{name!r} is for an exchange.", "Pass fromSessionKey, too.", field=name)
    await call.operations.describe(call.caller, session)
    return await chat.spoken(call, _message(params, session))


def _exchange(params: Send, session: str) -> Exchange:
    for field in ("thinking", "attachments", "timeout_ms"):
        if getattr(params, field):
            name = _camel(field)
            raise InvalidInput(
                f"{name!r} cannot be sent from one session to another.", "Leave it out.", field=name
            )
    return Exchange(
        session=session,
        message=params.message,
        idempotency_key=params.idempotency_key,
        reply_back=params.reply_back,
        announce=params.announce or "target",
        timeout_seconds=TIMEOUT if params.timeout_seconds is None else params.timeout_seconds,
    )


def _camel(field: str) -> str:
    return msgspec.structs.fields(Send)[Send.__struct_fields__.index(field)].encode_name


@method("sessions.steer", WRITE, Said, waits=True)
async def steer(call: Call, params: Said) -> dict[str, Any]:
    """Stop what is being answered and say this instead; if it cannot be said, nothing is stopped."""
    message = _message(params, named(params.key, params.agent_id))
    accepted, stopped = await call.operations.steer(call.caller, message)
    return {**chat.receipt(call, accepted), "interruptedActiveRun": bool(stopped)}


def _message(params: Said, session: str) -> Message:
    return Message(
        session=session,
        content=attachments.content(params.message, params.attachments),
        idempotency_key=params.idempotency_key or str(uuid.uuid4()),
        thinking=params.thinking or None,
        timeout_seconds=params.timeout_ms / 1000 if params.timeout_ms else None,
    )


class Abort(Params, frozen=True):
    key: Key | None = None
    run_id: str | None = None
    agent_id: str | None = None
    clear_queued: bool = False


@method("sessions.abort", WRITE, Abort)
async def abort(call: Call, params: Abort) -> dict[str, Any]:
    if params.key is None and params.run_id is None:
        raise InvalidInput("Either key or runId is required.", "Pass one.", field="key")
    session = (
        named(params.key, params.agent_id)
        if params.key
        else keys.spoken((await call.operations.run(call.caller, params.run_id or "")).session_key)
    )
    stopped = await call.operations.stop(call.caller, session, params.run_id)
    aborted = stopped.run_ids[0] if stopped.run_ids else None
    return {"ok": True, "abortedRunId": aborted, "status": "aborted" if aborted else "no-active-run"}
