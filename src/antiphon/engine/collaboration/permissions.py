"""The maximum permissions of a spawned session, computed when it is spawned and inherited by its own sub-agents.

Permissions come from the configuration, which may change at any time; the stored maximum (the `envelope` of the
session's row) only restricts them. A sub-agent session that was not spawned here (it was imported, or an operator wrote
to such a key) has no stored permissions and is treated as a leaf.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import msgspec

from antiphon import keys
from antiphon.access import Visibility, VisibilityCap, pick_narrower_visibility
from antiphon.engine.toolbox import Toolbox
from antiphon.tool_selection import ToolAudience

if TYPE_CHECKING:  # importing the configuration would slow down read-only commands
    from antiphon.config import AgentConfig, Config


class SubagentPermissions(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    tools: tuple[str, ...]
    """Names of the tools it may call. Tools registered later are not included."""
    agents: tuple[str, ...]
    """Ids of the agents it may spawn."""
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
        """Return the permissions that both grant; `other` is the parent's, one level above."""
        return SubagentPermissions(
            tools=_intersect_names(self.tools, other.tools),
            agents=_intersect_names(self.agents, other.agents),
            read=pick_narrower_visibility(self.read, other.read),
            send=pick_narrower_visibility(self.send, other.send),
            depth=max(0, min(self.depth, other.depth - 1)),
        )


class SubagentPermissionResolver:
    """Finds the maximum permissions of a session."""

    def __init__(self, config: Config, toolbox: Toolbox) -> None:
        self._config = config
        self._toolbox = toolbox

    def resolve(self, agent_id: str, session_key: str, stored: str | None) -> SubagentPermissions | None:
        """Return a session's maximum permissions, given those stored in its row; None if it is not a sub-agent."""
        if stored is not None or not keys.parse(session_key).is_spawned:
            return decode_permissions(stored)
        tools = tuple(self.list_tool_names(self._config.get_agent(agent_id), depth=0))
        return SubagentPermissions(tools=tools, agents=(agent_id,), read="all", send="all", depth=0)

    def list_tool_names(self, target: AgentConfig, depth: int) -> list[str]:
        """Return the tools of the child's agent without session tools, as modified by `tools.subagents.tools`.

        What a model or a sandbox excludes is not considered, since both may be different later.
        """
        audience = ToolAudience(subagent_depth=depth)
        return list(self._toolbox.select_permitted(target.id, target.tools.selection, audience).by_name)


def decode_permissions(text: str | None) -> SubagentPermissions | None:
    return None if text is None else msgspec.json.decode(text, type=SubagentPermissions)


def _intersect_names(one: Collection[str], other: Collection[str]) -> tuple[str, ...]:
    return tuple(name for name in one if name in other)
