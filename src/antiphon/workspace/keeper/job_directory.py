"""The directory of a job: its specification, its output and its result.

jobs/<digest of the key>                on disk before the command starts
                         spec.json      written before the command starts
                         output.head    the first part of what it prints
                         output.tail.N  the last parts, in files of equal size
                         result.json    written when it has ended
                         acknowledged   the client has stored the result and will not ask for this key again
"""

from __future__ import annotations

import contextlib
import json
import os
from io import FileIO
from pathlib import Path
from typing import Any, TypeAlias

from antiphon.workspace.keeper.output_budget import OutputBudget

HEAD_BYTES = 5 * 1024 * 1024  # of output kept from the beginning
TAIL_SEGMENT_BYTES = 2560 * 1024  # the end is kept in the last two files of this size

Json: TypeAlias = dict[str, Any]


class Output:
    """What a command prints, within a bounded space on disk: its beginning and its end.

    What does not fit on a full disk, or into the space for all outputs, is left out.
    """

    def __init__(self, folder: Path, budget: OutputBudget) -> None:
        self._folder = folder
        self._budget = budget
        self.total_bytes = 0
        self.taken_bytes = 0
        """The space that was taken for it."""
        self._segment = 0
        self._file: FileIO | None = (folder / "output.head").open("ab", buffering=0)

    def append(self, data: bytes) -> None:
        while data:
            if self.total_bytes < HEAD_BYTES:
                room = HEAD_BYTES - self.total_bytes
            else:
                segment, used = divmod(self.total_bytes - HEAD_BYTES, TAIL_SEGMENT_BYTES)
                if segment + 1 != self._segment:
                    self._begin_segment(segment + 1)
                room = TAIL_SEGMENT_BYTES - used
            self._write(data[:room])
            self.total_bytes += len(data[:room])
            data = data[room:]

    def _begin_segment(self, segment: int) -> None:
        self.close()
        self._segment = segment
        with contextlib.suppress(OSError):
            self._remove_segment(segment - 2)
            self._file = (self._folder / f"output.tail.{segment}").open("ab", buffering=0)

    def _remove_segment(self, segment: int) -> None:
        path = self._folder / f"output.tail.{segment}"
        with contextlib.suppress(FileNotFoundError):
            size = path.stat().st_size
            path.unlink()
            self._budget.give_back(size)
            self.taken_bytes -= size

    def _write(self, data: bytes) -> None:
        if self._file is None:
            return
        taken = self._budget.take(len(data))
        try:
            written = self._file.write(data[:taken])
        except OSError:
            written = 0
        self._budget.give_back(taken - written)
        self.taken_bytes += written
        if written < len(data):  # what follows would be at a wrong offset
            self.close()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def list_output_parts(folder: Path) -> list[tuple[int, Path]]:
    """Return the kept parts of an output in order, each with its offset in all that was printed."""
    parts = [(0, folder / "output.head")]
    for path in folder.glob("output.tail.*"):
        parts.append((HEAD_BYTES + (int(path.suffix[1:]) - 1) * TAIL_SEGMENT_BYTES, path))
    return sorted(part for part in parts if part[1].exists())


def measure_output(folder: Path) -> int:
    """Return how many bytes were printed, kept or not."""
    return max((offset + path.stat().st_size for offset, path in list_output_parts(folder)), default=0)


def read_output(folder: Path, offset: int, limit: int) -> tuple[int, bytes]:
    """Return kept output from `offset` on, and its true offset: what is not kept any more is skipped.

    It ends where the next missing part begins.
    """
    start, data = offset, b""
    for at, path in list_output_parts(folder):
        end = at + path.stat().st_size
        position = start + len(data)
        if end <= position or len(data) >= limit:
            continue
        if at > position:
            if data:
                break
            start = position = at
        with path.open("rb") as file:
            file.seek(position - at)
            data += file.read(limit - len(data))
    return start, data


def load_result(folder: Path) -> Json | None:
    """Return how a job ended, or None if that is not known. After a power failure, the file may be there but empty."""
    try:
        return json.loads((folder / "result.json").read_bytes())
    except (FileNotFoundError, ValueError):
        return None


def load_spec(folder: Path) -> Json:
    """Return what was asked for; nothing if it was lost in a power failure."""
    try:
        return json.loads((folder / "spec.json").read_bytes())
    except (OSError, ValueError):
        return {}


def load_process_id(folder: Path) -> str:
    """Return the id that the processes of a job have; the directory's name, for jobs of earlier versions."""
    return load_spec(folder).get("processId", folder.name)


def write_json(path: Path, value: Json, *, survives_power_failure: bool = True) -> None:
    """Write a file atomically."""
    draft = path.with_name(path.name + ".draft")
    with draft.open("w", encoding="utf-8") as file:
        json.dump(value, file)
        file.flush()
        if survives_power_failure:
            os.fsync(file.fileno())
    draft.rename(path)
    if survives_power_failure:
        sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
