"""The tool `memory_search`: passages of the notes in the workspace."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from antiphon.engine.toolbox import Tool, ToolRequest
from antiphon.tools._adapter import ToolArguments, build_tool, clamp_value
from antiphon.tools._adapter import describe_clamped_range as describe_range
from antiphon.workspace.memory import MAX_RESULTS, MemorySearchResult, WorkspaceMemory

DEFAULT_RESULTS = 6
TOOL_DESCRIPTION = (
    "Search your notes (MEMORY.md and memory/*.md in the workspace) for words. Returns passages with path and lines; "
    "use memory_get to read more. Write notes with the file tools."
)


class MemorySearchArguments(ToolArguments, frozen=True):
    query: Annotated[str, Meta(description="Words to search for.")]
    max_results: Annotated[int, describe_range("Maximum number of passages.", 1, MAX_RESULTS)] = (
        DEFAULT_RESULTS
    )


def memory_search(memory: WorkspaceMemory) -> Tool:
    async def run(call: ToolRequest, arguments: MemorySearchArguments) -> MemorySearchResult:
        return await memory.search(
            call.caller, arguments.query, clamp_value(arguments.max_results, 1, MAX_RESULTS)
        )

    return build_tool(
        "memory_search",
        TOOL_DESCRIPTION,
        MemorySearchArguments,
        run,
        aliases={"max_results": "maxResults", "limit": "maxResults"},
        reaches_sessions=False,
    )
