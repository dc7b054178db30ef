"""The session tools on every transport: a program gets what a model gets, in the same words and bounds."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from mcp.client.client import Client as McpClient

from antiphon.engine.sessions.transcripts import HistoryFilter
from antiphon.operations.types import IncomingMessage, SpawnRequest
from support.app_fixture import BOUND, MAIN, OPERATOR
from support.gateway_ws import WRITE, Client, GatewayFixture, open_gateway
from support.mcp_clients import Generation, connect_mcp, use_tool
from support.model_provider import Answer, Call, Provider

pytestmark = [pytest.mark.anyio, pytest.mark.requirement("W5", "V3", "M2")]

HELPER = "agent:helper:main"
ACTING = ["sessions_send", "sessions_spawn", "sessions_yield", "subagents"]
Json = dict[str, Any]


def settings(**sections: Any) -> Json:
    """`main` may reach and spawn `helper`, which is the rehearsal model, also if another runtime answers for `main`."""
    main: Json = {"id": "main", "default": True, "subagents": {"allowAgents": ["helper"]}}
    helper: Json = {"id": "helper", "model": {"primary": "rehearsal/rehearsal"}}
    return {
        "agents": {"list": [main, helper]},
        "tools": {"sessions": {"visibility": "all"}, "agentToAgent": {"enabled": True}},
        "gateway": {"tools": {"allow": ACTING}},
        **sections,
    }


class Transport(ABC):
    """One tool, as the main session."""

    offers_yield = True
    """Whether it is a transport for runs, which can wait for their sub-agents."""

    @abstractmethod
    async def use(self, tool: str, **arguments: Any) -> Json:
        """What it answers, as data."""


class Model(Transport):
    """A run in which the model calls the tool."""

    def __init__(self, gateway: GatewayFixture, provider: Provider | None = None) -> None:
        self._sanitizer, self._provider = gateway, provider

    async def use(self, tool: str, **arguments: Any) -> Json:
        words = json.dumps(arguments)
        if self._provider is not None:
            self._provider.script(Answer(calls=(Call(tool, words),)), Answer(text=("done",)))
        message = IncomingMessage(session=MAIN, content=f"call {tool} {words}\nsay done")
        accepted = await self._sanitizer.operations.messages.submit(OPERATOR, message)
        view = await self._sanitizer.operations.runs.wait(OPERATOR, accepted.run_id, BOUND)
        assert (view.state, view.reply) == ("ok", "done"), view
        page = await self._sanitizer.operations.transcripts.read(
            OPERATOR, MAIN, HistoryFilter(limit=9, include_tools=True)
        )
        result = next(item for item in reversed(page.messages) if item["role"] == "toolResult")
        if self._provider is not None:  # exactly what the model reads
            shown = [item for item in self._provider.bodies[-1]["messages"] if item["role"] == "tool"]
            assert shown[-1]["content"] == result["content"][0]["text"]
        return json.loads(result["content"][0]["text"])


class Http(Transport):
    def __init__(self, http: httpx2.AsyncClient) -> None:
        self._http = http

    async def use(self, tool: str, **arguments: Any) -> Json:
        reply = await self._http.post("/tools/invoke", json={"tool": tool, "args": arguments})
        body = reply.json()
        assert (reply.status_code, body["ok"]) == (200, True), body
        assert json.loads(body["result"]["content"][0]["text"]) == body["result"]["details"]
        return body["result"]["details"]


class WebSocket(Transport):
    def __init__(self, client: Client) -> None:
        self._client = client

    async def use(self, tool: str, **arguments: Any) -> Json:
        answer = await self._client.call("tools.invoke", name=tool, args=arguments)
        return answer["output"]["details"] if answer["ok"] else answer["error"]["details"]


class Mcp(Transport):
    offers_yield = False

    def __init__(self, client: McpClient) -> None:
        self._client = client

    async def use(self, tool: str, **arguments: Any) -> Json:
        return await use_tool(self._client, tool, **arguments)


@asynccontextmanager
async def _rehearsal(path: Path) -> AsyncGenerator[tuple[GatewayFixture, Transport]]:
    async with open_gateway(path, None, settings=settings()) as gateway:
        yield gateway, Model(gateway)


@asynccontextmanager
async def _provider(path: Path) -> AsyncGenerator[tuple[GatewayFixture, Transport]]:
    async with Provider().running() as provider:
        served = {"baseUrl": f"{provider.url}/v1", "apiKey": "x", "models": [{"id": "m1"}]}
        models = {"providers": {"local": {**served, "api": "openai-completions"}}}
        async with open_gateway(path, None, settings=settings(models=models)) as gateway:
            yield gateway, Model(gateway, provider)


@asynccontextmanager
async def _http(path: Path) -> AsyncGenerator[tuple[GatewayFixture, Transport]]:
    async with (
        open_gateway(path, None, settings=settings()) as gateway,
        gateway.http(gateway.issue(WRITE)) as http,
    ):
        yield gateway, Http(http)


@asynccontextmanager
async def _websocket(path: Path) -> AsyncGenerator[tuple[GatewayFixture, Transport]]:
    async with (
        open_gateway(path, None, settings=settings()) as gateway,
        gateway.client(gateway.issue(WRITE)) as client,
    ):
        yield gateway, WebSocket(client)


def _mcp(generation: Generation) -> Connect:
    @asynccontextmanager
    async def connect(path: Path) -> AsyncGenerator[tuple[GatewayFixture, Transport]]:
        async with (
            open_gateway(path, None, settings=settings()) as gateway,
            connect_mcp(gateway.served.url, gateway.issue(WRITE), generation, session="main") as client,
        ):
            yield gateway, Mcp(client)

    return connect


Connect = Callable[[Path], AbstractAsyncContextManager[tuple[GatewayFixture, Transport]]]
ENTRANCES: dict[str, Connect] = {
    "rehearsal model": _rehearsal,
    "model behind HTTP": _provider,
    "/tools/invoke": _http,
    "tools.invoke": _websocket,
    "/mcp 2025-11-25": _mcp("2025-11-25"),
    "/mcp 2026-07-28": _mcp("2026-07-28"),
}


@pytest.fixture(params=ENTRANCES)
def connect(request: pytest.FixtureRequest) -> Connect:
    return ENTRANCES[request.param]


@pytest.mark.requirement("S1", "S2", "003-send-reply", "003-send-timeout-zero")
async def test_sending_to_another_session(connect: Connect, tmp_path: Path) -> None:
    async with connect(tmp_path) as (gateway, transport):
        await gateway.operations.sessions.open(OPERATOR, HELPER)
        quiet = {"sessionKey": HELPER, "replyBack": 0, "announce": "none"}
        sent = await transport.use("sessions_send", message="say pong", timeoutSeconds=BOUND, **quiet)
        delivery = sent.pop("delivery")
        assert delivery["status"] == "ended"
        assert sent.pop("replyBack") == {"turns": 0, "reason": "turn_limit"}
        assert (await gateway.operations.runs.get(OPERATOR, sent.pop("runId"))).reply == "pong"
        assert sent == {"status": "ok", "reply": "pong", "sessionKey": HELPER}
        left = await transport.use("sessions_send", message="say later", timeoutSeconds=0, **quiet)
        assert left["status"] == "accepted"
        assert (await gateway.operations.runs.wait(OPERATOR, left["runId"], BOUND)).reply == "later"
        page = await gateway.operations.transcripts.read(OPERATOR, HELPER, HistoryFilter())
        said = [item for item in page.messages if item["role"] == "user"]
        assert [item["content"] for item in said] == ["say pong", "say later"]
        assert [item["provenance"]["sourceSessionKey"] for item in said] == [MAIN, MAIN]


@pytest.mark.requirement("P2", "P3", "003-spawn-at-once", "003-spawn-child")
async def test_spawning_a_sub_agent(connect: Connect, tmp_path: Path) -> None:
    async with connect(tmp_path) as (gateway, transport):
        spawned = await transport.use(
            "sessions_spawn", task="say 42", agentId="helper", announce="none", label="calc"
        )
        assert spawned.keys() == {"status", "runId", "childSessionKey", "mode", "note"}
        assert (spawned["status"], spawned["mode"]) == ("accepted", "run")
        assert spawned["childSessionKey"].startswith("agent:helper:subagent:")
        assert (await gateway.operations.runs.wait(OPERATOR, spawned["runId"], BOUND)).reply == "42"
        [task] = await gateway.operations.subagents.list(OPERATOR, MAIN)
        assert (task.run_id, task.label, task.result) == (spawned["runId"], "calc", "42")
        listed = await transport.use("subagents", action="list")
        assert [found["runId"] for found in [*listed["active"], *listed["recent"]]] == [spawned["runId"]]


@pytest.mark.requirement("L1", "L5", "K2")
async def test_listing_sessions(connect: Connect, tmp_path: Path) -> None:
    async with connect(tmp_path) as (gateway, transport):
        for key in (HELPER, MAIN):
            await gateway.operations.sessions.open(OPERATOR, key)
        page = await transport.use("sessions_list", kinds=["main"])
        assert {(row["key"], row["agentId"]) for row in page["sessions"]} == {
            ("main", "main"),
            (HELPER, "helper"),
        }
        assert (page["count"], page["scope"]) == (2, "all")


@pytest.mark.requirement("H5", "S2", "S7", "P2", "W5")
async def test_refusals(connect: Connect, tmp_path: Path) -> None:
    async with connect(tmp_path) as (gateway, transport):
        await gateway.operations.sessions.open(OPERATOR, MAIN)
        refused = [
            await transport.use("sessions_send", sessionKey="nobody", message="x"),
            await transport.use("sessions_send", sessionKey="main", message="x"),
            await transport.use("sessions_send", sessionKey="main"),
            await transport.use("sessions_spawn", task="x", agentId="stranger"),
            await transport.use("sessions_spawn", task="x", mode="session"),
        ]
        assert [(said["status"], said["code"]) for said in refused] == [
            ("error", "not_found"),
            ("error", "self_send"),
            ("error", "invalid_input"),
            ("forbidden", "forbidden"),
            ("error", "invalid_input"),
        ]
        if transport.offers_yield:
            refused.append(await transport.use("sessions_yield"))
            assert (refused[-1]["status"], refused[-1]["code"]) == ("error", "conflict")
        assert all(said["error"] for said in refused)
        assert await gateway.operations.subagents.list(OPERATOR, MAIN) == []


# --- whose tools they are ---


async def _offered(
    gateway: GatewayFixture, http: httpx2.AsyncClient, client: Client, key: str
) -> list[set[str]]:
    """What a session has: by its run, by what can be looked up, and by what can be invoked over either wire."""
    known = [tool["id"] for tool in (await client.call("tools.catalog"))["groups"][0]["tools"]]
    actor = (await gateway.operations.sessions.act_as(OPERATOR, key)).actor
    groups = (await client.call("tools.effective", sessionKey=key))["groups"]
    over_http, over_ws = set[str](), set[str]()
    for name in known:
        body = {"tool": name, "sessionKey": key, "dryRun": True}
        if (await http.post("/tools/invoke", json=body)).status_code == 200:
            over_http.add(name)
        answer = await client.call("tools.invoke", name=name, args={"no": "such"}, sessionKey=key)
        if answer["error"]["code"] == "tool_error":  # it is there, and says that there is no such argument
            over_ws.add(name)
    looked_up = {tool["id"] for group in groups for tool in group["tools"]}
    return [set(actor.tools), looked_up, over_http, over_ws]


@pytest.mark.requirement("P3", "SEC6", "003-spawn-tools", "003-spawn-tools-config")
async def test_a_sub_agent_has_its_own_tools_on_every_transport(tmp_path: Path) -> None:
    """Also where its own agent is granted more than the session that spawned it."""
    config = settings(tools={"subagents": {"tools": {"alsoAllow": ["sessions_list"]}}})
    config["tools"]["agentToAgent"] = {"enabled": True}
    config["tools"]["deny"] = ["group:fs", "group:web", "group:runtime", "group:memory", "cron", "message"]
    config["agents"]["list"][1]["tools"] = {"sessions": {"visibility": "all"}}
    async with (
        open_gateway(tmp_path, None, settings=config) as gateway,
        gateway.http() as http,
        gateway.client() as client,
    ):
        wanted = SpawnRequest(task="say hello", agent_id="helper", announce="none")
        spawned = await gateway.operations.subagents.spawn(OPERATOR, wanted)
        child = spawned.child_session_key
        assert (await gateway.operations.runs.wait(OPERATOR, spawned.run_id, BOUND)).has_ended
        every = {
            "sessions_list",
            "sessions_history",
            "sessions_search",
            "session_status",
            "agents_list",
            *ACTING,
        }
        assert await _offered(gateway, http, client, MAIN) == [every] * 4
        assert await _offered(gateway, http, client, child) == [{"sessions_list"}] * 4
        body: Json = {"tool": "sessions_list", "sessionKey": child}
        listed = (await http.post("/tools/invoke", json=body)).json()["result"]["details"]
        assert [row["key"] for row in listed["sessions"]] == [child]  # its own tree, and not its parent


@pytest.mark.requirement("SEC12")
async def test_tools_with_side_effects_are_offered_only_if_allowed(tmp_path: Path) -> None:
    async with (
        open_gateway(tmp_path, None, settings=settings(gateway={})) as gateway,
        gateway.http() as http,
        gateway.client() as client,
    ):
        for name in ACTING:
            reply = await http.post("/tools/invoke", json={"tool": name})
            assert reply.status_code == 404
            answer = await client.call("tools.invoke", name=name)
            assert (answer["ok"], answer["error"]["code"]) == (False, "not_found")
        assert (await client.call("tools.invoke", name="sessions_list"))["ok"]
