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
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from antiphon.bus import Delivered, EventBus, session_topic
from antiphon.clock import Clock
from antiphon.engine import deliveries, gate, tasks
from antiphon.engine.deliveries import WEBCHAT, Destination
from antiphon.engine.door import Door
from antiphon.errors import AntiphonError, Undeliverable
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
LONGEST = 120.0  # seconds between two attempts


class Channel(Protocol):
    """A way to people outside. `keyed` is whether a key that was posted before has no effect again."""

    keyed: bool

    async def post(self, key: str, where: Destination, text: str) -> str | None:
        """The id of the message there, if there is one.

        Raises:
            Undeliverable: it was not sent. Any other error leaves that open.
        """
        ...


@dataclass(slots=True)
class Outbox:
    store: Store
    bus: EventBus
    clock: Clock
    door: Door
    channels: Mapping[str, Channel] = field(default_factory=dict[str, Channel])
    _woken: asyncio.Event = field(default_factory=asyncio.Event)

    def wake(self) -> None:
        self._woken.set()

    async def run(self, owner: str) -> None:
        """Until cancelled."""
        while True:
            self._woken.clear()
            pause = LOOK_AGAIN
            try:
                if await self.store.read(_left_sending, self.clock.now()):
                    await self.store.tx(self._doubt, self.clock.now())
                pause = await self._work(owner)
            except AntiphonError as error:
                log.error("%s", error)
            except Exception:
                log.exception("The outbox failed; it is looked into again in %.0f s", pause)
            # Not `wait_for`: until Python 3.12 it loses a cancellation that comes with what it waits for.
            try:
                async with asyncio.timeout(pause):
                    await self._woken.wait()
            except TimeoutError:
                continue

    async def _work(self, owner: str) -> float:
        """Everything that is due; seconds until the next is."""
        while due := await self.store.read(_due, self.clock.now()):
            await asyncio.gather(*(self._deliver(row, owner) for row in due))
        later = await self.store.read(_next_at, self.clock.now())
        return LOOK_AGAIN if later is None else min(LOOK_AGAIN, max(0.0, (later - self.clock.now()) / 1000))

    async def _deliver(self, row: Row, owner: str) -> None:
        text = gate.clear(row["body"], stats=row["stats"])
        where = deliveries.read(row["destination"])
        channel = self.channels.get(where.channel)
        if where.channel == WEBCHAT:
            if await self.store.tx(self._show, row, text, self.clock.now()):
                self._tell(row, text)
        elif channel is None:
            error = f"There is no channel {where.channel!r} here. Set it up, then deliver again."
            await self._settled(row, "dead", error=error)
        elif await self.store.tx(self._claim, row, text, owner, self.clock.now()):
            await self._post(row, channel, where, text)

    # --- the gate ---

    async def _refused(self, tx: Tx, row: Row, text: str) -> tuple[str, str] | None:
        """The state that a delivery comes to without being sent, and why."""
        session = await tx.one(SESSIONS.by_id, id=row["session"])
        if session is None:
            if deliveries.read(row["destination"]).channel == WEBCHAT:
                return "dead", "The session is gone. There is nobody to deliver to."
        elif not self.door.may_send(session):
            return "blocked", "send blocked by session policy. Change session.sendPolicy, then deliver again."
        if not text:
            return "blocked", "Nothing of it is meant for people. There is nothing to deliver."
        return None

    async def _show(self, tx: Tx, row: Row, text: str, now: int) -> bool:
        refused = await self._refused(tx, row, text)
        state, error = refused or ("delivered", None)
        await _settle(tx, row, state, now, error=error)
        return refused is None

    async def _claim(self, tx: Tx, row: Row, text: str, owner: str, now: int) -> bool:
        if refused := await self._refused(tx, row, text):
            await _settle(tx, row, refused[0], now, error=refused[1])
            return False
        return bool(await tx.do(SQL.claim, n=row["n"], owner=owner))

    # --- channels ---

    async def _post(self, row: Row, channel: Channel, where: Destination, text: str) -> None:
        try:
            async with asyncio.timeout(PATIENCE):
                message_id = await channel.post(row["key"], where, text)
        except Undeliverable as error:
            await self._failed(row, str(error), sure=True, final=error.final)
        except Exception as error:  # noqa: BLE001 - whatever it is, whether it was sent is not known
            log.warning("Delivery %r may or may not have been sent: %s", row["key"], error)
            await self._failed(row, f"{type(error).__name__}: {error}", sure=channel.keyed, final=False)
        else:
            await self._settled(row, "delivered", message_id=message_id)

    async def _failed(self, row: Row, error: str, *, sure: bool, final: bool) -> None:
        attempts = row["attempts"] + 1
        if not sure:
            await self._settled(row, "ambiguous", error=error)
        elif final or attempts >= ATTEMPTS:
            await self._settled(row, "dead", error=error)
        else:
            seconds = min(LONGEST, 2.0**attempts) * random.uniform(0.5, 1.0)  # noqa: S311
            await self._settled(row, "pending", error=error, next_at=self.clock.now() + round(seconds * 1000))

    async def _settled(
        self,
        row: Row,
        state: str,
        *,
        error: str | None = None,
        message_id: str | None = None,
        next_at: int = 0,
    ) -> None:
        await self.store.tx(
            _settle, row, state, self.clock.now(), error=error, message_id=message_id, next_at=next_at
        )
        if state in {"dead", "ambiguous"}:
            about = {"session_key": row["session_key"]}
            log.warning("Delivery %r is %s: %s", row["key"], state, error, extra=about)

    async def _doubt(self, tx: Tx, now: int) -> None:
        """What an owner that is gone had in hand."""
        for row in await _left_sending(tx, now):
            channel = self.channels.get(deliveries.read(row["destination"]).channel)
            if channel is not None and channel.keyed:
                await _settle(tx, row, "pending", now, next_at=now)
            else:
                error = (
                    "The gateway stopped while this was being sent. Look there before you deliver it again."
                )
                await _settle(tx, row, "ambiguous", now, error=error)

    def _tell(self, row: Row, text: str) -> None:
        event = Delivered(
            session_key=row["session_key"],
            key=row["key"],
            run_id=row["entry_run"],
            kind=row["kind"],
            text=text,
        )
        self.bus.publish(session_topic(row["session"]), event)


async def _left_sending(tx: Tx, now: int) -> list[Row]:
    return await tx.all(SQL.left_sending, now=now)


async def _due(tx: Tx, now: int) -> list[Row]:
    return await tx.all(SQL.due, now=now, limit=AT_ONCE)


async def _next_at(tx: Tx, now: int) -> int | None:
    row = await tx.one(SQL.next_at, now=now)
    return row["next_at"] if row else None


async def _settle(
    tx: Tx,
    row: Row,
    state: str,
    now: int,
    *,
    error: str | None = None,
    message_id: str | None = None,
    next_at: int = 0,
) -> None:
    """The delivery, and what it was the announcement of."""
    await tx.do(
        SQL.settle, n=row["n"], state=state, error=error, message_id=message_id, next_at=next_at, now=now
    )
    if state == "pending":
        return
    if row["exchange"] is not None:
        await tx.do(EXCHANGES.announced, n=row["exchange"], announced=state)
    if row["task"] is not None:
        await tasks.announced(tx, row["task"], state, now)
