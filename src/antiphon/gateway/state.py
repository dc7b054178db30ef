"""State shared by all transports: the application, the authenticator, and whether the gateway is closing."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec

from antiphon.access import READ_SCOPE, Caller
from antiphon.app import App
from antiphon.gateway.auth import Authenticator
from antiphon.paths import DATABASE_FILE_NAME

READ_ONLY_CALLER = Caller.operator({READ_SCOPE})
"""The caller of reads that the gateway does on its own behalf."""


class GatewayState(msgspec.Struct, frozen=True, kw_only=True):
    app: App
    authenticator: Authenticator
    state_dir: Path
    started_at: int
    """Milliseconds, by the application's clock."""
    closing: asyncio.Event = msgspec.field(default_factory=asyncio.Event)
    """Set when shutdown begins; streams end then."""

    @property
    def database_path(self) -> str:
        """Path of the database as shown to clients."""
        return str(self.state_dir / DATABASE_FILE_NAME)
