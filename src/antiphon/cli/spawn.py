"""`antiphon spawn`: starts a sub-agent for a session and optionally waits for its report."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from antiphon.cli import _output
from antiphon.cli._errors import get_run_exit_code
from antiphon.cli._options import Settings, common_options, gateway_options
from antiphon.cli._param_types import FiniteNumberParam
from antiphon.errors import InvalidInput
from antiphon.messages import THINKING_LEVELS

if TYPE_CHECKING:
    from antiphon.cli._backend import Backend
    from antiphon.engine.collaboration.attachments import SpawnAttachment
    from antiphon.operations.collaboration_types import SpawnResult, TaskView
    from antiphon.operations.types import RunView, SpawnRequest

MAX_TASK_SECONDS = 30 * 86_400
PHASE_DESCRIPTIONS = {
    "running": "at work",
    "waiting": "waiting for its own sub-agents",
    "announcing": "wording its report",
}


class SubagentOutcome(NamedTuple):
    """A task when the wait for it is over, its report if it has ended, and its first run.

    The run is None once its session is deleted, the task once it ended too long ago to be listed; the report is kept.
    """

    task: TaskView | None
    report: str | None
    run: RunView | None

    @property
    def status(self) -> str | None:
        """How the task ended; None if it has not."""
        if self.task is None:
            return self.run.state if self.run else "ok"
        return self.task.status if self.task.phase == "settled" else None


class WaitSecondsParam(FiniteNumberParam):
    """Seconds to wait; the option without a value waits until the end."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            number = float(value)
        except ValueError:
            self.fail(
                f"{value!r} is not a number of seconds; write TASK before --wait, or --wait=60.", param, ctx
            )
        return number if number == math.inf else super().convert(value, param, ctx)


@click.command(
    help="Start a sub-agent in a session of its own. It reports its result to the requesting session."
)
@click.argument("task")
@click.option("--agent", metavar="ID", help="Agent to spawn; default: the agent of the session.")
@click.option(
    "--for",
    "requester",
    metavar="SESSION",
    default="main",
    show_default=True,
    help="Session that receives the report.",
)
@click.option("--label", metavar="NAME", help="Short name of the sub-agent.")
@click.option("--model", metavar="PROVIDER/MODEL", help="Model to use instead of the agent's.")
@click.option("--thinking", type=click.Choice(THINKING_LEVELS), help="Thinking level of this sub-agent.")
@click.option(
    "--timeout",
    type=FiniteNumberParam("seconds", 0, MAX_TASK_SECONDS),
    metavar="SECONDS",
    help="Stop the sub-agent after this time; default: from the configuration.",
)
@click.option(
    "--attach",
    "files",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="File to copy into its workspace; may be repeated.",
)
@click.option(
    "--cleanup",
    type=click.Choice(["delete", "keep"]),
    default="keep",
    show_default=True,
    help="What happens to the transcript after the report.",
)
@click.option(
    "--announce",
    type=click.Choice(["channel", "parent", "none"]),
    default="channel",
    show_default=True,
    help="Where the report goes: to the session's chat, only to the session (waking it), or nowhere.",
)
@click.option(
    "--wait",
    "seconds",
    type=WaitSecondsParam("seconds", 0, MAX_TASK_SECONDS),
    is_flag=False,
    flag_value=math.inf,
    metavar="[SECONDS]",
    help="Wait for the report and print it.",
)
@click.option(
    "--key", metavar="IDEMPOTENCY", help="Idempotency key: a repeated key does not start another one."
)
@gateway_options
@common_options
@click.pass_obj
def command(
    settings: Settings, requester: str, files: Sequence[Path], seconds: float | None, **options: Any
) -> int:
    from antiphon.engine.validation import validate_idempotency_key
    from antiphon.operations.types import SpawnRequest

    validate_idempotency_key(options["key"])
    if not options["task"].strip():
        raise InvalidInput("The task is empty.", "Describe what to do.", field="task")
    request = SpawnRequest(
        task=options["task"],
        label=options["label"],
        agent_id=options["agent"],
        model=options["model"],
        thinking=options["thinking"],
        run_timeout_seconds=options["timeout"],
        cleanup=options["cleanup"],
        announce=options["announce"],
        attachments=_read_attachments(settings, files),
        idempotency_key=options["key"],
    )
    spawned, ended = asyncio.run(_spawn_and_wait(settings, request, requester, seconds))
    if seconds is not None and ended:
        return _print_outcome(settings, spawned, ended, seconds)
    if settings.json:
        _output.print_json(spawned)
    else:
        _print_accepted_with_hint(spawned, requester)
    return 0


def _read_attachments(settings: Settings, files: Sequence[Path]) -> list[SpawnAttachment]:
    """Read the files. Those of a gateway elsewhere are checked there: its limits are not known here."""
    from antiphon.errors import TooLarge

    if files and not settings.named_gateways:
        maximum = settings.load().config.tools.sessions_spawn.attachments.max_file_bytes
        for path in files:
            if (size := path.stat().st_size) > maximum:
                raise TooLarge(
                    f"Attachment {path.name!r} has {size} bytes; at most {maximum} are allowed.",
                    "Shorten it, or split it.",
                    field="attachments",
                )
    return [_read_attachment(path) for path in files]


def _read_attachment(path: Path) -> SpawnAttachment:
    """Read a file, as text unless it is not text or is longer as text in JSON than in base64."""
    from base64 import b64encode

    import msgspec

    from antiphon.engine.collaboration.attachments import SpawnAttachment

    content = path.read_bytes()
    encoded = b64encode(content).decode()
    try:
        text = content.decode()
    except UnicodeDecodeError:
        text = None
    if text is None or len(msgspec.json.encode(text)) > len(encoded) + 2:
        return SpawnAttachment(name=path.name, content=encoded, encoding="base64")
    return SpawnAttachment(name=path.name, content=text)


async def _spawn_and_wait(
    settings: Settings, request: SpawnRequest, requester: str, seconds: float | None
) -> tuple[SpawnResult, SubagentOutcome | None]:
    from antiphon.cli._backend import open_backend_for_messages, remember_replicas, wait_with_handover
    from antiphon.cli._references import ensure_session_exists
    from antiphon.cli._wait import explain_early_exit, print_accepted_run

    async def wait_for_outcome(backend: Backend) -> SubagentOutcome:
        left = None if seconds is None else max(0, until - loop.time())
        return await _wait_for_outcome(backend, spawned.run_id, requester, left, silent=silent, hosted=hosted)

    loop = asyncio.get_running_loop()
    async with open_backend_for_messages(settings) as (backend, gateway):
        await ensure_session_exists(backend, requester)
        silent, hosted = settings.json or seconds is None, gateway is None
        if seconds is not None:
            await remember_replicas(settings, gateway)
        # It may be accepted before the acknowledgement arrives.
        with explain_early_exit(requester, hosted=hosted):
            spawned = await backend.spawn(request, requester)
        if seconds is None and gateway:
            return spawned, None
        if not silent:
            print_accepted_run(spawned.run_id, spawned.child_session_key)
            _print_attachments(spawned, err=True)
        until = loop.time() + (seconds or 0)
        with explain_early_exit(spawned.child_session_key, hosted=hosted, run_id=spawned.run_id):
            ended = await wait_with_handover(backend, wait_for_outcome)
        return spawned, ended


async def _wait_for_outcome(
    backend: Backend, run_id: str, requester: str, seconds: float | None, *, silent: bool, hosted: bool
) -> SubagentOutcome:
    from antiphon.cli._wait import wait_for_run_if_exists, wait_for_task, wait_until_idle

    timeout = None if seconds in {None, math.inf} else seconds
    shown = _ignore_progress if silent else _print_progress
    task = await wait_for_task(backend, requester, run_id, timeout, shown)
    report = await backend.get_report(run_id)
    # The report is still to be delivered, and only this process can do that.
    if hosted and report is not None:
        await wait_until_idle(backend, requester)
    return SubagentOutcome(task, report, await wait_for_run_if_exists(backend, run_id, 0))


def _ignore_progress(_: TaskView) -> None: ...


def _print_progress(task: TaskView) -> None:
    if task.phase in PHASE_DESCRIPTIONS:
        child = _output.clean_line(task.label or task.child_session_key)
        click.echo(_output.dim(f"{child} is {PHASE_DESCRIPTIONS[task.phase]}…"), err=True)


def _print_accepted_with_hint(spawned: SpawnResult, requester: str) -> None:
    child = _output.clean_line(spawned.child_session_key)
    click.echo(f"Accepted: run {_output.clean_line(spawned.run_id)} in {child}.")
    _print_attachments(spawned)
    click.echo(
        _output.dim(
            f"The report: {_output.format_program()} sessions history {_output.clean_line(requester)}"
        ),
        err=True,
    )


def _print_attachments(spawned: SpawnResult, *, err: bool = False) -> None:
    if receipt := spawned.attachments:
        files = _output.format_count(receipt.count, "file")
        folder = _output.clean_line(receipt.rel_dir)
        click.echo(
            f"Attached: {files}, {_output.format_count(receipt.total_bytes, 'byte')}, in {folder}.", err=err
        )


def _print_outcome(settings: Settings, spawned: SpawnResult, ended: SubagentOutcome, seconds: float) -> int:
    if settings.json:
        import msgspec

        known = ended.task or {"runId": spawned.run_id, "childSessionKey": spawned.child_session_key}
        _output.print_json({**msgspec.to_builtins(known), "report": ended.report})
    elif ended.status is None:
        child = _output.clean_line(spawned.child_session_key)
        click.echo(
            f"No report after {seconds:g} s; the sub-agent continues. "
            f"Look later: {_output.format_program()} sessions history {child}",
            err=True,
        )
    else:
        click.echo(_output.clean_text(ended.report or f"Status: {ended.status}"))
    if ended.status == "ok":
        return 0
    return (get_run_exit_code(ended.run) if ended.run else 0) or 1
