"""The lifecycle of a run after it was queued, as transaction scripts.

    queued ──▶ running ──▶ ok | error | timeout | cancelled | interrupted | incomplete
       └───────────────────────▲   (a queued run can end without ever having run)

`claim_run` takes a lane by raising its epoch, and every later commit of the run names that epoch: a process that lost
the lane changes nothing (`Fenced`). The user's message enters the transcript when its run starts, so transcripts are
never interleaved. `finish_run` ends a run and claims the next one of the lane in the same commit. Every run ends
through `_end_run`, and the work that follows from it (`completion`) is in that commit, too. A note is a run that only
appends its entry to the transcript, between other runs, and causes nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import msgspec

from antiphon.engine.collaboration import subagents
from antiphon.engine.runs import completion
from antiphon.engine.runs.context import build_interrupted_result
from antiphon.engine.runs.crash_quarantine import MIN_SUSPECT_INTERRUPTIONS
from antiphon.engine.runs.run_options import RunOptions, decode_options, encode_options, find_unknown_messages
from antiphon.engine.runs.run_queue import NOTE_ORIGIN
from antiphon.engine.runs.steps import (
    ANNOUNCE_ORIGIN,
    NO_FOLLOW_UP,
    WAKE_ORIGIN,
    CompletedStep,
    FollowUp,
    RunOutcome,
)
from antiphon.engine.sessions import transcripts
from antiphon.engine.sessions.transcripts import Entry
from antiphon.errors import CrashSuspected, Fenced, InvalidInput, StoreError
from antiphon.messages import AssistantMessage, Message, StopReason, TokenUsage, ToolCall, decode_message
from antiphon.store import Row, Tx
from antiphon.store.queries import Queries

SQL = Queries("runs")
SESSIONS_SQL = Queries("sessions")
TASKS_SQL = Queries("tasks")

MAX_RUNS_SKIPPED_PER_CLAIM = 1000  # runs (such as expired ones) that one claim may end without executing them

StepIdentity: TypeAlias = tuple[int, str, int, str, str, str | None, int | None, int | None]
"""A run and the exchange or task it belongs to: the fields of a `CompletedStep` before the outcome."""


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """The right to execute a run: what its commits must name, and what it starts from."""

    n: int
    run_id: str
    session: int
    session_key: str
    session_id: str
    root_key: str
    agent_id: str
    sandboxed: bool
    transcript: int
    epoch: int
    first_seq: int
    attempts: int
    resumed: bool
    input: str
    origin: str
    target: str | None
    exchange: int | None
    task: int | None
    envelope: str | None
    instructions: str | None
    model: str | None
    thinking: str | None
    deadline_at: int
    cancelled: bool
    started_at: int
    entries: list[Entry]
    options: RunOptions | None = None

    @property
    def step_identity(self) -> StepIdentity:
        larger = self.target, self.exchange, self.task
        return self.n, self.run_id, self.session, self.session_key, self.origin, *larger


class RunEnding(msgspec.Struct, frozen=True, kw_only=True):
    """How a run ended, according to the runtime only."""

    state: RunOutcome
    reply: str | None = None
    error_code: str | None = None
    error: str | None = None
    model_answered: str | None = None
    messages: Sequence[Message] = ()
    yielded: bool = False
    """Whether a tool ended the turn; the answer comes when the session is woken."""
    used: bool = True
    """False if no step of the run reported usage."""


STOPPED_ENDING = RunEnding(state="cancelled", error_code="cancelled", error="The run was stopped.")


class Effects(msgspec.Struct, frozen=True):
    """The effects of a stop: runs that ended at once, runs whose owner was asked to stop, and follow-up work."""

    ended: list[EndedRun]
    asked: list[str]
    sequel: FollowUp = NO_FOLLOW_UP

    def __add__(self, other: Effects) -> Effects:
        return Effects(self.ended + other.ended, self.asked + other.asked, self.sequel + other.sequel)


NO_EFFECTS = Effects([], [])


class EndedRun(msgspec.Struct, frozen=True):
    """A run that ended in this commit, with the entries it added."""

    run_id: str
    session: int
    session_key: str
    session_id: str
    origin: str
    ending: RunEnding
    entries: list[Entry]
    at: int
    after: Effects = NO_EFFECTS
    """Follow-up work, and runs that were stopped with this one."""
    spent: Row | None = None


class RunWorker(msgspec.Struct, frozen=True):
    """The process that claims runs, the time, and the limits that apply to a claim."""

    owner: str
    now: int
    max_attempts: int
    max_run_ms: int
    """Maximum age of runs that were accepted without a deadline."""
    is_quarantined: bool = False
    """Whether the worker may start crash suspects (`crash_quarantine`)."""


async def claim_run(tx: Tx, session: int, worker: RunWorker) -> tuple[Claim | None, list[EndedRun]]:
    """Resume the active run of a lane if its owner is gone; if no run is active, start the next one.

    Raises:
        CrashSuspected: the run must wait for its turn (`crash_quarantine`).
    """
    row = await tx.one(SQL.active_with_lease, session=session)
    if row is None:
        return await _claim_next_run(tx, session, worker)
    if row["owner"] != worker.owner and row["lease_until"] > worker.now:
        return None, []
    verdict = _find_refusal_ending(row, worker)
    if verdict is None:
        if (
            row["attempts"] >= MIN_SUSPECT_INTERRUPTIONS
            and row["owner"] != worker.owner
            and not worker.is_quarantined
        ):
            raise CrashSuspected(row["id"])
        return await _start_run(tx, row, worker), []
    ended = await end_unexecuted_run(tx, row, verdict, worker.now)
    following, skipped = await _claim_next_run(tx, session, worker)
    return following, [ended, *skipped]


async def _claim_next_run(
    tx: Tx, session: int, worker: RunWorker, head: Row | None = None
) -> tuple[Claim | None, list[EndedRun]]:
    """Start the first queued run, ending those before it that must not be executed any more."""
    ended: list[EndedRun] = []
    for _ in range(MAX_RUNS_SKIPPED_PER_CLAIM):
        row = head or await tx.one(SQL.next_queued, session=session)
        if row is None:
            return None, ended
        head = None
        if row["origin"] == NOTE_ORIGIN:
            ended.append(await _append_note(tx, row, worker.now))
            continue
        verdict = _find_refusal_ending(row, worker)
        if verdict is None:
            return await _start_run(tx, row, worker), ended
        ended.append(await end_unexecuted_run(tx, row, verdict, worker.now))
    return None, ended  # The sweep visits the lane again; this bounds the size of one commit.


async def _append_note(tx: Tx, row: Row, now: int) -> EndedRun:
    """Append a note to the transcript in its turn."""
    try:
        role = str(decode_message(row["input"]).__struct_config__.tag)
    except InvalidInput as error:
        return await _discard_damaged_note(tx, row, str(error), now)
    place = await tx.one(SESSIONS_SQL.reserve_seq_unfenced, id=row["session"], count=1, now=now)
    session = await tx.one(SESSIONS_SQL.key_by_id, id=row["session"])
    assert place is not None and session is not None
    entry = transcripts.new_entry(place["last_seq"], role, row["input"], now)
    await transcripts.append_raw(tx, place["transcript"], row["n"], entry)
    await tx.do(SQL.complete_note, n=row["n"], transcript=place["transcript"], seq=entry.seq, now=now)
    return EndedRun(
        row["id"],
        row["session"],
        session["key"],
        session["session_id"],
        NOTE_ORIGIN,
        RunEnding(state="ok"),
        [entry],
        now,
        Effects([], [], FollowUp(posted=True)),  # deliveries that waited for this entry can be sent now
    )


async def _discard_damaged_note(tx: Tx, row: Row, reason: str, now: int) -> EndedRun:
    """End a note that cannot be decoded, so that it does not block its lane."""
    session = await tx.one(SESSIONS_SQL.key_by_id, id=row["session"])
    assert session is not None
    ending = RunEnding(state="error", error_code=InvalidInput.code, error=reason)
    leads_to_nothing = None, None, None
    part = row["n"], row["id"], row["session"], session["key"], NOTE_ORIGIN, *leads_to_nothing
    await _end_run(tx, part, ending, None, now)
    return EndedRun(
        row["id"], row["session"], session["key"], session["session_id"], NOTE_ORIGIN, ending, [], now
    )


def _compute_deadline(row: Row, worker: RunWorker) -> int:
    return row["deadline_at"] if row["deadline_at"] is not None else row["created_at"] + worker.max_run_ms


def _find_refusal_ending(row: Row, worker: RunWorker) -> RunEnding | None:
    """Return the ending of a run that must not be executed (again), or None."""
    if _compute_deadline(row, worker) <= worker.now:
        return RunEnding(
            state="timeout", error_code="timeout", error="The run's time was over before it could go on."
        )
    if row["attempts"] >= worker.max_attempts:
        return RunEnding(
            state="interrupted",
            error_code="quarantined",
            error=f"The run was interrupted {row['attempts']} times without getting on, and is not tried again. "
            "Send the message once more to retry it.",
        )
    return None


async def _start_run(tx: Tx, row: Row, worker: RunWorker, lane: Row | None = None) -> Claim:
    """Start or resume a run, taking its lane unless `lane` is given."""
    fresh = row["first_seq"] is None
    lane = lane or await tx.one(SESSIONS_SQL.claim_lane, id=row["session"], count=int(fresh), now=worker.now)
    if lane is None:
        raise StoreError(f"Run {row['id']!r} has no session.", "Run `antiphon doctor`.")
    entries: list[Entry] = []
    options = decode_options(row["options"])
    if fresh and options is not None and options.earlier:
        entries = await _append_earlier_messages(tx, row, lane, options, worker.now)
        options = msgspec.structs.replace(options, earlier=[])  # they are in the transcript now
    first_seq = lane["last_seq"] + len(entries) if fresh else row["first_seq"]
    started = await tx.do(
        SQL.start,
        n=row["n"],
        seen=row["epoch"],
        owner=worker.owner,
        epoch=lane["lane_epoch"],
        transcript=lane["transcript"],
        first_seq=first_seq,
        options=encode_options(options),
        now=worker.now,
    )
    if not started:
        # Another process claimed it since it was read; possible in a store that locks rows.
        raise Fenced(row["id"])
    if fresh:
        role = "user" if row["options"] is None else str(decode_message(row["input"]).__struct_config__.tag)
        entries.append(transcripts.new_entry(first_seq, role, row["input"], worker.now))
        await transcripts.append_raw(tx, lane["transcript"], row["n"], entries[-1])
    return _build_claim(row, lane, worker, first_seq, entries, options)


async def _append_earlier_messages(tx: Tx, row: Row, lane: Row, options: RunOptions, now: int) -> list[Entry]:
    """Append the request's earlier messages that the session lacks; its new message is appended next."""
    unknown = [
        msgspec.structs.replace(message, timestamp=now)
        for message in await find_unknown_messages(tx, lane["transcript"], options)
    ]
    if not unknown:
        return []
    moved = await tx.one(
        SESSIONS_SQL.reserve_seq, id=row["session"], epoch=lane["lane_epoch"], count=len(unknown), now=now
    )
    if moved is None:
        raise Fenced(row["id"])
    return await transcripts.append(tx, lane["transcript"], moved["last_seq"] - 1, None, unknown, now)


async def load_client_calls(tx: Tx, run_id: str) -> list[ToolCall]:
    """Return the calls of client-side tools that a run ended with."""
    row = await tx.one(SQL.last_answer, id=run_id)
    options = decode_options(row["options"]) if row else None
    answer = transcripts.decode_or_none(row) if row else None
    if options is None or not isinstance(answer, AssistantMessage):
        return []
    return [call for call in answer.tool_calls if call.name in options.tool_names]


def _build_claim(
    row: Row, lane: Row, worker: RunWorker, first_seq: int, entries: list[Entry], options: RunOptions | None
) -> Claim:
    return Claim(
        n=row["n"],
        run_id=row["id"],
        session=row["session"],
        session_key=lane["key"],
        session_id=lane["session_id"],
        root_key=lane["root_key"],
        agent_id=row["agent_id"] or lane["agent_id"],
        sandboxed=bool(lane["sandboxed"]),
        transcript=lane["transcript"],
        epoch=lane["lane_epoch"],
        first_seq=first_seq,
        attempts=row["attempts"] + 1,
        resumed=row["first_seq"] is not None,
        input=row["input"],
        origin=row["origin"],
        target=row["target"],
        exchange=row["exchange"],
        task=row["task"],
        envelope=lane["envelope"],
        instructions=row["instructions"],
        model=row["model"] or lane["model"],
        thinking=row["thinking"] or lane["thinking"],
        deadline_at=_compute_deadline(row, worker),
        cancelled=row["cancel_at"] is not None,
        started_at=row["started_at"] or worker.now,
        entries=entries,
        options=options,
    )


async def commit_messages(tx: Tx, claim: Claim, messages: Sequence[Message], now: int) -> list[Entry]:
    """Append entries of a run that continues."""
    row = await tx.one(
        SESSIONS_SQL.reserve_seq, id=claim.session, epoch=claim.epoch, count=len(messages), now=now
    )
    if row is None:
        raise Fenced(claim.run_id)
    entries = await transcripts.append(tx, claim.transcript, row["last_seq"], claim.n, messages, now)
    await _record_message_usage(tx, claim, messages, now)
    if claim.attempts > 1:
        await tx.do(SQL.reset_attempts, n=claim.n)
    return entries


async def finish_run(
    tx: Tx, claim: Claim, ending: RunEnding, worker: RunWorker, *, claim_next: bool = True
) -> tuple[EndedRun, Claim | None, list[EndedRun]]:
    """End a run and, if `claim_next`, claim the next one of its lane in the same commit."""
    messages = list(ending.messages) or _build_closing_entries(ending, worker.now)
    if ending.state in {"cancelled", "timeout", "error"}:
        calls = await transcripts.load_open_calls(tx, claim.transcript, claim.first_seq)
        messages = [*(build_interrupted_result(call, worker.now) for call in calls), *messages]
    head = await tx.one(SQL.next_queued, session=claim.session) if claim_next else None
    plain = head is not None and head["origin"] != NOTE_ORIGIN and _find_refusal_ending(head, worker) is None
    lane = await _leave_lane(tx, claim, ending, len(messages), worker.now, passing=plain)
    last_seq = lane["last_seq"] - int(plain)
    entries = await transcripts.append(tx, claim.transcript, last_seq, claim.n, messages, worker.now)
    await _record_message_usage(tx, claim, messages, worker.now)
    after = await _end_run(tx, claim.step_identity, ending, last_seq, worker.now)
    following: Claim | None = None
    skipped: list[EndedRun] = []
    if head and plain:
        following = await _start_run(tx, head, worker, lane)
    elif head:
        following, skipped = await _claim_next_run(tx, claim.session, worker, head)
    spent = await tx.one(SQL.sum_usage, id=claim.run_id) if ending.used else None
    ended = EndedRun(
        claim.run_id,
        claim.session,
        claim.session_key,
        claim.session_id,
        claim.origin,
        ending,
        entries,
        worker.now,
        after,
        spent,
    )
    return ended, following, skipped


def _build_closing_entries(ending: RunEnding, now: int) -> list[Message]:
    """Return the entry that closes a turn without an answer, so that the next question stays separate."""
    if ending.state == "ok":
        return []
    reason: StopReason = "error" if ending.state in {"error", "incomplete"} else "aborted"
    return [AssistantMessage(content=[], timestamp=now, stop_reason=reason, error_message=ending.error)]


async def _leave_lane(tx: Tx, claim: Claim, ending: RunEnding, count: int, now: int, *, passing: bool) -> Row:
    """Reserve the last entry numbers of an ending run and, if `passing`, the first one of the next run."""
    leave = SESSIONS_SQL.release_and_claim_lane if passing else SESSIONS_SQL.release_lane
    aborted = int(ending.state in {"cancelled", "timeout"})
    row = await tx.one(leave, id=claim.session, epoch=claim.epoch, count=count, aborted=aborted, now=now)
    if row is None:
        raise Fenced(claim.run_id)
    return row


def _build_step_identity(row: Row, key: str) -> StepIdentity:
    larger = row["target"], row["exchange"], row["task"]
    return row["n"], row["id"], row["session"], key, row["origin"], *larger


async def _end_run(tx: Tx, part: StepIdentity, ending: RunEnding, last_seq: int | None, now: int) -> Effects:
    """End a run: the only way out of the states `queued` and `running`."""
    came_to = ending.state, ending.reply, ending.error, ending.model_answered, ending.yielded
    step = CompletedStep(*part, *came_to)
    await tx.do(
        SQL.end,
        n=step.n,
        state=ending.state,
        reply=ending.reply,
        error_code=ending.error_code,
        error=ending.error,
        model_answered=ending.model_answered,
        last_seq=last_seq,
        yielded=int(ending.yielded),
        now=now,
    )
    if step.exchange is None and step.task is None and step.target is None and step.origin != WAKE_ORIGIN:
        return NO_EFFECTS
    after = Effects([], [], await completion.complete_step(tx, step, now))
    if ending.state == "timeout" and step.task is not None and step.origin != ANNOUNCE_ORIGIN:
        # The deadline covers the sub-agents of the run as well. An announce run spawns none.
        after += await _cancel_descendants(tx, step.session, now)
    return after


async def end_unexecuted_run(tx: Tx, row: Row, ending: RunEnding, now: int) -> EndedRun:
    """End a run that no process executes: one that never started, or one taken from its owner."""
    session = await tx.one(SESSIONS_SQL.key_by_id, id=row["session"])
    key, session_id = (session["key"], session["session_id"]) if session else ("", "")
    last_seq: int | None = None
    entries: list[Entry] = []
    if row["first_seq"] is not None:
        calls = await transcripts.load_open_calls(tx, row["transcript"], row["first_seq"])
        messages = [
            *(build_interrupted_result(call, now) for call in calls),
            *_build_closing_entries(ending, now),
        ]
        seized = await tx.one(
            SESSIONS_SQL.revoke_lane, id=row["session"], count=len(messages), aborted=1, now=now
        )
        at = seized["last_seq"] if seized else 0
        last_seq = at
        entries = await transcripts.append(tx, row["transcript"], at, row["n"], messages, now)
    after = await _end_run(tx, _build_step_identity(row, key), ending, last_seq, now)
    return EndedRun(row["id"], row["session"], key, session_id, row["origin"], ending, entries, now, after)


async def _record_message_usage(tx: Tx, claim: Claim, messages: Sequence[Message], now: int) -> None:
    for message in messages:
        if isinstance(message, AssistantMessage) and message.usage:
            await record_usage(tx, claim, message.provider, message.model, message.usage, now)


async def record_usage(
    tx: Tx, claim: Claim, provider: str | None, model: str | None, usage: TokenUsage, now: int
) -> None:
    """Record one row per model call, and update the session's totals."""
    await tx.do(
        SQL.record_usage,
        now=now,
        run_id=claim.run_id,
        session_key=claim.session_key,
        session_id=claim.session_id,
        root_key=claim.root_key,
        agent_id=claim.agent_id,
        provider=provider,
        model=model,
        input=usage.input,
        output=usage.output,
        cache_read=usage.cache_read,
        cache_write=usage.cache_write,
        cost=usage.cost.total if usage.cost else None,
    )
    await tx.do(
        SESSIONS_SQL.add_usage,
        id=claim.session,
        input=usage.input,
        output=usage.output,
        total=usage.total_tokens,
        context=usage.input + usage.cache_read + usage.cache_write + usage.output,
        model=model,
    )


async def cancel_runs(tx: Tx, session: int, run_id: str | None, now: int) -> Effects:
    """Stop a session's runs, or one of them. Stopping an active run also stops all sub-agents of its session."""
    active = await tx.one(SQL.active_in_session, session=session)
    if run_id is not None and not (active and active["id"] == run_id):
        waiting = await tx.all(SQL.queued_in_session, session=session)
        chosen = [row for row in waiting if row["id"] == run_id and row["origin"] != NOTE_ORIGIN]
        return Effects([await _cancel_queued_run(tx, row, now) for row in chosen], [])
    ended: list[EndedRun] = []
    asked: list[str] = []
    sequel = NO_FOLLOW_UP
    for member in await tx.all(SQL.active_tree, session=session):
        await _stop_wakes(tx, member["id"], now)
        if member["id"] != session or run_id is None:
            # Notes are not stopped: they record what has already happened.
            waiting = await tx.all(SQL.queued_in_session, session=member["id"])
            ended += [
                await _cancel_queued_run(tx, row, now) for row in waiting if row["origin"] != NOTE_ORIGIN
            ]
        # Its sub-agents no longer wake it.
        sequel += await subagents.abandon_waiting_task(tx, member["key"], now)
        for row in await tx.all(SQL.active_in_session, session=member["id"]):
            await tx.do(SQL.request_stop, n=row["n"], now=now)
            asked.append(row["id"])
    return Effects(ended, asked, sequel)


async def _stop_wakes(tx: Tx, session: int, now: int) -> None:
    """Keep a session from being woken by its sub-agents."""
    await tx.do(TASKS_SQL.mute, requester=session)
    await completion.stop_waiting(tx, session, now)


async def _cancel_descendants(tx: Tx, session: int, now: int) -> Effects:
    """Stop all sub-agents of a session, but not the session itself."""
    await _stop_wakes(tx, session, now)
    stopped = NO_EFFECTS
    for child in await tx.all(SQL.active_children, session=session):
        stopped += await cancel_runs(tx, child["id"], None, now)
    return stopped


async def _cancel_queued_run(tx: Tx, row: Row, now: int) -> EndedRun:
    ending = RunEnding(
        state="cancelled", error_code="cancelled", error="The run was stopped before it began."
    )
    return await _end_queued_run(tx, row, ending, now)


async def has_overdue_work(tx: Tx, now: int) -> bool:
    """Whether `expire_overdue_work` has anything to do."""
    return bool(await tx.one(SQL.overdue, now=now) or await tx.one(TASKS_SQL.overdue, now=now))


async def expire_overdue_work(tx: Tx, now: int) -> Effects:
    """End queued runs, and tasks between two runs, whose deadline has passed; a bounded number per call."""
    ending = RunEnding(
        state="timeout", error_code="timeout", error="The run's time was over before it could begin."
    )
    expired, stopped = NO_EFFECTS, set[str]()
    for row in await tx.all(SQL.overdue, now=now):
        if row["id"] not in stopped:  # not yet stopped with its parent
            ended = await _end_queued_run(tx, row, ending, now)
            stopped.update(below.run_id for below in ended.after.ended)
            expired += Effects([ended], [])
    for task in await tx.all(TASKS_SQL.overdue, now=now):
        sequel = await subagents.abandon_waiting_task(
            tx, task["child_key"], now, "timeout", "The run's time was over."
        )
        expired += Effects([], [], sequel) + await cancel_runs(tx, task["child"], None, now)
    return expired


async def _end_queued_run(tx: Tx, row: Row, ending: RunEnding, now: int) -> EndedRun:
    after = await _end_run(tx, _build_step_identity(row, row["key"]), ending, None, now)
    return EndedRun(row["id"], row["session"], row["key"], "", row["origin"], ending, [], now, after)


async def list_unstopped_runs(tx: Tx, before: int) -> list[str]:
    """Return runs that should have stopped before that time, by request or deadline, and have not."""
    return [row["id"] for row in await tx.all(SQL.overdue_stops, before=before)]


async def force_end_run(tx: Tx, run_id: str, before: int, now: int) -> EndedRun | None:
    """End a run that `list_unstopped_runs` returned, if it still has not stopped."""
    row = next((row for row in await tx.all(SQL.overdue_stops, before=before) if row["id"] == run_id), None)
    if row is None:
        return None
    late = RunEnding(state="timeout", error_code="timeout", error="The run's time was over.")
    return await end_unexecuted_run(tx, row, STOPPED_ENDING if row["cancel_at"] else late, now)


async def end_abandoned_run(tx: Tx, session: int, now: int, *, shared: bool) -> Effects:
    """End the active run of a lane when no server is running; in a shared store, only after its lease expired."""
    row = await tx.one(SQL.active_with_lease, session=session)
    if row is None or (shared and row["lease_until"] > now):
        return NO_EFFECTS
    return Effects([await end_unexecuted_run(tx, row, STOPPED_ENDING, now)], [])


async def list_stop_requested_runs(tx: Tx, owner: str) -> list[str]:
    """Return the runs of this owner for which a stop was requested."""
    return [row["id"] for row in await tx.all(SQL.stop_requested, owner=owner)]


async def list_idle_lanes(tx: Tx, after: int, before: int, now: int, limit: int) -> list[int]:
    """Return lanes with work that no live process is doing."""
    rows = await tx.all(SQL.lanes_with_work, after=after, before=before, now=now, limit=limit)
    return [row["session"] for row in rows]


async def has_work(tx: Tx, lane: int, now: int) -> bool:
    """Whether a lane has work that no live process is doing."""
    return await tx.one(SQL.has_work, lane=lane, now=now) is not None


async def load_owned_runs(tx: Tx, owner: str) -> dict[str, int]:
    return {row["id"]: row["session"] for row in await tx.all(SQL.running_of_owner, owner=owner)}


async def commit_summary(
    tx: Tx, claim: Claim, entry: Message | None, summary: AssistantMessage, now: int
) -> list[Entry]:
    """Append a compaction entry, if given, and record the usage of the summary."""
    entries = await commit_messages(tx, claim, [entry] if entry else [], now)
    await _record_message_usage(tx, claim, [summary], now)
    return entries
