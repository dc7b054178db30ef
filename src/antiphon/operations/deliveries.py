"""The outbox for operators: lists deliveries and retries those that failed."""

from __future__ import annotations

import asyncio

from antiphon import access
from antiphon.access import Caller
from antiphon.engine.outbox import delivery_rows as deliveries
from antiphon.engine.outbox import sanitize
from antiphon.errors import Conflict, NotFound
from antiphon.operations.context import OperationContext
from antiphon.operations.types import DeliveryPage, DeliveryView
from antiphon.operations.validation import parse_row_cursor, validate_and_clamp, validate_choice
from antiphon.store import Row, Tx

DELIVERY_STATES = ("pending", "sending", "delivered", "blocked", "ambiguous", "dead")
DEFAULT_DELIVERIES_PER_PAGE, MAX_DELIVERIES_PER_PAGE = 50, 500
MAX_DELIVERED_COUNTED = 10_000  # delivered rows only; all other states are counted in full
OUTBOX_REFUSAL = "the outbox", "Ask one of them."
# Characters that are sanitized; the last ones are dropped, where a cut token would not be recognised.
MAX_SANITIZED_CHARACTERS, CUT_EDGE_CHARACTERS = (
    2000,
    200,
)


class DeliveryOperations:
    def __init__(self, context: OperationContext) -> None:
        self._context = context

    async def retry(self, caller: Caller, key: str) -> DeliveryView:
        """Send a dead, ambiguous or blocked delivery again. An ambiguous one may arrive twice."""
        access.require_operator(caller, "manage", *OUTBOX_REFUSAL)
        worker = self._context.require_worker()
        row = await self._context.store.tx(_requeue_delivery, key, self._context.clock.now())
        worker.wake_outbox()
        return _build_delivery_view(row)

    async def list(
        self,
        caller: Caller,
        state: str | None = None,
        limit: int = DEFAULT_DELIVERIES_PER_PAGE,
        cursor: str | None = None,
    ) -> DeliveryPage:
        """Return a page of deliveries; for operators that may read every session."""
        access.require_operator(caller, "read", *OUTBOX_REFUSAL)
        if state is not None:
            validate_choice(state, DELIVERY_STATES, "state")
        before = parse_row_cursor(cursor)
        rows, standing = await self._context.store.read(
            _load_delivery_page,
            state,
            before,
            validate_and_clamp(limit, 1, MAX_DELIVERIES_PER_PAGE, "limit") + 1,
        )
        shown = rows[: min(limit, MAX_DELIVERIES_PER_PAGE)]
        counts = {row["state"]: row["deliveries"] for row in standing}
        return DeliveryPage(
            deliveries=await asyncio.to_thread(lambda: [_build_delivery_view(row) for row in shown]),
            standing=counts,
            capped=counts.get("delivered") == MAX_DELIVERED_COUNTED,
            next_cursor=str(shown[-1]["n"]) if len(rows) > len(shown) else None,
        )


async def _load_delivery_page(
    tx: Tx, state: str | None, before: int, limit: int
) -> tuple[list[Row], list[Row]]:
    if state is None:
        rows = await tx.all(deliveries.SQL.page, before=before, limit=limit)
    else:
        rows = await tx.all(deliveries.SQL.page_by_state, state=state, before=before, limit=limit)
    return rows, await tx.all(deliveries.SQL.count_by_state, most=MAX_DELIVERED_COUNTED)


async def _requeue_delivery(tx: Tx, key: str, now: int) -> Row:
    row = await tx.one(deliveries.SQL.by_key, key=key)
    if row is None:
        raise NotFound(f"There is no delivery {key!r}.", "Use a key that `antiphon deliveries` shows.")
    if not await tx.do(deliveries.SQL.requeue, n=row["n"], now=now):
        raise Conflict(
            f"Delivery {key!r} is {row['state']}.", "Only what is dead, ambiguous or blocked is sent again."
        )
    after = await tx.one(deliveries.SQL.by_key, key=key)
    assert after is not None
    return after


def _sanitize_body(body: str, stats: str | None) -> str:
    """Return the beginning of the text as people get it."""
    if len(body) <= MAX_SANITIZED_CHARACTERS:
        return sanitize.sanitize_for_people(body, stats=stats)
    return f"{sanitize.sanitize_for_people(body[:MAX_SANITIZED_CHARACTERS])[:-CUT_EDGE_CHARACTERS]}…"


def _build_delivery_view(row: Row) -> DeliveryView:
    where = deliveries.decode_destination(row["destination"])
    return DeliveryView(
        key=row["key"],
        kind=row["kind"],
        session_key=row["session_key"],
        channel=where.channel,
        to=where.to,
        state=row["state"],
        text=_sanitize_body(row["body"], row["stats"]),
        attempts=row["attempts"],
        error=row["error"],
        message_id=row["message_id"],
        created_at=row["created_at"],
        next_at=row["next_at"] if row["state"] == "pending" else None,
        settled_at=row["settled_at"],
    )
