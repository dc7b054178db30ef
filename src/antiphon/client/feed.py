"""State of a followed session, and the conversion of wire events to bus events."""

from __future__ import annotations

from collections import deque

import msgspec

from antiphon.bus import (
    ApprovalChanged,
    Delivered,
    Delta,
    Event,
    MessageAppended,
    RunChanged,
    SessionChanged,
    ToolPhase,
)
from antiphon.client.connection import Json
from antiphon.client.parsing import parse_approval_view, strip_client_marks

MAX_ENDED_RUNS_REMEMBERED = 256  # ended runs, so that no end is yielded twice
_RUN_STATE_BY_CHAT_STATE = {"final": "ok", "aborted": "cancelled", "error": "error"}


class FeedPosition:
    """How far a feed has come; it outlives the connections it is read over."""

    def __init__(self, session: str, after: int | None) -> None:
        self.key = session
        self.session_id: str | None = None
        self.seq = after
        self.active_runs: dict[str, None] = {}
        """Known runs that have not ended, in order."""
        self._pending_ends: list[tuple[int, RunChanged]] = []
        self._ended_runs: deque[str] = deque(maxlen=MAX_ENDED_RUNS_REMEMBERED)

    @property
    def subscribe_params(self) -> Json:
        params: Json = {"key": self.key, "afterSeq": self.seq, "sessionId": self.session_id}
        return {name: it for name, it in params.items() if it is not None}

    def apply_subscription(self, start: Json) -> None:
        """Take over the key that events will carry, and the conversation and position where these were unknown."""
        self.key = start["key"]
        self.session_id = self.session_id or start["sessionId"]
        self.seq = start["lastSeq"] if self.seq is None else self.seq

    def add_run_end(self, end: RunChanged, seq: int) -> None:
        """Add the end of a run, to be yielded once and after the message with this number."""
        self.active_runs.pop(end.run_id, None)
        if end.run_id not in self._ended_runs:
            self._ended_runs.append(end.run_id)
            self._pending_ends.append((seq, end))

    def take_due_ends(self, *, all_of_them: bool = False) -> list[RunChanged]:
        """Remove and return the ends whose messages have been yielded, or all of them."""
        count = sum(all_of_them or seq <= (self.seq or 0) for seq, _ in self._pending_ends)
        due, self._pending_ends = self._pending_ends[:count], self._pending_ends[count:]
        return [end for _, end in due]

    @property
    def is_waiting(self) -> bool:
        """Whether runs are active or ends are held back."""
        return bool(self._pending_ends or self.active_runs)

    def handle_event(self, name: str, payload: Json) -> Event | None:
        """Return a wire event as a bus event; None if it is of another session or not new."""
        event = self._parse_event(name, payload) if payload.get("sessionKey") == self.key else None
        run_id: str | None = (
            None if isinstance(event, Delivered | ApprovalChanged) else getattr(event, "run_id", None)
        )
        if run_id and run_id not in self._ended_runs:
            self.active_runs[run_id] = None
        return event

    def _parse_event(self, name: str, payload: Json) -> Event | None:
        match name:
            case "session.message":
                return self._parse_message(payload)
            case "session.gap":
                return self._parse_gap(payload)
            case "chat":
                return _parse_chat_event(payload)
            case "exec.approval.requested" | "exec.approval.resolved":
                return _parse_approval(payload)
            case "agent":
                return _parse_agent_event(payload)
            case _:
                return None

    def _parse_message(self, payload: Json) -> Event | None:
        session_id, seq = payload["sessionId"], payload["messageSeq"]
        if session_id == self.session_id and seq <= (self.seq or 0):
            return None
        self.session_id, self.seq = session_id, seq
        body = strip_client_marks(payload["message"])
        run_id = body.pop("runId", None)
        internal = bool(body.pop("internal", False))
        del body["id"], body["seq"]
        return MessageAppended(
            session_key=self.key,
            session_id=session_id,
            seq=seq,
            entry=payload["messageId"],
            body=msgspec.json.encode(body).decode(),
            run_id=run_id,
            internal=internal,
        )

    def _parse_gap(self, payload: Json) -> Event:
        self.session_id, self.seq = payload["sessionId"], 0
        return SessionChanged(session_key=self.key, reason="renewed", session_id=self.session_id)


def is_feed_ended(name: str, payload: Json, key: str) -> bool:
    """Return whether this event says that the gateway no longer follows the session."""
    return name == "session.gap" and payload.get("sessionKey") == key and payload.get("reason") == "ended"


def _parse_chat_event(payload: Json) -> Event:
    if payload["seq"] == 0:  # a delivery: the events of a run count from one
        return _parse_delivery(payload)
    return _parse_delta(payload) if payload["state"] == "delta" else _parse_run_end(payload)


def _parse_delta(payload: Json) -> Delta:
    return Delta(
        session_key=payload["sessionKey"],
        run_id=payload["runId"],
        number=payload["seq"],
        text=payload.get("deltaText") or "",
        restart=bool(payload.get("replace")),
    )


def _parse_delivery(payload: Json) -> Delivered:
    """Return the delivery of a `chat` event outside any run; the wire does not carry its kind."""
    return Delivered(
        session_key=payload["sessionKey"],
        key=payload["runId"],
        run_id=payload["runId"],
        kind="posted",
        text=_join_text(payload),
    )


def _parse_approval(payload: Json) -> ApprovalChanged:
    view = parse_approval_view(payload)
    return ApprovalChanged(
        approval_id=view.id,
        session_key=view.session_key,
        run_id=view.run_id,
        agent_id=view.agent_id,
        tool=view.tool,
        question=view.text,
        can_allow_always=view.can_allow_always,
        state=view.state,
        created_at=view.created_at,
        expires_at=view.expires_at,
        always=view.decision == "allow-always",
        decided_by=view.decided_by,
        decided_at=view.decided_at,
    )


def _join_text(payload: Json) -> str:
    message: Json = payload.get("message") or {}
    blocks: list[Json] = message.get("content") or []
    return "".join(block.get("text", "") for block in blocks if block.get("type") == "text")


def _parse_run_end(payload: Json) -> RunChanged:
    """Parse the last `chat` event of a run."""
    state = _RUN_STATE_BY_CHAT_STATE.get(payload["state"], "error")
    return RunChanged(
        session_key=payload["sessionKey"],
        run_id=payload["runId"],
        state="incomplete" if payload.get("stopReason") == "length" else state,
        reply=_join_text(payload) or None,
    )


def _parse_agent_event(payload: Json) -> Event | None:
    key, run_id, data = payload["sessionKey"], payload["runId"], payload["data"]
    match payload["stream"], data.get("phase"):
        case "lifecycle", "start":
            return RunChanged(session_key=key, run_id=run_id, state="running")
        case "tool", "update":
            partial = data["partialResult"]
            return ToolPhase(
                session_key=key,
                run_id=run_id,
                call_id=data["toolCallId"],
                name=data["name"],
                phase="update",
                output=partial["content"][0]["text"],
                output_bytes=partial["details"]["outputBytes"],
            )
        case "tool", phase:
            return ToolPhase(
                session_key=key,
                run_id=run_id,
                call_id=data["toolCallId"],
                name=data["name"],
                phase=str(phase),
                is_error=bool(data.get("isError")),
            )
        case "thinking", _:
            return Delta(session_key=key, run_id=run_id, number=0, thinking=data.get("delta") or "")
        case _:
            return None
