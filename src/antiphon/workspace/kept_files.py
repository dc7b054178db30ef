"""Files that tools leave in a workspace: whole outputs of commands, and files in results of MCP servers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from antiphon.access import Caller
from antiphon.errors import AntiphonError, StaleFile
from antiphon.workspace.directory import TEMPORARY_FILE_PREFIX, WorkspaceDirectory
from antiphon.workspace.files import MAX_READ_BYTES, locate_writable, plan_replacement, work_in_directory
from antiphon.workspace.locations import SessionWorkspace

COMMAND_OUTPUTS_DIRECTORY, RESULT_FILES_DIRECTORY = ".antiphon/exec", ".antiphon/mcp"
MAX_COMMAND_OUTPUTS, MAX_RESULT_FILES = 20, 50
MAX_WRITE_ATTEMPTS = 10


class KeptFiles:
    """A directory in each workspace for the newest files of one kind."""

    def __init__(self, locate: Callable[[Caller], SessionWorkspace], directory: str, max_files: int) -> None:
        self._locate = locate
        self._directory = directory
        self._max_files = max_files

    async def keep(self, caller: Caller, name: str, data: bytes) -> str:
        """Write a file where the tools of the caller's session can open it, and return its path.

        The oldest files are deleted.

        Raises:
            Forbidden: the workspace is read-only.
        """
        path = f"{self._directory}/{name}"
        mount, (inner,) = locate_writable(self._locate(caller), [path])
        folder = inner.rpartition("/")[0]

        def keep(directory: WorkspaceDirectory) -> None:
            _write(directory, inner, data)
            names = [
                each
                for each in directory.list_names(folder)
                if each != name and not each.startswith(TEMPORARY_FILE_PREFIX)
            ]
            excess = max(0, len(names) + 1 - self._max_files)
            for each in names[: min(excess, self._max_files)]:
                with suppress(AntiphonError):  # what an agent has put there need not be a file
                    _write(directory, f"{folder}/{each}", None)

        await work_in_directory(mount, keep)
        return path


def _write(directory: WorkspaceDirectory, path: str, data: bytes | None) -> None:
    """Replace a file whatever its content is, or delete it. Concurrent calls may write the same file."""
    for attempt in range(MAX_WRITE_ATTEMPTS):
        try:
            directory.replace_files([plan_replacement(directory, path, data)], MAX_READ_BYTES)
            return
        except StaleFile:
            if attempt + 1 == MAX_WRITE_ATTEMPTS:
                raise
