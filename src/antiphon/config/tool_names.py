"""Tool names in config lists: a name, a pattern, or a group."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Strict

SESSION_TOOL_NAMES = (
    "sessions_list",
    "sessions_history",
    "sessions_search",
    "session_status",
    "agents_list",
    "sessions_send",
    "sessions_spawn",
    "sessions_yield",
    "subagents",
)
"""Tools that always exist. Others may be added elsewhere, so a name unlike any of these gets no warning."""

GROUP_PREFIX = "group:"
_AGENT_TOOL_NAMES = ("agents_list",)
TOOL_GROUPS = {
    "group:sessions": tuple(name for name in SESSION_TOOL_NAMES if name not in _AGENT_TOOL_NAMES),
    "group:agents": _AGENT_TOOL_NAMES,
    "group:openclaw": SESSION_TOOL_NAMES,
}
"""Tool groups of related gateways, reduced to the tools that exist here."""


def _expand_groups(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(tool for name in names for tool in TOOL_GROUPS.get(name, (name,)))


ToolNames = Annotated[tuple[str, ...], Strict(False), AfterValidator(_expand_groups)]
"""A list of tool names with its groups already expanded."""
