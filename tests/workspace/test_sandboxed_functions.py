"""An agent that is a Python function runs in the gateway's process: it is never taken for sandboxed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from antiphon.config import parse
from support.agents_fixture import make_agents_config, open_agents_fixture
from support.app_fixture import MAIN

pytestmark = pytest.mark.requirement("B2", "AT7")

FUNCTION: dict[str, Any] = {
    "id": "main",
    "default": True,
    "runtime": {"type": "function", "target": "json:dumps"},
}


@pytest.mark.parametrize(
    ("defaults", "own", "is_warned"),
    [
        ({"mode": "all"}, {}, True),
        ({}, {"mode": "non-main"}, True),
        ({"mode": "all"}, {"mode": "off"}, False),
        ({"mode": "off"}, {}, False),
    ],
)
def test_a_function_that_is_to_be_sandboxed_is_a_warning(
    defaults: dict[str, Any], own: dict[str, Any], *, is_warned: bool
) -> None:
    written = {"agents": {"defaults": {"sandbox": defaults}, "list": [{**FUNCTION, "sandbox": own}]}}
    warnings = [text for text in parse(written)[1] if "cannot be sandboxed" in text]
    assert ["'agents.list[0].sandbox.mode' to 'off'" in text for text in warnings] == [True] * is_warned


@pytest.mark.anyio
async def test_a_session_that_is_sandboxed_since_before_runs_no_function(tmp_path: Path) -> None:
    async with open_agents_fixture(
        make_agents_config(agents={"defaults": {"sandbox": {"mode": "all"}}}), tmp_path
    ) as agents:
        await agents.open_sessions(MAIN)
    async with open_agents_fixture(make_agents_config(FUNCTION), tmp_path) as agents:
        ended = await agents.ask("hello")
        assert (ended.state, ended.reply) == ("error", None)
        assert "outside any sandbox" in (ended.error or "")
        other = await agents.ask("hello", "agent:main:other")
        assert "outside any sandbox" not in (other.error or "")
