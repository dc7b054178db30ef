"""Pairings: people who may write to an account directly, and requests to be allowed to, as transaction scripts.

A request has a code, which the person sees in the chat and an operator enters. A pairing holds for one account, and
never in groups.
"""

from __future__ import annotations

import secrets

from antiphon.errors import Forbidden, NotFound
from antiphon.store import Row, Tx
from antiphon.store.queries import Queries

SQL = Queries("pairings")
CODE_ALPHABET = "ABCDEFGHJKLMNPQRSTUVWXYZ23456789"
CODE_CHARACTERS = 8
CODE_LIFETIME_MS = 3600 * 1000
MAX_PENDING_REQUESTS = 3
MAX_WRONG_CODES = 5
LOCKOUT_MS = 3600 * 1000
MAX_NAME_CHARACTERS = 100


async def load_grant(tx: Tx, channel: str, account: str, sender: str) -> tuple[bool, bool]:
    """Return whether a sender is paired with an account, and whether as its owner."""
    row = await tx.one(SQL.is_approved, channel=channel, account=account, sender=sender)
    return row is not None, bool(row and row["is_owner"])


async def can_request_pairing(tx: Tx, channel: str, account: str, sender: str, now: int) -> bool:
    """Whether a sender has no valid request, and not too many others have one."""
    row = await tx.one(SQL.find, channel=channel, account=account, sender=sender)
    if row is not None and row["state"] == "pending" and row["expires_at"] > now:
        return False
    pending = await tx.one(SQL.count_pending, channel=channel, account=account, now=now)
    return pending is None or pending["pending"] < MAX_PENDING_REQUESTS


async def request_pairing(tx: Tx, channel: str, account: str, sender: str, name: str, now: int) -> str | None:
    """Return the code of a new request; None if the sender has one already, or if too many wait."""
    await tx.lock(f"pairing:{channel}:{account}")  # so that the count below still holds at the commit
    await tx.do(SQL.delete_expired, now=now)
    pending = await tx.one(SQL.count_pending, channel=channel, account=account, now=now)
    if pending and pending["pending"] >= MAX_PENDING_REQUESTS:
        return None
    code = "".join(secrets.choice(CODE_ALPHABET) for _ in range(CODE_CHARACTERS))
    is_new = await tx.do(
        SQL.insert_request,
        channel=channel,
        account=account,
        sender=sender,
        name=name[:MAX_NAME_CHARACTERS],
        code=code,
        now=now,
        expires_at=now + CODE_LIFETIME_MS,
    )
    return code if is_new else None


async def approve_pairing(
    tx: Tx, channel: str, account: str, code: str, now: int, *, has_configured_owner: bool
) -> Row | None:
    """Allow the sender of a request to write. Returns its row, or None for a wrong code, which is counted.

    The first one becomes the owner if the configuration names none.

    Raises:
        Forbidden: too many wrong codes were entered for this account.
    """
    await tx.lock(f"pairing:{channel}:{account}")  # so that two at a time do not both become the owner
    lock = await tx.one(SQL.lock, channel=channel, account=account)
    if lock and lock["locked_until"] > now:
        raise Forbidden(
            f"Too many wrong codes were entered for {channel!r}.",
            "Wait an hour, or add the sender to allowFrom in the configuration.",
        )
    row = await tx.one(SQL.by_code, channel=channel, account=account, code=code.strip().upper(), now=now)
    if row is None:
        wrong = (lock["wrong_codes"] if lock else 0) + 1
        locked_until = now + LOCKOUT_MS if wrong >= MAX_WRONG_CODES else 0
        await tx.do(
            SQL.set_wrong_codes,
            channel=channel,
            account=account,
            wrong_codes=0 if locked_until else wrong,
            locked_until=locked_until,
        )
        return None
    if lock and lock["wrong_codes"]:
        await tx.do(SQL.set_wrong_codes, channel=channel, account=account, wrong_codes=0, locked_until=0)
    has_owner = has_configured_owner or await tx.one(SQL.has_owner, channel=channel, account=account)
    await tx.do(
        SQL.approve,
        channel=channel,
        account=account,
        sender=row["sender"],
        is_owner=int(not has_owner),
        now=now,
    )
    return await tx.one(SQL.find, channel=channel, account=account, sender=row["sender"])


async def revoke_pairing(tx: Tx, channel: str, account: str, sender: str) -> None:
    if not await tx.do(SQL.revoke, channel=channel, account=account, sender=sender):
        raise NotFound(
            f"Sender {sender!r} is not paired with account {account!r} of {channel!r}.",
            "Use an id that `antiphon pairing list` shows.",
        )


async def list_pairings(tx: Tx, now: int) -> list[Row]:
    return await tx.all(SQL.list_all, now=now)
