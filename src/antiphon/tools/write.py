"""The tool `write`: creates a file in the workspace, or replaces one that the session has read."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from antiphon.engine.toolbox import Tool, ToolOutput, ToolRequest
from antiphon.tools._adapter import ToolArguments, build_tool
from antiphon.tools._file_changes import render_changes
from antiphon.workspace.files import MAX_WRITE_BYTES, WorkspaceFiles

TOOL_DESCRIPTION = (
    "Create a file in the workspace, or replace one that you have read. Missing directories are created. At most "
    f"{MAX_WRITE_BYTES // 1024} KiB of text. It is refused as stale if the file was changed since you read it."
)


class WriteArguments(ToolArguments, frozen=True):
    path: Annotated[str, Meta(description="The file, relative to the workspace.")]
    content: Annotated[str, Meta(description="The whole new text.")]


def write(files: WorkspaceFiles) -> Tool:
    async def run(call: ToolRequest, arguments: WriteArguments) -> ToolOutput:
        return render_changes([await files.write(call.caller, call.key, arguments.path, arguments.content)])

    return build_tool(
        "write",
        TOOL_DESCRIPTION,
        WriteArguments,
        run,
        aliases={"file_path": "path", "filePath": "path"},
        has_side_effects=True,
        reaches_sessions=False,
    )
