"""Streams the growing answers of runs to connections, as `chat` and `agent` events.

Clients that assemble an answer get increments; the others get the full text so far, less often as it grows. Only the
current step of a run is streamed. A client that lags is skipped for the rest of the step and gets the complete entry
later.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from antiphon.bus import Delta, MessageAppended, RunChanged, ToolPhase
from antiphon.clock import Clock
from antiphon.engine.outbox import sanitize
from antiphon.gateway import wire
from antiphon.gateway.ws import frames
from antiphon.gateway.ws.connection import ConnectionSet, WebSocketConnection

MIN_DELTA_SECONDS, MAX_DELTA_SECONDS = 0.05, 0.5  # between two increments of an answer
DELTA_CHARACTERS_PER_SECOND = 25_000  # the longer the answer, the longer increments are collected
FULL_TEXT_INTERVAL_SECONDS = 0.15  # between two full texts of a growing answer
FULL_TEXT_GROWTH_FACTOR = 1.2  # growth after which the full text is sent again
# All full texts of an answer together have at most this many characters plus 1.5 times its length.
FREE_FULL_TEXT_CHARACTERS = 8_000
MAX_ENDED_RUNS_REMEMBERED = 4096
TOOL_EVENTS_CAPABILITY = "tool-events"

RunPhase = Literal["start", "end", "error"]
_DeltaFormat = Literal["increment", "text", "text_and_message"]


class StreamedRun(msgspec.Struct, eq=False):
    """A run in progress, and how much of its current step clients have been sent."""

    run_id: str
    session_key: str
    pieces: list[str] = msgspec.field(default_factory=list[str])
    """The text so far."""
    length: int = 0
    """Length of the text so far, in characters."""
    last_delta_number: int = 0
    has_missed_delta: bool = False
    """Whether a piece of the current step was lost: the rest of it is not streamed, its entry has all of it."""
    unsent: list[str] = msgspec.field(default_factory=list[str])
    """Text that readers of increments have not been sent yet."""
    unsent_thinking: list[str] = msgspec.field(default_factory=list[str])
    increments_due: float = 0.0
    full_text_characters_sent: int = 0
    """Length of all full texts of this step that have been sent."""
    next_full_text_length: int = 1
    """Length from which the full text is sent again."""
    full_text_due: float = 0.0
    timer: asyncio.TimerHandle | None = None
    caught_up_readers: set[WebSocketConnection] = msgspec.field(default_factory=set[WebSocketConnection])
    """Readers of increments that have been sent all of the text so far."""
    skipped_readers: set[WebSocketConnection] = msgspec.field(default_factory=set[WebSocketConnection])
    """Readers that get no more of this step's text: they lagged, or have the entry that completes it."""
    last_entry_seq: int = 0
    """Sequence number of the last entry of the run that has completed a step."""
    chat_seq: int = 0
    """Sequence number of events for readers of increments, without gaps."""
    full_text_seq: int = 0
    """Sequence number of events for readers of full texts."""
    agent_seq: int = 0
    final_message: msgspec.Raw | dict[str, Any] | None = None

    @property
    def text(self) -> str:
        if len(self.pieces) > 1:
            self.pieces = ["".join(self.pieces)]
        return self.pieces[0] if self.pieces else ""

    def begin_step(self) -> None:
        self.pieces.clear()
        self.unsent.clear()
        self.unsent_thinking.clear()
        self.has_missed_delta = False
        self.length = self.full_text_characters_sent = 0
        self.next_full_text_length = 1
        self.caught_up_readers.clear()
        self.skipped_readers.clear()
        self.cancel_timer()

    def cancel_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def build_payload(self, seq: int) -> dict[str, Any]:
        return {"runId": self.run_id, "sessionKey": wire.format_session_key(self.session_key), "seq": seq}


class RunStreams:
    """The runs in progress, and their events for the connections that may read."""

    def __init__(self, connections: ConnectionSet, clock: Clock) -> None:
        self._connections = connections
        self._clock = clock
        self._runs: dict[str, StreamedRun] = {}
        self._ended_runs: OrderedDict[str, None] = OrderedDict()
        """Runs whose end has been broadcast; after a gap, the event may arrive again."""

    def list_runs(self) -> list[StreamedRun]:
        return list(self._runs.values())

    def track_run(self, run_id: str, session_key: str) -> None:
        """Track an accepted run, so that its end is sent even if no other event of it arrives."""
        if run_id not in self._ended_runs:
            self._get_or_add_run(run_id, session_key)

    def forget_run(self, run_id: str) -> None:
        if run := self._runs.pop(run_id, None):
            run.cancel_timer()

    def forget_all_runs(self) -> None:
        for run_id in list(self._runs):
            self.forget_run(run_id)

    def remove_connection(self, connection: WebSocketConnection) -> None:
        for run in self._runs.values():
            run.caught_up_readers.discard(connection)
            run.skipped_readers.discard(connection)

    def send_from_beginning(self, connection: WebSocketConnection, session_key: str) -> None:
        """Send a connection the text so far with the next increment of each run of this session.

        A client that connects may not have looked at events before it subscribed.
        """
        for run in self._runs.values():
            if wire.format_session_key(run.session_key) == session_key:
                run.caught_up_readers.discard(connection)

    def _get_or_add_run(self, run_id: str, session_key: str) -> StreamedRun:
        run = self._runs.get(run_id)
        if run is None:
            run = self._runs[run_id] = StreamedRun(run_id, session_key)
        return run

    # --- steps ---

    def handle_message(self, event: MessageAppended, role: object) -> None:
        """Complete the current step of the entry's run, if it is an answer."""
        if event.run_id is None:
            return
        run = self._get_or_add_run(event.run_id, event.session_key)
        if role == "assistant":
            self._send_increments(run)
            run.final_message = msgspec.Raw(event.body.encode())
            run.last_entry_seq = event.seq
            run.begin_step()

    def complete_step(self, message: dict[str, Any], readers: Iterable[WebSocketConnection]) -> None:
        """Send readers the rest of a step before its entry, and nothing of it afterwards.

        Subscriptions learn of an entry by themselves, possibly before the hub does.
        """
        run_id = message.get("runId")
        if not isinstance(run_id, str) or message.get("role") != "assistant":  # an import may hold anything
            return
        run = self._runs.get(run_id)
        if run and message["seq"] > run.last_entry_seq:
            self._send_increments(run)
            run.skipped_readers.update(readers)

    def handle_delta(self, event: Delta) -> None:
        run = self._get_or_add_run(event.run_id, event.session_key)
        is_run_again = event.number == 1 and run.last_delta_number > 0
        if event.restart or is_run_again:
            run.begin_step()
            self._send_restart(run)
        elif event.number != run.last_delta_number + 1:
            run.has_missed_delta = True
        run.last_delta_number = event.number
        if event.text and not run.has_missed_delta:
            run.pieces.append(event.text)
            run.unsent.append(event.text)
            run.length += len(event.text)
        if event.thinking:
            run.unsent_thinking.append(event.thinking)
        self._stream_run(run)

    def handle_tool_phase(self, event: ToolPhase) -> None:
        run = self._get_or_add_run(event.run_id, event.session_key)
        self._send_increments(run)
        data: dict[str, Any] = {
            "phase": event.phase,
            "name": event.name,
            "toolCallId": event.call_id,
            "isError": event.is_error,
        }
        if event.phase == "update":
            data["partialResult"] = {
                "content": [{"type": "text", "text": event.output}],
                "details": {"outputBytes": event.output_bytes},
            }
        listeners = [
            connection
            for connection in self._connections.readers
            if connection.has_capability(TOOL_EVENTS_CAPABILITY)
        ]
        self._send_agent_event(run, "tool", data, to=listeners, droppable=event.phase == "update")

    # --- growing text ---

    def _stream_run(self, run: StreamedRun) -> None:
        """Send what is due of a run, and schedule the rest."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        if (run.unsent or run.unsent_thinking) and now >= run.increments_due:
            self._send_increments(run)
        if run.length >= run.next_full_text_length and now >= run.full_text_due:
            self._send_full_text(run)
        due = [run.increments_due] if run.unsent or run.unsent_thinking else []
        due += [run.full_text_due] if run.length >= run.next_full_text_length else []
        if due and run.timer is None:
            run.timer = loop.call_at(min(due), self._on_timer, run)

    def _on_timer(self, run: StreamedRun) -> None:
        run.timer = None
        self._stream_run(run)

    def _send_increments(self, run: StreamedRun) -> None:
        """Send the new text to readers that have the rest, and the full text so far to the others."""
        if not run.unsent and not run.unsent_thinking:
            return
        if run.unsent_thinking:
            readers = [each for each in self._connections.readers if each not in run.skipped_readers]
            thinking = {"delta": "".join(run.unsent_thinking)}
            self._send_agent_event(run, "thinking", thinking, to=readers, droppable=True)
            run.unsent_thinking.clear()
        if run.unsent:
            self._send_chat_deltas(run, "".join(run.unsent))
            run.unsent.clear()
        interval = min(max(run.length / DELTA_CHARACTERS_PER_SECOND, MIN_DELTA_SECONDS), MAX_DELTA_SECONDS)
        run.increments_due = asyncio.get_running_loop().time() + interval

    def _send_chat_deltas(self, run: StreamedRun, increment: str) -> None:
        run.chat_seq += 1
        texts: dict[_DeltaFormat, str] = {}
        for connection in self._connections.readers:
            if not connection.reads_increments or connection in run.skipped_readers:
                continue
            if connection in run.caught_up_readers:
                format: _DeltaFormat = "increment"
            else:
                format = "text" if connection.has_delta_capability else "text_and_message"
            if (text := texts.get(format)) is None:
                text = texts[format] = self._encode_chat_delta(run, increment, format)
            if connection.send_event(text, droppable=True):
                run.caught_up_readers.add(connection)
            else:
                run.caught_up_readers.discard(connection)
                run.skipped_readers.add(connection)

    def _encode_chat_delta(self, run: StreamedRun, increment: str, format: _DeltaFormat) -> str:
        payload: dict[str, Any] = {**run.build_payload(run.chat_seq), "state": "delta"}
        payload["deltaText"] = increment if format == "increment" else run.text
        if format != "increment" and run.length > len(increment):
            payload["replace"] = True
        if format == "text_and_message":
            payload["message"] = self._build_message(run.text)
        return frames.encode_event("chat", payload)

    def _send_full_text(self, run: StreamedRun) -> None:
        """Send the full text so far to clients that do not assemble increments."""
        readers = [
            connection
            for connection in self._connections.readers
            if not connection.reads_increments and connection not in run.skipped_readers
        ]
        if readers:
            run.full_text_seq += 1
            payload = {
                **run.build_payload(run.full_text_seq),
                "state": "delta",
                "message": self._build_message(run.text),
                "deltaText": "",  # clients of protocol 4 drop the event without this field
            }
            chat = frames.encode_event("chat", payload)
            for connection in readers:
                if not connection.quirks.reads_agent_text:
                    connection.send_event(chat, droppable=True)
            agent_text_readers = [connection for connection in readers if connection.quirks.reads_agent_text]
            if agent_text_readers:
                self._send_agent_event(
                    run, "assistant", {"text": run.text}, to=agent_text_readers, droppable=True
                )
        run.full_text_characters_sent += run.length
        affordable = 2 * (run.full_text_characters_sent - FREE_FULL_TEXT_CHARACTERS)
        run.next_full_text_length = max(int(run.length * FULL_TEXT_GROWTH_FACTOR), run.length + 1, affordable)
        run.full_text_due = asyncio.get_running_loop().time() + FULL_TEXT_INTERVAL_SECONDS

    def _send_restart(self, run: StreamedRun) -> None:
        """Tell clients to discard the text of the current step."""
        run.chat_seq += 1
        run.full_text_seq += 1
        for connection in self._connections.readers:
            seq = run.chat_seq if connection.reads_increments else run.full_text_seq
            payload: dict[str, Any] = {**run.build_payload(seq), "state": "delta"}
            if not connection.has_delta_capability:
                payload["message"] = self._build_message("")
            connection.send_event(frames.encode_event("chat", {**payload, "deltaText": "", "replace": True}))

    def _build_message(self, text: str) -> dict[str, Any]:
        return wire.format_assistant_text(text, self._clock.now())

    # --- start and end ---

    def handle_run_change(self, event: RunChanged) -> RunPhase | None:
        """Broadcast the start or end of a run; return which it was, None if there was nothing to send."""
        if event.run_id in self._ended_runs:
            self.forget_run(event.run_id)
            return None
        run = self._get_or_add_run(event.run_id, event.session_key)
        if event.state == "queued":
            return None
        if event.state == "running":
            self._send_agent_event(run, "lifecycle", {"phase": "start", "startedAt": self._clock.now()})
            return "start"
        self._send_increments(run)
        self.forget_run(event.run_id)
        self._ended_runs[event.run_id] = None
        while len(self._ended_runs) > MAX_ENDED_RUNS_REMEMBERED:
            self._ended_runs.popitem(last=False)
        return self._send_end(run, event)

    def _send_end(self, run: StreamedRun, event: RunChanged) -> RunPhase:
        if event.needs_sanitizing:
            run.final_message = (
                self._build_message(sanitize.sanitize_for_people(event.reply)) if event.reply else None
            )
        elif run.final_message is None and event.reply:
            run.final_message = self._build_message(event.reply)
        phase: RunPhase = "end" if event.state in ("ok", "incomplete") else "error"
        lifecycle: dict[str, Any] = {"phase": phase, "endedAt": event.ended_at or self._clock.now()}
        if phase == "error":
            lifecycle["error"] = event.error
        run.agent_seq += 1
        agent = self._encode_agent_event(run, "lifecycle", lifecycle)
        final = _build_final_payload(event, run)
        chats: dict[bool, str] = {}
        for connection in self._connections.readers:
            connection.send_event(agent, ended_run=run.run_id)
            if event.quiet:
                continue
            reads_increments = connection.reads_increments
            if (chat := chats.get(reads_increments)) is None:
                seq = run.chat_seq if reads_increments else run.full_text_seq
                chat = chats[reads_increments] = frames.encode_event(
                    "chat", {**run.build_payload(seq + 1), **final}
                )
            connection.send_event(chat, ended_run=run.run_id)
        return phase

    def _send_agent_event(
        self,
        run: StreamedRun,
        stream: str,
        data: dict[str, Any],
        *,
        to: Iterable[WebSocketConnection] | None = None,
        droppable: bool = False,
    ) -> None:
        run.agent_seq += 1
        text = self._encode_agent_event(run, stream, data)
        for connection in self._connections.readers if to is None else to:
            connection.send_event(text, droppable=droppable)

    def _encode_agent_event(self, run: StreamedRun, stream: str, data: dict[str, Any]) -> str:
        payload = {
            **run.build_payload(run.agent_seq),
            "stream": stream,
            "ts": self._clock.now(),
            "data": data,
        }
        return frames.encode_event("agent", payload)


def _build_final_payload(event: RunChanged, run: StreamedRun) -> dict[str, Any]:
    """Return the payload of the last `chat` event of a run."""
    spent = event.usage
    usage = {"usage": {"input": spent.input, "output": spent.output, "cost": spent.cost}} if spent else {}
    message = {"message": run.final_message} if run.final_message else {}
    match event.state:
        case "ok":
            return {"state": "final", "stopReason": "stop", **message, **usage}
        case "incomplete":
            return {"state": "final", "stopReason": "length", "errorMessage": event.error, **message, **usage}
        case "cancelled":
            return {"state": "aborted", "stopReason": "rpc", **message}
        case state:
            kind = "timeout" if state == "timeout" else "unknown"
            return {"state": "error", "errorMessage": event.error, "errorKind": kind, **usage}
