"""Renders what a file tool has changed."""

from __future__ import annotations

from collections.abc import Sequence

from antiphon.engine.toolbox import ToolOutput
from antiphon.workspace.files import FileChange


def render_changes(changes: Sequence[FileChange]) -> ToolOutput:
    lines = [
        f"Deleted {change.path!r}."
        if change.bytes is None
        else f"Wrote {change.path!r} ({change.bytes} bytes)."
        for change in changes
    ]
    files = [{"path": change.path, "bytes": change.bytes} for change in changes]
    return ToolOutput(text="\n".join(lines), details={"files": files})
