"""The tools of a session for its program: an ACP agent calls them over MCP, with the rights of its session alone."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from mcp.shared.exceptions import MCPError

from antiphon.engine.sessions.transcripts import HistoryFilter
from antiphon.gateway.auth import PROGRAM_SECRET_PREFIX
from antiphon.gateway.mcp import TOOL_NAMES
from antiphon.operations.types import SpawnRequest
from antiphon.runtimes import Prompt
from support.acp_agents import CODER, OPERATOR, AcpFixture, describe_agents, open_acp_app
from support.app_fixture import MAIN, wait_until
from support.gateway_ws import GatewayFixture, connect_params, open_gateway
from support.mcp_clients import Json, connect_mcp, use_tool

pytestmark = [pytest.mark.anyio, pytest.mark.sqlite_only, pytest.mark.requirement("M3")]

SCRIPT = Path(__file__).parents[1] / "support" / "scripted_acp_agent.py"
OTHER = "agent:coder:other"
EVERY_TOOL = " ".join(sorted(TOOL_NAMES))
OPEN = {"sessions": {"visibility": "all"}, "agentToAgent": {"enabled": True}}


async def echo(prompt: Prompt) -> str:
    return "heard"


@asynccontextmanager
async def open_program_gateway(
    path: Path,
    agent: Callable[[Prompt], Awaitable[str]] = echo,
    program: Json | None = None,
    coder: Json | None = None,
    **config: Any,
) -> AsyncGenerator[tuple[GatewayFixture, AcpFixture]]:
    settings = describe_agents(program, coder, **{"tools": OPEN, **config})
    async with open_gateway(path, agent, settings=settings) as gateway:
        yield gateway, AcpFixture(gateway.app)


def call(tool: str, **arguments: Any) -> str:
    """Return the step of the test's program that makes a call. It has no spaces."""
    text = json.dumps(arguments, separators=(",", ":"))
    assert " " not in text
    return f"use:{tool}:{text}"


async def find_secret(app: AcpFixture, session: str = CODER) -> str:
    """Return what a program was told as a header, or the file that its bridge reads."""
    [server] = json.loads(await app.reply("mcp", session))
    if "args" in server:
        return Path(server["args"][-1]).read_text()  # noqa: ASYNC240
    return server["headers"][0]["value"].removeprefix("Bearer ")


@pytest.mark.requirement("M2", "S1")
@pytest.mark.parametrize(
    ("program", "transport"),
    [
        ({"agent": "codex"}, "headers"),
        ({"agent": "codex", "env": {"ACP_TEST_MODE": "stdio"}}, "args"),
        ({"agent": "claude"}, "args"),  # which shows headers to every user of the machine
        ({}, "args"),
    ],
)
async def test_a_program_lists_and_messages_sessions(tmp_path: Path, program: Json, transport: str) -> None:
    async with open_program_gateway(tmp_path, program=program) as (gateway, app):
        [server] = json.loads(await app.reply("mcp"))
        assert transport in server and PROGRAM_SECRET_PREFIX not in json.dumps(server.get("args", []))
        assert await app.reply("list") == EVERY_TOOL
        listed = json.loads(await app.reply(call("sessions_list")))
        assert [row["key"] for row in listed["sessions"]] == ["main"]  # as its agent names it
        sent = json.loads(await app.reply(call("sessions_send", agentId="main", message="hello")))
        assert (sent["status"], sent["reply"], sent["sessionKey"]) == ("ok", "heard", MAIN)
        page = await gateway.operations.transcripts.read(OPERATOR, MAIN, HistoryFilter())
        [message] = [item for item in page.messages if item["role"] == "user" and item["content"] == "hello"]
        assert message["provenance"]["sourceSessionKey"] == CODER
        keyed = call("sessions_send", agentId="main", message="once", idempotencyKey="k", timeoutSeconds=0)
        assert json.loads(await app.reply(keyed))["runId"] == json.loads(await app.reply(keyed))["runId"]


@pytest.mark.requirement("G12")
async def test_a_wait_for_a_session_that_waits_for_the_program_is_refused(tmp_path: Path) -> None:
    async with open_program_gateway(tmp_path) as (gateway, app):
        await gateway.operations.sessions.open(OPERATOR, OTHER)
        back = call("sessions_send", sessionKey=CODER, message="say:late", timeoutSeconds=30)
        sent = json.loads(await app.reply(call("sessions_send", sessionKey=OTHER, message=back)))
        assert sent["status"] == "ok", sent
        refused = json.loads(sent["reply"])
        assert refused["code"] == "wait_cycle", refused


@pytest.mark.requirement("G12")
async def test_hops_are_counted_through_programs(tmp_path: Path) -> None:
    session = {"agentToAgent": {"maxHops": 1}}
    async with open_program_gateway(tmp_path, session=session) as (gateway, app):
        await gateway.operations.sessions.open(OPERATOR, OTHER)
        further = call("sessions_send", agentId="main", message="x")
        sent = json.loads(await app.reply(call("sessions_send", sessionKey=OTHER, message=further)))
        assert json.loads(sent["reply"])["code"] == "chain_limit", sent


async def test_between_turns_a_program_calls_nothing(tmp_path: Path) -> None:
    async with open_program_gateway(tmp_path) as (_, app):
        late = call("sessions_send", agentId="main", message="x").removeprefix("use:")
        workspace = Path(await app.reply(f"later:{late} cwd"))
        (workspace / "go").touch()

        async def has_answered() -> bool:
            return (workspace / "done").exists()

        await wait_until(has_answered)
        refused = json.loads((workspace / "done").read_text())
        assert refused["code"] == "conflict" and "No turn" in refused["error"]
        assert (await app.app.operations.sessions.get_summary(OPERATOR)).sessions == 1


async def test_the_end_of_a_turn_ends_its_wait_and_not_what_was_sent(tmp_path: Path) -> None:
    started, released = asyncio.Event(), asyncio.Event()

    async def slow(prompt: Prompt) -> str:
        started.set()
        await released.wait()
        return "done"

    async with open_program_gateway(tmp_path, slow) as (gateway, app):
        run = await app.say(call("sessions_send", agentId="main", message="x", timeoutSeconds=45))
        await started.wait()
        await app.app.operations.runs.stop(OPERATOR, CODER, run)
        assert (await app.wait_for_end(run)).state == "cancelled"
        assert await app.reply("say:again") == "again"
        released.set()

        async def has_answered() -> bool:
            page = await gateway.operations.transcripts.read(OPERATOR, MAIN, HistoryFilter())
            return [item["role"] for item in page.messages] == ["user", "assistant"]

        await wait_until(has_answered)


@pytest.mark.requirement("P3", "SEC6")
async def test_only_the_tools_that_the_session_has_are_offered(tmp_path: Path) -> None:
    async with open_program_gateway(tmp_path / "1", coder={"tools": {"deny": ["sessions_send"]}}) as (_, app):
        assert "sessions_send" not in await app.reply("list")
    async with open_program_gateway(tmp_path / "2", coder={"tools": {"deny": ["*"]}}) as (_, app):
        assert await app.reply("mcp") == "[]"
    async with open_program_gateway(tmp_path / "3", gateway={"mcp": {"enabled": False}}) as (_, app):
        assert await app.reply("mcp") == "[]"
    spawn = SpawnRequest(task="mcp", announce="none")
    lists: list[Json] = [{}, {"subagents": {"tools": {"alsoAllow": ["sessions_list"]}}}]
    for number, (more, expected) in enumerate(zip(lists, (0, 1), strict=True)):
        tools = {**OPEN, **more}
        async with open_program_gateway(tmp_path / f"child{number}", tools=tools) as (_, app):
            spawned = await app.app.operations.subagents.spawn(OPERATOR, spawn, requester=CODER)
            view = await app.wait_for_end(spawned.run_id)
            assert len(json.loads(view.reply or "")) == expected, view
    async with open_acp_app(tmp_path / "embedded") as embedded:
        assert await embedded.reply("mcp") == "[]"


# --- the secret ---

ROUTES: tuple[tuple[str, str, Json | None], ...] = (
    ("GET", f"/sessions/{CODER}/history", None),
    ("GET", "/metrics", None),
    ("GET", "/openapi.json", None),
    ("GET", "/v1/models", None),
    ("POST", f"/sessions/{CODER}/kill", {}),
    ("POST", "/tools/invoke", {"tool": "sessions_list"}),
    ("POST", "/v1/chat/completions", {"model": "antiphon", "messages": [{"role": "user", "content": "x"}]}),
    ("POST", "/v1/responses", {"model": "antiphon", "input": "x"}),
    ("POST", "/hooks/agent", {"message": "x"}),
    ("POST", "/hooks/wake", {"text": "x"}),
)
ON = {"enabled": True}
MODES: dict[str, Json] = {
    "token": {"mode": "token"},
    "password": {"mode": "password", "password": "open sesame"},
    "none": {"mode": "none"},
}


async def call_list(gateway: GatewayFixture, secret: str, **headers: str) -> httpx2.Response:
    """List sessions as a client without a library would."""
    headers |= {"Authorization": f"Bearer {secret}", "Accept": "application/json, text/event-stream"}
    body = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "sessions_list"}}
    async with httpx2.AsyncClient(base_url=gateway.served.url.replace("ws://", "http://")) as http:
        return await http.post("/mcp", json=body, headers=headers)


@pytest.mark.requirement("SEC4", "V3")
@pytest.mark.parametrize("mode", MODES)
async def test_the_secret_opens_nothing_but_the_tools_of_its_session(tmp_path: Path, mode: str) -> None:
    sections = {
        "auth": MODES[mode],
        "http": {"endpoints": {"chatCompletions": ON, "responses": ON}},
    }
    hooks = {"enabled": True, "token": "another-secret-of-some-length"}
    async with open_program_gateway(tmp_path, gateway=sections, hooks=hooks) as (gateway, app):
        secret = await find_secret(app)
        assert secret.startswith(PROGRAM_SECRET_PREFIX)
        url = gateway.served.url.replace("ws://", "http://")
        async with httpx2.AsyncClient(base_url=url, headers={"Authorization": f"Bearer {secret}"}) as http:
            for method, path, body in ROUTES:
                answer = await http.request(method, path, json=body)
                assert answer.status_code == 401, (path, answer.text)
        async with gateway.connect_unauthenticated() as client:
            field = "password" if mode == "password" else "token"
            answer = await client.ask("connect", connect_params(auth={field: secret}))
            assert not answer.ok, answer
        refused = await call_list(gateway, secret, **{"X-Antiphon-Session-Key": MAIN})
        assert refused.status_code == 403 and MAIN not in refused.text
        async with connect_mcp(gateway.served.url, secret) as client:
            assert len((await client.list_tools()).tools) == len(TOOL_NAMES)
            assert (await use_tool(client, "sessions_list"))["code"] == "conflict"  # no turn is running
            with pytest.raises(MCPError, match=r"no resource|No turn"):
                await client.read_resource(f"antiphon://sessions/{MAIN}/history")
        assert (await call_list(gateway, secret[:-1])).status_code == 401
        # Only hooks, which have a limit of their own, count it: a program must not lock its owner out.
        assert gateway.served.gateway.authenticator.refused_count == 2


@pytest.mark.requirement("SEC4")
async def test_a_secret_in_a_file_is_private_and_leaves_with_its_program(tmp_path: Path) -> None:
    async with open_program_gateway(tmp_path) as (_, app):
        [server] = json.loads(await app.reply("mcp"))
        file = Path(server["args"][-1])
        modes = [path.stat().st_mode & 0o777 for path in (file, file.parent)]
        assert modes == [0o600, 0o700]
        await app.app.operations.conversations.reset(OPERATOR, CODER)
        await find_secret(app)
        assert not file.exists()  # noqa: ASYNC240
        left = file.with_name("of-a-killed-gateway")
        left.write_text(PROGRAM_SECRET_PREFIX)
    async with open_program_gateway(tmp_path) as (_, app):
        assert await app.reply("say:ready") == "ready"
        assert not left.exists()


@pytest.mark.requirement("SEC4", "AT19")
async def test_the_secret_is_void_when_the_program_has_ended(tmp_path: Path) -> None:
    auth = {"auth": {"mode": "none"}}  # where every other request is the owner's
    async with open_program_gateway(tmp_path, gateway=auth) as (gateway, app):
        secret = await find_secret(app)
        assert (await call_list(gateway, secret)).status_code == 200
        os.kill(int(await app.reply("pid")), signal.SIGKILL)

        async def is_void() -> bool:
            return (await call_list(gateway, secret)).status_code == 401

        await wait_until(is_void)
        assert (await app.ask("say:hello")).state in ("ok", "error")
        following = await find_secret(app)
        assert following != secret
        assert (await call_list(gateway, secret)).status_code == 401
        assert (await call_list(gateway, following)).status_code == 200
        await gateway.operations.conversations.reset(OPERATOR, CODER)
        assert await find_secret(app) != following  # another conversation has another process
        assert (await call_list(gateway, following)).status_code == 401


async def test_every_session_has_a_secret_of_its_own(tmp_path: Path) -> None:
    async with open_program_gateway(tmp_path, tools={}) as (gateway, app):
        mine = await find_secret(app)
        other = await find_secret(app, OTHER)
        assert mine != other
        for secret, key in ((mine, CODER), (other, OTHER)):
            assert (await call_list(gateway, secret, **{"X-Antiphon-Session-Key": key})).status_code == 200
            away = OTHER if key == CODER else CODER
            assert (await call_list(gateway, secret, **{"X-Antiphon-Session-Key": away})).status_code == 403


# --- in the sandbox ---


def describe_sandboxed(*args: str, **sandbox: Any) -> Json:
    program = {"command": "/usr/bin/python3", "args": ["-I", "-S", "-c", SCRIPT.read_text(), *args]}
    return {"program": program, "coder": {"sandbox": {"mode": "all", **sandbox}}}


@pytest.mark.requirement("B1", "B2", "V2", "003-sandbox-clamp")
@pytest.mark.parametrize("network", ["none", "proxy"])
async def test_a_sandboxed_program_reaches_its_tools_and_nothing_else_of_the_gateway(
    tmp_path: Path, network: str
) -> None:
    """Also if the operator lists the loopback of the host, which then goes by way of the proxy."""
    hosts = {"allowHosts": ["127.0.0.1:9", "localhost:9"]} if network == "proxy" else {}
    described = describe_sandboxed(network=network, **hosts)
    async with open_program_gateway(tmp_path, **described) as (gateway, app):
        await gateway.operations.sessions.open(OPERATOR, MAIN)
        assert await app.reply("list") == EVERY_TOOL
        listed = json.loads(await app.reply(call("sessions_list")))
        assert [row["key"] for row in listed["sessions"]] == ["main"]  # as its agent names it
        refused = json.loads(await app.reply(call("sessions_send", sessionKey=MAIN, message="x")))
        assert refused["status"] in ("error", "forbidden") and refused["code"] == "not_found"
        for path in ("/healthz", "/sessions/main/history", "/openapi.json", "/v1/models", "/"):
            assert await app.reply(f"get:{path}") == "404", path
        assert await app.reply("get:/mcp") == "405"
        port = int(gateway.served.url.rpartition(":")[2])
        assert await app.reply(f"connect:{port}") == "unreachable"
        if network == "proxy":
            assert await app.reply(f"tunnel:{port}") == "403"


@pytest.mark.requirement("S1")
async def test_a_sandboxed_program_messages_a_session_that_it_may_reach(tmp_path: Path) -> None:
    described = describe_sandboxed(sessionToolsVisibility="all")
    async with open_program_gateway(tmp_path, **described) as (_, app):
        sent = json.loads(await app.reply(call("sessions_send", agentId="main", message="hello")))
        assert (sent["status"], sent["reply"]) == ("ok", "heard"), sent
        # The process of another session has another sandbox, whose socket is another one.
        other = json.loads(await app.reply(call("session_status", sessionKey="current"), OTHER))
        assert other["sessionKey"] == OTHER


async def test_in_a_sandbox_a_program_without_http_is_offered_nothing(tmp_path: Path) -> None:
    async with open_program_gateway(tmp_path, **describe_sandboxed("no-http")) as (_, app):
        assert await app.reply("list") == "no server"
