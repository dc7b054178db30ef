"""Converts wire payloads whose field names differ back into views."""

from __future__ import annotations

import msgspec

from antiphon.client.connection import Json
from antiphon.errors import NotFound
from antiphon.operations.types import ApprovalView, RunView, SessionView


def parse_session_view(row: Json) -> SessionView:
    own = {**row, "kind": row.get("sessionKind", row["kind"])}
    if row.get("modelProvider"):
        own["model"] = f"{row['modelProvider']}/{row['model']}"
    own.setdefault("agentId", None)
    return msgspec.convert(own, SessionView)


def parse_approval_view(payload: Json) -> ApprovalView:
    request = payload["request"]
    return ApprovalView(
        id=payload["id"],
        session_key=request["sessionKey"],
        run_id=request["runId"],
        agent_id=request["agentId"],
        tool=request["tool"],
        text=request["text"],
        can_allow_always="allow-always" in request["allowedDecisions"],
        state=payload["state"],
        decision=payload["decision"],
        decided_by=payload["resolvedBy"],
        created_at=payload["createdAtMs"],
        expires_at=payload["expiresAtMs"],
        decided_at=payload["resolvedAtMs"],
    )


def parse_run_view(payload: Json) -> RunView:
    if payload.get("run") is None:
        raise NotFound(
            f"Run {payload['runId']!r} was not found.",
            "Check the id; it is given when a message is accepted.",
        )
    return msgspec.convert(payload["run"], RunView)


def strip_client_marks(message: Json) -> Json:
    """Return a message without the fields that the gateway adds for other clients."""
    return {name: it for name, it in message.items() if name not in ("__openclaw", "idempotencyKey")}
