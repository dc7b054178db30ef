"""What a spawned session may have at most. Computed once, when it is spawned; whatever it spawns has no more.

Rights come from the configuration, which may change at any time; an envelope only ever takes away from them. A
sub-agent's session that nobody spawned here, because it was imported or an operator wrote to such a key, came without
one: it is a leaf, with the tools that one would have.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import msgspec

from antiphon import keys
from antiphon.access import Visibility, VisibilityCap, pick_narrower_visibility
from antiphon.engine.toolbox import Toolbox, matches_any_pattern

if TYPE_CHECKING:  # a command that only reads is over before this would be imported
    from antiphon.config import AgentConfig, Config

SPAWN_TOOL_NAME = "sessions_spawn"
ORCHESTRATOR_TOOL_NAMES = frozenset(
    {SPAWN_TOOL_NAME, "sessions_list", "sessions_history", "sessions_yield", "subagents", "agents_list"}
)
"""Session tools of a sub-agent that may itself spawn."""


class SubagentPermissions(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    tools: tuple[str, ...]
    """Names; none of a tool that came to the house later."""
    agents: tuple[str, ...]
    """That it may spawn."""
    read: Visibility
    send: Visibility
    depth: int
    """How many levels it may still spawn."""

    @property
    def json_text(self) -> str:
        return msgspec.json.encode(self).decode()

    @property
    def cap(self) -> VisibilityCap:
        return VisibilityCap(self.read, self.send)

    def intersect(self, other: SubagentPermissions) -> SubagentPermissions:
        """No more than both."""
        return SubagentPermissions(
            tools=_intersect_names(self.tools, other.tools),
            agents=_intersect_names(self.agents, other.agents),
            read=pick_narrower_visibility(self.read, other.read),
            send=pick_narrower_visibility(self.send, other.send),
            depth=max(0, min(self.depth, other.depth - 1)),
        )


class SubagentPermissionResolver:
    """Which session has which."""

    def __init__(self, config: Config, toolbox: Toolbox) -> None:
        self._config = config
        self._toolbox = toolbox

    def resolve(self, agent_id: str, session_key: str, stored: str | None) -> SubagentPermissions | None:
        """What a session stays within, by what stands in its row; None if it was not spawned."""
        if stored is not None or keys.parse(session_key).shape != "subagent":
            return decode_permissions(stored)
        tools = tuple(self.list_tool_names(self._config.get_agent(agent_id), depth=0))
        return SubagentPermissions(tools=tools, agents=(agent_id,), read="all", send="all", depth=0)

    def list_tool_names(self, target: AgentConfig, depth: int) -> list[str]:
        """A child's agent's tools without those for sessions, as `tools.subagents.tools` changes that."""
        lists = self._config.tools.subagents.tools
        chosen: list[str] = []
        for name, tool in self._toolbox.select_allowed(target.tools.allow, target.tools.deny).items():
            usual = not tool.reaches_sessions or (depth > 0 and name in ORCHESTRATOR_TOOL_NAMES)
            if lists.allow is not None:
                usual = matches_any_pattern(name, lists.allow)
            if (usual or matches_any_pattern(name, lists.also_allow)) and not matches_any_pattern(
                name, lists.deny
            ):
                chosen.append(name)
        return [name for name in chosen if depth > 0 or name != SPAWN_TOOL_NAME]


def decode_permissions(text: str | None) -> SubagentPermissions | None:
    return None if text is None else msgspec.json.decode(text, type=SubagentPermissions)


def _intersect_names(one: Collection[str], other: Collection[str]) -> tuple[str, ...]:
    return tuple(name for name in one if name in other)
