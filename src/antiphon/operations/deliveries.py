"""The outbox as people see it: what is on its way, what did not get there, and sending it once more."""

from __future__ import annotations

import asyncio

from antiphon import access
from antiphon.access import Caller
from antiphon.engine import deliveries, gate
from antiphon.errors import Conflict, NotFound
from antiphon.operations.checks import before_row, between, one_of
from antiphon.operations.core import Core
from antiphon.store import Row, Tx
from antiphon.views import DeliveryPage, DeliveryView

STATES = ("pending", "sending", "delivered", "blocked", "ambiguous", "dead")
LIMIT, MOST = 50, 500
COUNTED = 10_000  # of those that were delivered; the others are all counted
OUTBOX = "the outbox", "Ask one of them."
SEEN, EDGE = 2000, 200  # characters that are cleared, and at their end too few to recognise what is cut apart


class Deliveries(Core):
    async def deliveries(
        self, caller: Caller, state: str | None = None, limit: int = LIMIT, cursor: str | None = None
    ) -> DeliveryPage:
        """For whoever may read every session."""
        access.require_operator(caller, "read", *OUTBOX)
        if state is not None:
            one_of(state, STATES, "state")
        before = before_row(cursor)
        rows, standing = await self._store.read(_page, state, before, between(limit, 1, MOST, "limit") + 1)
        shown = rows[: min(limit, MOST)]
        counts = {row["state"]: row["deliveries"] for row in standing}
        return DeliveryPage(
            deliveries=await asyncio.to_thread(lambda: [_view(row) for row in shown]),
            standing=counts,
            capped=counts.get("delivered") == COUNTED,
            next_cursor=str(shown[-1]["n"]) if len(rows) > len(shown) else None,
        )

    async def deliver_again(self, caller: Caller, key: str) -> DeliveryView:
        """Send once more what is dead, in doubt or was blocked. For what is in doubt, that may be a second time."""
        access.require_operator(caller, "manage", *OUTBOX)
        engine = self._running()
        row = await self._store.tx(_again, key, self._clock.now())
        engine.deliver()
        return _view(row)


async def _page(tx: Tx, state: str | None, before: int, limit: int) -> tuple[list[Row], list[Row]]:
    if state is None:
        rows = await tx.all(deliveries.SQL.page, before=before, limit=limit)
    else:
        rows = await tx.all(deliveries.SQL.page_in, state=state, before=before, limit=limit)
    return rows, await tx.all(deliveries.SQL.standing, most=COUNTED)


async def _again(tx: Tx, key: str, now: int) -> Row:
    row = await tx.one(deliveries.SQL.by_key, key=key)
    if row is None:
        raise NotFound(f"There is no delivery {key!r}.", "Use a key that `antiphon deliveries` shows.")
    if not await tx.do(deliveries.SQL.again, n=row["n"], now=now):
        raise Conflict(
            f"Delivery {key!r} is {row['state']}.", "Only what is dead, ambiguous or blocked is sent again."
        )
    after = await tx.one(deliveries.SQL.by_key, key=key)
    assert after is not None
    return after


def _cleared(body: str, stats: str | None) -> str:
    """As people get it; of a long text there is the beginning."""
    if len(body) <= SEEN:
        return gate.clear(body, stats=stats)
    return f"{gate.clear(body[:SEEN])[:-EDGE]}…"


def _view(row: Row) -> DeliveryView:
    where = deliveries.read(row["destination"])
    return DeliveryView(
        key=row["key"],
        kind=row["kind"],
        session_key=row["session_key"],
        channel=where.channel,
        to=where.to,
        state=row["state"],
        text=_cleared(row["body"], row["stats"]),
        attempts=row["attempts"],
        error=row["error"],
        message_id=row["message_id"],
        created_at=row["created_at"],
        next_at=row["next_at"] if row["state"] == "pending" else None,
        settled_at=row["settled_at"],
    )
