"""`antiphon subagents`: lists the sub-agents of a session, and stops or redirects one of them."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from antiphon.cli import _output
from antiphon.cli._options import Settings, common_options, gateway_options
from antiphon.errors import Conflict, NotFound

if TYPE_CHECKING:
    from antiphon.cli._backend import Backend
    from antiphon.operations.collaboration_types import TaskView

F = TypeVar("F", bound=Callable[..., Any])
MAX_RESULT_CHARS = 60  # of a result in a table on a terminal; `subagents show` prints the whole report
ALL_TARGET = "all"
PHASE_LABELS = {"running": "at work", "waiting": "waiting for its own", "announcing": "wording its report"}


def _subagents_options(function: F) -> F:
    """Add the options of every command here."""
    requester_option = click.option(
        "--for",
        "requester",
        metavar="SESSION",
        default="main",
        show_default=True,
        help="Session that started the sub-agents.",
    )
    return requester_option(gateway_options(common_options(function)))


@click.group(
    help="List a session's sub-agents, print a report, stop or redirect one. Without a subcommand: `list`.",
    invoke_without_command=True,
)
@_subagents_options
@click.pass_context
def command(ctx: click.Context, requester: str) -> None:
    if ctx.invoked_subcommand is None:
        _show_subagents(ctx.ensure_object(Settings), requester)


@command.command("list")
@_subagents_options
@click.pass_obj
def list_subagents(settings: Settings, requester: str) -> None:
    """List sub-agents that run or ended in the last 30 minutes, newest first."""
    _show_subagents(settings, requester)


def _show_subagents(settings: Settings, requester: str) -> None:
    found = asyncio.run(_load_tasks(settings, requester))
    if settings.json:
        _output.print_json({"subagents": found})
    elif not found:
        click.echo(f"No sub-agents of {_output.clean_line(requester)} run or ended recently.")
    else:
        rows = [_format_row(number, task) for number, task in enumerate(found, 1)]
        _output.print_table(["LABEL", "STATE", "AGENT", "SINCE", "TOKENS", "ERROR", "RESULT"], rows)
        hint = "One of them: antiphon subagents show|kill TARGET (a label, a number or `last`)"
        click.echo(_output.dim(_output.name_program(hint)))


async def _load_tasks(settings: Settings, requester: str) -> list[TaskView]:
    from antiphon.cli._backend import open_backend_for_reading

    async with open_backend_for_reading(settings) as backend:
        try:
            return await backend.list_subagents(requester)
        except NotFound:
            if requester == "main":  # it begins with its first message
                return []
            raise


def _format_row(number: int, task: TaskView) -> list[str]:
    return [
        f"{number} {task.name}",
        PHASE_LABELS.get(task.phase) or task.status or task.phase,
        task.agent_id,
        _output.format_age(task.created_at),
        "" if task.total_tokens is None else str(task.total_tokens),
        task.error or "",
        _output.shorten_text(task.result or "", MAX_RESULT_CHARS),
    ]


@command.command()
@click.argument("target")
@_subagents_options
@click.pass_obj
def show(settings: Settings, target: str, requester: str) -> None:
    """Show a sub-agent with its full report. TARGET is a label, number, key or run id, or `last`."""
    task, report = asyncio.run(_load_report(settings, target, requester))
    if settings.json:
        import msgspec

        known: Any = msgspec.to_builtins(task) if task else {"runId": target}
        _output.print_json({**known, "report": report})
        return
    if task is not None:
        click.echo(
            f"{_output.bold(_output.clean_line(task.name))} · "
            f"{PHASE_LABELS.get(task.phase) or task.status or task.phase}"
        )
        for name, fact in (
            ("key", task.child_session_key),
            ("run", task.run_id),
            ("agent", task.agent_id),
            ("since", _output.format_time(task.created_at)),
            ("task", task.task),
        ):
            _output.print_fact(name, fact)
    _output.print_wrapped("", _output.clean_text(report or "It has not reported yet."))


async def _load_report(settings: Settings, target: str, requester: str) -> tuple[TaskView | None, str | None]:
    from antiphon.cli._backend import open_backend_for_reading

    async with open_backend_for_reading(settings) as backend:
        try:
            task = _find_task(target, await backend.list_subagents(requester))
        except NotFound as error:
            try:
                return None, await backend.get_report(target)  # it may have ended too long ago to be listed
            except NotFound:
                raise error from None
        return task, await backend.get_report(task.run_id)


@command.command()
@click.argument("target")
@_subagents_options
@click.pass_obj
def kill(settings: Settings, target: str, requester: str) -> None:
    """Stop a sub-agent and its own sub-agents. TARGET is a label, number, key or run id, `last` or `all`."""
    killed = asyncio.run(_kill_tasks(settings, target, requester))
    if settings.json:
        _output.print_json({"killed": [task.child_session_key for task in killed]})
    elif not killed:
        click.echo("No sub-agent was running.")
    else:
        names = ", ".join(_output.clean_line(task.name) for task in killed)
        click.echo(f"Stopped: {names}. Their results so far are reported.")


async def _kill_tasks(settings: Settings, target: str, requester: str) -> list[TaskView]:
    from antiphon.cli._backend import open_backend_for_messages

    async with open_backend_for_messages(settings) as (backend, gateway):
        found = await backend.list_subagents(requester)
        killed = [task for task in found if task.phase != "settled"]
        if target != ALL_TARGET:
            killed = [_check_running(_find_task(target, found))]
        for task in killed:
            await backend.stop(task.child_session_key)
        if gateway is None:
            await _wait_for_tasks(backend, requester, killed)
        return killed


@command.command()
@click.argument("target")
@click.argument("message")
@_subagents_options
@click.pass_obj
def steer(settings: Settings, target: str, message: str, requester: str) -> None:
    """Interrupt a sub-agent and give it MESSAGE as its new task."""
    task, run_id = asyncio.run(_steer_task(settings, target, message, requester))
    if settings.json:
        _output.print_json({"runId": run_id, "childSessionKey": task.child_session_key})
    else:
        _output.print_wrapped(
            "", f"Accepted: run {_output.clean_line(run_id)} in {_output.clean_line(task.child_session_key)}."
        )


async def _steer_task(settings: Settings, target: str, message: str, requester: str) -> tuple[TaskView, str]:
    """Redirect a sub-agent; return its task and the id of its new run."""
    from antiphon.cli._backend import make_gateway_client

    client = make_gateway_client(settings)
    if client is None:
        return await _steer_without_gateway(settings, target, message, requester)
    async with client:
        task = _check_running(_find_task(target, await client.list_subagents(requester)))
        message_fields = {
            "key": task.child_session_key,
            "message": message,
            "idempotencyKey": uuid.uuid4().hex,
        }
        return task, (await client.call("sessions.steer", message_fields))["runId"]


async def _steer_without_gateway(
    settings: Settings, target: str, message: str, requester: str
) -> tuple[TaskView, str]:
    from antiphon.access import Caller
    from antiphon.app import open_app_operations
    from antiphon.cli._backend import LocalBackend
    from antiphon.cli._logging import configure_logging
    from antiphon.operations.types import IncomingMessage
    from antiphon.state_access import require_no_live_replicas

    config = settings.load().config
    await require_no_live_replicas(config, settings.paths.state_dir)
    configure_logging(settings.paths.state_dir, debug=settings.debug)
    async with open_app_operations(config, settings.paths.state_dir) as operations:
        backend = LocalBackend(operations)
        task = _check_running(_find_task(target, await backend.list_subagents(requester)))
        incoming = IncomingMessage(session=task.child_session_key, content=message)
        accepted, _ = await operations.messages.steer(Caller.operator(), incoming)
        await _wait_for_tasks(backend, requester, [task])
        return task, accepted.run_id


async def _wait_for_tasks(backend: Backend, requester: str, tasks: Sequence[TaskView]) -> None:
    """Wait until the tasks have been reported: without a gateway, only this process can deliver the reports."""
    from antiphon.cli._wait import wait_for_task, wait_until_idle

    for task in tasks:
        await wait_for_task(backend, requester, task.run_id, None, lambda _: None)
    await wait_until_idle(backend, requester)


def _find_task(target: str, found: Sequence[TaskView]) -> TaskView:
    """Return the sub-agent that a label, table number, key, run id or `last` refers to.

    `found` is sorted newest first. A label can be used again once its sub-agent has reported, and by other agents: it
    stands for the newest that is at work, or else for the newest.
    """
    from antiphon.cli._references import find_by_name

    if target == "last" and found:
        return found[0]
    if labelled := [task for task in found if task.label == target]:
        return next((task for task in labelled if task.phase != "settled"), labelled[0])
    exact = any(target in _list_task_names(task) for task in found)
    if not exact and target.isdecimal() and 0 < int(target) <= len(found):
        return found[int(target) - 1]
    return find_by_name(
        target,
        found,
        _list_task_names,
        "sub-agent",
        "See `antiphon subagents`, with --for SESSION for those of another session.",
    )


def _list_task_names(task: TaskView) -> Sequence[str]:
    return [task.child_session_key, task.run_id, *([task.label] if task.label else [])]


def _check_running(task: TaskView) -> TaskView:
    if task.phase == "settled":
        raise Conflict(f"{task.name!r} has already ended.", "See its result with `antiphon subagents`.")
    return task
