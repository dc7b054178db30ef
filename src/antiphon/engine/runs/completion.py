"""Work that a finished run triggers, done in the commit that ends it."""

from __future__ import annotations

import msgspec

from antiphon import keys
from antiphon.engine.collaboration import exchanges, subagents, task_rows, yields
from antiphon.engine.outbox import delivery_rows, sanitize
from antiphon.engine.outbox.delivery_rows import Destination, NewDelivery
from antiphon.engine.runs import run_queue
from antiphon.engine.runs.effects import DELIVERIES_DUE, NO_EFFECTS, CompletedStep, Effects
from antiphon.engine.runs.run_queue import CHANNEL_ORIGIN, NOTE_ORIGIN, WAKE_ORIGIN, Submission
from antiphon.messages import INJECTED_MODEL, AssistantMessage, Provenance, TextBlock
from antiphon.store import Row, Tx
from antiphon.store.queries import Queries

RUNS_SQL = Queries("runs")
FAILED_STATES = frozenset({"error", "timeout", "interrupted", "incomplete"})
FAILURE_NOTICE = "There is no answer to this message, because something failed. Please try again later."


class ReplyTarget(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The chat that receives the reply of a run, fixed when the run is accepted."""

    session: int
    session_key: str
    destination: Destination

    @property
    def json_text(self) -> str:
        return msgspec.json.encode(self).decode()


async def load_reply_target(tx: Tx, run_id: str | None) -> ReplyTarget | None:
    """Return the chat that receives the reply of a run, or None."""
    row = await tx.one(RUNS_SQL.exchange_and_target, id=run_id) if run_id else None
    if row is None or row["target"] is None:
        return None
    return msgspec.json.decode(row["target"], type=ReplyTarget)


async def complete_step(tx: Tx, step: CompletedStep, now: int) -> Effects:
    """Deliver the outcome of a run that belongs to an exchange, a task or a chat that waits for its reply."""
    effects, answer = NO_EFFECTS, step
    if step.yielded and not await yields.finish_yielded_run(tx, step.run_id):
        # It was stopped after it yielded: no run will answer for it.
        answer = msgspec.structs.replace(step, yielded=False, state="cancelled", reply=None)
    if not answer.yielded:
        effects += await _deliver_outcome(tx, answer, now)
    if step.task is not None:
        effects += await subagents.advance_task(tx, step, now)
    return effects


async def _deliver_outcome(tx: Tx, step: CompletedStep, now: int) -> Effects:
    """Deliver the outcome of a run to its exchange and reply target, and to those of the runs it answers for."""
    effects, answered_targets = list[Effects](), set[str]()
    answered: list[Row] = (
        await yields.pop_runs_answered_by(tx, step.run_id) if step.origin == WAKE_ORIGIN else []
    )
    requests = [(step.run_id, step.exchange, step.reply_target_json)]
    requests += [(run["id"], run["exchange"], run["target"]) for run in answered]
    for requesting_run, exchange, target_json in requests:
        if exchange is not None:
            advanced = msgspec.structs.replace(step, exchange=exchange)
            effects.append(await exchanges.advance_exchange(tx, advanced, now))
        if target_json is None or target_json in answered_targets:
            continue
        if step.usable_reply is not None:
            answered_targets.add(target_json)
            effects.append(await _post_reply(tx, step, requesting_run, target_json, now))
        elif step.origin == CHANNEL_ORIGIN and step.state in FAILED_STATES:
            effects.append(await _post_failure(tx, step, target_json, now))
    return Effects.combine(effects)


async def _post_failure(tx: Tx, step: CompletedStep, target_json: str, now: int) -> Effects:
    """Tell a person in a chat that no answer comes; why it failed is for operators only."""
    reply_target = msgspec.json.decode(target_json, type=ReplyTarget)
    delivery = NewDelivery(
        key=f"run:{step.run_id}",
        kind="failure",
        session=reply_target.session,
        session_key=reply_target.session_key,
        destination=reply_target.destination,
        body=FAILURE_NOTICE,
    )
    await delivery_rows.enqueue_delivery(tx, delivery, now)
    return DELIVERIES_DUE


async def cancel_pending_wakes(tx: Tx, session: int, now: int) -> None:
    """Cancel the wakes that a session waits for; the exchanges of its yielded runs end without a reply."""
    for exchange, run_id in await yields.cancel_pending_wakes(tx, session):
        await exchanges.abandon_exchange(tx, exchange, run_id, now)


async def _post_reply(
    tx: Tx, step: CompletedStep, requesting_run: str, target_json: str, now: int
) -> Effects:
    """Post the reply to the chat named by `target_json`, and add it to that session's transcript.

    `requesting_run` is the run that named the chat: the one that answers, or one that it was woken for.
    """
    reply_target = msgspec.json.decode(target_json, type=ReplyTarget)
    reply = step.usable_reply or ""
    body = sanitize.sanitize_for_agents(reply)  # the outbox sanitizes it for people
    if sanitize.is_skip(reply, sanitize.NO_REPLY) or not body:
        return NO_EFFECTS
    effects, entry_run = NO_EFFECTS, step.run_id
    if reply_target.session != step.session:
        note = _build_reply_note(step, requesting_run, reply_target, body, now)
        effects, entry_run = Effects.queue(await run_queue.submit_follow_up(tx, note, now)), note.run_id
    delivery = NewDelivery(
        key=f"run:{requesting_run}",
        kind="reply",
        session=reply_target.session,
        session_key=reply_target.session_key,
        destination=reply_target.destination,
        body=body,
        entry_run=entry_run,
    )
    await delivery_rows.enqueue_delivery(tx, delivery, now)
    return effects + DELIVERIES_DUE


def _build_reply_note(
    step: CompletedStep, requesting_run: str, reply_target: ReplyTarget, body: str, now: int
) -> Submission:
    """Build the note that adds a reply to the transcript of another session."""
    message = AssistantMessage(
        content=[TextBlock(text=body)],
        timestamp=now,
        stop_reason="stop",
        provider="antiphon",
        model=INJECTED_MODEL,
        provenance=Provenance(kind=step.origin, source_session_key=keys.display_full_key(step.session_key)),
    )
    return Submission(
        run_id=f"note:{requesting_run}",
        session=reply_target.session,
        session_key=reply_target.session_key,
        origin=NOTE_ORIGIN,
        message=message,
    )


async def has_stuck_work(tx: Tx) -> bool:
    """Whether an exchange or task is left that no run will advance."""
    return bool(await exchanges.list_stalled_exchanges(tx) or await task_rows.list_stalled_tasks(tx))


async def settle_stuck_work(tx: Tx, now: int) -> Effects:
    """Settle exchanges and tasks that no run will advance: a safety net, so that nothing waits forever."""
    return await exchanges.settle_stuck_exchanges(tx, now) + await subagents.settle_stuck_tasks(tx, now)
