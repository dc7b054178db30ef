"""One WebSocket connection and its send queue.

Senders never wait for a client. Frames go into its send queue, which one writer empties as fast as the client reads.
A queue above its limit closes the connection, and the client resumes from the last number it saw. If all queues
together exceed their limit, connections with more than a small queue are closed. Pieces of an answer in progress are
dropped instead while the client lags.
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import msgspec

from antiphon import PROTOCOL_VERSIONS
from antiphon.access import APPROVALS_SCOPE, READ_SCOPE, Caller
from antiphon.gateway.auth import ClientIdentity
from antiphon.gateway.ws import frames
from antiphon.gateway.ws.protocol import Ping, SendNow, refuse_to_ping, refuse_to_send

LAGGING_SEND_QUEUE_BYTES = frames.MAX_BUFFERED_BYTES // 16  # above this, pieces of answers are dropped
MAX_SEND_QUEUE_FRAMES = 20_000
MAX_TOTAL_SEND_QUEUE_BYTES = 512 * 2**20  # of all clients of the process
SMALL_SEND_QUEUE_BYTES = 2**20  # up to this, a connection is not closed for the total
MAX_CLOSE_REASON_BYTES = 120  # a close frame holds 123
MAX_RUN_END_HOLD_SECONDS = 5.0  # from the acceptance of the run, if no ping is answered; see `ClientQuirks`

CHAT_DELTAS_CAPABILITY = "chat-deltas"
"""The capability of a client that assembles an answer from its increments."""
UI_CLIENT_MODE = "ui"  # terminals and apps that show the `message` of a delta, not its increment

AsgiSend = Callable[[dict[str, Any]], Awaitable[None]]


class ClientQuirks(msgspec.Struct, frozen=True):
    """What a known client needs beyond the protocol."""

    reads_agent_text: bool = False
    """It shows a growing answer from `agent` events, and nothing of a `chat` event before the final one."""
    reads_response_last: bool = False
    """It handles events that arrive together with a response before that response.

    The end of the run that it has just started would be lost on it. So the end is held, and all later events behind it,
    until the client has read the response, which its answer to a ping proves.
    """


NO_QUIRKS = ClientQuirks()
QUIRKS_BY_CLIENT_ID = {
    **dict.fromkeys(
        ("openclaw-android", "openclaw-ios", "openclaw-linux", "openclaw-macos", "openclaw-watchos"),
        ClientQuirks(reads_agent_text=True),
    ),
    "openclaw-tui": ClientQuirks(reads_response_last=True),
}


class ConnectedClient(msgspec.Struct, frozen=True):
    """A client as it describes itself, with its address and granted scopes. The description authorizes nothing."""

    id: str
    mode: str
    version: str
    platform: str
    address: str
    name: str | None
    role: str
    scopes: tuple[str, ...]
    caps: frozenset[str]
    instance: str | None
    device: str | None


class SendQueueTotal:
    """Bytes waiting in all send queues that share this object."""

    def __init__(self) -> None:
        self.waiting_bytes = 0


PROCESS_SEND_QUEUE_TOTAL = SendQueueTotal()


class _QueuedText(NamedTuple):
    text: str
    size: int
    """Size in memory, recorded because it may change once the text is sent."""
    ended_run: str | None


class WebSocketConnection:
    def __init__(
        self,
        connection_id: str,
        send: AsgiSend,
        opened_at: int,
        queue_total: SendQueueTotal = PROCESS_SEND_QUEUE_TOTAL,
        send_now: SendNow = refuse_to_send,
        ping: Ping = refuse_to_ping,
    ) -> None:
        self.id = connection_id
        self.opened_at = opened_at
        self.protocol = PROTOCOL_VERSIONS[-1]
        self.client: ConnectedClient | None = None
        self.caller = Caller.operator(())
        self.identity: ClientIdentity | None = None
        self.reads_increments = False
        """Whether a growing answer is sent as increments, or as the whole text each time."""
        self.quirks = NO_QUIRKS
        self.tasks: set[asyncio.Task[None]] = set()
        self.closing: tuple[int, str] | None = None
        self.ended = asyncio.Event()
        self._send = send
        self._send_now = send_now
        self._ping = ping
        self._seq = 0
        self._send_queue: deque[_QueuedText] = deque()
        self._held_events: deque[_QueuedText] = deque()
        """The end of a run of `_unread_runs`, and all events since."""
        self._unread_runs: dict[str, asyncio.TimerHandle] = {}
        """Accepted runs whose response the client may not have read, with the timer that stops waiting for it."""
        self._pong_due = 0.0
        """Loop time until which no other ping is sent."""
        self._waiting_bytes = 0
        self._queue_total = queue_total
        self._flushing = False
        self._wake = asyncio.Event()
        self._has_room = asyncio.Event()
        self._has_room.set()

    def mark_authenticated(self, client: ConnectedClient, identity: ClientIdentity, protocol: int) -> None:
        """Set the client and its granted scopes after authentication."""
        self.client, self.identity, self.protocol = client, identity, protocol
        self.caller = Caller.operator(client.scopes)
        self.reads_increments = protocol >= 4 and (self.has_delta_capability or client.mode != UI_CLIENT_MODE)
        self.quirks = QUIRKS_BY_CLIENT_ID.get(client.id, NO_QUIRKS)

    def has_capability(self, name: str) -> bool:
        return self.client is not None and name in self.client.caps

    @property
    def has_delta_capability(self) -> bool:
        """Whether the client has declared that it needs no whole text to begin with."""
        return self.has_capability(CHAT_DELTAS_CAPABILITY)

    # --- queueing ---

    def enqueue(self, text: str) -> None:
        """Queue a text and wake the writer."""
        self._append_to(self._send_queue, text)
        self._wake.set()

    def send_event(self, text: str, *, droppable: bool = False, ended_run: str | None = None) -> bool:
        """Send an event with this connection's next number; False if it was dropped because the client lags.

        The end of a run is held while the response that announced the run may be unread, see `hold_run_end`.
        """
        if droppable and self._waiting_bytes > LAGGING_SEND_QUEUE_BYTES:
            return False
        self._seq += 1
        numbered = frames.finish_numbered_event(text, self._seq)
        if self._held_events or ended_run in self._unread_runs:
            self._append_to(self._held_events, numbered, ended_run)
        elif not self._try_send_now(numbered):
            self.enqueue(numbered)
        return True

    def hold_run_end(self, run_id: str) -> None:
        """Hold the end of an accepted run until the client has read the next response, if it needs that."""
        if self.quirks.reads_response_last:
            self._unread_runs[run_id] = asyncio.get_running_loop().call_later(
                MAX_RUN_END_HOLD_SECONDS, self._release_runs, [run_id]
            )

    def _release_runs(self, run_ids: Iterable[str]) -> None:
        """Queue the held events up to the end of the first run whose response may still be unread."""
        for run_id in run_ids:
            if timer := self._unread_runs.pop(run_id, None):
                timer.cancel()
        while self._held_events and self._held_events[0].ended_run not in self._unread_runs:
            self._send_queue.append(self._held_events.popleft())
        self._wake.set()

    def _ping_for_unread_runs(self) -> None:
        """Ask the client for proof that it has read all responses so far, unless an earlier ping may be answered."""
        if not self._unread_runs or (now := asyncio.get_running_loop().time()) < self._pong_due:
            return
        run_ids = list(self._unread_runs)
        if self._ping(partial(self._handle_pong, run_ids)):
            self._pong_due = now + MAX_RUN_END_HOLD_SECONDS
        else:
            self._release_runs(run_ids)

    def _handle_pong(self, run_ids: Iterable[str]) -> None:
        self._pong_due = 0.0
        self._release_runs(run_ids)

    def _try_send_now(self, text: str) -> bool:
        """Send a text without queueing; False if other texts are queued or being sent, which it must not overtake."""
        if self._send_queue or self._flushing or self.closing:
            return False
        return self._send_now(text)

    def _append_to(self, queue: deque[_QueuedText], text: str, ended_run: str | None = None) -> None:
        if self.closing:
            return
        if self._is_slow():
            self._clear_queues()  # now, so that unsendable texts do not count toward the total
            self.close(1008, "slow consumer")
            return
        size = sys.getsizeof(text)  # size in memory; encoding would cost time per listener
        queue.append(_QueuedText(text, size, ended_run))
        self._add_waiting_bytes(size)
        if self._waiting_bytes > LAGGING_SEND_QUEUE_BYTES:
            self._has_room.clear()

    def _is_slow(self) -> bool:
        waiting_frames = len(self._send_queue) + len(self._held_events)
        if self._waiting_bytes > frames.MAX_BUFFERED_BYTES or waiting_frames >= MAX_SEND_QUEUE_FRAMES:
            return True
        return (
            self._queue_total.waiting_bytes > MAX_TOTAL_SEND_QUEUE_BYTES
            and self._waiting_bytes > SMALL_SEND_QUEUE_BYTES
        )

    def _add_waiting_bytes(self, size: int) -> None:
        self._waiting_bytes += size
        self._queue_total.waiting_bytes += size

    def _clear_queues(self) -> None:
        """Drop all waiting texts except the one being sent."""
        for queue in (self._send_queue, self._held_events):
            self._add_waiting_bytes(-sum(each.size for each in queue))
            queue.clear()

    async def send_response(self, text: str) -> None:
        """Send a response, directly if the writer is idle: waking it would double the cost."""
        self._append_to(self._send_queue, text)
        if not self._flushing:
            await self._flush()

    async def wait_for_room(self) -> None:
        """Wait until the client has read most of its queue. For senders of large amounts."""
        await self._has_room.wait()

    def close(self, code: int, reason: str) -> None:
        """Close the connection once the writer gets to it; the first reason counts."""
        if self.closing is None:
            self._release_runs(list(self._unread_runs))
            self.closing = (code, reason)
            self.ended.set()
            self._has_room.set()
            self._wake.set()

    # --- sending ---

    async def run_writer(self) -> None:
        """Send queued texts until the connection is to close."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            if self._flushing:
                continue  # `send_response` is flushing the queue
            await self._flush()
            if self.closing:
                return

    async def _flush(self) -> None:
        self._flushing = True
        try:
            while self._send_queue:
                queued = self._send_queue.popleft()
                try:
                    await self._send({"type": "websocket.send", "text": queued.text})
                finally:
                    self._add_waiting_bytes(-queued.size)
                if self._waiting_bytes <= LAGGING_SEND_QUEUE_BYTES:
                    self._has_room.set()
            self._ping_for_unread_runs()
        finally:
            self._flushing = False
            if self.closing:
                self._wake.set()

    async def send_close_frame(self) -> None:
        code, reason = self.closing or (1000, "")
        with suppress(Exception):  # the client may be gone already
            await self._send(
                {"type": "websocket.close", "code": code, "reason": _truncate_close_reason(reason)}
            )

    # --- work that outlives a request ---

    def start_task(self, work: Coroutine[Any, Any, None]) -> None:
        """Start a task that is cancelled when the connection ends."""
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def release_resources(self) -> None:
        """Drop the queues and cancel tasks and timers, once the connection is closed."""
        self._release_runs(list(self._unread_runs))
        self._clear_queues()
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


class ConnectionSet:
    """The connections of authenticated clients, and which of them get the same events."""

    def __init__(self) -> None:
        self._connections: set[WebSocketConnection] = set()
        self.readers: set[WebSocketConnection] = set()
        """The connections that may read sessions."""
        self.session_subscribers: set[WebSocketConnection] = set()
        """The connections that get changes of all sessions (`sessions.subscribe`)."""

    def __len__(self) -> int:
        return len(self._connections)

    def __iter__(self) -> Iterator[WebSocketConnection]:
        return iter(self._connections)

    def __contains__(self, connection: WebSocketConnection) -> bool:
        return connection in self._connections

    def add(self, connection: WebSocketConnection) -> None:
        """Add a connection whose client is authenticated; its scopes do not change any more."""
        self._connections.add(connection)
        if READ_SCOPE in connection.caller.scopes:
            self.readers.add(connection)

    def subscribe_to_sessions(self, connection: WebSocketConnection) -> None:
        if connection in self._connections:  # it may have ended since it asked
            self.session_subscribers.add(connection)

    def discard(self, connection: WebSocketConnection) -> None:
        for connections in (self._connections, self.readers, self.session_subscribers):
            connections.discard(connection)

    def iter_approvers(self) -> Iterator[WebSocketConnection]:
        """Yield the connections that may decide on tool calls."""
        return (each for each in self._connections if APPROVALS_SCOPE in each.caller.scopes)

    def broadcast(self, text: str, *, droppable: bool = False) -> None:
        """Send an event to all connections that may read sessions."""
        for connection in self.readers:
            connection.send_event(text, droppable=droppable)


def _truncate_close_reason(reason: str) -> str:
    """Return the part of a reason that fits into a close frame, without splitting a character."""
    return reason.encode(errors="replace")[:MAX_CLOSE_REASON_BYTES].decode(errors="ignore")
