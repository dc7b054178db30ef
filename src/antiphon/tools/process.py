"""The tool `process`: looks at the commands of a session, writes to them and ends them."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from antiphon.clock import Clock
from antiphon.engine.runs.command_rows import LIVE_STATES
from antiphon.engine.toolbox import Tool, ToolOutput, ToolRequest
from antiphon.errors import InvalidInput, NotFound
from antiphon.store import Row
from antiphon.tools._adapter import ToolArguments, build_tool, clamp_value
from antiphon.tools._adapter import describe_clamped_range as describe_range
from antiphon.tools._command_results import build_details, describe_state, render_command
from antiphon.workspace.command_launch import CommandLauncher
from antiphon.workspace.command_output import MAX_SHOWN_CHARACTERS, cut_middle
from antiphon.workspace.commands import Commands

MAX_POLL_SECONDS = 120
DEFAULT_LOG_LINES, MAX_LOG_LINES = 200, 2000
MAX_NAMED_COMMAND_CHARACTERS = 120
TOOL_DESCRIPTION = (
    "Look at the commands that exec started in this session. list: all of them. poll: the state and new output, after "
    "waiting for the end up to `timeout` seconds. log: lines of the output, by default the last ones. write: write "
    "`data` to a background command; `eof` closes its input. kill: stop it. remove: stop it and forget it."
)


class ProcessArguments(ToolArguments, frozen=True):
    action: Annotated[
        Literal["list", "poll", "log", "write", "kill", "remove"], Meta(description="What to do.")
    ]
    session_id: Annotated[str, Meta(description="The command, as exec and list name it.")] | None = None
    data: Annotated[str, Meta(description="For write. A line ends with a newline.")] = ""
    eof: Annotated[bool, Meta(description="For write: close the input afterwards.")] = False
    offset: Annotated[int, Meta(ge=0, description="For log: lines to skip.")] | None = None
    limit: Annotated[int, describe_range("For log: number of lines.", 1, MAX_LOG_LINES)] = DEFAULT_LOG_LINES
    timeout: Annotated[int, describe_range("For poll: seconds to wait.", 0, MAX_POLL_SECONDS)] = 0


def create_process_tool(commands: Commands, launcher: CommandLauncher, clock: Clock) -> Tool:
    async def run(call: ToolRequest, arguments: ProcessArguments) -> ToolOutput:
        if call.caller.session_key is None:
            raise InvalidInput(
                "Only a session has commands.", "Name the session to act as.", field="sessionKey"
            )
        session_key = call.caller.session_key
        if arguments.action == "list":
            return _render_list(await commands.list_of_session(session_key), clock.now())
        row = await _find(commands, session_key, arguments.session_id)
        match arguments.action:
            case "poll":
                return await _poll(commands, call, row, arguments.timeout, clock)
            case "log":
                return await _show_log(commands, row, arguments)
            case "write":
                return await _write(commands, call, row, arguments)
            case "kill":
                return render_command(await _kill(commands, row), clock.now())
            case _:
                await commands.remove(await _kill(commands, row))
                return ToolOutput(text=f"Removed {row['id']!r}.", details={"sessionId": row["id"]})

    tool = build_tool(
        "process",
        TOOL_DESCRIPTION,
        ProcessArguments,
        run,
        aliases={"session_id": "sessionId", "id": "sessionId", "chars": "data"},
        has_side_effects=True,
        reaches_sessions=False,
    )
    return msgspec.structs.replace(tool, unavailable=launcher.explain_unavailable)


async def _find(commands: Commands, session_key: str, command_id: str | None) -> Row:
    if command_id is None:
        raise InvalidInput("The argument 'sessionId' is missing.", "Use list to find it.", field="sessionId")
    row = await commands.find_of_session(session_key, command_id)
    if row is None:
        raise NotFound(
            f"This session has no command {command_id[:80]!r}.", "Use list to see them.", field="sessionId"
        )
    return row


def _render_list(rows: list[Row], now: int) -> ToolOutput:
    lines = [
        f"{row['id']}  {describe_state(row, now)}  {row['command'][:MAX_NAMED_COMMAND_CHARACTERS]}"
        for row in rows
    ]
    return ToolOutput(
        text="\n".join(lines) or "This session has started no commands.",
        details={"sessions": [build_details(row, now) for row in rows]},
    )


async def _poll(commands: Commands, call: ToolRequest, row: Row, timeout: int, clock: Clock) -> ToolOutput:
    row = await commands.wait_for_end(row, clamp_value(timeout, 0, MAX_POLL_SECONDS))
    start, until = await commands.advance_reading(row, call.key)
    output = await commands.read_output(row, start, until)
    if output is None:  # it is not kept any more, or on another host
        output = (row["output"] or "") if start == 0 else ""
    note = "" if row["state"] not in LIVE_STATES or commands.is_here(row) else "It runs on another replica."
    result = render_command(
        row, clock.now(), output=cut_middle(output, MAX_SHOWN_CHARACTERS).text or "(no new output)", note=note
    )
    return msgspec.structs.replace(result, is_error=False)


async def _show_log(commands: Commands, row: Row, arguments: ProcessArguments) -> ToolOutput:
    text = await commands.read_output(row, 0, await commands.measure_output(row))
    lines = (text if text is not None else row["output"] or "").splitlines()
    limit = clamp_value(arguments.limit, 1, MAX_LOG_LINES)
    start = max(0, len(lines) - limit) if arguments.offset is None else arguments.offset
    page = lines[start : start + limit]
    shown = cut_middle("\n".join(page), MAX_SHOWN_CHARACTERS).text
    place = f"[Lines {start + 1} to {start + len(page)} of {len(lines)}]" if page else f"[{len(lines)} lines]"
    return ToolOutput(text=f"{place}\n{shown}", details={"sessionId": row["id"], "totalLines": len(lines)})


async def _write(commands: Commands, call: ToolRequest, row: Row, arguments: ProcessArguments) -> ToolOutput:
    if row["state"] not in LIVE_STATES:
        raise InvalidInput(f"The command {row['id']!r} has ended.", "Start another one.", field="sessionId")
    if not commands.is_here(row):
        raise InvalidInput(f"The command {row['id']!r} runs on another replica.", "Start another one.")
    await commands.write(row, call.key, arguments.data, eof=arguments.eof)
    written = f"Wrote {len(arguments.data)} characters to {row['id']!r}."
    return ToolOutput(text=written + (" Its input is closed." if arguments.eof else ""))


async def _kill(commands: Commands, row: Row) -> Row:
    return await commands.stop(row, "killed") if row["state"] in LIVE_STATES else row
