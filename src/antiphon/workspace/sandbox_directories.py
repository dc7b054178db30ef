"""The directories of sandboxed sessions: listed, and removed when nothing has used them for a while.

They hold a session's own workspace and its temporary files. Directories of agents are never touched.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from antiphon.workspace.locations import AGENT_DIRECTORY_NAME, SHARED_DIRECTORY_NAME, locate_sandboxes

if TYPE_CHECKING:
    from antiphon.config import Config

MAX_COUNTED_FILES = 100_000
_OWN_NAME_PATTERN = re.compile(rf"{AGENT_DIRECTORY_NAME}|[0-9a-f]{{32}}")


class SandboxDirectory(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A directory of one or several sessions."""

    path: str
    files: int
    bytes: int
    used_at: int
    """When a command or a file tool last used it, as milliseconds since 1970."""


def list_directories(config: Config, state_dir: Path) -> list[SandboxDirectory]:
    """Return the directories of all agents, the one used last first."""
    found = {
        path: None
        for agent_id in config.agent_ids
        for path in _find_directories(locate_sandboxes(config.get_agent(agent_id), state_dir), agent_id)
    }
    return sorted(map(_describe, found), key=lambda directory: -directory.used_at)


def remove_idle_directories(config: Config, state_dir: Path, idle_hours: float) -> list[SandboxDirectory]:
    """Remove directories that nothing has used for this long, and return them."""
    before = (time.time() - idle_hours * 3600) * 1000
    idle = [directory for directory in list_directories(config, state_dir) if directory.used_at < before]
    for directory in idle:
        shutil.rmtree(directory.path, ignore_errors=True)
    return idle


def _find_directories(root: Path, agent_id: str) -> Iterator[Path]:
    """Yield the directories with the names that Antiphon gives; nothing else in a chosen root is taken for one."""
    for candidate in (root / SHARED_DIRECTORY_NAME, *(root / agent_id).glob("*")):
        is_ours = candidate.parent == root or _OWN_NAME_PATTERN.fullmatch(candidate.name)
        if is_ours and candidate.is_dir() and not candidate.is_symlink():
            yield candidate


def _describe(path: Path) -> SandboxDirectory:
    files = size = 0
    used = path.stat().st_mtime
    for folder, _, names in os.walk(path):
        used = max(used, Path(folder).stat().st_mtime)
        for name in names:
            status = Path(folder, name).lstat()
            files, size, used = files + 1, size + status.st_size, max(used, status.st_mtime)
        if files >= MAX_COUNTED_FILES:
            break
    return SandboxDirectory(path=str(path), files=files, bytes=size, used_at=int(used * 1000))
