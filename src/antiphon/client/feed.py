"""Following a session from outside: where a feed is, and what the events of the wire are to whoever follows."""

from __future__ import annotations

from collections import deque

import msgspec

from antiphon.bus import Delivered, Delta, Event, MessageAppended, RunChanged, SessionChanged, ToolPhase
from antiphon.client.link import Json
from antiphon.client.shapes import item

REMEMBERED = 256  # runs whose end was told
_STATES = {"final": "ok", "aborted": "cancelled", "error": "error"}


class Place:
    """How far a feed has come, over however many connections."""

    def __init__(self, session: str, after: int | None) -> None:
        self.key = session
        self.session_id: str | None = None
        self.seq = after
        self.under_way: dict[str, None] = {}
        """Runs that were heard of and have not ended, in their order."""
        self._ends: list[tuple[int, RunChanged]] = []
        self._over: deque[str] = deque(maxlen=REMEMBERED)

    @property
    def params(self) -> Json:
        given: Json = {"key": self.key, "afterSeq": self.seq, "sessionId": self.session_id}
        return {name: it for name, it in given.items() if it is not None}

    def begin(self, start: Json) -> None:
        """Subscribed: under the key that events will name, and from where it was not known by now."""
        self.key = start["key"]
        self.session_id = self.session_id or start["sessionId"]
        self.seq = start["lastSeq"] if self.seq is None else self.seq

    def end(self, end: RunChanged, seq: int) -> None:
        """A run has ended, which is to be told once, and after the message with that number."""
        self.under_way.pop(end.run_id, None)
        if end.run_id not in self._over:
            self._over.append(end.run_id)
            self._ends.append((seq, end))

    def due(self, *, all_of_them: bool = False) -> list[RunChanged]:
        """Ends that can be told now."""
        count = sum(all_of_them or seq <= (self.seq or 0) for seq, _ in self._ends)
        told, self._ends = self._ends[:count], self._ends[count:]
        return [end for _, end in told]

    @property
    def waiting(self) -> bool:
        """Whether something has to come yet."""
        return bool(self._ends or self.under_way)

    def event(self, name: str, payload: Json) -> Event | None:
        """What an event of the wire is, if it is of this session and new."""
        event = self._read(name, payload) if payload.get("sessionKey") == self.key else None
        run_id: str | None = None if isinstance(event, Delivered) else getattr(event, "run_id", None)
        if run_id and run_id not in self._over:
            self.under_way[run_id] = None
        return event

    def _read(self, name: str, payload: Json) -> Event | None:
        match name:
            case "session.message":
                return self._message(payload)
            case "session.gap":
                return self._gap(payload)
            case "chat" if payload["seq"] == 0:  # the events of a run count from one
                return _delivered(payload)
            case "chat":
                return _delta(payload) if payload["state"] == "delta" else _end(payload)
            case "agent":
                return _phase(payload)
            case _:
                return None

    def _message(self, payload: Json) -> Event | None:
        session_id, seq = payload["sessionId"], payload["messageSeq"]
        if session_id == self.session_id and seq <= (self.seq or 0):
            return None
        self.session_id, self.seq = session_id, seq
        body = item(payload["message"])
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

    def _gap(self, payload: Json) -> Event:
        self.session_id, self.seq = payload["sessionId"], 0
        return SessionChanged(session_key=self.key, reason="renewed", session_id=self.session_id)


def ended(name: str, payload: Json, key: str) -> bool:
    """Whether the gateway does not follow this session any longer."""
    return name == "session.gap" and payload.get("sessionKey") == key and payload.get("reason") == "ended"


def _delta(payload: Json) -> Delta:
    return Delta(
        session_key=payload["sessionKey"],
        run_id=payload["runId"],
        number=payload["seq"],
        text=payload.get("deltaText") or "",
        restart=bool(payload.get("replace")),
    )


def _delivered(payload: Json) -> Delivered:
    """Words that were posted; the wire does not say what they are, only where they stand."""
    return Delivered(
        session_key=payload["sessionKey"],
        key=payload["runId"],
        run_id=payload["runId"],
        kind="posted",
        text=_words(payload),
    )


def _words(payload: Json) -> str:
    message: Json = payload.get("message") or {}
    blocks: list[Json] = message.get("content") or []
    return "".join(block.get("text", "") for block in blocks if block.get("type") == "text")


def _end(payload: Json) -> RunChanged:
    """The last `chat` event of a run."""
    state = _STATES.get(payload["state"], "error")
    return RunChanged(
        session_key=payload["sessionKey"],
        run_id=payload["runId"],
        state="incomplete" if payload.get("stopReason") == "length" else state,
        reply=_words(payload) or None,
    )


def _phase(payload: Json) -> Event | None:
    key, run_id, data = payload["sessionKey"], payload["runId"], payload["data"]
    match payload["stream"], data.get("phase"):
        case "lifecycle", "start":
            return RunChanged(session_key=key, run_id=run_id, state="running")
        case "tool", phase:
            return ToolPhase(
                session_key=key,
                run_id=run_id,
                call_id=data["toolCallId"],
                name=data["name"],
                phase=str(phase),
                is_error=bool(data.get("isError")),
            )
        case _:
            return None
