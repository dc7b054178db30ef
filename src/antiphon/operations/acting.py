"""Acting as a session: for an operator who uses a tool the way that session's agent would."""

from __future__ import annotations

from typing import NamedTuple

from antiphon.access import Caller
from antiphon.engine import sessions
from antiphon.engine.actors import Actor
from antiphon.errors import Forbidden
from antiphon.operations import checks
from antiphon.operations.core import Core
from antiphon.store import Row, Tx
from antiphon.views import SessionView


class Acting(NamedTuple):
    """A session, and what it is when it acts: exactly what a run in it would be."""

    session: SessionView
    actor: Actor


class _Found(NamedTuple):
    described: Row
    row: Row


class Actings(Core):
    async def act_as(self, caller: Caller, session: str) -> Acting:
        """In the name of a session, which is founded if it is not there yet.

        It reaches what its agent reaches, which is less than an operator does. For operators: an agent acts as
        itself and as nobody else.
        """
        if not caller.is_operator:
            raise Forbidden("An agent acts as its own session.", "Use its own tools.", action="send")
        found, founded = await self._store.tx(self._act_as, caller, session, self._clock.now())
        if founded:
            self._tell(found.described, "create")
        return self._acting_as(caller, session, found)

    async def tools_of(self, caller: Caller, session: str) -> Acting:
        """The same, for who only wants to know what the session could do. Nothing is founded."""
        return self._acting_as(caller, session, await self._store.read(self._look_at, caller, session))

    async def _act_as(self, tx: Tx, caller: Caller, session: str, now: int) -> tuple[_Found, bool]:
        row, founded = await self._opened_or_founded(tx, caller, "send", session, now)
        checks.current(row, session)
        return await self._found(tx, row["id"]), founded

    async def _look_at(self, tx: Tx, caller: Caller, session: str) -> _Found:
        row = await self._door.open(tx, caller, "read", session)
        return await self._found(tx, row["id"])

    async def _found(self, tx: Tx, id: int) -> _Found:
        row = await tx.one(sessions.SQL.by_id, id=id)
        assert row is not None
        return _Found(await self._described(tx, id), row)

    def _acting_as(self, caller: Caller, session: str, found: _Found) -> Acting:
        row = found.row
        agent_id = self._door.spoken_to(caller, session) or row["agent_id"]
        actor = self._actors.of(
            agent_id, row["key"], sandboxed=bool(row["sandboxed"]), envelope=row["envelope"]
        )
        return Acting(self._session_view(caller, found.described), actor)
