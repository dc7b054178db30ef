"""Ends runs, as transaction scripts: the common end of every run, and runs that are stopped, overdue or abandoned.

Every run ends through `end_run`, and the work that follows from it (`completion`) is in that commit, too. A run that is
being executed is not ended here but asked to stop: its worker ends it with `lifecycle.finish_run`. Only if it does not
stop in time, or if its process is gone, is it ended without its worker.
"""

from __future__ import annotations

import msgspec

from antiphon.bus import StopRequested
from antiphon.engine.collaboration import subagents
from antiphon.engine.runs import approval_rows, command_rows, completion
from antiphon.engine.runs.context import build_interrupted_result
from antiphon.engine.runs.effects import (
    NO_EFFECTS,
    CompletedStep,
    Effects,
    EndedRun,
    ExpiredApproval,
    RunEnding,
    RunIdentity,
)
from antiphon.engine.runs.run_queue import (
    ANNOUNCE_ORIGIN,
    NOTE_ORIGIN,
    QUIET_ORIGINS,
    WAKE_ORIGIN,
    AcceptedRun,
    RunOptions,
    encode_options,
)
from antiphon.engine.sessions import transcripts
from antiphon.engine.sessions.transcripts import Entry
from antiphon.errors import InvalidInput
from antiphon.messages import (
    AssistantMessage,
    Message,
    StopReason,
    UserMessage,
    decode_message,
    encode_message,
)
from antiphon.store import Row, Tx
from antiphon.store.queries import Queries

SQL = Queries("runs")
SESSIONS_SQL = Queries("sessions")
TASKS_SQL = Queries("tasks")

STOPPED_ENDING = RunEnding(state="cancelled", error_code="cancelled", error="The run was stopped.")
STOPPED_BEFORE_START_ENDING = RunEnding(
    state="cancelled", error_code="cancelled", error="The run was stopped before it started."
)
TIMED_OUT_BEFORE_START_ENDING = RunEnding(
    state="timeout", error_code="timeout", error="The run timed out before it started."
)
FORCED_TIMEOUT_ENDING = RunEnding(
    state="timeout", error_code="timeout", error="The run timed out, did not stop, and was ended."
)


async def end_run(tx: Tx, run: RunIdentity, ending: RunEnding, last_seq: int | None, now: int) -> Effects:
    """End a run. The only function that does; returns what the end leads to."""
    await tx.do(
        SQL.end,
        n=run.n,
        state=ending.state,
        reply=ending.reply,
        error_code=ending.error_code,
        error=ending.error,
        model_answered=ending.model_answered,
        last_seq=last_seq,
        yielded=int(ending.yielded),
        now=now,
    )
    expired = NO_EFFECTS
    if last_seq is not None and ending.state not in {
        "ok",
        "incomplete",
    }:  # for these states, all calls have returned
        events = await approval_rows.expire_approvals_of_run(tx, run.run_id, now)
        expired = Effects(tuple(ExpiredApproval(run.session, event) for event in events))
        was_stopped = ending.state in {"cancelled", "timeout"}
        expired += await command_rows.stop_commands_of_run(
            tx, run.run_id, ending.state, background=was_stopped
        )
    if (
        run.exchange is None
        and run.task is None
        and run.reply_target_json is None
        and run.origin != WAKE_ORIGIN
    ):
        return expired
    step = CompletedStep(
        run_id=run.run_id,
        session=run.session,
        session_key=run.session_key,
        origin=run.origin,
        reply_target_json=run.reply_target_json,
        exchange=run.exchange,
        task=run.task,
        state=ending.state,
        reply=ending.reply,
        error=ending.error,
        model=ending.model_answered,
        yielded=ending.yielded,
    )
    effects = expired + await completion.complete_step(tx, step, now)
    if ending.state == "timeout" and run.task is not None and run.origin != ANNOUNCE_ORIGIN:
        # The deadline covers the sub-agents of the run as well. An announce run spawns none.
        effects = await _cancel_descendants(tx, run.session, now) + effects
    return effects


def build_closing_entries(ending: RunEnding, now: int) -> list[Message]:
    """Return the entry that closes a turn without an answer, so that the next user message starts a new turn."""
    if ending.state == "ok":
        return []
    reason: StopReason = "error" if ending.state in {"error", "incomplete"} else "aborted"
    return [AssistantMessage(content=[], timestamp=now, stop_reason=reason, error_message=ending.error)]


async def end_run_without_worker(tx: Tx, row: Row, ending: RunEnding, now: int) -> Effects:
    """End a run that no process executes: one that never started, or one taken from its owner."""
    session = await tx.one(SESSIONS_SQL.key_by_id, id=row["session"])
    key, session_id = (session["key"], session["session_id"]) if session else ("", "")
    last_seq: int | None = None
    entries: list[Entry] = []
    if row["first_seq"] is not None:
        calls = await transcripts.load_open_calls(tx, row["transcript"], row["first_seq"])
        messages = [
            *(build_interrupted_result(call, now) for call in calls),
            *build_closing_entries(ending, now),
        ]
        lane = await tx.one(
            SESSIONS_SQL.revoke_lane, id=row["session"], count=len(messages), aborted=1, now=now
        )
        last_seq = seq = lane["last_seq"] if lane else 0
        entries = await transcripts.append(tx, row["transcript"], seq, row["n"], messages, now)
    run = identify_run(row, key, session_id)
    effects = await end_run(tx, run, ending, last_seq, now)
    return Effects((EndedRun(run=run, ending=ending, entries=entries, ended_at=now),)) + effects


async def _end_queued_run(tx: Tx, run: RunIdentity, ending: RunEnding, now: int) -> Effects:
    effects = await end_run(tx, run, ending, None, now)
    return Effects((EndedRun(run=run, ending=ending, ended_at=now),)) + effects


async def expire_queued_run(tx: Tx, row: Row, session_key: str, now: int) -> Effects:
    """End a queued run whose deadline has passed. Its message stays in the queue as a note.

    So it is added to the transcript in its turn, marked as not answered: nothing may come between the entries of the
    run before it, and the runs after it must see it.
    """
    ending, run = TIMED_OUT_BEFORE_START_ENDING, identify_run(row, session_key, "")
    question = _find_question(row)
    if question is None:
        return await _end_queued_run(tx, run, ending, now)
    note_id = f"note:expired:{run.run_id}"
    if not await tx.do(SQL.rename_queued, n=run.n, id=note_id):
        return NO_EFFECTS  # it was started meanwhile
    copy = await tx.one(SQL.copy_queued, n=run.n, id=run.run_id)
    assert copy is not None
    (closing,) = build_closing_entries(ending, now)
    await tx.do(
        SQL.convert_to_note,
        n=run.n,
        input=encode_message(closing),
        options=encode_options(RunOptions(earlier=[question])),
    )
    note = AcceptedRun(note_id, run.session, session_key, "queued", new=True, note=True)
    ended = await _end_queued_run(tx, msgspec.structs.replace(run, n=copy["n"]), ending, now)
    return ended + Effects.queue(note)


def _find_question(row: Row) -> UserMessage | None:
    """Return the message of a queued run, unless the run is a step of the engine's own or cannot be read."""
    if row["origin"] in QUIET_ORIGINS:
        return None
    try:
        message = decode_message(row["input"])
    except InvalidInput:
        return None
    return message if isinstance(message, UserMessage) else None


def identify_run(row: Row, session_key: str, session_id: str) -> RunIdentity:
    return RunIdentity(
        n=row["n"],
        run_id=row["id"],
        session=row["session"],
        session_key=session_key,
        session_id=session_id,
        origin=row["origin"],
        reply_target_json=row["target"],
        exchange=row["exchange"],
        task=row["task"],
    )


# --- stops ---


async def cancel_runs(tx: Tx, session: int, run_id: str | None, now: int) -> Effects:
    """Stop a session's runs and commands, or one run. Stopping an active run also stops its session's sub-agents."""
    active = await tx.one(SQL.active_in_session, session=session)
    ended: list[Effects] = []
    reports: list[Effects] = []
    stop_requests: list[StopRequested] = []
    if run_id is not None and not (active and active["id"] == run_id):
        for row in await tx.all(SQL.queued_in_session, session=session):
            if row["id"] == run_id and row["origin"] != NOTE_ORIGIN:
                ended.append(
                    await _end_queued_run(
                        tx, identify_run(row, row["key"], ""), STOPPED_BEFORE_START_ENDING, now
                    )
                )
        return Effects.combine(ended)
    for member in await tx.all(SQL.active_tree, session=session):
        await _mute_and_cancel_wakes(tx, member["id"], now)
        if member["id"] != session or run_id is None:
            reports.append(await command_rows.stop_commands_of_session(tx, member["id"], "cancelled"))
        if member["id"] != session or run_id is None:
            for row in await tx.all(SQL.queued_in_session, session=member["id"]):
                # Notes are not stopped: they record what has already happened.
                if row["origin"] != NOTE_ORIGIN:
                    ended.append(
                        await _end_queued_run(
                            tx, identify_run(row, row["key"], ""), STOPPED_BEFORE_START_ENDING, now
                        )
                    )
        # Its sub-agents no longer wake it.
        reports.append(await subagents.abandon_waiting_task(tx, member["key"], now))
        for row in await tx.all(SQL.active_in_session, session=member["id"]):
            await tx.do(SQL.request_stop, n=row["n"], now=now)
            stop_requests.append(StopRequested(run_id=row["id"]))
    return Effects.combine([*ended, *reports, Effects(tuple(stop_requests))])


async def _mute_and_cancel_wakes(tx: Tx, session: int, now: int) -> None:
    """Keep a session from being woken by its sub-agents: neither by later reports nor by those it waits for."""
    await tx.do(TASKS_SQL.mute, requester=session)
    await completion.cancel_pending_wakes(tx, session, now)


async def _cancel_descendants(tx: Tx, session: int, now: int) -> Effects:
    """Stop all sub-agents of a session, but not the session itself."""
    await _mute_and_cancel_wakes(tx, session, now)
    children = await tx.all(SQL.active_children, session=session)
    return Effects.combine([await cancel_runs(tx, child["id"], None, now) for child in children])


async def list_stop_requested_runs(tx: Tx, owner: str) -> list[str]:
    """Return the runs of this owner for which a stop was requested."""
    return [row["id"] for row in await tx.all(SQL.stop_requested, owner=owner)]


# --- deadlines, and runs without a worker ---


async def has_overdue_work(tx: Tx, now: int) -> bool:
    """Whether `expire_overdue_work` has anything to do."""
    return bool(await tx.one(SQL.overdue, now=now) or await tx.one(TASKS_SQL.overdue, now=now))


async def expire_overdue_work(tx: Tx, now: int) -> Effects:
    """End queued runs, and tasks between two runs, whose deadline has passed; a bounded number per call."""
    effects, ended_ids = list[Effects](), set[str]()
    for row in await tx.all(SQL.overdue, now=now):
        if row["id"] not in ended_ids:  # not yet stopped with its parent
            expired = await expire_queued_run(tx, row, row["key"], now)
            ended_ids.update(ended.run.run_id for ended in expired.ended_runs)
            effects.append(expired)
    for task in await tx.all(TASKS_SQL.overdue, now=now):
        report = await subagents.abandon_waiting_task(
            tx, task["child_key"], now, "timeout", "The run timed out while it waited for its sub-agents."
        )
        effects += [report, await cancel_runs(tx, task["child"], None, now)]
    return Effects.combine(effects)


async def load_runs_past_stop_grace(tx: Tx, before: int) -> dict[str, int]:
    """Return runs that should have stopped before that time, by request or deadline, with their lanes."""
    return {row["id"]: row["session"] for row in await tx.all(SQL.overdue_stops, before=before)}


async def force_end_run(tx: Tx, run_id: str, before: int, now: int) -> Effects | None:
    """End a run that `load_runs_past_stop_grace` returned. Returns None if it has stopped meanwhile."""
    row = next((row for row in await tx.all(SQL.overdue_stops, before=before) if row["id"] == run_id), None)
    if row is None:
        return None
    ending = STOPPED_ENDING if row["cancel_at"] else FORCED_TIMEOUT_ENDING
    return await end_run_without_worker(tx, row, ending, now)


async def end_abandoned_run(tx: Tx, session: int, now: int, *, shared: bool) -> Effects:
    """End the active run of a lane when no server is running; in a shared store, only after its lease expired."""
    row = await tx.one(SQL.active_with_lease, session=session)
    if row is None or (shared and row["lease_until"] > now):
        return NO_EFFECTS
    return await end_run_without_worker(tx, row, STOPPED_ENDING, now)
