"""One client: its outbox, and what it is told.

Nobody waits for a client. Whatever is meant for it goes into its outbox, which one writer empties as fast as the
client reads; an outbox that grows beyond its bound ends the connection, and the client resumes from the number it
saw last. Pieces of an answer in progress are the exception: they are left out while the client lags.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from antiphon.access import Caller
from antiphon.gateway import frames
from antiphon.gateway.auth import Identity

LAG = frames.MAX_BUFFERED // 16  # bytes waiting above which pieces of answers are left out
MOST_FRAMES = 20_000

Send = Callable[[dict[str, Any]], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Client:
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


class Connection:
    def __init__(self, number: str, send: Send, opened_at: int) -> None:
        self.id = number
        self.opened_at = opened_at
        self.protocol = frames.PROTOCOLS[-1]
        self.client: Client | None = None
        self.caller = Caller.operator(())
        self.identity: Identity | None = None
        self.every_session = False
        """Whether it hears of every session (`sessions.subscribe`)."""
        self.tasks: set[asyncio.Task[None]] = set()
        self.closing: tuple[int, str] | None = None
        self.ended = asyncio.Event()
        self._send = send
        self._seq = 0
        self._outbox: deque[str] = deque()
        self._waiting = 0
        self._flushing = False
        self._wake = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()

    def enter(self, client: Client, identity: Identity, protocol: int) -> None:
        """From here on it is known who this is; what it may do, it asked for and was granted."""
        self.client, self.identity, self.protocol = client, identity, protocol
        self.caller = Caller.operator(client.scopes)

    # --- putting in ---

    def put(self, text: str) -> None:
        """For the writer, who is woken."""
        self._keep(text)
        self._wake.set()

    def event(self, text: str, *, droppable: bool = False) -> None:
        """An event, with this connection's next number."""
        if droppable and self._waiting > LAG:
            return
        self._seq += 1
        self.put(frames.numbered(text, self._seq))

    def _keep(self, text: str) -> None:
        if self.closing:
            return
        if self._waiting > frames.MAX_BUFFERED or len(self._outbox) >= MOST_FRAMES:
            self.close(1008, "slow consumer")
            return
        self._outbox.append(text)
        self._waiting += len(text)
        if self._waiting > LAG:
            self._room.clear()

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
            while self._outbox and not (self.closing and self.closing[1] == "slow consumer"):
                text = self._outbox.popleft()
                await self._send({"type": "websocket.send", "text": text})
                self._waiting -= len(text)
                if self._waiting <= LAG:
                    self._room.set()
        finally:
            self._flushing = False
            if self.closing:
                self._wake.set()

    async def hang_up(self) -> None:
        code, reason = self.closing or (1000, "")
        with suppress(Exception):  # the client may be gone already
            await self._send({"type": "websocket.close", "code": code, "reason": reason[:120]})

    # --- work that outlives a request ---

    def start(self, work: Callable[[], Awaitable[None]]) -> None:
        """Something that ends with the connection, at the latest."""
        task = asyncio.ensure_future(_plain(work))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def end(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


async def _plain(work: Callable[[], Awaitable[None]]) -> None:
    await work()
