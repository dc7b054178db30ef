"""`antiphon spawn`: a sub-agent for a session, and its report if somebody waits for it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from antiphon.cli import output
from antiphon.cli.failures import outcome
from antiphon.cli.settings import Settings, common, reaching

if TYPE_CHECKING:
    from antiphon.engine.attachments import Attachment
    from antiphon.operations import Spawn
    from antiphon.views import RunView, Spawned, TaskView

LONGEST = 30 * 86_400  # seconds
THINKING = ("off", "minimal", "low", "medium", "high", "xhigh")
PHASES = {
    "running": "at work",
    "waiting": "waiting for its own sub-agents",
    "announcing": "wording its report",
}


class Patience(click.FloatRange):
    """Seconds to wait; the option alone is as long as it takes."""

    name = "seconds"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            number = float(value)
        except ValueError:
            self.fail(
                f"{value!r} is no number of seconds; write TASK before --wait, or --wait=60.", param, ctx
            )
        return number if number == math.inf else super().convert(number, param, ctx)


@click.command(
    help="Start a sub-agent with a session of its own. It reports by itself to the session it is for."
)
@click.argument("task")
@click.option("--agent", metavar="ID", help="Which agent; default: that of the session.")
@click.option(
    "--for", "requester", metavar="SESSION", default="main", show_default=True, help="Who gets the report."
)
@click.option("--label", metavar="NAME", help="A short name for it.")
@click.option("--model", metavar="PROVIDER/MODEL", help="Instead of the agent's own.")
@click.option("--thinking", type=click.Choice(THINKING), help="How much it is to think.")
@click.option(
    "--timeout",
    type=click.FloatRange(0, LONGEST),
    metavar="SECONDS",
    help="Stop it after so long; default: as configured.",
)
@click.option(
    "--attach",
    "files",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="A file for its workspace; may be repeated.",
)
@click.option(
    "--cleanup",
    type=click.Choice(["delete", "keep"]),
    default="keep",
    show_default=True,
    help="Whether its transcript is deleted after the report.",
)
@click.option(
    "--announce",
    type=click.Choice(["channel", "parent", "none"]),
    default="channel",
    show_default=True,
    help="Who hears of it: the session's chat, only the session (which it wakes), or nobody.",
)
@click.option(
    "--wait",
    "seconds",
    type=Patience(0),
    is_flag=False,
    flag_value=math.inf,
    metavar="[SECONDS]",
    help="Wait for the report, and print it.",
)
@click.option(
    "--key", metavar="IDEMPOTENCY", help="Asked again with the same key, it is the same one; default: new."
)
@reaching
@common
@click.pass_obj
def command(
    settings: Settings, requester: str, files: Sequence[Path], seconds: float | None, **given: Any
) -> int:
    from antiphon.operations import Spawn

    wanted = Spawn(
        task=given["task"],
        label=given["label"],
        agent_id=given["agent"],
        model=given["model"],
        thinking=given["thinking"],
        run_timeout_seconds=given["timeout"],
        cleanup=given["cleanup"],
        announce=given["announce"],
        attachments=[_attachment(path) for path in files],
        idempotency_key=given["key"],
    )
    spawned, ended = asyncio.run(_spawn(settings, wanted, requester, seconds))
    if seconds is not None and ended:
        return _told(settings, *ended, seconds)
    if settings.json:
        output.emit(spawned)
    else:
        _accepted(spawned, requester)
    return 0


def _attachment(path: Path) -> Attachment:
    from base64 import b64encode

    from antiphon.engine.attachments import Attachment

    content = path.read_bytes()
    try:
        return Attachment(name=path.name, content=content.decode())
    except UnicodeDecodeError:
        return Attachment(name=path.name, content=b64encode(content).decode(), encoding="base64")


async def _spawn(
    settings: Settings, wanted: Spawn, requester: str, seconds: float | None
) -> tuple[Spawned, tuple[TaskView, RunView] | None]:
    from antiphon.cli.desk import talking
    from antiphon.cli.staying import quiet, reported

    async with talking(settings) as (desk, gateway):
        spawned = await desk.spawn(wanted, requester)
        if seconds is None and gateway:
            return spawned, None
        patience = None if seconds in {None, math.inf} else seconds
        shown = _nothing if settings.json or seconds is None else _progress
        task = await reported(desk, requester, spawned.run_id, patience, shown)
        if gateway is None and task.phase == "settled":  # the report is on its way, and nobody else is here
            await quiet(desk, requester)
        return spawned, (task, await desk.wait(spawned.run_id, 0))


def _nothing(_: TaskView) -> None: ...


def _progress(task: TaskView) -> None:
    if task.phase in PHASES:
        child = output.line(task.label or task.child_session_key)
        click.echo(output.dim(f"{child} is {PHASES[task.phase]}…"), err=True)


def _accepted(spawned: Spawned, requester: str) -> None:
    child = output.line(spawned.child_session_key)
    click.echo(f"Accepted: run {output.line(spawned.run_id)} in {child}.")
    if spawned.attachments:
        receipt = spawned.attachments
        files = "1 file" if receipt.count == 1 else f"{receipt.count} files"
        click.echo(f"Attached: {files}, {receipt.total_bytes} bytes, in {receipt.rel_dir}.")
    click.echo(output.dim(f"The report: antiphon sessions history {output.line(requester)}"), err=True)


def _told(settings: Settings, task: TaskView, view: RunView, seconds: float) -> int:
    if settings.json:
        output.emit(task)
    elif task.phase != "settled":
        child = output.line(task.child_session_key)
        click.echo(
            f"There is no report after {seconds:g} s; the sub-agent goes on. "
            f"Look later: antiphon sessions history {child}",
            err=True,
        )
    else:
        click.echo(output.clean(task.report or _plainly(task)))
    if task.phase == "settled" and task.status == "ok":
        return 0
    return outcome(view) or 1


def _plainly(task: TaskView) -> str:
    """What there is to say of a task that nobody was told of."""
    return "\n\n".join(filter(None, [f"Status: {task.status}", task.result, task.error]))
