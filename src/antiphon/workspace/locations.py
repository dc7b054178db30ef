"""Where agents work: one directory per agent, and one below it per sub-agent."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from antiphon import keys
from antiphon.paths import expand_home

if TYPE_CHECKING:
    from antiphon.config import AgentConfig

WORKSPACES_DIRECTORY_NAME = "workspaces"
SUBAGENTS_DIRECTORY_NAME = "subagents"


def locate_agent_workspace(agent: AgentConfig, state_dir: Path) -> Path:
    """Return the directory of an agent: the configured one, else one in the state directory."""
    if agent.workspace is not None:
        return expand_home(agent.workspace)
    return state_dir / WORKSPACES_DIRECTORY_NAME / agent.id


def locate_session_workspace(agent: AgentConfig, session_key: str, state_dir: Path) -> Path:
    """Return the directory a session works in: a sub-agent has its own, every other session its agent's."""
    workspace = locate_agent_workspace(agent, state_dir)
    key = keys.parse(session_key)
    if key.shape == "subagent":
        return workspace / SUBAGENTS_DIRECTORY_NAME / key.id
    return workspace
