"""The tool `exec`: a shell command, which goes on in the background if it takes long."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from antiphon.clock import Clock
from antiphon.engine.runs.command_rows import LIVE_STATES, NewCommand
from antiphon.engine.toolbox import ApprovalQuestion, Tool, ToolOutput, ToolRequest
from antiphon.errors import InvalidInput
from antiphon.store import Row
from antiphon.tools._adapter import ToolArguments, build_tool, clamp_value, parse_arguments
from antiphon.tools._adapter import describe_clamped_range as describe_range
from antiphon.tools._command_results import render_command
from antiphon.workspace.command_launch import CommandLauncher, Launch, check_launch
from antiphon.workspace.command_output import cut_middle
from antiphon.workspace.commands import Commands

PROCESS_TOOL_NAME = "process"
MAX_YIELD_MS = 120_000
MAX_TIMEOUT_SECONDS = 86_400
MAX_FIRST_OUTPUT_CHARACTERS = 4000
TOOL_DESCRIPTION = (
    "Run a shell command (`sh -c`) in the workspace. It waits a while for the end; a command that takes longer goes on "
    "in the background, and you are notified when it ends: use the tool process to look at it, write to it or stop "
    "it. Start servers with background: what a command leaves running ends with it."
)
_ARGUMENT_ALIASES = {
    "cmd": "command",
    "working_dir": "workdir",
    "cwd": "workdir",
    "yield_time_ms": "yieldMs",
    "run_in_background": "background",
    "tty": "pty",
}
_IGNORED_ARGUMENTS = ("description",)


class ExecArguments(ToolArguments, frozen=True):
    command: Annotated[str, Meta(description="The command line.")]
    workdir: Annotated[str, Meta(description="Where to run it. Default: the workspace.")] | None = None
    env: Annotated[dict[str, str], Meta(description="Variables to set in addition.")] | None = None
    yield_ms: (
        Annotated[
            int, describe_range("Milliseconds to wait before it goes on in the background.", 0, MAX_YIELD_MS)
        ]
        | None
    ) = None
    background: Annotated[bool, Meta(description="Start it in the background, with its input open.")] = False
    timeout: (
        Annotated[int, describe_range("Seconds after which it is stopped.", 1, MAX_TIMEOUT_SECONDS)] | None
    ) = None
    pty: Annotated[bool, Meta(description="Run it in a terminal.")] = False


def create_exec_tool(commands: Commands, launcher: CommandLauncher, clock: Clock) -> Tool:
    async def run(call: ToolRequest, arguments: ExecArguments) -> ToolOutput:
        caller, launch = call.caller, _build_launch(launcher, call, arguments)
        settings = launcher.get_settings(caller)
        if not await commands.is_known(call.key):
            launcher.require_permission(caller, launch)
        new = _describe_command(call, launch, launcher.find_backend(caller))
        wait_seconds = _compute_wait(arguments, settings.background_ms)
        async with commands.showing_output(call.key, call.output_listener):
            row = await commands.execute(
                new,
                lambda: launcher.build_spec(caller, launch),
                wait_seconds if PROCESS_TOOL_NAME in call.tool_names else None,
            )
        if row["state"] in LIVE_STATES:
            return await _render_running(row, commands, clock, is_reported=settings.notify_on_exit)
        if row["exit_code"] and (fault := await launcher.explain_failed_start(caller, row["output"] or "")):
            return ToolOutput(text=f"Not started: {fault}", is_error=True)
        return render_command(row, clock.now())

    async def find_question(call: ToolRequest) -> ApprovalQuestion | None:
        if await commands.is_known(call.key):
            return None  # it was allowed before it started
        try:
            arguments = parse_arguments(ExecArguments, _rename(call))
            return launcher.build_question(call.caller, _build_launch(launcher, call, arguments))
        except InvalidInput:
            return None  # the call itself will say so

    tool = build_tool(
        "exec",
        TOOL_DESCRIPTION,
        ExecArguments,
        run,
        aliases=_ARGUMENT_ALIASES,
        ignored=_IGNORED_ARGUMENTS,
        has_side_effects=True,
        reaches_sessions=False,
    )
    return msgspec.structs.replace(
        tool, aliases=("bash",), needs_approval=find_question, unavailable=launcher.explain_unavailable
    )


def _build_launch(launcher: CommandLauncher, call: ToolRequest, arguments: ExecArguments) -> Launch:
    """Return the command that a call asks for, with the limits of its agent; a malformed one is refused."""
    if call.caller.agent_id is None or call.caller.session_key is None:
        raise InvalidInput("Only a session runs commands.", "Name the session to act as.", field="sessionKey")
    longest = launcher.get_settings(call.caller).timeout_seconds
    is_followed = PROCESS_TOOL_NAME in call.tool_names
    launch = Launch(
        command=arguments.command,
        workdir=arguments.workdir,
        env=arguments.env or {},
        timeout_seconds=clamp_value(arguments.timeout or longest, 1, longest),
        stdin=arguments.background and is_followed,
        pty=arguments.pty,
    )
    check_launch(launch)
    return launch


def _compute_wait(arguments: ExecArguments, default_ms: int) -> float:
    """Return the seconds after which a command goes on in the background."""
    milliseconds = default_ms if arguments.yield_ms is None else arguments.yield_ms
    return 0.0 if arguments.background else clamp_value(milliseconds, 0, MAX_YIELD_MS) / 1000


def _describe_command(call: ToolRequest, launch: Launch, backend: str) -> NewCommand:
    caller = call.caller
    assert caller.agent_id is not None
    assert caller.session_key is not None
    return NewCommand(
        key=call.key,
        session_key=caller.session_key,
        agent_id=caller.agent_id,
        sandboxed=caller.sandboxed,
        run_id=call.run_id,
        backend=backend,
        command=launch.command,
        workdir=launch.workdir or "",
        timeout_seconds=launch.timeout_seconds,
    )


def _rename(call: ToolRequest) -> dict[str, object]:
    return {
        _ARGUMENT_ALIASES.get(name, name): value
        for name, value in call.arguments.items()
        if name not in _IGNORED_ARGUMENTS
    }


async def _render_running(row: Row, commands: Commands, clock: Clock, *, is_reported: bool) -> ToolOutput:
    """Render a command that goes on in the background, with what it has printed so far."""
    output = ""
    if total := await commands.measure_output(row):
        output = await commands.read_output(row, 0, total) or ""
    note = "It goes on in the background. " + (
        "You are notified when it ends; use the tool process to look at it before."
        if is_reported
        else "Use the tool process to look at it."
    )
    return render_command(
        row, clock.now(), output=cut_middle(output, MAX_FIRST_OUTPUT_CHARACTERS).text, note=note
    )
