"""The program of a sandboxed session runs in that sandbox, or not at all."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest

from support.acp_agents import describe_agents, open_acp_app
from support.sandboxes import hide_every_bubblewrap

pytestmark = [pytest.mark.anyio, pytest.mark.sqlite_only]

SCRIPT = Path(__file__).parents[1] / "support" / "scripted_acp_agent.py"


def describe_sandboxed(**sandbox: Any) -> dict[str, Any]:
    program = {"command": "/usr/bin/python3", "args": ["-I", "-S", "-c", SCRIPT.read_text()]}
    return describe_agents(program, {"sandbox": {"mode": "all", **sandbox}})


@pytest.mark.requirement("M3", "B2", "AT7")
async def test_the_program_of_a_sandboxed_session_sees_only_its_sandbox(tmp_path: Path) -> None:
    secret = tmp_path / "outside"
    secret.write_text("secret")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        async with open_acp_app(tmp_path / "state", describe_sandboxed()) as app:
            assert await app.reply("cwd") == "/workspace"
            assert await app.reply(f"read:{secret}") == "FileNotFoundError"
            assert await app.reply(f"connect:{listener.getsockname()[1]}") == "unreachable"
            if os.geteuid() == 0:
                assert await app.reply("uid") != "0"


@pytest.mark.requirement("M3", "B1")
async def test_a_sandboxed_program_reaches_the_listed_hosts_and_no_others(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listed, socket.create_server(("127.0.0.1", 0)) as other:
        ports = [each.getsockname()[1] for each in (listed, other)]
        config = describe_sandboxed(network="proxy", allowHosts=[f"127.0.0.1:{ports[0]}"])
        async with open_acp_app(tmp_path, config) as app:
            assert await app.reply(f"tunnel:{ports[0]}") == "200"
            assert await app.reply(f"tunnel:{ports[1]}") == "403"


@pytest.mark.requirement("M3", "B2", "AT6")
async def test_without_a_sandbox_the_program_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide_every_bubblewrap(monkeypatch)
    async with open_acp_app(tmp_path, describe_sandboxed()) as app:
        view = await app.ask("uid")
        assert (view.state, view.error_code) == ("error", "sandbox_unavailable")
        assert view.error is not None and "bwrap" in view.error
