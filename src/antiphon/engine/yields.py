"""Runs that end their turn to wait for sub-agents, and the run that answers for them.

    running ──▶ yielded ──(the reports are there)──▶ handed to the run of the wake ──(its end)──▶ answered
                   └──(the session is stopped)──▶ ended without an answer

`runs.woken_by` is '' for a run that waits, and later the id of the run that its session is woken for. Several runs of
one session may wait at once: one wake answers for all of them. A run that yields keeps its exchange until it has ended,
because it may still fail; it is handed on after that. Who is woken when is decided in `engine.tasks`.
"""

from __future__ import annotations

from typing import Literal

from antiphon.store import Row, Tx
from antiphon.store.queries import Queries

RUNS = Queries("runs")
TASKS = Queries("tasks")
SESSIONS = Queries("sessions")
EXCHANGES = Queries("exchanges")


async def begin(tx: Tx, session: int, run_id: str | None, how: Literal["all", "any"]) -> None:
    """A run of a session is to be woken when all sub-agents have reported, or any of them."""
    row = await tx.one(SESSIONS.by_id, id=session)
    if row is not None and row["yielded"] is None:
        # A replica of the version before wakes only for the last run, and leaves the others as they are.
        await tx.do(RUNS.stop_waiting, session=session)
    await tx.do(TASKS.yield_to, session=session, how=how, run_id=run_id)
    await tx.do(RUNS.wait_for_wake, id=run_id)


async def hand_all(tx: Tx, session: Row, wake: str) -> None:
    """Let one run answer for all that wait in a session, which waits for nothing any more."""
    await _adopt(tx, session)
    await tx.do(TASKS.yield_to, session=session["id"], how=None, run_id=None)
    for run in await tx.all(RUNS.waiting_for_wake, session=session["id"]):
        await tx.do(RUNS.hand_to_wake, id=run["id"], wake=wake)
        if run["yielded"]:
            await _hand_on(tx, run, wake)


async def hand_one(tx: Tx, run_id: str | None, wake: str) -> None:
    """Let a wake that is queued answer for a run that is about to yield."""
    await tx.do(RUNS.hand_to_wake, id=run_id, wake=wake)


async def end(tx: Tx, run_id: str) -> bool:
    """Whether somebody answers for a run that has ended by yielding; hand on what it was to answer, if it is known who.

    The session may have been stopped since it asked to be woken.
    """
    run = await tx.one(RUNS.yielding, id=run_id)
    if run is None or run["woken_by"] is None:
        return False
    if run["woken_by"]:
        await _hand_on(tx, run, run["woken_by"])
    return True


async def answered_by(tx: Tx, wake: str) -> list[Row]:
    """The runs that a wake has answered for when it ends. It is asked once."""
    runs = await tx.all(RUNS.answered_for, id=wake)
    await tx.do(RUNS.clear_wake, id=wake)
    return runs


async def stop(tx: Tx, session: int) -> list[tuple[int, str]]:
    """Nothing wakes a session any more; the exchanges that this leaves without an answer, and the runs they are in."""
    row = await tx.one(SESSIONS.by_id, id=session)
    if row is None or (row["yielded"] is None and row["yield_run"] is None):
        return []
    await _adopt(tx, row)
    await tx.do(TASKS.yield_to, session=session, how=None, run_id=None)
    left: list[tuple[int, str]] = []
    for run in await tx.all(RUNS.waiting_for_wake, session=session):
        if run["yielded"]:
            runs = [run, *await answered_by(tx, run["id"])]
            left += [(each["exchange"], run["id"]) for each in runs if each["exchange"] is not None]
    await tx.do(RUNS.stop_waiting, session=session)
    return left


async def _adopt(tx: Tx, session: Row) -> None:
    """A replica of the version before names the run that waits in the session alone."""
    if session["yield_run"] is not None:
        await tx.do(RUNS.wait_unless_handed, id=session["yield_run"])


async def _hand_on(tx: Tx, run: Row, wake: str) -> None:
    """Also what the run itself was woken to answer."""
    handed = [run, *await tx.all(RUNS.answered_for, id=run["id"])]
    for each in handed:
        if each["exchange"] is not None:
            await tx.do(EXCHANGES.hand_on, n=each["exchange"], run_id=run["id"], next=wake)
        await tx.do(RUNS.hand_to_wake, id=each["id"], wake=wake)
    # For a replica of the version before, which knows of one exchange and one addressee of a run.
    await tx.do(RUNS.take_over, id=wake, exchange=run["exchange"], target=run["target"])
