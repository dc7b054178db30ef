"""`antiphon subagents`: what a session has had sub-agents do, and stopping or redirecting one of them."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from antiphon.cli import output
from antiphon.cli.settings import Settings, common, reaching

if TYPE_CHECKING:
    from antiphon.cli.desk import Desk
    from antiphon.views import TaskView

F = TypeVar("F", bound=Callable[..., Any])
MAX_RESULT_CHARS = 60  # of a result in a table on a terminal; `subagents show` prints the whole report
EVERY = "all"
STATES = {"running": "at work", "waiting": "waiting for its own", "announcing": "wording its report"}


def _whose(function: F) -> F:
    option = click.option(
        "--for",
        "requester",
        metavar="SESSION",
        default="main",
        show_default=True,
        help="Whose sub-agents.",
    )
    return option(function)


@click.group(
    help="List a session's sub-agents, print a report, stop or redirect one. Without a subcommand: `list`.",
    invoke_without_command=True,
)
@_whose
@reaching
@common
@click.pass_context
def command(ctx: click.Context, requester: str) -> None:
    if ctx.invoked_subcommand is None:
        _list(ctx.ensure_object(Settings), requester)


@command.command("list")
@_whose
@reaching
@common
@click.pass_obj
def list_subagents(settings: Settings, requester: str) -> None:
    """Those at work, and those that ended in the last half hour; the newest first."""
    _list(settings, requester)


def _list(settings: Settings, requester: str) -> None:
    found = asyncio.run(_tasks(settings, requester))
    if settings.json:
        output.emit({"subagents": found})
    elif not found:
        click.echo(f"No sub-agents of {output.line(requester)} are at work or have ended lately.")
    else:
        rows = [_row(number, task) for number, task in enumerate(found, 1)]
        output.table(["LABEL", "STATE", "AGENT", "SINCE", "TOKENS", "ERROR", "RESULT"], rows)
        click.echo(
            output.dim("One of them: antiphon subagents show|kill TARGET (a label, a number or `last`)")
        )


async def _tasks(settings: Settings, requester: str) -> list[TaskView]:
    from antiphon.cli.desk import reading

    async with reading(settings) as desk:
        return await desk.tasks(requester)


def _row(number: int, task: TaskView) -> list[str]:
    return [
        f"{number} {task.name}",
        STATES.get(task.phase) or task.status or task.phase,
        task.agent_id,
        output.ago(task.created_at),
        "" if task.total_tokens is None else str(task.total_tokens),
        task.error or "",
        output.shorten(task.result or "", MAX_RESULT_CHARS),
    ]


@command.command()
@click.argument("target")
@_whose
@reaching
@common
@click.pass_obj
def show(settings: Settings, target: str, requester: str) -> None:
    """Print one sub-agent with its whole report. TARGET is a label, number, key or run id, or `last`."""
    task, report = asyncio.run(_report(settings, target, requester))
    if settings.json:
        import msgspec

        known: Any = msgspec.to_builtins(task) if task else {"runId": target}
        output.emit({**known, "report": report})
        return
    if task is not None:
        click.echo(
            f"{output.bold(output.line(task.name))} · {STATES.get(task.phase) or task.status or task.phase}"
        )
        for name, fact in (
            ("key", task.child_session_key),
            ("run", task.run_id),
            ("agent", task.agent_id),
            ("since", output.format_time(task.created_at)),
            ("task", task.task),
        ):
            output.print_fact(name, fact)
    click.echo(output.clean(report or "It has not reported yet."))


async def _report(settings: Settings, target: str, requester: str) -> tuple[TaskView | None, str | None]:
    from antiphon.cli.desk import reading
    from antiphon.errors import NotFound

    async with reading(settings) as desk:
        try:
            task = _chosen(target, await desk.tasks(requester))
        except NotFound as error:
            try:
                return None, await desk.task_report(target)  # it may have ended too long ago to be listed
            except NotFound:
                raise error from None
        return task, await desk.task_report(task.run_id)


@command.command()
@click.argument("target")
@_whose
@reaching
@common
@click.pass_obj
def kill(settings: Settings, target: str, requester: str) -> None:
    """Stop one, and everything below it. TARGET is its label, number, key or run id, `last`, or `all`."""
    killed = asyncio.run(_kill(settings, target, requester))
    if settings.json:
        output.emit({"killed": [task.child_session_key for task in killed]})
    elif not killed:
        click.echo("Nothing was at work.")
    else:
        names = ", ".join(output.line(task.name) for task in killed)
        click.echo(f"Stopped: {names}. What there was comes as a report.")


async def _kill(settings: Settings, target: str, requester: str) -> list[TaskView]:
    from antiphon.cli.desk import talking

    async with talking(settings) as (desk, gateway):
        found = await desk.tasks(requester)
        killed = [task for task in found if task.phase != "settled"]
        if target != EVERY:
            killed = [_at_work(_chosen(target, found))]
        for task in killed:
            await desk.stop(task.child_session_key)
        if gateway is None:
            await _settled(desk, requester, killed)
        return killed


@command.command()
@click.argument("target")
@click.argument("message")
@_whose
@reaching
@common
@click.pass_obj
def steer(settings: Settings, target: str, message: str, requester: str) -> None:
    """Let one drop what it does and do MESSAGE instead; its report is then about that."""
    task, run_id = asyncio.run(_steer(settings, target, message, requester))
    if settings.json:
        output.emit({"runId": run_id, "childSessionKey": task.child_session_key})
    else:
        click.echo(f"Accepted: run {output.line(run_id)} in {output.line(task.child_session_key)}.")


async def _steer(settings: Settings, target: str, message: str, requester: str) -> tuple[TaskView, str]:
    """Which one was meant, and the run in which it does something else."""
    from antiphon.cli.desk import calling

    client = calling(settings)
    if client is None:
        return await _steer_alone(settings, target, message, requester)
    async with client:
        task = _at_work(_chosen(target, await client.tasks(requester)))
        said = {"key": task.child_session_key, "message": message, "idempotencyKey": uuid.uuid4().hex}
        return task, (await client.call("sessions.steer", said))["runId"]


async def _steer_alone(settings: Settings, target: str, message: str, requester: str) -> tuple[TaskView, str]:
    from antiphon.access import Caller
    from antiphon.cli.desk import Own
    from antiphon.cli.journal import keep_journal
    from antiphon.host import hosting
    from antiphon.operations import Message
    from antiphon.visits import check_alone

    config = settings.load().config
    await check_alone(config, settings.paths.state_dir)
    keep_journal(settings.paths.state_dir, debug=settings.debug)
    async with hosting(config, settings.paths.state_dir) as operations:
        desk = Own(operations)
        task = _at_work(_chosen(target, await desk.tasks(requester)))
        said = Message(session=task.child_session_key, content=message)
        accepted, _ = await operations.steer(Caller.operator(), said)
        await _settled(desk, requester, [task])
        return task, accepted.run_id


async def _settled(desk: Desk, requester: str, tasks: Sequence[TaskView]) -> None:
    """Without a gateway nobody else is here to make their reports, and to take them out."""
    from antiphon.cli.staying import quiet, reported

    for task in tasks:
        await reported(desk, requester, task.run_id, None, lambda _: None)
    await quiet(desk, requester)


def _chosen(target: str, found: Sequence[TaskView]) -> TaskView:
    """The sub-agent that a label, table number, key, run id or `last` refers to."""
    from antiphon.cli.choices import choose

    if target == "last" and found:
        return found[0]
    exact = any(target in _names(task) for task in found)
    if not exact and target.isdecimal() and 0 < int(target) <= len(found):
        return found[int(target) - 1]
    return choose(
        target,
        found,
        _names,
        "sub-agent",
        "See `antiphon subagents`, with --for SESSION for those of another session.",
    )


def _names(task: TaskView) -> Sequence[str]:
    return [task.child_session_key, task.run_id, *([task.label] if task.label else [])]


def _at_work(task: TaskView) -> TaskView:
    from antiphon.errors import Conflict

    if task.phase == "settled":
        raise Conflict(f"{task.name!r} has ended already.", "See what came of it: `antiphon subagents`.")
    return task
