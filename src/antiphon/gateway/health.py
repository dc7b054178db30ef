"""Presence, health and readiness of the gateway.

`health` and `system-presence` are requested thousands of times a second, so both are answered from memory.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from antiphon import __version__
from antiphon.errors import AntiphonError
from antiphon.gateway.state import READ_ONLY_CALLER, GatewayState
from antiphon.gateway.ws import frames
from antiphon.gateway.ws.connection import ConnectionSet
from antiphon.operations.types import ListFilter

log = logging.getLogger(__name__)

PRESENCE_INTERVAL_SECONDS = 1.0  # between two presence events
MAX_PRESENCE_ENTRIES = 100
MIN_REFRESH_SECONDS = 5.0  # between two counts of the sessions
RECENT_SESSIONS_PER_AGENT = 5
MAX_AGENTS_COUNTED = 32  # agents with recent sessions in the cache
STORE_PROBE_TIMEOUT_SECONDS = 2.0  # for the store to answer
HEARTBEAT_DISABLED = {
    "enabled": False,
    "every": "disabled",
    "everyMs": None,
    "prompt": "",
    "target": "none",
    "ackMaxChars": 0,
}


class Presence:
    """The connected clients, as other clients see them."""

    def __init__(self, connections: ConnectionSet) -> None:
        self._connections = connections
        self._version = 1
        self._changed = asyncio.Event()

    @property
    def state_version(self) -> dict[str, int]:
        return {"presence": self._version, "health": 1}

    def mark_changed(self) -> None:
        """Have the next broadcast sent: a client has connected or disconnected."""
        self._changed.set()

    def list_clients(self) -> list[dict[str, Any]]:
        """Return at most 100 of the connected clients."""
        found: list[dict[str, Any]] = []
        for connection in self._connections:
            if (client := connection.client) and len(found) < MAX_PRESENCE_ENTRIES:
                entry = {
                    "host": client.name or client.id,
                    "ip": client.address,
                    "version": client.version,
                    "platform": client.platform,
                    "mode": client.mode,
                    "deviceId": client.device,
                    "instanceId": client.instance,
                    "roles": [client.role],
                    "scopes": list(client.scopes),
                    "ts": connection.opened_at,
                    "reason": "connect",
                }
                found.append({name: value for name, value in entry.items() if value})
        return found

    async def run(self) -> None:
        """Broadcast changes until cancelled."""
        while True:
            await self._changed.wait()
            await asyncio.sleep(PRESENCE_INTERVAL_SECONDS)
            self._changed.clear()
            self._version += 1
            text = frames.encode_event("presence", {"presence": self.list_clients()}, self.state_version)
            self._connections.broadcast(text, droppable=True)


class Health:
    """The health report, with cached session counts that are refreshed only after something has changed."""

    def __init__(self, gateway: GatewayState) -> None:
        config = gateway.app.config
        self._operations, self._clock = gateway.app.operations, gateway.app.clock
        self._agent_ids, self._default_agent_id = config.agent_ids, config.default_agent_id
        self._empty_counts: dict[str, Any] = {"path": gateway.database_path, "count": 0, "recent": []}
        self._counts_by_agent: dict[str | None, dict[str, Any]] = {}
        self.has_stale_counts = asyncio.Event()
        """Set whenever a session changes; the sessions are then counted again."""
        self.has_stale_counts.set()

    def build_report(self) -> dict[str, Any]:
        return {
            "ok": True,
            "ts": self._clock.now(),
            "durationMs": 0,
            "version": __version__,
            "channels": {},
            "channelOrder": [],
            "channelLabels": {},
            "heartbeatSeconds": 0,
            "defaultAgentId": self._default_agent_id,
            "agents": [
                {
                    "agentId": agent_id,
                    "isDefault": agent_id == self._default_agent_id,
                    "heartbeat": HEARTBEAT_DISABLED,
                    "sessions": self._get_counts(agent_id),
                }
                for agent_id in self._agent_ids
            ],
            "sessions": self._get_counts(None),
        }

    def _get_counts(self, agent_id: str | None) -> dict[str, Any]:
        """Return the counts of an agent, or of all agents for None."""
        return self._counts_by_agent.get(agent_id, self._empty_counts)

    async def run(self) -> None:
        """Count the sessions after changes, until cancelled."""
        while True:
            await self.has_stale_counts.wait()
            self.has_stale_counts.clear()
            try:
                await self._count_sessions()
            except AntiphonError as error:
                log.warning("Failed to count sessions: %s", error)
            await asyncio.sleep(MIN_REFRESH_SECONDS)

    async def _count_sessions(self) -> None:
        summary = await self._operations.sessions.get_summary(READ_ONLY_CALLER)
        for agent_id in (None, *self._agent_ids[:MAX_AGENTS_COUNTED]):
            page = await self._operations.sessions.list(
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


async def list_readiness_failures(gateway: GatewayState) -> list[str]:
    """Return what keeps the gateway from accepting work: `closing`, `store` or both."""
    return [
        *(["closing"] if gateway.closing.is_set() else []),
        *([] if await _can_reach_store(gateway) else ["store"]),
    ]


async def _can_reach_store(gateway: GatewayState) -> bool:
    if gateway.app.store.write_error:
        return False  # the store has reported a failure: it can be read, but not written
    try:
        async with asyncio.timeout(STORE_PROBE_TIMEOUT_SECONDS):
            await gateway.app.operations.sessions.list(READ_ONLY_CALLER, ListFilter(limit=1))
    except (AntiphonError, TimeoutError) as error:
        log.warning("The store did not answer: %s", error or "it took too long")
        return False
    return True
