"""Firings of jobs, as transaction scripts.

A firing is a run, and the commit that queues the run is the one that moves the job to its next slot: a kill can neither
lose a firing nor repeat it. Slots that were missed are one firing, for the latest of them.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from antiphon import keys
from antiphon.access import Caller
from antiphon.engine import admissions, commands, deliveries, jobs, sessions
from antiphon.engine.admissions import Accepted, Submission
from antiphon.engine.commands import Command
from antiphon.engine.deliveries import Destination
from antiphon.engine.jobs import LAST_HEARD, SQL, AgentTurn, Announce, Job, Terms
from antiphon.engine.sequels import Addressee
from antiphon.engine.sessions import Birth
from antiphon.engine.slots import latest_slot, next_slot
from antiphon.errors import AntiphonError, InvalidInput, LaneFull
from antiphon.messages import Provenance, User
from antiphon.store import Row, Tx

ORIGIN = "cron"  # as the partial index of unfinished runs has it
NOT_DUE, BUSY, LANE_FULL = "not-due", "busy", "lane-full"
OPERATOR = Caller.operator()  # jobs are the operators' own: whoever added one was admin


class Fired(Struct, frozen=True, kw_only=True):
    """What came of firing a job: a run, or the reason why there is none."""

    accepted: Accepted | None = None
    reason: str | None = None


async def due(tx: Tx, now: int) -> list[str]:
    """Jobs whose slot has come, the longest due first."""
    return [row["id"] for row in await tx.all(SQL.due, now=now)]


async def fire(tx: Tx, terms: Terms, job_id: str, now: int) -> Fired:
    """Fire a job if it is due: its run and its next slot are one commit."""
    row = await tx.one(SQL.by_id, id=job_id)
    job = jobs.read(row) if row else None
    if job is None or job.next_at is None or job.next_at > now:
        return Fired(reason=NOT_DUE)
    if await _busy(tx, terms):
        return Fired(reason=BUSY)
    try:
        slot = latest_slot(job.spec.schedule, job.next_at, now)
        following = next_slot(job.spec.schedule, now)
    except InvalidInput as error:  # such as a time zone that the machine no longer has
        fired = Fired(reason=str(error))
        await _record(tx, job, fired, job.next_at, None, now)
        return fired
    fired = await _submit(tx, terms, job, f"cron:{job.id}:{slot}", now)
    if fired.reason == LANE_FULL:
        return fired  # its session has no room for another message now: the slot is kept
    if following is None and job.spec.delete_after_run and fired.accepted:
        await jobs.remove(tx, job.id)
    else:
        await _record(tx, job, fired, slot, following, now)
    return fired


async def force(tx: Tx, terms: Terms, job_id: str, run_id: str, now: int) -> Fired:
    """Fire a job now, whatever its schedule says; the schedule goes on as if nothing had been."""
    job = await jobs.get(tx, job_id)
    if await _busy(tx, terms):
        return Fired(reason=BUSY)
    fired = await _submit(tx, terms, job, run_id, now)
    if fired.reason != LANE_FULL:
        await _record(tx, job, fired, None, job.next_at, now)
    return fired


async def fire_once(
    tx: Tx, terms: Terms, job_id: str, run_id: str | None, command: Command, now: int
) -> Fired:
    """Fire a job for somebody who asks for it: with `run_id` whatever its schedule says, else if it is due.

    Asked again under the same key, the run it led to is told again. What led to none may be tried again.
    """
    if before := await commands.answered(tx, command, Accepted):
        return Fired(accepted=msgspec.structs.replace(before, new=False))
    if run_id is not None:
        fired = await force(tx, terms, job_id, run_id, now)
    else:
        fired = await fire(tx, terms, job_id, now)
    if fired.accepted:
        await commands.record(tx, command, fired.accepted, now)
    return fired


async def _busy(tx: Tx, terms: Terms) -> bool:
    await tx.alone("cron")
    row = await tx.one(SQL.unfinished)
    return row is not None and row["runs"] >= terms.config.cron.max_concurrent_runs


async def _record(tx: Tx, job: Job, fired: Fired, slot: int | None, next_at: int | None, now: int) -> None:
    """A slot that is used up with none to follow is the end of a job that had a schedule."""
    failed = fired.accepted is None
    await tx.do(
        SQL.fired,
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


async def _submit(tx: Tx, terms: Terms, job: Job, run_id: str, now: int) -> Fired:
    """Queue the run. What stands in its way is told and recorded, and is not the end of the job."""
    try:
        session = await _session(tx, terms, job, now)
        terms.door.check_send(session)
        submission = _submission(terms, job, session, run_id, now)
        if isinstance(job.spec.delivery, Announce):
            addressee = await _addressee(tx, terms, job, job.spec.delivery, now)
            submission = msgspec.structs.replace(submission, target=addressee.text)
        return Fired(accepted=await admissions.submit(tx, submission, now))
    except LaneFull:
        return Fired(reason=LANE_FULL)
    except AntiphonError as error:
        return Fired(reason=str(error))


async def _session(tx: Tx, terms: Terms, job: Job, now: int) -> Row:
    agent_id, target = job.spec.agent_id or "", job.spec.session_target or ""
    if target == "main":
        return await terms.door.open(tx, OPERATOR, "send", f"agent:{agent_id}:main", found_at=now)
    if target != "isolated":
        return await terms.door.open(tx, OPERATOR, "send", target.removeprefix("session:"))
    key = keys.owned_key(agent_id, "cron", job.id)
    if await sessions.find(tx, key, None) is None:
        terms.config.agent(agent_id)  # raises for one that is not configured any more
        sandboxed = terms.door.sandboxes(agent_id, key)
        await sessions.create(tx, key, now, Birth(display_name=job.spec.name, sandboxed=sandboxed))
    return await terms.door.open(tx, OPERATOR, "send", str(key))


async def _addressee(tx: Tx, terms: Terms, job: Job, wanted: Announce, now: int) -> Addressee:
    """Whose chat hears the answer: that of the agent's main session, wherever it is."""
    main = await terms.door.open(tx, OPERATOR, "send", f"agent:{job.spec.agent_id}:main", found_at=now)
    whole = await tx.one(sessions.SQL.by_id, id=main["id"])
    assert whole is not None
    destination = deliveries.of_session(whole)
    if wanted.channel != LAST_HEARD:
        destination = Destination(
            channel=wanted.channel,
            to=wanted.to or (main["key"] if wanted.channel == deliveries.WEBCHAT else None),
            account_id=wanted.account_id,
            thread_id=wanted.thread_id,
        )
    return Addressee(session=main["id"], session_key=main["key"], destination=destination)


def _submission(terms: Terms, job: Job, session: Row, run_id: str, now: int) -> Submission:
    payload = job.spec.payload
    turn = payload if isinstance(payload, AgentTurn) else AgentTurn(message=payload.text)
    timeout = turn.timeout_seconds
    return Submission(
        run_id=run_id,
        session=session["id"],
        session_key=session["key"],
        origin=ORIGIN,
        message=User(content=turn.message, timestamp=now, provenance=Provenance(kind="cron")),
        model=turn.model,
        thinking=turn.thinking,
        deadline_at=None if timeout is None else now + round(timeout * 1000),
        max_queued=terms.config.store.lane_max_queued,
        agent_id=terms.door.spoken_to(OPERATOR, f"agent:{job.spec.agent_id}:main")
        if job.spec.session_target == "main"
        else None,
    )
