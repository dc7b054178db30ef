"""Reads the end of the log file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from antiphon.paths import LOG_FILE_NAME


def read_log_tail(state_dir: Path, cursor: int | None, limit: int, most: int) -> dict[str, Any]:
    """Return the lines after a cursor, or the last ones without a cursor. Blocks: call it in a thread."""
    path = state_dir / LOG_FILE_NAME
    try:
        size = path.stat().st_size
    except OSError:
        size = 0
    reset = cursor is not None and cursor > size  # the file was rotated
    start = max(0, size - most) if cursor is None or reset else max(cursor, size - most)
    content = b""
    if size > start:
        with path.open("rb") as file:
            file.seek(start)
            content = file.read(size - start)
    lines = content.decode(errors="replace").splitlines()
    if start > 0 and cursor is None and lines:
        lines = lines[1:]  # incomplete
    cut = len(lines) > limit
    return {
        "file": str(path),
        "cursor": size,
        "size": size,
        "lines": lines[-limit:],
        "truncated": cut or (start > 0 and start != cursor),
        "reset": reset,
    }
