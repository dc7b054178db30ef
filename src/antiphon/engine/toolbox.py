"""Tools as the engine sees them: a schema, and a function from a request to an output.

How a call is handled after a crash is part of a tool's definition. `settle` tools are built in: repeated with the same
key, they have at most one effect. Every other tool acts on systems that Antiphon does not control, so a call that may
have happened is reported to the model as interrupted and never repeated.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Set
from typing import Any, Literal, Protocol

import msgspec

from antiphon.access import Caller
from antiphon.messages import ImageBlock
from antiphon.runtimes import ToolSpec
from antiphon.tool_selection import ToolAudience, ToolFacts, ToolSelection, decide_tool

MAX_CACHED_SELECTIONS = 1024


class OutputListener(Protocol):
    """Shows people what a call has printed so far. Updates may be skipped; the result has all of the output."""

    def is_listening(self) -> bool:
        """Whether the output would reach a listener now."""
        ...

    def show(self, text: str, total_bytes: int) -> None:
        """Show the end of the output, and how much was printed in all."""
        ...


class ToolRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One tool invocation. `key` identifies it permanently: the same key means the same effect."""

    caller: Caller
    run_id: str
    call_id: str
    arguments: Mapping[str, Any]
    tool_names: Set[str] = frozenset()
    """The tools that the session may use."""
    output_listener: OutputListener | None = None

    @property
    def key(self) -> str:
        return f"{self.run_id}:{self.call_id}"


class ToolOutput(msgspec.Struct, frozen=True, kw_only=True):
    """The text that the model reads, and the same result as structured data."""

    text: str
    details: Any = None
    is_error: bool = False
    images: tuple[ImageBlock, ...] = ()


class ApprovalQuestion(msgspec.Struct, frozen=True, kw_only=True):
    """What a person is asked before a call runs."""

    text: str
    """The whole call as the person reads it. A call that is too long to be read is refused."""
    grant: str | None = None
    """The whole call in a normalized form, which `allow-always` covers from then on; None: it can be allowed only once.

    It is compared as a whole. It must not be a part, a prefix or a pattern of what is executed.
    """
    binding: str = ""
    """Further facts that the decision is about, such as a directory. If they change, decision and grant are void."""


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    spec: ToolSpec
    invoke: Callable[[ToolRequest], Awaitable[ToolOutput]]
    after_crash: Literal["settle", "report"] = "report"
    has_side_effects: bool = True
    """Whether calling it changes anything; read-only tools may be offered more freely."""
    is_destructive: bool = False
    """Whether a call can end or remove something that others rely on."""
    reaches_sessions: bool = False
    """Whether it accesses other sessions; sub-agents get such tools only if configured."""
    runs_in_gateway: bool = True
    """Whether it executes code of users in the gateway's own process, so that no sandbox confines it."""
    ends_turn: bool = False
    """Whether a successful call ends the run."""
    ask: bool = False
    """Whether a person must allow each call before it runs."""
    needs_approval: Callable[[ToolRequest], Awaitable[ApprovalQuestion | None]] | None = None
    """Returns what a person is asked before this call runs, or None if it runs unasked."""
    aliases: tuple[str, ...] = ()
    """Other names under which models call it. They are not offered."""
    fit: Callable[[str], ToolSpec] | None = None
    """Returns the spec for an agent id, with the choices that this agent has."""
    unavailable: Callable[[str, bool], str | None] | None = None
    """Returns why the sessions of an agent, sandboxed or not, cannot use it now, in one sentence; None if they can.

    Asked before every run, so it must answer at once, from what is already known.
    """

    @property
    def may_ask(self) -> bool:
        """Whether calls may have to wait for a person."""
        return self.ask or self.needs_approval is not None

    async def find_question(self, request: ToolRequest) -> ApprovalQuestion | None:
        """Return what a person is asked before this call runs, or None if it runs unasked."""
        if self.needs_approval is not None:
            return await self.needs_approval(request)
        return ask_about_arguments(request) if self.ask else None

    @property
    def facts(self) -> ToolFacts:
        """What the selection of tools needs to know about it."""
        return ToolFacts(self.spec.name, self.reaches_sessions, self.runs_in_gateway)

    def explain_absence(self, agent_id: str, *, is_sandboxed: bool) -> str | None:
        """Return why sessions of an agent cannot be offered this tool now, or None if they can."""
        return None if self.unavailable is None else self.unavailable(agent_id, is_sandboxed)

    def adapt_to_agent(self, agent_id: str) -> Tool:
        return self if self.fit is None else msgspec.structs.replace(self, spec=self.fit(agent_id), fit=None)


def ask_about_arguments(request: ToolRequest) -> ApprovalQuestion:
    """Return the question for a call that is fully described by its arguments."""
    arguments = msgspec.json.encode(request.arguments, order="deterministic").decode()
    return ApprovalQuestion(text=arguments, grant=arguments)


class PermittedTools:
    """The tools that the lists of an agent leave to a session, including those that cannot be used now."""

    def __init__(self, agent_id: str, tools: Mapping[str, Tool], *, is_sandboxed: bool) -> None:
        self.by_name = tools
        self._agent_id = agent_id
        self._is_sandboxed = is_sandboxed
        self._names_by_condition: dict[Callable[[str, bool], str | None], list[str]] = {}
        """The tools that may be unavailable, by the function that knows (`Tool.unavailable`)."""
        for name, tool in tools.items():
            if tool.unavailable is not None:
                self._names_by_condition.setdefault(tool.unavailable, []).append(name)
        self.absent: Set[str] = frozenset()
        """The tools that could not be used when they were last selected."""
        self._usable = tools

    def select_usable(self) -> Mapping[str, Tool]:
        """Return the tools that can be used now. Called for every run; the result rarely changes."""
        absent = {
            name
            for explain, names in self._names_by_condition.items()
            if explain(self._agent_id, self._is_sandboxed) is not None
            for name in names
        }
        if absent != self.absent:
            self.absent = absent
            self._usable = {name: tool for name, tool in self.by_name.items() if name not in absent}
        return self._usable


class Toolbox:
    """All registered tools, and the selection that a session may use."""

    def __init__(self) -> None:
        self._tools: dict[str, Tool] = {}
        self._permitted: dict[tuple[object, ...], PermittedTools] = {}
        self._groups: dict[str, list[str]] = {}
        self.version = 0
        """A number that changes with the tools, for what is computed from them."""

    def add(self, tool: Tool) -> None:
        self._tools[tool.spec.name] = tool
        self._forget_selections()

    def replace_group(self, group: str, tools: Iterable[Tool]) -> None:
        """Replace the tools of a group, which may change at any time. A tool with a taken name is left out."""
        for name in self._groups.pop(group, ()):
            del self._tools[name]
        added = {tool.spec.name: tool for tool in tools if tool.spec.name not in self._tools}
        self._tools.update(added)
        self._groups[group] = list(added)
        self._forget_selections()

    def _forget_selections(self) -> None:
        self._permitted.clear()
        self.version += 1

    @property
    def tools(self) -> Mapping[str, Tool]:
        return self._tools

    @property
    def names(self) -> Set[str]:
        return self._tools.keys()

    def select_permitted(
        self, agent_id: str, selection: ToolSelection, audience: ToolAudience
    ) -> PermittedTools:
        """Return the tools that the agent's lists leave to a session, each adapted to the agent."""
        known = (agent_id, audience)
        if known not in self._permitted:
            if len(self._permitted) >= MAX_CACHED_SELECTIONS:
                self._permitted.clear()
            tools = {
                name: tool.adapt_to_agent(agent_id)
                for name, tool in self._tools.items()
                if decide_tool(tool.facts, selection, audience).is_offered
            }
            self._permitted[known] = PermittedTools(agent_id, tools, is_sandboxed=audience.is_sandboxed)
        return self._permitted[known]
