"""Waits until the work that a command has started is done: for the user, or because only this process runs it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING

import click

from antiphon.cli import _output
from antiphon.errors import Forbidden, NotFound, Unavailable

if TYPE_CHECKING:
    from antiphon.cli._backend import Backend
    from antiphon.operations.collaboration_types import DeliveryView, TaskView
    from antiphon.operations.types import MessageReceipt, RunView

RUN_WAIT_SECONDS = 60.0  # length of one wait; repeated until the run has ended
POLL_SECONDS = 0.2  # between two polls of state that has no event
APPROVAL_POLL_SECONDS = 1.0
DELIVERY_PAGE_ROWS = 500
DELIVERY_WAIT_SECONDS = 5.0  # in which a delivery to a web chat normally arrives


@contextmanager
def explain_early_exit(session: str, *, hosted: bool, run_id: str | None = None) -> Generator[None]:
    """Explain what happens to the work when the user leaves early (Ctrl-C) or the gateway is lost.

    `hosted` means that this process does the work; `run_id` is set once the message was accepted.
    """
    try:
        yield
    except asyncio.CancelledError:
        continues = "continues when Antiphon is started again" if hosted else "continues"
        look = f"{_output.format_program()} sessions history {_output.clean_line(session)}"
        click.echo(f"The work {continues}. Look later: {look}", err=True)
        raise
    except Unavailable as error:
        if run_id is None or "url" not in error.data:  # the connection is not what failed
            raise
        raise Unavailable(
            f"{error.what} The message was accepted (run {run_id}) and is not lost.",
            f"Do not send it again. Look for the answer later: {_output.format_program()} sessions history {session}",
            **error.data,
            runId=run_id,
        ) from error


def print_accepted_run(run_id: str, session_key: str) -> None:
    """Print the accepted run on standard error, before waiting for it."""
    text = f"Accepted: run {_output.clean_line(run_id)} in {_output.clean_line(session_key)}."
    _output.print_wrapped("", text, err=True)


@asynccontextmanager
async def show_approvals(backend: Backend, accepted: MessageReceipt, *, silent: bool) -> AsyncGenerator[None]:
    """Until the context is left, print the calls of the session that wait for a person, each once."""
    if silent:
        yield
        return
    from antiphon.event_loop import run_in_background

    async with run_in_background(_print_new_approvals(backend, accepted)):
        yield


async def _print_new_approvals(backend: Backend, accepted: MessageReceipt) -> None:
    from antiphon.cli.approvals import print_question

    shown: set[str] = set()
    while True:
        try:
            waiting = await backend.list_approvals(accepted.session_key)
        except (
            Forbidden,
            Unavailable,
        ):  # the token may not decide, or the wait itself reports the lost gateway
            return
        for approval in waiting:
            if approval.id not in shown:
                print_question(approval, is_earlier_run=approval.run_id != accepted.run_id)
        shown = {approval.id for approval in waiting}
        await asyncio.sleep(APPROVAL_POLL_SECONDS)


async def wait_for_run_end(backend: Backend, run_id: str) -> RunView:
    while True:
        view = await backend.wait(run_id, RUN_WAIT_SECONDS)
        if view.has_ended:
            return view


async def wait_until_idle(backend: Backend, *sessions: str) -> None:
    """Wait until nothing runs or is queued in these sessions, and every delivery has been sent.

    Each step of an exchange queues the next one when it ends, so a session is not idle between them.
    """
    while runs := [run for session in sessions for run in await backend.list_unfinished(session)]:
        await wait_for_run_end(backend, runs[0])
    await _wait_for_deliveries(backend)


async def _wait_for_deliveries(backend: Backend) -> None:
    until = asyncio.get_running_loop().time() + DELIVERY_WAIT_SECONDS
    while asyncio.get_running_loop().time() < until:
        counts = (await backend.list_deliveries(None, 1)).count_by_state
        if not counts.get("pending") and not counts.get("sending"):
            return
        await asyncio.sleep(POLL_SECONDS)


async def wait_for_delivery(backend: Backend, delivery: DeliveryView) -> DeliveryView:
    """Wait until a retried delivery was sent or failed, for a few seconds at most; return its current state."""
    until = asyncio.get_running_loop().time() + DELIVERY_WAIT_SECONDS
    while True:
        page = await backend.list_deliveries(None, DELIVERY_PAGE_ROWS)
        now = next((found for found in page.deliveries if found.key == delivery.key), delivery)
        if now.state not in {"pending", "sending"} or asyncio.get_running_loop().time() > until:
            return now
        await asyncio.sleep(POLL_SECONDS)


async def wait_for_task(
    backend: Backend, session: str, run_id: str, seconds: float | None, on_phase: Callable[[TaskView], None]
) -> TaskView | None:
    """Wait until a task has settled or the time has passed, and return it; `on_phase` is called for every phase.

    Returns None for a task that ended so long ago that it is no longer listed.
    """
    loop = asyncio.get_running_loop()
    until = None if seconds is None else loop.time() + seconds
    phase = None
    while True:
        task = next((task for task in await backend.list_subagents(session) if task.run_id == run_id), None)
        if task is None:
            return None
        if task.phase != phase:
            phase = task.phase
            on_phase(task)
        left = RUN_WAIT_SECONDS if until is None else until - loop.time()
        if phase == "settled" or left <= 0:
            return task
        first = await wait_for_run_if_exists(backend, run_id, min(left, RUN_WAIT_SECONDS))
        if first is None or first.has_ended:  # other runs continue the task
            await asyncio.sleep(min(left, POLL_SECONDS))


async def wait_for_run_if_exists(backend: Backend, run_id: str, seconds: float) -> RunView | None:
    """Wait for a run; return None if it was deleted with its session."""
    try:
        return await backend.wait(run_id, seconds)
    except NotFound:
        return None
