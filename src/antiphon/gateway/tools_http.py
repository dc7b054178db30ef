"""`POST /tools/invoke`: one tool, as one session (see `invocations`)."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from antiphon import access
from antiphon.access import Caller
from antiphon.engine.toolbox import Result
from antiphon.gateway import invocations
from antiphon.gateway.gateway import Gateway
from antiphon.gateway.invocations import Invocation
from antiphon.gateway.replies import json_reply, read_json


async def post_invoke(gateway: Gateway, caller: Caller, request: Request) -> Response:
    access.require_scope(caller, "send")  # before the body is read
    wanted = await read_json(request, Invocation)
    result, status = await invocations.invoke(gateway, caller, wanted, request.headers.get("idempotency-key"))
    if status != 200:
        error = {"type": "tool_error", **invocations.complaint(result)}
        return json_reply({"ok": False, "error": error}, status)
    content = [{"type": "text", "text": result.text}]
    return json_reply({"ok": True, "result": {"content": content, "details": _details(result)}})


def _details(result: Result) -> Any:
    """The result as data; a refusal in plain text becomes the `status` and `error` that refusals of tools have."""
    return (
        {"status": "error", "error": result.text}
        if result.is_error and result.details is None
        else result.details
    )
