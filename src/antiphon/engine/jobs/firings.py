"""Firings of jobs, as transaction scripts.

A firing is a run, and the commit that queues the run also moves the job to its next slot: a crash can neither lose a
firing nor repeat it. Several missed slots cause one firing, for the latest of them.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from antiphon import keys
from antiphon.access import Caller
from antiphon.engine import idempotency
from antiphon.engine.idempotency import IdempotentCommand
from antiphon.engine.jobs import jobs
from antiphon.engine.jobs.jobs import LAST_USED_CHANNEL, SQL, AgentTurn, AnnounceDelivery, FiringContext, Job
from antiphon.engine.jobs.schedule import find_latest_slot, find_next_slot
from antiphon.engine.outbox import delivery_rows
from antiphon.engine.outbox.delivery_rows import Destination
from antiphon.engine.runs import run_queue
from antiphon.engine.runs.completion import ReplyTarget
from antiphon.engine.runs.run_queue import AcceptedRun, Submission
from antiphon.engine.sessions import session_rows
from antiphon.engine.sessions.session_rows import NewSession
from antiphon.errors import AntiphonError, InvalidInput, LaneFull
from antiphon.messages import Provenance, UserMessage
from antiphon.store import Row, Tx

CRON_ORIGIN = "cron"  # the value in the partial index of unfinished runs
NOT_DUE_REASON, BUSY_REASON, LANE_FULL_REASON = "not-due", "busy", "lane-full"
OPERATOR_CALLER = Caller.operator()  # only admins can add jobs


class FiringResult(Struct, frozen=True, kw_only=True):
    """The result of firing a job: a run, or the reason why none was queued."""

    accepted: AcceptedRun | None = None
    reason: str | None = None


async def list_due_jobs(tx: Tx, now: int) -> list[str]:
    """Return the ids of due jobs, the longest overdue first."""
    return [row["id"] for row in await tx.all(SQL.due, now=now)]


async def fire_if_due(tx: Tx, context: FiringContext, job_id: str, now: int) -> FiringResult:
    """Fire a job if it is due, and move it to its next slot in the same commit."""
    row = await tx.one(SQL.by_id, id=job_id)
    job = jobs.decode_job_row(row) if row else None
    if job is None or job.next_at is None or job.next_at > now:
        return FiringResult(reason=NOT_DUE_REASON)
    if await _is_at_run_limit(tx, context):
        return FiringResult(reason=BUSY_REASON)
    try:
        slot = find_latest_slot(job.spec.schedule, job.next_at, now)
        following = find_next_slot(job.spec.schedule, now)
    except InvalidInput as error:  # such as a time zone that the machine no longer has
        fired = FiringResult(reason=str(error))
        await _record_firing(tx, job, fired, job.next_at, None, now)
        return fired
    fired = await _submit_run(tx, context, job, f"cron:{job.id}:{slot}", now)
    if fired.reason == LANE_FULL_REASON:
        return fired  # the queue of its session is full: the slot is kept
    if following is None and job.spec.delete_after_run and fired.accepted:
        await jobs.remove_job(tx, job.id)
    else:
        await _record_firing(tx, job, fired, slot, following, now)
    return fired


async def fire_now(tx: Tx, context: FiringContext, job_id: str, run_id: str, now: int) -> FiringResult:
    """Fire a job now, regardless of its schedule, which stays unchanged."""
    job = await jobs.get_job(tx, job_id)
    if await _is_at_run_limit(tx, context):
        return FiringResult(reason=BUSY_REASON)
    fired = await _submit_run(tx, context, job, run_id, now)
    if fired.reason != LANE_FULL_REASON:
        await _record_firing(tx, job, fired, None, job.next_at, now)
    return fired


async def fire_on_request(
    tx: Tx, context: FiringContext, job_id: str, run_id: str | None, command: IdempotentCommand, now: int
) -> FiringResult:
    """Fire a job on request: with `run_id` regardless of its schedule, otherwise only if it is due.

    A repeated request with the same key returns the same run. If no run was queued, the request may be repeated.
    """
    if before := await idempotency.load_recorded_answer(tx, command, AcceptedRun):
        return FiringResult(accepted=msgspec.structs.replace(before, new=False))
    if run_id is not None:
        fired = await fire_now(tx, context, job_id, run_id, now)
    else:
        fired = await fire_if_due(tx, context, job_id, now)
    if fired.accepted:
        await idempotency.record_answer(tx, command, fired.accepted, now)
    return fired


async def _is_at_run_limit(tx: Tx, context: FiringContext) -> bool:
    await tx.lock("cron")
    row = await tx.one(SQL.count_unfinished_runs)
    return row is not None and row["runs"] >= context.config.cron.max_concurrent_runs


async def _record_firing(
    tx: Tx, job: Job, fired: FiringResult, slot: int | None, next_at: int | None, now: int
) -> None:
    """Record a firing in the job's row; a used slot without a next one disables the job."""
    failed = fired.accepted is None
    await tx.do(
        SQL.record_firing,
        id=job.id,
        enabled=int(job.spec.enabled if slot is None else next_at is not None),
        next_at=next_at,
        slot=slot,
        run_id=None if fired.accepted is None else fired.accepted.run_id,
        status="error" if failed else None,
        error=fired.reason,
        failed=int(failed),
        now=now,
    )


async def _submit_run(tx: Tx, context: FiringContext, job: Job, run_id: str, now: int) -> FiringResult:
    """Queue the run. Errors are returned as the reason and do not end the job."""
    try:
        session = await _open_session(tx, context, job, now)
        context.resolver.check_send(session)
        submission = _build_submission(context, job, session, run_id, now)
        if isinstance(job.spec.delivery, AnnounceDelivery):
            reply_target = await _resolve_reply_target(tx, context, job, job.spec.delivery, now)
            submission = msgspec.structs.replace(submission, reply_target_json=reply_target.json_text)
        return FiringResult(accepted=await run_queue.submit(tx, submission, now))
    except LaneFull:
        return FiringResult(reason=LANE_FULL_REASON)
    except AntiphonError as error:
        return FiringResult(reason=str(error))


async def _open_session(tx: Tx, context: FiringContext, job: Job, now: int) -> Row:
    agent_id, target = job.spec.agent_id or "", job.spec.session_target or ""
    if target == "main":
        return await context.resolver.open(
            tx, OPERATOR_CALLER, "send", f"agent:{agent_id}:main", found_at=now
        )
    if target != "isolated":
        return await context.resolver.open(tx, OPERATOR_CALLER, "send", target.removeprefix("session:"))
    key = keys.owned_key(agent_id, "cron", job.id)
    if await session_rows.find_session(tx, key, None) is None:
        context.config.get_agent(agent_id)  # raises if it is no longer configured
        sandboxed = context.resolver.is_sandboxed(agent_id, key)
        await session_rows.create_session(
            tx, key, now, NewSession(display_name=job.spec.name, sandboxed=sandboxed)
        )
    return await context.resolver.open(tx, OPERATOR_CALLER, "send", str(key))


async def _resolve_reply_target(
    tx: Tx, context: FiringContext, job: Job, delivery: AnnounceDelivery, now: int
) -> ReplyTarget:
    """Return the chat that receives the answer: the agent's main session, at the configured destination."""
    main = await context.resolver.open(
        tx, OPERATOR_CALLER, "send", f"agent:{job.spec.agent_id}:main", found_at=now
    )
    destination = delivery_rows.resolve_session_destination(
        await session_rows.load_full_session(tx, main["id"])
    )
    if delivery.channel != LAST_USED_CHANNEL:
        section = context.config.channel_sections.get(delivery.channel)
        destination = Destination(
            channel=delivery.channel,
            to=delivery.to or (main["key"] if delivery.channel == delivery_rows.WEBCHAT_CHANNEL else None),
            account_id=delivery.account_id or (section.default_account_id if section else None),
            thread_id=delivery.thread_id,
        )
    return ReplyTarget(session=main["id"], session_key=main["key"], destination=destination)


def _build_submission(context: FiringContext, job: Job, session: Row, run_id: str, now: int) -> Submission:
    payload = job.spec.payload
    turn = payload if isinstance(payload, AgentTurn) else AgentTurn(message=payload.text)
    timeout = turn.timeout_seconds
    return Submission(
        run_id=run_id,
        session=session["id"],
        session_key=session["key"],
        origin=CRON_ORIGIN,
        message=UserMessage(content=turn.message, timestamp=now, provenance=Provenance(kind="cron")),
        model=turn.model,
        thinking=turn.thinking,
        deadline_at=None if timeout is None else now + round(timeout * 1000),
        max_queued=context.config.store.lane_max_queued,
        agent_id=context.resolver.find_addressed_agent(OPERATOR_CALLER, f"agent:{job.spec.agent_id}:main")
        if job.spec.session_target == "main"
        else None,
    )
