"""One client: its outbox, and what it is told.

Nobody waits for a client. Whatever is meant for it goes into its outbox, which one writer empties as fast as the
client reads; an outbox that grows beyond its bound ends the connection, and the client resumes from the number it
saw last. Where all outboxes of the process together grow beyond theirs, that ends whoever has more than a little
waiting. Pieces of an answer in progress are the exception: they are left out while the client lags.
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import msgspec

from antiphon.access import Caller
from antiphon.gateway import frames
from antiphon.gateway.auth import Identity
from antiphon.gateway.line import AtOnce, refused

LAG = frames.MAX_BUFFERED // 16  # bytes waiting above which pieces of answers are left out
MOST_FRAMES = 20_000
MOST_TOGETHER = 512 * 2**20  # bytes that may wait for all clients of the process
LITTLE = 2**20  # bytes waiting up to which a connection is not to blame for what waits for all
REASON = 120  # bytes of why a connection is closed; a close frame holds 123

CHAT_DELTAS = "chat-deltas"
"""The capability of a client that assembles an answer from its increments."""
WINDOW_MODE = "ui"  # of terminals and apps that show the `message` of a delta and ignore its increment
AGENT_TEXT_READERS = {
    "openclaw-android",
    "openclaw-ios",
    "openclaw-linux",
    "openclaw-macos",
    "openclaw-watchos",
}
"""Apps that show a growing answer from `agent` events, and nothing of a `chat` event before the final one."""

Send = Callable[[dict[str, Any]], Awaitable[None]]


class Client(msgspec.Struct, frozen=True):
    """Who connected, in their own words; nothing is decided by it."""

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


class Outboxes:
    """What waits in all outboxes that share this, in bytes."""

    def __init__(self) -> None:
        self.waiting = 0


EVERYBODY = Outboxes()


class Connection:
    def __init__(
        self,
        number: str,
        send: Send,
        opened_at: int,
        together: Outboxes = EVERYBODY,
        at_once: AtOnce = refused,
    ) -> None:
        self.id = number
        self.opened_at = opened_at
        self.protocol = frames.PROTOCOLS[-1]
        self.client: Client | None = None
        self.caller = Caller.operator(())
        self.identity: Identity | None = None
        self.reads_increments = False
        """Whether a growing answer is sent as increments, or as the whole text each time."""
        self.every_session = False
        """Whether it hears of every session (`sessions.subscribe`)."""
        self.tasks: set[asyncio.Task[None]] = set()
        self.closing: tuple[int, str] | None = None
        self.ended = asyncio.Event()
        self._send = send
        self._at_once = at_once
        self._seq = 0
        self._outbox: deque[tuple[str, int]] = deque()
        """Texts and what they take, which may be another size once they have been sent."""
        self._waiting = 0
        self._together = together
        self._flushing = False
        self._wake = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()

    def enter(self, client: Client, identity: Identity, protocol: int) -> None:
        """From here on it is known who this is; what it may do, it asked for and was granted."""
        self.client, self.identity, self.protocol = client, identity, protocol
        self.caller = Caller.operator(client.scopes)
        self.reads_increments = protocol >= 4 and (self.knows_increments or client.mode != WINDOW_MODE)

    @property
    def knows_increments(self) -> bool:
        """Whether the client has declared that it needs no whole text to begin with."""
        return self.client is not None and CHAT_DELTAS in self.client.caps

    @property
    def reads_agent_text(self) -> bool:
        """Whether whole texts of a growing answer are sent as `agent` events instead of `chat` events."""
        return self.client is not None and self.client.id in AGENT_TEXT_READERS

    # --- putting in ---

    def put(self, text: str) -> None:
        """For the writer, who is woken."""
        self._keep(text)
        self._wake.set()

    def event(self, text: str, *, droppable: bool = False) -> bool:
        """Send an event with this connection's next number; False if it was left out because the client lags."""
        if droppable and self._waiting > LAG:
            return False
        self._seq += 1
        numbered = frames.numbered(text, self._seq)
        if not self._sent(numbered):
            self.put(numbered)
        return True

    def _sent(self, text: str) -> bool:
        """Whether it has gone out already. It may not pass what waits, or is on its way."""
        if self._outbox or self._flushing or self.closing:
            return False
        return self._at_once(text)

    def _keep(self, text: str) -> None:
        if self.closing:
            return
        if self._is_slow():
            self.close(1008, "slow consumer")
            self._forget()  # at once, so that no others are closed for what nobody will be sent
            return
        size = sys.getsizeof(text)  # in memory, which is known at once; encoding it would cost each listener
        self._outbox.append((text, size))
        self._count(size)
        if self._waiting > LAG:
            self._room.clear()

    def _is_slow(self) -> bool:
        if self._waiting > frames.MAX_BUFFERED or len(self._outbox) >= MOST_FRAMES:
            return True
        return self._together.waiting > MOST_TOGETHER and self._waiting > LITTLE

    def _count(self, size: int) -> None:
        self._waiting += size
        self._together.waiting += size

    def _forget(self) -> None:
        """All but what is just being sent."""
        self._count(-sum(size for _, size in self._outbox))
        self._outbox.clear()

    async def answer(self, text: str) -> None:
        """A response of the reader, sent by itself if the writer is idle: waking it would cost as much again."""
        self._keep(text)
        if not self._flushing:
            await self._flush()

    async def room(self) -> None:
        """Until the client has read most of what waits for it. For whoever has a lot to say."""
        await self._room.wait()

    def close(self, code: int, reason: str) -> None:
        """End the connection once the writer gets to it; the first reason counts."""
        if self.closing is None:
            self.closing = (code, reason)
            self.ended.set()
            self._room.set()
            self._wake.set()

    # --- sending ---

    async def write(self) -> None:
        """Empty the outbox until the connection is to close."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            if self._flushing:
                continue  # an answer is on its way, and whoever sends it empties the outbox
            await self._flush()
            if self.closing:
                return

    async def _flush(self) -> None:
        self._flushing = True
        try:
            while self._outbox:
                text, size = self._outbox.popleft()
                try:
                    await self._send({"type": "websocket.send", "text": text})
                finally:
                    self._count(-size)
                if self._waiting <= LAG:
                    self._room.set()
        finally:
            self._flushing = False
            if self.closing:
                self._wake.set()

    async def hang_up(self) -> None:
        code, reason = self.closing or (1000, "")
        with suppress(Exception):  # the client may be gone already
            await self._send({"type": "websocket.close", "code": code, "reason": _cut(reason)})

    # --- work that outlives a request ---

    def start(self, work: Callable[[], Awaitable[None]]) -> None:
        """Something that ends with the connection, at the latest."""
        task = asyncio.ensure_future(_plain(work))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def end(self) -> None:
        """When it is closed, and nothing is sent any more."""
        self._forget()
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


def _cut(reason: str) -> str:
    """What fits into a close frame, without half a character at its end."""
    return reason.encode(errors="replace")[:REASON].decode(errors="ignore")


async def _plain(work: Callable[[], Awaitable[None]]) -> None:
    await work()
