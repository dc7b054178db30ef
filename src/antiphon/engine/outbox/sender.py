"""Sends deliveries from the outbox to their channels.

A delivery is checked against the session's send policy, sanitized (`sanitize`) and then posted to its channel, in order
per destination. It is marked as being sent before it is posted: if the process dies in between, a channel with
idempotency keys gets it again, and for any other channel it becomes `ambiguous`, which people can see. The web chat
shows the transcript itself, so a delivery there is only a commit and an event.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Mapping, Set
from contextlib import suppress
from typing import NamedTuple, Protocol

import msgspec

from antiphon.bus import Delivered, EventBus, session_topic
from antiphon.clock import Clock
from antiphon.engine.collaboration import task_rows
from antiphon.engine.outbox import delivery_rows, sanitize
from antiphon.engine.outbox.delivery_rows import WEBCHAT_CHANNEL, Destination
from antiphon.engine.sessions.resolver import SessionResolver
from antiphon.errors import AntiphonError, StoreError, StoreReplaced, Undeliverable
from antiphon.store import Row, Store, Tx
from antiphon.store.queries import Queries

log = logging.getLogger(__name__)

SQL = Queries("deliveries")
EXCHANGES_SQL = Queries("exchanges")
SESSIONS_SQL = Queries("sessions")
MAX_CONCURRENT_DELIVERIES = 32
OUTBOX_POLL_SECONDS = 5.0  # without a wake
CHANNEL_POST_TIMEOUT_SECONDS = 30.0  # for one delivery
MAX_DELIVERY_ATTEMPTS = 8
SHUTDOWN_GRACE_SECONDS = 5.0  # for active deliveries when the process stops
MAX_RETRY_DELAY_SECONDS = 120.0
RECORD_RETRY_SECONDS = 1.0  # after a failed write to the store


class _DeliveryOutcome(NamedTuple):
    """The outcome of one delivery attempt."""

    state: str
    error: str | None = None
    message_id: str | None = None
    next_at: int = 0
    may_have_been_sent: bool = False


class DeliveryChannel(Protocol):
    """A channel to people. `is_idempotent` means that posting the same key again has no effect."""

    is_idempotent: bool

    async def post(self, key: str, destination: Destination, text: str) -> str | None:
        """Post a text. Returns the id of the message on the channel, if it has one.

        Raises:
            Undeliverable: it was not sent. After any other error it may have been sent.
        """
        ...


class Outbox(msgspec.Struct):
    store: Store
    bus: EventBus
    clock: Clock
    resolver: SessionResolver
    channels: Mapping[str, DeliveryChannel] = msgspec.field(default_factory=dict[str, DeliveryChannel])
    _wake_event: asyncio.Event = msgspec.field(default_factory=asyncio.Event)
    _active: dict[str, asyncio.Task[None]] = msgspec.field(default_factory=dict[str, asyncio.Task[None]])

    def wake(self) -> None:
        self._wake_event.set()

    async def run(self, owner: str) -> None:
        """Send due deliveries until cancelled."""
        try:
            while True:
                self._wake_event.clear()
                pause = OUTBOX_POLL_SECONDS
                try:
                    pause = await self._start_due_deliveries(owner)
                except AntiphonError as error:
                    log.error("%s", error)
                except Exception:  # other deliveries must not wait for a restart
                    log.exception("Outbox failed; retrying in %.0f s", pause)
                await self._sleep_until_woken(pause)
        finally:
            await self._drain()

    async def _drain(self) -> None:
        """Give active deliveries time to finish: no other process can know their outcome."""
        active = list(self._active.values())
        if active:
            await asyncio.wait(active, timeout=SHUTDOWN_GRACE_SECONDS)
        for task in active:
            task.cancel()
        await asyncio.gather(*active, return_exceptions=True)

    async def _sleep_until_woken(self, seconds: float) -> None:
        # Not `wait_for`: before Python 3.12 it loses a cancellation that coincides with the event.
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._wake_event.wait()

    async def _start_due_deliveries(self, owner: str) -> float:
        """Start due deliveries, one per destination at a time. Returns the seconds until the next one is due."""
        sending = frozenset(self._active)
        if await self.store.read(_list_abandoned, owner, sending, self.clock.now()):
            await self.store.tx(self._settle_abandoned_deliveries, owner, sending, self.clock.now())
        for row in await self.store.read(_list_due, self.clock.now()):
            if row["place"] not in self._active and len(self._active) < MAX_CONCURRENT_DELIVERIES:
                self._start_delivery(row, owner)
        next_at = await self.store.read(_load_next_due_time, self.clock.now())
        if next_at is None:
            return OUTBOX_POLL_SECONDS
        return min(OUTBOX_POLL_SECONDS, max(0.0, (next_at - self.clock.now()) / 1000))

    def _start_delivery(self, row: Row, owner: str) -> None:
        """Start a delivery as its own task, so that a slow destination does not delay others."""
        task = asyncio.create_task(self._deliver(row, owner))
        self._active[row["place"]] = task
        task.add_done_callback(lambda done: self._on_delivery_done(row["place"], done))

    def _on_delivery_done(self, destination_key: str, task: asyncio.Task[None]) -> None:
        del self._active[destination_key]
        if task.cancelled():
            return
        if error := task.exception():
            # No immediate retry, since such a failure usually repeats.
            log.error("Failed to record a delivery to %r: %s", destination_key, error, exc_info=error)
        else:
            self.wake()

    async def _deliver(self, row: Row, owner: str) -> None:
        text = sanitize.sanitize_for_people(row["body"], stats=row["stats"], own_key=row["session_key"])
        destination = delivery_rows.decode_destination(row["destination"])
        channel = self.channels.get(destination.channel)
        if destination.channel == WEBCHAT_CHANNEL:
            if await self.store.tx(self._settle_webchat_delivery, row, text, self.clock.now()):
                self._publish_delivered(row, text)
        elif channel is None:
            error = (
                f"Channel {destination.channel!r} is not configured."
                " Configure it, then run `antiphon deliveries retry`."
            )
            await self._record_outcome(row, _DeliveryOutcome("dead", error), row["attempts"])
        elif await self.store.tx(self._claim_delivery, row, text, owner, self.clock.now()):
            outcome = await self._post_to_channel(row, channel, destination, text)
            await self._record_outcome(row, outcome, row["attempts"] + 1)

    # --- checks ---

    async def _find_refusal(self, tx: Tx, row: Row, text: str) -> _DeliveryOutcome | None:
        """Return the outcome of a delivery that must not be sent, or None."""
        session = await tx.one(SESSIONS_SQL.by_id, id=row["session"])
        channel = delivery_rows.decode_destination(row["destination"]).channel
        if session is None and channel == WEBCHAT_CHANNEL:
            return _DeliveryOutcome("dead", "The session was deleted, so the text cannot be delivered.")
        if not self.resolver.can_post(row["session_key"], channel, session):
            return _DeliveryOutcome(
                "blocked", "send blocked by session policy. Change session.sendPolicy, then retry."
            )
        if not text:
            return _DeliveryOutcome(
                "blocked", "The text contains nothing for people, so there is nothing to deliver."
            )
        return None

    async def _settle_webchat_delivery(self, tx: Tx, row: Row, text: str, now: int) -> bool:
        refused = await self._find_refusal(tx, row, text)
        return (
            await _settle_delivery(tx, row, refused or _DeliveryOutcome("delivered"), now) and refused is None
        )

    async def _claim_delivery(self, tx: Tx, row: Row, text: str, owner: str, now: int) -> bool:
        if refused := await self._find_refusal(tx, row, text):
            await _settle_delivery(tx, row, refused, now)
            return False
        return bool(await tx.do(SQL.claim, n=row["n"], owner=owner, attempts=row["attempts"]))

    # --- channels ---

    async def _post_to_channel(
        self, row: Row, channel: DeliveryChannel, destination: Destination, text: str
    ) -> _DeliveryOutcome:
        try:
            async with asyncio.timeout(CHANNEL_POST_TIMEOUT_SECONDS):
                message_id = await channel.post(row["key"], destination, text)
        except Undeliverable as error:
            return self._build_failure(row, str(error), retryable=not error.final, may_have_been_sent=False)
        except Exception as error:  # foreign code: after any error it is unknown whether the text was sent
            log.warning(
                "Delivery %r failed and may have been sent: %s",
                row["key"],
                error,
                exc_info=True,
                extra={"session_key": row["session_key"]},
            )
            return self._build_failure(
                row,
                f"{type(error).__name__}: {error}",
                retryable=channel.is_idempotent,
                may_have_been_sent=True,
            )
        return _DeliveryOutcome("delivered", message_id=message_id)

    def _build_failure(
        self, row: Row, error: str, *, retryable: bool, may_have_been_sent: bool
    ) -> _DeliveryOutcome:
        attempts = row["attempts"] + 1
        if not retryable or attempts >= MAX_DELIVERY_ATTEMPTS:
            # If an earlier attempt may have been sent, a definite failure now does not resolve it.
            return _DeliveryOutcome("ambiguous" if may_have_been_sent or row["doubtful"] else "dead", error)
        seconds = min(MAX_RETRY_DELAY_SECONDS, 2.0**attempts) * random.uniform(0.5, 1.0)  # noqa: S311
        next_at = self.clock.now() + round(seconds * 1000)
        return _DeliveryOutcome("pending", error, next_at=next_at, may_have_been_sent=may_have_been_sent)

    async def _record_outcome(self, row: Row, outcome: _DeliveryOutcome, attempts: int) -> None:
        """Record an outcome, retrying until the store accepts it or another process has taken over the delivery."""
        while True:
            try:
                recorded = await self.store.tx(_settle_delivery, row, outcome, self.clock.now(), attempts)
            except StoreReplaced:
                return  # already logged, and nothing can be written before a restart
            except StoreError as error:
                log.error("Failed to record the outcome of delivery %r; retrying: %s", row["key"], error)
                await asyncio.sleep(RECORD_RETRY_SECONDS)
            else:
                break
        if recorded and outcome.state in {"dead", "ambiguous"}:
            fields = {"session_key": row["session_key"]}
            log.warning("Delivery %r is %s: %s", row["key"], outcome.state, outcome.error, extra=fields)

    async def _settle_abandoned_deliveries(self, tx: Tx, owner: str, sending: Set[str], now: int) -> None:
        """Settle deliveries that a dead owner was sending, or that this process has lost track of."""
        for row in await _list_abandoned(tx, owner, sending, now):
            channel = self.channels.get(delivery_rows.decode_destination(row["destination"]).channel)
            if channel is not None and channel.is_idempotent:
                await _settle_delivery(
                    tx, row, _DeliveryOutcome("pending", next_at=now, may_have_been_sent=True), now
                )
            else:
                error = "The gateway stopped while this was being sent. Check the channel for it before you retry."
                await _settle_delivery(tx, row, _DeliveryOutcome("ambiguous", error), now)

    def _publish_delivered(self, row: Row, text: str) -> None:
        event = Delivered(
            session_key=row["session_key"],
            key=row["key"],
            run_id=row["entry_run"],
            kind=row["kind"],
            text=text,
        )
        self.bus.publish(session_topic(row["session"]), event)


async def _list_abandoned(tx: Tx, owner: str, sending: Set[str], now: int) -> list[Row]:
    """Return deliveries of owners whose lease expired, and our own that are not being sent."""
    rows = await tx.all(SQL.unresolved_sends, owner=owner, now=now)
    return [row for row in rows if row["owner"] != owner or row["place"] not in sending]


async def _list_due(tx: Tx, now: int) -> list[Row]:
    return await tx.all(SQL.due, now=now, limit=MAX_CONCURRENT_DELIVERIES)


async def _load_next_due_time(tx: Tx, now: int) -> int | None:
    row = await tx.one(SQL.next_at, now=now)
    return row["next_at"] if row else None


async def _settle_delivery(
    tx: Tx, row: Row, outcome: _DeliveryOutcome, now: int, attempts: int | None = None
) -> bool:
    """Settle a delivery and the exchange or task it announces. False if it has changed since that attempt."""
    state = outcome.state
    settled = await tx.do(
        SQL.settle,
        n=row["n"],
        attempts=row["attempts"] if attempts is None else attempts,
        state=state,
        error=outcome.error,
        message_id=outcome.message_id,
        next_at=outcome.next_at,
        doubtful=int(outcome.may_have_been_sent),
        now=now,
    )
    if state == "pending" or not settled:
        return bool(settled)
    if row["entry_run"] is not None:
        await tx.do(SQL.mark_shown, run_id=row["entry_run"], shown=int(state != "blocked"))
    if row["exchange"] is not None:
        await tx.do(EXCHANGES_SQL.set_announced, n=row["exchange"], announced=state)
    if row["task"] is not None:
        await task_rows.record_announce_outcome(tx, row["task"], state, now)
    return True
