"""Resolves session references for callers: canonicalize, find, authorize, in that order.

Every operation on a session on behalf of a caller starts with `SessionResolver.open` in its own transaction, so the
decision is about the same rows that are then read or changed.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from antiphon import access, keys, send_policy
from antiphon.access import Action, Caller, Grants, TargetSession, VisibilityCap
from antiphon.engine.sessions import session_rows
from antiphon.engine.sessions.session_rows import NewSession
from antiphon.errors import Ambiguous, SendBlocked
from antiphon.keys import WEBCHAT_CHANNEL, SessionIdRef, SessionKey
from antiphon.store import Row, Tx

if TYPE_CHECKING:
    from antiphon.config import Config


class SessionResolver:
    def __init__(self, config: Config) -> None:
        self._config = config
        self._grants_by_caller: dict[tuple[str | None, bool, VisibilityCap | None], Grants] = {
            (None, False, None): Grants()
        }

    @cached_property
    def _default_agent(self) -> str:
        return self._config.default_agent_id

    def get_grants(self, caller: Caller) -> Grants:
        """Return what the caller's agent may reach. An operator is limited by scopes only."""
        key = (caller.agent_id, caller.sandboxed, caller.cap)
        if key not in self._grants_by_caller:  # bounded by the number of agents and caps
            self._grants_by_caller[key] = self._compute_grants(
                caller.agent_id or "", caller.cap, sandboxed=caller.sandboxed
            )
        return self._grants_by_caller[key]

    def _compute_grants(self, agent_id: str, cap: VisibilityCap | None, *, sandboxed: bool) -> Grants:
        agent = self._config.get_agent(agent_id)
        lifted = sandboxed and agent.sandbox.session_tools_visibility == "all"
        return access.resolve_grants(
            visibility=agent.tools.lifted_visibility if lifted else agent.tools.visibility,
            send_visibility=agent.tools.lifted_send if lifted else agent.tools.send,
            control=agent.tools.control,
            a2a_enabled=self._config.tools.agent_to_agent.enabled,
            a2a_allow=self._config.tools.agent_to_agent.allow,
            spawn_agents=agent.subagents.allow_agents or (),
            sandboxed=sandboxed,
            session_tools_visibility=agent.sandbox.session_tools_visibility,
            cap=cap,
        )

    def canonicalize(self, caller: Caller, reference: str) -> SessionKey | SessionIdRef:
        return keys.canonicalize(
            reference,
            agent_id=caller.agent_id or self._default_agent,
            main_key=self._config.main_key,
            scope=self._config.session_scope,
            current=keys.parse(caller.session_key) if caller.session_key else None,
        )

    def find_addressed_agent(self, caller: Caller, reference: str) -> str | None:
        """Return the agent that a reference to the shared session addresses; None for the session's own agent.

        Raises:
            NotFound: no such agent is configured.
        """
        if self._config.session_scope != "global" or reference.strip().lower() == "current":
            return None
        key = keys.canonicalize(
            reference, agent_id=caller.agent_id or self._default_agent, main_key=self._config.main_key
        )
        if isinstance(key, SessionIdRef) or key.shape != "main" or key.agent_id == self._default_agent:
            return None
        return self._config.get_agent(key.agent_id).id

    def resolve_acting_agent(self, caller: Caller, reference: str, row: Row) -> str:
        """Return the agent that acts in a session: the calling agent, or the one an operator's reference addresses."""
        return caller.agent_id or self.find_addressed_agent(caller, reference) or row["agent_id"]

    def resolve_non_owner_agent(self, caller: Caller, reference: str | None, row: Row) -> str | None:
        """Return the agent that acts in a session, if it is not the session's own agent (`runs.agent_id`)."""
        agent_id = self.resolve_acting_agent(caller, reference or "current", row)
        return None if agent_id == row["agent_id"] else agent_id

    async def open_by_label(
        self, tx: Tx, caller: Caller, action: Action, label: str, agent_id: str | None = None
    ) -> Row:
        """Like `open`, for a session given by its label and optionally its agent."""
        access.require_scope(caller, action)
        row = await self._find_by_label(tx, caller, label, agent_id)
        if row is None:
            raise access.build_session_missing_error(label, caller, self.get_grants(caller))
        self.authorize(caller, action, row, label)
        return row

    async def open(
        self, tx: Tx, caller: Caller, action: Action, reference: str, *, found_at: int | None = None
    ) -> Row:
        """Return the session's row, or raise the error that this caller may see.

        With `found_at` (a time), a missing session is created if the caller is an operator, or if the reference is to
        an agent's main session.
        """
        access.require_scope(caller, action)
        canonical = self.canonicalize(caller, reference)
        row = await session_rows.find_session(tx, canonical, caller.session_key)
        if row is None and isinstance(canonical, SessionIdRef):
            row = await self._find_by_label(tx, caller, canonical.value)
        elif (
            row is None
            and isinstance(canonical, SessionKey)
            and found_at is not None
            and self._can_create(caller, action, canonical, reference)
        ):
            return await self._create_session(tx, canonical, found_at)
        if row is None:
            raise access.build_session_missing_error(reference, caller, self.get_grants(caller))
        self.authorize(caller, action, row, reference)
        return row

    def is_main_session(self, caller: Caller, reference: str) -> bool:
        """Whether a reference names the main session of a configured agent, which need not exist yet."""
        key = self.canonicalize(caller, reference)
        if not isinstance(key, SessionKey) or key.kind != "main":
            return False
        return (key.agent_id or self._default_agent) in self._config.agent_ids

    def _can_create(self, caller: Caller, action: Action, key: SessionKey, reference: str) -> bool:
        if caller.is_operator:
            return True
        if (
            key.shape not in {"main", "global"}
            or (key.agent_id or self._default_agent) not in self._config.agent_ids
        ):
            return False
        target = TargetSession(str(key), key.agent_id or self._default_agent)
        access.authorize(caller, action, target, self.get_grants(caller), reference=reference)
        return True

    def authorize(self, caller: Caller, action: Action, row: Row, reference: str) -> None:
        """Authorize a caller for a session's row; needed on its own if the row was found by, for example, a run id."""
        access.authorize(caller, action, _build_target(row), self.get_grants(caller), reference=reference)

    def is_sandboxed(self, agent_id: str, key: SessionKey) -> bool:
        """Whether the configuration puts this session into a sandbox."""
        mode = self._config.get_agent(agent_id).sandbox.mode
        return mode == "all" or (mode == "non-main" and key.kind != "main")

    def can_send(self, row: Row, message_channel: str | None = None) -> bool:
        """Whether the send policy allows messages to this session, regardless of the sender's permissions.

        `message_channel` is the channel that a message came from. It counts only if the session has no channel on
        record; a main session without either is on the web chat.
        """
        channel = row["channel"] or row["last_channel"] or message_channel
        if channel is None and keys.parse(row["key"]).kind == "main":
            channel = WEBCHAT_CHANNEL
        return self._is_allowed_by_policy(row["key"], channel, row)

    def can_post(self, key: str, channel: str, row: Row | None) -> bool:
        """Whether the policy allows posting a session's text to a channel; the session may no longer exist."""
        return self._is_allowed_by_policy(key, channel, row) and (row is None or self.can_send(row))

    def _is_allowed_by_policy(self, key: str, channel: str | None, row: Row | None) -> bool:
        decision = send_policy.decide_send(
            self._send_policy,
            override=row["send_policy"] if row else None,
            channel=channel,
            chat_type=row["chat_type"] if row else keys.parse(key).chat_type,
            key=key,
        )
        return decision != "deny"

    def check_send(self, row: Row, message_channel: str | None = None) -> None:
        if not self.can_send(row, message_channel):
            blocked_by_session = row["send_policy"] == "deny"
            raise SendBlocked(
                f"send blocked by session policy: nothing may be sent to {row['key']!r}.",
                "Enter `/send on` in its chat, or change its sendPolicy."
                if blocked_by_session
                else "Change session.sendPolicy, or the session's own sendPolicy.",
                key=row["key"],
            )

    @cached_property
    def _send_policy(self) -> send_policy.SendPolicy:
        configured = self._config.session.send_policy
        rules = tuple(
            send_policy.SendRule(
                action=rule.action,
                channel=rule.match.channel_name,
                chat_type=rule.match.chat_type,
                key_prefix=rule.match.key_prefix,
                raw_key_prefix=rule.match.raw_key_prefix,
            )
            for rule in configured.rules
        )
        return send_policy.SendPolicy(rules, configured.default)

    async def _create_session(self, tx: Tx, key: SessionKey, now: int) -> Row:
        agent = self._config.get_agent(key.agent_id or self._default_agent)  # raises if it is not configured
        await session_rows.create_session(
            tx, key, now, NewSession(agent_id=agent.id, sandboxed=self.is_sandboxed(agent.id, key))
        )
        row = await session_rows.find_session(tx, key, None)
        assert row is not None
        return row

    async def _find_by_label(
        self, tx: Tx, caller: Caller, label: str, agent_id: str | None = None
    ) -> Row | None:
        rows = [
            row
            for row in await session_rows.list_by_label(tx, label, caller.session_key)
            if self.can_see(caller, row) and agent_id in {None, row["agent_id"]}
        ]
        if len(rows) > 1:
            candidates = [row["key"] for row in rows]
            raise Ambiguous(
                f"{len(rows)} sessions are labelled {label!r}: {', '.join(candidates)}.",
                "Pass one of these keys.",
                candidates=candidates,
            )
        return rows[0] if rows else None

    def can_see(self, caller: Caller, row: Row) -> bool:
        """Whether a caller may know that this session exists."""
        return access.compute_reach(caller, self.get_grants(caller)).covers(_build_target(row))


def _build_target(row: Row) -> TargetSession:
    return TargetSession(row["key"], row["agent_id"], bool(row["descendant"]))
