"""Acting as a session: lets an operator use a tool as that session's agent would."""

from __future__ import annotations

from typing import NamedTuple

from antiphon.access import Caller
from antiphon.engine.sessions import session_rows
from antiphon.engine.sessions.identity import SessionIdentity
from antiphon.errors import Forbidden
from antiphon.operations import request_validation
from antiphon.operations.context import OperationContext
from antiphon.store import Row, Tx
from antiphon.views import SessionView


class ActingSession(NamedTuple):
    """A session and its identity, exactly as a run in it would have it."""

    session: SessionView
    actor: SessionIdentity


class _SessionRows(NamedTuple):
    described: Row
    row: Row


class ImpersonationOperations(OperationContext):
    async def act_as(self, caller: Caller, session: str) -> ActingSession:
        """Return the identity of a session, which is created if it does not exist; for operators only.

        It has the rights of the session's agent, which are fewer than an operator's.
        """
        if not caller.is_operator:
            raise Forbidden("An agent acts as its own session.", "Use its own tools.", action="send")
        found, founded = await self._store.tx(self._act_as, caller, session, self._clock.now())
        if founded:
            self._publish_change(found.described, "create")
        return self._build_acting_session(caller, session, found)

    async def describe_actor(self, caller: Caller, session: str) -> ActingSession:
        """Return the identity of a session without creating it, to find out what the session could do."""
        return self._build_acting_session(
            caller, session, await self._store.read(self._load_actor_session, caller, session)
        )

    async def _act_as(self, tx: Tx, caller: Caller, session: str, now: int) -> tuple[_SessionRows, bool]:
        row, founded = await self._open_or_create_session(tx, caller, "send", session, now)
        request_validation.require_current_conversation(row, session)
        return await self._load_session_rows(tx, row["id"]), founded

    async def _load_actor_session(self, tx: Tx, caller: Caller, session: str) -> _SessionRows:
        row = await self._session_resolver.open(tx, caller, "read", session)
        return await self._load_session_rows(tx, row["id"])

    async def _load_session_rows(self, tx: Tx, id: int) -> _SessionRows:
        row = await tx.one(session_rows.SQL.by_id, id=id)
        assert row is not None
        return _SessionRows(await self._load_described_session(tx, id), row)

    def _build_acting_session(self, caller: Caller, session: str, found: _SessionRows) -> ActingSession:
        row = found.row
        agent_id = self._session_resolver.find_addressed_agent(caller, session) or row["agent_id"]
        actor = self._actors.resolve(
            agent_id, row["key"], sandboxed=bool(row["sandboxed"]), envelope=row["envelope"]
        )
        return ActingSession(self._build_session_view(caller, found.described), actor)
