"""The lifecycle of a run after it was queued, as transaction scripts: claim, commit, finish.

    queued ──▶ running ──▶ ok | error | timeout | cancelled | interrupted | incomplete
       └───────────────────────▲   (a queued run can end without ever having run)

`claim_run` takes a lane by raising its epoch, and every later commit of the run names that epoch: a process that lost
the lane changes nothing (`Fenced`). The user's message enters the transcript when its run starts, so transcripts are
never interleaved. `finish_run` ends a run and claims the next one of the lane in the same commit. A note is a run that
only appends its entry to the transcript, between other runs, and causes nothing else. Stopped, overdue and abandoned
runs are ended in `endings`.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import msgspec

from antiphon.engine.runs import endings
from antiphon.engine.runs.client_history import find_unknown_messages
from antiphon.engine.runs.context import build_interrupted_result
from antiphon.engine.runs.effects import (
    DELIVERIES_DUE,
    NO_EFFECTS,
    Effects,
    EndedRun,
    RunEnding,
    RunIdentity,
)
from antiphon.engine.runs.run_queue import NOTE_ORIGIN, RunOptions, decode_options, encode_options
from antiphon.engine.sessions import session_rows, transcripts
from antiphon.engine.sessions.transcripts import Entry
from antiphon.errors import CrashSuspected, Fenced, InvalidInput, StoreError, StoreFull
from antiphon.messages import AssistantMessage, Message, decode_message, get_role
from antiphon.store import Row, Tx
from antiphon.store.queries import Queries

T = TypeVar("T")

log = logging.getLogger(__name__)

SQL = Queries("runs")
SESSIONS_SQL = Queries("sessions")

MIN_SUSPECT_INTERRUPTIONS = 3
"""After this many interruptions without progress a run is a crash suspect; leaves two attempts in quarantine."""
STORE_FULL_RETRY_SECONDS = 1.0  # on average; jitter keeps waiting runs from retrying all at once
MAX_RUNS_SKIPPED_PER_CLAIM = 1000  # runs (such as expired ones) that one claim may end without executing them


class Claim(RunIdentity, frozen=True, kw_only=True):
    """The right to execute a run: the epoch its commits must match, and its starting state."""

    root_key: str
    agent_id: str
    sandboxed: bool
    transcript: int
    epoch: int
    first_seq: int
    attempts: int
    resumed: bool
    input: str
    envelope: str | None
    instructions: str | None
    model: str | None
    thinking: str | None
    created_at: int
    deadline_at: int
    cancelled: bool
    started_at: int
    entries: list[Entry]
    options: RunOptions | None = None


class Claimant(msgspec.Struct, frozen=True):
    """The process that claims runs, the time, and the limits that apply to a claim."""

    owner: str
    now: int
    max_attempts: int
    max_run_ms: int
    """Maximum age of runs that were accepted without a deadline."""
    is_quarantined: bool = False
    """Whether the claimant may start crash suspects (`CrashQuarantine`)."""


async def claim_run(tx: Tx, session: int, claimant: Claimant) -> tuple[Claim | None, Effects]:
    """Resume the active run of a lane if its owner is gone; if no run is active, start the next one.

    Raises:
        CrashSuspected: the run must wait for its turn (`CrashQuarantine`).
    """
    row = await tx.one(SQL.active_with_lease, session=session)
    if row is None:
        return await _claim_next_run(tx, session, claimant)
    if row["owner"] != claimant.owner and row["lease_until"] > claimant.now:
        return None, NO_EFFECTS
    skip_ending = _find_skip_ending(row, claimant)
    if skip_ending is None:
        if (
            row["attempts"] >= MIN_SUSPECT_INTERRUPTIONS
            and row["owner"] != claimant.owner
            and not claimant.is_quarantined
        ):
            raise CrashSuspected(row["id"])
        return await _start_run(tx, row, claimant), NO_EFFECTS
    effects = await endings.end_run_without_worker(tx, row, skip_ending, claimant.now)
    next_claim, skipped = await _claim_next_run(tx, session, claimant)
    return next_claim, effects + skipped


async def _claim_next_run(
    tx: Tx, session: int, claimant: Claimant, head: Row | None = None
) -> tuple[Claim | None, Effects]:
    """Start the first queued run, ending those before it that must not be executed any more."""
    skipped = NO_EFFECTS
    for _ in range(MAX_RUNS_SKIPPED_PER_CLAIM):
        row = head or await tx.one(SQL.next_queued, session=session)
        if row is None:
            return None, skipped
        head = None
        if row["origin"] == NOTE_ORIGIN:
            skipped += await _append_note(tx, row, claimant.now)
            continue
        skip_ending = _find_skip_ending(row, claimant)
        if skip_ending is None:
            return await _start_run(tx, row, claimant), skipped
        if skip_ending is endings.TIMED_OUT_BEFORE_START_ENDING:
            named = await tx.one(SESSIONS_SQL.key_by_id, id=session)
            assert named is not None
            skipped += await endings.expire_queued_run(tx, row, named["key"], claimant.now)
            continue
        skipped += await endings.end_run_without_worker(tx, row, skip_ending, claimant.now)
    return None, skipped  # The sweep visits the lane again; this bounds the size of one commit.


async def _append_note(tx: Tx, row: Row, now: int) -> Effects:
    """Append a note to the transcript in its turn, after the messages that come with it."""
    try:
        role = get_role(decode_message(row["input"]))
    except InvalidInput as error:
        return await _discard_damaged_note(tx, row, str(error), now)
    options = decode_options(row["options"])
    before = options.earlier if options else []
    lane = await tx.one(SESSIONS_SQL.reserve_seq_unfenced, id=row["session"], count=len(before) + 1, now=now)
    session = await tx.one(SESSIONS_SQL.key_by_id, id=row["session"])
    assert lane is not None and session is not None
    transcript, last_seq = lane["transcript"], lane["last_seq"]
    entries = await transcripts.append(tx, transcript, last_seq - 1, row["n"], before, now)
    entries.append(transcripts.new_entry(last_seq, role, row["input"], now))
    await transcripts.append_raw(tx, transcript, row["n"], entries[-1])
    await tx.do(
        SQL.complete_note,
        n=row["n"],
        transcript=transcript,
        first_seq=entries[0].seq,
        last_seq=last_seq,
        now=now,
    )
    run = endings.identify_run(row, session["key"], session["session_id"])
    ended = EndedRun(run=run, ending=RunEnding(state="ok"), entries=entries, ended_at=now)
    return Effects((ended,)) + DELIVERIES_DUE  # deliveries that waited for this entry can be sent now


async def _discard_damaged_note(tx: Tx, row: Row, reason: str, now: int) -> Effects:
    """End a note that cannot be decoded, so that it does not block its lane."""
    session = await tx.one(SESSIONS_SQL.key_by_id, id=row["session"])
    assert session is not None
    run = endings.identify_run(row, session["key"], session["session_id"])
    # It triggers nothing.
    run = msgspec.structs.replace(run, reply_target_json=None, exchange=None, task=None)
    ending = RunEnding(state="error", error_code=InvalidInput.code, error=reason)
    await endings.end_run(tx, run, ending, None, now)
    return Effects((EndedRun(run=run, ending=ending, ended_at=now),))


def _compute_deadline(row: Row, claimant: Claimant) -> int:
    return row["deadline_at"] if row["deadline_at"] is not None else row["created_at"] + claimant.max_run_ms


def _find_skip_ending(row: Row, claimant: Claimant) -> RunEnding | None:
    """Return the ending of a run that must not be executed (again), or None."""
    if _compute_deadline(row, claimant) <= claimant.now:
        if row["first_seq"] is None:
            return endings.TIMED_OUT_BEFORE_START_ENDING
        return RunEnding(
            state="timeout", error_code="timeout", error="The run timed out before it could be resumed."
        )
    if row["attempts"] >= claimant.max_attempts:
        return RunEnding(
            state="interrupted",
            error_code="quarantined",
            error=f"The run was interrupted {row['attempts']} times without progress and is not retried. "
            "Send the message again to retry it.",
        )
    return None


async def _start_run(tx: Tx, row: Row, claimant: Claimant, lane: Row | None = None) -> Claim:
    """Start or resume a run, taking its lane unless `lane` is given."""
    is_first_start = row["first_seq"] is None
    lane = lane or await tx.one(
        SESSIONS_SQL.claim_lane, id=row["session"], count=int(is_first_start), now=claimant.now
    )
    if lane is None:
        raise StoreError(f"Run {row['id']!r} has no session.", "Run `antiphon doctor`.")
    entries: list[Entry] = []
    options = decode_options(row["options"])
    if is_first_start and options is not None and options.earlier:
        entries = await _append_earlier_messages(tx, row, lane, options, claimant.now)
    first_seq = lane["last_seq"] + len(entries) if is_first_start else row["first_seq"]
    started = await tx.do(
        SQL.start,
        n=row["n"],
        expected_epoch=row["epoch"],
        owner=claimant.owner,
        epoch=lane["lane_epoch"],
        transcript=lane["transcript"],
        first_seq=first_seq,
        now=claimant.now,
    )
    if not started:
        # Another process claimed it since it was read; possible in a store that locks rows.
        raise Fenced(row["id"])
    if is_first_start and options is not None and options.earlier:
        options = msgspec.structs.replace(options, earlier=[])  # they are in the transcript now
        await tx.do(SQL.set_options, n=row["n"], options=encode_options(options))
    if is_first_start:
        role = "user" if row["options"] is None else get_role(decode_message(row["input"]))
        entries.append(transcripts.new_entry(first_seq, role, row["input"], claimant.now))
        await transcripts.append_raw(tx, lane["transcript"], row["n"], entries[-1])
    return _build_claim(row, lane, claimant, first_seq, entries, options)


async def _append_earlier_messages(tx: Tx, row: Row, lane: Row, options: RunOptions, now: int) -> list[Entry]:
    """Append the request's earlier messages that are not in the transcript yet; its new message is appended next."""
    unknown = [
        msgspec.structs.replace(message, timestamp=now)
        for message in await find_unknown_messages(tx, lane["transcript"], options)
    ]
    if not unknown:
        return []
    reserved = await tx.one(
        SESSIONS_SQL.reserve_seq, id=row["session"], epoch=lane["lane_epoch"], count=len(unknown), now=now
    )
    if reserved is None:
        raise Fenced(row["id"])
    return await transcripts.append(tx, lane["transcript"], reserved["last_seq"] - 1, None, unknown, now)


def _build_claim(
    row: Row, lane: Row, claimant: Claimant, first_seq: int, entries: list[Entry], options: RunOptions | None
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
        reply_target_json=row["target"],
        exchange=row["exchange"],
        task=row["task"],
        envelope=lane["envelope"],
        instructions=row["instructions"],
        model=row["model"] or lane["model"],
        thinking=row["thinking"] or lane["thinking"],
        created_at=row["created_at"],
        deadline_at=_compute_deadline(row, claimant),
        cancelled=row["cancel_at"] is not None,
        started_at=row["started_at"] or claimant.now,
        entries=entries,
        options=options,
    )


async def commit_messages(tx: Tx, claim: Claim, messages: Sequence[Message], now: int) -> list[Entry]:
    """Append entries of a run that has not ended."""
    row = await tx.one(
        SESSIONS_SQL.reserve_seq, id=claim.session, epoch=claim.epoch, count=len(messages), now=now
    )
    if row is None:
        raise Fenced(claim.run_id)
    entries = await transcripts.append(tx, claim.transcript, row["last_seq"], claim.n, messages, now)
    await _record_usage(tx, claim, messages, now)
    if claim.attempts > 1:
        await tx.do(SQL.reset_attempts, n=claim.n)
    return entries


async def finish_run(
    tx: Tx, claim: Claim, ending: RunEnding, claimant: Claimant, *, claim_next: bool = True
) -> tuple[Effects, Claim | None]:
    """End a run and, if `claim_next`, claim the next one of its lane in the same commit."""
    now = claimant.now
    messages = list(ending.messages) or endings.build_closing_entries(ending, now)
    if ending.state in {"cancelled", "timeout", "error"}:
        calls = await transcripts.load_open_calls(tx, claim.transcript, claim.first_seq)
        messages = [*(build_interrupted_result(call, now) for call in calls), *messages]
    head = await tx.one(SQL.next_queued, session=claim.session) if claim_next else None
    can_start_head = (
        head is not None and head["origin"] != NOTE_ORIGIN and _find_skip_ending(head, claimant) is None
    )
    lane = await tx.one(  # this reserves the last entry numbers of the run, and the first one of the next run
        SESSIONS_SQL.release_and_claim_lane if can_start_head else SESSIONS_SQL.release_lane,
        id=claim.session,
        epoch=claim.epoch,
        count=len(messages),
        aborted=int(ending.state in {"cancelled", "timeout"}),
        now=now,
    )
    if lane is None:
        raise Fenced(claim.run_id)
    last_seq = lane["last_seq"] - int(can_start_head)
    entries = await transcripts.append(tx, claim.transcript, last_seq, claim.n, messages, now)
    await _record_usage(tx, claim, messages, now)
    effects = await endings.end_run(tx, claim, ending, last_seq, now)
    next_claim: Claim | None = None
    if head and can_start_head:
        next_claim = await _start_run(tx, head, claimant, lane)
    elif head:
        next_claim, skipped = await _claim_next_run(tx, claim.session, claimant, head)
        effects += skipped
    usage = await tx.one(SQL.sum_usage, id=claim.run_id) if ending.has_usage else None
    ended = EndedRun(
        run=claim, ending=ending, entries=entries, ended_at=now, started_at=claim.started_at, usage=usage
    )
    return Effects((ended, *effects.items), effects.has_deliveries), next_claim


async def _record_usage(tx: Tx, claim: Claim, messages: Sequence[Message], now: int) -> None:
    """Record one row per model call, and update the session's totals."""
    for message in messages:
        if not isinstance(message, AssistantMessage) or not message.usage:
            continue
        usage = message.usage
        await tx.do(
            SQL.record_usage,
            now=now,
            run_id=claim.run_id,
            session_key=claim.session_key,
            session_id=claim.session_id,
            root_key=claim.root_key,
            agent_id=claim.agent_id,
            provider=message.provider,
            model=message.model,
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
            model=message.model,
        )


async def record_tool_usage(
    tx: Tx, run_id: str, session_key: str, answer: AssistantMessage, now: int
) -> None:
    """Record a model call that a tool made in a run. A session that was deleted meanwhile keeps no record of it."""
    session = await session_rows.find_by_key(tx, session_key)
    usage = answer.usage
    if session is None or usage is None:
        return
    await tx.do(
        SQL.record_usage,
        now=now,
        run_id=run_id,
        session_key=session_key,
        session_id=session["session_id"],
        root_key=session["root_key"] or session_key,
        agent_id=session["agent_id"],
        provider=answer.provider,
        model=answer.model,
        input=usage.input,
        output=usage.output,
        cache_read=usage.cache_read,
        cache_write=usage.cache_write,
        cost=usage.cost.total if usage.cost else None,
    )
    await tx.do(
        SESSIONS_SQL.add_tool_usage,
        id=session["id"],
        input=usage.input,
        output=usage.output,
        total=usage.total_tokens,
    )


async def list_idle_lanes(tx: Tx, after: int, before: int, now: int, limit: int) -> list[int]:
    """Return lanes with runs that no live process owns."""
    rows = await tx.all(SQL.lanes_with_work, after=after, before=before, now=now, limit=limit)
    return [row["session"] for row in rows]


async def has_work(tx: Tx, lane: int, now: int) -> bool:
    """Whether a lane has runs that no live process owns."""
    return await tx.one(SQL.has_work, lane=lane, now=now) is not None


async def load_owned_runs(tx: Tx, owner: str) -> dict[str, int]:
    return {row["id"]: row["session"] for row in await tx.all(SQL.running_of_owner, owner=owner)}


async def commit_summary(
    tx: Tx, claim: Claim, entry: Message | None, summary: AssistantMessage, now: int
) -> list[Entry]:
    """Append a compaction entry, if given, and record the usage of the summary."""
    entries = await commit_messages(tx, claim, [entry] if entry else [], now)
    await _record_usage(tx, claim, [summary], now)
    return entries


async def was_accepted(tx: Tx, run_id: str) -> bool:
    """Whether a run or a command with this id was accepted before."""
    return await tx.one(SQL.find_accepted, id=run_id) is not None


async def load_run(tx: Tx, run_id: str, viewer: str | None) -> Row | None:
    """Return a run with its session. `descendant` in the row says whether `viewer` is an ancestor of the session."""
    return await tx.one(SQL.by_id, id=run_id, viewer=viewer)


async def find_active_run(tx: Tx, session: int) -> Row | None:
    """Return the run that is executed in a session, if there is one."""
    return await tx.one(SQL.active_in_session, session=session)


async def list_unfinished_run_ids(tx: Tx, session: int) -> list[str]:
    """Return the running and queued runs of a session, in their order."""
    active = await tx.all(SQL.active_in_session, session=session)
    queued = await tx.all(SQL.queued_in_session, session=session)
    return [run["id"] for run in [*active, *queued]]


async def load_run_usage(tx: Tx, run_id: str) -> Row | None:
    """Return the tokens and the cost of a run."""
    return await tx.one(SQL.sum_usage, id=run_id)


async def load_usage_by_model(tx: Tx, session_key: str, *, tree: bool) -> list[Row]:
    """Return the usage of a session, or of everything below its root, by model."""
    return await tx.all(SQL.usage_by_tree if tree else SQL.usage_by_model, key=session_key)


async def is_ended_or_stopping(tx: Tx, run_id: str | None) -> bool:
    return await tx.one(SQL.ended_or_stopping, id=run_id) is not None


async def reset_attempts(tx: Tx, n: int) -> None:
    """Reset the crash count of a run that made progress."""
    await tx.do(SQL.reset_attempts, n=n)


async def retry_while_store_full(commit: Callable[[], Awaitable[T]]) -> T:
    """Repeat a commit until the store has room for it. Cancel the task to give up.

    The results of a run were paid for, and its tool calls may have had effects, so they must not be lost. A full disk
    leaves nothing of a commit behind, so the same commit can be repeated. After any other failure the outcome of the
    commit is unknown, and the run is resumed from its transcript.
    """
    is_logged = False
    while True:
        try:
            return await commit()
        except StoreFull as error:
            if not is_logged:
                log.warning("Commit failed, disk full; retrying: %s", error)
            is_logged = True
            await asyncio.sleep(STORE_FULL_RETRY_SECONDS * random.uniform(0.5, 1.5))  # noqa: S311 - no secret
