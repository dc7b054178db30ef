"""How sessions and messages look on the wire: the views of `operations` under the names that clients read."""

from __future__ import annotations

from typing import Any

import msgspec

from antiphon import keys
from antiphon.views import SessionView

CHAT_KINDS = {"group": "group"}
STATUS = {"running": "running", "idle": "done"}


def shown(key: str) -> str:
    """A stored key as operators see it; the global session has no key that could be said."""
    return keys.display_text(key, viewer_agent_id=None)


def session_row(view: SessionView) -> dict[str, Any]:
    """A row of `sessions.list`. `kind` is what clients know; `sessionKind` is ours."""
    row: dict[str, Any] = msgspec.to_builtins(view)
    provider, _, model = (view.model or "").rpartition("/")
    row["kind"] = CHAT_KINDS.get(view.kind, "direct")
    row["sessionKind"] = view.kind
    row["hasActiveRun"] = view.state == "running"
    row["activeRunIds"] = [view.active_run_id] if view.active_run_id else []
    row["status"] = STATUS[view.state]
    row["isMain"] = view.kind == "main"
    if view.context_tokens is not None:  # to clients, `contextTokens` is how much would fit
        row["usedTokens"] = row.pop("contextTokens")
    if view.model:
        row["model"] = model
        if provider:
            row["modelProvider"] = provider
    if view.parent_key:
        row |= {"spawnedBy": view.parent_key, "parentSessionKey": view.parent_key}
    return row


def message(item: dict[str, Any]) -> dict[str, Any]:
    """A history item: the raw entry, and where clients look for its number and the run it belongs to."""
    run_id = item.get("runId")
    marks = {"id": item.get("id"), "seq": item.get("seq")}
    if run_id:
        marks["runId"] = run_id
        if item.get("role") == "user":  # by this a client finds the message it has already shown
            item = {**item, "idempotencyKey": f"{run_id}:user"}
    return {**item, "__openclaw": marks}


def appended(body: str, entry: str, seq: int, run_id: str | None) -> dict[str, Any]:
    """An entry as it is told of live; damaged ones are told of, too."""
    try:
        item: dict[str, Any] = msgspec.json.decode(body, type=dict[str, Any])
    except msgspec.MsgspecError:
        item = {
            "role": "assistant",
            "content": [],
            "errorMessage": "This entry is damaged and cannot be shown.",
        }
    given = {"runId": run_id} if run_id else {}
    return message({**item, "id": entry, "seq": seq, **given})
