"""The one way to a session: resolve what the caller wrote, canonicalise it, authorize it, in that order.

Everything that touches a session on somebody's behalf starts with `Door.open` inside its own transaction, so
the answer is about the very rows that are then read or changed.
"""

from __future__ import annotations

from antiphon import access, keys
from antiphon.access import Action, Caller, Grants, Target
from antiphon.config import Config
from antiphon.engine import sessions
from antiphon.errors import Ambiguous
from antiphon.keys import SessionIdRef, SessionKey
from antiphon.store import Row, Tx


class Door:
    def __init__(self, config: Config) -> None:
        self._config = config

    def grants(self, caller: Caller) -> Grants:
        """What this caller's agent may reach; an operator's scopes say it all."""
        if caller.agent_id is None:
            return Grants()
        agent = self._config.agent(caller.agent_id)
        return access.grants_for(
            visibility=agent.tools.visibility,
            send_visibility=agent.tools.send,
            control=agent.tools.control,
            a2a_enabled=self._config.tools.agent_to_agent.enabled,
            a2a_allow=self._config.tools.agent_to_agent.allow,
            spawn_agents=agent.subagents.allow_agents or (),
            sandboxed=caller.sandboxed,
            session_tools_visibility=agent.sandbox.session_tools_visibility,
        )

    def canonical(self, caller: Caller, reference: str) -> SessionKey | SessionIdRef:
        return keys.canonicalise(
            reference,
            agent_id=caller.agent_id or self._config.default_agent_id,
            main_key=self._config.session.main_key,
            scope=self._config.session.scope,
            current=keys.parse(caller.session_key) if caller.session_key else None,
        )

    async def open(
        self, tx: Tx, caller: Caller, action: Action, reference: str, *, found_at: int | None = None
    ) -> Row:
        """The session's row, or the error that this caller is to see.

        With `found_at` a session that does not exist yet is founded by an operator's first message to its key.
        """
        access.require_scope(caller, action)
        canonical = self.canonical(caller, reference)
        row = await sessions.find(tx, canonical, caller.session_key)
        if row is None and isinstance(canonical, SessionIdRef):
            row = await self._by_label(tx, caller, canonical.value)
        elif row is None and isinstance(canonical, SessionKey) and found_at is not None and caller.is_operator:
            return await self._found(tx, canonical, found_at)
        if row is None:
            raise access.missing(reference)
        access.authorize(caller, action, _target(row), self.grants(caller), reference=reference)
        return row

    async def _found(self, tx: Tx, key: SessionKey, now: int) -> Row:
        if key.agent_id:
            self._config.agent(key.agent_id)  # raises for an agent that is not configured
        return await sessions.create(tx, key, now)

    async def _by_label(self, tx: Tx, caller: Caller, label: str) -> Row | None:
        rows = [
            row
            for row in await sessions.labelled(tx, label, caller.session_key)
            if self._visible(caller, row)
        ]
        if len(rows) > 1:
            candidates = [row["key"] for row in rows]
            raise Ambiguous(
                f"{len(rows)} sessions are labelled {label!r}: {', '.join(candidates)}.",
                "Pass one of these keys.",
                candidates=candidates,
            )
        return rows[0] if rows else None

    def _visible(self, caller: Caller, row: Row) -> bool:
        return access.reach(caller, self.grants(caller)).covers(_target(row))


def _target(row: Row) -> Target:
    return Target(row["key"], row["agent_id"], bool(row["descendant"]))
