"""Delivery rows: their destinations, adding them to the outbox, listing them and sending them again.

A delivery is a row written by the commit that causes it, under a key that identifies its cause, so it exists exactly
once. `sender` sends it.
"""

from __future__ import annotations

import msgspec

from antiphon import keys
from antiphon.clock import MILLISECONDS_PER_DAY
from antiphon.errors import Conflict, NotFound
from antiphon.keys import WEBCHAT_CHANNEL
from antiphon.store import Row, Tx
from antiphon.store.queries import Queries

SQL = Queries("deliveries")
DELIVERY_LIFETIME_MS = MILLISECONDS_PER_DAY  # to a service; an older one expires


class Destination(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """The destination of a delivery, fixed when its request is accepted; later messages do not change it."""

    channel: str = WEBCHAT_CHANNEL
    to: str | None = None
    account_id: str | None = None
    thread_id: str | None = None

    @property
    def json_text(self) -> str:
        return msgspec.json.encode(self).decode()


class NewDelivery(msgspec.Struct, frozen=True, kw_only=True):
    key: str
    kind: str
    session: int
    session_key: str
    destination: Destination
    body: str
    stats: str | None = None
    entry_run: str | None = None
    """The run whose transcript entries contain the text, or will contain it, in that session."""
    exchange: int | None = None
    task: int | None = None
    expires_at: int | None = None
    """When it is too old to be sent to a service. None: after `DELIVERY_LIFETIME_MS`."""


def decode_destination(text: str) -> Destination:
    return msgspec.json.decode(text, type=Destination)


def resolve_session_destination(row: Row) -> Destination:
    """Return the chat of a session: its group, else the last channel it was written to from, else the web chat."""
    key = keys.parse(row["key"])
    if key.kind == "group" and key.channel:
        thread = key.thread.id if key.thread else None
        return Destination(channel=key.channel, to=key.id, account_id=row["last_account"], thread_id=thread)
    if row["last_channel"] in {None, "internal", "unknown", WEBCHAT_CHANNEL}:
        return Destination(to=row["key"])
    return Destination(
        channel=row["last_channel"],
        to=row["last_to"],
        account_id=row["last_account"],
        thread_id=row["last_thread"],
    )


def build_place(destination: Destination) -> str:
    """Return the name of a chat or thread; texts for the same place are sent in their order."""
    return f"{build_account_name(destination)}|{destination.to or ''}|{destination.thread_id or ''}"


def build_account_name(destination: Destination) -> str:
    return f"{destination.channel}|{destination.account_id or ''}"


async def enqueue_delivery(tx: Tx, delivery: NewDelivery, now: int) -> None:
    """Add a delivery to the outbox, once per key."""
    destination = delivery.destination
    expires_at = delivery.expires_at
    if expires_at is None and destination.channel != WEBCHAT_CHANNEL:
        expires_at = now + DELIVERY_LIFETIME_MS
    await tx.do(
        SQL.insert,
        key=delivery.key,
        kind=delivery.kind,
        session=delivery.session,
        session_key=delivery.session_key,
        destination=destination.json_text,
        place=build_place(destination),
        body=delivery.body,
        stats=delivery.stats,
        entry_run=delivery.entry_run,
        exchange=delivery.exchange,
        task=delivery.task,
        now=now,
        expires_at=expires_at,
    )


async def list_deliveries(tx: Tx, state: str | None, before: int, limit: int) -> list[Row]:
    """Return deliveries with a number below `before`, newest first."""
    if state is None:
        return await tx.all(SQL.page, before=before, limit=limit)
    return await tx.all(SQL.page_by_state, state=state, before=before, limit=limit)


async def count_by_state(tx: Tx, max_delivered: int) -> dict[str, int]:
    """Return the number of deliveries in each state; delivered ones are counted only up to `max_delivered`."""
    return {row["state"]: row["deliveries"] for row in await tx.all(SQL.count_by_state, most=max_delivered)}


async def requeue_delivery(tx: Tx, key: str, now: int) -> Row:
    """Send a dead, ambiguous, blocked or expired delivery again, from its first unsent part. Returns its row."""
    row = await tx.one(SQL.by_key, key=key)
    if row is None:
        raise NotFound(f"There is no delivery {key!r}.", "Use a key that `antiphon deliveries` shows.")
    if not await tx.do(SQL.requeue, n=row["n"], now=now, expires_at=now + DELIVERY_LIFETIME_MS):
        raise Conflict(
            f"Delivery {key!r} is {row['state']}.",
            "Retry only dead, ambiguous, blocked or expired deliveries.",
        )
    await tx.do(SQL.delete_parts_if_none_sent, delivery=row["n"])
    await tx.do(SQL.restart_parts, delivery=row["n"])
    after = await tx.one(SQL.by_key, key=key)
    assert after is not None
    return after
