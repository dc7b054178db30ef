"""The space that the outputs of all jobs of a keeper may occupy together.

The outputs of jobs that have ended make room for new ones, the oldest first, and those that a client has not read yet
last. The output of a running job is never removed; what exceeds the space is not kept.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path


class OutputBudget:
    def __init__(self) -> None:
        self.limit_bytes: int | None = None
        self._used_bytes = 0
        self._ended: dict[Path, int] = {}
        """The directories of ended jobs, in the order of their ends, with the bytes of output in them."""

    def load(self, folders: Iterable[Path]) -> None:
        """Count the outputs of jobs that an earlier keeper left, all of which have ended."""
        ends: list[tuple[float, Path]] = []
        for folder in folders:
            with contextlib.suppress(OSError):
                ends.append(((folder / "result.json").stat().st_mtime, folder))
        for _, folder in sorted(ends):
            self.add_ended(folder, 0)

    def take(self, count: int) -> int:
        """Take space for output that is to be written. Returns how many of the bytes there is space for."""
        if self.limit_bytes is not None:
            if self._used_bytes + count > self.limit_bytes:
                self._make_room(self._used_bytes + count - self.limit_bytes)
            count = max(0, min(count, self.limit_bytes - self._used_bytes))
        self._used_bytes += count
        return count

    def give_back(self, count: int) -> None:
        self._used_bytes -= count

    def has_room(self) -> bool:
        """Whether there is space for any further output."""
        free = self.take(1)
        self.give_back(free)
        return free > 0

    def add_ended(self, folder: Path, taken: int) -> None:
        """Record that a job has ended, which had taken that much space."""
        kept = _measure(folder)
        self._used_bytes += kept - taken
        self._ended[folder] = kept

    def forget(self, folder: Path) -> None:
        """Record that the output of an ended job was removed."""
        self._used_bytes -= self._ended.pop(folder, 0)

    def _make_room(self, count: int) -> None:
        free = 0
        for is_read in (True, False):
            for folder in list(self._ended):
                if free >= count:
                    return
                if (folder / "acknowledged").exists() == is_read:
                    free += self._ended[folder]
                    remove_output(folder)
                    self.forget(folder)


def remove_output(folder: Path) -> None:
    for part in folder.glob("output.*"):
        part.unlink(missing_ok=True)


def _measure(folder: Path) -> int:
    total = 0
    for part in folder.glob("output.*"):
        with contextlib.suppress(OSError):
            total += part.stat().st_size
    return total
