"""Words on their way to people: where they go, and how they get into the outbox.

A delivery is a row that is written by the commit which causes it, under a key that says what the words are about:
it exists once, whatever happens. Getting it out is the business of `engine.outbox`.
"""

from __future__ import annotations

import msgspec

from antiphon import keys
from antiphon.keys import WEBCHAT_CHANNEL
from antiphon.store import Row, Tx
from antiphon.store.queries import Queries

SQL = Queries("deliveries")


class Destination(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """Where words go, fixed when what they answer was accepted: what comes in later does not divert them."""

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
    """The run in whose entries the words stand, or will stand, in that session."""
    exchange: int | None = None
    task: int | None = None


def decode_destination(text: str) -> Destination:
    return msgspec.json.decode(text, type=Destination)


def resolve_session_destination(row: Row) -> Destination:
    """The chat of a session: its group, else where its person last wrote from, else the page that shows it."""
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


async def enqueue_delivery(tx: Tx, parcel: NewDelivery, now: int) -> None:
    """Into the outbox, once."""
    where = parcel.destination
    await tx.do(
        SQL.insert,
        key=parcel.key,
        kind=parcel.kind,
        session=parcel.session,
        session_key=parcel.session_key,
        destination=where.json_text,
        place="|".join([where.channel, where.account_id or "", where.to or "", where.thread_id or ""]),
        body=parcel.body,
        stats=parcel.stats,
        entry_run=parcel.entry_run,
        exchange=parcel.exchange,
        task=parcel.task,
        now=now,
    )
