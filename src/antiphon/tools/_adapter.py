"""Turns an operation into a tool: parses arguments, renders the view, and turns errors into answers."""

from __future__ import annotations

import copy
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from antiphon.engine.toolbox import Tool, ToolOutput, ToolRequest
from antiphon.errors import AntiphonError
from antiphon.runtimes import ToolSpec
from antiphon.tools._arguments import A, build_schema, parse_arguments
from antiphon.tools.results import render_refusal, render_view


def build_tool(
    name: str,
    description: str,
    argument_type: type[A],
    run: Callable[[ToolRequest, A], Awaitable[Any]],
    *,
    has_side_effects: bool = False,
    ends_turn: bool = False,
    agents: Callable[[str], Sequence[str]] | None = None,
) -> Tool:
    """Build a session tool. Calls may be repeated after a crash: reads are harmless, actions are idempotent."""
    spec = ToolSpec(name=name, description=description, parameters=build_schema(argument_type))
    return Tool(
        spec=spec,
        invoke=_build_invoke(argument_type, run),
        after_crash="settle",
        has_side_effects=has_side_effects,
        reaches_sessions=True,
        ends_turn=ends_turn,
        fit=_build_fit(spec, agents) if agents else None,
    )


def _build_invoke(
    argument_type: type[A], run: Callable[[ToolRequest, A], Awaitable[Any]]
) -> Callable[[ToolRequest], Awaitable[ToolOutput]]:
    async def invoke(call: ToolRequest) -> ToolOutput:
        try:
            return render_view(await run(call, parse_arguments(argument_type, call.arguments)))
        except AntiphonError as error:
            if error.who != "caller":  # internal errors are handled by the engine, not shown to the model
                raise
            return render_refusal(error)

    return invoke


def _build_fit(spec: ToolSpec, agents: Callable[[str], Sequence[str]]) -> Callable[[str], ToolSpec]:
    """Return a function that narrows `agentId` to the agents that the calling agent may name."""

    def fit(agent_id: str) -> ToolSpec:
        narrowed = copy.deepcopy(dict(spec.parameters))
        narrowed["properties"]["agentId"]["enum"] = list(agents(agent_id))
        return msgspec.structs.replace(spec, parameters=narrowed)

    return fit
