"""An exchange: one message from a session to another, the turns that answer it, and the announcement at its end.

    primary (target) ──▶ reply 1 (requester) ──▶ reply 2 (target) ──▶ … ──▶ announce (target) ──▶ settled

Every step is an ordinary run in its session's lane; the commit that ends it moves the exchange on and queues the
next one, so that after a crash each step has happened once. Nothing here waits, and nothing here knows the
configuration: what bounds an exchange was put into its row when it began.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from antiphon import keys
from antiphon.engine import admissions, deliveries, gate, wording
from antiphon.engine.admissions import Accepted, Submission
from antiphon.engine.chains import Link
from antiphon.engine.deliveries import Parcel
from antiphon.engine.steps import ANNOUNCE, NOTHING, REPLY_BACK, Sequel, Step, queued
from antiphon.engine.wording import Sides
from antiphon.messages import INJECTED, Assistant, Provenance, Text, User
from antiphon.store import Row, Tx
from antiphon.store.queries import Queries

SQL = Queries("exchanges")
SEND = "sessions_send"
KIND = "inter_session"

Announce = Literal["target", "none"]


class Opening(msgspec.Struct, frozen=True, kw_only=True):
    """A message to another session. `id` is the id of its first run as well."""

    id: str
    requester: Row | None
    """None for an operator, who is never stepped."""
    target: Row
    message: str
    turns: int
    announce: Announce
    link: Link
    max_queued: int
    agent_id: str | None = None
    """The agent that answers, if it is not the one that the target belongs to."""
    requester_agent: str | None = None
    """The agent that sends, if it is not the one that the requester belongs to."""


async def known(tx: Tx, id: str, requester: int | None, target: int, message: str) -> bool:
    """Whether this id already stands for the same message from the same requester.

    Raises:
        Conflict: it stands for another message or requester, or for one whose session is gone.
    """
    before = await tx.one(SQL.by_id, id=id)
    if before is None:
        return False
    # A character that PostgreSQL cannot keep is kept as another there (see `store.postgres`).
    parties = before["requester"], before["target"]
    if parties != (requester, target) or before["message"] not in {message, message.replace("\0", "\ufffd")}:
        raise admissions.used(id)
    return True


async def begin(tx: Tx, opening: Opening, now: int) -> Accepted:
    """The exchange and its first run; those that this id already stands for, if so."""
    requester, target = opening.requester, opening.target
    row = await tx.one(
        SQL.insert,
        id=opening.id,
        requester=requester["id"] if requester else None,
        requester_key=requester["key"] if requester else None,
        requester_channel=_channel(requester) if requester else None,
        target=target["id"],
        target_key=target["key"],
        target_channel=_channel(target),
        message=opening.message,
        turns=opening.turns if requester and _steppable(requester) else 0,
        announce=opening.announce,
        destination=deliveries.of_session(target).text,
        chain=opening.link.chain,
        hop=opening.link.hop,
        requester_agent=opening.requester_agent,
        now=now,
    )
    exchange = await tx.one(SQL.by_id, id=opening.id)
    assert exchange is not None
    return await admissions.submit(tx, _primary(exchange, opening, known=row is None, now=now), now)


def _primary(exchange: Row, opening: Opening, *, known: bool, now: int) -> Submission:
    return Submission(
        run_id=opening.id,
        session=opening.target["id"],
        session_key=opening.target["key"],
        origin=SEND,
        message=User(
            content=opening.message, timestamp=now, provenance=_provenance(exchange, by_target=False)
        ),
        instructions=wording.primary_context(_sides(exchange), exchange["turns"]),
        exchange=exchange["n"],
        # A repeated request is the same run, and no further one of its chain.
        chain=None if known else exchange["chain"],
        hop=exchange["hop"],
        max_queued=opening.max_queued,
        agent_id=opening.agent_id,
    )


async def record_sent(tx: Tx, opening: Opening, now: int) -> Accepted | None:
    """Add a message that was sent in a session's name to its transcript, so that later replies have their context.

    What its agent sends during a run is already there, as a tool call.
    """
    assert opening.requester is not None
    note = Submission(
        run_id=f"note:sent:{opening.id}",
        session=opening.requester["id"],
        session_key=opening.requester["key"],
        origin=admissions.NOTE,
        message=Assistant(
            content=[Text(text=wording.sent_note(keys.spoken(opening.target["key"]), opening.message))],
            timestamp=now,
            stop_reason="stop",
            provider="antiphon",
            model=INJECTED,
        ),
    )
    return await admissions.follow(tx, note, now)


async def advance(tx: Tx, step: Step, now: int) -> Sequel:
    """After the run that an exchange is in has ended."""
    exchange = await tx.one(SQL.at, n=step.exchange, run_id=step.run_id)
    if exchange is None:
        return NOTHING
    if exchange["phase"] == "primary":
        await tx.do(SQL.answered, n=exchange["n"], run_id=step.run_id)
    match exchange["phase"]:
        case "announce":
            return await _announced(tx, exchange, step, now)
        case "primary" if step.said is None:
            return await _settle(tx, exchange, "no_reply", now)
        case "reply" if step.state == "cancelled":
            return await _settle(tx, exchange, "cancelled", now)
        case "reply" if step.said is None or gate.is_skip(step.said, gate.REPLY_SKIP):
            return await _announce(tx, exchange, None, now)
        case _:
            return await _reply(tx, exchange, step.said or "", now)


async def give_up(tx: Tx, n: int, run_id: str, now: int) -> None:
    """End an exchange whose run has yielded and will not be woken."""
    exchange = await tx.one(SQL.at, n=n, run_id=run_id)
    if exchange is None:
        return
    if exchange["phase"] == "primary":
        await tx.do(SQL.answered, n=n, run_id=run_id)
    announced = {"primary": "no_reply", "reply": "cancelled", "announce": "failed"}[exchange["phase"]]
    await _settle(tx, exchange, announced, now)


async def mend(tx: Tx, now: int) -> Sequel:
    """Settle what nothing else will."""
    for exchange in await tx.all(SQL.astray):
        await _settle(tx, exchange, "interrupted", now)
    return NOTHING


async def _reply(tx: Tx, exchange: Row, said: str, now: int) -> Sequel:
    """The other side's turn to answer what was said, unless that was the last one."""
    turn = exchange["turn"] + 1
    if turn > exchange["turns"] or exchange["requester"] is None:
        return await _announce(tx, exchange, said, now)
    by_target = turn % 2 == 0
    run_id = f"turn:{exchange['id']}:{turn}"
    side = "target" if by_target else "requester"
    context = wording.reply_context(_sides(exchange), turn, exchange["turns"], requester_speaks=not by_target)
    submission = Submission(
        run_id=run_id,
        session=exchange[side],
        session_key=exchange[f"{side}_key"],
        origin=REPLY_BACK,
        message=User(content=said, timestamp=now, provenance=_provenance(exchange, by_target=not by_target)),
        instructions=context,
        exchange=exchange["n"],
        chain=exchange["chain"],
        hop=exchange["hop"] + turn,
        agent_id=None if by_target else exchange["requester_agent"],  # the target's is that of the first run
    )
    accepted = await admissions.follow(tx, submission, now)
    if accepted is None:
        return await _announce(tx, exchange, said, now)
    await tx.do(SQL.step, n=exchange["n"], phase="reply", current=run_id, turn=turn, reply=said)
    return queued(accepted)


async def _announce(tx: Tx, exchange: Row, said: str | None, now: int) -> Sequel:
    """The target words what its chat is to hear of it."""
    if exchange["announce"] == "none":
        return await _settle(tx, exchange, "none", now, said)
    run_id = f"announce:{exchange['id']}"
    first, latest = exchange["first_reply"] or said, said or exchange["latest_reply"]
    submission = Submission(
        run_id=run_id,
        session=exchange["target"],
        session_key=exchange["target_key"],
        origin=ANNOUNCE,
        message=User(
            content=wording.announce_message(exchange["message"], first, latest),
            timestamp=now,
            provenance=_provenance(exchange, by_target=False, kind="announce_step"),
        ),
        instructions=wording.announce_context(_sides(exchange)),
        exchange=exchange["n"],
        chain=exchange["chain"],
        hop=exchange["hop"] + exchange["turn"],
    )
    accepted = await admissions.follow(tx, submission, now)
    if accepted is None:
        return await _settle(tx, exchange, "target_gone", now, said)
    await tx.do(
        SQL.step, n=exchange["n"], phase="announce", current=run_id, turn=exchange["turn"], reply=said
    )
    return queued(accepted)


async def _announced(tx: Tx, exchange: Row, step: Step, now: int) -> Sequel:
    said = step.said
    if said is None:
        return await _settle(tx, exchange, "silent" if step.state in {"ok", "incomplete"} else "failed", now)
    if gate.is_silence(said):
        return await _settle(tx, exchange, "skipped", now)
    parcel = Parcel(
        key=f"exchange:{exchange['id']}",
        kind="announce",
        session=exchange["target"],
        session_key=exchange["target_key"],
        destination=deliveries.read(exchange["destination"]),
        body=said.strip(),
        entry_run=step.run_id,
        exchange=exchange["n"],
    )
    await deliveries.post(tx, parcel, now)
    return await _settle(tx, exchange, "pending", now) + Sequel(posted=True)


async def _settle(tx: Tx, exchange: Row, announced: str, now: int, said: str | None = None) -> Sequel:
    await tx.do(SQL.settle, n=exchange["n"], announced=announced, reply=said, now=now)
    return NOTHING


def _steppable(requester: Row) -> bool:
    """A session that will be there to answer: jobs and hooks end with their run, sub-agents with their task."""
    return keys.parse(requester["key"]).shape not in {"cron", "hook", "subagent", "acp"}


def _sides(exchange: Row) -> Sides:
    requester = exchange["requester_key"]
    return Sides(
        requester=keys.spoken(requester) if requester else "an operator",
        requester_channel=exchange["requester_channel"],
        target=keys.spoken(exchange["target_key"]),
        target_channel=exchange["target_channel"],
    )


def _channel(session: Row) -> str:
    return keys.channel_of(session["kind"], session["channel"], session["last_channel"])


def _provenance(exchange: Row, *, by_target: bool, kind: str = KIND) -> Provenance:
    side = "target" if by_target else "requester"
    source = exchange[f"{side}_key"]
    return Provenance(
        kind=kind,
        source_session_key=keys.spoken(source) if source else None,
        source_channel=exchange[f"{side}_channel"],
        source_tool=SEND,
        exchange_id=exchange["id"],
        chain_id=exchange["chain"],
        hop=exchange["hop"],
    )
