"""The tool `sessions_yield`: ends the turn until the session's sub-agents wake it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from antiphon.engine.toolbox import Tool, ToolRequest
from antiphon.operations.operations import Operations
from antiphon.operations.types import RequestOrigin
from antiphon.tools._adapter import ToolArguments, build_tool

TOOL_DESCRIPTION = (
    "End your turn now and be woken when your sub-agents have reported: all of them, or any one. Their reports are "
    "then in this conversation."
)


class YieldArguments(ToolArguments, frozen=True):
    wait_for: Annotated[Literal["all", "any"], Meta(description="When to be woken.")] = "all"
    message: Annotated[str, Meta(max_length=4000, description="Message to show meanwhile.")] | None = None


def sessions_yield(operations: Operations) -> Tool:
    async def run(call: ToolRequest, arguments: YieldArguments) -> dict[str, Any]:
        waiting = await operations.subagents.yield_turn(
            call.caller, RequestOrigin(call.run_id, call.key), arguments.wait_for
        )
        message = arguments.message or "Turn yielded."
        return {"status": "yielded", "message": message, "waitFor": arguments.wait_for, "subagents": waiting}

    return build_tool(
        "sessions_yield", TOOL_DESCRIPTION, YieldArguments, run, has_side_effects=True, ends_turn=True
    )
