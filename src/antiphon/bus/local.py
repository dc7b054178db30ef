"""The bus of one process: a bounded queue per listener."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from antiphon.bus import Event, Gap

BUFFER = 1024  # events a listener may lag behind before it is told of a gap


class _Listener:
    """Drops everything it holds when it overflows: one gap is better than old news with holes in it."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._events: deque[Event] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def put(self, event: Event) -> None:
        if len(self._events) >= self._size:
            self._events.clear()
            self._events.append(Gap())
        self._events.append(event)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self, timeout: float | None = None) -> Event | None:
        if not self._events:
            loop = asyncio.get_running_loop()
            self._waiter = loop.create_future()
            timer = loop.call_later(timeout, self._wake) if timeout is not None else None
            try:
                await self._waiter
            finally:
                if timer:
                    timer.cancel()
        return self._events.popleft() if self._events else None


class LocalBus:
    def __init__(self, buffer: int = BUFFER) -> None:
        self._buffer = buffer
        self._listeners: dict[str, set[_Listener]] = {}

    def wanted(self, topic: str) -> bool:
        return topic in self._listeners or _family(topic) in self._listeners

    def publish(self, topic: str, event: Event) -> None:
        for heard in (topic, _family(topic)):
            for listener in self._listeners.get(heard, ()):
                listener.put(event)

    @asynccontextmanager
    async def listen(self, topic: str) -> AsyncGenerator[_Listener]:
        listener = _Listener(self._buffer)
        self._listeners.setdefault(topic, set()).add(listener)
        try:
            yield listener
        finally:
            listeners = self._listeners[topic]
            listeners.discard(listener)
            if not listeners:
                del self._listeners[topic]


def _family(topic: str) -> str:
    word, dot, _ = topic.partition(".")
    return f"{word}.*" if dot else ""
