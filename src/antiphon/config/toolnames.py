"""Names of tools as lists in the config have them: each by itself, by a pattern, or by the group it is in."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Strict

SESSION_TOOLS = (
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

GROUP = "group:"
_AGENTS = ("agents_list",)
GROUPS = {
    "group:sessions": tuple(name for name in SESSION_TOOLS if name not in _AGENTS),
    "group:agents": _AGENTS,
    "group:openclaw": SESSION_TOOLS,
}
"""Those of related gateways that have tools here."""


def _one_by_one(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(tool for name in names for tool in GROUPS.get(name, (name,)))


ToolNames = Annotated[tuple[str, ...], Strict(False), AfterValidator(_one_by_one)]
"""Nobody who reads such a list has to know of groups."""
