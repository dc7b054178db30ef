"""The rows of approvals and grants, as transaction scripts.

    pending ──▶ allowed ──(the call begins)──▶ started
       ├──────▶ denied
       └──────▶ expired   (no answer in time, or the run ended first)

An approval is bound to one tool call, so neither a restart nor a second process asks again. A grant (`allow-always`)
covers one whole call of one tool for one agent, under the same facts. `approval_gate` holds calls back; who may decide
is checked in `operations`.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import secrets
import unicodedata
from typing import Literal, TypeAlias

import msgspec

from antiphon.bus import ApprovalChanged, EventBus, approval_topic, session_topic
from antiphon.errors import Conflict, InvalidInput, NotFound
from antiphon.store import Row, Store, Tx
from antiphon.store.queries import Queries

SQL = Queries("approvals")

ApprovalDecision: TypeAlias = Literal["allow-once", "allow-always", "deny"]

MAX_GRANTS = 1000
APPROVAL_REREAD_SECONDS = 1.0  # of silence, after which the row is read again
APPROVAL_ID_BYTES = 5
MAX_SPACES_SHOWN = 40
_INVISIBLE_UNICODE_CATEGORIES = frozenset({"Cc", "Cf", "Cn", "Co", "Cs", "Zl", "Zp", "Zs"})
_UNSEEN_LETTERS_AND_MARKS_PATTERN = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)
_LONG_BLANKS_PATTERN = re.compile(rf" {{{MAX_SPACES_SHOWN + 1},}}|\n(?: *\n){{3,}}")


def new_approval_id() -> str:
    return secrets.token_hex(APPROVAL_ID_BYTES)


def format_question(text: str) -> str:
    """Return a text of a model as it can be shown.

    Characters that are invisible, look like a space or control a terminal are escaped. Long blank passages, which would
    move the rest out of sight, are replaced by their length.
    """
    escaped = "".join(_escape(character) if _is_unseen(character) else character for character in text)
    return _LONG_BLANKS_PATTERN.sub(_describe_blanks, escaped)


def _is_unseen(character: str) -> bool:
    if character in " \n":
        return False
    return unicodedata.category(character) in _INVISIBLE_UNICODE_CATEGORIES or bool(
        _UNSEEN_LETTERS_AND_MARKS_PATTERN.match(character)
    )


def _escape(character: str) -> str:
    code = ord(character)
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _describe_blanks(blanks: re.Match[str]) -> str:
    lines = blanks[0].count("\n")
    return f"\n[{lines - 1} empty lines]\n" if lines else f"[{len(blanks[0])} spaces]"


async def find_approval_of_call(tx: Tx, call: str) -> Row | None:
    return await tx.one(SQL.by_call, call=call)


async def find_grant(tx: Tx, agent_id: str, tool: str, subject: str | None, binding: str) -> Row | None:
    """Return the grant that covers exactly this call of this agent, if a person has given one."""
    if subject is None:
        return None
    row = await tx.one(SQL.find_grant, agent_id=agent_id, tool=tool, digest=binding)
    return row if row is not None and row["subject"] == subject else None


async def load_approval(tx: Tx, approval_id: str) -> Row | None:
    return await tx.one(SQL.by_id, id=approval_id)


async def list_pending_approvals(tx: Tx, session: int | None, now: int, limit: int) -> list[Row]:
    """Return the approvals that wait for a decision, oldest first; of one session, or of all."""
    if session is None:
        return await tx.all(SQL.pending, now=now, limit=limit)
    return await tx.all(SQL.pending_of_session, session=session, now=now, limit=limit)


async def decide_approval(
    tx: Tx, approval_id: str, decision: ApprovalDecision, decided_by: str, now: int
) -> tuple[Row, bool]:
    """Decide an approval. Returns its row, and False if it had been decided in the same way before.

    Raises:
        NotFound: there is no such approval.
        Conflict: it was decided otherwise, or has expired.
        InvalidInput: this call cannot be always allowed.
    """
    row = await tx.one(SQL.by_id, id=approval_id)
    if row is None:
        raise build_approval_missing_error(approval_id)
    state, always = ("denied" if decision == "deny" else "allowed"), decision == "allow-always"
    if always and row["subject"] is None and row["state"] == "pending":
        raise InvalidInput(
            "This call can be allowed only once, because it is not a single plain command.",
            "Allow it once, or deny it.",
            field="decision",
        )
    if always and row["state"] == "pending":
        await _record_grant(tx, row, decided_by, now)
    decided = await tx.do(
        SQL.decide, id=approval_id, state=state, always=int(always), decided_by=decided_by, now=now
    )
    if decided:
        row = await tx.one(SQL.by_id, id=approval_id)
        assert row is not None
        return row, True
    if row["state"] == "pending" or row["state"] == "expired":
        raise Conflict(
            f"Approval {approval_id!r} has expired, and the call was not made.",
            "Ask the agent again if it should still be made.",
            reason="APPROVAL_EXPIRED",
        )
    if (row["state"], bool(row["always"])) != (state, always):
        raise Conflict(
            f"Approval {approval_id!r} was already decided: {describe_decision(row)}.",
            "List the open ones: antiphon approvals.",
            reason="APPROVAL_ALREADY_RESOLVED",
        )
    return row, False


async def _record_grant(tx: Tx, row: Row, decided_by: str, now: int) -> None:
    if row["expires_at"] <= now:
        return
    count = await tx.one(SQL.count_grants)
    if count is not None and count["number"] >= MAX_GRANTS:
        raise Conflict(
            f"There are already {MAX_GRANTS} calls that are always allowed.",
            "Allow this one once, or remove others: antiphon approvals revoke.",
        )
    await tx.do(
        SQL.insert_grant,
        id=new_approval_id(),
        agent_id=row["agent_id"],
        tool=row["tool"],
        digest=row["binding"],
        subject=row["subject"],
        decided_by=decided_by,
        now=now,
    )


async def list_grants(tx: Tx, limit: int) -> list[Row]:
    """Return the calls that are always allowed."""
    return await tx.all(SQL.grants, limit=limit)


async def delete_grant(tx: Tx, grant_id: str) -> bool:
    """Remove a grant; calls that it has already allowed are not affected. False if there is none."""
    return bool(await tx.do(SQL.delete_grant, id=grant_id))


async def expire_approval(tx: Tx, approval_id: str, now: int) -> Row | None:
    """Expire a pending approval, and return the row as it is then."""
    await tx.do(SQL.expire, id=approval_id, now=now)
    return await tx.one(SQL.by_id, id=approval_id)


async def expire_approvals_of_run(tx: Tx, run_id: str, now: int) -> list[ApprovalChanged]:
    """Expire what a run that ends is still waiting for."""
    changed: list[ApprovalChanged] = []
    for pending in await tx.all(SQL.pending_of_run, run_id=run_id):
        row = await expire_approval(tx, pending["id"], now)
        assert row is not None
        changed.append(build_approval_event(row))
    return changed


def compute_digest(*parts: str) -> str:
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()


def build_approval_missing_error(approval_id: str) -> NotFound:
    return NotFound(
        f"There is no approval {approval_id!r}.",
        "List the open ones: antiphon approvals.",
        reason="APPROVAL_NOT_FOUND",
    )


def describe_decision(row: Row) -> str:
    """Return a decision in the words of the commands."""
    if row["state"] == "allowed":
        return "allow-always" if row["always"] else "allow-once"
    return "deny" if row["state"] == "denied" else row["state"]


def build_approval_event(row: Row) -> ApprovalChanged:
    return ApprovalChanged(
        approval_id=row["id"],
        session_key=row["session_key"],
        run_id=row["run_id"],
        agent_id=row["agent_id"],
        tool=row["tool"],
        question=row["question"],
        can_allow_always=row["subject"] is not None,
        state=row["state"],
        always=bool(row["always"]),
        decided_by=row["decided_by"],
        created_at=row["created_at"],
        expires_at=row["expires_at"],
        decided_at=row["decided_at"],
    )


def publish_approval(bus: EventBus, session: int, event: ApprovalChanged) -> None:
    """Publish a new approval, or its decision; called after the commit."""
    for topic in (session_topic(session), approval_topic(event.approval_id)):
        bus.publish(topic, event)


async def wait_for_change(store: Store, bus: EventBus, approval_id: str, timeout_seconds: float) -> None:
    """Wait until an approval is no longer pending, `timeout_seconds` at most."""
    loop = asyncio.get_running_loop()
    until = loop.time() + timeout_seconds
    async with bus.listen(approval_topic(approval_id)) as events:
        while True:
            row = await store.read(load_approval, approval_id)
            left = until - loop.time()
            if row is None or row["state"] != "pending" or left <= 0:
                return
            await events.get(min(APPROVAL_REREAD_SECONDS, left))
