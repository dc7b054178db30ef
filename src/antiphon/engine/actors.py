"""Who a session is when it acts: the caller it makes, and the tools it has.

A run and whoever invokes a tool in a session's name ask here, so that they cannot disagree. What is decided comes
from the session's row and the configuration as it is now; a sub-agent's session stays within its envelope.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from antiphon import keys
from antiphon.access import Caller
from antiphon.engine.door import Door
from antiphon.engine.envelopes import Envelopes
from antiphon.engine.toolbox import Tool, Toolbox

if TYPE_CHECKING:  # a command that only reads is over before this would be imported
    from antiphon.config import Config, ToolRules


class Actor(NamedTuple):
    caller: Caller
    tools: Mapping[str, Tool]


class Actors:
    def __init__(self, config: Config, door: Door, toolbox: Toolbox) -> None:
        self._config = config
        self._door = door
        self._toolbox = toolbox
        self._envelopes = Envelopes(config, toolbox)
        self._rules: dict[str, ToolRules] = {}
        self.of = lru_cache(maxsize=1024)(self._of)

    def _of(self, agent_id: str, session_key: str, *, sandboxed: bool, envelope: str | None) -> Actor:
        """`sandboxed` and `envelope` are what stands in the row; the configuration may since have a sandbox for it."""
        within = self._envelopes.of(agent_id, session_key, envelope)
        inside = sandboxed or self._door.sandboxes(agent_id, keys.parse(session_key))
        cap = within.cap if within else None
        caller = Caller.agent(agent_id, session_key, sandboxed=inside, cap=cap)
        if agent_id not in self._rules:
            self._rules[agent_id] = self._config.agent(agent_id).tools
        rules = self._rules[agent_id]
        tools = self._toolbox.seen_by(agent_id, rules.allow, rules.deny)
        if within is not None:
            tools = {name: tool for name, tool in tools.items() if name in within.tools}
        return Actor(caller, tools)
