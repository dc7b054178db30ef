"""The event bus of several processes: local listeners get events at once, other processes over NATS.

Core NATS does not store messages, so every possible loss is reported as a `Gap`: by the receiver after it was
disconnected or fell behind, by the publisher after it was disconnected or dropped something, and by either when a
publisher's sequence numbers have a hole. Numbers count per family (`session.*`, or a topic without an id); a listener
on a single topic sees only some of them and relies on the other signals and on what the events themselves say.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import uuid
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import msgspec

from antiphon.bus import Event, Gap, Listener
from antiphon.bus.local import MAX_BUFFERED_EVENTS, LocalBus, get_topic_family
from antiphon.nats.connection import (
    MessageHandler,
    NatsConnection,
    NatsServers,
    cancel_tasks,
    list_connection_errors,
    subscribe,
)

if TYPE_CHECKING:
    from nats.aio.client import Client
    from nats.aio.msg import Msg
    from nats.aio.subscription import Subscription

log = logging.getLogger(__name__)

MAX_OUTGOING_BYTES = 8 * 2**20  # events waiting for a slow connection
SUBSCRIBE_TIMEOUT_SECONDS = 2.0  # for the server to confirm a subscription
MAX_REMEMBERED_PUBLISHERS = 4096  # per topic, with their last sequence numbers
PLAIN_TOPIC_ID_PATTERN = re.compile(r"[A-Za-z0-9_-]{1,64}")


class _EventEnvelope(msgspec.Struct, array_like=True, frozen=True):
    """An event in transit. `number` has no gaps within a publisher's topic family; 0 is not counted."""

    publisher: str
    number: int
    event: Event


class _TopicInterest(msgspec.Struct):
    """The listeners of this process on a topic, and their shared subscription."""

    listeners: int = 0
    subscription: Subscription | None = None
    subscribing: asyncio.Task[None] | None = None
    last_numbers: OrderedDict[str, int] = msgspec.field(default_factory=OrderedDict[str, int])


class NatsBus:
    """Event bus over NATS. `has_listeners` is true while connected, since NATS does not report remote listeners."""

    def __init__(
        self, servers: NatsServers, *, namespace: str = "antiphon", buffer: int = MAX_BUFFERED_EVENTS
    ) -> None:
        self._prefix = f"{namespace}.ev"
        self._gap_subject = f"{namespace}.gap"
        self._local = LocalBus(buffer)
        self._publisher_id = uuid.uuid4().hex
        self._interests: dict[str, _TopicInterest] = {}
        self._last_numbers: dict[str, int] = {}
        self._outgoing: deque[tuple[str, bytes]] = deque()
        self._outgoing_bytes = 0
        self._has_outgoing = asyncio.Event()
        self._max_payload = 0
        self._client: Client | None = None  # set while the connection is still being prepared, too
        self._was_connected = False
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(_EventEnvelope)
        self._tasks: set[asyncio.Task[None]] = set()
        self._sending: asyncio.Task[None] | None = None
        self._connection = NatsConnection(
            servers,
            name=f"{namespace} events",
            on_connected=self._on_connected,
            on_disconnected=self._on_disconnected,
            on_error=self._on_error,
            echo=False,
        )

    async def start(self, timeout: float = 10.0) -> None:
        await self._connection.start(timeout)
        self._sending = asyncio.create_task(self._run_sender())

    async def stop(self) -> None:
        """Sends what is queued, then disconnects. Listeners in this process keep receiving local events."""
        if self._sending is not None:
            if self._outgoing and (client := self._connection.client):
                with suppress(TimeoutError):
                    async with asyncio.timeout(SUBSCRIBE_TIMEOUT_SECONDS):
                        await self._send_waiting(client)
                        await self._connection.confirm_flushed(client)
            await cancel_tasks(self._sending)
        await self._connection.stop()
        await cancel_tasks(*self._tasks)

    @property
    def is_connected(self) -> bool:
        return self._connection.client is not None

    # --- publishing ---

    def has_listeners(self, topic: str) -> bool:
        return self._connection.client is not None or self._local.has_listeners(topic)

    def publish(self, topic: str, event: Event) -> None:
        self._local.publish(topic, event)
        if self._connection.client is None:
            return  # The other processes receive a gap once we are reconnected.
        family = get_topic_family(topic) or topic
        number = self._last_numbers[family] = self._last_numbers.get(family, 0) + 1
        data = self._encoder.encode(_EventEnvelope(self._publisher_id, number, event))
        if len(data) > self._max_payload:
            data = self._encoder.encode(_EventEnvelope(self._publisher_id, number, Gap()))
        self._enqueue(self._build_subject(topic), data)

    def _enqueue(self, subject: str, data: bytes) -> None:
        if self._outgoing_bytes + len(data) > MAX_OUTGOING_BYTES:
            log.warning("Events are published faster than NATS accepts them; some were dropped")
            self._outgoing.clear()
            self._outgoing_bytes = 0
            self._outgoing.append((self._gap_subject, b""))
        self._outgoing.append((subject, data))
        self._outgoing_bytes += len(data)
        self._has_outgoing.set()

    async def _run_sender(self) -> None:
        while True:
            await self._has_outgoing.wait()
            client = await self._connection.wait_until_connected()
            self._has_outgoing.clear()
            try:
                await self._send_waiting(client)
            except list_connection_errors():
                pass  # The connection is being replaced, which is reported as a gap.
            except Exception:
                log.exception("Failed to send an event")
                self._outgoing.append((self._gap_subject, b""))

    async def _send_waiting(self, client: Client) -> None:
        while self._outgoing:
            subject, data = self._outgoing.popleft()
            self._outgoing_bytes -= len(data)
            await client.publish(subject, data)

    def _build_subject(self, topic: str) -> str:
        word, dot, name = topic.partition(".")
        if not dot:
            return f"{self._prefix}.{word}"
        if name == "*" or PLAIN_TOPIC_ID_PATTERN.fullmatch(name):
            return f"{self._prefix}.{word}.{name}"
        # Run ids are chosen by callers, and a subject cannot hold arbitrary text.
        return f"{self._prefix}.{word}.~{hashlib.blake2b(name.encode(), digest_size=16).hexdigest()}"

    # --- listening ---

    @asynccontextmanager
    async def listen(self, topic: str) -> AsyncGenerator[Listener]:
        async with self._local.listen(topic) as listener:
            interest = self._interests.setdefault(topic, _TopicInterest())
            interest.listeners += 1
            try:
                await self._wait_until_subscribed(topic, interest)
                yield listener
            finally:
                interest.listeners -= 1
                if not interest.listeners:
                    del self._interests[topic]
                    self._drop_subscription(interest)

    async def _wait_until_subscribed(self, topic: str, interest: _TopicInterest) -> None:
        """Waits until the server has the subscription; while it is down, reconnecting subscribes and delivers a gap."""
        client = self._client
        if client is None:
            return
        if interest.subscribing is None:
            interest.subscribing = self._start_task(self._subscribe(client, topic, interest))
        _, pending = await asyncio.wait([interest.subscribing], timeout=SUBSCRIBE_TIMEOUT_SECONDS)
        if pending:
            log.warning("NATS did not confirm a subscription in time; events of other replicas may be late")

    async def _subscribe(self, client: Client, topic: str, interest: _TopicInterest) -> None:
        try:
            interest.subscription = await subscribe(
                client, self._build_subject(topic), self._build_handler(topic, interest)
            )
            if not interest.listeners:
                self._drop_subscription(interest)
            elif not await self._connection.confirm_flushed(client):
                self._local.deliver(topic, Gap())
        except list_connection_errors():
            pass  # The connection is being replaced, and every subscription is renewed with it.

    def _build_handler(self, topic: str, interest: _TopicInterest) -> MessageHandler:
        covers_family = topic.endswith(".*") or "." not in topic

        async def receive(message: Msg) -> None:
            try:
                envelope = self._decoder.decode(message.data)
            except msgspec.MsgspecError:
                log.warning("An event of another replica could not be decoded; it may have another version")
                self._local.deliver_gap(topic)
                return
            if envelope.publisher == self._publisher_id:
                return
            if covers_family and self._has_gap(interest, envelope):
                self._local.deliver_gap(topic)
            self._local.deliver(topic, envelope.event)

        return receive

    @staticmethod
    def _has_gap(interest: _TopicInterest, envelope: _EventEnvelope) -> bool:
        """Whether an event of this publisher was lost."""
        previous = interest.last_numbers.pop(envelope.publisher, None)
        interest.last_numbers[envelope.publisher] = envelope.number
        if len(interest.last_numbers) > MAX_REMEMBERED_PUBLISHERS:
            interest.last_numbers.popitem(last=False)
        return previous is not None and envelope.number != previous + 1

    async def _on_gap(self, message: Msg) -> None:
        self._local.deliver_gap()

    def _drop_subscription(self, interest: _TopicInterest) -> None:
        subscription, interest.subscription = interest.subscription, None
        if subscription is not None:
            self._start_task(_unsubscribe(subscription))

    # --- the connection ---

    async def _on_connected(self, client: Client) -> None:
        """Renews all subscriptions and reports a gap, locally and to the other processes."""
        self._client = client
        self._max_payload = client.max_payload
        await subscribe(client, self._gap_subject, self._on_gap)
        for topic, interest in list(self._interests.items()):
            interest.last_numbers.clear()
            interest.subscribing = self._start_task(self._subscribe(client, topic, interest))
        await self._connection.confirm_flushed(client)
        if self._was_connected:
            self._outgoing.appendleft((self._gap_subject, b""))
            self._has_outgoing.set()
            self._local.deliver_gap()
        self._was_connected = True

    def _on_disconnected(self) -> None:
        self._client = None
        self._outgoing.clear()
        self._outgoing_bytes = 0
        for interest in self._interests.values():
            interest.subscription = interest.subscribing = None

    def _on_error(self, error: Exception) -> None:
        from nats.errors import SlowConsumerError  # noqa: PLC0415 - an extra

        if isinstance(error, SlowConsumerError):
            log.warning("Events of other replicas arrive faster than they are handled; some were dropped")
            self._local.deliver_gap()

    def _start_task(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


async def _unsubscribe(subscription: Subscription) -> None:
    with suppress(*list_connection_errors()):
        await subscription.unsubscribe()
