"""Scheduled jobs that an agent manages itself: what it may add, and which jobs it sees.

An agent manages the jobs of its own agent only, from a lasting session outside a sandbox: whatever a sub-agent, a hook
or a job may do must end with it. A job may reach no session that the agent itself may not send to.
"""

from __future__ import annotations

from antiphon import keys
from antiphon.access import Caller
from antiphon.engine import idempotency
from antiphon.engine.idempotency import IdempotentCommand
from antiphon.engine.jobs import jobs
from antiphon.engine.jobs.jobs import (
    LAST_USED_CHANNEL,
    SQL,
    AnnounceDelivery,
    FiringContext,
    Job,
    JobPatch,
    JobSpec,
)
from antiphon.engine.jobs.schedule import find_next_slot
from antiphon.errors import Conflict, Forbidden, InvalidInput, NotFound
from antiphon.store import Tx

MAX_JOBS_PER_AGENT = 100
MIN_INTERVAL_MS = 60_000
_SHORT_LIVED_SHAPES = frozenset({"subagent", "acp", "cron", "hook", "node", "openai", "openai-user"})


def require_lasting_session(caller: Caller) -> None:
    """Refuse agents in sessions that are sandboxed or not meant to last.

    Raises:
        Forbidden: it is such a session.
    """
    shape = keys.parse(caller.session_key or "").shape
    if caller.sandboxed or caller.cap is not None or shape in _SHORT_LIVED_SHAPES:
        raise Forbidden(
            "Scheduled jobs cannot be managed from a sandboxed session, a sub-agent, a job or a hook.",
            "Do it in a chat of the agent.",
        )


async def add_job(
    tx: Tx,
    context: FiringContext,
    caller: Caller,
    job_id: str,
    spec: JobSpec,
    command: IdempotentCommand,
    now: int,
) -> Job:
    if before := await idempotency.load_recorded_answer(tx, command, Job):
        return before
    row = await tx.one(SQL.count_of_agent, agent_id=caller.agent_id)
    if row and row["jobs"] >= MAX_JOBS_PER_AGENT:
        raise Conflict(
            f"Agent {caller.agent_id!r} has {MAX_JOBS_PER_AGENT} jobs already.",
            "Remove one first.",
            max=MAX_JOBS_PER_AGENT,
        )
    await _check_spec(tx, context, caller, spec, now)
    return await jobs.add_job(tx, context, caller, job_id, spec, command, now)


async def update_job(
    tx: Tx, context: FiringContext, caller: Caller, job_id: str, patch: JobPatch, now: int
) -> Job:
    job = await get_job(tx, caller, job_id)
    spec = jobs.complete_job_spec(patch.apply_to(job.spec), context.config, now)
    await _check_spec(tx, context, caller, spec, now)
    return await jobs.update_job(tx, context, caller, job_id, patch, now)


async def remove_job(tx: Tx, caller: Caller, job_id: str) -> bool:
    await get_job(tx, caller, job_id)
    return await jobs.remove_job(tx, job_id)


async def get_job(tx: Tx, caller: Caller, job_id: str) -> Job:
    """Return a job that the caller may see: an agent's own, or any for an operator."""
    job = await jobs.get_job(tx, job_id)
    if not caller.is_operator and job.spec.agent_id != caller.agent_id:
        raise NotFound(
            f"Job {job_id[:80]!r} was not found.", "Use an id from the list of jobs.", job_id=job_id
        )
    return job


async def _check_spec(tx: Tx, context: FiringContext, caller: Caller, spec: JobSpec, now: int) -> None:
    if spec.agent_id != caller.agent_id:
        raise Forbidden(
            f"Agent {caller.agent_id!r} may not schedule jobs of agent {spec.agent_id!r}.",
            "Leave agentId out.",
            field="agentId",
        )
    first = find_next_slot(spec.schedule, now)
    second = find_next_slot(spec.schedule, first) if first is not None else None
    if first is not None and second is not None and second - first < MIN_INTERVAL_MS:
        raise InvalidInput(
            "The job would fire more than once a minute.", "Use a longer interval.", field="schedule"
        )
    main = f"agent:{caller.agent_id}:main"
    if spec.session_target == "main":
        await context.resolver.open(tx, caller, "send", main, found_at=now)
    delivery = spec.delivery
    if isinstance(delivery, AnnounceDelivery):
        if delivery.to or delivery.account_id or delivery.thread_id or delivery.channel != LAST_USED_CHANNEL:
            raise Forbidden(
                "An agent's job posts to the last chat of its agent's main session only.",
                "Leave the target out of 'delivery'.",
                field="delivery",
            )
        await context.resolver.open(tx, caller, "send", main, found_at=now)
