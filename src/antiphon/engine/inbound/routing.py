"""Routing: which agent a message from a chat service is for, and which session. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, Protocol

from antiphon import keys
from antiphon.engine.inbound.events import ChatKind, Inbound
from antiphon.keys import DEFAULT_ACCOUNT, DmScope, SessionKey, SessionScope

ANY_ACCOUNT = "*"


class BindingPeer(Protocol):
    @property
    def kind(self) -> ChatKind: ...
    @property
    def id(self) -> str: ...


class BindingMatch(Protocol):
    @property
    def channel(self) -> str: ...
    @property
    def account_id(self) -> str | None: ...
    @property
    def peer(self) -> BindingPeer | None: ...
    @property
    def guild_id(self) -> str | None: ...
    @property
    def team_id(self) -> str | None: ...
    @property
    def roles(self) -> Sequence[str]: ...


class AgentBinding(Protocol):
    @property
    def type(self) -> str: ...
    @property
    def agent_id(self) -> str: ...
    @property
    def match(self) -> BindingMatch: ...


def select_agent(
    bindings: Iterable[AgentBinding], channel: str, inbound: Inbound, agents: Sequence[str], default: str
) -> tuple[str, bool]:
    """Return the agent that answers, and whether a binding chose it.

    The most specific binding wins, then the first: a chat before an account before a channel. A binding without an
    account is for the default account.
    """
    best: tuple[int, str] | None = None
    for binding in bindings:
        if binding.type != "route" or binding.agent_id not in agents:
            continue
        rank = _rank_match(binding.match, channel, inbound)
        if rank is not None and (best is None or rank > best[0]):
            best = (rank, binding.agent_id)
    return (default, False) if best is None else (best[1], True)


def _rank_match(match: BindingMatch, channel: str, inbound: Inbound) -> int | None:
    """Return how specific a match is; None if it does not match. No channel has servers, teams or roles yet."""
    peer = inbound.sender.id if inbound.chat.kind == "direct" else inbound.chat.id
    is_any_account = match.account_id == ANY_ACCOUNT
    if match.channel.lower() != channel or match.guild_id or match.team_id or match.roles:
        return None
    if not is_any_account and (match.account_id or DEFAULT_ACCOUNT) != inbound.account:
        return None
    if match.peer is not None:
        return 2 if (match.peer.kind, match.peer.id) == (inbound.chat.kind, peer) else None
    return 1 if match.account_id is not None and not is_any_account else 0


def build_session_key(
    agent_id: str,
    channel: str,
    inbound: Inbound,
    *,
    dm_scope: DmScope,
    identity_links: Mapping[str, Sequence[str]],
    scope: SessionScope,
    is_bound: bool,
    thread_word: Literal["thread", "topic"],
) -> SessionKey:
    """Return the session of a message.

    The people of a named account that no binding gives an agent of its own never share the main session.
    """
    if inbound.chat.kind != "direct":
        key = keys.group_key(agent_id, channel, inbound.chat.id, shape=inbound.chat.kind)
        return keys.thread_key(key, inbound.thread_id, word=thread_word) if inbound.thread_id else key
    is_separate = inbound.account != DEFAULT_ACCOUNT and not is_bound
    key = keys.direct_key(
        agent_id,
        channel,
        inbound.sender.id,
        account_id=inbound.account,
        dm_scope="per-account-channel-peer" if is_separate else dm_scope,
        identity_links=identity_links,
        scope=scope,
    )
    if inbound.thread_id is None or key.shape == "global":
        return key
    return keys.thread_key(key, f"{inbound.chat.id}:{inbound.thread_id}")
