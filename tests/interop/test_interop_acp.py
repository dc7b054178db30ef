"""Codex, Claude, opencode and Qwen as ACP programs, with a model of the tests."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from antiphon.client import Client
from antiphon.errors import AntiphonError
from antiphon.gateway.auth import PROGRAM_SECRET_PREFIX
from cli.gateways import connect, up
from cli.terminal import Program
from support.acp_agents import BOUND, CODER, OPERATOR, AcpFixture, open_acp_app
from support.acp_gateways import reply, send, wait_for_end
from support.client_models import ClientModel, ScriptedCall
from support.gateway_http import echo
from support.gateway_ws import open_gateway
from support.interop_processes import CACHE, NODE
from support.mcp_servers import find_command_lines, find_processes, wait_until
from support.model_provider import Answer, Call, Json, Provider

pytestmark = [pytest.mark.anyio, pytest.mark.sqlite_only, pytest.mark.requirement("M3", "AT19")]

PROGRAMS = CACHE / "acp" / "node_modules" / ".bin"
MARK = "ACP_INTEROP_MARK"
KNOWN_NAMES = {"opencode": "opencode", "codex-acp": "codex", "qwen": "qwen", "claude-agent-acp": "claude"}


DescribeProgram = Callable[[Path, str], dict[str, Any]]


def describe(home: Path, program: str, *args: str, **env: str) -> dict[str, Any]:
    """Return a configuration whose agent `coder` is a program with a home of its own."""
    work = home / "work"
    work.mkdir(parents=True)
    variables = {"HOME": str(home), "PATH": f"{NODE.parent}:/usr/bin:/bin", MARK: str(home), **env}
    acp = {"command": str(PROGRAMS / program), "args": list(args), "cwd": str(work), "env": variables}
    acp["agent"] = KNOWN_NAMES[program]  # which decides how it is told the secret of its session's tools
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


def describe_claude(home: Path, model_url: str) -> dict[str, Any]:
    return describe(
        home,
        "claude-agent-acp",
        ANTHROPIC_BASE_URL=model_url,
        ANTHROPIC_API_KEY="none",
        ANTHROPIC_MODEL="m",
        DISABLE_AUTOUPDATER="1",
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
        ENABLE_TOOL_SEARCH="false",
    )


def describe_qwen(home: Path, model_url: str) -> dict[str, Any]:
    """It finds tools by a search of its own, unless that is switched off."""
    variables = {"OPENAI_API_KEY": "x", "OPENAI_BASE_URL": f"{model_url}/v1", "OPENAI_MODEL": "m"}
    config = describe(home, "qwen", "--acp", "--auth-type", "openai", **variables)
    settings = {
        "tools": {"toolSearch": {"enabled": False}},
        "general": {"enableAutoUpdate": False},
        "privacy": {"usageStatisticsEnabled": False},
    }
    (home / ".qwen").mkdir()
    (home / ".qwen" / "settings.json").write_text(json.dumps(settings))
    return config


COMMAND = "touch here && echo from-the-shell"  # Qwen asks for no command that only reads


def choose(body: Json) -> Answer:
    """Run a command once, then say what it printed."""
    messages = body["messages"]
    names = [tool["function"]["name"] for tool in body.get("tools", [])]
    shell = next((name for name in names if name in ("bash", "run_shell_command")), None)
    if shell is None:
        return Answer(text=("title",))
    if messages[-1]["role"] == "tool":
        return Answer(text=(f"It printed {messages[-1]['content']}",))
    if "Run a command." not in json.dumps(messages[-1]["content"]):
        users = json.dumps([message["content"] for message in messages if message["role"] == "user"])
        return Answer(text=(f"Known: {'blue' in users}",))
    arguments: Json = {"command": COMMAND, "description": "say it"}
    if shell == "run_shell_command":
        arguments["is_background"] = False
    return Answer(calls=(Call(shell, json.dumps(arguments), f"call_{len(messages)}"),))


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


@pytest.mark.parametrize("describe_program", [describe_opencode, describe_qwen])
async def test_a_program_answers_asks_is_stopped_is_killed_and_remembers(
    tmp_path: Path, describe_program: DescribeProgram
) -> None:
    home = tmp_path / "home"
    async with Provider(choose=choose).running() as provider:
        config = describe_program(home, provider.url)
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
        await wait_until(lambda: find_processes(f"{MARK}={home}") == [], "the program outlives its gateway")
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


# --- the tools of the session ---

LIST_AND_SEND = [
    ScriptedCall("sessions_list", {}),
    ScriptedCall("sessions_send", {"agentId": "main", "message": "from the program"}),
]
MAX_TURNS_WITHOUT_TOOLS = 5
WITHOUT_TOOLS = "No tools."
OPEN_SESSIONS = {"tools": {"sessions": {"visibility": "all"}, "agentToAgent": {"enabled": True}}}


def choose_session_tool(body: Json) -> Answer:
    """Make the calls one after the other, then say what they returned."""
    results = [message["content"] for message in body["messages"] if message["role"] == "tool"]
    names = [tool["function"]["name"] for tool in body.get("tools", [])]
    if not any(name.endswith("sessions_list") for name in names):
        return Answer(text=(WITHOUT_TOOLS,))
    if len(results) >= len(LIST_AND_SEND):
        return Answer(text=(f"All done: {results}",))
    call = LIST_AND_SEND[len(results)]
    name = next(name for name in names if name.endswith(call.tool))
    return Answer(calls=(Call(name, json.dumps(call.arguments), f"call_{len(results)}"),))


async def use_session_tools(path: Path, config: dict[str, Any]) -> str:
    """Let the program list sessions and message one, allow what it asks for, and return its answer.

    Qwen connects to MCP servers in the background, so that its first turn may not have their tools yet.
    """
    async with open_gateway(path, echo, settings={**config, **OPEN_SESSIONS}) as gateway:
        app = AcpFixture(gateway.app)
        answer = WITHOUT_TOOLS
        for _ in range(MAX_TURNS_WITHOUT_TOOLS):
            run = await app.say("Message the other agent.")
            async with asyncio.timeout(BOUND):
                while not (view := await app.app.operations.runs.get(OPERATOR, run)).has_ended:
                    for waiting in await app.app.operations.approvals.list(OPERATOR):
                        await app.app.operations.approvals.resolve(OPERATOR, waiting.id, "allow-once")
                    assert find_command_lines(PROGRAM_SECRET_PREFIX) == []
                    await asyncio.sleep(0.05)
            assert view.state == "ok", view
            if (answer := view.reply or "") != WITHOUT_TOOLS:
                break
        heard = json.dumps(await app.transcript("agent:main:main"))
        assert "from the program" in heard and CODER in heard
    await wait_until(lambda: find_processes(str(path)) == [], "a bridge outlives its gateway")
    return answer


@pytest.mark.parametrize("describe_program", [describe_opencode, describe_qwen])
async def test_a_program_lists_and_messages_sessions(
    tmp_path: Path, describe_program: DescribeProgram
) -> None:
    async with Provider(choose=choose_session_tool).running() as provider:
        config = describe_program(tmp_path / "home", provider.url)
        told = await use_session_tools(tmp_path / "state", config)
    assert "All done" in told and "'agent:coder:main'" not in told and "heard" in told, told


@pytest.mark.parametrize("describe_program", [describe_codex, describe_claude])
async def test_codex_and_claude_list_and_message_sessions(
    tmp_path: Path, describe_program: DescribeProgram
) -> None:
    async with ClientModel(LIST_AND_SEND, "All done.").running() as model:
        told = await use_session_tools(tmp_path / "state", describe_program(tmp_path / "home", model.url))
    assert "All done." in told and len(model.results) == 2, (told, model.results)


# --- behind a real gateway ---


async def allow_all_until(client: Client, ending: asyncio.Task[dict[str, Any]]) -> None:
    while not ending.done():
        for waiting in await client.call("exec.approval.list", {}):
            decision = {"id": waiting["id"], "decision": "allow-once"}
            with suppress(AntiphonError):  # a question of the killed gateway, which has ended meanwhile
                await client.call("exec.approval.resolve", decision)
        await asyncio.wait([ending], timeout=0.05)
    assert ending.result()["status"] == "ok", ending.result()


@pytest.mark.parametrize("describe_program", [describe_opencode, describe_qwen])
async def test_a_turn_goes_on_after_a_kill_of_the_gateway(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, describe_program: DescribeProgram
) -> None:
    home = tmp_path / "home"
    program = Program(tmp_path, tmp_path_factory.getbasetemp().parent / "antiphon-bytecode")
    async with Provider(choose=choose).running() as provider:
        program.configure(describe_program(home, provider.url))
        with up(program) as gateway:
            async with connect(gateway, program) as client:
                assert "Known: True" in await reply(client, "The word is blue.", "1")
                cut_off = await send(client, "Run a command.", "2")
                async with asyncio.timeout(BOUND):
                    while not await client.call("exec.approval.list", {}):  # noqa: ASYNC110
                        await asyncio.sleep(0.05)
            gateway.stop(signal.SIGKILL)
        await wait_until(lambda: find_processes(f"{MARK}={home}") == [], "the program outlives its gateway")
        with up(program) as gateway:
            async with connect(gateway, program) as client:
                await allow_all_until(client, asyncio.create_task(wait_for_end(client, cut_off)))
                assert "Known: True" in await reply(client, "What is the word?", "3")
        told = json.dumps([request.body for request in provider.received])
        assert "cut off" in told and "not in your memory" not in told
    await wait_until(lambda: find_processes(f"{MARK}={home}") == [], "the program outlives its gateway")
