"""Gathers the changes of sessions and broadcasts them as `sessions.changed` events.

Changes are collected for a moment, so that a busy session has its row read once for all of them.
"""

from __future__ import annotations

import asyncio
from typing import Any

from antiphon.clock import Clock
from antiphon.errors import AntiphonError
from antiphon.gateway import wire
from antiphon.gateway.state import READ_ONLY_CALLER
from antiphon.gateway.ws import frames
from antiphon.gateway.ws.connection import ConnectionSet
from antiphon.operations.operations import Operations

GATHER_SECONDS = 0.1  # how long changes of a session are collected before its row is read
MAX_ROWS_PER_BROADCAST = 500

ChangesByKind = dict[str, dict[str, Any]]


class SessionChanges:
    """The changes that subscribers to all sessions have not been sent yet."""

    def __init__(self, connections: ConnectionSet, operations: Operations, clock: Clock) -> None:
        self._connections = connections
        self._operations = operations
        self._clock = clock
        self._changes_by_session: dict[str, ChangesByKind] = {}
        """Latest changes by session and by phase or reason."""
        self._changed = asyncio.Event()

    def record(self, session_key: str, change: dict[str, Any]) -> None:
        """Record a change for the next broadcast, if anyone is subscribed."""
        if next(self._connections.iter_session_subscribers(), None) is None:
            return
        changes = self._changes_by_session.setdefault(session_key, {})
        kind = change.get("phase") or change.get("reason") or ""
        changes.pop(kind, None)  # keep the latest change last
        if kind in {"end", "error"}:
            changes.pop("start", None)  # the row already shows that the run has ended
        changes[kind] = {"ts": self._clock.now(), **change}
        self._changed.set()

    async def run(self) -> None:
        """Broadcast changes until cancelled."""
        while True:
            await self._changed.wait()
            await asyncio.sleep(GATHER_SECONDS)
            self._changed.clear()
            changes, self._changes_by_session = self._changes_by_session, {}
            await self._broadcast(changes)
            del changes  # free them while waiting for the next ones

    async def _broadcast(self, changes_by_session: dict[str, ChangesByKind]) -> None:
        """Send each change once; the last one of a session includes its current row."""
        keys = list(changes_by_session)[:MAX_ROWS_PER_BROADCAST]
        rows = dict(zip(keys, await asyncio.gather(*map(self._load_row, keys)), strict=True))
        subscribers = list(self._connections.iter_session_subscribers())
        for key, changes in changes_by_session.items():
            *earlier, last = (
                {"sessionKey": wire.format_session_key(key), **change} for change in changes.values()
            )
            for payload in (*earlier, {**(rows.get(key) or {}), **last}):
                text = frames.encode_event("sessions.changed", payload)
                for connection in subscribers:
                    connection.send_event(text)

    async def _load_row(self, key: str) -> dict[str, Any] | None:
        try:
            row = wire.build_session_dict(
                await self._operations.sessions.describe(
                    READ_ONLY_CALLER, wire.format_session_key(key), with_file=False
                )
            )
        except AntiphonError:
            return None
        row.pop("transcriptPath", None)  # the longest field; it never changes and is part of lists
        return row
