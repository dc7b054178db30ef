"""Cached session counts and the most recently used sessions.

`health` is requested thousands of times a second and must not query the store. This cache is refreshed periodically,
and only if something has changed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from antiphon.clock import Clock
from antiphon.errors import AntiphonError
from antiphon.gateway.subscriptions import READ_ONLY_CALLER
from antiphon.operations import ListFilter, Operations

log = logging.getLogger(__name__)

MIN_REFRESH_SECONDS = 5.0  # between two refreshes
RECENT_SESSIONS_PER_AGENT = 5
MAX_AGENTS_COUNTED = 32  # agents with recent sessions in the cache


class SessionCounts:
    def __init__(self, operations: Operations, clock: Clock, agents: Sequence[str], path: str) -> None:
        self._operations = operations
        self._clock = clock
        self._agents = agents[:MAX_AGENTS_COUNTED]
        self._empty_counts: dict[str, Any] = {"path": path, "count": 0, "recent": []}
        self._counts_by_agent: dict[str | None, dict[str, Any]] = {}
        self.stale = asyncio.Event()
        self.stale.set()

    def get_counts(self, agent_id: str | None) -> dict[str, Any]:
        """Return the counts of an agent, or of all agents for None."""
        return self._counts_by_agent.get(agent_id, self._empty_counts)

    async def run(self) -> None:
        while True:
            await self.stale.wait()
            self.stale.clear()
            try:
                await self.refresh()
            except AntiphonError as error:
                log.warning("Sessions were not counted: %s", error)
            await asyncio.sleep(MIN_REFRESH_SECONDS)

    async def refresh(self) -> None:
        summary = await self._operations.get_summary(READ_ONLY_CALLER)
        for agent_id in (None, *self._agents):
            page = await self._operations.list(
                READ_ONLY_CALLER, ListFilter(limit=RECENT_SESSIONS_PER_AGENT, agent_id=agent_id)
            )
            now = self._clock.now()
            self._counts_by_agent[agent_id] = {
                **self._empty_counts,
                "count": summary.sessions if agent_id is None else summary.agents.get(agent_id, 0),
                "recent": [
                    {"key": view.key, "updatedAt": view.updated_at, "age": max(0, now - view.updated_at)}
                    for view in page.sessions
                ],
            }
