"""What a workspace adds to the system prompt: files about the agent and its work, and the list of its skills.

People write these files, and agents may keep them up to date. Only a main session reads MEMORY.md, since other sessions
have other readers; a sub-agent reads what describes the work. Files that do not change are read once.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from antiphon import keys
from antiphon.errors import AntiphonError
from antiphon.workspace.directory import WorkspaceDirectory
from antiphon.workspace.locations import locate_agent_workspace
from antiphon.workspace.skills import has_skills, read_skills

if TYPE_CHECKING:
    from antiphon.config import AgentConfig

BOOTSTRAP_FILE_NAMES = ("AGENTS.md", "SOUL.md", "USER.md", "IDENTITY.md", "TOOLS.md")
MAIN_SESSION_FILE_NAMES = (*BOOTSTRAP_FILE_NAMES, "MEMORY.md")
SUBAGENT_FILE_NAMES = ("AGENTS.md", "TOOLS.md")
MAX_BOOTSTRAP_FILE_BYTES = 4 * 1024 * 1024
WORKSPACE_FILES_HEADING = "# Files of your workspace"


class _FileVersion(NamedTuple):
    name: str
    modified_ns: int
    size: int
    inode: int


class _Snapshot(NamedTuple):
    """The files and skills of a workspace at one moment."""

    versions: Sequence[_FileVersion]
    has_skills: bool


class BootstrapReader:
    """Reads the files for system prompts, and keeps what they contribute until one of them changes.

    Runs that start in the same iteration of the event loop share one snapshot: their claims were committed together, so
    all of them were accepted before it. A snapshot makes system calls, which hand the interpreter to the thread that
    commits; one for each run took a tenth of its CPU time.
    """

    def __init__(self, state_dir: Path) -> None:
        self._state_dir = state_dir
        self._workspaces: dict[str, Path] = {}
        self._contributions: dict[tuple[str, Sequence[str]], tuple[Sequence[_FileVersion], str]] = {}
        self._snapshots: dict[tuple[str, Sequence[str]], _Snapshot | None] = {}
        """Snapshots of the current iteration of the event loop."""

    async def read(self, agent: AgentConfig, session_key: str) -> str:
        """Return the part of the system prompt that the agent's workspace contributes; empty without such files."""
        workspace = self._workspaces.get(agent.id)
        if workspace is None:
            workspace = self._workspaces[agent.id] = locate_agent_workspace(agent, self._state_dir)
        names = select_file_names(session_key)
        if (
            agent.workspace is None
        ):  # the state directory is on a local disk, where this is cheaper than a thread
            snapshot = self._share_snapshot(agent.id, workspace, names)
        else:
            snapshot = await asyncio.to_thread(_take_snapshot, workspace, names)
        if snapshot is None:
            return ""
        known = self._contributions.get((agent.id, names))
        if known is None or known[0] != snapshot.versions:
            texts = await asyncio.to_thread(_read_texts, workspace, snapshot.versions)
            text = format_files(texts, agent.bootstrap_max_chars, agent.bootstrap_total_max_chars)
            known = self._contributions[agent.id, names] = (snapshot.versions, text)
        skills = await read_skills(workspace, session_key) if snapshot.has_skills else ""
        return "\n\n".join(filter(None, [known[1], skills]))

    def _share_snapshot(self, agent_id: str, workspace: Path, names: Sequence[str]) -> _Snapshot | None:
        """Return the snapshot of a workspace that the runs of this iteration of the event loop share."""
        if not self._snapshots:
            asyncio.get_running_loop().call_soon(self._snapshots.clear)
        key = (agent_id, names)
        if key not in self._snapshots:
            self._snapshots[key] = _take_snapshot(workspace, names)
        return self._snapshots[key]


def select_file_names(session_key: str) -> Sequence[str]:
    """Return which files a session reads."""
    key = keys.parse(session_key)
    if key.is_spawned:
        return SUBAGENT_FILE_NAMES
    return MAIN_SESSION_FILE_NAMES if key.shape == "main" else BOOTSTRAP_FILE_NAMES


def format_files(texts: Sequence[tuple[str, str]], max_characters: int, max_total_characters: int) -> str:
    """Return the files under their names, within the limits per file and in total, with a note where a file is cut."""
    if not texts:
        return ""
    parts = [WORKSPACE_FILES_HEADING]
    left = max_total_characters
    for name, text in texts:
        content = text.strip()
        shown = content[: min(max_characters, left)]
        left -= len(shown)
        note = ""
        if len(shown) < len(content):
            note = f"\n\n[{name} is cut after {len(shown)} of {len(content)} characters.]"
        parts.append(f"## {name}\n\n{shown}{note}")
    return "\n\n".join(parts)


def _take_snapshot(workspace: Path, names: Sequence[str]) -> _Snapshot | None:
    """Return a snapshot of a workspace, or None if it does not exist."""
    if not os.path.isdir(workspace):  # noqa: PTH112 - before every run
        return None
    found: list[_FileVersion] = []
    for name in names:
        try:
            status = os.stat(f"{workspace}/{name}")  # noqa: PTH116 - before every run
        except OSError:
            continue
        found.append(_FileVersion(name, status.st_mtime_ns, status.st_size, status.st_ino))
    return _Snapshot(found, has_skills(workspace))


def _read_texts(workspace: Path, files: Sequence[_FileVersion]) -> Sequence[tuple[str, str]]:
    texts = [(file.name, _read_text(workspace, file.name)) for file in files]
    return [(name, text) for name, text in texts if text.strip()]


def _read_text(workspace: Path, name: str) -> str:
    try:
        with WorkspaceDirectory(workspace) as directory:
            return (
                directory.read_file(name, MAX_BOOTSTRAP_FILE_BYTES)
                .data.decode(errors="replace")
                .replace("\0", "")
            )
    except AntiphonError as error:
        return f"[{name} could not be read. {error.what}]"
    except OSError as error:
        return f"[{name} could not be read: {error.strerror}.]"
