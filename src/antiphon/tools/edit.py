"""The tool `edit`: replaces a text in a file that the session has read."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from antiphon.engine.toolbox import Tool, ToolOutput, ToolRequest
from antiphon.tools._adapter import ToolArguments, build_tool
from antiphon.tools._file_changes import render_changes
from antiphon.workspace.files import WorkspaceFiles

TOOL_DESCRIPTION = (
    "Replace a text in a file of the workspace that you have read. The old text must occur exactly once, unless "
    "replaceAll is set. It is refused as stale if the file was changed since you read it."
)
_ARGUMENT_ALIASES = {
    "file_path": "path",
    "filePath": "path",
    "old_string": "oldText",
    "old_text": "oldText",
    "new_string": "newText",
    "new_text": "newText",
    "replace_all": "replaceAll",
}


class EditArguments(ToolArguments, frozen=True):
    path: Annotated[str, Meta(description="The file, relative to the workspace.")]
    old_text: Annotated[str, Meta(description="The exact text to replace, with its whitespace.")]
    new_text: Annotated[str, Meta(description="The text to put in its place; empty to delete it.")]
    replace_all: Annotated[bool, Meta(description="Replace every occurrence.")] = False


def edit(files: WorkspaceFiles) -> Tool:
    async def run(call: ToolRequest, arguments: EditArguments) -> ToolOutput:
        change = await files.edit(
            call.caller,
            call.key,
            arguments.path,
            arguments.old_text,
            arguments.new_text,
            replace_all=arguments.replace_all,
        )
        return render_changes([change])

    return build_tool(
        "edit",
        TOOL_DESCRIPTION,
        EditArguments,
        run,
        aliases=_ARGUMENT_ALIASES,
        has_side_effects=True,
        reaches_sessions=False,
    )
