"""MCP's own conformance suites, its Inspector, and the command lines of Claude Code and Codex against a gateway."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from antiphon.gateway import mcp
from support.client_models import ClientModel, ScriptedCall
from support.gateway_ws import WRITE, open_gateway
from support.interop_processes import CACHE, COMMAND, NODE, Gateway, run_program, start_gateway
from support.mcp_conformance import ConformanceProvider

pytestmark = [pytest.mark.anyio, pytest.mark.sqlite_only, pytest.mark.requirement("M2", "W6")]

SUITE_SECONDS = 300.0
HERE = Path(__file__).parent


async def run_node(script: Path, *arguments: str) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        *(str(NODE), str(script), *arguments),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={"PATH": f"{NODE.parent}:/usr/bin:/bin", "HOME": "/nonexistent", "NO_COLOR": "1"},
    )
    try:
        async with asyncio.timeout(SUITE_SECONDS):
            out, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode or 0, out.decode()


@pytest.mark.parametrize(
    ("suite", "options", "expected"),
    [
        ("conformance-0.1", (), "2025-11-25"),
        ("conformance-0.2", ("--requirements", "2025-11-25"), "2025-11-25"),
        ("conformance-0.2", ("--requirements", "2026-07-28"), "2026-07-28"),
    ],
)
async def test_the_conformance_suite_passes_but_for_the_stated_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suite: str, options: tuple[str, ...], expected: str
) -> None:
    """A scenario that begins to pass fails the test, too: it is to be removed from the list."""
    monkeypatch.setattr(mcp, "SessionProvider", ConformanceProvider)
    settings: dict[str, Any] = {"gateway": {"auth": {"mode": "none"}}}
    async with open_gateway(tmp_path, None, settings=settings) as gateway:
        url = gateway.served.url.replace("ws://", "http://") + "/mcp"
        script = CACHE / "mcp" / "node_modules" / suite / "dist" / "index.js"
        baseline = HERE / f"mcp-{expected}.yml"
        code, out = await run_node(
            script, "server", "--url", url, *options, "--expected-failures", str(baseline)
        )
    assert code == 0, out[-6000:]
    assert "server-initialize" in out or "server-stateless" in out


async def test_the_inspector_calls_a_tool(tmp_path: Path) -> None:
    async with open_gateway(tmp_path, None) as gateway:
        url = gateway.served.url.replace("ws://", "http://") + "/mcp"
        token = gateway.issue(WRITE)
        inspector = CACHE / "mcp" / "node_modules" / "@modelcontextprotocol" / "inspector"
        code, out = await run_node(
            inspector / "clients" / "launcher" / "build" / "index.js",
            *("--cli", url, "--transport", "http", "--header", f"Authorization: Bearer {token}"),
            *("--method", "tools/call", "--tool-name", "sessions_list"),
        )
        assert code == 0, out
        result = json.loads(out[out.index("{") :])
        assert result["structuredContent"]["sessions"] == []


CALLS = [
    ScriptedCall("sessions_list", {}),
    ScriptedCall("sessions_send", {"sessionKey": "agent:main:main", "message": "say pong"}),
]


async def run_agent(command: list[str], environ: dict[str, str], directory: Path) -> str:
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        cwd=directory,
        env={"PATH": f"{NODE.parent}:/usr/bin:/bin", "HOME": str(directory), **environ},
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(SUITE_SECONDS):
            out, _ = await process.communicate()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return out.decode()


def create_session(gateway: Gateway) -> str:
    """Let there be a session to list and to message; return the state directory."""
    state = str(gateway.log.parent / "state")
    environ = {"PATH": os.environ["PATH"], "HOME": state}
    done = run_program([*COMMAND, "agent", "--message", "say hello", "--state-dir", state], environ)
    assert done.code == 0, done.err
    return state


def check_results(model: ClientModel, out: str) -> None:
    assert len(model.results) == 2, (model.results, out[-3000:])
    listed, sent = model.results
    assert "agent:main:main" in listed, listed
    assert "pong" in sent and "ok" in sent, sent
    assert "All done." in out, out[-3000:]


async def test_claude_code_lists_and_messages_sessions(tmp_path: Path) -> None:
    """The real command line, with `antiphon mcp serve` as its server."""
    home = tmp_path / "home"
    home.mkdir()
    model = ClientModel(CALLS, "All done.")
    with start_gateway(tmp_path / "gateway") as gateway:
        serve = [*COMMAND, "mcp", "serve", "--state-dir", create_session(gateway)]
        server: dict[str, Any] = {"command": serve[0], "args": serve[1:], "env": {}}
        (home / "mcp.json").write_text(json.dumps({"mcpServers": {"antiphon": server}}))
        async with model.running():
            claude = CACHE / "mcp" / "node_modules" / ".bin" / "claude"
            out = await run_agent(
                [
                    *(str(claude), "-p", "Message the other agent.", "--model", "m"),
                    *("--mcp-config", str(home / "mcp.json"), "--strict-mcp-config"),
                    *("--allowedTools", "mcp__antiphon"),
                ],
                {
                    "ANTHROPIC_BASE_URL": model.url,
                    "ANTHROPIC_API_KEY": "none",
                    "DISABLE_AUTOUPDATER": "1",
                    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
                    "ENABLE_TOOL_SEARCH": "false",
                },
                home,
            )
    check_results(model, out)


async def test_codex_lists_and_messages_sessions(tmp_path: Path) -> None:
    """The real command line, over HTTP with a token."""
    home = tmp_path / "home"
    (home / ".codex").mkdir(parents=True)
    model = ClientModel(CALLS, "All done.")
    with start_gateway(tmp_path / "gateway") as gateway:
        create_session(gateway)
        async with model.running():
            url = gateway.http
            (home / ".codex" / "config.toml").write_text(
                f'model = "m"\nmodel_provider = "fake"\napproval_policy = "never"\n'
                f'[model_providers.fake]\nname = "fake"\nbase_url = "{model.url}/v1"\nwire_api = "responses"\n'
                f'[mcp_servers.antiphon]\nurl = "{url}/mcp"\nbearer_token_env_var = "ANTIPHON_TOKEN"\n'
                f'default_tools_approval_mode = "approve"\nrequired = true\n'
            )
            codex = CACHE / "mcp" / "node_modules" / ".bin" / "codex"
            out = await run_agent(
                [str(codex), "exec", "--skip-git-repo-check", "Message the other agent."],
                {"ANTIPHON_TOKEN": gateway.token},
                home,
            )
    check_results(model, out)
