"""Tools as the engine sees them: something with a schema that takes a call and gives a result.

What a tool does after a crash is part of its definition. `settle` tools are ours: they take the call's key and
can be asked again with it, having at most one effect. Every other tool acts on a world we do not control, so a
call that may have happened is reported to the model as interrupted and never repeated.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Set
from fnmatch import fnmatchcase
from typing import Any, Literal

import msgspec

from antiphon.access import Caller
from antiphon.runtimes import ToolSpec


class ToolRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One invocation. `key` identifies it for ever: the same key is the same effect."""

    caller: Caller
    run_id: str
    call_id: str
    arguments: Mapping[str, Any]

    @property
    def key(self) -> str:
        return f"{self.run_id}:{self.call_id}"


class ToolOutput(msgspec.Struct, frozen=True, kw_only=True):
    """What the model reads, and the same for machines."""

    text: str
    details: Any = None
    is_error: bool = False


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    spec: ToolSpec
    invoke: Callable[[ToolRequest], Awaitable[ToolOutput]]
    after_crash: Literal["settle", "report"] = "report"
    acts: bool = True
    """Whether calling it changes anything; one that only looks may be offered more freely."""
    reaches_sessions: bool = False
    """Whether it is about other sessions; sub-agents have none of these unless they are told to."""
    ends_turn: bool = False
    """Whether the run is over when it has succeeded."""
    fit: Callable[[str], ToolSpec] | None = None
    """The tool as one agent sees it, by the agent's id: with the choices that this agent has."""

    def adapt_to_agent(self, agent_id: str) -> Tool:
        return self if self.fit is None else msgspec.structs.replace(self, spec=self.fit(agent_id), fit=None)


class Toolbox:
    """The tools there are, and which of them an agent may use."""

    def __init__(self) -> None:
        self._tools: dict[str, Tool] = {}
        self._allowed_by_rules: dict[tuple[object, ...], dict[str, Tool]] = {}
        self._adapted_by_rules: dict[tuple[object, ...], dict[str, Tool]] = {}

    def add(self, tool: Tool) -> None:
        self._tools[tool.spec.name] = tool
        self._allowed_by_rules.clear()
        self._adapted_by_rules.clear()

    @property
    def names(self) -> Set[str]:
        return self._tools.keys()

    def select_allowed(self, allow: tuple[tuple[str, ...], ...], deny: tuple[str, ...]) -> Mapping[str, Tool]:
        """The tools that every list in `allow` admits and `deny` does not; `*` in a name stands for any text."""
        rules = (allow, deny)
        if rules not in self._allowed_by_rules:  # as many as there are agents
            self._allowed_by_rules[rules] = {
                name: tool
                for name, tool in self._tools.items()
                if all(matches_any_pattern(name, patterns) for patterns in allow)
                and not matches_any_pattern(name, deny)
            }
        return self._allowed_by_rules[rules]

    def select_for_agent(
        self, agent_id: str, allow: tuple[tuple[str, ...], ...], deny: tuple[str, ...]
    ) -> Mapping[str, Tool]:
        """The same, each as this agent sees it."""
        rules = (agent_id, allow, deny)
        if rules not in self._adapted_by_rules:
            found = self.select_allowed(allow, deny)
            self._adapted_by_rules[rules] = {
                name: tool.adapt_to_agent(agent_id) for name, tool in found.items()
            }
        return self._adapted_by_rules[rules]


def matches_any_pattern(name: str, patterns: Iterable[str]) -> bool:
    """Whether a list of patterns names a tool."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)
