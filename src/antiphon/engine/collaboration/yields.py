"""Runs that end their turn to wait for sub-agents, and the run that answers for them.

    running ──▶ yielded ──(the reports are there)──▶ assigned to the run of the wake ──(its end)──▶ answered
                   └──(the session is stopped)──▶ ended without an answer

`runs.woken_by` is '' for a run that waits, and later the id of the run that wakes its session. Several runs of
one session may wait at once: one wake answers for all of them, or one for each agent in the session that all agents
share. A run that yields keeps its exchange until it has ended, because it may still fail; the wake gets it after that.
`subagents` decides when a task has ended; this module decides which session that wakes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from antiphon.engine.collaboration import prompts, task_rows
from antiphon.engine.runs import run_queue
from antiphon.engine.runs.effects import NO_EFFECTS, Effects
from antiphon.engine.runs.run_queue import WAKE_ORIGIN, AcceptedRun, Submission
from antiphon.messages import Provenance, UserMessage
from antiphon.store import Row, Tx
from antiphon.store.queries import Queries
from antiphon.tool_selection import SPAWN_TOOL_NAME

RUNS_SQL = Queries("runs")
TASKS_SQL = Queries("tasks")
SESSIONS_SQL = Queries("sessions")
EXCHANGES_SQL = Queries("exchanges")


async def begin_waiting(tx: Tx, session: int, run_id: str | None, how: Literal["all", "any"]) -> None:
    """Let a run wait until all of its session's sub-agents have reported, or any of them."""
    row = await tx.one(SESSIONS_SQL.by_id, id=session)
    if row is not None and row["yielded"] is None:
        # A replica of the previous version wakes the session only for the last run and ignores the others.
        await tx.do(RUNS_SQL.stop_waiting, session=session)
    await tx.do(TASKS_SQL.set_yield, session=session, how=how, run_id=run_id)
    await tx.do(RUNS_SQL.wait_for_wake, id=run_id)


async def list_waiting_agents(tx: Tx, session: Row) -> list[str | None]:
    """Return the agents (`runs.agent_id`) of the runs that wait in a session; each of them gets one wake."""
    await _mark_legacy_waiting_run(tx, session)
    waiting = await tx.all(RUNS_SQL.waiting_for_wake, session=session["id"])
    return list(dict.fromkeys(run["agent_id"] for run in waiting))


async def assign_waiting_runs_to_wakes(tx: Tx, session: Row, wakes: Mapping[str | None, str]) -> None:
    """Let the wake of each agent answer for all its runs that wait in a session, and stop the session's waiting."""
    await tx.do(TASKS_SQL.set_yield, session=session["id"], how=None, run_id=None)
    for run in await tx.all(RUNS_SQL.waiting_for_wake, session=session["id"]):
        wake = wakes[run["agent_id"]]
        await tx.do(RUNS_SQL.assign_wake, id=run["id"], wake=wake)
        if run["yielded"]:
            await _transfer_exchanges(tx, run, wake)


async def assign_run_to_wake(tx: Tx, run_id: str | None, wake: str) -> None:
    """Let a queued wake answer for a run that is about to yield."""
    await tx.do(RUNS_SQL.assign_wake, id=run_id, wake=wake)


async def finish_yielded_run(tx: Tx, run_id: str) -> bool:
    """Transfer the exchanges of a run that ended by yielding. False if no run will answer for it.

    That is the case if its session was stopped after the run yielded.
    """
    run = await tx.one(RUNS_SQL.yield_state, id=run_id)
    if run is None or run["woken_by"] is None:
        return False
    if run["woken_by"]:
        await _transfer_exchanges(tx, run, run["woken_by"])
    return True


async def pop_runs_answered_by(tx: Tx, wake: str) -> list[Row]:
    """Return the runs that a wake answers for and clear the assignment: call this once, at its end."""
    runs = await tx.all(RUNS_SQL.yielded_runs_of_wake, id=wake)
    await tx.do(RUNS_SQL.clear_wake, id=wake)
    return runs


async def cancel_pending_wakes(tx: Tx, session: int) -> list[tuple[int, str]]:
    """Cancel the wakes that a session waits for. Returns the exchanges left without an answer, each with its run."""
    row = await tx.one(SESSIONS_SQL.by_id, id=session)
    if row is None or (row["yielded"] is None and row["yield_run"] is None):
        return []
    await _mark_legacy_waiting_run(tx, row)
    await tx.do(TASKS_SQL.set_yield, session=session, how=None, run_id=None)
    left: list[tuple[int, str]] = []
    for run in await tx.all(RUNS_SQL.waiting_for_wake, session=session):
        if run["yielded"]:
            runs = [run, *await pop_runs_answered_by(tx, run["id"])]
            left += [(each["exchange"], run["id"]) for each in runs if each["exchange"] is not None]
    await tx.do(RUNS_SQL.stop_waiting, session=session)
    return left


async def _mark_legacy_waiting_run(tx: Tx, session: Row) -> None:
    """Mark the waiting run of a session that yielded on a replica of the previous version."""
    if session["yield_run"] is not None:
        await tx.do(RUNS_SQL.wait_for_wake_if_unassigned, id=session["yield_run"])


async def _transfer_exchanges(tx: Tx, run: Row, wake: str) -> None:
    """Transfer a run's exchange, and those that it was itself woken to answer."""
    transferred = [run, *await tx.all(RUNS_SQL.yielded_runs_of_wake, id=run["id"])]
    for each in transferred:
        if each["exchange"] is not None:
            await tx.do(EXCHANGES_SQL.set_current_run, n=each["exchange"], run_id=run["id"], next=wake)
        await tx.do(RUNS_SQL.assign_wake, id=each["id"], wake=wake)
    # For a replica of the previous version, which knows one exchange and one addressee per run.
    await tx.do(RUNS_SQL.assign_exchange, id=wake, exchange=run["exchange"], target=run["target"])


# --- waking ---


class WakeRequest(NamedTuple):
    """A session to wake, the id that makes this wake unique, and the agent that yielded (`runs.agent_id`)."""

    session: int
    key: str
    id: str
    agent_id: str | None = None

    @property
    def run_id(self) -> str:
        return f"wake:{self.id}" if self.agent_id is None else f"wake:{self.id}:{self.agent_id}"


async def wake_requester(tx: Tx, task: Row, now: int) -> Effects:
    """Wake the requester if it yielded and has nothing more to wait for."""
    requester = await task_rows.find_living_requester(tx, task)
    if requester is None or requester.session["yielded"] is None or not task["wakes"]:
        return NO_EFFECTS
    session = requester.session
    if session["yielded"] == "all" and await task_rows.count_awaited(tx, session["id"]):
        return NO_EFFECTS
    effects, wakes = NO_EFFECTS, dict[str | None, str]()
    for agent in await list_waiting_agents(tx, session) or [requester.agent_id]:
        accepted = await queue_wake(
            tx, WakeRequest(session["id"], session["key"], task["id"], agent), task, now
        )
        if accepted is not None:
            wakes[agent] = accepted.run_id
            effects += Effects.queue(accepted)
    if wakes:
        await assign_waiting_runs_to_wakes(tx, session, wakes)
    return effects


async def queue_wake(tx: Tx, waking: WakeRequest, reported: Row, now: int) -> AcceptedRun | None:
    """Queue a run for a session after the reports it was waiting for; `reported` is the task of the last one.

    The run finishes the session's own task, and the exchanges of yielded runs are handed to it (`yields`).
    """
    own_task = await task_rows.continue_task(tx, waking.key, waking.run_id)
    submission = Submission(
        run_id=waking.run_id,
        session=waking.session,
        session_key=waking.key,
        origin=WAKE_ORIGIN,
        message=UserMessage(
            content=prompts.WAKE_MESSAGE,
            timestamp=now,
            provenance=Provenance(kind="wake", source_tool=SPAWN_TOOL_NAME, chain_id=reported["chain"]),
        ),
        deadline_at=own_task.deadline_at,
        task=own_task.n,
        chain=reported["chain"],
        hop=reported["hop"] - 1,  # same hop as when it spawned; the chain's limit of runs bounds repetition
        agent_id=waking.agent_id,
    )
    return await run_queue.submit_follow_up(tx, submission, now)


async def load_progress(tx: Tx, session: int, run_id: str | None) -> tuple[int, Row | None]:
    """Return how many tasks of a session are active, and the last one reported since the given run began."""
    reported = await tx.one(TASKS_SQL.last_report_during_run, requester=session, run_id=run_id)
    return await task_rows.count_awaited(tx, session), reported


async def hand_to_queued_wake(tx: Tx, session: int, run_id: str | None, agent_id: str | None) -> bool:
    """Hand a run to a wake that is already queued for this agent in its session. False if none is queued."""
    waking = await tx.one(RUNS_SQL.queued_wake, session=session, agent_id=agent_id)
    if waking is None:
        return False
    await assign_run_to_wake(tx, run_id, waking["id"])
    return True
