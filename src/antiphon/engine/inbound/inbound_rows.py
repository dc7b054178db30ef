"""Rows of messages from chat services: events that were decided about, context of groups, receivers' leases."""

from __future__ import annotations

from antiphon.engine.inbound.events import Inbound
from antiphon.engine.outbox.delivery_rows import Destination
from antiphon.store import Row, Tx
from antiphon.store.queries import Queries

SQL = Queries("inbound")
MAX_REASON_CHARACTERS = 500
CONTEXT_LIFETIME_MS = 24 * 3600 * 1000


async def find_event(tx: Tx, channel: str, inbound: Inbound) -> Row | None:
    return await tx.one(SQL.find_event, channel=channel, account=inbound.account, event_id=inbound.event_id)


async def record_event(
    tx: Tx,
    channel: str,
    inbound: Inbound,
    outcome: str,
    reason: str,
    now: int,
    *,
    expires_at: int,
    run_id: str | None = None,
    session_key: str | None = None,
) -> bool:
    """Record the decision about an event. False if it was decided about before, or given up."""
    return bool(
        await tx.do(
            SQL.record_event,
            channel=channel,
            account=inbound.account,
            event_id=inbound.event_id,
            outcome=outcome,
            reason=reason,
            run_id=run_id,
            session_key=session_key,
            now=now,
            expires_at=expires_at,
        )
    )


async def record_failure(
    tx: Tx, channel: str, account: str, event_id: str, error: str, now: int, *, expires_at: int, most: int
) -> bool:
    """Count a failed attempt at an event. Returns whether it is given up, and stays visible as such."""
    row = await tx.one(
        SQL.record_failure,
        channel=channel,
        account=account,
        event_id=event_id,
        reason=error[:MAX_REASON_CHARACTERS],
        now=now,
        expires_at=expires_at,
    )
    if row is not None and row["attempts"] < most:
        return False
    await tx.do(SQL.give_up_event, channel=channel, account=account, event_id=event_id)
    return True


async def count_dead_events(tx: Tx) -> dict[tuple[str, str], int]:
    """Return how many events of each account were given up."""
    return {(row["channel"], row["account"]): row["events"] for row in await tx.all(SQL.count_dead)}


async def delete_old_rows(tx: Tx, now: int) -> None:
    await tx.do(SQL.delete_old_events, now=now)
    await tx.do(SQL.delete_old_context, before=now - CONTEXT_LIFETIME_MS)


async def add_context(tx: Tx, place: str, sender: str, text: str, sent_at: int, kept: int) -> None:
    """Keep what was said in a group for the next message to the agent there, at most `kept` messages."""
    await tx.do(SQL.add_context, place=place, sender=sender, text=text, sent_at=sent_at)
    await tx.do(SQL.trim_context, place=place, kept=kept)


async def take_context(tx: Tx, place: str) -> list[Row]:
    """Return the context of a group and forget it."""
    rows = await tx.all(SQL.context, place=place)
    if rows:
        await tx.do(SQL.clear_context, place=place)
    return rows


async def set_route(tx: Tx, session: int, route: Destination) -> None:
    """Record where a session was last written to from."""
    await tx.do(
        SQL.set_route,
        id=session,
        channel=route.channel,
        to=route.to,
        account=route.account_id,
        thread=route.thread_id,
    )


async def acquire_receiver(tx: Tx, channel: str, account: str, owner: str, until: int, now: int) -> bool:
    """Try to become or stay the only receiver of an account until the given time."""
    return bool(
        await tx.do(SQL.acquire_receiver, channel=channel, account=account, owner=owner, until=until, now=now)
    )


async def release_receiver(tx: Tx, channel: str, account: str, owner: str) -> None:
    await tx.do(SQL.release_receiver, channel=channel, account=account, owner=owner)
