"""What every door of the gateway is given: the house behind it, the guard before it, and when it closes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec

from antiphon.gateway.auth import Guard
from antiphon.host import House
from antiphon.paths import DATABASE


class Gateway(msgspec.Struct, frozen=True, kw_only=True):
    house: House
    guard: Guard
    state_dir: Path
    started_at: int
    """Milliseconds, by the house's clock."""
    closing: asyncio.Event = msgspec.field(default_factory=asyncio.Event)
    """Set when the process begins to stop: whoever streams ends its stream."""

    @property
    def database(self) -> str:
        """Where clients are told that everything is."""
        return str(self.state_dir / DATABASE)
