"""Tool calls that wait for a person: listing them, deciding on them, and calls that are always allowed."""

from __future__ import annotations

from typing import cast

from antiphon import access
from antiphon.access import Caller
from antiphon.engine.runs import approval_rows
from antiphon.engine.runs.approval_rows import ApprovalDecision
from antiphon.engine.validation import validate_choice
from antiphon.errors import NotFound
from antiphon.operations.context import OperationContext
from antiphon.operations.types import APPROVAL_DECISIONS, ApprovalView, GrantView, build_approval_view
from antiphon.store import Row, Tx

MAX_APPROVALS_LISTED = 200
MAX_GRANTS_LISTED = 1000
MAX_WAIT_SECONDS = 60.0
LOCAL_DECIDER = "local user"


class ApprovalOperations:
    def __init__(self, context: OperationContext) -> None:
        self._context = context

    async def list(self, caller: Caller, session: str | None = None) -> list[ApprovalView]:
        """Return the calls that wait for a decision, oldest first; of one session, or of all."""
        access.require_approver(caller)
        rows = await self._context.store.read(self._list, caller, session, self._context.clock.now())
        return [_build_view(row) for row in rows]

    async def _list(self, tx: Tx, caller: Caller, session: str | None, now: int) -> list[Row]:
        number = None
        if session is not None:
            number = (await self._context.session_resolver.open(tx, caller, "read", session))["id"]
        return await approval_rows.list_pending_approvals(tx, number, now, MAX_APPROVALS_LISTED)

    async def get(self, caller: Caller, approval_id: str) -> ApprovalView:
        """Return an approval, decided or not."""
        access.require_approver(caller)
        row = await self._context.store.read(approval_rows.load_approval, approval_id)
        if row is None:
            raise approval_rows.build_approval_missing_error(approval_id)
        return _build_view(row)

    async def resolve(
        self, caller: Caller, approval_id: str, decision: str, decided_by: str = LOCAL_DECIDER
    ) -> ApprovalView:
        """Allow or deny a waiting call. The same decision again has no further effect."""
        access.require_approver(caller)
        validate_choice(decision, APPROVAL_DECISIONS, "decision")
        chosen = cast("ApprovalDecision", decision)
        row, is_new = await self._context.store.tx(
            approval_rows.decide_approval, approval_id, chosen, decided_by, self._context.clock.now()
        )
        if is_new:
            event = approval_rows.build_approval_event(row)
            approval_rows.publish_approval(self._context.bus, row["session"], event)
        return _build_view(row)

    async def wait(self, caller: Caller, approval_id: str, timeout_seconds: float) -> ApprovalView:
        """Wait until an approval is decided, and return it as it is then."""
        await self.get(caller, approval_id)
        timeout_seconds = min(timeout_seconds, MAX_WAIT_SECONDS)
        await approval_rows.wait_for_change(
            self._context.store, self._context.bus, approval_id, timeout_seconds
        )
        return await self.get(caller, approval_id)

    async def list_grants(self, caller: Caller) -> list[GrantView]:
        """Return the calls that are always allowed."""
        access.require_approver(caller)
        rows = await self._context.store.read(approval_rows.list_grants, MAX_GRANTS_LISTED)
        return [
            GrantView(
                id=row["id"],
                agent_id=row["agent_id"],
                tool=row["tool"],
                text=approval_rows.format_question(row["subject"]),
                decided_by=row["decided_by"],
                created_at=row["created_at"],
            )
            for row in rows
        ]

    async def revoke_grant(self, caller: Caller, grant_id: str) -> None:
        """Revoke a grant; later calls ask again."""
        access.require_approver(caller)
        if not await self._context.store.tx(approval_rows.delete_grant, grant_id):
            raise NotFound(
                f"There is no grant {grant_id!r}.", "List them: antiphon approvals grants.", id=grant_id
            )


def _build_view(row: Row) -> ApprovalView:
    return build_approval_view(approval_rows.build_approval_event(row))
