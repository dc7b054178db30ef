"""The identity of a session when it acts: its caller and its tools.

Used both by runs and for tools invoked in a session's name, so that they cannot disagree. The result depends on the
session's row and the current configuration; a sub-agent's session is limited by its stored permissions.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Set
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from antiphon import keys
from antiphon.access import Caller
from antiphon.engine.collaboration.permissions import SubagentPermissionResolver
from antiphon.engine.sessions.resolver import SessionResolver
from antiphon.engine.toolbox import PermittedTools, Tool, Toolbox
from antiphon.tool_selection import ToolAudience, decide_tool

if TYPE_CHECKING:  # importing the configuration would slow down read-only commands
    from antiphon.config import Config


class SessionIdentity(NamedTuple):
    caller: Caller
    tools: Mapping[str, Tool]
    absent: Set[str]
    """The tools that its lists leave to it and that cannot be used now."""


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
        caller, permitted = self._resolve_permitted(
            self._toolbox.version, agent_id, session_key, sandboxed, envelope, model
        )
        return SessionIdentity(caller, permitted.select_usable(), permitted.absent)

    def _resolve_permitted_uncached(
        self,
        _toolbox_version: int,
        agent_id: str,
        session_key: str,
        sandboxed: bool,
        envelope: str | None,
        model: str | None,
    ) -> tuple[Caller, PermittedTools]:
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
            tools = PermittedTools(
                agent_id,
                {name: tool for name, tool in tools.by_name.items() if name in permissions.tools},
                is_sandboxed=is_sandboxed,
            )
        return caller, tools


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
        absence = tool.explain_absence(agent_id, is_sandboxed=audience.is_sandboxed)
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
    """Return the model that answers in a session, as `provider/model`; None if no configured model does."""
    return (chosen or config.get_model_ref(agent_id)) if config.uses_model(agent_id) else None
