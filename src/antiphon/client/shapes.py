"""What the wire calls otherwise than the views it is made of, turned back into these."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from antiphon.client.link import Json
from antiphon.views import HistoryPage, RunView, SessionView

if TYPE_CHECKING:
    from antiphon.operations import HistoryFilter


def session_view(row: Json) -> SessionView:
    own = {**row, "kind": row.get("sessionKind", row["kind"])}
    if row.get("modelProvider"):
        own["model"] = f"{row['modelProvider']}/{row['model']}"
    own.setdefault("agentId", None)
    return msgspec.convert(own, SessionView)


def run_view(payload: Json) -> RunView:
    """`run` is everything; a gateway that does not say it tells the most important."""
    if payload.get("run"):
        return msgspec.convert(payload["run"], RunView)
    began = payload.get("startedAt") or 0
    return RunView(
        run_id=payload["runId"],
        session_key=payload.get("sessionKey") or "",
        state=payload.get("state") or "running",
        created_at=began,
        started_at=began or None,
        ended_at=payload.get("endedAt"),
        reply=payload.get("reply"),
        error_code=payload.get("errorCode"),
        error=payload.get("error"),
    )


def item(message: Json) -> Json:
    """A message without the marks that are for other clients."""
    return {name: it for name, it in message.items() if name not in ("__openclaw", "idempotencyKey")}


def history_page(key: str, page: Json, found: list[Json], wanted: HistoryFilter) -> HistoryPage:
    """Of what was found, the part that was asked for."""
    more = len(found) > wanted.limit
    shown = found[-wanted.limit :] if wanted.after is None else found[: wanted.limit]
    edge = shown[0 if wanted.after is None else -1] if more else None
    return HistoryPage(
        session_key=key,
        session_id=page["sessionId"],
        messages=shown,
        total=page["totalMessages"],
        has_more=more,
        next_cursor=str(edge["seq"]) if edge else None,
    )
