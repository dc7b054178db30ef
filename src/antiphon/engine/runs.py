"""Runs: the life of one accepted message after it was queued, as transaction scripts.

    queued ──▶ running ──▶ ok | error | timeout | cancelled | interrupted | incomplete
       └───────────────────────▲   (a queued run can end without ever having run)

`claim` takes a lane by raising its epoch, and every later
commit of the run names that epoch: a process that lost the lane changes nothing (`Fenced`). The user's message
enters the transcript when its run starts, so a transcript is never interleaved. `finish` ends a run and claims
the next one of the lane in the same commit. However a run ends, it passes `_end`, and what others go on to from there
(`engine.sequels`) is in that commit, too. A note is a run that only puts its entry into the transcript, between others,
and leads to nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import msgspec

from antiphon.engine import sequels, tasks, transcripts
from antiphon.engine.admissions import NOTE
from antiphon.engine.context import interrupted
from antiphon.engine.run_options import RunOptions, decode_options, encode_options, unknown_messages
from antiphon.engine.steps import ANNOUNCE, NOTHING, WAKE, Outcome, Sequel, Step
from antiphon.engine.transcripts import Entry
from antiphon.engine.trial import SUSPECTED
from antiphon.errors import Fenced, InvalidInput, StoreError, Suspected
from antiphon.messages import Assistant, Message, StopReason, ToolCall, Usage, decode
from antiphon.store import Row, Tx
from antiphon.store.queries import Queries

SQL = Queries("runs")
SESSIONS = Queries("sessions")
TASKS = Queries("tasks")

SKIPS = 1000  # runs that one claim may end unplayed (expired ones) before it lets others commit

Part: TypeAlias = tuple[int, str, int, str, str, str | None, int | None, int | None]
"""A run's part in something larger: a `Step` up to what the run came to."""


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """The right to play a run: everything its commits must name, and what it starts from."""

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
    def part(self) -> Part:
        larger = self.target, self.exchange, self.task
        return self.n, self.run_id, self.session, self.session_key, self.origin, *larger


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """How a run ended, from runtime facts only."""

    state: Outcome
    reply: str | None = None
    error_code: str | None = None
    error: str | None = None
    model_answered: str | None = None
    messages: Sequence[Message] = ()
    yielded: bool = False
    """A tool ended the turn: the answer comes when the session is woken."""
    used: bool = True
    """False when it is known that no step of the run reported usage."""


STOPPED = Ending(state="cancelled", error_code="cancelled", error="The run was stopped.")


class Stopped(msgspec.Struct, frozen=True):
    """What a stop did: runs that ended at once, runs whose owner has been asked, and what follows."""

    ended: list[Ended]
    asked: list[str]
    sequel: Sequel = NOTHING

    def __add__(self, other: Stopped) -> Stopped:
        return Stopped(self.ended + other.ended, self.asked + other.asked, self.sequel + other.sequel)


UNTOUCHED = Stopped([], [])


class Ended(msgspec.Struct, frozen=True):
    """A run that reached its end in this commit, and the entries that came with it."""

    run_id: str
    session: int
    session_key: str
    session_id: str
    origin: str
    ending: Ending
    entries: list[Entry]
    at: int
    after: Stopped = UNTOUCHED
    """What its end led to, and what had to stop with it."""
    spent: Row | None = None


class Worker(msgspec.Struct, frozen=True):
    """Who is claiming, when, and how patient it is with runs that kill their process."""

    owner: str
    now: int
    max_attempts: int
    longest_ms: int
    """The deadline of runs that were accepted without one of their own."""
    trying: bool = False
    """Whether it is the turn of a run that its process may have died of."""


async def claim(tx: Tx, session: int, worker: Worker) -> tuple[Claim | None, list[Ended]]:
    """Take up the active run of a lane if its owner is gone, else begin the next one.

    Raises:
        Suspected: it is one that must wait for its turn (`engine.trial`).
    """
    row = await tx.one(SQL.active, session=session)
    if row is None:
        return await _claim_next(tx, session, worker)
    if row["owner"] != worker.owner and row["lease_until"] > worker.now:
        return None, []
    verdict = _verdict(row, worker)
    if verdict is None:
        if row["attempts"] >= SUSPECTED and row["owner"] != worker.owner and not worker.trying:
            raise Suspected(row["id"])
        return await _start(tx, row, worker), []
    ended = await end_unplayed(tx, row, verdict, worker.now)
    following, skipped = await _claim_next(tx, session, worker)
    return following, [ended, *skipped]


async def _claim_next(
    tx: Tx, session: int, worker: Worker, head: Row | None = None
) -> tuple[Claim | None, list[Ended]]:
    """Begin the head of the queue, ending on the way those that must not be played any more."""
    ended: list[Ended] = []
    for _ in range(SKIPS):
        row = head or await tx.one(SQL.head, session=session)
        if row is None:
            return None, ended
        head = None
        if row["origin"] == NOTE:
            ended.append(await _put(tx, row, worker.now))
            continue
        verdict = _verdict(row, worker)
        if verdict is None:
            return await _start(tx, row, worker), ended
        ended.append(await end_unplayed(tx, row, verdict, worker.now))
    return None, ended  # The sweeper looks at the lane again: one commit must not grow without end.


async def _put(tx: Tx, row: Row, now: int) -> Ended:
    """A note's turn has come."""
    try:
        role = str(decode(row["input"]).__struct_config__.tag)
    except InvalidInput as error:
        return await _leave_out(tx, row, str(error), now)
    place = await tx.one(SESSIONS.advance_unfenced, id=row["session"], count=1, now=now)
    session = await tx.one(SESSIONS.key_of, id=row["session"])
    assert place is not None and session is not None
    entry = transcripts.new_entry(place["last_seq"], role, row["input"], now)
    await transcripts.append_raw(tx, place["transcript"], row["n"], entry)
    await tx.do(SQL.put_note, n=row["n"], transcript=place["transcript"], seq=entry.seq, now=now)
    return Ended(
        row["id"],
        row["session"],
        session["key"],
        session["session_id"],
        NOTE,
        Ending(state="ok"),
        [entry],
        now,
        Stopped(
            [], [], Sequel(posted=True)
        ),  # words that were waiting to stand in the transcript can go out now
    )


async def _leave_out(tx: Tx, row: Row, reason: str, now: int) -> Ended:
    """A damaged note holds up nobody."""
    session = await tx.one(SESSIONS.key_of, id=row["session"])
    assert session is not None
    ending = Ending(state="error", error_code=InvalidInput.code, error=reason)
    leads_to_nothing = None, None, None
    part = row["n"], row["id"], row["session"], session["key"], NOTE, *leads_to_nothing
    await _end(tx, part, ending, None, now)
    return Ended(row["id"], row["session"], session["key"], session["session_id"], NOTE, ending, [], now)


def _deadline(row: Row, worker: Worker) -> int:
    return row["deadline_at"] if row["deadline_at"] is not None else row["created_at"] + worker.longest_ms


def _verdict(row: Row, worker: Worker) -> Ending | None:
    """Why a run may not be played (again), if so."""
    if _deadline(row, worker) <= worker.now:
        return Ending(
            state="timeout", error_code="timeout", error="The run's time was over before it could go on."
        )
    if row["attempts"] >= worker.max_attempts:
        return Ending(
            state="interrupted",
            error_code="quarantined",
            error=f"The run was interrupted {row['attempts']} times without getting on, and is not tried again. "
            "Send the message once more to retry it.",
        )
    return None


async def _start(tx: Tx, row: Row, worker: Worker, lane: Row | None = None) -> Claim:
    """Begin a run, or take it up again, in a lane that was taken for it."""
    fresh = row["first_seq"] is None
    lane = lane or await tx.one(SESSIONS.take_lane, id=row["session"], count=int(fresh), now=worker.now)
    if lane is None:
        raise StoreError(f"Run {row['id']!r} has no session.", "Run `antiphon doctor`.")
    entries: list[Entry] = []
    options = decode_options(row["options"])
    if fresh and options is not None and options.earlier:
        entries = await _put_earlier(tx, row, lane, options, worker.now)
        options = msgspec.structs.replace(options, earlier=[])  # what is in the transcript is not kept twice
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
        # Somebody else claimed it since it was read; a store that locks rows can let them.
        raise Fenced(row["id"])
    if fresh:
        role = "user" if row["options"] is None else str(decode(row["input"]).__struct_config__.tag)
        entries.append(transcripts.new_entry(first_seq, role, row["input"], worker.now))
        await transcripts.append_raw(tx, lane["transcript"], row["n"], entries[-1])
    return _claim_of(row, lane, worker, first_seq, entries, options)


async def _put_earlier(tx: Tx, row: Row, lane: Row, options: RunOptions, now: int) -> list[Entry]:
    """Append the request's earlier messages that the session lacks; its new message is appended next."""
    unknown = [
        msgspec.structs.replace(message, timestamp=now)
        for message in await unknown_messages(tx, lane["transcript"], options)
    ]
    if not unknown:
        return []
    moved = await tx.one(
        SESSIONS.advance, id=row["session"], epoch=lane["lane_epoch"], count=len(unknown), now=now
    )
    if moved is None:
        raise Fenced(row["id"])
    return await transcripts.append(tx, lane["transcript"], moved["last_seq"] - 1, None, unknown, now)


async def client_calls(tx: Tx, run_id: str) -> list[ToolCall]:
    """The calls of client-side tools that a run ended with."""
    row = await tx.one(SQL.last_answer, id=run_id)
    options = decode_options(row["options"]) if row else None
    answer = transcripts.readable(row) if row else None
    if options is None or not isinstance(answer, Assistant):
        return []
    return [call for call in answer.tool_calls if call.name in options.tool_names]


def _claim_of(
    row: Row, lane: Row, worker: Worker, first_seq: int, entries: list[Entry], options: RunOptions | None
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
        deadline_at=_deadline(row, worker),
        cancelled=row["cancel_at"] is not None,
        started_at=row["started_at"] or worker.now,
        entries=entries,
        options=options,
    )


async def commit(tx: Tx, claim: Claim, messages: Sequence[Message], now: int) -> list[Entry]:
    """Append entries of a run that goes on."""
    row = await tx.one(SESSIONS.advance, id=claim.session, epoch=claim.epoch, count=len(messages), now=now)
    if row is None:
        raise Fenced(claim.run_id)
    entries = await transcripts.append(tx, claim.transcript, row["last_seq"], claim.n, messages, now)
    await _ledger(tx, claim, messages, now)
    if claim.attempts > 1:
        await tx.do(SQL.progressed, n=claim.n)
    return entries


async def finish(
    tx: Tx, claim: Claim, ending: Ending, worker: Worker, *, going_on: bool = True
) -> tuple[Ended, Claim | None, list[Ended]]:
    """End a run and, going on, claim the next of its lane in the same commit."""
    messages = list(ending.messages) or _notice(ending, worker.now)
    if ending.state in {"cancelled", "timeout", "error"}:
        calls = await transcripts.open_calls(tx, claim.transcript, claim.first_seq)
        messages = [*(interrupted(call, worker.now) for call in calls), *messages]
    head = await tx.one(SQL.head, session=claim.session) if going_on else None
    plain = head is not None and head["origin"] != NOTE and _verdict(head, worker) is None
    lane = await _leave(tx, claim, ending, len(messages), worker.now, passing=plain)
    last_seq = lane["last_seq"] - int(plain)
    entries = await transcripts.append(tx, claim.transcript, last_seq, claim.n, messages, worker.now)
    await _ledger(tx, claim, messages, worker.now)
    after = await _end(tx, claim.part, ending, last_seq, worker.now)
    following: Claim | None = None
    skipped: list[Ended] = []
    if head and plain:
        following = await _start(tx, head, worker, lane)
    elif head:
        following, skipped = await _claim_next(tx, claim.session, worker, head)
    spent = await tx.one(SQL.spent, id=claim.run_id) if ending.used else None
    ended = Ended(
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


def _notice(ending: Ending, now: int) -> list[Message]:
    """The entry that closes a turn without an answer, so that the next question stays separate."""
    if ending.state == "ok":
        return []
    reason: StopReason = "error" if ending.state in {"error", "incomplete"} else "aborted"
    return [Assistant(content=[], timestamp=now, stop_reason=reason, error_message=ending.error)]


async def _leave(tx: Tx, claim: Claim, ending: Ending, count: int, now: int, *, passing: bool) -> Row:
    """Reserve the last numbers of a run that ends; passing the lane on, also the first of the run that follows."""
    leave = SESSIONS.pass_lane if passing else SESSIONS.leave_lane
    aborted = int(ending.state in {"cancelled", "timeout"})
    row = await tx.one(leave, id=claim.session, epoch=claim.epoch, count=count, aborted=aborted, now=now)
    if row is None:
        raise Fenced(claim.run_id)
    return row


def _part_of(row: Row, key: str) -> Part:
    larger = row["target"], row["exchange"], row["task"]
    return row["n"], row["id"], row["session"], key, row["origin"], *larger


async def _end(tx: Tx, part: Part, ending: Ending, last_seq: int | None, now: int) -> Stopped:
    """The one way out of `queued` and `running`."""
    came_to = ending.state, ending.reply, ending.error, ending.model_answered, ending.yielded
    step = Step(*part, *came_to)
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
    if step.exchange is None and step.task is None and step.target is None and step.origin != WAKE:
        return UNTOUCHED
    after = Stopped([], [], await sequels.after(tx, step, now))
    if ending.state == "timeout" and step.task is not None and step.origin != ANNOUNCE:
        # Its time was for all of it: what it has spawned has none left, either. Saying how it went spawns nothing.
        after += await _cancel_below(tx, step.session, now)
    return after


async def end_unplayed(tx: Tx, row: Row, ending: Ending, now: int) -> Ended:
    """End a run that nobody plays: one that never started, or one taken from whoever had it."""
    session = await tx.one(SESSIONS.key_of, id=row["session"])
    key, session_id = (session["key"], session["session_id"]) if session else ("", "")
    last_seq: int | None = None
    entries: list[Entry] = []
    if row["first_seq"] is not None:
        calls = await transcripts.open_calls(tx, row["transcript"], row["first_seq"])
        messages = [*(interrupted(call, now) for call in calls), *_notice(ending, now)]
        seized = await tx.one(SESSIONS.seize_lane, id=row["session"], count=len(messages), aborted=1, now=now)
        at = seized["last_seq"] if seized else 0
        last_seq = at
        entries = await transcripts.append(tx, row["transcript"], at, row["n"], messages, now)
    after = await _end(tx, _part_of(row, key), ending, last_seq, now)
    return Ended(row["id"], row["session"], key, session_id, row["origin"], ending, entries, now, after)


async def _ledger(tx: Tx, claim: Claim, messages: Sequence[Message], now: int) -> None:
    for message in messages:
        if isinstance(message, Assistant) and message.usage:
            await record_usage(tx, claim, message.provider, message.model, message.usage, now)


async def record_usage(
    tx: Tx, claim: Claim, provider: str | None, model: str | None, usage: Usage, now: int
) -> None:
    """One row per model call, and the session's running totals."""
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
        SESSIONS.count_usage,
        id=claim.session,
        input=usage.input,
        output=usage.output,
        total=usage.total_tokens,
        context=usage.input + usage.cache_read + usage.cache_write + usage.output,
        model=model,
    )


async def cancel(tx: Tx, session: int, run_id: str | None, now: int) -> Stopped:
    """Stop a session's runs, or one of them. What is stopped in the middle stops everything below it, too."""
    active = await tx.one(SQL.active_in, session=session)
    if run_id is not None and not (active and active["id"] == run_id):
        waiting = await tx.all(SQL.queued_in, session=session)
        chosen = [row for row in waiting if row["id"] == run_id and row["origin"] != NOTE]
        return Stopped([await _drop(tx, row, now) for row in chosen], [])
    ended: list[Ended] = []
    asked: list[str] = []
    sequel = NOTHING
    for member in await tx.all(SQL.family, session=session):
        await _hush(tx, member["id"], now)
        if member["id"] != session or run_id is None:
            # A note is no work that could be stopped: it says what has already happened.
            waiting = await tx.all(SQL.queued_in, session=member["id"])
            ended += [await _drop(tx, row, now) for row in waiting if row["origin"] != NOTE]
        # Its sub-agents no longer wake it.
        sequel += await tasks.abandon(tx, member["key"], now)
        for row in await tx.all(SQL.active_in, session=member["id"]):
            await tx.do(SQL.ask_to_stop, n=row["n"], now=now)
            asked.append(row["id"])
    return Stopped(ended, asked, sequel)


async def _hush(tx: Tx, session: int, now: int) -> None:
    """Nothing that a session has spawned wakes it any more."""
    await tx.do(TASKS.hush, requester=session)
    await sequels.stop_waiting(tx, session, now)


async def _cancel_below(tx: Tx, session: int, now: int) -> Stopped:
    """Stop everything that a session has spawned, and not the session."""
    await _hush(tx, session, now)
    stopped = UNTOUCHED
    for child in await tx.all(SQL.children, session=session):
        stopped += await cancel(tx, child["id"], None, now)
    return stopped


async def _drop(tx: Tx, row: Row, now: int) -> Ended:
    ending = Ending(state="cancelled", error_code="cancelled", error="The run was stopped before it began.")
    return await _end_queued(tx, row, ending, now)


async def overdue(tx: Tx, now: int) -> bool:
    """Whether `expire` has anything to do."""
    return bool(await tx.one(SQL.overdue, now=now) or await tx.one(TASKS.overdue, now=now))


async def expire(tx: Tx, now: int) -> Stopped:
    """End queued runs, and tasks between two of their runs, whose time is over; a bounded number a call."""
    ending = Ending(
        state="timeout", error_code="timeout", error="The run's time was over before it could begin."
    )
    expired, stopped = UNTOUCHED, set[str]()
    for row in await tx.all(SQL.overdue, now=now):
        if row["id"] not in stopped:  # by the end of what had spawned it
            ended = await _end_queued(tx, row, ending, now)
            stopped.update(below.run_id for below in ended.after.ended)
            expired += Stopped([ended], [])
    for task in await tx.all(TASKS.overdue, now=now):
        sequel = await tasks.abandon(tx, task["child_key"], now, "timeout", "The run's time was over.")
        expired += Stopped([], [], sequel) + await cancel(tx, task["child"], None, now)
    return expired


async def _end_queued(tx: Tx, row: Row, ending: Ending, now: int) -> Ended:
    after = await _end(tx, _part_of(row, row["key"]), ending, None, now)
    return Ended(row["id"], row["session"], row["key"], "", row["origin"], ending, [], now, after)


async def not_stopping(tx: Tx, before: int) -> list[str]:
    """Runs that were to stop before that time, asked to or by their deadline, and have not done so."""
    return [row["id"] for row in await tx.all(SQL.not_stopping, before=before)]


async def force(tx: Tx, run_id: str, before: int, now: int) -> Ended | None:
    """End one of them, if it still is one."""
    row = next((row for row in await tx.all(SQL.not_stopping, before=before) if row["id"] == run_id), None)
    if row is None:
        return None
    late = Ending(state="timeout", error_code="timeout", error="The run's time was over.")
    return await end_unplayed(tx, row, STOPPED if row["cancel_at"] else late, now)


async def end_abandoned(tx: Tx, session: int, now: int, *, shared: bool) -> Stopped:
    """Where nobody hosts: stop what somebody was in the middle of; in a shared store, once the lease is over."""
    row = await tx.one(SQL.active, session=session)
    if row is None or (shared and row["lease_until"] > now):
        return UNTOUCHED
    return Stopped([await end_unplayed(tx, row, STOPPED, now)], [])


async def asked_to_stop(tx: Tx, owner: str) -> list[str]:
    """Runs in this owner's hands that somebody asked to stop."""
    return [row["id"] for row in await tx.all(SQL.asked_to_stop, owner=owner)]


async def idle_lanes(tx: Tx, after: int, before: int, now: int, limit: int) -> list[int]:
    """Lanes that have work nobody alive is doing."""
    rows = await tx.all(SQL.lanes_with_work, after=after, before=before, now=now, limit=limit)
    return [row["session"] for row in rows]


async def has_work(tx: Tx, lane: int, now: int) -> bool:
    """Whether there is something in a lane that nobody alive is doing."""
    return await tx.one(SQL.has_work, lane=lane, now=now) is not None


async def held_by(tx: Tx, owner: str) -> dict[str, int]:
    return {row["id"]: row["session"] for row in await tx.all(SQL.held_by, owner=owner)}


async def commit_summary(
    tx: Tx, claim: Claim, entry: Message | None, summary: Assistant, now: int
) -> list[Entry]:
    """Append a compaction entry, if there is one, and charge for the call that wrote it."""
    entries = await commit(tx, claim, [entry] if entry else [], now)
    await _ledger(tx, claim, [summary], now)
    return entries
