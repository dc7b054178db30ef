"""What the tests of the gateway share."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from support.gateway_http import HttpGatewayFixture, open_http_gateway
from support.gateway_ws import GatewayFixture, open_gateway


@pytest.fixture
async def http_gateway(tmp_path: Path, anyio_backend: str) -> AsyncGenerator[HttpGatewayFixture]:
    """Every HTTP door open, and one agent that says what it heard."""
    async with open_http_gateway(tmp_path) as opened:
        yield opened


@pytest.fixture
async def gateway(tmp_path: Path, anyio_backend: str) -> AsyncGenerator[GatewayFixture]:
    """A whole gateway, WebSocket and HTTP, with one agent that says what it heard."""
    async with open_gateway(tmp_path) as gateway:
        yield gateway
