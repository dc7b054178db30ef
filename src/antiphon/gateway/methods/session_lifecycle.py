"""Methods that change sessions: create, patch, reset, compact, delete and restore."""

from __future__ import annotations

import uuid
from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, UnsetType

from antiphon import keys
from antiphon.access import ADMIN_SCOPE, WRITE_SCOPE
from antiphon.errors import AntiphonError, Conflict
from antiphon.gateway import wire
from antiphon.gateway.methods.registry import MethodCall, qualify_session_key, rpc_method
from antiphon.gateway.wire import ImageAttachment
from antiphon.gateway.ws.frames import IdempotencyKey, Params, SessionReference
from antiphon.operations.types import IncomingMessage, SessionPatch

_SESSION_NAMESPACE = uuid.UUID("8c1f7a52-31c5-4e0e-8f0b-5d1d0a3f9b6e")


class SessionCreateParams(Params, frozen=True):
    key: SessionReference | None = None
    agent_id: str | None = None
    label: Annotated[str, Meta(min_length=1, max_length=512)] | None = None
    display_name: Annotated[str, Meta(min_length=1, max_length=500)] | None = None
    model: str | None = None
    parent_session_key: str | None = None
    task: str | None = None
    message: str | None = None
    attachments: list[ImageAttachment] = []
    idempotency_key: IdempotencyKey | None = None
    thinking_level: str | None = None
    emit_command_hooks: bool = False


@rpc_method("sessions.create", WRITE_SCOPE, SessionCreateParams)
async def create_session(call: MethodCall, params: SessionCreateParams) -> dict[str, Any]:
    """Create a session. A message starts a run right away; if it is rejected, the session remains."""
    view = await call.operations.sessions.create(
        call.caller,
        session=_derive_session_key(call, params),
        agent_id=params.agent_id,
        label=params.label,
        display_name=params.display_name,
        model=params.model,
        parent=params.parent_session_key,
    )
    result: dict[str, Any] = {
        "ok": True,
        "key": view.key,
        "sessionId": view.session_id,
        "entry": wire.build_session_dict(view),
        "runStarted": False,
    }
    text = params.message if params.message is not None else params.task
    if text is None and not params.attachments:
        return result
    message = IncomingMessage(
        session=view.key,
        content=wire.build_message_content(text or "", params.attachments),
        idempotency_key=params.idempotency_key,
        thinking=params.thinking_level,
    )
    try:
        accepted = await call.operations.messages.submit(call.caller, message)
    except AntiphonError as error:
        return {**result, "runError": {"code": error.ws, "message": str(error)}}
    return {**result, "runStarted": True, "runId": accepted.run_id}


def _derive_session_key(call: MethodCall, params: SessionCreateParams) -> str | None:
    """Return the requested key, or one derived from the idempotency key so that a retry gets the same session."""
    if params.key:
        return qualify_session_key(params.key, params.agent_id)
    if params.idempotency_key is None:
        return None
    agent = params.agent_id or call.config.default_agent_id
    name = uuid.uuid5(_SESSION_NAMESPACE, params.idempotency_key)
    return str(keys.owned_key(agent, "dashboard", str(name)))


class SessionPatchParams(Params, frozen=True):
    key: SessionReference
    agent_id: str | None = None
    expected_session_id: str | None = None
    label: str | UnsetType | None = UNSET
    display_name: str | UnsetType | None = UNSET
    model: str | UnsetType | None = UNSET
    thinking_level: str | UnsetType | None = UNSET
    verbose_level: str | UnsetType | None = UNSET
    send_policy: str | UnsetType | None = UNSET
    archived: bool | UnsetType = UNSET


@rpc_method("sessions.patch", WRITE_SCOPE, SessionPatchParams)
async def patch_session(call: MethodCall, params: SessionPatchParams) -> dict[str, Any]:
    changes = SessionPatch(
        label=params.label,
        display_name=params.display_name,
        model=params.model,
        thinking_level=params.thinking_level,
        verbose_level=params.verbose_level,
        send_policy=params.send_policy,
        archived=params.archived,
    )
    session = await _resolve_expected_session(
        call, qualify_session_key(params.key, params.agent_id), params.expected_session_id
    )
    view = await call.operations.sessions.patch(call.caller, session, changes)
    row = wire.build_session_dict(view)
    agent = view.agent_id or call.config.default_agent_id
    found = call.config.find_model(view.model_override or call.config.get_model_ref(agent))
    return {
        "ok": True,
        "path": call.gateway.database_path,
        "key": view.key,
        "entry": row,
        "resolved": {"modelProvider": found.provider_name, "model": found.model.id},
    }


class SessionResetParams(Params, frozen=True):
    key: SessionReference
    agent_id: str | None = None
    expected_session_id: str | None = None
    reason: Literal["new", "reset"] = "reset"
    if_idle: bool = False
    """Refuse if runs are active or queued, instead of stopping them."""
    idempotency_key: IdempotencyKey | None = None


@rpc_method("sessions.reset", ADMIN_SCOPE, SessionResetParams, waits=True)
async def reset_session(call: MethodCall, params: SessionResetParams) -> dict[str, Any]:
    start_conversation = (
        call.operations.conversations.renew if params.if_idle else call.operations.conversations.reset
    )
    view = await start_conversation(
        call.caller,
        qualify_session_key(params.key, params.agent_id),
        params.reason,
        key=params.idempotency_key,
        expected=params.expected_session_id,
    )
    return {"ok": True, "key": view.key, "entry": wire.build_session_dict(view)}


async def _resolve_expected_session(call: MethodCall, session: str, session_id: str | None) -> str:
    """Return the reference for an operation that must only affect the conversation that the client saw.

    If that conversation ends in the meantime, the operation itself rejects the id, in its transaction.
    """
    if session_id is None:
        return session
    view = await call.operations.sessions.describe(call.caller, session)
    if view.session_id != session_id:
        raise Conflict(
            f"Session {session!r} has moved on to another conversation.",
            "Read it again first.",
            key=session,
        )
    return session_id


class SessionDeleteParams(Params, frozen=True):
    key: SessionReference
    agent_id: str | None = None
    delete_transcript: bool = True
    expected_session_id: str | None = None
    emit_lifecycle_hooks: bool = False
    idempotency_key: IdempotencyKey | None = None


@rpc_method("sessions.delete", ADMIN_SCOPE, SessionDeleteParams, waits=True)
async def delete_session(call: MethodCall, params: SessionDeleteParams) -> dict[str, Any]:
    """Delete a session, or archive it without `deleteTranscript`: a transcript without session cannot be found.

    Archiving is idempotent, so it ignores the idempotency key.
    """
    session, expected = qualify_session_key(params.key, params.agent_id), params.expected_session_id
    if params.delete_transcript:
        deleted = await call.operations.sessions.delete(
            call.caller, session, key=params.idempotency_key, expected=expected
        )
    else:
        session = await _resolve_expected_session(call, session, expected)
        await call.operations.sessions.patch(call.caller, session, SessionPatch(archived=True))
        deleted = False
    return {"ok": True, "key": params.key, "deleted": deleted, "archived": []}


class SessionCompactParams(Params, frozen=True):
    key: SessionReference
    agent_id: str | None = None
    max_lines: Annotated[int, Meta(ge=1)] = 400
    idempotency_key: IdempotencyKey | None = None


@rpc_method("sessions.compact", ADMIN_SCOPE, SessionCompactParams)
async def compact_session(call: MethodCall, params: SessionCompactParams) -> dict[str, Any]:
    session = qualify_session_key(params.key, params.agent_id)
    done = await call.operations.transcripts.compact(
        call.caller, session, params.max_lines, key=params.idempotency_key
    )
    reason = {"reason": done.reason} if done.reason else {}
    return {"ok": True, "key": params.key, "compacted": done.compacted, "kept": done.kept, **reason}


class SessionRestoreParams(Params, frozen=True):
    session_id: Annotated[str, Meta(min_length=1)]


@rpc_method("sessions.restore", ADMIN_SCOPE, SessionRestoreParams)
async def restore_session(call: MethodCall, params: SessionRestoreParams) -> dict[str, Any]:
    view = await call.operations.conversations.restore(call.caller, params.session_id)
    return {"ok": True, "key": view.key, "entry": wire.build_session_dict(view)}
