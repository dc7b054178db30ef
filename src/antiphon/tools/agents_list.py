"""The tool `agents_list`: which agents this one may spawn and message."""

from __future__ import annotations

from antiphon.engine.toolbox import Call, Tool
from antiphon.operations import Operations
from antiphon.tools.adapter import adapted
from antiphon.tools.arguments import Arguments
from antiphon.views import AgentsView

DESCRIPTION = (
    "List the agents you may start with sessions_spawn (its agentId), yourself first, and which you may message with"
    " sessions_send (its agentId): canSpawn and canMessage, and messageOnly for those you may not start."
)


class AgentsListArguments(Arguments, frozen=True):
    """None."""


def agents_list(operations: Operations) -> Tool:
    async def answer(call: Call, given: AgentsListArguments) -> AgentsView:
        return await operations.agents(call.caller)

    return adapted("agents_list", DESCRIPTION, AgentsListArguments, answer)
