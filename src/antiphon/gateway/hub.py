"""Broadcasts live events to all connections: what happens to runs and sessions, ticks, presence and shutdown.

The hub dispatches events of the bus to the parts that know how to show them: growing answers (`run_streams`), changed
sessions (`SessionChanges`), subscriptions to messages (`subscriptions`), presence and health (`health`). Each event is
encoded once. Events are hints about durable rows and may be lost; clients that must not miss anything wait for a run's
end (`agent.wait`), subscribe to messages or read lists again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from antiphon.bus import (
    EVERY_SESSION_TOPIC,
    SESSION_CHANGES_TOPIC,
    ApprovalChanged,
    Delivered,
    Delta,
    Event,
    Gap,
    MessageAppended,
    RunChanged,
    SessionChanged,
    ToolPhase,
)
from antiphon.clock import Clock
from antiphon.errors import AntiphonError, NotFound
from antiphon.gateway import wire
from antiphon.gateway.health import Health, Presence
from antiphon.gateway.run_streams import RunStreams
from antiphon.gateway.state import READ_ONLY_CALLER, GatewayState
from antiphon.gateway.subscriptions import Subscriptions, encode_message_event
from antiphon.gateway.ws import frames
from antiphon.gateway.ws.connection import ConnectionSet, WebSocketConnection
from antiphon.messages import INJECTED_MODEL
from antiphon.operations.operations import Operations
from antiphon.operations.types import build_approval_view, build_run_ended_event

log = logging.getLogger(__name__)

EVENT_NAMES = [
    "agent",
    "chat",
    "connect.challenge",
    "exec.approval.requested",
    "exec.approval.resolved",
    "presence",
    "session.gap",
    "session.message",
    "sessions.changed",
    "shutdown",
    "tick",
]
REVOCATION_CHECK_SECONDS = 0.5
RESTART_DELAY_SECONDS = 1.0  # before a failed broadcast task is restarted
GATHER_SECONDS = 0.1  # how long changes of a session are collected before its row is read
MAX_ROWS_PER_BROADCAST = 500

ChangesByKind = dict[str, dict[str, Any]]


class SessionChanges:
    """The changes that subscribers to all sessions have not been sent yet, broadcast as `sessions.changed` events.

    Changes are collected for a moment, so that a busy session has its row read once for all of them.
    """

    def __init__(self, connections: ConnectionSet, operations: Operations, clock: Clock) -> None:
        self._connections = connections
        self._operations = operations
        self._clock = clock
        self._changes_by_session: dict[str, ChangesByKind] = {}
        """Latest changes by session and by phase or reason."""
        self._changed = asyncio.Event()

    def record(self, session_key: str, change: dict[str, Any]) -> None:
        """Record a change for the next broadcast, if anyone is subscribed."""
        if not self._connections.session_subscribers:
            return
        changes = self._changes_by_session.setdefault(session_key, {})
        kind = change.get("phase") or change.get("reason") or ""
        changes.pop(kind, None)  # keep the latest change last
        if kind in {"end", "error"}:
            changes.pop("start", None)  # the row already shows that the run has ended
        changes[kind] = {"ts": self._clock.now(), **change}
        self._changed.set()

    async def run(self) -> None:
        """Broadcast changes until cancelled."""
        while True:
            await self._changed.wait()
            await asyncio.sleep(GATHER_SECONDS)
            self._changed.clear()
            changes, self._changes_by_session = self._changes_by_session, {}
            await self._broadcast(changes)
            del changes  # free them while waiting for the next ones

    async def _broadcast(self, changes_by_session: dict[str, ChangesByKind]) -> None:
        """Send each change once; the last one of a session includes its current row."""
        keys = list(changes_by_session)[:MAX_ROWS_PER_BROADCAST]
        rows = dict(zip(keys, await asyncio.gather(*map(self._load_row, keys)), strict=True))
        subscribers = list(self._connections.session_subscribers)
        for key, changes in changes_by_session.items():
            *earlier, last = (
                {"sessionKey": wire.format_session_key(key), **change} for change in changes.values()
            )
            for payload in (*earlier, {**(rows.get(key) or {}), **last}):
                text = frames.encode_event("sessions.changed", payload)
                for connection in subscribers:
                    connection.send_event(text)

    async def _load_row(self, key: str) -> dict[str, Any] | None:
        try:
            row = wire.build_session_dict(
                await self._operations.sessions.describe(
                    READ_ONLY_CALLER, wire.format_session_key(key), with_file=False
                )
            )
        except AntiphonError:
            return None
        row.pop("transcriptPath", None)  # the longest field; it never changes and is part of lists
        return row


class Hub:
    def __init__(self, gateway: GatewayState) -> None:
        app = gateway.app
        self._gateway = gateway
        self._clock = app.clock
        self._operations = app.operations
        self.connections = ConnectionSet()
        self.presence = Presence(self.connections)
        self.health = Health(gateway)
        self.run_streams = RunStreams(self.connections, app.clock)
        self.session_changes = SessionChanges(self.connections, app.operations, app.clock)
        self.subscriptions = Subscriptions(app.operations, self.run_streams.complete_step)

    async def run(self) -> None:
        """Broadcast until cancelled."""
        tasks = (
            lambda: self._listen(EVERY_SESSION_TOPIC),
            lambda: self._listen(SESSION_CHANGES_TOPIC),
            self.session_changes.run,
            self.presence.run,
            self.health.run,
            self._run_ticks,
            self._close_revoked_connections,
        )
        async with asyncio.TaskGroup() as group:
            for work in tasks:
                group.create_task(_run_forever(work))

    def add_connection(self, connection: WebSocketConnection) -> None:
        self.connections.add(connection)
        self.presence.mark_changed()

    def remove_connection(self, connection: WebSocketConnection) -> None:
        self.subscriptions.remove_connection(connection)
        self.run_streams.remove_connection(connection)
        if connection in self.connections:
            self.connections.discard(connection)
            self.presence.mark_changed()

    # --- events of the bus ---

    async def _listen(self, topic: str) -> None:
        async with self._gateway.app.bus.listen(topic) as events:
            while True:
                event = await events.get()
                if event is None:
                    continue
                try:
                    if not self.connections:
                        self._follow_runs(event)
                    elif isinstance(event, Gap):
                        await self._recover_ended_runs()
                    else:
                        self._handle_event(event)
                except Exception:
                    log.exception("Failed to broadcast event")

    def _follow_runs(self, event: Event) -> None:
        """Collect growing answers while no client is connected, for clients that connect before they are complete."""
        match event:
            case Delta():
                self.run_streams.handle_delta(event)
            case MessageAppended():
                self.run_streams.handle_message(event, wire.format_appended_entry(event).get("role"))
            case RunChanged():
                self.run_streams.handle_run_change(event)
            case Gap():
                self.run_streams.forget_all_runs()
            case _:
                pass

    def _handle_event(self, event: Event) -> None:
        match event:
            case MessageAppended():
                self._handle_message(event)
            case Delta():
                self.run_streams.handle_delta(event)
            case ToolPhase():
                self.run_streams.handle_tool_phase(event)
            case RunChanged():
                self._handle_run_change(event)
            case ApprovalChanged():
                self._handle_approval(event)
            case Delivered():
                self._handle_delivery(event)
            case SessionChanged() if event.reason not in ("message", "renewed"):
                deleted = {} if event.session_id is None else {"sessionId": event.session_id}
                self._record_change(event.session_key, {"reason": event.reason, **deleted})
            case _:
                pass

    def _handle_message(self, event: MessageAppended) -> None:
        message = wire.format_appended_entry(event)
        self.run_streams.handle_message(event, message.get("role"))
        key = wire.format_session_key(event.session_key)
        informed = self.subscriptions.get_subscribers(key)  # they get the message from `subscriptions`
        is_injected = message.get("model") == INJECTED_MODEL and "provenance" not in message
        if event.run_id is None and is_injected and not event.internal:
            head = {"runId": f"inject-{event.entry}", "sessionKey": key, "seq": 0, "state": "final"}
            chat = frames.encode_event("chat", {**head, "message": message})
            for connection in self.connections.readers - informed:
                connection.send_event(chat)
        if uninformed := self.connections.session_subscribers - informed:
            text = encode_message_event(key, event.session_id, message)
            for connection in uninformed:
                connection.send_event(text)
        self._record_change(
            event.session_key,
            {
                "phase": "message",
                "messageId": event.entry,
                "messageSeq": event.seq,
                "runId": event.run_id,
            },
        )

    def _handle_run_change(self, event: RunChanged) -> None:
        if phase := self.run_streams.handle_run_change(event):
            self._record_change(event.session_key, {"phase": phase, "runId": event.run_id})

    def _handle_approval(self, event: ApprovalChanged) -> None:
        """Send a new approval, or its decision, to the clients that may decide."""
        name = "exec.approval.requested" if event.state == "pending" else "exec.approval.resolved"
        payload = {**wire.format_approval(build_approval_view(event)), "ts": self._clock.now()}
        text = frames.encode_event(name, payload)
        for connection in self.connections.iter_approvers():
            connection.send_event(text)

    def _handle_delivery(self, event: Delivered) -> None:
        """Send an unsolicited delivery as a final `chat` event."""
        payload = {
            "runId": event.run_id or event.key,
            "sessionKey": wire.format_session_key(event.session_key),
            "seq": 0,
            "state": "final",
            "stopReason": "stop",
            "message": wire.format_assistant_text(event.text, self._clock.now()),
        }
        self.connections.broadcast(frames.encode_event("chat", payload))

    def _record_change(self, session_key: str, change: dict[str, object]) -> None:
        self.health.has_stale_counts.set()
        self.session_changes.record(session_key, change)

    async def _recover_ended_runs(self) -> None:
        """Send the ends of runs that were missed because events were lost."""
        for run in self.run_streams.list_runs():
            try:
                view = await self._operations.runs.get(READ_ONLY_CALLER, run.run_id)
            except NotFound:
                self.run_streams.forget_run(run.run_id)
                continue
            if view.has_ended:
                self._handle_run_change(build_run_ended_event(run.session_key, view))

    # --- periodic work ---

    async def _run_ticks(self) -> None:
        while True:
            await asyncio.sleep(frames.TICK_INTERVAL_MS / 1000)
            text = frames.encode_event("tick", {"ts": self._clock.now()})
            for connection in self.connections:
                connection.send_event(text, droppable=True)

    async def _close_revoked_connections(self) -> None:
        """Close connections whose token was revoked."""
        while True:
            await asyncio.sleep(REVOCATION_CHECK_SECONDS)
            identities = {connection.identity for connection in self.connections if connection.identity}
            revoked = {each for each in identities if not self._gateway.authenticator.is_still_valid(each)}
            for connection in self.connections if revoked else ():
                if connection.identity in revoked:
                    connection.close(1008, "the token was revoked")

    def broadcast_shutdown(self, reason: str) -> None:
        text = frames.encode_event("shutdown", {"reason": reason, "restartExpectedMs": 1000})
        for connection in self.connections:
            connection.send_event(text)
            connection.close(1012, "service restart")


async def _run_forever(work: Callable[[], Awaitable[None]]) -> None:
    """Run `work` again whenever it fails, until cancelled."""
    while True:
        try:
            await work()
        except Exception:
            log.exception("Broadcasting failed; restarting it in %g s", RESTART_DELAY_SECONDS)
        await asyncio.sleep(RESTART_DELAY_SECONDS)
