"""Invokes one tool on behalf of one session, for HTTP and WebSocket alike.

The session has the tools of a run in it, and no more (`Operations.act_as`). Of these, only read-only tools are offered;
tools with side effects are allowed one by one in `gateway.tools.allow`. A tool that is not offered is reported exactly
like one that does not exist.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from antiphon import access, keys
from antiphon.access import Caller
from antiphon.config import Config
from antiphon.engine import validation
from antiphon.engine.runs.tool_invocation import run_with_cancel_grace
from antiphon.engine.toolbox import Tool, ToolOutput, ToolRequest
from antiphon.errors import AntiphonError, Forbidden, InvalidInput, StoreError, ToolMissing
from antiphon.gateway.http.responses import ErrorInfo, ErrorResponse, build_json_response, read_json
from antiphon.gateway.state import GatewayState
from antiphon.operations.sessions import ActingSession
from antiphon.operations.types import MAX_REPLY_TIMEOUT_SECONDS
from antiphon.tool_selection import TOOL_ALIASES
from antiphon.tools._adapter import render_refusal

log = logging.getLogger(__name__)

TOOL_TIMEOUT_SECONDS = 120.0  # for a tool, in addition to the wait it is asked for


class ToolInvocation(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """`name` is another word for `tool`; `action` is an argument that some clients put beside the others."""

    tool: str | None = None
    name: str | None = None
    args: dict[str, Any] | None = None
    action: str | None = None
    session_key: str | None = None
    agent_id: str | None = None
    dry_run: bool = False


class InvocationOutcome(NamedTuple):
    """The tool's result and the HTTP status of the answer: 200 for every result, refusals included."""

    result: ToolOutput
    status: int


async def invoke_tool(
    gateway: GatewayState, caller: Caller, invocation: ToolInvocation, key: str | None
) -> InvocationOutcome:
    """Invoke a tool. With the same idempotency `key`, a built-in tool takes effect only once, ever."""
    access.require_scope(caller, "send")
    name = invocation.tool or invocation.name or ""
    name = TOOL_ALIASES.get(name.lower(), name)
    if not name:
        raise InvalidInput("'tool' is missing.", "Set it to the name of a tool.", field="tool")
    _find_offered_tool(gateway, name, gateway.app.toolbox.tools)  # before a session is created
    validation.validate_idempotency_key(key)
    acting = await gateway.app.operations.sessions.act_as(
        caller, _choose_session(gateway.app.config, invocation)
    )
    _check_agent(acting, invocation.agent_id)
    tool = _find_offered_tool(gateway, name, acting.actor.tools)
    call = ToolRequest(
        caller=acting.actor.caller,
        run_id=f"http:{acting.session.key}",
        call_id=key or uuid.uuid4().hex,
        arguments=_build_arguments(tool, invocation),
        tool_names=acting.actor.tools.keys(),
    )
    if invocation.dry_run:
        text = f"Tool {name!r} is available; it was not invoked."
        return InvocationOutcome(ToolOutput(text=text, details={"dryRun": True}), 200)
    if tool.may_ask and await tool.find_question(call) is not None:
        raise Forbidden(
            f"Tool {name!r} asks a person before this call, which only works in a conversation.",
            "Ask the agent to make the call.",
        )
    return await call_tool(tool, call)


def _find_offered_tool(gateway: GatewayState, name: str, tools: Mapping[str, Tool]) -> Tool:
    settings = gateway.app.config.gateway.tools
    tool, listed = tools.get(name), name.lower()
    if tool is None or listed in settings.deny or (tool.has_side_effects and listed not in settings.allow):
        raise ToolMissing(
            f"Tool not available: {name[:80]}.",
            "Name it in gateway.tools.allow if it exists and may be used.",
        )
    return tool


def _choose_session(config: Config, invocation: ToolInvocation) -> str:
    if invocation.session_key is not None:
        return invocation.session_key
    if invocation.agent_id is None:
        return "main"
    return f"agent:{config.get_agent(keys.validate_agent_id(invocation.agent_id)).id}:main"


def _check_agent(acting: ActingSession, requested: str | None) -> None:
    agent_id = acting.actor.caller.agent_id
    if requested is not None and requested.lower() != agent_id:
        raise InvalidInput(
            f"Session {acting.session.key!r} belongs to the agent {agent_id!r}, not to {requested[:80]!r}.",
            "Leave 'agentId' out, or name a session of that agent.",
            field="agentId",
        )


def _build_arguments(tool: Tool, invocation: ToolInvocation) -> dict[str, Any]:
    arguments = dict(invocation.args or {})
    if invocation.action is not None and "action" in tool.spec.parameters.get("properties", {}):
        arguments.setdefault("action", invocation.action)
    return arguments


async def call_tool(tool: Tool, call: ToolRequest) -> InvocationOutcome:
    """Call a tool for a client. Refusals and failures are results; only errors of the store are raised."""
    name = tool.spec.name
    seconds = TOOL_TIMEOUT_SECONDS + get_requested_wait_seconds(tool, call.arguments)
    try:
        async with asyncio.timeout(seconds):
            result = await run_with_cancel_grace(tool.invoke(call))
    except TimeoutError:
        return _build_failure(504, f"Tool {name!r} timed out after {seconds:g} s.")
    except StoreError:
        raise
    except AntiphonError as error:
        return InvocationOutcome(render_refusal(error), 200)
    except Exception:
        log.exception("Tool %r failed when it was invoked", name)
        return _build_failure(500, f"Tool {name!r} failed. See the gateway's log.")
    return InvocationOutcome(result, 200)


def get_requested_wait_seconds(tool: Tool, arguments: Mapping[str, Any]) -> float:
    """Return how long the arguments ask the tool to wait; the tool enforces its `timeoutSeconds` itself."""
    schema = tool.spec.parameters.get("properties", {}).get("timeoutSeconds")
    if schema is None:
        return 0.0
    try:
        seconds = float(arguments.get("timeoutSeconds", schema.get("default", 0.0)))
    except (TypeError, ValueError):
        return 0.0  # the tool rejects the invalid number itself
    return min(seconds, MAX_REPLY_TIMEOUT_SECONDS) if seconds > 0 else 0.0


def format_tool_error(result: ToolOutput) -> dict[str, Any]:
    """Return a tool's error for both transports: a message, and the details that the model would read."""
    details: object = result.details
    if not isinstance(details, dict):
        return {"message": result.text}
    details = cast("dict[str, Any]", details)
    return {"message": details.get("error", result.text), "details": details}


def _build_failure(status: int, message: str) -> InvocationOutcome:
    return InvocationOutcome(ToolOutput(text=message, is_error=True), status)


class InvocationResult(msgspec.Struct, frozen=True):
    content: list[dict[str, str]]
    details: Any


class InvocationResponse(msgspec.Struct, frozen=True):
    """A tool's result as text and as data. Refusals by the tool are results, too."""

    ok: bool
    result: InvocationResult


async def post_invoke(gateway: GatewayState, caller: Caller, request: Request) -> Response:
    """Handle `POST /tools/invoke`."""
    access.require_scope(caller, "send")  # before the body is read
    invocation = await read_json(request, ToolInvocation)
    result, status = await invoke_tool(gateway, caller, invocation, request.headers.get("idempotency-key"))
    if status != 200:
        error = ErrorInfo(type="tool_error", **format_tool_error(result))
        return build_json_response(ErrorResponse(error=error), status)
    # A refusal in plain text becomes the `status` and `error` that other refusals have.
    is_plain_refusal = result.is_error and result.details is None
    details = {"status": "error", "error": result.text} if is_plain_refusal else result.details
    content = [{"type": "text", "text": result.text}]
    return build_json_response(InvocationResponse(ok=True, result=InvocationResult(content, details)))
