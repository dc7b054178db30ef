"""The files of a workspace that are part of the system prompt: who the agent is, and what it should know.

People write these files, and agents may keep them up to date. Only a main session reads MEMORY.md, since other sessions
have other readers; a sub-agent reads what describes the work. Files that do not change are read once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from antiphon import keys
from antiphon.errors import AntiphonError
from antiphon.workspace.directory import WorkspaceDirectory
from antiphon.workspace.locations import locate_agent_workspace

if TYPE_CHECKING:
    from antiphon.config import AgentConfig

BOOTSTRAP_FILE_NAMES = ("AGENTS.md", "SOUL.md", "USER.md", "IDENTITY.md", "TOOLS.md")
MAIN_SESSION_FILE_NAMES = (*BOOTSTRAP_FILE_NAMES, "MEMORY.md")
SUBAGENT_FILE_NAMES = ("AGENTS.md", "TOOLS.md")
MAX_FILE_BYTES = 4 * 1024 * 1024
HEADING = "# Files of your workspace"


class _FileVersion(NamedTuple):
    modified_ns: int
    size: int
    inode: int


class BootstrapReader:
    """Reads the files for system prompts, and keeps their texts until they change."""

    def __init__(self, state_dir: Path) -> None:
        self._state_dir = state_dir
        self._texts: dict[Path, tuple[_FileVersion, str]] = {}

    async def read(self, agent: AgentConfig, session_key: str) -> str:
        """Return the part of the system prompt that the agent's workspace contributes; empty without such files."""
        workspace = locate_agent_workspace(agent, self._state_dir)
        names = select_file_names(session_key)
        texts = await asyncio.to_thread(self._load_texts, workspace, names)
        if not texts:
            return ""
        return format_files(texts, agent.bootstrap_max_chars, agent.bootstrap_total_max_chars)

    def _load_texts(self, workspace: Path, names: Sequence[str]) -> list[tuple[str, str]]:
        found: list[tuple[str, str]] = []
        for name in names:
            path = workspace / name
            try:
                status = path.stat()
            except OSError:
                self._texts.pop(path, None)
                continue
            version = _FileVersion(status.st_mtime_ns, status.st_size, status.st_ino)
            known = self._texts.get(path)
            if known is None or known[0] != version:
                known = self._texts[path] = (version, _read_text(workspace, name))
            if known[1].strip():
                found.append((name, known[1]))
        return found


def select_file_names(session_key: str) -> Sequence[str]:
    """Return which files a session reads."""
    shape = keys.parse(session_key).shape
    if shape == "subagent":
        return SUBAGENT_FILE_NAMES
    return MAIN_SESSION_FILE_NAMES if shape == "main" else BOOTSTRAP_FILE_NAMES


def format_files(texts: Sequence[tuple[str, str]], max_characters: int, max_total_characters: int) -> str:
    """Return the files under their names, each and all of them within their limits; what is cut says so."""
    parts = [HEADING]
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


def _read_text(workspace: Path, name: str) -> str:
    try:
        with WorkspaceDirectory(workspace) as directory:
            return directory.read_file(name, MAX_FILE_BYTES).data.decode(errors="replace").replace("\0", "")
    except AntiphonError as error:
        return f"[{name} could not be read. {error.what}]"
    except OSError as error:
        return f"[{name} could not be read: {error.strerror}.]"
