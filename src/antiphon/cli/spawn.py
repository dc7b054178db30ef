"""`antiphon spawn`: a sub-agent for a session, and its report if somebody waits for it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from antiphon.cli import output
from antiphon.cli.failures import outcome
from antiphon.cli.quantities import Finite
from antiphon.cli.settings import Settings, common, reaching
from antiphon.errors import InvalidInput

if TYPE_CHECKING:
    from antiphon.cli.desk import Desk
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


class Ended(NamedTuple):
    """A task when nobody waits for it any longer, what was said of it if it is over, and its first run.

    A run goes with its session, and a task that was over long ago is in no list; what was said of it is kept.
    """

    task: TaskView | None
    report: str | None
    run: RunView | None

    @property
    def status(self) -> str | None:
        """How it ended, if it did."""
        if self.task is None:
            return self.run.state if self.run else "ok"
        return self.task.status if self.task.phase == "settled" else None


class Patience(Finite):
    """Seconds to wait; the option alone is as long as it takes."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            number = float(value)
        except ValueError:
            self.fail(
                f"{value!r} is no number of seconds; write TASK before --wait, or --wait=60.", param, ctx
            )
        return number if number == math.inf else super().convert(value, param, ctx)


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
    type=Finite("seconds", 0, LONGEST),
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
    type=Patience("seconds", 0, LONGEST),
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
    from antiphon.engine.words import check_key
    from antiphon.operations import Spawn

    check_key(given["key"])
    if not given["task"].strip():
        raise InvalidInput("The task is empty.", "Say what is to be done.", field="task")
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
        return _told(settings, spawned, ended, seconds)
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
) -> tuple[Spawned, Ended | None]:
    from antiphon.cli.desk import remember_replicas, talking
    from antiphon.cli.parties import present
    from antiphon.cli.staying import leaving, tell_accepted

    async with talking(settings) as (desk, gateway):
        await present(desk, requester)
        silent, hosted = settings.json or seconds is None, gateway is None
        if seconds is not None:
            await remember_replicas(settings, gateway)
        with leaving(requester, hosted=hosted):  # it may be accepted before we hear so
            spawned = await desk.spawn(wanted, requester)
        if seconds is None and gateway:
            return spawned, None
        if not silent:
            tell_accepted(spawned.run_id, spawned.child_session_key)
            _attached(spawned, err=True)
        with leaving(spawned.child_session_key, hosted=hosted, run_id=spawned.run_id):
            ended = await _ended(desk, spawned.run_id, requester, seconds, silent=silent, hosted=hosted)
        return spawned, ended


async def _ended(
    desk: Desk, run_id: str, requester: str, seconds: float | None, *, silent: bool, hosted: bool
) -> Ended:
    from antiphon.cli.staying import quiet, reported, seen

    patience = None if seconds in {None, math.inf} else seconds
    shown = _nothing if silent else _progress
    task = await reported(desk, requester, run_id, patience, shown)
    report = await desk.task_report(run_id)
    if hosted and report is not None:  # it is on its way, and nobody else is here
        await quiet(desk, requester)
    return Ended(task, report, await seen(desk, run_id, 0))


def _nothing(_: TaskView) -> None: ...


def _progress(task: TaskView) -> None:
    if task.phase in PHASES:
        child = output.line(task.label or task.child_session_key)
        click.echo(output.dim(f"{child} is {PHASES[task.phase]}…"), err=True)


def _accepted(spawned: Spawned, requester: str) -> None:
    child = output.line(spawned.child_session_key)
    click.echo(f"Accepted: run {output.line(spawned.run_id)} in {child}.")
    _attached(spawned)
    click.echo(output.dim(f"The report: antiphon sessions history {output.line(requester)}"), err=True)


def _attached(spawned: Spawned, *, err: bool = False) -> None:
    if receipt := spawned.attachments:
        files = "1 file" if receipt.count == 1 else f"{receipt.count} files"
        folder = output.line(receipt.rel_dir)
        click.echo(f"Attached: {files}, {receipt.total_bytes} bytes, in {folder}.", err=err)


def _told(settings: Settings, spawned: Spawned, ended: Ended, seconds: float) -> int:
    if settings.json:
        import msgspec

        known = ended.task or {"runId": spawned.run_id, "childSessionKey": spawned.child_session_key}
        output.emit({**msgspec.to_builtins(known), "report": ended.report})
    elif ended.status is None:
        child = output.line(spawned.child_session_key)
        click.echo(
            f"There is no report after {seconds:g} s; the sub-agent goes on. "
            f"Look later: antiphon sessions history {child}",
            err=True,
        )
    else:
        click.echo(output.clean(ended.report or f"Status: {ended.status}"))
    if ended.status == "ok":
        return 0
    return (outcome(ended.run) if ended.run else 0) or 1
