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
        self._ready = asyncio.Event()

    def put(self, event: Event) -> None:
        if len(self._events) >= self._size:
            self._events.clear()
            self._events.append(Gap())
        self._events.append(event)
        self._ready.set()

    async def get(self, timeout: float | None = None) -> Event | None:
        while not self._events:
            self._ready.clear()
            try:
                async with asyncio.timeout(timeout):
                    await self._ready.wait()
            except TimeoutError:
                return None
        return self._events.popleft()


class LocalBus:
    def __init__(self, buffer: int = BUFFER) -> None:
        self._buffer = buffer
        self._listeners: dict[str, set[_Listener]] = {}

    def wanted(self, topic: str) -> bool:
        return topic in self._listeners

    def publish(self, topic: str, event: Event) -> None:
        for listener in self._listeners.get(topic, ()):
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
