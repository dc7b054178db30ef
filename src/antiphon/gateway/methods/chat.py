"""Conversations as chat clients see them: history, sending, stopping, injecting."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from antiphon import keys
from antiphon.access import ADMIN_SCOPE, READ_SCOPE, WRITE_SCOPE
from antiphon.engine.sessions.transcripts import HistoryFilter
from antiphon.errors import Conflict, InvalidInput, NotFound
from antiphon.gateway import slash_commands, wire
from antiphon.gateway.methods import system
from antiphon.gateway.methods.registry import MethodCall, qualify_session_key, rpc_method
from antiphon.gateway.wire import ImageAttachment
from antiphon.gateway.ws.frames import IdempotencyKey, Params, SessionReference
from antiphon.operations.transcript_types import HistoryPage
from antiphon.operations.types import IncomingMessage, MessageReceipt

MAX_HISTORY_BYTES = 6 * 2**20  # of one response
MAX_HISTORY_MESSAGE_BYTES = 128 * 1024  # larger messages are replaced by a placeholder
NonEmptyText = Annotated[str, Meta(min_length=1)]
Milliseconds = Annotated[int, Meta(ge=0, le=2**53)]


class ChatHistoryParams(Params, frozen=True):
    session_key: SessionReference
    agent_id: str | None = None
    session_id: str | None = None
    """Another conversation of the session than the current one."""
    limit: Annotated[int, Meta(ge=1, le=1000)] = 200
    offset: Annotated[int, Meta(ge=0)] | None = None
    cursor: str | None = None
    max_chars: Annotated[int, Meta(ge=1, le=500_000)] | None = None
    max_bytes: Annotated[int, Meta(ge=1024)] = MAX_HISTORY_BYTES
    message_id: str | None = None
    input_run_ids: list[str] = []
    pending_before: int | None = None


@rpc_method("chat.history", READ_SCOPE, ChatHistoryParams)
async def get_chat_history(call: MethodCall, params: ChatHistoryParams) -> dict[str, Any]:
    """Return the newest messages of the conversation, oldest first; none if the session does not exist yet.

    Internal entries are left out; `sessions.history` has all of them.
    """
    reference = params.session_id or qualify_session_key(params.session_key, params.agent_id)
    try:
        page = await call.operations.transcripts.read(
            call.caller, reference, await _build_filter(call, reference, params)
        )
        info = wire.build_session_dict(await call.operations.sessions.describe(call.caller, page.session_key))
    except NotFound:
        page, info = HistoryPage(params.session_key, "", [], 0, False), None
    messages, left_out = fit_history_bytes(
        [wire.format_history_item(item) for item in page.messages], params.max_bytes
    )
    more = page.has_more or left_out > 0
    first = page.messages[left_out]["seq"] if left_out else int(page.next_cursor or 0)
    return {
        "sessionKey": params.session_key,
        "sessionId": page.session_id,
        "messages": messages,
        "hasMore": more,
        "totalMessages": page.total,
        **({"nextCursor": str(first), "nextOffset": page.total - first + 1} if more and first else {}),
        "thinkingLevel": _get_thinking_level(call, info or {}),
        "defaults": get_model_defaults(call),
        **({"sessionInfo": info} if info else {}),
    }


rpc_method("chat.startup", READ_SCOPE, ChatHistoryParams)(get_chat_history)


def _get_thinking_level(call: MethodCall, row: dict[str, Any]) -> str:
    """Return the thinking level for messages that do not set one."""
    agent_id = row.get("agentId", call.config.default_agent_id)
    default = call.config.get_agent(agent_id).thinking_default if agent_id in call.config.agent_ids else None
    return row.get("thinkingLevel") or default or "off"


async def _build_filter(call: MethodCall, reference: str, params: ChatHistoryParams) -> HistoryFilter:
    before = None
    if params.cursor is not None:
        before = wire.parse_cursor(params.cursor)
    elif params.offset:
        end = await call.operations.transcripts.read(
            call.caller, reference, HistoryFilter(limit=1, include_tools=True)
        )
        before = max(1, end.total - params.offset + 1)
    return HistoryFilter(limit=params.limit, include_tools=True, before=before, without_internal=True)


def fit_history_bytes(
    messages: list[dict[str, Any]], max_bytes: int = MAX_HISTORY_BYTES
) -> tuple[list[msgspec.Raw], int]:
    """Return the newest messages that fit, and how many do not. An oversized message becomes a placeholder."""
    kept: list[msgspec.Raw] = []
    size = 0
    for item in reversed(messages):
        raw = msgspec.json.encode(item)
        if len(raw) > MAX_HISTORY_MESSAGE_BYTES:
            marks = {**item["__openclaw"], "truncated": True, "reason": "oversized"}
            text = "[left out: the message is too large to show here]"
            placeholder = {**item, "content": [{"type": "text", "text": text}], "__openclaw": marks}
            placeholder.pop("details", None)
            raw = msgspec.json.encode(placeholder)
        size += len(raw)
        if kept and size > min(max_bytes, MAX_HISTORY_BYTES):
            break
        kept.append(msgspec.Raw(raw))
    return kept[::-1], len(messages) - len(kept)


def get_model_defaults(call: MethodCall) -> dict[str, Any]:
    found = call.config.find_model(call.config.get_model_ref(call.config.default_agent_id))
    return {
        "modelProvider": found.provider_name,
        "model": found.model.id,
        "contextTokens": found.model.context_window,
    }


class ChatSendParams(Params, frozen=True):
    session_key: SessionReference
    message: str
    idempotency_key: IdempotencyKey
    agent_id: str | None = None
    session_id: str | None = None
    thinking: str | None = None
    attachments: list[ImageAttachment] = []
    timeout_ms: Milliseconds | None = None
    # Accepted without effect: an answer always goes back to the session.
    deliver: bool | None = None
    fast_mode: bool | Literal["auto"] | None = None
    fast_auto_on_seconds: int | None = None
    queue_mode: str | None = None
    originating_channel: str | None = None
    originating_to: str | None = None
    originating_account_id: str | None = None
    originating_thread_id: str | None = None
    reply_to_id: str | None = None
    suppress_command_interpretation: bool = False
    expected_leaf_entry_id: str | None = None
    expected_session_routing_contract: str | None = None
    expected_permission_mode: str | None = None
    expected_tool_overrides: Any = None
    intent: Any = None
    tool_bindings: Any = None
    mentions: Any = None
    work_context: Any = None


@rpc_method("chat.send", WRITE_SCOPE, ChatSendParams)
async def send_chat_message(call: MethodCall, params: ChatSendParams) -> dict[str, Any]:
    message = IncomingMessage(
        session=qualify_session_key(params.session_key, params.agent_id),
        content=wire.build_message_content(params.message, params.attachments),
        idempotency_key=params.idempotency_key,
        thinking=params.thinking or None,
        timeout_seconds=params.timeout_ms / 1000 if params.timeout_ms else None,
        literal=params.suppress_command_interpretation,
    )
    return await submit_message(call, message)


async def submit_message(call: MethodCall, message: IncomingMessage) -> dict[str, Any]:
    """Submit a message or run its slash command, and return the receipt."""
    try:
        result = await slash_commands.submit_or_run_command(
            call.operations, call.caller, message, call.caller_name
        )
    except Conflict as error:
        error.data["reason"] = "chat-request-conflict"
        raise
    if result.done == "stopped":
        return {"ok": True, "aborted": bool(result.run_ids), "runIds": result.run_ids}
    if result.accepted is None:
        return {
            "runId": message.idempotency_key,
            "status": "ok",
            "sessionKey": keys.display_full_key(result.session_key),
        }
    return build_receipt(call, result.accepted)


def build_receipt(call: MethodCall, accepted: MessageReceipt) -> dict[str, Any]:
    if accepted.new:
        call.connection.hold_run_end(accepted.run_id)
        call.hub.run_streams.track_run(accepted.run_id, accepted.session_key)
    return {
        "runId": accepted.run_id,
        "status": _format_run_status(accepted.state, new=accepted.new),
        "sessionKey": keys.display_full_key(accepted.session_key),
        "sessionId": accepted.session_id,
        "state": accepted.state,
    }


def _format_run_status(state: str, *, new: bool) -> str:
    if new:
        return "started"
    statuses = {"queued": "in_flight", "running": "in_flight", "ok": "ok", "incomplete": "ok"}
    return statuses.get(state, "error")


class ChatAbortParams(Params, frozen=True):
    session_key: SessionReference
    agent_id: str | None = None
    run_id: str | None = None
    preserve_side_runs: bool = False


@rpc_method("chat.abort", WRITE_SCOPE, ChatAbortParams)
async def abort_chat(call: MethodCall, params: ChatAbortParams) -> dict[str, Any]:
    session = qualify_session_key(params.session_key, params.agent_id)
    if params.run_id is not None:
        run = await call.operations.runs.get(call.caller, params.run_id)
        view = await call.operations.sessions.describe(call.caller, session)
        if keys.display_full_key(run.session_key) != view.key:
            raise InvalidInput("runId does not match sessionKey.", "Leave one of them out.", field="runId")
    stopped = await call.operations.runs.stop(call.caller, session, params.run_id)
    return {"ok": True, "aborted": bool(stopped.run_ids), "runIds": stopped.run_ids}


class ChatInjectParams(Params, frozen=True):
    session_key: SessionReference
    message: NonEmptyText
    agent_id: str | None = None
    label: Annotated[str, Meta(max_length=100)] | None = None
    idempotency_key: IdempotencyKey | None = None


@rpc_method("chat.inject", ADMIN_SCOPE, ChatInjectParams)
async def inject_message(call: MethodCall, params: ChatInjectParams) -> dict[str, Any]:
    session = qualify_session_key(params.session_key, params.agent_id)
    injected = await call.operations.transcripts.inject(
        call.caller, session, params.message, params.label, key=params.idempotency_key
    )
    return {"ok": True, "messageId": injected.message_id, "messageSeq": injected.seq}


class ChatMetadataParams(Params, frozen=True):
    agent_id: str | None = None
    session_key: str | None = None
    auth_profile_id: str | None = None


@rpc_method("chat.metadata", READ_SCOPE, ChatMetadataParams)
async def get_chat_metadata(call: MethodCall, params: ChatMetadataParams) -> dict[str, Any]:
    """Return what a chat page needs besides the conversation."""
    return {"commands": [], "models": system.describe_models(call)}
