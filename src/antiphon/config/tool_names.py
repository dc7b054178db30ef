"""Names of tools as lists in the config have them: each by itself, by a pattern, or by the group it is in."""

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
"""Tools that are always there. Others may come from anywhere: of a name that is like none of these nothing is said."""

GROUP_PREFIX = "group:"
_AGENT_TOOL_NAMES = ("agents_list",)
TOOL_GROUPS = {
    "group:sessions": tuple(name for name in SESSION_TOOL_NAMES if name not in _AGENT_TOOL_NAMES),
    "group:agents": _AGENT_TOOL_NAMES,
    "group:openclaw": SESSION_TOOL_NAMES,
}
"""Those of related gateways that have tools here."""


def _expand_groups(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(tool for name in names for tool in TOOL_GROUPS.get(name, (name,)))


ToolNames = Annotated[tuple[str, ...], Strict(False), AfterValidator(_expand_groups)]
"""Nobody who reads such a list has to know of groups."""
