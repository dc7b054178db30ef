"""`antiphon cron`: jobs that start by the clock, while a gateway runs."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import click

from antiphon.cli import output
from antiphon.cli.quantities import Interval
from antiphon.cli.settings import Settings, common, reaching

if TYPE_CHECKING:
    from antiphon.schedules import FiredView, JobView


@click.group(help="List, add, remove and run scheduled jobs. They fire while a gateway runs.")
@common
def command() -> None: ...


@command.command("list")
@reaching
@common
@click.pass_obj
def list_jobs(settings: Settings) -> None:
    """Every job, the oldest first."""
    from antiphon.cli.timetable import consulted

    async def jobs() -> list[JobView]:
        async with consulted(settings) as timetable:
            return await timetable.list()

    found = asyncio.run(jobs())
    if settings.json:
        output.emit({"jobs": found})
    elif not found:
        click.echo("No jobs.")
    else:
        rows = [
            [job.id, job.name, _when(job), _next(job), job.agent_id, job.state.last_status or ""]
            for job in found
        ]
        output.table(["ID", "NAME", "WHEN", "NEXT", "AGENT", "LAST"], rows)


def _next(job: JobView) -> str:
    from datetime import datetime

    at = job.state.next_run_at_ms
    return "" if at is None else datetime.fromtimestamp(at / 1000).astimezone().strftime("%Y-%m-%d %H:%M")


def _when(job: JobView) -> str:
    import msgspec

    schedule: dict[str, Any] = msgspec.to_builtins(job.schedule)
    match schedule.pop("kind"):
        case "every":
            when = f"every {output.lasting(schedule['everyMs'])}"
        case "cron":
            when = " ".join(filter(None, [schedule["expr"], schedule.get("tz")]))
        case _:
            when = f"at {schedule.get('at') or schedule.get('atMs')}"
    return when if job.enabled else f"{when} (off)"


@command.command()
@click.option("--name", required=True, help="What to call it.")
@click.option("--message", required=True, metavar="TEXT", help="What is said when it fires.")
@click.option("--every", type=Interval(), metavar="INTERVAL", help="So often, such as 10m or 6h.")
@click.option("--at", metavar="TIME", help="Once, such as 2026-08-01T09:00:00+02:00.")
@click.option("--cron", "expression", metavar="EXPR", help="By a cron expression, such as '0 9 * * 1-5'.")
@click.option("--tz", metavar="ZONE", help="The time zone of --cron; default: the machine's.")
@click.option("--agent", metavar="ID", help="Who does it; default: the default agent.")
@click.option("--announce", is_flag=True, help="Also post each answer to a chat.")
@click.option(
    "--channel",
    metavar="NAME",
    help="Of --announce: which channel; default: where the agent last heard from.",
)
@click.option("--to", metavar="ID", help="Of --channel: whom or which group there.")
@reaching
@common
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
    """Say something to an agent by the clock, each job in a session of its own."""
    from antiphon.cli.timetable import changed

    job: dict[str, Any] = {
        "name": name,
        "schedule": _schedule(every, at, expression, tz),
        "payload": {"kind": "agentTurn", "message": message},
        "delivery": _delivery(**delivery),
        **({"agentId": agent} if agent else {}),
    }

    async def added() -> JobView:
        async with changed(settings) as timetable:
            return await timetable.add(job)

    view = asyncio.run(added())
    if settings.json:
        output.emit(view)
    else:
        click.echo(f"Added job {output.line(view.id)}: {output.line(_when(view))}.")


def _schedule(every: int | None, at: str | None, expression: str | None, tz: str | None) -> dict[str, Any]:
    if sum(given is not None for given in (every, at, expression)) != 1:
        raise click.UsageError("Say when, with exactly one of --every, --at and --cron.")
    if tz is not None and expression is None:
        raise click.UsageError("--tz is for --cron; write the offset into --at.")
    if expression is not None:
        return {"kind": "cron", "expr": expression, **({"tz": tz} if tz else {})}
    return {"kind": "every", "everyMs": every} if every is not None else {"kind": "at", "at": at}


def _delivery(announce: bool, channel: str | None, to: str | None) -> dict[str, Any]:
    where = {name: given for name, given in (("channel", channel), ("to", to)) if given is not None}
    if where and not announce:
        raise click.UsageError("--channel and --to say where --announce goes; add that, or leave them out.")
    if to is not None and channel is None:
        raise click.UsageError("--to is somebody in a channel; say which, with --channel.")
    return {"mode": "announce", **where} if announce else {"mode": "none"}


@command.command()
@click.argument("job_id", metavar="ID")
@reaching
@common
@click.pass_obj
def remove(settings: Settings, job_id: str) -> None:
    """Forget a job. What it has run stays."""
    from antiphon.cli.timetable import changed
    from antiphon.errors import NotFound

    async def removed() -> bool:
        async with changed(settings) as timetable:
            return await timetable.remove(job_id)

    if not asyncio.run(removed()):
        raise NotFound(f"There is no job {job_id!r}.", "See `antiphon cron list`.")
    if settings.json:
        output.emit({"removed": job_id})
    else:
        click.echo(f"Removed job {output.line(job_id)}.")


@command.command()
@click.argument("job_id", metavar="ID")
@reaching
@common
@click.pass_obj
def run(settings: Settings, job_id: str) -> int:
    """Fire a job now. Without a gateway this stays until its run has ended."""
    from antiphon.cli.timetable import fired

    done = asyncio.run(fired(settings, job_id))
    if settings.json:
        output.emit(done)
    else:
        click.echo(_told(done))
    return 0 if done.ran else 1


_REASONS = {
    "busy": "as many jobs run as may (cron.maxConcurrentRuns). Try again in a moment.",
    "lane-full": "its session has no room for another message. Try again when some are answered.",
    "cron-disabled": "cron.enabled is false. Set it to true, then start the gateway again.",
}


def _told(done: FiredView) -> str:
    if done.ran:
        return f"Accepted: run {output.line(done.run_id or '')} in {output.line(done.session_key or '')}."
    reason = output.line(done.reason or "no reason was given")
    return f"It was not run: {_REASONS.get(reason, f'{reason}.')}"
