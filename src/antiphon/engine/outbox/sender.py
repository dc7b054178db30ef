"""Sends deliveries from the outbox to their channels.

A delivery is checked against the session's send policy, sanitized (`sanitize`) and sent to its channel, in order per
destination and in parts that the service accepts. Before a part is sent, the store records that it is being sent, and
afterwards its receipt. If the process dies in between, the part is sent again if the service recognizes its key, or
looked for at the service; otherwise the delivery becomes `ambiguous`, which people can see. The web chat shows the
transcript itself, so a delivery there is only a commit and an event.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from typing import NamedTuple, ParamSpec, TypeVar

import msgspec

from antiphon.bus import Delivered, EventBus, session_topic
from antiphon.clock import Clock
from antiphon.engine.collaboration import task_rows
from antiphon.engine.outbox import delivery_rows, sanitize
from antiphon.engine.outbox.delivery_channel import DeliveryChannel, Part, Receipt, RenderedPart
from antiphon.engine.outbox.delivery_rows import WEBCHAT_CHANNEL, Destination
from antiphon.engine.outbox.pacing import Pacer
from antiphon.engine.sessions.resolver import SessionResolver
from antiphon.errors import AntiphonError, NotSent, Refused, StoreError, StoreReplaced
from antiphon.store import Row, Script, Store, Tx
from antiphon.store.queries import Queries

P = ParamSpec("P")
T = TypeVar("T")

log = logging.getLogger(__name__)

SQL = Queries("deliveries")
EXCHANGES_SQL = Queries("exchanges")
SESSIONS_SQL = Queries("sessions")
MAX_CONCURRENT_DELIVERIES = 32
OUTBOX_POLL_SECONDS = 5.0  # without a wake
CHANNEL_SEND_TIMEOUT_SECONDS = 30.0  # for one part
MAX_UNSURE_ATTEMPTS = 8
SHUTDOWN_GRACE_SECONDS = 5.0  # for active deliveries when the process stops
MAX_RETRY_DELAY_SECONDS = 120.0
REFUSED_CREDENTIALS_RETRY_SECONDS = 60.0
RECORD_RETRY_SECONDS = 1.0  # after a failed write to the store
ABANDONED_ERROR = "The gateway stopped while this was being sent. Check the channel for it before you retry."
EXPIRED_ERROR = "It could not be sent in time, and would be out of date now. Retry it if it still matters."


class _DeliveryOutcome(NamedTuple):
    """The outcome of one delivery attempt."""

    state: str
    error: str | None = None
    receipt: Receipt | None = None
    """The receipt of the last part, if the delivery is complete."""
    next_at: int = 0
    may_have_been_sent: bool = False
    is_attempt: bool = True
    """Whether it counts as an attempt; waiting as long as a service asked for does not."""
    held_until: int | None = None
    """The time until which nothing may be sent from the same account."""
    moved_to: Destination | None = None
    """The new address of the chat."""


class Outbox(msgspec.Struct):
    store: Store
    bus: EventBus
    clock: Clock
    resolver: SessionResolver
    channels: Mapping[str, DeliveryChannel] = msgspec.field(default_factory=dict[str, DeliveryChannel])
    _pacer: Pacer = msgspec.field(default_factory=Pacer)
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
        sending, now = frozenset(self._active), self.clock.now()
        if await self.store.read(_list_abandoned, owner, sending, now):
            await self.store.tx(self._settle_abandoned_deliveries, owner, sending, now)
        holds: dict[str, int] = {}
        if self.channels:
            if await self.store.read(_list_expired, now):
                await self.store.tx(_settle_expired_deliveries, now)
            holds = await self.store.read(_load_holds, now)
        pause_ms = OUTBOX_POLL_SECONDS * 1000
        after = 0
        while len(self._active) < MAX_CONCURRENT_DELIVERIES:
            rows = await self.store.read(_list_due, self.clock.now(), after)
            for row in rows:
                delay = self._find_delay(row, holds)
                if delay:
                    pause_ms = min(pause_ms, delay)
                elif row["place"] not in self._active and len(self._active) < MAX_CONCURRENT_DELIVERIES:
                    self._start_delivery(row, owner)
            if len(rows) < MAX_CONCURRENT_DELIVERIES:
                break
            after = rows[-1]["n"]
        next_at = await self.store.read(_load_next_due_time, self.clock.now())
        if next_at is not None:
            pause_ms = min(pause_ms, next_at - self.clock.now())
        return max(0.0, pause_ms / 1000)

    def _find_delay(self, row: Row, holds: Mapping[str, int]) -> float:
        """Return the milliseconds that a due delivery has to wait for its channel; then it is considered again."""
        channel = self.channels.get(row["place"].partition("|")[0])
        if channel is None:
            return 0
        destination, now = delivery_rows.decode_destination(row["destination"]), self.clock.now()
        if not channel.is_ready(destination.account_id):
            return OUTBOX_POLL_SECONDS * 1000
        account = delivery_rows.build_account_name(destination)
        if (held_until := holds.get(account, 0)) > now:
            return held_until - now
        return self._pacer.compute_delay(account, row["place"], channel.get_pace(destination), now)

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
            await self._record_outcome(row, _DeliveryOutcome("dead", error), row["attempts"], row["owner"])
        else:
            await self._deliver_to_channel(row, channel, destination, text, owner)

    async def _deliver_to_channel(
        self, row: Row, channel: DeliveryChannel, destination: Destination, text: str, owner: str
    ) -> None:
        rendered = channel.render(text, destination) if text else ()
        parts = await self.store.tx(self._claim_delivery, row, text, rendered, owner, self.clock.now())
        if parts is not None:
            outcome = await self._send_parts(row, parts, channel, destination, owner)
            if outcome is not None:
                await self._record_outcome(row, outcome, row["attempts"] + 1, owner)

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

    async def _claim_delivery(
        self, tx: Tx, row: Row, text: str, rendered: Sequence[RenderedPart], owner: str, now: int
    ) -> list[Row] | None:
        """Return the parts that are still to be sent, or None if the delivery is not to be sent now.

        A delivery keeps the parts that it was rendered into at first.
        """
        if refused := await self._find_refusal(tx, row, text):
            await _settle_delivery(tx, row, refused, now)
            return None
        if not await tx.do(SQL.claim, n=row["n"], owner=owner, attempts=row["attempts"]):
            return None
        stored = await tx.one(SQL.count_parts, delivery=row["n"])
        if not (stored and stored["parts"]):
            for number, part in enumerate(rendered, 1):
                await tx.do(SQL.insert_part, delivery=row["n"], n=number, text=part.text, plain=part.plain)
        unsent = await tx.all(SQL.unsent_parts, delivery=row["n"])
        await tx.do(SQL.start_part, delivery=row["n"], n=unsent[0]["n"], now=now)
        return await tx.all(SQL.unsent_parts, delivery=row["n"])

    # --- channels ---

    async def _send_parts(
        self, row: Row, parts: Sequence[Row], channel: DeliveryChannel, destination: Destination, owner: str
    ) -> _DeliveryOutcome | None:
        """Send the remaining parts. Returns None if another process has taken over the delivery."""
        account = delivery_rows.build_account_name(destination)
        pace = channel.get_pace(destination)
        is_doubtful = bool(row["doubtful"])
        for index, stored in enumerate(parts):
            now = self.clock.now()
            if index and (delay := self._pacer.compute_delay(account, row["place"], pace, now)):
                return _DeliveryOutcome("pending", next_at=now + delay, is_attempt=False)
            self._pacer.record(account, row["place"], pace, now)
            result = await self._send_part(row, stored, channel, destination, is_doubtful=is_doubtful)
            if isinstance(result, _DeliveryOutcome):
                return result
            if index == len(parts) - 1:
                return _DeliveryOutcome("delivered", receipt=result)
            if not await self._write(row, _record_part, row, stored["n"], result, owner, self.clock.now()):
                return None
            is_doubtful = False
        return _DeliveryOutcome("delivered")

    async def _send_part(
        self,
        row: Row,
        stored: Row,
        channel: DeliveryChannel,
        destination: Destination,
        *,
        is_doubtful: bool,
    ) -> Receipt | _DeliveryOutcome:
        """Send a part, or find out whether it was sent. With `is_doubtful`, an earlier attempt may have been taken."""
        started_at = stored["started_at"] or self.clock.now()
        window_ends_at = started_at + channel.idempotency_seconds * 1000
        part = Part(
            key=row["key"],
            n=stored["n"],
            destination=destination,
            text=stored["text"],
            has_markup=stored["plain"] is not None,
        )
        if is_doubtful and self.clock.now() >= window_ends_at:
            return await self._resolve_doubt(channel, part, started_at, row["error"] or ABANDONED_ERROR)
        try:
            async with asyncio.timeout(CHANNEL_SEND_TIMEOUT_SECONDS):
                return await _send_without_refused_markup(channel, part, stored["plain"])
        except NotSent as error:
            return self._build_wait(row, error)
        except Refused as error:
            return self._build_refusal(row, error, destination, is_doubtful=is_doubtful)
        except Exception as error:  # foreign code: after any other error it is unknown whether it was sent
            log.warning(
                "Delivery %r failed and may have been sent: %s",
                row["key"],
                error,
                exc_info=not isinstance(error, AntiphonError),
                extra={"session_key": row["session_key"]},
            )
            text = str(error) if isinstance(error, AntiphonError) else f"{type(error).__name__}: {error}"
            attempts = row["attempts"] + 1
            next_at = self._compute_retry_time(attempts)
            if attempts < MAX_UNSURE_ATTEMPTS and self.clock.now() < window_ends_at:
                next_at = round(min(next_at, max(self.clock.now(), window_ends_at - 1000)))
                return _DeliveryOutcome("pending", text, next_at=next_at, may_have_been_sent=True)
            return await self._resolve_doubt(channel, part, started_at, text)

    async def _resolve_doubt(
        self, channel: DeliveryChannel, part: Part, since: int, error: str
    ) -> Receipt | _DeliveryOutcome:
        """Look at the service for a part that may have been sent and cannot be sent again safely."""
        if channel.can_find:
            try:
                async with asyncio.timeout(CHANNEL_SEND_TIMEOUT_SECONDS):
                    receipt = await channel.find(part, since)
            except Exception as failure:  # foreign code
                log.warning("Failed to look for delivery %r: %s", part.key, failure, exc_info=True)
            else:
                if receipt is not None:
                    return receipt
        return _DeliveryOutcome("ambiguous", error, may_have_been_sent=True)

    def _build_wait(self, row: Row, error: NotSent) -> _DeliveryOutcome:
        """Return the outcome of a message that was not sent: another attempt, until it expires."""
        if error.retry_after is None:
            return _DeliveryOutcome(
                "pending", str(error), next_at=self._compute_retry_time(row["attempts"] + 1)
            )
        until = self.clock.now() + round(error.retry_after * 1000)
        return _DeliveryOutcome(
            "pending",
            str(error),
            next_at=until,
            is_attempt=False,
            held_until=until if error.whole_account else None,
        )

    def _build_refusal(
        self, row: Row, error: Refused, destination: Destination, *, is_doubtful: bool
    ) -> _DeliveryOutcome:
        now, attempts = self.clock.now(), row["attempts"] + 1
        if error.kind == "auth":
            until = now + round(REFUSED_CREDENTIALS_RETRY_SECONDS * 1000)
            return _DeliveryOutcome("pending", str(error), next_at=until, is_attempt=False, held_until=until)
        if error.kind == "moved" and error.to is not None and attempts < MAX_UNSURE_ATTEMPTS:
            moved_to = msgspec.structs.replace(destination, to=error.to)
            return _DeliveryOutcome("pending", str(error), next_at=now, moved_to=moved_to)
        # If an earlier attempt may have been sent, a refusal now does not resolve it.
        return _DeliveryOutcome("ambiguous" if is_doubtful else "dead", str(error))

    def _compute_retry_time(self, attempts: int) -> int:
        seconds = min(MAX_RETRY_DELAY_SECONDS, 2.0 ** min(attempts, 10)) * random.uniform(0.5, 1.0)  # noqa: S311
        return self.clock.now() + round(seconds * 1000)

    # --- records ---

    async def _write(self, row: Row, script: Script[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T | None:
        """Run a transaction script, retrying until the store accepts it. None if it never will before a restart."""
        while True:
            try:
                return await self.store.tx(script, *args, **kwargs)
            except StoreReplaced:
                return None  # already logged, and nothing can be written before a restart
            except StoreError as error:
                log.error("Failed to record the outcome of delivery %r; retrying: %s", row["key"], error)
                await asyncio.sleep(RECORD_RETRY_SECONDS)

    async def _record_outcome(
        self, row: Row, outcome: _DeliveryOutcome, attempts: int, owner: str | None
    ) -> None:
        """Record an outcome, unless another process has taken over the delivery."""
        recorded = await self._write(
            row, _settle_delivery, row, outcome, self.clock.now(), attempts=attempts, owner=owner
        )
        if recorded and outcome.state in {"dead", "ambiguous"}:
            fields = {"session_key": row["session_key"]}
            log.warning("Delivery %r is %s: %s", row["key"], outcome.state, outcome.error, extra=fields)

    async def record_late_receipt(self, key: str, n: int, receipt: Receipt) -> bool:
        """Record that a part of an ambiguous delivery has arrived after all. False if it was not in doubt."""
        recorded = await self.store.tx(_resolve_ambiguous_delivery, key, n, receipt, self.clock.now())
        if recorded:
            self.wake()
        return recorded

    async def _settle_abandoned_deliveries(self, tx: Tx, owner: str, sending: Set[str], now: int) -> None:
        """Settle deliveries that a dead owner was sending, or that this process has lost track of."""
        for row in await _list_abandoned(tx, owner, sending, now):
            channel = self.channels.get(delivery_rows.decode_destination(row["destination"]).channel)
            if channel is not None and (channel.idempotency_seconds or channel.can_find):
                outcome = _DeliveryOutcome("pending", ABANDONED_ERROR, next_at=now, may_have_been_sent=True)
            else:
                outcome = _DeliveryOutcome("ambiguous", ABANDONED_ERROR)
            await _settle_delivery(tx, row, outcome, now)

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


async def _list_expired(tx: Tx, now: int) -> list[Row]:
    return await tx.all(SQL.expired, now=now, lifetime=delivery_rows.DELIVERY_LIFETIME_MS)


async def _load_holds(tx: Tx, now: int) -> dict[str, int]:
    return {row["account"]: row["until"] for row in await tx.all(SQL.holds, now=now)}


async def _list_due(tx: Tx, now: int, after: int) -> list[Row]:
    return await tx.all(SQL.due, now=now, after=after, limit=MAX_CONCURRENT_DELIVERIES)


async def _load_next_due_time(tx: Tx, now: int) -> int | None:
    row = await tx.one(SQL.next_at, now=now)
    return row["next_at"] if row else None


async def _send_without_refused_markup(channel: DeliveryChannel, part: Part, plain: str | None) -> Receipt:
    """Send a part, once more without markup if the service refuses the markup."""
    try:
        return await channel.send(part)
    except Refused as error:
        if error.kind != "bad_format" or plain is None:
            raise
        log.warning("The markup of delivery %r was refused; sending it as plain text: %s", part.key, error)
    return await channel.send(msgspec.structs.replace(part, text=plain, has_markup=False))


# --- transaction scripts ---


async def _record_part(tx: Tx, row: Row, number: int, receipt: Receipt, owner: str, now: int) -> bool:
    """Record that a part was sent and that the next one is being sent. False if another process has taken over."""
    owned = await tx.do(
        SQL.confirm_sending,
        n=row["n"],
        owner=owner,
        attempts=row["attempts"] + 1,
        message_id=receipt.message_id,
    )
    if not owned:
        return False
    await tx.do(SQL.record_part, delivery=row["n"], n=number, message_id=receipt.message_id, now=now)
    await tx.do(SQL.start_part, delivery=row["n"], n=number + 1, now=now)
    return True


async def _settle_expired_deliveries(tx: Tx, now: int) -> None:
    for row in await _list_expired(tx, now):
        outcome = _DeliveryOutcome("expired", EXPIRED_ERROR, is_attempt=False)
        if row["doubtful"]:
            outcome = outcome._replace(state="ambiguous", error=row["error"])
        await _settle_delivery(tx, row, outcome, now)


async def _settle_delivery(
    tx: Tx,
    row: Row,
    outcome: _DeliveryOutcome,
    now: int,
    *,
    attempts: int | None = None,
    owner: str | None = None,
) -> bool:
    """Settle a delivery and the exchange or task it announces. False if it has changed since that attempt."""
    state, receipt = outcome.state, outcome.receipt
    counted = row["attempts"] if attempts is None else attempts
    settled = await tx.do(
        SQL.settle,
        n=row["n"],
        owner=owner or row["owner"] or "",
        attempts=counted,
        spent=counted if outcome.is_attempt else row["attempts"],
        state=state,
        error=outcome.error,
        message_id=receipt and receipt.message_id,
        next_at=outcome.next_at,
        doubtful=int(outcome.may_have_been_sent),
        now=now,
    )
    if not settled:
        return False
    if receipt is not None:
        for part in await tx.all(SQL.unsent_parts, delivery=row["n"]):  # the last one
            await tx.do(
                SQL.record_part, delivery=row["n"], n=part["n"], message_id=receipt.message_id, now=now
            )
    if outcome.held_until is not None:
        account = delivery_rows.build_account_name(delivery_rows.decode_destination(row["destination"]))
        await tx.do(SQL.delete_old_holds, now=now)
        await tx.do(SQL.hold, account=account, until=outcome.held_until)
    if outcome.moved_to is not None:
        await tx.do(
            SQL.move,
            place=row["place"],
            destination=outcome.moved_to.json_text,
            new_place=delivery_rows.build_place(outcome.moved_to),
        )
    if state == "pending":
        if not (outcome.may_have_been_sent or row["doubtful"]):
            await tx.do(SQL.restart_parts, delivery=row["n"])
        return True
    await _report_outcome(tx, row, state, now)
    return True


async def _report_outcome(tx: Tx, row: Row, state: str, now: int) -> None:
    """Record the outcome of a delivery in its cause: an entry, an exchange or a task."""
    if row["entry_run"] is not None:
        await tx.do(SQL.mark_shown, run_id=row["entry_run"], shown=int(state != "blocked"))
    if row["exchange"] is not None:
        await tx.do(EXCHANGES_SQL.set_announced, n=row["exchange"], announced=state)
    if row["task"] is not None:
        await task_rows.record_announce_outcome(tx, row["task"], state, now)


async def _resolve_ambiguous_delivery(tx: Tx, key: str, n: int, receipt: Receipt, now: int) -> bool:
    row = await tx.one(SQL.by_key, key=key)
    if row is None or row["state"] != "ambiguous":
        return False
    if not await tx.do(SQL.record_part, delivery=row["n"], n=n, message_id=receipt.message_id, now=now):
        return False
    is_complete = not await tx.all(SQL.unsent_parts, delivery=row["n"])
    state = "delivered" if is_complete else "pending"
    await tx.do(SQL.resolve, n=row["n"], state=state, message_id=receipt.message_id, now=now)
    if is_complete:
        await _report_outcome(tx, row, state, now)
    return True
