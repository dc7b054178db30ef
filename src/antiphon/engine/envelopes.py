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
from antiphon.access import Cap, Visibility, narrower
from antiphon.engine.toolbox import Toolbox, named

if TYPE_CHECKING:  # a command that only reads is over before this would be imported
    from antiphon.config import AgentConfig, Config

SPAWN = "sessions_spawn"
ORCHESTRATION = frozenset(
    {SPAWN, "sessions_list", "sessions_history", "sessions_yield", "subagents", "agents_list"}
)
"""Session tools of a sub-agent that may itself spawn."""


class Envelope(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    tools: tuple[str, ...]
    """Names; none of a tool that came to the house later."""
    agents: tuple[str, ...]
    """That it may spawn."""
    read: Visibility
    send: Visibility
    depth: int
    """How many levels it may still spawn."""

    @property
    def text(self) -> str:
        return msgspec.json.encode(self).decode()

    @property
    def cap(self) -> Cap:
        return Cap(self.read, self.send)

    def within(self, other: Envelope) -> Envelope:
        """No more than both."""
        return Envelope(
            tools=_common(self.tools, other.tools),
            agents=_common(self.agents, other.agents),
            read=narrower(self.read, other.read),
            send=narrower(self.send, other.send),
            depth=max(0, min(self.depth, other.depth - 1)),
        )


class Envelopes:
    """Which session has which."""

    def __init__(self, config: Config, toolbox: Toolbox) -> None:
        self._config = config
        self._toolbox = toolbox

    def of(self, agent_id: str, session_key: str, stored: str | None) -> Envelope | None:
        """What a session stays within, by what stands in its row; None if it was not spawned."""
        if stored is not None or keys.parse(session_key).shape != "subagent":
            return read(stored)
        tools = tuple(self.tools(self._config.agent(agent_id), depth=0))
        return Envelope(tools=tools, agents=(agent_id,), read="all", send="all", depth=0)

    def tools(self, target: AgentConfig, depth: int) -> list[str]:
        """A child's agent's tools without those for sessions, as `tools.subagents.tools` changes that."""
        lists = self._config.tools.subagents.tools
        chosen: list[str] = []
        for name, tool in self._toolbox.allowed(target.tools.allow, target.tools.deny).items():
            usual = not tool.reaches_sessions or (depth > 0 and name in ORCHESTRATION)
            if lists.allow is not None:
                usual = named(name, lists.allow)
            if (usual or named(name, lists.also_allow)) and not named(name, lists.deny):
                chosen.append(name)
        return [name for name in chosen if depth > 0 or name != SPAWN]


def read(text: str | None) -> Envelope | None:
    return None if text is None else msgspec.json.decode(text, type=Envelope)


def _common(one: Collection[str], other: Collection[str]) -> tuple[str, ...]:
    return tuple(name for name in one if name in other)
