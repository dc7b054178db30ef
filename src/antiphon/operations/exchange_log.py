"""The log of exchanges for operators: who sent what to whom, its progress and its outcome."""

from __future__ import annotations

import asyncio

import msgspec

from antiphon import access, keys
from antiphon.access import Caller
from antiphon.engine.collaboration import exchanges
from antiphon.engine.outbox.redaction import redact
from antiphon.engine.runs import lifecycle
from antiphon.errors import Ambiguous, NotFound
from antiphon.operations.context import OperationContext
from antiphon.operations.request_validation import parse_row_cursor, validate_and_clamp
from antiphon.store import Row, Tx
from antiphon.views import ExchangeDetail, ExchangePage, ExchangeStep, ExchangeView

DEFAULT_EXCHANGES_PER_PAGE, MAX_EXCHANGES_PER_PAGE = 50, 500
MAX_EXCHANGES_COMPARED = 10_000  # the most recent ones, when only the beginning of an id is given
MAX_CANDIDATES = 5
ALL_SESSIONS_REFUSAL = ("what goes on between all sessions", "Read your own with sessions_history.")
MAX_SHOWN_CHARACTERS = 300  # of one text
# Characters searched for secrets; the last ones are dropped, where a cut secret would not be recognised.
MAX_SCANNED_CHARACTERS, CUT_EDGE_CHARACTERS = (
    600,
    200,
)


class ExchangeLogOperations(OperationContext):
    async def list_exchanges(
        self,
        caller: Caller,
        session: str | None = None,
        *,
        unsettled: bool = False,
        limit: int = DEFAULT_EXCHANGES_PER_PAGE,
        cursor: str | None = None,
    ) -> ExchangePage:
        """Return a page of exchanges; for operators that may read every session.

        `session` matches either side; `unsettled` leaves out exchanges that have ended.
        """
        access.require_operator(caller, "read", *ALL_SESSIONS_REFUSAL)
        most, before = validate_and_clamp(limit, 1, MAX_EXCHANGES_PER_PAGE, "limit"), parse_row_cursor(cursor)
        rows = await self._store.read(self._load_exchange_page, caller, session, unsettled, before, most + 1)
        shown = rows[:most]
        return ExchangePage(
            exchanges=await asyncio.to_thread(lambda: [_build_exchange_view(row) for row in shown]),
            next_cursor=str(shown[-1]["n"]) if len(rows) > len(shown) else None,
        )

    async def _load_exchange_page(
        self, tx: Tx, caller: Caller, session: str | None, unsettled: bool, before: int, limit: int
    ) -> list[Row]:
        if session is None:
            query = exchanges.SQL.page_unsettled if unsettled else exchanges.SQL.page
            return await tx.all(query, before=before, limit=limit, chars=MAX_SCANNED_CHARACTERS)
        row = await self._session_resolver.open(tx, caller, "read", session)
        query = exchanges.SQL.page_of_session_unsettled if unsettled else exchanges.SQL.page_of_session
        return await tx.all(
            query, session=row["id"], before=before, limit=limit, chars=MAX_SCANNED_CHARACTERS
        )

    async def get_exchange(self, caller: Caller, reference: str) -> ExchangeDetail:
        """Return one exchange with its full texts, secrets masked. `reference` is its id or the beginning of it.

        Raises:
            NotFound: no exchange has such an id.
            Ambiguous: several ids begin like this.
        """
        access.require_operator(caller, "read", *ALL_SESSIONS_REFUSAL)
        row, runs_of_it = await self._store.read(_load_exchange_with_runs, reference)
        return await asyncio.to_thread(_build_exchange_detail, row, runs_of_it)


async def _load_exchange_with_runs(tx: Tx, reference: str) -> tuple[Row, list[tuple[int | None, Row]]]:
    """Load an exchange and the runs that answered in it, each with its turn."""
    row = await tx.one(exchanges.SQL.by_id, id=reference) or await _find_by_id_prefix(tx, reference)
    ids: list[tuple[int | None, str]] = [(0, row["answered_by"] or row["id"])]
    ids += [(turn, f"turn:{row['id']}:{turn}") for turn in range(1, row["turn"] + 1)]
    ids.append((None, f"announce:{row['id']}"))
    found = [(turn, await tx.one(lifecycle.SQL.by_id, id=run_id, viewer=None)) for turn, run_id in ids]
    return row, [(turn, run) for turn, run in found if run is not None]


async def _find_by_id_prefix(tx: Tx, prefix: str) -> Row:
    found = await tx.all(
        exchanges.SQL.ids_with_prefix,
        prefix=prefix,
        length=len(prefix),
        recent=MAX_EXCHANGES_COMPARED,
        limit=MAX_CANDIDATES + 1,
    )
    if not found or not prefix:
        raise NotFound(
            f"Exchange {prefix[:80]!r} was not found.", "Use an id that `antiphon exchanges` shows."
        )
    if len(found) > 1:
        candidates = [row["id"] for row in found[:MAX_CANDIDATES]]
        raise Ambiguous(
            f"Several exchanges begin with {prefix[:80]!r}: {', '.join(candidates)}.",
            "Use more of the id.",
            candidates=candidates,
        )
    row = await tx.one(exchanges.SQL.by_id, id=found[0]["id"])
    assert row is not None
    return row


def _build_exchange_detail(row: Row, answers: list[tuple[int | None, Row]]) -> ExchangeDetail:
    view = msgspec.structs.replace(
        _build_exchange_view(row),
        message=_mask_secrets(row["message"]),
        latest_reply=_mask_secrets(row["latest_reply"]),
    )
    steps = [
        ExchangeStep(
            run_id=run["id"],
            session_key=keys.display_full_key(run["key"]),
            turn=turn,
            state=run["state"],
            reply=_mask_secrets(run["reply"]),
            error=_mask_secrets(run["error"]),
            at=run["ended_at"] or run["started_at"] or run["created_at"],
        )
        for turn, run in answers
    ]
    return ExchangeDetail(exchange=view, steps=steps)


def _mask_secrets(text: str | None) -> str | None:
    return redact(text) if text else None


def _build_exchange_view(row: Row) -> ExchangeView:
    requester = row["requester_key"]
    return ExchangeView(
        id=row["id"],
        requester_session_key=keys.display_full_key(requester) if requester else None,
        target_session_key=keys.display_full_key(row["target_key"]),
        phase=row["phase"],
        turn=row["turn"],
        turns=row["turns"],
        announced=row["announced"],
        current_run_id=row["current"] if row["settled_at"] is None else None,
        chain_id=row["chain"],
        hop=row["hop"],
        message=_shorten_masked(row["message"]),
        latest_reply=_shorten_masked(row["latest_reply"]),
        created_at=row["created_at"],
        settled_at=row["settled_at"],
    )


def _shorten_masked(text: str | None) -> str | None:
    """Return the text shortened, with secrets masked; None if it was never set or is deleted."""
    if not text:
        return None
    masked = redact(text)
    # A secret cut at the end is not recognised, so the end is not shown.
    if len(text) >= MAX_SCANNED_CHARACTERS:
        masked = masked[: max(0, len(masked) - CUT_EDGE_CHARACTERS)]
    return (
        masked
        if len(masked) <= MAX_SHOWN_CHARACTERS and len(text) < MAX_SCANNED_CHARACTERS
        else f"{masked[:MAX_SHOWN_CHARACTERS]}…"
    )
