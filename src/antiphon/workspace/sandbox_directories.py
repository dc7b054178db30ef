"""The directories of sandboxed sessions: listed, and removed when nothing has used them for a while.

They hold a session's own workspace and its temporary files. Directories of agents are never touched.
"""

from __future__ import annotations

import math
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from antiphon.workspace.locations import (
    OWN_DIRECTORY_NAME_PATTERN,
    SHARED_DIRECTORY_NAME,
    locate_agent_workspace,
    locate_sandboxes,
)

if TYPE_CHECKING:
    from antiphon.config import Config
    from antiphon.config.sandbox import SandboxPrune

MAX_COUNTED_FILES = 100_000
MILLISECONDS_PER_HOUR = 3_600_000
_REMOVED_NAME_PREFIX = ".antiphon-removed-"


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
        _delete_tree(Path(directory.path))
    return idle


def list_idle_directories(config: Config, state_dir: Path, now: int) -> dict[Path, int]:
    """Return the directories that `sandbox.prune` allows to be removed if they were not used since the given time.

    A directory that agents share is kept for the longest of their times. What an earlier pass left is removed.
    """
    limits: dict[Path, float] = {}
    workspaces = [locate_agent_workspace(config.get_agent(agent), state_dir) for agent in config.agent_ids]
    for agent_id in config.agent_ids:
        agent = config.get_agent(agent_id)
        root = locate_sandboxes(agent, state_dir)
        for parent in (root, root / agent_id):
            for path in parent.glob(f"{_REMOVED_NAME_PREFIX}*"):
                _delete_tree(path)
    for path, settings in list_prune_settings(config, state_dir).items():
        limits[path] = max(map(get_idle_hours, settings))
    idle: dict[Path, int] = {}
    for path, hours in limits.items():
        if hours == math.inf or any(workspace.is_relative_to(path) for workspace in workspaces):
            continue
        before = now - round(hours * MILLISECONDS_PER_HOUR)
        with suppress(FileNotFoundError):  # something else removes files there
            if path.stat().st_mtime * 1000 < before and _describe(path).used_at < before:
                idle[path] = before
    return idle


def list_prune_settings(config: Config, state_dir: Path) -> dict[Path, list[SandboxPrune]]:
    """Return when the directories of sessions are to be removed, as each agent that uses them says."""
    settings: dict[Path, list[SandboxPrune]] = {}
    for agent_id in config.agent_ids:
        agent = config.get_agent(agent_id)
        for path in _find_directories(locate_sandboxes(agent, state_dir), agent_id):
            settings.setdefault(path, []).append(agent.sandbox.prune)
    return settings


def remove_directory(path: Path, before: int) -> bool:
    """Remove a directory with its files, unless it has been used since then. Returns whether it was removed."""
    aside = path.with_name(f"{_REMOVED_NAME_PREFIX}{uuid.uuid4().hex}")
    try:
        if path.stat().st_mtime * 1000 >= before:
            return False
        path.rename(aside)  # a command that starts now gets a new one
    except OSError:
        return False
    _delete_tree(aside)
    return True


def get_idle_hours(prune: SandboxPrune) -> float:
    """Return after how many hours without use a directory is removed."""
    return min((hours for hours in (prune.idle_hours, prune.max_age_days * 24) if hours), default=math.inf)


def _delete_tree(path: Path) -> None:
    """Delete a directory that no session uses, even if a command has removed permissions in it."""
    shutil.rmtree(path, ignore_errors=True)
    for folder, names, _ in os.walk(path):
        for name in names:
            if not Path(folder, name).is_symlink():
                with suppress(OSError):
                    Path(folder, name).chmod(0o700)
    shutil.rmtree(path, ignore_errors=True)


def _find_directories(root: Path, agent_id: str) -> Iterator[Path]:
    """Yield the directories whose names Antiphon gives; anything else in a configured root is ignored."""
    for candidate in (root / SHARED_DIRECTORY_NAME, *(root / agent_id).glob("*")):
        is_ours = candidate.parent == root or OWN_DIRECTORY_NAME_PATTERN.fullmatch(candidate.name)
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
