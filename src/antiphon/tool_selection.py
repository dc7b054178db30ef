"""Which tools an agent is offered, and which key of the configuration decides it.

Pure: lists and facts in, a decision with its reason out. Each list is a step that removes tools, and no later step
brings one back; so a list that names only unknown tools leaves none. Whether a tool can be used at all, for example
because a service is configured, is not decided here (`Tool.unavailable` in `antiphon.engine.toolbox`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Literal, NamedTuple

import msgspec

# --- names ---

FILE_TOOL_NAMES = ("read", "write", "edit", "apply_patch")
RUNTIME_TOOL_NAMES = ("exec", "process")
WEB_TOOL_NAMES = ("web_fetch", "web_search")
MEMORY_TOOL_NAMES = ("memory_search", "memory_get")
MEDIA_TOOL_NAMES = ("image",)
AUTOMATION_TOOL_NAMES = ("cron",)
MESSAGING_TOOL_NAMES = ("message",)
AGENT_TOOL_NAMES = ("agents_list",)
SESSION_TOOL_NAMES = (
    "sessions_list",
    "sessions_history",
    "sessions_search",
    "session_status",
    *AGENT_TOOL_NAMES,
    "sessions_send",
    "sessions_spawn",
    "sessions_yield",
    "subagents",
)
BUILTIN_TOOL_NAMES = (
    *FILE_TOOL_NAMES,
    *RUNTIME_TOOL_NAMES,
    *WEB_TOOL_NAMES,
    *MEMORY_TOOL_NAMES,
    *MEDIA_TOOL_NAMES,
    *AUTOMATION_TOOL_NAMES,
    *MESSAGING_TOOL_NAMES,
    *SESSION_TOOL_NAMES,
)
"""Antiphon's own tools, which profiles select from. Others may be added elsewhere."""

MCP_TOOL_PREFIX = "mcp__"
MCP_TOOL_PATTERN = f"{MCP_TOOL_PREFIX}*"

GROUP_PREFIX = "group:"
TOOL_GROUPS: dict[str, tuple[str, ...]] = {
    "group:fs": FILE_TOOL_NAMES,
    "group:runtime": RUNTIME_TOOL_NAMES,
    "group:web": WEB_TOOL_NAMES,
    "group:memory": MEMORY_TOOL_NAMES,
    "group:media": MEDIA_TOOL_NAMES,
    "group:automation": AUTOMATION_TOOL_NAMES,
    "group:messaging": MESSAGING_TOOL_NAMES,
    "group:sessions": tuple(name for name in SESSION_TOOL_NAMES if name not in AGENT_TOOL_NAMES),
    "group:agents": AGENT_TOOL_NAMES,
    "group:mcp": (MCP_TOOL_PATTERN,),
    "group:openclaw": tuple(
        name for name in BUILTIN_TOOL_NAMES if name not in (*FILE_TOOL_NAMES, *RUNTIME_TOOL_NAMES)
    ),
}
"""Tool groups of related gateways, reduced to the tools that exist here."""
EMPTY_TOOL_GROUPS = frozenset({"group:ui", "group:nodes", "group:plugins"})
"""Tool groups of related gateways that have no tools here."""

TOOL_ALIASES = {"bash": "exec", "apply-patch": "apply_patch"}
"""Other names of tools in lists."""

ToolProfile = Literal["minimal", "coding", "messaging", "full"]
DEFAULT_TOOL_PROFILE: ToolProfile = "coding"
PROFILE_TOOL_NAMES: dict[ToolProfile, frozenset[str]] = {
    "minimal": frozenset({"session_status"}),
    "coding": frozenset(BUILTIN_TOOL_NAMES).difference(MESSAGING_TOOL_NAMES),
    "messaging": frozenset(
        {"sessions_list", "sessions_history", "sessions_send", "session_status", *MESSAGING_TOOL_NAMES}
    ),
    "full": frozenset(BUILTIN_TOOL_NAMES),
}
"""The built-in tools of each profile. Tools that a program adds belong to every profile."""

SANDBOX_TOOL_NAMES = (*FILE_TOOL_NAMES, *RUNTIME_TOOL_NAMES, *MEDIA_TOOL_NAMES, *SESSION_TOOL_NAMES)
"""What a sandboxed session may have by default: tools that work inside its sandbox, and session tools."""

SPAWN_TOOL_NAME = "sessions_spawn"
ORCHESTRATOR_TOOL_NAMES = frozenset(
    {SPAWN_TOOL_NAME, "sessions_list", "sessions_history", "sessions_yield", "subagents", "agents_list"}
)
"""Session tools of a sub-agent that may itself spawn."""


def expand_tool_names(names: Iterable[str]) -> tuple[str, ...]:
    """Return names in lower case, with aliases replaced and groups expanded; an unknown group matches no tool."""
    return tuple(tool for name in names for tool in _expand_tool_name(name))


def _expand_tool_name(name: str) -> tuple[str, ...]:
    lowered = name.strip().lower()
    if lowered.startswith(GROUP_PREFIX):
        return TOOL_GROUPS.get(lowered, (name,))
    return (TOOL_ALIASES.get(lowered, lowered),)


def matches_any_pattern(name: str, patterns: Iterable[str]) -> bool:
    """Whether a tool name matches any of the patterns, which are in lower case."""
    return find_matching_pattern(name, patterns) is not None


def find_matching_pattern(name: str, patterns: Iterable[str]) -> str | None:
    lowered = name.lower()
    return next((pattern for pattern in patterns if fnmatchcase(lowered, pattern)), None)


# --- rules ---


class ToolLevel(msgspec.Struct, frozen=True, kw_only=True):
    """The lists of one section of the configuration, with names expanded; `path` is where the section is."""

    path: str
    profile: ToolProfile | None = None
    allow: tuple[str, ...] | None = None
    also_allow: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()


class ToolScope(msgspec.Struct, frozen=True, kw_only=True):
    """The lists for all agents, or those of one agent."""

    level: ToolLevel
    by_provider: Mapping[str, ToolLevel]
    """By `provider` or `provider/model`, in lower case."""
    sandbox: ToolLevel
    subagents: ToolLevel | None = None


class ToolSelection(msgspec.Struct, frozen=True, kw_only=True):
    """All lists that decide about the tools of one agent."""

    general: ToolScope
    own: ToolScope

    @property
    def profile(self) -> ToolProfile:
        return self.own.level.profile or self.general.level.profile or DEFAULT_TOOL_PROFILE


class ToolFacts(NamedTuple):
    """What the decision needs to know about a tool."""

    name: str
    reaches_sessions: bool = False
    runs_in_gateway: bool = False
    """Whether it executes code of users in the gateway's own process, where no sandbox confines it."""


class ToolAudience(msgspec.Struct, frozen=True, kw_only=True):
    """The session that is to be offered tools."""

    model: str | None = None
    """As `provider/model`; None: no model answers, or lists by provider do not matter."""
    is_sandboxed: bool = False
    subagent_depth: int | None = None
    """How many levels a sub-agent may still spawn; None for other sessions."""


class ToolDecision(msgspec.Struct, frozen=True, kw_only=True):
    is_offered: bool
    path: str
    """The key of the configuration that decides; a key that is not set if its default does."""
    reason: str


def decide_tool(tool: ToolFacts, selection: ToolSelection, audience: ToolAudience) -> ToolDecision:
    """Decide whether a session is offered a tool: the first step that removes it, else the last that names it."""
    decision = None
    for step in _iterate_steps(selection, audience):
        decided = step.decide(tool)
        if decided is not None and not decided.is_offered:
            return decided
        decision = decided or decision
    assert decision is not None, "the profile decides about every tool"
    return decision


class _PatternList(NamedTuple):
    path: str
    patterns: Iterable[str]


class _ProfileStep(NamedTuple):
    """Removes the built-in tools that are neither in the profile nor in the lists that add to it."""

    path: str
    profile: ToolProfile
    added: tuple[_PatternList, ...]

    def decide(self, tool: ToolFacts) -> ToolDecision:
        if tool.name not in BUILTIN_TOOL_NAMES:
            return _offer(self.path, f"The profile {self.profile!r} includes every tool that is added.")
        if tool.name in PROFILE_TOOL_NAMES[self.profile]:
            return _offer(self.path, f"The profile {self.profile!r} includes it.")
        return _find_in_lists(tool, self.added) or _refuse(
            self.path, f"The profile {self.profile!r} does not include it."
        )


class _AllowStep(NamedTuple):
    """Removes the tools that are in none of the lists."""

    path: str
    lists: tuple[_PatternList, ...]

    def decide(self, tool: ToolFacts) -> ToolDecision:
        return _find_in_lists(tool, self.lists) or _refuse(self.path, "The list does not name it.")


class _DenyStep(NamedTuple):
    """Removes the tools that are in the list."""

    path: str
    patterns: tuple[str, ...]

    def decide(self, tool: ToolFacts) -> ToolDecision | None:
        pattern = find_matching_pattern(tool.name, self.patterns)
        return None if pattern is None else _refuse(self.path, _describe_match(tool, pattern))


class _SandboxStep(NamedTuple):
    """Removes what a sandboxed session may not have."""

    path: str
    is_default: bool
    lists: tuple[_PatternList, ...]

    def decide(self, tool: ToolFacts) -> ToolDecision:
        found = _find_in_lists(tool, self.lists)
        if found is None:
            absent = (
                "It is not in the default list for" if self.is_default else "The list does not name it for"
            )
            return _refuse(self.path, f"{absent} sandboxed sessions.")
        if tool.runs_in_gateway and not any(tool.name.lower() in each.patterns for each in self.lists):
            return _refuse(
                self.path,
                "It runs in the gateway's process, outside any sandbox, so its full name must be in the list.",
            )
        return found


class _SubagentStep(NamedTuple):
    """Removes what a sub-agent may not have."""

    level: ToolLevel
    depth: int

    def decide(self, tool: ToolFacts) -> ToolDecision | None:
        path = f"{self.level.path}.allow"
        if self.depth == 0 and tool.name == SPAWN_TOOL_NAME:
            return _refuse("agents.defaults.subagents.maxSpawnDepth", "It may not spawn any further.")
        lists = [_PatternList(f"{self.level.path}.alsoAllow", self.level.also_allow)]
        if self.level.allow is not None:
            lists.insert(0, _PatternList(path, self.level.allow))
        elif not tool.reaches_sessions or (self.depth > 0 and tool.name in ORCHESTRATOR_TOOL_NAMES):
            return None
        what = (
            "Sub-agents do not have it by default."
            if self.level.allow is None
            else "The list does not name it."
        )
        return _find_in_lists(tool, lists) or _refuse(path, what)


_Step = _ProfileStep | _AllowStep | _DenyStep | _SandboxStep | _SubagentStep


def _iterate_steps(selection: ToolSelection, audience: ToolAudience) -> Iterator[_Step]:
    general, own = selection.general, selection.own
    chosen = own.level if own.level.profile is not None else general.level
    yield _ProfileStep(
        f"{chosen.path}.profile", selection.profile, _list_additions((general.level, own.level))
    )
    by_provider = [list(_find_provider_levels(scope, audience.model)) for scope in (general, own)]
    profiled = [level for levels in reversed(by_provider) for level in levels if level.profile is not None]
    if profiled:
        added = [level for levels in by_provider for level in levels]
        yield _ProfileStep(
            f"{profiled[0].path}.profile", profiled[0].profile or DEFAULT_TOOL_PROFILE, _list_additions(added)
        )
    for scope, levels in zip((general, own), by_provider, strict=True):
        listed = [level for level in levels if level.allow is not None]
        for level in (scope.level, *listed[:1]):
            if level.allow is not None:
                yield _AllowStep(f"{level.path}.allow", _list_allowed(level))
        for level in (scope.level, *levels):
            yield _DenyStep(f"{level.path}.deny", level.deny)
    if audience.is_sandboxed:
        yield from _list_sandbox_steps(general.sandbox, own.sandbox)
    if audience.subagent_depth is not None and general.subagents is not None:
        yield _SubagentStep(general.subagents, audience.subagent_depth)
        yield _DenyStep(f"{general.subagents.path}.deny", general.subagents.deny)


def _find_provider_levels(scope: ToolScope, model: str | None) -> Iterator[ToolLevel]:
    """Yield the lists for a model and then those for its provider."""
    if model is not None:
        for name in (model.lower(), model.partition("/")[0].lower()):
            if name in scope.by_provider:
                yield scope.by_provider[name]


def _list_sandbox_steps(general: ToolLevel, own: ToolLevel) -> Iterator[_Step]:
    """Yield the steps for a sandbox: an agent's own list of allowed tools replaces the general one."""
    level = own if own.allow is not None else general
    allowed = SANDBOX_TOOL_NAMES if level.allow is None else level.allow
    path = f"{level.path}.allow"
    lists = (_PatternList(path, allowed), *_list_additions((general, own)))
    yield _SandboxStep(path, level.allow is None, lists)
    yield _DenyStep(f"{general.path}.deny", general.deny)
    yield _DenyStep(f"{own.path}.deny", own.deny)


def _list_additions(levels: Iterable[ToolLevel]) -> tuple[_PatternList, ...]:
    return tuple(_PatternList(f"{level.path}.alsoAllow", level.also_allow) for level in levels)


def _list_allowed(level: ToolLevel) -> tuple[_PatternList, ...]:
    return (_PatternList(f"{level.path}.allow", level.allow or ()), *_list_additions((level,)))


def _find_in_lists(tool: ToolFacts, lists: Iterable[_PatternList]) -> ToolDecision | None:
    for path, patterns in lists:
        pattern = find_matching_pattern(tool.name, patterns)
        if pattern is not None:
            return _offer(path, _describe_match(tool, pattern))
    return None


def _describe_match(tool: ToolFacts, pattern: str) -> str:
    return "The list names it." if pattern == tool.name.lower() else f"The list names it as {pattern!r}."


def _offer(path: str, reason: str) -> ToolDecision:
    return ToolDecision(is_offered=True, path=path, reason=reason)


def _refuse(path: str, reason: str) -> ToolDecision:
    return ToolDecision(is_offered=False, path=path, reason=reason)
