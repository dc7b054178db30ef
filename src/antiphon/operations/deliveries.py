"""The outbox for operators: lists deliveries and retries those that failed."""

from __future__ import annotations

import asyncio

from antiphon import access
from antiphon.access import Caller
from antiphon.engine.outbox import delivery_rows, sanitize
from antiphon.engine.outbox.redaction import CUT_EDGE_CHARACTERS
from antiphon.engine.validation import parse_row_cursor, validate_and_clamp, validate_choice
from antiphon.operations.collaboration_types import DeliveryPage, DeliveryView
from antiphon.operations.context import OperationContext
from antiphon.store import Row, Tx

DELIVERY_STATES = ("pending", "sending", "delivered", "blocked", "ambiguous", "expired", "dead")
DEFAULT_DELIVERIES_PER_PAGE, MAX_DELIVERIES_PER_PAGE = 50, 500
MAX_DELIVERED_COUNTED = 10_000  # delivered rows only; all other states are counted in full
OUTBOX_REFUSAL = "the outbox", "Ask an operator."
MAX_SANITIZED_CHARACTERS = 2000


class DeliveryOperations:
    def __init__(self, context: OperationContext) -> None:
        self._context = context

    async def retry(self, caller: Caller, key: str) -> DeliveryView:
        """Queue a dead, ambiguous, blocked or expired delivery again. An ambiguous one may arrive twice."""
        access.require_operator(caller, "manage", *OUTBOX_REFUSAL)
        worker = self._context.require_worker()
        row = await self._context.store.tx(delivery_rows.requeue_delivery, key, self._context.clock.now())
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
        rows, counts = await self._context.store.read(
            _load_page_and_counts,
            state,
            before,
            validate_and_clamp(limit, 1, MAX_DELIVERIES_PER_PAGE, "limit") + 1,
        )
        page = rows[: min(limit, MAX_DELIVERIES_PER_PAGE)]
        return DeliveryPage(
            deliveries=await asyncio.to_thread(lambda: [_build_delivery_view(row) for row in page]),
            count_by_state=counts,
            capped=counts.get("delivered") == MAX_DELIVERED_COUNTED,
            next_cursor=str(page[-1]["n"]) if len(rows) > len(page) else None,
        )


async def _load_page_and_counts(
    tx: Tx, state: str | None, before: int, limit: int
) -> tuple[list[Row], dict[str, int]]:
    rows = await delivery_rows.list_deliveries(tx, state, before, limit)
    return rows, await delivery_rows.count_by_state(tx, MAX_DELIVERED_COUNTED)


def _sanitize_body(body: str, stats: str | None) -> str:
    """Return the beginning of the text as people get it."""
    if len(body) <= MAX_SANITIZED_CHARACTERS:
        return sanitize.sanitize_for_people(body, stats=stats)
    return f"{sanitize.sanitize_for_people(body[:MAX_SANITIZED_CHARACTERS])[:-CUT_EDGE_CHARACTERS]}…"


def _build_delivery_view(row: Row) -> DeliveryView:
    destination = delivery_rows.decode_destination(row["destination"])
    return DeliveryView(
        key=row["key"],
        kind=row["kind"],
        session_key=row["session_key"],
        channel=destination.channel,
        to=destination.to,
        state=row["state"],
        text=_sanitize_body(row["body"], row["stats"]),
        attempts=row["attempts"],
        error=row["error"],
        message_id=row["message_id"],
        created_at=row["created_at"],
        next_at=row["next_at"] if row["state"] == "pending" else None,
        expires_at=row["expires_at"] if row["state"] == "pending" else None,
        parts=row["parts"] or None,
        parts_sent=row["parts_sent"] if row["parts"] else None,
        settled_at=row["settled_at"],
    )
