"""The tool `agents_list`: lists the agents that the calling agent may spawn and message."""

from __future__ import annotations

from antiphon.engine.toolbox import Tool, ToolRequest
from antiphon.operations.operations import Operations
from antiphon.operations.types import AgentsView
from antiphon.tools._adapter import ToolArguments, build_tool

TOOL_DESCRIPTION = (
    "List the agents that you may start with sessions_spawn (as agentId), yourself first; canMessage shows which of"
    " them you may also message with sessions_send. messageOnly lists agents that you may message but not start."
)


class AgentsListArguments(ToolArguments, frozen=True):
    """No arguments."""


def agents_list(operations: Operations) -> Tool:
    async def run(call: ToolRequest, arguments: AgentsListArguments) -> AgentsView:
        return await operations.agents.list_reachable(call.caller)

    return build_tool("agents_list", TOOL_DESCRIPTION, AgentsListArguments, run)
