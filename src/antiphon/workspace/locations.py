"""Where agents work: one directory per agent, and one below it per sub-agent.

A sandboxed session has a directory of its own, and sees of its agent's what `sandbox.workspaceAccess` allows.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import msgspec

from antiphon import keys
from antiphon.access import Caller
from antiphon.errors import InvalidInput, NotFound
from antiphon.paths import BIND_PATTERN, expand_home

if TYPE_CHECKING:
    from antiphon.config import AgentConfig, Config

WORKSPACES_DIRECTORY_NAME = "workspaces"
SUBAGENTS_DIRECTORY_NAME = "subagents"
SANDBOXES_DIRECTORY_NAME = "sandboxes"
SESSION_DIRECTORY_NAMES = (WORKSPACES_DIRECTORY_NAME, SANDBOXES_DIRECTORY_NAME)  # of the state directory
_PLAIN_NAME_PATTERN = re.compile(r"[0-9A-Za-z_-]{1,64}")
WORKSPACE_MOUNT, AGENT_WORKSPACE_MOUNT, TEMPORARY_MOUNT = "/workspace", "/agent", "/tmp"  # noqa: S108 - of sandboxes
OWN_MOUNTS = (WORKSPACE_MOUNT, AGENT_WORKSPACE_MOUNT, TEMPORARY_MOUNT)
WORKSPACE_DIRECTORY_NAME, TEMPORARY_DIRECTORY_NAME = "workspace", "tmp"
SHARED_DIRECTORY_NAME, AGENT_DIRECTORY_NAME = "_shared", "_agent"  # neither an agent id nor a hash
OWN_DIRECTORY_NAME_PATTERN = re.compile(rf"{AGENT_DIRECTORY_NAME}|[0-9a-f]{{32}}")


class Mount(msgspec.Struct, frozen=True):
    """A directory of the host, and the name it has for commands and file tools of a session."""

    target: str
    root: Path
    """Chosen by the operator, so it may be a link."""
    below: str = ""
    """Where agents may have put links, so it is opened without leaving `root`."""
    writable: bool = True

    @property
    def path(self) -> Path:
        return self.root / self.below


class SessionWorkspace(msgspec.Struct, frozen=True):
    """What a session sees of the host: the same directories for its file tools and its commands."""

    mounts: tuple[Mount, ...]
    """The first is the workspace."""
    start: str = ""
    """The directory in the workspace that relative paths begin at."""

    @property
    def workspace(self) -> Mount:
        return self.mounts[0]

    def locate(self, path: str) -> tuple[Mount, str]:
        """Return the mount that a path of a file tool is in, and the path to use for it."""
        if path and not path.startswith("/"):
            return self.workspace, f"{WORKSPACE_MOUNT}/{self.start}/{path}" if self.start else path
        given = PurePosixPath(path)
        if given.is_relative_to(self.workspace.path):
            return self.workspace, path
        for mount in reversed(self.mounts):  # the more specific ones come later
            if given.is_relative_to(mount.target):
                return mount, path
        return self.workspace, path


class SessionWorkspaceLocator:
    """Finds what the session of a caller sees."""

    def __init__(self, config: Config, state_dir: Path) -> None:
        self._config = config
        self._state_dir = state_dir

    def __call__(self, caller: Caller) -> SessionWorkspace:
        if caller.agent_id is None or caller.session_key is None:
            raise InvalidInput(
                "Only a session has a workspace.", "Name the session to act as.", field="sessionKey"
            )
        agent = self._config.get_agent(caller.agent_id)
        agent_root = locate_agent_workspace(agent, self._state_dir)
        below = locate_subagent_directory(caller.session_key)
        settings = agent.sandbox
        own = locate_own_directory(agent, caller.session_key, self._state_dir, sandboxed=caller.sandboxed)
        further = (Mount(TEMPORARY_MOUNT, own / TEMPORARY_DIRECTORY_NAME), *parse_binds(settings.binds))
        if not caller.sandboxed:
            return SessionWorkspace((Mount(WORKSPACE_MOUNT, agent_root, below), *further))
        if settings.workspace_access == "rw":
            return SessionWorkspace((Mount(WORKSPACE_MOUNT, agent_root), *further), below)
        workspace = Mount(WORKSPACE_MOUNT, own / WORKSPACE_DIRECTORY_NAME)
        if below:  # the directory of a sub-agent is its own, and holds its attachments
            workspace = Mount(WORKSPACE_MOUNT, agent_root, below)
        if settings.workspace_access == "ro":
            further = (Mount(AGENT_WORKSPACE_MOUNT, agent_root, writable=False), *further)
        return SessionWorkspace((workspace, *further))


def create_root(mount: Mount) -> None:
    """Create the directory of a mount, unless it is a bind: those belong to the operator.

    Raises:
        NotFound: there is no such directory.
    """
    if mount.target in OWN_MOUNTS:
        mount.root.mkdir(mode=0o700, parents=True, exist_ok=True)
    elif not mount.root.is_dir():
        raise NotFound(
            f"The directory {str(mount.root)!r} of a bind does not exist.", "Create it.", field="binds"
        )


def mark_used(mounts: Iterable[Mount]) -> None:
    """Record that a session uses its own directory, so that it is not removed as idle."""
    for mount in mounts:
        own = mount.root.parent
        is_ours = own.name == SHARED_DIRECTORY_NAME or OWN_DIRECTORY_NAME_PATTERN.fullmatch(own.name)
        if is_ours and mount.root.name in (WORKSPACE_DIRECTORY_NAME, TEMPORARY_DIRECTORY_NAME):
            with suppress(OSError):
                os.utime(own)


def parse_binds(binds: Sequence[str]) -> list[Mount]:
    """Return the directories that the configuration shows to sandboxes, as `source:target[:ro|rw]`."""
    found: list[Mount] = []
    for bind in binds:
        match = BIND_PATTERN.fullmatch(bind)
        assert match is not None  # the configuration was checked
        source, target, mode = match.groups()
        found.append(Mount(target, expand_home(source).absolute(), writable=mode == "rw"))
    return found


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
    if not key.is_spawned:
        return ""
    name = key.id if _PLAIN_NAME_PATTERN.fullmatch(key.id) else _hash_name(key.id)
    return f"{SUBAGENTS_DIRECTORY_NAME}/{name}"


def locate_sandboxes(agent: AgentConfig, state_dir: Path) -> Path:
    """Return the directory that holds those of sandboxed sessions."""
    chosen = agent.sandbox.workspace_root
    return expand_home(chosen).absolute() if chosen else state_dir / SANDBOXES_DIRECTORY_NAME


def locate_own_directory(agent: AgentConfig, session_key: str, state_dir: Path, *, sandboxed: bool) -> Path:
    """Return the directory of a session's own workspace and temporary files, shared as `sandbox.scope` says.

    A session that is not sandboxed shares its temporary files with no other session.
    """
    scope = agent.sandbox.scope if sandboxed else "session"
    base = locate_sandboxes(agent, state_dir)
    if scope == "shared":
        return base / SHARED_DIRECTORY_NAME
    return base / agent.id / (AGENT_DIRECTORY_NAME if scope == "agent" else _hash_name(session_key))


def _hash_name(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
