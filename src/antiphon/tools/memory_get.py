"""The tool `memory_get`: lines of a note in the workspace."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, field

from antiphon.engine.toolbox import Tool, ToolRequest
from antiphon.tools._adapter import MAX_SAFE_INTEGER, ToolArguments, build_tool, clamp_value
from antiphon.tools._adapter import describe_clamped_range as describe_range
from antiphon.workspace.memory import MAX_LINES, MemoryPage, WorkspaceMemory

DEFAULT_LINES = 100
TOOL_DESCRIPTION = (
    "Read lines of one of your notes: MEMORY.md or a file in memory/, as memory_search names it."
)


class MemoryGetArguments(ToolArguments, frozen=True):
    path: Annotated[str, Meta(description="MEMORY.md or memory/….md")]
    first_line: Annotated[int, describe_range("The first line.", 1, MAX_SAFE_INTEGER)] = field(
        default=1, name="from"
    )
    lines: Annotated[int, describe_range("Maximum number of lines.", 1, MAX_LINES)] = DEFAULT_LINES


def memory_get(memory: WorkspaceMemory) -> Tool:
    async def run(call: ToolRequest, arguments: MemoryGetArguments) -> MemoryPage:
        return await memory.read(
            call.caller,
            arguments.path,
            max(1, arguments.first_line),
            clamp_value(arguments.lines, 1, MAX_LINES),
        )

    return build_tool(
        "memory_get",
        TOOL_DESCRIPTION,
        MemoryGetArguments,
        run,
        aliases={"offset": "from", "limit": "lines"},
        reaches_sessions=False,
    )
