"""The identity of a session when it acts: its caller and its tools.

Used both by runs and for tools invoked in a session's name, so that they cannot disagree. The result depends on the
session's row and the current configuration; a sub-agent's session is limited by its stored permissions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from antiphon import keys
from antiphon.access import Caller
from antiphon.engine.collaboration.permissions import SubagentPermissionResolver
from antiphon.engine.sessions.resolver import SessionResolver
from antiphon.engine.toolbox import Tool, Toolbox
from antiphon.tool_selection import ToolAudience, decide_tool

if TYPE_CHECKING:  # importing the configuration would slow down read-only commands
    from antiphon.config import Config


MAX_CACHED_ABSENCES = 16  # per identity


class SessionIdentity(NamedTuple):
    caller: Caller
    tools: Mapping[str, Tool]


class _PermittedIdentity(NamedTuple):
    """An identity with all permitted tools, including those that cannot be used now."""

    identity: SessionIdentity
    names_by_condition: Mapping[Callable[[str], str | None], Collection[str]]
    """The tools that may be unavailable, by the function that knows (`Tool.unavailable`)."""
    identity_by_absent: dict[frozenset[str], SessionIdentity]
    """The identity without the tools of these names; which are absent rarely changes."""


class SessionIdentityResolver:
    def __init__(self, config: Config, resolver: SessionResolver, toolbox: Toolbox) -> None:
        self._config = config
        self._session_resolver = resolver
        self._toolbox = toolbox
        self._permission_resolver = SubagentPermissionResolver(config, toolbox)
        self._resolve_permitted = lru_cache(maxsize=1024)(self._resolve_permitted_uncached)

    def resolve(
        self,
        agent_id: str,
        session_key: str,
        *,
        sandboxed: bool,
        envelope: str | None,
        model: str | None = None,
    ) -> SessionIdentity:
        """Return the identity of a session. `sandboxed`, `envelope` and its own `model` come from its row.

        The configuration may require a sandbox that the row does not have yet.
        """
        permitted = self._resolve_permitted(
            self._toolbox.version, agent_id, session_key, sandboxed, envelope, model
        )
        absent = frozenset(
            name
            for explain, names in permitted.names_by_condition.items()
            if explain(agent_id) is not None
            for name in names
        )
        identity = permitted.identity_by_absent.get(absent)
        if identity is None:
            if len(permitted.identity_by_absent) >= MAX_CACHED_ABSENCES:
                permitted.identity_by_absent.clear()
            tools = {name: tool for name, tool in permitted.identity.tools.items() if name not in absent}
            identity = permitted.identity_by_absent[absent] = permitted.identity._replace(tools=tools)
        return identity

    def _resolve_permitted_uncached(
        self,
        _toolbox_version: int,
        agent_id: str,
        session_key: str,
        sandboxed: bool,
        envelope: str | None,
        model: str | None,
    ) -> _PermittedIdentity:
        permissions = self._permission_resolver.resolve(agent_id, session_key, envelope)
        is_sandboxed = sandboxed or self._session_resolver.is_sandboxed(agent_id, keys.parse(session_key))
        cap = permissions.cap if permissions else None
        caller = Caller.agent(agent_id, session_key, sandboxed=is_sandboxed, cap=cap)
        tools = self._toolbox.select_permitted(
            agent_id,
            self._config.get_agent(agent_id).tools.selection,
            ToolAudience(model=get_answering_model(self._config, agent_id, model), is_sandboxed=is_sandboxed),
        )
        if permissions is not None:
            tools = {name: tool for name, tool in tools.items() if name in permissions.tools}
        names_by_condition: dict[Callable[[str], str | None], list[str]] = {}
        for name, tool in tools.items():
            if tool.unavailable is not None:
                names_by_condition.setdefault(tool.unavailable, []).append(name)
        return _PermittedIdentity(SessionIdentity(caller, tools), names_by_condition, {})


class ToolExplanation(NamedTuple):
    """Whether a session is offered a tool, and what decides it: a key of the configuration, or None."""

    name: str
    is_offered: bool
    path: str | None
    reason: str


SPAWN_REASON = (
    "The permissions that the session got when it was spawned do not include it ('tools.subagents')."
)


def explain_tools(
    config: Config,
    tools: Mapping[str, Tool],
    agent_id: str,
    audience: ToolAudience,
    offered: Container[str] | None = None,
) -> list[ToolExplanation]:
    """Explain each tool. `offered` are the names that the session has, if there is one."""
    selection = config.get_agent(agent_id).tools.selection
    explained: list[ToolExplanation] = []
    for name, tool in tools.items():
        decided = decide_tool(tool.facts, selection, audience)
        absence = tool.explain_absence(agent_id)
        if not decided.is_offered:
            found = ToolExplanation(name, is_offered=False, path=decided.path, reason=decided.reason)
        elif absence is not None:
            found = ToolExplanation(name, is_offered=False, path=None, reason=absence)
        elif offered is not None and name not in offered:
            found = ToolExplanation(name, is_offered=False, path=None, reason=SPAWN_REASON)
        else:
            found = ToolExplanation(name, is_offered=True, path=decided.path, reason=decided.reason)
        explained.append(found)
    return explained


def get_answering_model(config: Config, agent_id: str, chosen: str | None) -> str | None:
    """Return the model that answers in a session, as `provider/model`; None if it is a function."""
    return None if config.uses_function(agent_id) else chosen or config.get_model_ref(agent_id)
