"""Where agents work: one directory per agent, and one below it per sub-agent.

A sandboxed session has a directory of its own in the state directory, so that it sees nothing of its agent's.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from antiphon import keys
from antiphon.access import Caller
from antiphon.errors import InvalidInput
from antiphon.paths import expand_home

if TYPE_CHECKING:
    from antiphon.config import AgentConfig, Config

WORKSPACES_DIRECTORY_NAME = "workspaces"
SUBAGENTS_DIRECTORY_NAME = "subagents"
SANDBOXES_DIRECTORY_NAME = "sandboxes"
_PLAIN_NAME_PATTERN = re.compile(r"[0-9A-Za-z_-]{1,64}")
WORKSPACE_ALIAS = "/workspace"  # the name that the workspace has inside a sandbox


class SessionWorkspace(msgspec.Struct, frozen=True):
    """The directory of a session: `root`, or `below` it."""

    root: Path
    """Chosen by the operator, so it may be a link."""
    below: str = ""
    """Where agents may have put links, so it is opened without leaving `root`."""
    aliases: tuple[str, ...] = ()
    """The absolute names it has inside a sandbox."""

    @property
    def path(self) -> Path:
        return self.root / self.below


class SessionWorkspaceLocator:
    """Finds the workspace of a caller's session."""

    def __init__(self, config: Config, state_dir: Path) -> None:
        self._config = config
        self._state_dir = state_dir

    def __call__(self, caller: Caller) -> SessionWorkspace:
        if caller.agent_id is None or caller.session_key is None:
            raise InvalidInput(
                "Only a session has a workspace.", "Name the session to act as.", field="sessionKey"
            )
        agent = self._config.get_agent(caller.agent_id)
        below = locate_subagent_directory(caller.session_key)
        if caller.sandboxed and not below:
            root = locate_sandbox_workspace(agent.id, caller.session_key, self._state_dir)
        else:
            root = locate_agent_workspace(agent, self._state_dir)
        return SessionWorkspace(root, below, (WORKSPACE_ALIAS,))


def locate_agent_workspace(agent: AgentConfig, state_dir: Path) -> Path:
    """Return the directory of an agent: the configured one, else one in the state directory."""
    if agent.workspace is not None:
        return expand_home(agent.workspace).absolute()
    return state_dir / WORKSPACES_DIRECTORY_NAME / agent.id


def locate_session_workspace(agent: AgentConfig, session_key: str, state_dir: Path) -> Path:
    """Return the directory a session works in: a sub-agent has its own, every other session its agent's."""
    return locate_agent_workspace(agent, state_dir) / locate_subagent_directory(session_key)


def locate_subagent_directory(session_key: str) -> str:
    """Return the directory of a sub-agent relative to the workspace of its agent; empty for other sessions."""
    key = keys.parse(session_key)
    if key.shape != "subagent":
        return ""
    name = key.id if _PLAIN_NAME_PATTERN.fullmatch(key.id) else _hash_name(key.id)
    return f"{SUBAGENTS_DIRECTORY_NAME}/{name}"


def locate_sandbox_workspace(agent_id: str, session_key: str, state_dir: Path) -> Path:
    """Return the directory that only a sandboxed session works in."""
    return state_dir / SANDBOXES_DIRECTORY_NAME / agent_id / _hash_name(session_key)


def _hash_name(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
