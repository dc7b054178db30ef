"""The log of exchanges as people see it: who said what to whom, how far it has come, and what came of it."""

from __future__ import annotations

import asyncio

from antiphon import access, keys
from antiphon.access import Caller
from antiphon.engine import exchanges
from antiphon.engine.redaction import redact
from antiphon.operations.checks import before_row, between
from antiphon.operations.core import Core
from antiphon.store import Row, Tx
from antiphon.views import ExchangePage, ExchangeView

LIMIT, MOST = 50, 500
SHOWN = 300  # characters of a text
SEEN, EDGE = 600, 200  # characters that are searched for secrets, and at their end too few to recognise one


class Correspondence(Core):
    async def exchanges(
        self,
        caller: Caller,
        session: str | None = None,
        *,
        unsettled: bool = False,
        limit: int = LIMIT,
        cursor: str | None = None,
    ) -> ExchangePage:
        """For whoever may read every session. `session` is either side; `unsettled` leaves out what is over."""
        what, instead = "what goes on between all sessions", "Read your own with sessions_history."
        access.require_operator(caller, "read", what, instead)
        most, before = between(limit, 1, MOST, "limit"), before_row(cursor)
        rows = await self._store.read(self._exchanges, caller, session, unsettled, before, most + 1)
        shown = rows[:most]
        return ExchangePage(
            exchanges=await asyncio.to_thread(lambda: [_view(row) for row in shown]),
            next_cursor=str(shown[-1]["n"]) if len(rows) > len(shown) else None,
        )

    async def _exchanges(
        self, tx: Tx, caller: Caller, session: str | None, unsettled: bool, before: int, limit: int
    ) -> list[Row]:
        if session is None:
            query = exchanges.SQL.page_unsettled if unsettled else exchanges.SQL.page
            return await tx.all(query, before=before, limit=limit, chars=SEEN)
        row = await self._door.open(tx, caller, "read", session)
        query = exchanges.SQL.page_of_unsettled if unsettled else exchanges.SQL.page_of
        return await tx.all(query, session=row["id"], before=before, limit=limit, chars=SEEN)


def _view(row: Row) -> ExchangeView:
    requester = row["requester_key"]
    return ExchangeView(
        id=row["id"],
        requester_session_key=keys.spoken(requester) if requester else None,
        target_session_key=keys.spoken(row["target_key"]),
        phase=row["phase"],
        turn=row["turn"],
        turns=row["turns"],
        announced=row["announced"],
        current_run_id=row["current"] if row["settled_at"] is None else None,
        chain_id=row["chain"],
        hop=row["hop"],
        message=_beginning(row["message"]),
        latest_reply=_beginning(row["latest_reply"]),
        created_at=row["created_at"],
        settled_at=row["settled_at"],
    )


def _beginning(text: str | None) -> str | None:
    """Secrets masked; None of what was never said or is forgotten."""
    if not text:
        return None
    masked = redact(text)
    if len(text) >= SEEN:  # what the end cuts apart is not recognised, so it is not shown
        masked = masked[: max(0, len(masked) - EDGE)]
    return masked if len(masked) <= SHOWN and len(text) < SEEN else f"{masked[:SHOWN]}…"
