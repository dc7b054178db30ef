"""`antiphon cron`: scheduled jobs, which fire while a gateway runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from antiphon.cli import _output
from antiphon.cli._errors import get_run_exit_code
from antiphon.cli._options import Settings, common_options, gateway_options
from antiphon.cli._param_types import IntegerParam, IntervalParam

if TYPE_CHECKING:
    from antiphon.operations.jobs import JobFireResult, JobView
    from antiphon.operations.types import RunView

F = TypeVar("F", bound=Callable[..., Any])
MAX_REPLY_CHARS = 60  # of a reply in a table on a terminal; --json has the whole text


@click.group(
    help="List, add, edit, enable, disable, run and remove scheduled jobs. They fire while a gateway runs. "
    "A JOB is an id or a name; the beginning of one is enough."
)
@common_options
def command() -> None: ...


@command.command("list")
@gateway_options
@common_options
@click.pass_obj
def list_jobs(settings: Settings) -> None:
    """List all jobs, oldest first."""
    from antiphon.cli._job_backend import open_jobs_for_reading

    async def jobs() -> Sequence[JobView]:
        async with open_jobs_for_reading(settings) as jobs:
            return await jobs.list()

    found = asyncio.run(jobs())
    if settings.json:
        _output.print_json({"jobs": found})
    elif not found:
        click.echo("No jobs.")
    else:
        rows = [
            [
                job.id,
                job.name,
                _format_schedule(job),
                _format_next_run(job),
                job.agent_id,
                job.state.last_status or "",
                job.state.last_error or "",
            ]
            for job in found
        ]
        _output.print_table(["ID", "NAME", "WHEN", "NEXT", "AGENT", "LAST", "ERROR"], rows)


def _format_next_run(job: JobView) -> str:
    at = job.state.next_run_at_ms
    return "" if at is None else _output.format_time(at)


def _format_schedule(job: JobView) -> str:
    import msgspec

    schedule: dict[str, Any] = msgspec.to_builtins(job.schedule)
    match schedule.pop("kind"):
        case "every":
            when = f"every {_output.format_duration(schedule['everyMs'])}"
        case "cron":
            when = " ".join(filter(None, [schedule["expr"], schedule.get("tz")]))
        case _:
            when = f"at {schedule.get('at') or schedule.get('atMs')}"
    return when if job.enabled else f"{when} (off)"


def _add_schedule_options(function: F) -> F:
    """Add the options for when a job fires, which agent answers and where the answer goes."""
    for option in (
        click.option("--to", metavar="ID", help="With --channel: the person or group to post to."),
        click.option(
            "--channel",
            metavar="NAME",
            help="With --announce: the channel to post to; default: where the agent last received a message.",
        ),
        click.option("--agent", metavar="ID", help="The agent that answers; default: the default agent."),
        click.option(
            "--tz", metavar="ZONE", help="The time zone for --cron; default: that of the gateway's machine."
        ),
        click.option(
            "--cron", "expression", metavar="EXPR", help="Fire by a cron expression, such as '0 9 * * 1-5'."
        ),
        click.option(
            "--at",
            metavar="TIME",
            help="Fire once, such as 2026-08-01T09:00:00+02:00; without an offset, in the gateway's time zone.",
        ),
        click.option(
            "--every",
            type=IntervalParam(),
            metavar="INTERVAL",
            help="Fire at this interval, such as 10m or 6h.",
        ),
    ):
        function = option(function)
    return function


@command.command()
@click.option("--name", required=True, help="Name of the job.")
@click.option("--message", required=True, metavar="TEXT", help="Message to send when the job fires.")
@click.option("--announce", is_flag=True, help="Also post each answer to a chat.")
@_add_schedule_options
@gateway_options
@common_options
@click.pass_obj
def add(
    settings: Settings,
    name: str,
    message: str,
    agent: str | None,
    every: int | None,
    at: str | None,
    expression: str | None,
    tz: str | None,
    **delivery: Any,
) -> None:
    """Schedule messages to an agent. Each job has a session of its own."""
    from antiphon.cli._job_backend import open_jobs_for_changes

    job: dict[str, Any] = {
        "name": name,
        "schedule": _build_schedule(every, at, expression, tz),
        "payload": {"kind": "agentTurn", "message": message},
        "delivery": _build_delivery(**delivery),
        **({"agentId": agent} if agent else {}),
    }

    async def added() -> JobView:
        async with open_jobs_for_changes(settings) as jobs:
            return await jobs.add(job)

    view = asyncio.run(added())
    if settings.json:
        _output.print_json(view)
    else:
        click.echo(f"Added job {_output.clean_line(view.id)}: {_output.clean_line(_format_schedule(view))}.")


@command.command()
@click.argument("job", metavar="JOB")
@click.option("--name", help="Rename the job.")
@click.option("--message", metavar="TEXT", help="The new message of the job.")
@click.option("--announce/--no-announce", default=None, help="Whether each answer is also posted to a chat.")
@_add_schedule_options
@gateway_options
@common_options
@click.pass_obj
def edit(
    settings: Settings,
    job: str,
    name: str | None,
    message: str | None,
    agent: str | None,
    every: int | None,
    at: str | None,
    expression: str | None,
    tz: str | None,
    announce: bool | None,
    channel: str | None,
    to: str | None,
) -> None:
    """Change the given options of a job and keep the rest. A new schedule starts now."""
    patch: dict[str, Any] = {
        field: given for field, given in (("name", name), ("agentId", agent)) if given is not None
    }
    if any(given is not None for given in (every, at, expression)):
        patch["schedule"] = _build_schedule(every, at, expression, tz)
    elif tz is not None:
        raise click.UsageError("--tz applies only to --cron. Give both.")
    if announce is not None or channel is not None or to is not None:
        patch["delivery"] = _build_delivery(bool(announce), channel, to)
    if not patch and message is None:
        raise click.UsageError("Nothing to change. Give an option, such as --message TEXT or --every 1h.")

    def changes(view: JobView) -> dict[str, Any]:
        return {**patch, "payload": _replace_message(view, message)} if message is not None else patch

    _print_changed_job(settings, asyncio.run(_update_job(settings, job, changes)), "Changed")


@command.command()
@click.argument("job", metavar="JOB")
@gateway_options
@common_options
@click.pass_obj
def enable(settings: Settings, job: str) -> None:
    """Enable a job. Missed runs are not made up for."""
    _print_changed_job(
        settings, asyncio.run(_update_job(settings, job, lambda _: {"enabled": True})), "Enabled"
    )


@command.command()
@click.argument("job", metavar="JOB")
@gateway_options
@common_options
@click.pass_obj
def disable(settings: Settings, job: str) -> None:
    """Disable a job without removing it."""
    _print_changed_job(
        settings, asyncio.run(_update_job(settings, job, lambda _: {"enabled": False})), "Disabled"
    )


async def _update_job(
    settings: Settings, reference: str, changes: Callable[[JobView], dict[str, Any]]
) -> JobView:
    from antiphon.cli._job_backend import find_job, open_jobs_for_changes

    async with open_jobs_for_changes(settings) as jobs:
        view = await find_job(jobs, reference)
        return await jobs.update(view.id, changes(view))


def _replace_message(view: JobView, message: str) -> dict[str, Any]:
    """Return the payload of a job with a new message and everything else unchanged."""
    import msgspec

    payload: dict[str, Any] = msgspec.to_builtins(view.payload)
    return {**payload, "text" if "text" in payload else "message": message}


def _print_changed_job(settings: Settings, view: JobView, done: str) -> None:
    if settings.json:
        _output.print_json(view)
        return
    following = f"; next at {_format_next_run(view)}" if _format_next_run(view) else ""
    _output.print_wrapped(
        "",
        f"{done} job {_output.clean_line(view.name)!r} ({view.id}): "
        f"{_output.clean_line(_format_schedule(view))}{following}.",
    )


@command.command()
@click.argument("job", metavar="JOB")
@click.option("--limit", type=IntegerParam(1, 200), default=20, show_default=True)
@gateway_options
@common_options
@click.pass_obj
def runs(settings: Settings, job: str, limit: int) -> None:
    """List the runs of a job, newest first, and how each ended."""
    from antiphon.cli._job_backend import find_job, open_jobs_for_reading

    async def find_runs() -> tuple[JobView, Sequence[RunView]]:
        async with open_jobs_for_reading(settings) as jobs:
            view = await find_job(jobs, job)
            return view, await jobs.list_runs(view.id, limit)

    view, found = asyncio.run(find_runs())
    if settings.json:
        _output.print_json({"jobId": view.id, "runs": found})
    elif not found:
        click.echo(f"Job {_output.clean_line(view.name)!r} has not run yet.")
    else:
        rows = [
            [
                _output.format_time(run.created_at),
                run.state,
                _output.format_duration(run.running_ms or 0),
                run.run_id,
                run.error or "",
                _output.shorten_text(run.reply or "", MAX_REPLY_CHARS),
            ]
            for run in found
        ]
        _output.print_table(["AT", "STATE", "LASTED", "RUN", "ERROR", "REPLY"], rows)
        click.echo(
            _output.dim(
                f"Full replies: {_output.format_program()} sessions history {_output.clean_line(found[0].session_key)}"
            )
        )


def _build_schedule(
    every: int | None, at: str | None, expression: str | None, tz: str | None
) -> dict[str, Any]:
    if sum(given is not None for given in (every, at, expression)) != 1:
        raise click.UsageError("Use exactly one of --every, --at and --cron.")
    if tz is not None and expression is None:
        raise click.UsageError("--tz applies only to --cron. Put the UTC offset into --at instead.")
    if expression is not None:
        return {"kind": "cron", "expr": expression, **({"tz": tz} if tz else {})}
    return {"kind": "every", "everyMs": every} if every is not None else {"kind": "at", "at": at}


def _build_delivery(announce: bool, channel: str | None, to: str | None) -> dict[str, Any]:
    where = {name: given for name, given in (("channel", channel), ("to", to)) if given is not None}
    if where and not announce:
        raise click.UsageError("--channel and --to need --announce.")
    if to is not None and channel is None:
        raise click.UsageError("--to needs --channel.")
    return {"mode": "announce", **where} if announce else {"mode": "none"}


@command.command()
@click.argument("job", metavar="JOB")
@gateway_options
@common_options
@click.pass_obj
def remove(settings: Settings, job: str) -> None:
    """Remove a job. Its past runs are kept."""
    from antiphon.cli._job_backend import find_job, open_jobs_for_changes

    async def removed() -> JobView:
        async with open_jobs_for_changes(settings) as jobs:
            view = await find_job(jobs, job)
            await jobs.remove(view.id)
            return view

    view = asyncio.run(removed())
    if settings.json:
        _output.print_json({"removed": view.id})
    else:
        click.echo(f"Removed job {_output.clean_line(view.name)!r} ({view.id}).")


@command.command()
@click.argument("job", metavar="JOB")
@gateway_options
@common_options
@click.pass_obj
def run(settings: Settings, job: str) -> int:
    """Run a job now. Without a gateway, wait until the run has ended."""
    from antiphon.cli._job_backend import fire_job

    fired, ended = asyncio.run(fire_job(settings, job))
    if settings.json:
        _output.print_json(fired)
    else:
        _output.print_wrapped("", _format_fired(fired))
    if ended is None:
        return 0 if fired.ran else 1
    if ended.state != "ok" and not settings.json:
        _output.print_wrapped(
            "", _output.clean_text(ended.error or f"The run ended as {ended.state!r}."), err=True
        )
    return get_run_exit_code(ended)


_REFUSAL_REASONS = {
    "busy": "as many jobs run as may (cron.maxConcurrentRuns). Try again in a moment.",
    "lane-full": "its session has no room for another message. Try again when some are answered.",
    "cron-disabled": "cron.enabled is false. Set it to true, then start the gateway again.",
}


def _format_fired(done: JobFireResult) -> str:
    if done.ran:
        return f"Accepted: run {_output.clean_line(done.run_id or '')} in {_output.clean_line(done.session_key or '')}."
    reason = _output.clean_line(done.reason or "no reason was given")
    return f"It was not run: {_REFUSAL_REASONS.get(reason, f'{reason}.')}"
