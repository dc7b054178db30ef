"""Broadcasts live events to all connections: `chat`, `agent`, `sessions.changed`, ticks and presence.

Each event is encoded once. Events are hints about durable rows and may be lost; clients that must not miss anything
wait for a run's end (`agent.wait`), subscribe to messages (`subscriptions`) or read lists again.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import msgspec

from antiphon import __version__
from antiphon.access import READ_SCOPE
from antiphon.bus import (
    ALL_SESSIONS_TOPIC,
    Delivered,
    Delta,
    Event,
    Gap,
    MessageAppended,
    RunChanged,
    SessionChanged,
    ToolPhase,
)
from antiphon.engine.outbox import sanitize
from antiphon.errors import AntiphonError, NotFound
from antiphon.gateway import wire
from antiphon.gateway.session_counts import SessionCounts
from antiphon.gateway.state import GatewayState
from antiphon.gateway.subscriptions import READ_ONLY_CALLER, Subscriptions
from antiphon.gateway.ws import frames
from antiphon.gateway.ws.connection import WebSocketConnection
from antiphon.messages import INJECTED_MODEL
from antiphon.views import build_run_ended_event

log = logging.getLogger(__name__)

EVENT_NAMES = [
    "agent",
    "chat",
    "connect.challenge",
    "presence",
    "session.gap",
    "session.message",
    "sessions.changed",
    "shutdown",
    "tick",
]
CHANGE_GATHER_SECONDS = 0.1  # how long changes of a session are collected before its row is read
MAX_SESSIONS_PER_GATHERING = 500
MIN_DELTA_SECONDS, MAX_DELTA_SECONDS = 0.05, 0.5  # between two increments of an answer
DELTA_CHARACTERS_PER_SECOND = 25_000  # the longer the answer, the longer increments are collected
WHOLE_INTERVAL_SECONDS = 0.15  # between two whole texts of a growing answer
WHOLE_GROWTH_FACTOR = 1.2  # growth after which the whole text is sent again
# All whole texts of an answer together have at most this many characters plus 1.5 times its length.
FREE_WHOLE_CHARACTERS = 8_000
REVOCATION_CHECK_SECONDS = 0.5
TOOL_EVENTS_CAPABILITY = "tool-events"
RESTART_DELAY_SECONDS = 1.0  # before a failed broadcast task is restarted
PRESENCE_INTERVAL_SECONDS = 1.0  # between two presence events
MAX_ENDED_RUNS_REMEMBERED = 4096
HEARTBEAT_DISABLED = {
    "enabled": False,
    "every": "disabled",
    "everyMs": None,
    "prompt": "",
    "target": "none",
    "ackMaxChars": 0,
}
END_EVENT_DELAY_SECONDS = 0.04  # see `Hub.track_accepted_run`


class _StreamedRun(msgspec.Struct, eq=False):
    """A run in progress, and how much of it clients have been sent. Only its current step is streamed."""

    session_key: str
    pieces: list[str] = msgspec.field(default_factory=list[str])
    """The text so far."""
    length: int = 0
    """Length of the text so far, in characters."""
    unsent: list[str] = msgspec.field(default_factory=list[str])
    """Text that readers of increments have not been sent yet."""
    unsent_thinking: list[str] = msgspec.field(default_factory=list[str])
    increments_due: float = 0.0
    whole_spent: int = 0
    """Length of all whole texts of this step that have been sent."""
    next_whole_length: int = 1
    """Length from which the whole text is sent again."""
    whole_due: float = 0.0
    timer: asyncio.TimerHandle | None = None
    followers: set[WebSocketConnection] = msgspec.field(default_factory=set[WebSocketConnection])
    """Readers of increments that have been sent all of the text so far."""
    left_out: set[WebSocketConnection] = msgspec.field(default_factory=set[WebSocketConnection])
    """Readers that get no more of this step's text: they lagged, or have the entry that completes it."""
    seq: int = 0
    """Sequence number of the last entry of the run that has completed a step."""
    chat_seq: int = 0
    """Sequence number of events for readers of increments, without gaps."""
    whole_seq: int = 0
    """Sequence number of events for readers of whole texts."""
    agent_seq: int = 0
    message: msgspec.Raw | dict[str, Any] | None = None

    @property
    def text(self) -> str:
        if len(self.pieces) > 1:
            self.pieces = ["".join(self.pieces)]
        return self.pieces[0] if self.pieces else ""

    def begin_step(self) -> None:
        self.pieces.clear()
        self.unsent.clear()
        self.unsent_thinking.clear()
        self.length = self.whole_spent = 0
        self.next_whole_length = 1
        self.followers.clear()
        self.left_out.clear()
        self.cancel_timer()

    def cancel_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class Hub:
    def __init__(self, gateway: GatewayState) -> None:
        self._gateway = gateway
        self._clock = gateway.app.clock
        self._operations = gateway.app.operations
        self.subscriptions = Subscriptions(self._operations, self._complete_step)
        config = gateway.app.config
        self._agents, self._default_agent = config.agent_ids, config.default_agent_id
        self.session_counts = SessionCounts(
            self._operations, self._clock, self._agents, gateway.database_path
        )
        self.connections: set[WebSocketConnection] = set()
        self._runs: dict[str, _StreamedRun] = {}
        self._ended_runs: OrderedDict[str, None] = OrderedDict()
        """Runs whose end has been broadcast; after a gap, the event may arrive again."""
        self._changes: dict[str, dict[str, dict[str, Any]]] = {}
        """Latest changes by session and by phase or reason."""
        self._changed = asyncio.Event()
        self._delayed_ends: dict[tuple[WebSocketConnection, str], float] = {}
        self._presence_version = 1
        self._presence_changed = asyncio.Event()

    async def run(self) -> None:
        """Broadcast until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(_run_forever(lambda: self._listen(ALL_SESSIONS_TOPIC)))
            group.create_task(_run_forever(lambda: self._listen("sessions")))
            lasting = (
                self._run_change_broadcasts,
                self._run_presence_broadcasts,
                self._run_ticks,
                self._close_revoked,
                self.session_counts.run,
            )
            for work in lasting:
                group.create_task(_run_forever(work))

    # --- presence and health ---

    def add_connection(self, connection: WebSocketConnection) -> None:
        self.connections.add(connection)
        self._presence_changed.set()

    def remove_connection(self, connection: WebSocketConnection) -> None:
        self.subscriptions.remove_connection(connection)
        for run in self._runs.values():
            run.followers.discard(connection)
            run.left_out.discard(connection)
        if connection in self.connections:
            self.connections.discard(connection)
            self._presence_changed.set()

    @property
    def state_version(self) -> dict[str, int]:
        return {"presence": self._presence_version, "health": 1}

    def list_presence(self) -> list[dict[str, Any]]:
        """Return at most 100 of the connected clients."""
        found: list[dict[str, Any]] = []
        for connection in self.connections:
            if (client := connection.client) and len(found) < 100:
                entry = {
                    "host": client.name or client.id,
                    "ip": client.address,
                    "version": client.version,
                    "platform": client.platform,
                    "mode": client.mode,
                    "deviceId": client.device,
                    "instanceId": client.instance,
                    "roles": [client.role],
                    "scopes": list(client.scopes),
                    "ts": connection.opened_at,
                    "reason": "connect",
                }
                found.append({name: value for name, value in entry.items() if value})
        return found

    def build_health(self) -> dict[str, Any]:
        """Return the health of the gateway from memory: it is requested thousands of times a second."""
        return {
            "ok": True,
            "ts": self._clock.now(),
            "durationMs": 0,
            "version": __version__,
            "channels": {},
            "channelOrder": [],
            "channelLabels": {},
            "heartbeatSeconds": 0,
            "defaultAgentId": self._default_agent,
            "agents": [
                {
                    "agentId": agent,
                    "isDefault": agent == self._default_agent,
                    "heartbeat": HEARTBEAT_DISABLED,
                    "sessions": self.session_counts.get_counts(agent),
                }
                for agent in self._agents
            ],
            "sessions": self.session_counts.get_counts(None),
        }

    def track_accepted_run(self, connection: WebSocketConnection, run_id: str, session_key: str) -> None:
        """Track an accepted run, so that its end is sent even if no other event of it arrives.

        `openclaw-tui` loses track of an end that follows the acceptance immediately, so it gets that event later.
        """
        if run_id not in self._ended_runs:
            self._get_or_add_run(run_id, session_key)
        if connection.client and connection.client.id == "openclaw-tui":
            self._delayed_ends[connection, run_id] = (
                asyncio.get_running_loop().time() + END_EVENT_DELAY_SECONDS
            )

    # --- events of the bus ---

    async def _listen(self, topic: str) -> None:
        async with self._gateway.app.bus.listen(topic) as events:
            while True:
                event = await events.get()
                if event is None or not self.connections:
                    self._forget_runs()
                    continue
                try:
                    if isinstance(event, Gap):
                        await self._recover_ended_runs()
                    else:
                        self._handle_event(event)
                except Exception:
                    log.exception("An event was not told")

    def _handle_event(self, event: Event) -> None:
        match event:
            case MessageAppended():
                self._handle_message(event)
            case Delta():
                self._handle_delta(event)
            case ToolPhase():
                self._handle_tool_phase(event)
            case RunChanged():
                self._handle_run_change(event)
            case Delivered():
                self._handle_delivery(event)
            case SessionChanged() if event.reason not in ("message", "renewed"):
                self._record_session_change(event.session_key, {"reason": event.reason})
            case _:
                pass

    async def _recover_ended_runs(self) -> None:
        """Send the ends of runs that were missed because events were lost."""
        for run_id, run in list(self._runs.items()):
            try:
                view = await self._operations.get_run(READ_ONLY_CALLER, run_id)
            except NotFound:
                self._runs.pop(run_id, None)
                continue
            if view.has_ended:
                self._handle_run_change(build_run_ended_event(run.session_key, view))

    # --- messages ---

    def _handle_message(self, event: MessageAppended) -> None:
        run = self._get_or_add_run(event.run_id, event.session_key)
        message = wire.format_appended_entry(
            event.body, event.entry, event.seq, event.run_id, internal=event.internal
        )
        if run and message.get("role") == "assistant":
            self._send_increments(event.run_id or "", run)
            run.message = msgspec.Raw(event.body.encode())
            run.seq = event.seq
            run.begin_step()
        key = wire.format_session_key(event.session_key)
        injected = message.get("model") == INJECTED_MODEL and "provenance" not in message
        if event.run_id is None and injected and not event.internal:
            said = {"runId": f"inject-{event.entry}", "sessionKey": key, "seq": 0, "state": "final"}
            chat = frames.encode_event("chat", {**said, "message": message})
            for connection in self._iter_readers():
                if not self.subscriptions.is_subscribed(
                    connection, key
                ):  # subscribers get the message itself
                    connection.send_event(chat)
        text = None
        for connection in self.connections:
            if connection.is_subscribed_to_all_sessions and not self.subscriptions.is_subscribed(
                connection, key
            ):
                text = text or frames.encode_event(
                    "session.message",
                    {
                        "sessionKey": key,
                        "sessionId": event.session_id,
                        "message": message,
                        "messageId": event.entry,
                        "messageSeq": event.seq,
                    },
                )
                connection.send_event(text)
        facts = {"phase": "message", "messageId": event.entry, "messageSeq": event.seq, "runId": event.run_id}
        self._record_session_change(event.session_key, facts)

    def _complete_step(self, message: dict[str, Any], readers: Iterable[WebSocketConnection]) -> None:
        """Send readers the rest of a step before its entry, and nothing of it afterwards.

        Subscriptions learn of an entry by themselves, possibly before the hub does.
        """
        run_id = message.get("runId")
        if not isinstance(run_id, str) or message.get("role") != "assistant":  # an import may hold anything
            return
        run = self._runs.get(run_id)
        if run and message["seq"] > run.seq:
            self._send_increments(run_id, run)
            run.left_out.update(readers)

    # --- streamed text ---

    def _handle_delta(self, event: Delta) -> None:
        run = self._get_or_add_run(event.run_id, event.session_key)
        assert run is not None
        if event.restart:
            run.begin_step()
            self._send_restart(event.run_id, run)
        if event.text:
            run.pieces.append(event.text)
            run.unsent.append(event.text)
            run.length += len(event.text)
        if event.thinking:
            run.unsent_thinking.append(event.thinking)
        self._stream_run(event.run_id, run)

    def _stream_run(self, run_id: str, run: _StreamedRun) -> None:
        """Send what is due of a run, and schedule the rest."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        if (run.unsent or run.unsent_thinking) and now >= run.increments_due:
            self._send_increments(run_id, run)
        if run.length >= run.next_whole_length and now >= run.whole_due:
            self._send_whole_text(run_id, run)
        due = [run.increments_due] if run.unsent or run.unsent_thinking else []
        due += [run.whole_due] if run.length >= run.next_whole_length else []
        if due and run.timer is None:
            run.timer = loop.call_at(min(due), self._on_stream_timer, run_id)

    def _on_stream_timer(self, run_id: str) -> None:
        if run := self._runs.get(run_id):
            run.timer = None
            self._stream_run(run_id, run)

    def _send_increments(self, run_id: str, run: _StreamedRun) -> None:
        """Send the new text to readers that have the rest, and the whole text so far to the others."""
        if run.unsent_thinking:
            self._send_agent_event(
                run_id, run, "thinking", {"delta": "".join(run.unsent_thinking)}, droppable=True
            )
            run.unsent_thinking.clear()
        if run.unsent:
            self._send_chat_deltas(run_id, run, "".join(run.unsent))
            run.unsent.clear()
        pace = min(max(run.length / DELTA_CHARACTERS_PER_SECOND, MIN_DELTA_SECONDS), MAX_DELTA_SECONDS)
        run.increments_due = asyncio.get_running_loop().time() + pace

    def _send_chat_deltas(self, run_id: str, run: _StreamedRun, increment: str) -> None:
        run.chat_seq += 1
        texts: dict[bool | None, str] = {}  # None: for followers; else by whether the reader knows increments
        for connection in self._iter_readers():
            if not connection.reads_increments or connection in run.left_out:
                continue
            kind = None if connection in run.followers else connection.has_delta_capability
            if (text := texts.get(kind)) is None:
                text = texts[kind] = self._encode_chat_delta(run_id, run, increment, kind)
            if connection.send_event(text, droppable=True):
                run.followers.add(connection)
            else:
                run.followers.discard(connection)
                run.left_out.add(connection)

    def _encode_chat_delta(self, run_id: str, run: _StreamedRun, increment: str, kind: bool | None) -> str:
        payload: dict[str, Any] = {**self._build_run_payload(run_id, run, run.chat_seq), "state": "delta"}
        payload["deltaText"] = increment if kind is None else run.text
        if kind is not None and run.length > len(increment):
            payload["replace"] = True
        if kind is False:
            payload["message"] = self._build_assistant_message(run.text)
        return frames.encode_event("chat", payload)

    def _send_whole_text(self, run_id: str, run: _StreamedRun) -> None:
        """Send the whole text so far to clients that do not assemble increments; the longer it is, the less often."""
        readers = [
            connection
            for connection in self._iter_readers()
            if not connection.reads_increments and connection not in run.left_out
        ]
        if readers:
            run.whole_seq += 1
            payload = {
                **self._build_run_payload(run_id, run, run.whole_seq),
                "state": "delta",
                "message": self._build_assistant_message(run.text),
                "deltaText": "",  # clients of protocol 4 drop the event without this field
            }
            chat = frames.encode_event("chat", payload)
            for connection in readers:
                if not connection.reads_agent_text:
                    connection.send_event(chat, droppable=True)
            apps = [connection for connection in readers if connection.reads_agent_text]
            if apps:
                self._send_agent_event(run_id, run, "assistant", {"text": run.text}, to=apps, droppable=True)
        run.whole_spent += run.length
        affordable = 2 * (run.whole_spent - FREE_WHOLE_CHARACTERS)
        run.next_whole_length = max(int(run.length * WHOLE_GROWTH_FACTOR), run.length + 1, affordable)
        run.whole_due = asyncio.get_running_loop().time() + WHOLE_INTERVAL_SECONDS

    def _send_restart(self, run_id: str, run: _StreamedRun) -> None:
        """Tell clients to discard the text of the current step."""
        run.chat_seq += 1
        run.whole_seq += 1
        for connection in self._iter_readers():
            seq = run.chat_seq if connection.reads_increments else run.whole_seq
            payload: dict[str, Any] = {**self._build_run_payload(run_id, run, seq), "state": "delta"}
            if not connection.has_delta_capability:
                payload["message"] = self._build_assistant_message("")
            connection.send_event(frames.encode_event("chat", {**payload, "deltaText": "", "replace": True}))

    def _forget_runs(self) -> None:
        for run in self._runs.values():
            run.cancel_timer()
        self._runs.clear()

    def _handle_tool_phase(self, event: ToolPhase) -> None:
        run = self._get_or_add_run(event.run_id, event.session_key)
        assert run is not None
        self._send_increments(event.run_id, run)
        data = {
            "phase": event.phase,
            "name": event.name,
            "toolCallId": event.call_id,
            "isError": event.is_error,
        }
        listeners = [c for c in self._iter_readers() if c.client and TOOL_EVENTS_CAPABILITY in c.client.caps]
        self._send_agent_event(event.run_id, run, "tool", data, to=listeners)

    def _build_assistant_message(self, text: str) -> dict[str, Any]:
        content = [{"type": "text", "text": text}]
        return {"role": "assistant", "content": content, "timestamp": self._clock.now()}

    # --- runs ---

    def _get_or_add_run(self, run_id: str | None, session_key: str) -> _StreamedRun | None:
        if run_id is None:
            return None
        run = self._runs.get(run_id)
        if run is None:
            run = self._runs[run_id] = _StreamedRun(session_key)
        return run

    def _handle_run_change(self, event: RunChanged) -> None:
        if event.run_id in self._ended_runs:
            self._runs.pop(event.run_id, None)
            return
        run = self._get_or_add_run(event.run_id, event.session_key)
        assert run is not None
        if event.state == "queued":
            return
        if event.state == "running":
            started = {"phase": "start", "startedAt": self._clock.now()}
            self._send_agent_event(event.run_id, run, "lifecycle", started)
            self._record_session_change(event.session_key, {"phase": "start", "runId": event.run_id})
            return
        self._send_increments(event.run_id, run)
        del self._runs[event.run_id]
        run.cancel_timer()
        self._remember_ended_run(event.run_id)
        if event.gated:
            run.message = (
                self._build_assistant_message(sanitize.sanitize_for_people(event.reply))
                if event.reply
                else None
            )
        elif run.message is None and event.reply:
            run.message = self._build_assistant_message(event.reply)
        failed = event.state not in ("ok", "incomplete")
        ended: dict[str, Any] = {
            "phase": "error" if failed else "end",
            "endedAt": event.ended_at or self._clock.now(),
        }
        if failed:
            ended["error"] = event.error
        run.agent_seq += 1
        lifecycle = self._encode_agent_event(event.run_id, run, "lifecycle", ended)
        closing = _build_final_payload(event, run)
        increments, whole = (
            frames.encode_event("chat", {**self._build_run_payload(event.run_id, run, seq + 1), **closing})
            for seq in (run.chat_seq, run.whole_seq)
        )
        for connection in self._iter_readers():
            chat = increments if connection.reads_increments else whole
            self._send_final_events(
                connection, event.run_id, *([lifecycle] if event.quiet else [lifecycle, chat])
            )
        self._record_session_change(
            event.session_key, {"phase": "error" if failed else "end", "runId": event.run_id}
        )

    def _handle_delivery(self, event: Delivered) -> None:
        """Send a delivery that no client asked for, as a final `chat` event."""
        payload = {
            "runId": event.run_id or event.key,
            "sessionKey": wire.format_session_key(event.session_key),
            "seq": 0,
            "state": "final",
            "stopReason": "stop",
            "message": self._build_assistant_message(event.text),
        }
        self._broadcast(frames.encode_event("chat", payload))

    def _remember_ended_run(self, run_id: str) -> None:
        self._ended_runs[run_id] = None
        while len(self._ended_runs) > MAX_ENDED_RUNS_REMEMBERED:
            self._ended_runs.popitem(last=False)

    def _send_final_events(self, connection: WebSocketConnection, run_id: str, *texts: str) -> None:
        loop = asyncio.get_running_loop()
        held = self._delayed_ends.pop((connection, run_id), 0.0) - loop.time()
        for text in texts:
            if held > 0:
                loop.call_later(held, connection.send_event, text)
            else:
                connection.send_event(text)

    def _build_run_payload(self, run_id: str, run: _StreamedRun, seq: int) -> dict[str, Any]:
        return {"runId": run_id, "sessionKey": wire.format_session_key(run.session_key), "seq": seq}

    def _send_agent_event(
        self,
        run_id: str,
        run: _StreamedRun,
        stream: str,
        data: dict[str, Any],
        *,
        to: Iterable[WebSocketConnection] | None = None,
        droppable: bool = False,
    ) -> None:
        run.agent_seq += 1
        text = self._encode_agent_event(run_id, run, stream, data)
        for connection in self._iter_readers() if to is None else to:
            connection.send_event(text, droppable=droppable)

    def _encode_agent_event(self, run_id: str, run: _StreamedRun, stream: str, data: dict[str, Any]) -> str:
        payload = {
            **self._build_run_payload(run_id, run, run.agent_seq),
            "stream": stream,
            "ts": self._clock.now(),
            "data": data,
        }
        return frames.encode_event("agent", payload)

    # --- session changes ---

    def _record_session_change(self, session_key: str, facts: dict[str, Any]) -> None:
        self.session_counts.stale.set()
        if any(connection.is_subscribed_to_all_sessions for connection in self.connections):
            changes = self._changes.setdefault(session_key, {})
            kind = facts.get("phase") or facts.get("reason") or ""
            changes.pop(kind, None)  # keep the latest change last
            if kind in {"end", "error"}:
                changes.pop("start", None)  # the row already shows that the run has ended
            changes[kind] = {"ts": self._clock.now(), **facts}
            self._changed.set()

    async def _run_change_broadcasts(self) -> None:
        while True:
            await self._changed.wait()
            await asyncio.sleep(CHANGE_GATHER_SECONDS)
            self._changed.clear()
            changes, self._changes = self._changes, {}
            await self._broadcast_changes(changes)
            del changes  # free them while waiting for the next ones

    async def _broadcast_changes(self, changes: dict[str, dict[str, dict[str, Any]]]) -> None:
        """Send each change once; the last one of a session includes its current row."""
        keys = list(changes)[:MAX_SESSIONS_PER_GATHERING]
        found = dict(zip(keys, await asyncio.gather(*map(self._load_session_row, keys)), strict=True))
        listeners = [
            connection for connection in self.connections if connection.is_subscribed_to_all_sessions
        ]
        for key, facts_of in changes.items():
            *earlier, last = (
                {"sessionKey": wire.format_session_key(key), **facts} for facts in facts_of.values()
            )
            for payload in (*earlier, {**(found.get(key) or {}), **last}):
                text = frames.encode_event("sessions.changed", payload)
                for connection in listeners:
                    connection.send_event(text)

    async def _load_session_row(self, key: str) -> dict[str, Any] | None:
        try:
            row = wire.build_session_dict(
                await self._operations.describe(
                    READ_ONLY_CALLER, wire.format_session_key(key), with_file=False
                )
            )
        except AntiphonError:
            return None
        row.pop("transcriptPath", None)  # the longest field; it never changes and is part of lists
        return row

    # --- periodic work ---

    async def _run_ticks(self) -> None:
        while True:
            await asyncio.sleep(frames.TICK_INTERVAL_MS / 1000)
            now = self._clock.now()
            text = frames.encode_event("tick", {"ts": now})
            for connection in self.connections:
                connection.send_event(text, droppable=True)
            late = asyncio.get_running_loop().time() - 60
            self._delayed_ends = {held: until for held, until in self._delayed_ends.items() if until > late}

    async def _close_revoked(self) -> None:
        """Close connections whose token was revoked."""
        while True:
            await asyncio.sleep(REVOCATION_CHECK_SECONDS)
            identities = {connection.identity for connection in self.connections if connection.identity}
            revoked = {each for each in identities if not self._gateway.authenticator.is_still_valid(each)}
            for connection in self.connections if revoked else ():
                if connection.identity in revoked:
                    connection.close(1008, "the token was revoked")

    async def _run_presence_broadcasts(self) -> None:
        while True:
            await self._presence_changed.wait()
            await asyncio.sleep(PRESENCE_INTERVAL_SECONDS)
            self._presence_changed.clear()
            self._presence_version += 1
            text = frames.encode_event("presence", {"presence": self.list_presence()}, self.state_version)
            self._broadcast(text, droppable=True)

    def broadcast_shutdown(self, reason: str) -> None:
        text = frames.encode_event("shutdown", {"reason": reason, "restartExpectedMs": 1000})
        for connection in self.connections:
            connection.send_event(text)
            connection.close(1012, "service restart")

    def _iter_readers(self) -> Iterable[WebSocketConnection]:
        return (connection for connection in self.connections if READ_SCOPE in connection.caller.scopes)

    def _broadcast(self, text: str, *, droppable: bool = False) -> None:
        for connection in self._iter_readers():
            connection.send_event(text, droppable=droppable)


async def _run_forever(work: Callable[[], Awaitable[None]]) -> None:
    """Run `work` again whenever it fails, until cancelled."""
    while True:
        try:
            await work()
        except Exception:
            log.exception("Telling clients what happens failed; it begins again")
        await asyncio.sleep(RESTART_DELAY_SECONDS)


def _build_final_payload(event: RunChanged, run: _StreamedRun) -> dict[str, Any]:
    """Return the payload of the last `chat` event of a run."""
    spent = event.usage
    usage = {"usage": {"input": spent.input, "output": spent.output, "cost": spent.cost}} if spent else {}
    message = {"message": run.message} if run.message else {}
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
