"""The conversations of a session: a key keeps its old transcripts when it begins a new one."""

from __future__ import annotations

from typing import Literal

from antiphon.access import Caller
from antiphon.engine import validation
from antiphon.engine.runs import lifecycle, run_queue
from antiphon.engine.sessions import session_rows
from antiphon.engine.validation import require_current_conversation
from antiphon.operations.context import OperationContext
from antiphon.operations.runs import IdleChange, RunOperations
from antiphon.operations.transcript_types import ConversationView
from antiphon.operations.types import SessionView
from antiphon.store import Row, Tx


class ConversationOperations:
    def __init__(self, context: OperationContext, runs: RunOperations) -> None:
        self._context = context
        self._runs = runs

    async def renew(
        self,
        caller: Caller,
        session: str,
        reason: Literal["new", "reset"] = "new",
        *,
        key: str | None = None,
        expected: str | None = None,
    ) -> SessionView:
        """Begin a new conversation under the same key. The old one stays readable and can be restored.

        With `expected`, only that conversation is ended. A repeated call with the same key does nothing.

        Raises:
            Conflict: the session is busy.
        """
        validation.validate_idempotency_key(key)
        plan = self._plan_renewal(caller, session, reason, key, expected)
        row = await self._context.store.tx(self._renew, caller, session, plan, self._context.clock.now())
        return await self._build_renewed_view(caller, session, row, reason)

    async def _renew(self, tx: Tx, caller: Caller, session: str, plan: IdleChange, now: int) -> Row | None:
        if await plan.was_done(tx, now):
            return None
        row = await self._context.session_resolver.open(tx, caller, "manage", session)
        plan.check(row)
        await self._runs.end_abandoned(tx, row["id"], now)
        return await plan.change(tx, row, now)

    async def _build_renewed_view(
        self, caller: Caller, session: str, row: Row | None, reason: str
    ) -> SessionView:
        """Return the session with its new conversation; `row` is None if it was begun by an earlier call."""
        if row is not None:
            return self._publish_renewal(caller, row, reason)
        return self._context.build_session_view(
            caller, await self._context.store.read(self._load_managed_session, caller, session)
        )

    async def restore(self, caller: Caller, session_id: str) -> SessionView:
        """Make an older conversation of a key its current one again."""
        row = await self._context.store.tx(self._restore, caller, session_id, self._context.clock.now())
        return self._publish_renewal(caller, row, "restore")

    async def _restore(self, tx: Tx, caller: Caller, session_id: str, now: int) -> Row:
        row = await self._context.session_resolver.open(tx, caller, "manage", session_id)
        await self._runs.end_abandoned(tx, row["id"], now)
        await session_rows.restore_transcript(tx, row, now)
        return await session_rows.load_list_row(tx, row["id"])

    def _publish_renewal(self, caller: Caller, row: Row, reason: str) -> SessionView:
        self._context.publish_to_session(
            row, "renewed"
        )  # subscribers need not know the reason for the change
        self._context.publish_to_all_sessions(row["key"], reason)
        return self._context.build_session_view(caller, row)

    async def reset(
        self,
        caller: Caller,
        session: str,
        reason: Literal["new", "reset"] = "reset",
        timeout: float = 15.0,
        *,
        key: str | None = None,
        expected: str | None = None,
    ) -> SessionView:
        """Begin a new conversation as `renew` does, after stopping what runs or waits in the session.

        With `expected`, only that conversation is ended. A repeated call with the same key does nothing.
        """
        validation.validate_idempotency_key(key)
        plan = self._plan_renewal(caller, session, reason, key, expected)
        row = await self._runs.change_when_idle(caller, session, plan, timeout)
        return await self._build_renewed_view(caller, session, row, reason)

    def _plan_renewal(
        self, caller: Caller, session: str, reason: str, key: str | None, expected: str | None
    ) -> IdleChange:
        async def was_done(tx: Tx, now: int) -> bool:
            if key is None or not await lifecycle.was_accepted(tx, key):
                return False
            row = await self._context.session_resolver.open(tx, caller, "manage", session)
            return not await run_queue.record_command(tx, key, row["id"], reason, now)

        def check(row: Row) -> None:
            require_current_conversation(row, session, expected)

        async def renew(tx: Tx, row: Row, now: int) -> Row:
            if key is None or await run_queue.record_command(tx, key, row["id"], reason, now):
                await session_rows.start_new_transcript(tx, row, reason, now)
            return await session_rows.load_list_row(tx, row["id"])

        return IdleChange(was_done, check, renew)

    async def _load_managed_session(self, tx: Tx, caller: Caller, session: str) -> Row:
        return await session_rows.load_list_row(
            tx, (await self._context.session_resolver.open(tx, caller, "manage", session))["id"]
        )

    async def _load_conversations(self, tx: Tx, caller: Caller, session: str) -> list[Row]:
        return await session_rows.list_transcripts(
            tx, await self._context.session_resolver.open(tx, caller, "read", session)
        )

    async def list(self, caller: Caller, session: str) -> list[ConversationView]:
        """Return the conversations of a key, newest first; each is readable by its session id."""
        rows = await self._context.store.read(self._load_conversations, caller, session)
        return [
            ConversationView(
                session_id=row["session_id"],
                reason=row["reason"],
                started_at=row["started_at"],
                ended_at=row["ended_at"],
            )
            for row in rows
        ]
