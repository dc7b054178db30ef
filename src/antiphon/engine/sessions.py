"""Session rows: finding, creating, renewing, archiving and forgetting them, as transaction scripts.

A session is a key and a lane. What is said in it is its transcript; `renew` gives the key a fresh one and keeps
the old, which stays readable by its session id. Who may do any of this is not decided here (see `engine.door`).
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass

from antiphon.errors import Conflict
from antiphon.keys import SessionIdRef, SessionKey
from antiphon.store import Row, Tx
from antiphon.store.queries import Queries

SQL = Queries("sessions")
RUNS = Queries("runs")


@dataclass(frozen=True, slots=True, kw_only=True)
class Birth:
    """What is known of a session when it is created."""

    agent_id: str | None = None
    """For the global session, whose key names no agent."""
    label: str | None = None
    display_name: str | None = None
    parent: int | None = None
    """The session that spawned it."""
    role: str | None = None
    sandboxed: bool = False
    session_id: str | None = None
    reason: str = "created"


async def find(tx: Tx, reference: SessionKey | SessionIdRef, viewer: str | None) -> Row | None:
    """The session a reference stands for. `descendant` in the row says whether it was spawned below `viewer`."""
    if isinstance(reference, SessionKey):
        return await tx.one(SQL.by_key, key=str(reference), viewer=viewer)
    return await tx.one(SQL.by_session_id, session_id=reference.value, viewer=viewer)


def named(row: Row) -> tuple[int, str]:
    """The transcript that the reference meant: the current one, or an older one named by its session id."""
    return row["named_transcript"], row["named_session_id"]


async def labelled(tx: Tx, label: str, viewer: str | None) -> list[Row]:
    return await tx.all(SQL.by_label, label=label, viewer=viewer)


async def create(tx: Tx, key: SessionKey, now: int, birth: Birth | None = None) -> Row:
    birth = birth or Birth()
    session_id = birth.session_id or str(uuid.uuid4())
    parent = await tx.one(SQL.by_id, id=birth.parent) if birth.parent is not None else None
    transcript = await _begin(tx, session_id, str(key), birth.reason, now)
    row = await tx.one(
        SQL.insert,
        key=str(key),
        session_id=session_id,
        transcript=transcript,
        agent_id=key.agent_id or birth.agent_id,
        kind=key.kind,
        chat_type=key.chat_type,
        channel=key.channel,
        label=birth.label,
        display_name=birth.display_name,
        spawned_by=parent["id"] if parent else None,
        parent_key=parent["key"] if parent else None,
        root_key=(parent["root_key"] or parent["key"]) if parent else None,
        depth=parent["depth"] + 1 if parent else 0,
        role=birth.role,
        sandboxed=int(birth.sandboxed),
        now=now,
    )
    assert row is not None
    if parent:
        await tx.do(SQL.link, parent=parent["id"], child=row["id"])
        await tx.do(SQL.count_child, parent=parent["id"], change=1)
    await name(tx, row["id"], key.id, key.thread and key.thread.id, birth.label, birth.display_name)
    return row


async def _begin(tx: Tx, session_id: str, key: str, reason: str, now: int) -> int:
    row = await tx.one(SQL.insert_transcript, session_id=session_id, key=key, reason=reason, now=now)
    assert row is not None
    return row["id"]


async def name(tx: Tx, session: int, *names: str | None) -> None:
    """Make a session findable by these words, instead of whatever it was findable by."""
    await tx.do(SQL.unname_session, id=session)
    await tx.do(SQL.name_session, id=session, names=" ".join(filter(None, names)))


async def renew(tx: Tx, session: Row, reason: str, now: int) -> None:
    """A new transcript for this key; the old one ends, with the reason on record in its successor."""
    await _check_idle(tx, session)
    session_id = str(uuid.uuid4())
    await tx.do(SQL.end_transcript, transcript=session["transcript"], now=now)
    transcript = await _begin(tx, session_id, session["key"], reason, now)
    await tx.do(SQL.renew, id=session["id"], session_id=session_id, transcript=transcript, now=now)


async def restore(tx: Tx, session: Row, now: int) -> None:
    """Go back to the older transcript that the row was found by."""
    await _check_idle(tx, session)
    transcript, session_id = named(session)
    await tx.do(SQL.end_transcript, transcript=session["transcript"], now=now)
    await tx.do(SQL.reopen_transcript, transcript=transcript)
    await tx.do(SQL.restore, id=session["id"], session_id=session_id, transcript=transcript, now=now)


async def _check_idle(tx: Tx, session: Row) -> None:
    active = await tx.one(RUNS.active_in, session=session["id"])
    if active:
        raise Conflict(
            f"Session {session['key']!r} is still answering.",
            "Stop it first, then try again.",
            run_id=active["id"],
        )


async def conversations(tx: Tx, session: Row) -> list[Row]:
    """Every transcript this key has had, newest first."""
    return await tx.all(SQL.transcripts_of, key=session["key"])


async def forget(tx: Tx, session: int, key: str) -> None:
    """Remove a session and everything said in it. The usage ledger stays."""
    row = await tx.one(SQL.by_id, id=session)
    if row and row["spawned_by"] is not None:
        await tx.do(SQL.count_child, parent=row["spawned_by"], change=-1)
    await tx.do(SQL.forget_messages, key=key)
    await tx.do(SQL.forget_transcripts, key=key)
    await tx.do(SQL.forget_runs, id=session)
    await tx.do(SQL.forget_lineage, id=session)
    await tx.do(SQL.unname_session, id=session)
    await tx.do(SQL.forget_session, id=session)
