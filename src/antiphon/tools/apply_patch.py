"""The tool `apply_patch`: changes several files of the workspace, all or none."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from antiphon.engine.toolbox import Tool, ToolOutput, ToolRequest
from antiphon.tools._adapter import ToolArguments, build_tool
from antiphon.tools._file_changes import render_changes
from antiphon.workspace.files import WorkspaceFiles

TOOL_DESCRIPTION = (
    "Change several files of the workspace at once: all of them, or none if one change does not fit. Files that are "
    "updated or deleted must have been read before."
)
INPUT_DESCRIPTION = (
    "The patch. It begins with '*** Begin Patch' and ends with '*** End Patch'. Sections: '*** Add File: path' with "
    "lines '+text'; '*** Delete File: path'; '*** Update File: path', optionally '*** Move to: path', with hunks of "
    "'@@' and lines that begin with ' ', '-' or '+'."
)


class ApplyPatchArguments(ToolArguments, frozen=True):
    input: Annotated[str, Meta(description=INPUT_DESCRIPTION)]


def apply_patch(files: WorkspaceFiles) -> Tool:
    async def run(call: ToolRequest, arguments: ApplyPatchArguments) -> ToolOutput:
        return render_changes(await files.apply_patch(call.caller, call.key, arguments.input))

    return build_tool(
        "apply_patch",
        TOOL_DESCRIPTION,
        ApplyPatchArguments,
        run,
        aliases={"patch": "input"},
        has_side_effects=True,
        reaches_sessions=False,
    )
