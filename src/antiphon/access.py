"""Who may do what to which session: the single access decision of every tool, method and route.

References have been resolved to canonical keys before, and the store has determined whether the target was
spawned below the caller. Decisions here are pure: no lookup, no configuration, no wire.

A session that a caller may not read looks exactly like one that does not exist; use
`build_session_missing_error` for both.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import Literal, NamedTuple

import msgspec

from antiphon.errors import Forbidden, NotFound

Action = Literal["list", "read", "send", "spawn", "control", "manage"]
Visibility = Literal["self", "tree", "agent", "all"]
Control = Literal["self", "tree"]
SessionToolsVisibility = Literal["spawned", "all"]

READ_SCOPE = "operator.read"
WRITE_SCOPE = "operator.write"
ADMIN_SCOPE = "operator.admin"
APPROVALS_SCOPE = "operator.approvals"
ALL_SCOPES = frozenset({READ_SCOPE, WRITE_SCOPE, ADMIN_SCOPE, APPROVALS_SCOPE})

_VISIBILITY_WIDTH: dict[Visibility, int] = {"self": 0, "tree": 1, "agent": 2, "all": 3}
_IMPLIED_SCOPES = {WRITE_SCOPE: {READ_SCOPE}, ADMIN_SCOPE: {READ_SCOPE, WRITE_SCOPE, APPROVALS_SCOPE}}
# Stopping a run is as much a write as starting one; reading never stops anything. Changes to a session itself,
# rather than to its conversation, need the admin scope.
_SCOPE_FOR: dict[Action, str] = {
    "list": READ_SCOPE,
    "read": READ_SCOPE,
    "send": WRITE_SCOPE,
    "spawn": WRITE_SCOPE,
    "control": WRITE_SCOPE,
    "manage": ADMIN_SCOPE,
}
_ACTION_VERBS: dict[Action, str] = {
    "list": "list",
    "read": "read",
    "send": "send to",
    "spawn": "spawn",
    "control": "control",
    "manage": "manage",
}


_SETTING_FOR: dict[Action, str] = {
    "list": "tools.sessions.visibility",
    "read": "tools.sessions.visibility",
    "send": "tools.sessions.send",
    "control": "tools.sessions.control",
    "manage": "tools.sessions.control",
    "spawn": "subagents.allowAgents",
}


class VisibilityCap(NamedTuple):
    """The maximum reach of a caller, whose agent may be granted more: a spawned session is bound by its parent's."""

    read: Visibility
    send: Visibility


class Caller(msgspec.Struct, frozen=True):
    """The identity behind a request. It has no default: every operation is passed one that the server derived."""

    scopes: frozenset[str] = frozenset()
    """Scopes of an operator's token, with implied ones added; empty for agents."""
    agent_id: str | None = None
    session_key: str | None = None
    sandboxed: bool = False
    cap: VisibilityCap | None = None

    @classmethod
    def operator(cls, scopes: Iterable[str] = ALL_SCOPES) -> Caller:
        """A person or program with a token. Admin implies write, write implies read, other scopes grant nothing."""
        given = set(scopes)
        return cls(
            scopes=frozenset(given.union(*(_IMPLIED_SCOPES.get(scope, set[str]()) for scope in given)))
        )

    @classmethod
    def agent(
        cls, agent_id: str, session_key: str, *, sandboxed: bool = False, cap: VisibilityCap | None = None
    ) -> Caller:
        """A model acting from one session."""
        return cls(agent_id=agent_id, session_key=session_key, sandboxed=sandboxed, cap=cap)

    @property
    def is_operator(self) -> bool:
        return self.agent_id is None


class Grants(msgspec.Struct, frozen=True):
    """What an agent may reach. Reading and sending are granted separately; either may be the wider one."""

    read: Visibility = "tree"
    send: Visibility = "tree"
    control: Control = "tree"
    a2a_enabled: bool = False
    a2a_allow: tuple[str, ...] = ()
    """Patterns for agent ids; empty means every agent."""
    spawn_agents: tuple[str, ...] = ()
    """Other agents that it may spawn; `*` means every configured one."""


class TargetSession(msgspec.Struct, frozen=True):
    """The facts about a session that access depends on."""

    key: str
    agent_id: str
    descendant: bool = False
    """Whether it was spawned below the caller's session, at any depth."""


class Reach(msgspec.Struct, frozen=True):
    """The sessions a caller reaches, as data that a store can turn into a query."""

    everything: bool = False
    own_key: str | None = None
    descendants: bool = False
    own_agent: str | None = None
    other_agents: tuple[str, ...] = ()
    """Patterns for agents other than the caller's; empty means no other agent."""

    def admits_agent(self, agent_id: str) -> bool:
        """Whether all sessions of that agent are reached."""
        return (
            self.everything
            or agent_id == self.own_agent
            or matches_agent_patterns(agent_id, self.other_agents)
        )

    def covers(self, target: TargetSession) -> bool:
        if self.admits_agent(target.agent_id) or target.key == self.own_key:
            return True
        return self.descendants and target.descendant


def build_session_missing_error(
    reference: str, caller: Caller | None = None, grants: Grants | None = None
) -> NotFound:
    """The error for a session that does not exist or that the caller may not know about.

    For an agent it names what the agent can reach and the settings that decide that, whether or not the session exists.
    """
    shows = "Use a key that sessions_list (or `antiphon sessions list`) shows."
    if caller is not None and caller.is_operator:
        shows = "Use a key that `antiphon sessions list` shows."
    elif caller is not None and grants is not None:
        shows = f"Use a key that sessions_list shows. {_describe_reach(caller, grants)}"
    return NotFound(f"Session {reference!r} was not found.", shows, reference=reference)


def _describe_reach(caller: Caller, grants: Grants) -> str:
    crosses = bool(_compute_agent_reach(caller, grants, grants.read).other_agents)
    what = {
        "self": "this session only",
        "tree": "this session and the sub-agents below it",
        "agent": f"the sessions of agent {caller.agent_id!r}",
        "all": f"the sessions of agent {caller.agent_id!r}"
        + (" and of the other agents that agents_list names" if crosses else ""),
    }[grants.read]
    other = "on" if grants.a2a_enabled else "off"
    return (
        f"You can reach {what} now; the owner can change that with tools.sessions.visibility "
        f"(in effect: {grants.read!r}) and tools.agentToAgent ({other})."
    )


def resolve_grants(
    *,
    visibility: Visibility = "tree",
    send_visibility: Visibility | None = None,
    control: Control | None = None,
    a2a_enabled: bool = False,
    a2a_allow: Iterable[str] = (),
    spawn_agents: Iterable[str] = (),
    sandboxed: bool = False,
    session_tools_visibility: SessionToolsVisibility = "spawned",
    cap: VisibilityCap | None = None,
) -> Grants:
    """An agent's grants from its settings, narrowed to its own tree in a sandbox, and to the cap."""
    clamp = sandboxed and session_tools_visibility == "spawned"
    read = pick_narrower_visibility(visibility, "tree") if clamp else visibility
    requested_send = send_visibility or visibility
    send = pick_narrower_visibility(requested_send, "tree") if clamp else requested_send
    if cap is not None:
        read, send = pick_narrower_visibility(read, cap.read), pick_narrower_visibility(send, cap.send)
    return Grants(
        read=read,
        send=send,
        control=control or ("self" if read == "self" else "tree"),
        a2a_enabled=a2a_enabled,
        a2a_allow=tuple(a2a_allow),
        spawn_agents=tuple(spawn_agents),
    )


def compute_reach(caller: Caller, grants: Grants) -> Reach:
    """Every session the caller may list, which is every session it may read."""
    if caller.is_operator:
        return Reach(everything=READ_SCOPE in caller.scopes)
    return _compute_agent_reach(caller, grants, grants.read)


def require_scope(caller: Caller, action: Action) -> None:
    """Refuses an operator's request before anything is looked up; agents pass.

    Raises:
        Forbidden: the token lacks the scope.
    """
    if caller.is_operator and _SCOPE_FOR[action] not in caller.scopes:
        raise Forbidden(
            f"This token may not {_ACTION_VERBS[action]} sessions: it lacks {_SCOPE_FOR[action]!r}.",
            "Use a token that was issued with that scope.",
            action=action,
            scope=_SCOPE_FOR[action],
        )


def require_operator(
    caller: Caller,
    action: Action,
    what: str = "the status of the gateway",
    hint: str = "List sessions instead.",
) -> None:
    """Refuses agents, and operators whose token lacks the scope, where a request covers all sessions.

    Raises:
        Forbidden: the caller is an agent, or its token lacks the scope.
    """
    require_scope(caller, action)
    if not caller.is_operator:
        raise Forbidden(f"Only operators can see {what}.", hint, action=action)


def require_approver(caller: Caller) -> None:
    """Refuses every caller that may not decide on tool calls: agents, and operators without the scope.

    Raises:
        Forbidden: the caller is an agent, or its token lacks the scope.
    """
    if not caller.is_operator:
        raise Forbidden(
            "Agents cannot approve tool calls.", "Wait for a person to decide.", scope=APPROVALS_SCOPE
        )
    if APPROVALS_SCOPE not in caller.scopes:
        raise Forbidden(
            f"This token may not approve tool calls: it lacks {APPROVALS_SCOPE!r}.",
            "Use a token that was issued with that scope.",
            scope=APPROVALS_SCOPE,
        )


def authorize(
    caller: Caller,
    action: Action,
    target: TargetSession,
    grants: Grants,
    *,
    reference: str | None = None,
    configured: Collection[str] = (),
) -> None:
    """Returns if the caller may do this, and raises if not.

    For `spawn` the target is the session that would be created, and `configured` the agents that exist.
    `reference` is what the caller wrote: an error about a hidden session must not reveal its key.

    Raises:
        NotFound: the caller may not know that the session exists.
        Forbidden: the caller may read the session, but not do this to it.
    """
    if action == "spawn":
        _authorize_spawn(caller, target.agent_id, grants, configured)
    elif not _is_allowed(caller, action, target, grants):
        if not compute_reach(caller, grants).covers(target):
            raise build_session_missing_error(reference or target.key, caller, grants)
        require_scope(caller, action)
        raise Forbidden(
            f"Session {target.key!r} can be read, but this caller may not {_ACTION_VERBS[action]} it.",
            f"Choose another session, or ask the operator to widen {_SETTING_FOR[action]!r}.",
            action=action,
            key=target.key,
        )


def _is_allowed(caller: Caller, action: Action, target: TargetSession, grants: Grants) -> bool:
    if caller.is_operator:
        return _SCOPE_FOR[action] in caller.scopes
    if action in {"control", "manage"}:
        return _compute_agent_reach(caller, grants, grants.control).covers(target)
    return _compute_agent_reach(caller, grants, grants.send if action == "send" else grants.read).covers(
        target
    )


def _authorize_spawn(caller: Caller, agent_id: str, grants: Grants, configured: Collection[str]) -> None:
    require_scope(caller, "spawn")
    if caller.is_operator or agent_id == caller.agent_id:
        return
    # An unconfigured agent is refused with the same text, so that guessing names reveals nothing.
    if agent_id not in configured or not matches_agent_patterns(agent_id, grants.spawn_agents):
        raise Forbidden(
            f"Agent {caller.agent_id!r} may not spawn agent {agent_id!r}.",
            f"Call agents_list to see which agents it may spawn; {_SETTING_FOR['spawn']!r} of its agent decides.",
            action="spawn",
            agent_id=agent_id,
        )


def _compute_agent_reach(caller: Caller, grants: Grants, visibility: Visibility) -> Reach:
    width = _VISIBILITY_WIDTH[visibility]
    others = grants.a2a_allow or ("*",)
    crosses = (
        visibility == "all" and grants.a2a_enabled and matches_agent_patterns(caller.agent_id or "", others)
    )
    return Reach(
        own_key=caller.session_key,
        descendants=width >= _VISIBILITY_WIDTH["tree"],
        own_agent=caller.agent_id if width >= _VISIBILITY_WIDTH["agent"] else None,
        other_agents=others if crosses else (),
    )


def pick_narrower_visibility(one: Visibility, other: Visibility) -> Visibility:
    return one if _VISIBILITY_WIDTH[one] <= _VISIBILITY_WIDTH[other] else other


def matches_agent_patterns(agent_id: str, patterns: Iterable[str]) -> bool:
    """Whether one of the patterns, in which `*` stands for any text, matches this agent."""
    return any(re.fullmatch(_glob_to_regex(pattern), agent_id, re.IGNORECASE) for pattern in patterns)


def _glob_to_regex(pattern: str) -> str:
    return ".*".join(re.escape(part) for part in pattern.strip().split("*"))
