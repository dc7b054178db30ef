"""What every test shares."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kills", type=int, default=180, help="seeded kills of the crash suite")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
