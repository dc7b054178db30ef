"""What every door of the gateway is given: the house behind it, the guard before it, and when it closes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec

from antiphon.app import App
from antiphon.gateway.auth import AuthGuard
from antiphon.paths import DATABASE_FILE_NAME


class GatewayState(msgspec.Struct, frozen=True, kw_only=True):
    house: App
    guard: AuthGuard
    state_dir: Path
    started_at: int
    """Milliseconds, by the house's clock."""
    closing: asyncio.Event = msgspec.field(default_factory=asyncio.Event)
    """Set when the process begins to stop: whoever streams ends its stream."""

    @property
    def database_path(self) -> str:
        """Where clients are told that everything is."""
        return str(self.state_dir / DATABASE_FILE_NAME)
