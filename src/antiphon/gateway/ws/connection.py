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
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec

from antiphon import PROTOCOL_VERSIONS
from antiphon.access import READ_SCOPE, Caller
from antiphon.gateway.auth import ClientIdentity
from antiphon.gateway.ws import frames
from antiphon.gateway.ws.protocol import Ping, SendNow, refuse_to_ping, refuse_to_send

LAGGING_SEND_QUEUE_BYTES = frames.MAX_BUFFERED_BYTES // 16  # above this, pieces of answers are dropped
MAX_SEND_QUEUE_FRAMES = 20_000
MAX_TOTAL_SEND_QUEUE_BYTES = 512 * 2**20  # of all clients of the process
SMALL_SEND_QUEUE_BYTES = 2**20  # up to this, a connection is not closed for the total
MAX_CLOSE_REASON_BYTES = 120  # a close frame holds 123
MAX_RUN_END_HOLD_SECONDS = 5.0  # for a client to answer a ping, see `ClientQuirks`

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

    The end of the run that it has just started would be lost on it. So ends of runs are held until it has read the
    response, which its answer to a ping proves.
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
        self.is_subscribed_to_all_sessions = False
        """Whether it gets changes of all sessions (`sessions.subscribe`)."""
        self.tasks: set[asyncio.Task[None]] = set()
        self.closing: tuple[int, str] | None = None
        self.ended = asyncio.Event()
        self._send = send
        self._send_now = send_now
        self._ping = ping
        self._seq = 0
        self._held_run_ends: list[str] | None = None
        """Ends of runs that wait for the client to read a response; None while it has read all of them."""
        self._hold_count = 0
        self._must_ping = False
        self._send_queue: deque[tuple[str, int]] = deque()
        """Texts with their size in memory, recorded because it may change once they are sent."""
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
        self._append_to_queue(text)
        self._wake.set()

    def send_event(self, text: str, *, droppable: bool = False) -> bool:
        """Send an event with this connection's next number; False if it was dropped because the client lags."""
        if droppable and self._waiting_bytes > LAGGING_SEND_QUEUE_BYTES:
            return False
        self._seq += 1
        numbered = frames.finish_numbered_event(text, self._seq)
        if not self._try_send_now(numbered):
            self.enqueue(numbered)
        return True

    def hold_run_ends(self) -> None:
        """Hold ends of runs until the client has read the response that is sent next, if it needs that."""
        if self.quirks.reads_response_last:
            self._held_run_ends = self._held_run_ends or []
            self._hold_count += 1
            self._must_ping = True

    def send_run_end(self, texts: Sequence[str]) -> None:
        """Send the last events of a run, or hold them."""
        if self._held_run_ends is not None:
            self._held_run_ends += texts
            return
        for text in texts:
            self.send_event(text)

    def _confirm_reading(self) -> None:
        """Release the held ends when the client answers a ping, or after a while if it does not."""
        self._must_ping = False
        release = partial(self._release_run_ends, self._hold_count)
        if self._ping(release):
            asyncio.get_running_loop().call_later(MAX_RUN_END_HOLD_SECONDS, release)
        else:
            release()

    def _release_run_ends(self, hold: int) -> None:
        if hold == self._hold_count and self._held_run_ends is not None:  # no later response waits to be read
            held, self._held_run_ends = self._held_run_ends, None
            self.send_run_end(held)

    def _try_send_now(self, text: str) -> bool:
        """Send a text without queueing; False if other texts are queued or being sent, which it must not overtake."""
        if self._send_queue or self._flushing or self.closing:
            return False
        return self._send_now(text)

    def _append_to_queue(self, text: str) -> None:
        if self.closing:
            return
        if self._is_slow():
            self.close(1008, "slow consumer")
            self._clear_queue()  # now, so that unsendable texts do not count toward the total
            return
        size = sys.getsizeof(text)  # size in memory; encoding would cost time per listener
        self._send_queue.append((text, size))
        self._add_waiting_bytes(size)
        if self._waiting_bytes > LAGGING_SEND_QUEUE_BYTES:
            self._has_room.clear()

    def _is_slow(self) -> bool:
        if self._waiting_bytes > frames.MAX_BUFFERED_BYTES or len(self._send_queue) >= MAX_SEND_QUEUE_FRAMES:
            return True
        return (
            self._queue_total.waiting_bytes > MAX_TOTAL_SEND_QUEUE_BYTES
            and self._waiting_bytes > SMALL_SEND_QUEUE_BYTES
        )

    def _add_waiting_bytes(self, size: int) -> None:
        self._waiting_bytes += size
        self._queue_total.waiting_bytes += size

    def _clear_queue(self) -> None:
        """Drop all queued texts except the one being sent."""
        self._add_waiting_bytes(-sum(size for _, size in self._send_queue))
        self._send_queue.clear()

    async def send_response(self, text: str) -> None:
        """Send a response, directly if the writer is idle: waking it would double the cost."""
        self._append_to_queue(text)
        if not self._flushing:
            await self._flush()

    async def wait_for_room(self) -> None:
        """Wait until the client has read most of its queue. For senders of large amounts."""
        await self._has_room.wait()

    def close(self, code: int, reason: str) -> None:
        """Close the connection once the writer gets to it; the first reason counts."""
        if self.closing is None:
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
                text, size = self._send_queue.popleft()
                try:
                    await self._send({"type": "websocket.send", "text": text})
                finally:
                    self._add_waiting_bytes(-size)
                if self._waiting_bytes <= LAGGING_SEND_QUEUE_BYTES:
                    self._has_room.set()
            if self._must_ping:
                self._confirm_reading()
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
        """Drop the queue and cancel tasks, once the connection is closed."""
        self._clear_queue()
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


class ConnectionSet:
    """The connections of authenticated clients."""

    def __init__(self) -> None:
        self._connections: set[WebSocketConnection] = set()

    def __len__(self) -> int:
        return len(self._connections)

    def __iter__(self) -> Iterator[WebSocketConnection]:
        return iter(self._connections)

    def __contains__(self, connection: WebSocketConnection) -> bool:
        return connection in self._connections

    def add(self, connection: WebSocketConnection) -> None:
        self._connections.add(connection)

    def discard(self, connection: WebSocketConnection) -> None:
        self._connections.discard(connection)

    def iter_readers(self) -> Iterator[WebSocketConnection]:
        """Yield the connections that may read sessions."""
        return (each for each in self._connections if READ_SCOPE in each.caller.scopes)

    def iter_session_subscribers(self) -> Iterator[WebSocketConnection]:
        """Yield the connections that get changes of all sessions."""
        return (each for each in self._connections if each.is_subscribed_to_all_sessions)

    def broadcast(self, text: str, *, droppable: bool = False) -> None:
        """Send an event to all connections that may read sessions."""
        for connection in self.iter_readers():
            connection.send_event(text, droppable=droppable)


def _truncate_close_reason(reason: str) -> str:
    """Return the part of a reason that fits into a close frame, without splitting a character."""
    return reason.encode(errors="replace")[:MAX_CLOSE_REASON_BYTES].decode(errors="ignore")
