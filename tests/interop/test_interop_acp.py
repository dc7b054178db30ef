"""Codex and opencode as ACP programs, with a model of the tests."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from support.acp_agents import BOUND, CODER, OPERATOR, AcpFixture, open_acp_app
from support.client_models import ClientModel, ScriptedCall
from support.interop_processes import CACHE, NODE
from support.mcp_servers import find_processes, wait_until
from support.model_provider import Answer, Call, Json, Provider

pytestmark = [pytest.mark.anyio, pytest.mark.sqlite_only, pytest.mark.requirement("M3", "AT19")]

PROGRAMS = CACHE / "acp" / "node_modules" / ".bin"
MARK = "ACP_INTEROP_MARK"


def describe(home: Path, program: str, *args: str, **env: str) -> dict[str, Any]:
    """Return a configuration whose agent `coder` is a program with a home of its own."""
    work = home / "work"
    work.mkdir(parents=True)
    variables = {"HOME": str(home), "PATH": f"{NODE.parent}:/usr/bin:/bin", MARK: str(home), **env}
    acp = {"command": str(PROGRAMS / program), "args": list(args), "cwd": str(work), "env": variables}
    return {"agents": {"list": [{"id": "main"}, {"id": "coder", "runtime": {"type": "acp", "acp": acp}}]}}


def describe_opencode(home: Path, model_url: str) -> dict[str, Any]:
    settings = {
        "model": "local/m",
        "small_model": "local/m",
        "autoupdate": False,
        "share": "disabled",
        "permission": {"bash": "ask"},
        "provider": {
            "local": {
                "npm": "@ai-sdk/openai-compatible",
                "options": {"baseURL": f"{model_url}/v1", "apiKey": "x"},
                "models": {"m": {"name": "m", "tool_call": True}},
            }
        },
    }
    file = home / "opencode.json"
    config = describe(home, "opencode", "acp", OPENCODE_CONFIG=str(file))
    file.write_text(json.dumps(settings))
    return config


def describe_codex(home: Path, model_url: str) -> dict[str, Any]:
    config = describe(home, "codex-acp", OPENAI_API_KEY="x", CODEX_API_KEY="x")
    (home / ".codex").mkdir()
    (home / ".codex" / "config.toml").write_text(
        f'model = "m"\nmodel_provider = "fake"\n[model_providers.fake]\nname = "fake"\n'
        f'base_url = "{model_url}/v1"\nwire_api = "responses"\n'
    )
    return config


def choose(body: Json) -> Answer:
    """Run a command once, then say what it printed."""
    messages = body["messages"]
    if not body.get("tools"):
        return Answer(text=("title",))
    if messages[-1]["role"] == "tool":
        return Answer(text=(f"It printed {messages[-1]['content']}",))
    if "command" not in json.dumps(messages[-1]["content"]):
        users = json.dumps([message["content"] for message in messages if message["role"] == "user"])
        return Answer(text=(f"Known: {'blue' in users}",))
    arguments = json.dumps({"command": "echo from-the-shell", "description": "say it"})
    return Answer(calls=(Call("bash", arguments, f"call_{len(messages)}"),))


async def allow_one_call(app: AcpFixture) -> str:
    """Allow the call that waits, and return what a person reads."""
    async with asyncio.timeout(BOUND):
        while not (waiting := await app.app.operations.approvals.list(OPERATOR)):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    await app.app.operations.approvals.resolve(OPERATOR, waiting[0].id, "allow-once")
    return waiting[0].text


async def kill_program(app: AcpFixture, home: Path) -> None:
    """Kill it; a turn that begins before this is noticed fails by name."""
    for pid in find_processes(f"{MARK}={home}"):
        with suppress(ProcessLookupError):  # the launcher ends the rest of the tree
            os.kill(pid, signal.SIGKILL)
    view = await app.ask("Are you there?")
    assert view.state == "ok" or view.error_code == "agent_program_failed", view


async def test_opencode_answers_asks_is_stopped_is_killed_and_remembers(tmp_path: Path) -> None:
    home = tmp_path / "home"
    async with Provider(choose=choose).running() as provider:
        config = describe_opencode(home, provider.url)
        async with open_acp_app(tmp_path / "state", config) as app:
            assert "Known: True" in await app.reply("The word is blue.")
            run = await app.say("Run a command.")
            assert "echo from-the-shell" in await allow_one_call(app)
            view = await app.wait_for_end(run)
            assert view.reply is not None and "from-the-shell" in view.reply
            stopped = await app.say("Run a command.")
            async with asyncio.timeout(BOUND):
                while not await app.app.operations.approvals.list(OPERATOR):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            await app.app.operations.runs.stop(OPERATOR, CODER, stopped)
            assert (await app.wait_for_end(stopped)).state == "cancelled"
            await kill_program(app, home)
            assert "Known: True" in await app.reply("What is the word?")
        await wait_until(lambda: find_processes(f"{MARK}={home}") == [], "opencode outlives its gateway")
        async with open_acp_app(tmp_path / "state", config) as app:
            assert "Known: True" in await app.reply("What is the word?")
            told = json.dumps([request.body for request in provider.received])
            assert "not in your memory" not in told, "the session was not loaded"


async def test_codex_answers_is_killed_and_loads_its_session(tmp_path: Path) -> None:
    """Its tools are not called: below a temporary directory Codex has no sandbox for commands."""
    home = tmp_path / "home"
    async with ClientModel([ScriptedCall("none", {})], "All done.").running() as model:
        async with open_acp_app(tmp_path / "state", describe_codex(home, model.url)) as app:
            assert "All done." in await app.reply("Do it.")
            await kill_program(app, home)
            assert "All done." in await app.reply("Again.")
        await wait_until(lambda: find_processes(f"{MARK}={home}") == [], "Codex outlives its gateway")
