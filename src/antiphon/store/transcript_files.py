"""Tracks which sessions have a transcript file, so that no row names a file that does not exist.

What was found and what is missing is remembered, so that listing the same sessions again needs no disk access.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import TypeAlias

SESSION_ID_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
"""Session ids that can be file names; Antiphon's own are UUIDs."""
MAX_KNOWN_FILES = 20_000
RETRY_SECONDS = 60.0  # until a missing file is looked for, and written, again
WRITE_WAIT_SECONDS = 1.0  # a row waits for its file, then it is shown without one

TranscriptWriter: TypeAlias = Callable[[list[str]], Awaitable[None]]
"""Writes the files of the sessions with these keys now."""


class TranscriptFiles:
    """The known transcript files: `get_path` answers from memory, `look_for` and `add` fill it.

    With a `writer`, `look_for` also writes missing files.
    """

    def __init__(self, folder: Path, writer: TranscriptWriter | None = None) -> None:
        self.folder = folder
        self._prefix = f"{folder}/"
        self._writer = writer
        self._paths: dict[str, str] = {}
        self.get_path = self._paths.get
        """Returns the path of a session's file, or None if no such file is known."""
        self._retry_at: dict[str, float] = {}
        self._writing: set[asyncio.Task[None]] = set()

    def add(self, session_id: str) -> None:
        self._paths[session_id] = f"{self._prefix}{session_id}.jsonl"
        if len(self._paths) > MAX_KNOWN_FILES:
            del self._paths[next(iter(self._paths))]

    def discard(self, session_id: str) -> None:
        self._paths.pop(session_id, None)

    async def look_for(self, sessions: Iterable[tuple[str, str]]) -> None:
        """Finds the files of these sessions, each given by its id and key."""
        now, paths, get_retry_at = time.monotonic(), self._paths, self._retry_at.get
        missing = {
            session_id: key
            for session_id, key in sessions
            if session_id not in paths and get_retry_at(session_id, now) <= now
        }
        if not missing:
            return
        for session_id in await asyncio.to_thread(_find_existing, self.folder, list(missing)):
            self.add(session_id)
            del missing[session_id]
        if missing and self._writer is not None:
            await self._write_files(self._writer, list(missing.values()))
        for session_id in missing:
            self._schedule_retry(session_id, now + RETRY_SECONDS)

    def _schedule_retry(self, session_id: str, retry_at: float) -> None:
        """Schedules another look for a file that is still missing, so that not every list looks for it."""
        if session_id in self._paths:
            self._retry_at.pop(session_id, None)
            return
        self._retry_at[session_id] = retry_at
        if len(self._retry_at) > MAX_KNOWN_FILES:
            del self._retry_at[next(iter(self._retry_at))]

    async def _write_files(self, writer: TranscriptWriter, keys: list[str]) -> None:
        """Starts writing and waits briefly; the write continues even if the caller does not."""
        task = asyncio.ensure_future(writer(keys))
        self._writing.add(task)
        task.add_done_callback(self._writing.discard)
        await asyncio.wait({task}, timeout=WRITE_WAIT_SECONDS)


def _find_existing(folder: Path, session_ids: list[str]) -> list[str]:
    return [
        id_
        for id_ in session_ids
        if SESSION_ID_PATTERN.fullmatch(id_) and os.path.isfile(f"{folder}/{id_}.jsonl")  # noqa: PTH113 - hundreds
    ]
