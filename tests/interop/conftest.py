"""Collected only by `scripts/interop`: what these tests drive comes from npm, and the suite needs no network."""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path

import pytest

from interop.page import hosting
from support.interop_processes import Gateway, Openclaw, start_gateway

PAYMENTS = """
import antiphon

@antiphon.tool(ask=True)
def pay(amount: int) -> str:
    "Pays an amount."
    return f"{amount} paid"

tools = [pay]
"""

collect_ignore_glob = [] if os.environ.get("ANTIPHON_INTEROP") else ["test_*.py"]


@pytest.fixture(scope="session")
def control_ui() -> Generator[str]:
    """The origin that the Control UI is loaded from."""
    with hosting() as origin:
        yield origin


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory, control_ui: str) -> Generator[Gateway]:
    """One for the tests of a file, which keep apart by using sessions of their own."""
    with start_gateway(tmp_path_factory.mktemp("gateway"), [control_ui]) as gateway:
        yield gateway


@pytest.fixture
def payments(tmp_path: Path, control_ui: str) -> Generator[Gateway]:
    """A gateway with a tool whose calls wait for a person."""
    with start_gateway(tmp_path / "payments", [control_ui], python_tools=PAYMENTS) as gateway:
        yield gateway


@pytest.fixture
def openclaw(tmp_path: Path) -> Openclaw:
    openclaw = Openclaw(tmp_path / "openclaw")
    openclaw.write_config()
    return openclaw
