"""Removes directories and containers of sessions that nothing has used for a while, as `sandbox.prune` says.

Every process does so for its own state directory. A directory in which a command runs is never removed, nor is one that
holds the workspace of an agent.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from antiphon.clock import Clock
from antiphon.engine.runs import command_rows
from antiphon.store import Store
from antiphon.workspace.locations import locate_own_directory
from antiphon.workspace.sandbox_directories import list_idle_directories, remove_directory

if TYPE_CHECKING:
    from antiphon.config import Config

log = logging.getLogger(__name__)

PRUNE_INTERVAL_SECONDS = 3600.0
MAX_REMOVED_PER_PASS = 200


class SandboxPruner:
    def __init__(self, config: Config, store: Store, clock: Clock, state_dir: Path) -> None:
        self._config = config
        self._store = store
        self._clock = clock
        self._state_dir = state_dir

    async def run(self) -> None:
        """Remove what is idle now, and then at intervals, until cancelled."""
        while True:
            try:
                await self.prune()
            except Exception:
                log.exception("Failed to remove idle directories of sandboxed sessions")
            await asyncio.sleep(PRUNE_INTERVAL_SECONDS)

    async def prune(self) -> list[Path]:
        """Remove idle directories, a bounded number of them, and return them; containers that nothing uses, too."""
        await self._prune_containers()
        idle = await asyncio.to_thread(
            list_idle_directories, self._config, self._state_dir, self._clock.now()
        )
        if not idle:
            return []
        busy = await self._find_busy_directories()
        removed: list[Path] = []
        for path, before in idle.items():
            if path in busy or len(removed) == MAX_REMOVED_PER_PASS:
                continue
            if await asyncio.to_thread(remove_directory, path, before):
                removed.append(path)
        if removed:
            log.info("Removed %d idle directories of sandboxed sessions", len(removed))
        return removed

    async def _prune_containers(self) -> None:
        from antiphon.workspace.docker_containers import (  # noqa: PLC0415 - not needed by most gateways
            has_containers,
            remove_unused_containers,
        )

        if has_containers(self._config):
            removed = await remove_unused_containers(self._config, self._state_dir, self._clock.now())
            if removed:
                log.info("Removed %d unused containers of sessions", len(removed))

    async def _find_busy_directories(self) -> set[Path]:
        rows = await self._store.read(command_rows.list_live_sessions)
        return {
            locate_own_directory(
                self._config.get_agent(row["agent_id"]),
                row["session_key"],
                self._state_dir,
                sandboxed=bool(row["sandboxed"]),
            )
            for row in rows
            if row["agent_id"] in self._config.agent_ids
        }
