"""Exchanges: a message from one session to another, the turns that answer it, and the final announcement.

    primary (target) ──▶ reply 1 (requester) ──▶ reply 2 (target) ──▶ … ──▶ announce (target) ──▶ settled

Every step is an ordinary run in its session's lane; the commit that ends it advances the exchange and queues the next
step, so each step happens once even after a crash. Nothing here waits or reads the configuration: the limits of an
exchange are stored in its row when it begins.
"""

from __future__ import annotations

import msgspec

from antiphon import keys
from antiphon.engine.collaboration import prompts
from antiphon.engine.collaboration.chains import ChainLink
from antiphon.engine.collaboration.prompts import ExchangeSides
from antiphon.engine.outbox import delivery_rows, sanitize
from antiphon.engine.outbox.delivery_rows import NewDelivery
from antiphon.engine.runs import run_queue
from antiphon.engine.runs.effects import DELIVERIES_DUE, NO_EFFECTS, CompletedStep, Effects
from antiphon.engine.runs.run_queue import ANNOUNCE_ORIGIN, REPLY_BACK_ORIGIN, AcceptedRun, Submission
from antiphon.messages import (
    INJECTED_MODEL,
    AnnounceMode,
    AssistantMessage,
    Provenance,
    TextBlock,
    UserMessage,
)
from antiphon.store import Row, Tx
from antiphon.store.queries import Queries

SQL = Queries("exchanges")
SEND_TOOL_NAME = "sessions_send"
INTER_SESSION_KIND = "inter_session"


STOPPED_REASON = "run_stopped"
_NO_REPLY_REASON = "no_reply"
_REASON_BY_OUTCOME: dict[str, str] = {
    "error": "run_failed",
    "timeout": "run_timed_out",
    "cancelled": STOPPED_REASON,
    "interrupted": "run_interrupted",
    "incomplete": "run_incomplete",
}


class NewExchange(msgspec.Struct, frozen=True, kw_only=True):
    """A message to another session. `id` is the id of its first run as well."""

    id: str
    requester: Row | None
    """None for an operator, who takes no reply turns."""
    target: Row
    message: str
    max_turns: int
    announce: AnnounceMode
    link: ChainLink
    max_queued: int
    agent_id: str | None = None
    """The agent that answers, if it is not the target's own agent."""
    requester_agent: str | None = None
    """The agent that sends, if it is not the requester's own agent."""


def get_no_turns_reason(exchange: Row) -> str | None:
    """Return why an exchange has no reply turns; None if it has some."""
    if exchange["turns"] > 0:
        return None
    if exchange["requester_key"] is None:
        return "operator"
    return "turn_limit" if _can_reply(exchange["requester_key"]) else "ephemeral_requester"


def get_no_reply_reason(outcome: str, reply: str | None) -> str:
    """Return why a target's run has no reply that its exchange can continue with."""
    if outcome == "incomplete" and not (reply and reply.strip()):
        return _NO_REPLY_REASON
    return _REASON_BY_OUTCOME.get(outcome, _NO_REPLY_REASON)


async def check_repeated_exchange(tx: Tx, id: str, requester: int | None, target: int, message: str) -> bool:
    """Return whether this id was already used for the same message between the same sessions.

    Raises:
        Conflict: it was used for another message, requester or target, or for one whose session is gone.
    """
    existing = await tx.one(SQL.by_id, id=id)
    if existing is None:
        return False
    # PostgreSQL cannot store NUL; it is replaced there (see `store.postgres`).
    parties = existing["requester"], existing["target"]
    if parties != (requester, target) or existing["message"] not in {
        message,
        message.replace("\0", "\ufffd"),
    }:
        raise run_queue.build_idempotency_conflict_error(id)
    return True


async def begin_exchange(tx: Tx, new_exchange: NewExchange, now: int) -> tuple[Row, AcceptedRun]:
    """Create the exchange and its first run; returns the existing ones if this id was used before."""
    requester, target = new_exchange.requester, new_exchange.target
    row = await tx.one(
        SQL.insert,
        id=new_exchange.id,
        requester=requester["id"] if requester else None,
        requester_key=requester["key"] if requester else None,
        requester_channel=_get_channel(requester) if requester else None,
        target=target["id"],
        target_key=target["key"],
        target_channel=_get_channel(target),
        message=new_exchange.message,
        turns=new_exchange.max_turns if requester and _can_reply(requester["key"]) else 0,
        announce=new_exchange.announce,
        destination=delivery_rows.resolve_session_destination(target).json_text,
        chain=new_exchange.link.chain,
        hop=new_exchange.link.hop,
        requester_agent=new_exchange.requester_agent,
        now=now,
    )
    exchange = await tx.one(SQL.by_id, id=new_exchange.id)
    assert exchange is not None
    primary = _build_primary_run(exchange, new_exchange, is_repeated=row is None, now=now)
    return exchange, await run_queue.submit(tx, primary, now)


def _build_primary_run(
    exchange: Row, new_exchange: NewExchange, *, is_repeated: bool, now: int
) -> Submission:
    return Submission(
        run_id=new_exchange.id,
        session=new_exchange.target["id"],
        session_key=new_exchange.target["key"],
        origin=SEND_TOOL_NAME,
        message=UserMessage(
            content=new_exchange.message,
            timestamp=now,
            provenance=_build_provenance(exchange, by_target=False),
        ),
        instructions=prompts.build_primary_context(_build_sides(exchange), exchange["turns"]),
        exchange=exchange["n"],
        # A repeated request is the same run and does not count again in its chain.
        chain=None if is_repeated else exchange["chain"],
        hop=exchange["hop"],
        max_queued=new_exchange.max_queued,
        agent_id=new_exchange.agent_id,
    )


async def record_sent_message(tx: Tx, new_exchange: NewExchange, now: int) -> AcceptedRun | None:
    """Add a message sent in a session's name to its transcript, so that later replies have their context.

    Messages that its agent sends during a run are already there, as tool calls.
    """
    assert new_exchange.requester is not None
    note = Submission(
        run_id=f"note:sent:{new_exchange.id}",
        session=new_exchange.requester["id"],
        session_key=new_exchange.requester["key"],
        origin=run_queue.NOTE_ORIGIN,
        message=AssistantMessage(
            content=[
                TextBlock(
                    text=prompts.format_sent_note(
                        keys.display_full_key(new_exchange.target["key"]), new_exchange.message
                    )
                )
            ],
            timestamp=now,
            stop_reason="stop",
            provider="antiphon",
            model=INJECTED_MODEL,
        ),
    )
    return await run_queue.submit_follow_up(tx, note, now)


async def advance_exchange(tx: Tx, step: CompletedStep, now: int) -> Effects:
    """Advance an exchange after its current run has ended."""
    exchange = await tx.one(SQL.by_current_run, n=step.exchange, run_id=step.run_id)
    if exchange is None:
        return NO_EFFECTS
    if exchange["phase"] == "primary":
        await tx.do(SQL.set_answering_run, n=exchange["n"], run_id=step.run_id)
    match exchange["phase"]:
        case "announce":
            return await _finish_announce(tx, exchange, step, now)
        case "primary" if step.usable_reply is None:
            return await _settle_exchange(tx, exchange, get_no_reply_reason(step.state, step.reply), now)
        case "reply" if step.state == "cancelled":
            return await _settle_exchange(tx, exchange, "cancelled", now)
        case "reply" if step.usable_reply is None or sanitize.is_skip(step.usable_reply, sanitize.REPLY_SKIP):
            return await _queue_announce(tx, exchange, None, now)
        case _:
            return await _queue_reply(tx, exchange, step.usable_reply or "", now)


async def abandon_exchange(tx: Tx, n: int, run_id: str, now: int) -> None:
    """End an exchange whose run has yielded and will not be woken."""
    exchange = await tx.one(SQL.by_current_run, n=n, run_id=run_id)
    if exchange is None:
        return
    if exchange["phase"] == "primary":
        await tx.do(SQL.set_answering_run, n=n, run_id=run_id)
    announced = {"primary": STOPPED_REASON, "reply": "cancelled", "announce": "failed"}[exchange["phase"]]
    await _settle_exchange(tx, exchange, announced, now)


async def find_exchange(tx: Tx, id: str) -> Row | None:
    return await tx.one(SQL.by_id, id=id)


async def list_ids_with_prefix(tx: Tx, prefix: str, *, recent: int, limit: int) -> list[str]:
    """Return ids that begin with a prefix, newest first, among the most recent exchanges."""
    rows = await tx.all(SQL.ids_with_prefix, prefix=prefix, length=len(prefix), recent=recent, limit=limit)
    return [row["id"] for row in rows]


async def list_exchanges(
    tx: Tx, session: int | None, *, unsettled: bool, before: int, limit: int, max_characters: int
) -> list[Row]:
    """Return exchanges with `n` below `before`, newest first, with texts cut; of one session if it is given."""
    if session is None:
        query = SQL.page_unsettled if unsettled else SQL.page
        return await tx.all(query, before=before, limit=limit, chars=max_characters)
    query = SQL.page_of_session_unsettled if unsettled else SQL.page_of_session
    return await tx.all(query, session=session, before=before, limit=limit, chars=max_characters)


async def list_stalled_exchanges(tx: Tx) -> list[Row]:
    """Return exchanges that no run will advance."""
    return await tx.all(SQL.stalled)


async def settle_stuck_exchanges(tx: Tx, now: int) -> Effects:
    """Settle exchanges that no run will advance."""
    for exchange in await list_stalled_exchanges(tx):
        await _settle_exchange(tx, exchange, "interrupted", now)
    return NO_EFFECTS


async def _queue_reply(tx: Tx, exchange: Row, reply: str, now: int) -> Effects:
    """Queue the other side's turn to answer; after the last turn, the announcement."""
    turn = exchange["turn"] + 1
    if turn > exchange["turns"] or exchange["requester"] is None:
        return await _queue_announce(tx, exchange, reply, now)
    by_target = turn % 2 == 0
    run_id = f"turn:{exchange['id']}:{turn}"
    side = "target" if by_target else "requester"
    context = prompts.build_reply_context(
        _build_sides(exchange), turn, exchange["turns"], requester_speaks=not by_target
    )
    submission = Submission(
        run_id=run_id,
        session=exchange[side],
        session_key=exchange[f"{side}_key"],
        origin=REPLY_BACK_ORIGIN,
        message=UserMessage(
            content=reply, timestamp=now, provenance=_build_provenance(exchange, by_target=not by_target)
        ),
        instructions=context,
        exchange=exchange["n"],
        chain=exchange["chain"],
        hop=exchange["hop"] + turn,
        agent_id=None
        if by_target
        else exchange["requester_agent"],  # for the target, the agent of the first run
    )
    accepted = await run_queue.submit_follow_up(tx, submission, now)
    if accepted is None:
        return await _queue_announce(tx, exchange, reply, now)
    await tx.do(SQL.advance, n=exchange["n"], phase="reply", current=run_id, turn=turn, reply=reply)
    return Effects.queue(accepted)


async def _queue_announce(tx: Tx, exchange: Row, reply: str | None, now: int) -> Effects:
    """Queue the run in which the target words the announcement for its chat."""
    if exchange["announce"] == "none":
        return await _settle_exchange(tx, exchange, "none", now, reply)
    run_id = f"announce:{exchange['id']}"
    first, latest = exchange["first_reply"] or reply, reply or exchange["latest_reply"]
    submission = Submission(
        run_id=run_id,
        session=exchange["target"],
        session_key=exchange["target_key"],
        origin=ANNOUNCE_ORIGIN,
        message=UserMessage(
            content=prompts.build_announce_message(exchange["message"], first, latest),
            timestamp=now,
            provenance=_build_provenance(exchange, by_target=False, kind="announce_step"),
        ),
        instructions=prompts.build_announce_context(_build_sides(exchange)),
        exchange=exchange["n"],
        chain=exchange["chain"],
        hop=exchange["hop"] + exchange["turn"],
    )
    accepted = await run_queue.submit_follow_up(tx, submission, now)
    if accepted is None:
        return await _settle_exchange(tx, exchange, "target_gone", now, reply)
    await tx.do(
        SQL.advance, n=exchange["n"], phase="announce", current=run_id, turn=exchange["turn"], reply=reply
    )
    return Effects.queue(accepted)


async def _finish_announce(tx: Tx, exchange: Row, step: CompletedStep, now: int) -> Effects:
    """Settle the exchange with its announcement: posted, or `skipped` by the agent, `silent` (no text) or `failed`."""
    reply = step.usable_reply
    if reply is None:
        return await _settle_exchange(
            tx, exchange, "silent" if step.state in {"ok", "incomplete"} else "failed", now
        )
    if sanitize.is_silence(reply):
        return await _settle_exchange(tx, exchange, "skipped", now)
    delivery = NewDelivery(
        key=f"exchange:{exchange['id']}",
        kind="announce",
        session=exchange["target"],
        session_key=exchange["target_key"],
        destination=delivery_rows.decode_destination(exchange["destination"]),
        body=reply.strip(),
        entry_run=step.run_id,
        exchange=exchange["n"],
    )
    await delivery_rows.enqueue_delivery(tx, delivery, now)
    return await _settle_exchange(tx, exchange, "pending", now) + DELIVERIES_DUE


async def _settle_exchange(
    tx: Tx, exchange: Row, announced: str, now: int, reply: str | None = None
) -> Effects:
    await tx.do(SQL.settle, n=exchange["n"], announced=announced, reply=reply, now=now)
    return NO_EFFECTS


def _can_reply(requester_key: str) -> bool:
    """Whether a session can take reply turns: jobs and hooks end with their run, sub-agents with their task."""
    return keys.parse(requester_key).shape not in {"cron", "hook", "subagent", "acp"}


def _build_sides(exchange: Row) -> ExchangeSides:
    requester = exchange["requester_key"]
    return ExchangeSides(
        requester=keys.display_full_key(requester) if requester else "an operator",
        requester_channel=exchange["requester_channel"],
        target=keys.display_full_key(exchange["target_key"]),
        target_channel=exchange["target_channel"],
    )


def _get_channel(session: Row) -> str:
    return keys.resolve_list_channel(session["kind"], session["channel"], session["last_channel"])


def _build_provenance(exchange: Row, *, by_target: bool, kind: str = INTER_SESSION_KIND) -> Provenance:
    side = "target" if by_target else "requester"
    source = exchange[f"{side}_key"]
    return Provenance(
        kind=kind,
        source_session_key=keys.display_full_key(source) if source else None,
        source_channel=exchange[f"{side}_channel"],
        source_tool=SEND_TOOL_NAME,
        exchange_id=exchange["id"],
        chain_id=exchange["chain"],
        hop=exchange["hop"],
    )
