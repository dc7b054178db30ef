"""The containers of sandboxed sessions: listed, and removed when nothing has used them for a while.

Each start of a command records a use of the container in its directories. A container in which a command runs is never
removed.
"""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from antiphon.workspace.docker import OWN_DIRECTORY_LABEL, STATE_LABEL
from antiphon.workspace.docker_engine import DockerEngine, EngineRefused, find_engine_socket
from antiphon.workspace.sandbox_backend import BackendFailed
from antiphon.workspace.sandbox_directories import get_idle_hours, list_prune_settings

if TYPE_CHECKING:
    from antiphon.config import Config

IN_USE_SECONDS = 60.0  # a command may be about to start


class SandboxContainer(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A container of one or several sessions."""

    name: str
    image: str
    state: str
    created_at: int
    used_at: int
    """When a command last used it, as milliseconds since 1970; 0 if its directories have been removed."""
    directory: str


def has_containers(config: Config) -> bool:
    """Whether commands of any agent may run in containers."""
    agents = [config.get_agent(agent_id).sandbox for agent_id in config.agent_ids]
    return any(
        agent.backend == "docker" or (agent.backend is None and agent.docker.model_fields_set)
        for agent in agents
    )


async def list_containers(state_dir: Path) -> list[SandboxContainer]:
    """Return the containers of a state directory, the one used last first; none if no engine answers."""
    try:
        engine = DockerEngine(find_engine_socket())
        found = await engine.list_containers(f"{STATE_LABEL}={await asyncio.to_thread(state_dir.resolve)}")
    except (BackendFailed, EngineRefused):
        return []
    containers = [
        SandboxContainer(
            name=each["Names"][0].lstrip("/"),
            image=each["Image"],
            state=each["State"],
            created_at=each["Created"] * 1000,
            used_at=_find_used_at(Path(each["Labels"][OWN_DIRECTORY_LABEL])),
            directory=each["Labels"][OWN_DIRECTORY_LABEL],
        )
        for each in found
    ]
    return sorted(containers, key=lambda container: -container.used_at)


async def remove_unused_containers(
    config: Config, state_dir: Path, now: int, *, idle_hours: float | None = None
) -> list[SandboxContainer]:
    """Remove containers that nothing has used for this long, and return them.

    Without `idle_hours`, `sandbox.prune` says when, and containers that have existed for `maxAgeDays` are removed, too.
    """
    settings = await asyncio.to_thread(list_prune_settings, config, state_dir)
    removed: list[SandboxContainer] = []
    for container in await list_containers(state_dir):
        prune = settings.get(Path(container.directory), ())  # none if its directories have been removed
        hours = max(map(get_idle_hours, prune), default=0.0) if idle_hours is None else idle_hours
        days = max((each.max_age_days or math.inf for each in prune), default=0.0)
        unused_seconds = (now - container.used_at) / 1000
        age_seconds = (now - container.created_at) / 1000
        is_due = unused_seconds > hours * 3600 or (idle_hours is None and age_seconds > days * 86_400)
        if is_due and unused_seconds > IN_USE_SECONDS and await _remove_unless_busy(container.name):
            removed.append(container)
    return removed


async def _remove_unless_busy(name: str) -> bool:
    try:
        engine = DockerEngine(find_engine_socket())
        if await engine.is_busy(name):
            return False
        await engine.remove_container(name)
    except (BackendFailed, EngineRefused):
        return False
    return True


def _find_used_at(directory: Path) -> int:
    try:
        return round(directory.stat().st_mtime * 1000)
    except OSError:
        return 0
