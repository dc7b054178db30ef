"""How many sessions there are and which were used last, as of a moment ago.

`health` is asked thousands of times a second and must not look anything up; this looks now and then, and only when
something has changed since.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from antiphon.clock import Clock
from antiphon.errors import AntiphonError
from antiphon.gateway.subscriptions import READER
from antiphon.operations import ListFilter, Operations

log = logging.getLogger(__name__)

EVERY = 5.0  # seconds between two looks, at least
RECENT = 5
AGENTS = 32  # whose last sessions are looked at


class Survey:
    def __init__(self, operations: Operations, clock: Clock, agents: Sequence[str], path: str) -> None:
        self._operations = operations
        self._clock = clock
        self._agents = agents[:AGENTS]
        self._nothing: dict[str, Any] = {"path": path, "count": 0, "recent": []}
        self._found: dict[str | None, dict[str, Any]] = {}
        self.stale = asyncio.Event()
        self.stale.set()

    def of(self, agent_id: str | None) -> dict[str, Any]:
        """The sessions of an agent; of all of them without one."""
        return self._found.get(agent_id, self._nothing)

    async def run(self) -> None:
        while True:
            await self.stale.wait()
            self.stale.clear()
            try:
                await self.look()
            except AntiphonError as error:
                log.warning("Sessions were not counted: %s", error)
            await asyncio.sleep(EVERY)

    async def look(self) -> None:
        summary = await self._operations.summary(READER)
        for agent_id in (None, *self._agents):
            page = await self._operations.list(READER, ListFilter(limit=RECENT, agent_id=agent_id))
            now = self._clock.now()
            self._found[agent_id] = {
                **self._nothing,
                "count": summary.sessions if agent_id is None else summary.agents.get(agent_id, 0),
                "recent": [
                    {"key": view.key, "updatedAt": view.updated_at, "age": max(0, now - view.updated_at)}
                    for view in page.sessions
                ],
            }
