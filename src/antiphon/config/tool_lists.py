"""Warnings about lists of tools: misspelt names, groups without tools, and lists that leave no tool.

What the lists do is decided in `antiphon.tool_selection`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from antiphon.config.schema import Config
from antiphon.config.sections import PUBLIC_PROVIDER_KEY_VARIABLES
from antiphon.keys import REHEARSAL_PROVIDER
from antiphon.tool_selection import (
    BUILTIN_TOOL_NAMES,
    EMPTY_TOOL_GROUPS,
    GROUP_PREFIX,
    MCP_TOOL_PREFIX,
    TOOL_GROUPS,
    ToolScope,
    matches_any_pattern,
)
from antiphon.validation_errors import find_nearest, suggest_options

MIN_NAME_SIMILARITY, MIN_SHORT_NAME_SIMILARITY = 0.8, 0.75  # of 1; the latter is two swapped letters of four
SHORT_NAME_CHARACTERS = 7


class _ToolList(NamedTuple):
    path: str
    names: Sequence[str]
    is_restriction: bool = False
    """Whether only the tools that it names are left."""
    has_wildcards: bool = True


def find_tool_list_warnings(config: Config) -> Iterator[str]:
    """Yield a warning for each list of tools that does not do what it seems to."""
    for listed in _iterate_tool_lists(config):
        for name in listed.names:
            if warning := _explain_unknown_name(listed, name):
                yield warning
        if listed.is_restriction and (warning := _explain_empty_restriction(config, listed)):
            yield warning
    yield from _warn_unknown_providers(config)


def find_lists_without_tools(config: Config, existing_names: Sequence[str]) -> Iterator[str]:
    """Yield a warning for each restriction that matches none of the tools that exist in this gateway."""
    for listed in _iterate_tool_lists(config):
        if (
            listed.is_restriction
            and listed.names
            and not _matches_any(existing_names, listed.names)
            and not _names_mcp_tools(config, listed.names)
        ):
            yield _describe_empty_restriction(listed, existing_names)


def _explain_unknown_name(listed: _ToolList, name: str) -> str | None:
    lowered = name.lower()
    if lowered.startswith(GROUP_PREFIX):
        if lowered in EMPTY_TOOL_GROUPS and listed.path.endswith("deny"):
            return None  # a group without tools is denied anyway
        return f"{listed.path!r} names {name!r}, a group without tools here. {_suggest_group(name)}"
    if name in BUILTIN_TOOL_NAMES or (listed.has_wildcards and "*" in name) or not _is_like_builtin(lowered):
        return None
    return f"{listed.path!r} names {name!r}, but there is no such tool. {_suggest_tool(name)}"


def _explain_empty_restriction(config: Config, listed: _ToolList) -> str | None:
    """Return a warning for a list that matches no existing tool, unless tools may come from elsewhere."""
    if config.tools.python or not listed.names or _matches_any(BUILTIN_TOOL_NAMES, listed.names):
        return None
    if _names_mcp_tools(config, listed.names):
        return None
    return _describe_empty_restriction(listed, BUILTIN_TOOL_NAMES)


def _names_mcp_tools(config: Config, names: Sequence[str]) -> bool:
    """Whether a list names tools of MCP servers, which are known only when the servers have listed them."""
    return bool(config.enabled_mcp_servers) and any(
        name.startswith(MCP_TOOL_PREFIX) or matches_any_pattern(MCP_TOOL_PREFIX, [name]) for name in names
    )


def _describe_empty_restriction(listed: _ToolList, existing_names: Sequence[str]) -> str:
    return (
        f"{listed.path!r} matches no existing tool ({', '.join(map(repr, listed.names))}), so no tool is allowed."
        f" Use some of: {', '.join(existing_names)}."
    )


def _matches_any(existing_names: Sequence[str], patterns: Sequence[str]) -> bool:
    return any(matches_any_pattern(tool, patterns) for tool in existing_names)


def _warn_unknown_providers(config: Config) -> Iterator[str]:
    """Warnings for lists that never apply, because no model is configured under their name."""
    refs = {ref.lower() for ref in config.model_refs}
    known = {
        *refs,
        *(ref.partition("/")[0] for ref in refs),
        *PUBLIC_PROVIDER_KEY_VARIABLES,
        REHEARSAL_PROVIDER,
    }
    for scope in _list_scopes(config):
        for name, level in scope.by_provider.items():
            if name not in known:
                hint = suggest_options(name, sorted(known), noun="providers and models")
                yield f"{level.path!r} never applies: there is no such provider or model. {hint}"


def _list_scopes(config: Config) -> list[ToolScope]:
    selections = [config.get_agent(agent_id).tools.selection for agent_id in config.agent_ids]
    return [selections[0].general, *(selection.own for selection in selections)]


def _iterate_tool_lists(config: Config) -> Iterator[_ToolList]:
    gateway = config.gateway.tools
    yield _ToolList("gateway.tools.allow", gateway.allow, has_wildcards=False)
    yield _ToolList("gateway.tools.deny", gateway.deny, has_wildcards=False)
    for scope in _list_scopes(config):
        levels = [scope.level, *scope.by_provider.values(), scope.sandbox]
        for level in (*levels, *([scope.subagents] if scope.subagents else ())):
            yield _ToolList(f"{level.path}.allow", level.allow or (), is_restriction=True)
            yield _ToolList(f"{level.path}.alsoAllow", level.also_allow)
            yield _ToolList(f"{level.path}.deny", level.deny)


def _is_like_builtin(lowered: str) -> bool:
    is_short = len(lowered) <= SHORT_NAME_CHARACTERS
    similarity = MIN_SHORT_NAME_SIMILARITY if is_short else MIN_NAME_SIMILARITY
    return (
        lowered.startswith(("session", "subagent"))
        or find_nearest(lowered, BUILTIN_TOOL_NAMES, alike=similarity) is not None
    )


def _suggest_tool(name: str) -> str:
    near = find_nearest(name, BUILTIN_TOOL_NAMES)
    if "*" in name:
        return "Write out the name of each tool."
    return f"Did you mean {near!r}?" if near else f"Valid tools: {', '.join(BUILTIN_TOOL_NAMES)}."


def _suggest_group(name: str) -> str:
    near = find_nearest(name, TOOL_GROUPS, alike=MIN_NAME_SIMILARITY)
    return f"Did you mean {near!r}?" if near else "List the tools by name, or remove it."
