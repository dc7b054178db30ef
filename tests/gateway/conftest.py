"""What the tests of the gateway share."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from sockets import Gate, opened
from website import Site, served


@pytest.fixture
async def site(tmp_path: Path, anyio_backend: str) -> AsyncGenerator[Site]:
    """Every HTTP door open, and one agent that says what it heard."""
    async with served(tmp_path) as opened:
        yield opened


@pytest.fixture
async def gate(tmp_path: Path, anyio_backend: str) -> AsyncGenerator[Gate]:
    """A whole gateway, WebSocket and HTTP, with one agent that says what it heard."""
    async with opened(tmp_path) as gate:
        yield gate
