"""`POST /tools/invoke`: invokes one tool on behalf of a session (see `tool_invocations`)."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from antiphon import access
from antiphon.access import Caller
from antiphon.engine.toolbox import ToolOutput
from antiphon.gateway import tool_invocations
from antiphon.gateway.http.responses import build_json_response, read_json
from antiphon.gateway.state import GatewayState
from antiphon.gateway.tool_invocations import ToolInvocation


async def post_invoke(gateway: GatewayState, caller: Caller, request: Request) -> Response:
    access.require_scope(caller, "send")  # before the body is read
    wanted = await read_json(request, ToolInvocation)
    result, status = await tool_invocations.invoke_tool(
        gateway, caller, wanted, request.headers.get("idempotency-key")
    )
    if status != 200:
        error = {"type": "tool_error", **tool_invocations.format_tool_error(result)}
        return build_json_response({"ok": False, "error": error}, status)
    content = [{"type": "text", "text": result.text}]
    return build_json_response(
        {"ok": True, "result": {"content": content, "details": _format_details(result)}}
    )


def _format_details(result: ToolOutput) -> Any:
    """Return the result as data; a plain-text refusal becomes the `status` and `error` that tool refusals have."""
    return (
        {"status": "error", "error": result.text}
        if result.is_error and result.details is None
        else result.details
    )
