"""Conversations as chat clients see them: history, sending, stopping, injecting."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from antiphon import keys
from antiphon.access import ADMIN, READ, WRITE
from antiphon.errors import Conflict, InvalidInput, NotFound
from antiphon.gateway import attachments, rows, speech
from antiphon.gateway.attachments import Attachment
from antiphon.gateway.frames import IdempotencyKey, Key, Params
from antiphon.gateway.methods import system
from antiphon.gateway.methods.registry import Call, method, named
from antiphon.operations import HistoryFilter, Message
from antiphon.views import Accepted, HistoryPage

MOST_BYTES = 6 * 2**20  # of one history
LARGE = 128 * 1024  # bytes of one message, above which it is left out of a history
Text = Annotated[str, Meta(min_length=1)]
Milliseconds = Annotated[int, Meta(ge=0, le=2**53)]


class History(Params, frozen=True):
    session_key: Key
    agent_id: str | None = None
    session_id: str | None = None
    """Another conversation of the session than the current one."""
    limit: Annotated[int, Meta(ge=1, le=1000)] = 200
    offset: Annotated[int, Meta(ge=0)] | None = None
    cursor: str | None = None
    max_chars: Annotated[int, Meta(ge=1, le=500_000)] | None = None
    max_bytes: Annotated[int, Meta(ge=1024)] = MOST_BYTES
    message_id: str | None = None
    input_run_ids: list[str] = []
    pending_before: int | None = None


@method("chat.history", READ, History)
async def history(call: Call, params: History) -> dict[str, Any]:
    """The newest messages of the conversation, oldest first. A session that is not there yet has none.

    Entries that are not for people are left out; `sessions.history` has all of them.
    """
    reference = params.session_id or named(params.session_key, params.agent_id)
    try:
        page = await call.operations.history(call.caller, reference, await _wanted(call, reference, params))
        info = rows.session_row(await call.operations.describe(call.caller, page.session_key))
    except NotFound:
        page, info = HistoryPage(params.session_key, "", [], 0, False), None
    messages, left_out = bounded([rows.message(item) for item in page.messages], params.max_bytes)
    more = page.has_more or left_out > 0
    first = page.messages[left_out]["seq"] if left_out else int(page.next_cursor or 0)
    return {
        "sessionKey": params.session_key,
        "sessionId": page.session_id,
        "messages": messages,
        "hasMore": more,
        "totalMessages": page.total,
        **({"nextCursor": str(first), "nextOffset": page.total - first + 1} if more and first else {}),
        "thinkingLevel": _thinking(call, info or {}),
        "defaults": defaults(call),
        **({"sessionInfo": info} if info else {}),
    }


method("chat.startup", READ, History)(history)


def _thinking(call: Call, row: dict[str, Any]) -> str:
    """How much a message is thought about that says nothing of it itself."""
    agent_id = row.get("agentId", call.config.default_agent_id)
    default = call.config.agent(agent_id).thinking_default if agent_id in call.config.agent_ids else None
    return row.get("thinkingLevel") or default or "off"


async def _wanted(call: Call, reference: str, params: History) -> HistoryFilter:
    before = None
    if params.cursor is not None:
        seq = params.cursor.removeprefix("seq:")
        if not (seq.isdecimal() and len(seq) < 18):
            raise InvalidInput(
                f"The cursor {params.cursor[:40]!r} is not one of ours.", "Pass nextCursor.", field="cursor"
            )
        before = int(seq)
    elif params.offset:
        end = await call.operations.history(
            call.caller, reference, HistoryFilter(limit=1, include_tools=True)
        )
        before = max(1, end.total - params.offset + 1)
    return HistoryFilter(limit=params.limit, include_tools=True, before=before, without_internal=True)


def bounded(messages: list[dict[str, Any]], most: int = MOST_BYTES) -> tuple[list[msgspec.Raw], int]:
    """The newest that fit, and how many older ones do not. One that is too large by itself is named, not shown."""
    kept: list[msgspec.Raw] = []
    size = 0
    for item in reversed(messages):
        raw = msgspec.json.encode(item)
        if len(raw) > LARGE:
            marks = {**item["__openclaw"], "truncated": True, "reason": "oversized"}
            text = "[left out: the message is too large to show here]"
            shown = {**item, "content": [{"type": "text", "text": text}], "__openclaw": marks}
            shown.pop("details", None)
            raw = msgspec.json.encode(shown)
        size += len(raw)
        if kept and size > min(most, MOST_BYTES):
            break
        kept.append(msgspec.Raw(raw))
    return kept[::-1], len(messages) - len(kept)


def defaults(call: Call) -> dict[str, Any]:
    found = call.config.find_model(call.config.model_ref(call.config.default_agent_id))
    return {
        "modelProvider": found.provider_name,
        "model": found.model.id,
        "contextTokens": found.model.context_window,
    }


class Send(Params, frozen=True):
    session_key: Key
    message: str
    idempotency_key: IdempotencyKey
    agent_id: str | None = None
    session_id: str | None = None
    thinking: str | None = None
    attachments: list[Attachment] = []
    timeout_ms: Milliseconds | None = None
    # What clients say that has no effect here: an answer always goes back to the session.
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


@method("chat.send", WRITE, Send)
async def send(call: Call, params: Send) -> dict[str, Any]:
    message = Message(
        session=named(params.session_key, params.agent_id),
        content=attachments.content(params.message, params.attachments),
        idempotency_key=params.idempotency_key,
        thinking=params.thinking or None,
        timeout_seconds=params.timeout_ms / 1000 if params.timeout_ms else None,
    )
    return await spoken(call, message, literal=params.suppress_command_interpretation)


async def spoken(call: Call, message: Message, *, literal: bool = False) -> dict[str, Any]:
    """Say it, and tell the client where it stands."""
    try:
        if literal:
            message = msgspec.structs.replace(message, literal=True)
            accepted = await call.operations.submit(call.caller, message)
            result = speech.Spoken(accepted.session_key, accepted=accepted)
        else:
            result = await speech.speak(call.operations, call.caller, message)
    except Conflict as error:
        error.data["reason"] = "chat-request-conflict"
        raise
    if result.done == "stopped":
        return {"ok": True, "aborted": bool(result.run_ids), "runIds": result.run_ids}
    if result.accepted is None:
        return {
            "runId": message.idempotency_key,
            "status": "ok",
            "sessionKey": keys.spoken(result.session_key),
        }
    return receipt(call, result.accepted)


def receipt(call: Call, accepted: Accepted) -> dict[str, Any]:
    if accepted.new:
        call.hub.acknowledged(call.connection, accepted.run_id, accepted.session_key)
    return {
        "runId": accepted.run_id,
        "status": _stands(accepted.state, new=accepted.new),
        "sessionKey": keys.spoken(accepted.session_key),
        "sessionId": accepted.session_id,
        "state": accepted.state,
    }


def _stands(state: str, *, new: bool) -> str:
    if new:
        return "started"
    stands = {"queued": "in_flight", "running": "in_flight", "ok": "ok", "incomplete": "ok"}
    return stands.get(state, "error")


class Abort(Params, frozen=True):
    session_key: Key
    agent_id: str | None = None
    run_id: str | None = None
    preserve_side_runs: bool = False


@method("chat.abort", WRITE, Abort)
async def abort(call: Call, params: Abort) -> dict[str, Any]:
    session = named(params.session_key, params.agent_id)
    if params.run_id is not None:
        run = await call.operations.run(call.caller, params.run_id)
        view = await call.operations.describe(call.caller, session)
        if keys.spoken(run.session_key) != view.key:
            raise InvalidInput("runId does not match sessionKey.", "Leave one of them out.", field="runId")
    stopped = await call.operations.stop(call.caller, session, params.run_id)
    return {"ok": True, "aborted": bool(stopped.run_ids), "runIds": stopped.run_ids}


class Inject(Params, frozen=True):
    session_key: Key
    message: Text
    agent_id: str | None = None
    label: Annotated[str, Meta(max_length=100)] | None = None
    idempotency_key: IdempotencyKey | None = None


@method("chat.inject", ADMIN, Inject)
async def inject(call: Call, params: Inject) -> dict[str, Any]:
    session = named(params.session_key, params.agent_id)
    injected = await call.operations.inject(
        call.caller, session, params.message, params.label, key=params.idempotency_key
    )
    return {"ok": True, "messageId": injected.message_id, "messageSeq": injected.seq}


class Metadata(Params, frozen=True):
    agent_id: str | None = None
    session_key: str | None = None
    auth_profile_id: str | None = None


@method("chat.metadata", READ, Metadata)
async def metadata(call: Call, params: Metadata) -> dict[str, Any]:
    """What a chat page needs beside the conversation."""
    return {"commands": [], "models": system.models(call)}
