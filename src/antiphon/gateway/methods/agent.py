"""Methods that start a run and wait for its end, from any connection."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from msgspec import Meta

from antiphon.access import READ_SCOPE, WRITE_SCOPE
from antiphon.bus import run_topic
from antiphon.errors import AgentRunFailed, InvalidInput, NotFound
from antiphon.gateway import slash_commands, wire
from antiphon.gateway.methods.registry import MethodCall, qualify_session_key, rpc_method
from antiphon.gateway.wire import ImageAttachment
from antiphon.gateway.ws import frames
from antiphon.gateway.ws.frames import IdempotencyKey, Params
from antiphon.messages import Provenance
from antiphon.operations.types import IncomingMessage, RunView

RUN_POLL_SECONDS = 5.0  # between checks for a run that does not exist yet, if no event arrives
MAX_WAIT_MS = 24 * 3600 * 1000


ShortText = Annotated[str, Meta(max_length=200, pattern=r"^[^\x00-\x1f\x7f]*$")]


class ProvenanceParams(Params, frozen=True):
    """Origin of a text, as the client describes it. A client's claim that it came from another session is ignored."""

    kind: ShortText
    origin_session_id: ShortText | None = None
    source_session_key: ShortText | None = None
    source_channel: ShortText | None = None
    source_tool: ShortText | None = None


class AgentParams(Params, frozen=True):
    message: Annotated[str, Meta(min_length=1)]
    idempotency_key: IdempotencyKey
    agent_id: str | None = None
    session_key: str | None = None
    session_id: str | None = None
    model: str | None = None
    provider: str | None = None
    thinking: str | None = None
    attachments: list[ImageAttachment] = []
    timeout: Annotated[float, Meta(ge=0)] | None = None
    """Seconds."""
    extra_system_prompt: str | None = None
    input_provenance: ProvenanceParams | None = None
    deliver: bool | None = None
    """Post the answer to `channel` and `to`. By default it is only shown in the session."""
    best_effort_deliver: bool | None = None
    channel: str | None = None
    reply_channel: str | None = None
    to: str | None = None
    reply_to: str | None = None
    # Accepted without effect: the web chat has one account, and a session has one lane.
    account_id: str | None = None
    reply_account_id: str | None = None
    thread_id: str | None = None
    group_id: str | None = None
    group_channel: str | None = None
    group_space: str | None = None
    lane: str | None = None
    cleanup_bundle_mcp_on_run_end: bool | None = None
    prompt_mode: str | None = None
    voice_wake_trigger: str | None = None
    label: str | None = None


@rpc_method("agent", WRITE_SCOPE, AgentParams, waits=True)
async def run_agent(call: MethodCall, params: AgentParams) -> dict[str, Any]:
    """Submit a message. Responds twice: when it is durable, and when its run has ended."""
    _check_delivery(params)
    outcome = await slash_commands.submit_or_run_command(
        call.operations, call.caller, _build_message(call, params), call.caller_name
    )
    if outcome.accepted is None:
        return {
            "runId": params.idempotency_key,
            "status": "ok",
            "summary": outcome.done,
            "result": {"payloads": []},
        }
    accepted = outcome.accepted
    receipt = {
        "runId": accepted.run_id,
        "status": "accepted",
        "acceptedAt": call.now,
        "sessionKey": accepted.session_key,
        "sessionId": accepted.session_id,
    }
    call.connection.enqueue(frames.encode_response(call.request_id, receipt))
    while True:
        view = await call.operations.runs.wait(call.caller, accepted.run_id, 3600)
        if view.has_ended:
            return _format_ended_run(view, accepted.session_id)


def _check_delivery(params: AgentParams) -> None:
    """Reject a delivery target that this gateway does not have, unless the client asks for best effort."""
    if not params.deliver or params.best_effort_deliver:
        return
    wire.check_channel("replyChannel", params.reply_channel)
    wire.check_channel("channel", params.channel)
    for field, to in (("replyTo", params.reply_to), ("to", params.to)):
        if to and to not in {params.session_key, params.session_id}:
            raise InvalidInput(
                f"{field!r} is {to[:80]!r}, and this gateway has no channel to deliver to.",
                "Leave it out: the answer is shown in the session. sessionKey says which.",
                field=field,
            )


def _build_message(call: MethodCall, params: AgentParams) -> IncomingMessage:
    source = params.input_provenance
    model = f"{params.provider}/{params.model}" if params.provider and params.model else params.model
    return IncomingMessage(
        session=_choose_session(call, params),
        content=wire.build_message_content(params.message, params.attachments),
        idempotency_key=params.idempotency_key,
        origin="agent",
        model=model or None,
        thinking=params.thinking or None,
        instructions=params.extra_system_prompt or None,
        timeout_seconds=params.timeout or None,
        provenance=Provenance(
            kind="external",
            source_channel=source.source_channel,
            source_tool=source.source_tool,
        )
        if source
        else None,
    )


def _choose_session(call: MethodCall, params: AgentParams) -> str:
    if params.agent_id is not None and params.agent_id not in call.config.agent_ids:
        raise InvalidInput(
            f'invalid agent params: unknown agent id "{params.agent_id}".',
            "See agents.list.",
            field="agentId",
        )
    if params.session_key:
        return qualify_session_key(params.session_key, params.agent_id)
    if params.session_id:
        return params.session_id
    return f"agent:{params.agent_id}:main" if params.agent_id else "main"


def _format_ended_run(view: RunView, session_id: str) -> dict[str, Any]:
    provider, _, model = (view.model or "").rpartition("/")
    usage = {"input": view.usage.input, "output": view.usage.output} if view.usage else None
    result = {
        "payloads": [{"text": view.reply, "mediaUrl": None}] if view.reply else [],
        "meta": {
            "durationMs": view.running_ms,
            "aborted": view.state == "cancelled",
            "agentMeta": {"sessionId": session_id, "provider": provider, "model": model, "usage": usage},
        },
    }
    if view.state in ("ok", "incomplete"):
        summary = "completed" if view.state == "ok" else "incomplete"
        return {"runId": view.run_id, "status": "ok", "summary": summary, "result": result}
    payload = {"runId": view.run_id, "status": "error", "summary": view.error, "result": result}
    what = view.error or f"The run ended with state {view.state!r}."
    raise AgentRunFailed(what, "To try again, send it with a new idempotency key.", payload=payload)


class AgentWaitParams(Params, frozen=True):
    run_id: Annotated[str, Meta(min_length=1)]
    timeout_ms: Annotated[int, Meta(ge=0, le=MAX_WAIT_MS)] = 30_000


@rpc_method("agent.wait", READ_SCOPE, AgentWaitParams, waits=True)
async def wait_for_run(call: MethodCall, params: AgentWaitParams) -> dict[str, Any]:
    """Wait until the run has ended; it may not exist yet."""
    loop = asyncio.get_running_loop()
    until = loop.time() + params.timeout_ms / 1000
    async with call.gateway.app.bus.listen(run_topic(params.run_id)) as ends:
        while True:
            left = max(0.0, until - loop.time())
            try:
                return _format_waited_run(await call.operations.runs.wait(call.caller, params.run_id, left))
            except NotFound:
                if left <= 0:
                    return {"runId": params.run_id, "status": "timeout"}
                await ends.get(min(RUN_POLL_SECONDS, left))


def _format_waited_run(view: RunView) -> dict[str, Any]:
    if not view.has_ended:
        return {"runId": view.run_id, "status": "timeout", "run": view}
    status = {"ok": "ok", "incomplete": "ok", "timeout": "timeout"}.get(view.state, "error")
    payload = {
        "runId": view.run_id,
        "status": status,
        "startedAt": view.started_at or view.created_at,
        "endedAt": view.ended_at,
        "state": view.state,
        "reply": view.reply,
        "run": view,
    }
    if view.state == "cancelled":
        return {**payload, "error": "aborted", "stopReason": "rpc"}
    return {**payload, "error": view.error} if view.error else payload
