"""The event bus of a single process: one bounded queue per listener."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from antiphon.bus import Event, Gap

MAX_BUFFERED_EVENTS = 1024  # events a listener may lag behind before it receives a gap


class _QueueListener:
    """A bounded queue that drops all its events on overflow: one gap is better than stale events with holes."""

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
    def __init__(self, buffer: int = MAX_BUFFERED_EVENTS) -> None:
        self._buffer = buffer
        self._listeners: dict[str, set[_QueueListener]] = {}
        self._families = 0  # listeners on a whole family; checked for every event, usually 0

    def has_listeners(self, topic: str) -> bool:
        return topic in self._listeners or (self._families > 0 and get_topic_family(topic) in self._listeners)

    def publish(self, topic: str, event: Event) -> None:
        self.deliver(topic, event)
        self.deliver(get_topic_family(topic), event)

    def deliver(self, topic: str, event: Event) -> None:
        """Delivers to listeners of exactly this topic, which may be a family (`session.*`)."""
        for listener in self._listeners.get(topic, ()):
            listener.put(event)

    def count_listeners(self) -> dict[str, int]:
        """Number of listeners by topic."""
        return {topic: len(found) for topic, found in self._listeners.items()}

    def deliver_gap(self, topics: str = "") -> None:
        """Delivers a gap for one topic, for a family and all of its topics, or for every topic."""
        for topic in self._listeners:
            if topics in ("", topic, get_topic_family(topic)):
                self.deliver(topic, Gap())

    @asynccontextmanager
    async def listen(self, topic: str) -> AsyncGenerator[_QueueListener]:
        listener = _QueueListener(self._buffer)
        self._listeners.setdefault(topic, set()).add(listener)
        self._families += topic.endswith(".*")
        try:
            yield listener
        finally:
            self._families -= topic.endswith(".*")
            listeners = self._listeners[topic]
            listeners.discard(listener)
            if not listeners:
                del self._listeners[topic]


def get_topic_family(topic: str) -> str:
    """The family of a topic: `session.*` for `session.7`; empty for a topic without an id."""
    word, dot, _ = topic.partition(".")
    return f"{word}.*" if dot else ""
