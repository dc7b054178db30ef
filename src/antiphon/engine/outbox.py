"""The one way out for words that nobody is waiting for: the outbox, and the gate in front of every destination.

A delivery is let through by the session's send policy, cleared of what is not meant for people (`engine.gate`) and
then handed to its channel, in the order of its place. It is on record as being sent before it is handed over: if
the process dies in between, a channel that honours keys gets it again, and for any other the doubt is a state that
people see (`ambiguous`). A web chat is a transcript and whoever watches it, so posting there is a commit and a hint.
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
from antiphon.engine import deliveries, gate, tasks
from antiphon.engine.deliveries import WEBCHAT, Destination
from antiphon.engine.door import Door
from antiphon.errors import AntiphonError, StoreError, StoreReplaced, Undeliverable
from antiphon.store import Row, Store, Tx
from antiphon.store.queries import Queries

log = logging.getLogger(__name__)

SQL = Queries("deliveries")
EXCHANGES = Queries("exchanges")
SESSIONS = Queries("sessions")
AT_ONCE = 32
LOOK_AGAIN = 5.0  # seconds after which the outbox is looked into though nobody said so
PATIENCE = 30.0  # seconds a channel may take for one delivery
ATTEMPTS = 8
LEAVING = 5.0  # seconds that what is being sent has to end when the process stops
LONGEST = 120.0  # seconds between two attempts
RECORD_AGAIN = 1.0  # seconds until a store that could not be written to is tried again


class _Outcome(NamedTuple):
    """What a delivery has come to."""

    state: str
    error: str | None = None
    message_id: str | None = None
    next_at: int = 0
    doubtful: bool = False


class Channel(Protocol):
    """A way to people outside. `keyed` is whether a key that was posted before has no effect again."""

    keyed: bool

    async def post(self, key: str, where: Destination, text: str) -> str | None:
        """The id of the message there, if there is one.

        Raises:
            Undeliverable: it was not sent. Any other error leaves that open.
        """
        ...


class Outbox(msgspec.Struct):
    store: Store
    bus: EventBus
    clock: Clock
    door: Door
    channels: Mapping[str, Channel] = msgspec.field(default_factory=dict[str, Channel])
    _woken: asyncio.Event = msgspec.field(default_factory=asyncio.Event)
    _under_way: dict[str, asyncio.Task[None]] = msgspec.field(default_factory=dict[str, asyncio.Task[None]])

    def wake(self) -> None:
        self._woken.set()

    async def run(self, owner: str) -> None:
        """Until cancelled."""
        try:
            while True:
                self._woken.clear()
                pause = LOOK_AGAIN
                try:
                    pause = await self._work(owner)
                except AntiphonError as error:
                    log.error("%s", error)
                except Exception:  # whatever it is, what others have put here must not wait for a restart
                    log.exception("The outbox failed; it is looked into again in %.0f s", pause)
                await self._rest(pause)
        finally:
            await self._leave()

    async def _leave(self) -> None:
        """What is being sent gets a moment to end: nobody else can tell whether it has."""
        under_way = list(self._under_way.values())
        if under_way:
            await asyncio.wait(under_way, timeout=LEAVING)
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)

    async def _rest(self, seconds: float) -> None:
        # Not `wait_for`: until Python 3.12 it loses a cancellation that comes with what it waits for.
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._woken.wait()

    async def _work(self, owner: str) -> float:
        """Begin with everything that is due, a place at a time; seconds until the next is."""
        sending = frozenset(self._under_way)
        if await self.store.read(_left_sending, owner, sending, self.clock.now()):
            await self.store.tx(self._doubt, owner, sending, self.clock.now())
        for row in await self.store.read(_due, self.clock.now()):
            if row["place"] not in self._under_way and len(self._under_way) < AT_ONCE:
                self._begin(row, owner)
        later = await self.store.read(_next_at, self.clock.now())
        return LOOK_AGAIN if later is None else min(LOOK_AGAIN, max(0.0, (later - self.clock.now()) / 1000))

    def _begin(self, row: Row, owner: str) -> None:
        """A place that is slow holds up nobody else's."""
        task = asyncio.create_task(self._deliver(row, owner))
        self._under_way[row["place"]] = task
        task.add_done_callback(lambda done: self._ended(row["place"], done))

    def _ended(self, place: str, task: asyncio.Task[None]) -> None:
        del self._under_way[place]
        if task.cancelled():
            return
        if error := task.exception():
            # Not at once again: what fails like this most often fails each time.
            log.error("A delivery to %r could not be put on record: %s", place, error, exc_info=error)
        else:
            self.wake()

    async def _deliver(self, row: Row, owner: str) -> None:
        text = gate.clear(row["body"], stats=row["stats"], own_key=row["session_key"])
        where = deliveries.read(row["destination"])
        channel = self.channels.get(where.channel)
        if where.channel == WEBCHAT:
            if await self.store.tx(self._show, row, text, self.clock.now()):
                self._tell(row, text)
        elif channel is None:
            error = f"There is no channel {where.channel!r} here. Set it up, then deliver again."
            await self._settled(row, "dead", error=error, sent=False)
        elif await self.store.tx(self._claim, row, text, owner, self.clock.now()):
            await self._post(row, channel, where, text)

    # --- the gate ---

    async def _refused(self, tx: Tx, row: Row, text: str) -> _Outcome | None:
        """What a delivery comes to without being sent."""
        session = await tx.one(SESSIONS.by_id, id=row["session"])
        channel = deliveries.read(row["destination"]).channel
        if session is None and channel == WEBCHAT:
            return _Outcome("dead", "The session is gone. There is nobody to deliver to.")
        if not self.door.may_post(row["session_key"], channel, session):
            return _Outcome(
                "blocked", "send blocked by session policy. Change session.sendPolicy, then deliver again."
            )
        if not text:
            return _Outcome("blocked", "Nothing of it is meant for people. There is nothing to deliver.")
        return None

    async def _show(self, tx: Tx, row: Row, text: str, now: int) -> bool:
        refused = await self._refused(tx, row, text)
        return await _settle(tx, row, refused or _Outcome("delivered"), now) and refused is None

    async def _claim(self, tx: Tx, row: Row, text: str, owner: str, now: int) -> bool:
        if refused := await self._refused(tx, row, text):
            await _settle(tx, row, refused, now)
            return False
        return bool(await tx.do(SQL.claim, n=row["n"], owner=owner, attempts=row["attempts"]))

    # --- channels ---

    async def _post(self, row: Row, channel: Channel, where: Destination, text: str) -> None:
        try:
            async with asyncio.timeout(PATIENCE):
                message_id = await channel.post(row["key"], where, text)
        except Undeliverable as error:
            await self._failed(row, str(error), again=not error.final, doubtful=False)
        except (
            Exception
        ) as error:  # a channel is not ours: whatever it raises, whether it was sent is not known
            about = {"session_key": row["session_key"]}
            log.warning(
                "Delivery %r may or may not have been sent: %s", row["key"], error, exc_info=True, extra=about
            )
            await self._failed(row, f"{type(error).__name__}: {error}", again=channel.keyed, doubtful=True)
        else:
            await self._settled(row, "delivered", message_id=message_id)

    async def _failed(self, row: Row, error: str, *, again: bool, doubtful: bool) -> None:
        attempts = row["attempts"] + 1
        if not again or attempts >= ATTEMPTS:
            # Once in doubt, a sure failure of a later attempt says nothing about the earlier one.
            state = "ambiguous" if doubtful or row["doubtful"] else "dead"
            await self._settled(row, state, error=error)
            return
        seconds = min(LONGEST, 2.0**attempts) * random.uniform(0.5, 1.0)  # noqa: S311
        next_at = self.clock.now() + round(seconds * 1000)
        await self._settled(row, "pending", error=error, next_at=next_at, doubtful=doubtful)

    async def _settled(
        self,
        row: Row,
        state: str,
        *,
        error: str | None = None,
        message_id: str | None = None,
        next_at: int = 0,
        doubtful: bool = False,
        sent: bool = True,
    ) -> None:
        outcome = _Outcome(state, error, message_id, next_at, doubtful)
        attempts = row["attempts"] + int(sent)
        if await self._put_on_record(row, outcome, attempts) and state in {"dead", "ambiguous"}:
            about = {"session_key": row["session_key"]}
            log.warning("Delivery %r is %s: %s", row["key"], state, error, extra=about)

    async def _put_on_record(self, row: Row, outcome: _Outcome, attempts: int) -> bool:
        """As soon as the store takes it. If that is so late that others have taken the delivery over, it is theirs."""
        while True:
            try:
                return await self.store.tx(_settle, row, outcome, self.clock.now(), attempts)
            except StoreReplaced:
                return False  # already logged, and nothing can be written before a restart
            except StoreError as error:
                log.error("What became of delivery %r cannot be put on record yet: %s", row["key"], error)
                await asyncio.sleep(RECORD_AGAIN)

    async def _doubt(self, tx: Tx, owner: str, sending: Set[str], now: int) -> None:
        """What an owner that is gone had in hand, or we ourselves without knowing."""
        for row in await _left_sending(tx, owner, sending, now):
            channel = self.channels.get(deliveries.read(row["destination"]).channel)
            if channel is not None and channel.keyed:
                await _settle(tx, row, _Outcome("pending", next_at=now, doubtful=True), now)
            else:
                error = (
                    "The gateway stopped while this was being sent. Look there before you deliver it again."
                )
                await _settle(tx, row, _Outcome("ambiguous", error), now)

    def _tell(self, row: Row, text: str) -> None:
        event = Delivered(
            session_key=row["session_key"],
            key=row["key"],
            run_id=row["entry_run"],
            kind=row["kind"],
            text=text,
        )
        self.bus.publish(session_topic(row["session"]), event)


async def _left_sending(tx: Tx, owner: str, sending: Set[str], now: int) -> list[Row]:
    """Of others by their lease; of our own by what is in our hands."""
    rows = await tx.all(SQL.left_sending, owner=owner, now=now)
    return [row for row in rows if row["owner"] != owner or row["place"] not in sending]


async def _due(tx: Tx, now: int) -> list[Row]:
    return await tx.all(SQL.due, now=now, limit=AT_ONCE)


async def _next_at(tx: Tx, now: int) -> int | None:
    row = await tx.one(SQL.next_at, now=now)
    return row["next_at"] if row else None


async def _settle(tx: Tx, row: Row, outcome: _Outcome, now: int, attempts: int | None = None) -> bool:
    """The delivery, and what it was the announcement of, unless it went on since that attempt."""
    state = outcome.state
    settled = await tx.do(
        SQL.settle,
        n=row["n"],
        attempts=row["attempts"] if attempts is None else attempts,
        state=state,
        error=outcome.error,
        message_id=outcome.message_id,
        next_at=outcome.next_at,
        doubtful=int(outcome.doubtful),
        now=now,
    )
    if state == "pending" or not settled:
        return bool(settled)
    if row["entry_run"] is not None:
        await tx.do(SQL.mark_shown, run_id=row["entry_run"], shown=int(state != "blocked"))
    if row["exchange"] is not None:
        await tx.do(EXCHANGES.announced, n=row["exchange"], announced=state)
    if row["task"] is not None:
        await tasks.announced(tx, row["task"], state, now)
    return True
