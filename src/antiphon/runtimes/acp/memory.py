"""Stores what another process of a program needs to continue: its session id, and what it has been told.

The memory itself belongs to the program and is on this machine, so this is a file on the same machine and not a row.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

log = logging.getLogger(__name__)

DIRECTORY_NAME = "acp"
KEPT_DAYS = 90


class ProgramMemory(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    program: str
    """Digest of the program: another one cannot load the session."""
    session_id: str
    seen_seq: int
    """The last entry of the transcript that the program was told about."""
    run_number: int
    """The run that told it. Its entries are the program's own."""


class MemoryFiles:
    """The files of a state directory. Everything here blocks."""

    def __init__(self, state_dir: Path) -> None:
        self._directory = state_dir / DIRECTORY_NAME

    def load(self, conversation: str, program: str) -> ProgramMemory | None:
        try:
            memory = msgspec.json.decode(self._locate(conversation).read_bytes(), type=ProgramMemory)
        except (OSError, msgspec.MsgspecError):
            return None
        return memory if memory.program == program else None

    def save(self, conversation: str, memory: ProgramMemory) -> None:
        path = self._locate(conversation)
        self._directory.mkdir(mode=0o700, exist_ok=True)
        temporary = path.with_suffix(".new")
        temporary.write_bytes(msgspec.json.encode(memory))
        temporary.replace(path)

    def remove(self, conversation: str) -> None:
        with suppress(OSError):
            self._locate(conversation).unlink()

    def prune(self) -> None:
        """Remove files that were not used for `KEPT_DAYS`."""
        before = time.time() - KEPT_DAYS * 86_400
        with suppress(OSError):
            for path in self._directory.iterdir():
                if path.stat().st_mtime < before:
                    path.unlink()

    def _locate(self, conversation: str) -> Path:
        return self._directory / f"{hashlib.sha256(conversation.encode()).hexdigest()[:32]}.json"


def compute_program_digest(argv: Sequence[str], cwd: str) -> str:
    return hashlib.sha256(msgspec.json.encode([list(argv), cwd])).hexdigest()[:16]
