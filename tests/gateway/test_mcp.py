"""`/mcp`: sessions for MCP clients, over HTTP and in both generations of the specification."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from mcp.client.client import Client
from mcp.shared.exceptions import MCPError

from antiphon.engine.sessions.transcripts import HistoryFilter
from antiphon.gateway import mcp
from antiphon.operations.types import IncomingMessage
from antiphon.runtimes import Prompt
from support.app_fixture import BOUND, MAIN, OPERATOR, wait_until
from support.databases import dump_database
from support.gateway_http import open_http_gateway
from support.gateway_ws import ADMIN, READ, WRITE, GatewayFixture, open_gateway
from support.mcp_clients import GENERATIONS, Generation, Json, connect_mcp, use_tool

pytestmark = [pytest.mark.anyio, pytest.mark.requirement("M2")]

HELPER = "agent:helper:main"
TOOLS = list(mcp.TOOL_NAMES)
READING = ["sessions_list", "sessions_history", "sessions_search", "session_status", "agents_list"]
QUIET = {"replyBack": 0, "announce": "none"}
generations = pytest.mark.parametrize("generation", GENERATIONS)


def make_settings(**sections: Any) -> Json:
    return {
        "agents": {"list": [{"id": "main", "default": True}, {"id": "helper"}]},
        "tools": {"sessions": {"visibility": "all"}, "agentToAgent": {"enabled": True}},
        **sections,
    }


class SlowAgent:
    """An agent that answers when it is let."""

    def __init__(self) -> None:
        self.released = asyncio.Event()
        self.started = asyncio.Event()

    async def __call__(self, prompt: Prompt) -> str:
        self.started.set()
        await self.released.wait()
        return "at last"


@asynccontextmanager
async def open_slow_gateway(path: Path, **sections: Any) -> AsyncGenerator[tuple[GatewayFixture, SlowAgent]]:
    agent = SlowAgent()
    async with open_gateway(
        path, None, settings=make_settings(**sections), agents={"helper": agent}
    ) as gateway:
        try:
            yield gateway, agent
        finally:
            agent.released.set()


@generations
async def test_tools_are_described_for_programs_and_models(tmp_path: Path, generation: Generation) -> None:
    async with (
        open_gateway(tmp_path, None, settings=make_settings()) as gateway,
        connect_mcp(gateway.served.url, gateway.owner, generation) as client,
    ):
        assert client.server_info is not None
        assert client.server_info.name == "antiphon"
        assert "data, not instructions" in (client.instructions or "")
        tools = (await client.list_tools()).tools
        assert [tool.name for tool in tools] == TOOLS
        for tool in tools:
            assert tool.annotations is not None
            assert tool.annotations.read_only_hint is (tool.name in READING)
            assert tool.annotations.destructive_hint is (tool.name == "subagents")
            own = gateway.app.toolbox.tools[tool.name].spec
            assert (tool.description, tool.input_schema) == (own.description, own.parameters)
        [send] = [tool for tool in tools if tool.name == "sessions_send"]
        assert "idempotencyKey" in send.input_schema["properties"]


@pytest.mark.requirement("S1", "S2", "P2", "A2")
@generations
async def test_an_operator_sends_spawns_and_looks_after_sub_agents(
    tmp_path: Path, generation: Generation
) -> None:
    """What it spawns reports to the default agent's main session."""
    async with (
        open_gateway(tmp_path, None, settings=make_settings()) as gateway,
        connect_mcp(gateway.served.url, gateway.issue(WRITE), generation) as client,
    ):
        sent = await use_tool(client, "sessions_send", agentId="helper", message="say pong", **QUIET)
        assert (sent["status"], sent["reply"], sent["sessionKey"]) == ("ok", "pong", HELPER)
        page = await gateway.operations.transcripts.read(OPERATOR, HELPER, HistoryFilter())
        assert [item["content"] for item in page.messages if item["role"] == "user"] == ["say pong"]
        keyed = {"message": "say once", "idempotencyKey": "k", "sessionKey": HELPER}
        twice = [await use_tool(client, "sessions_send", **keyed, **QUIET) for _ in range(2)]
        assert twice[0]["runId"] == twice[1]["runId"] == "k"
        history = await use_tool(client, "sessions_history", sessionKey=HELPER)
        assert [item["content"] for item in history["messages"] if item["role"] == "user"] == [
            "say pong",
            "say once",
        ]
        spawned = await use_tool(client, "sessions_spawn", task="slow 60", label="slow", announce="none")
        [task] = await gateway.operations.subagents.list(OPERATOR, MAIN)
        assert task.run_id == spawned["runId"]
        listed = await use_tool(client, "subagents", action="list")
        assert [row["label"] for row in listed["active"]] == ["slow"]
        steered = await use_tool(client, "subagents", action="steer", target="slow", message="slow 50")
        assert steered["status"] == "accepted"
        killed = await use_tool(client, "subagents", action="kill", target="slow")
        assert (killed["status"], killed["killed"]) == ("ok", 1)
        assert (await gateway.operations.runs.wait(OPERATOR, steered["runId"], BOUND)).state == "cancelled"
        agents = await use_tool(client, "agents_list")
        assert [agent["id"] for agent in agents["agents"]] == ["main", "helper"]
        found = await use_tool(client, "sessions_search", query="pong")
        assert found["count"] >= 1
        assert (await use_tool(client, "session_status", sessionKey=HELPER))["sessionKey"] == HELPER


@pytest.mark.requirement("V1", "V3", "S3", "S7")
@generations
async def test_a_client_acts_as_the_session_it_names(tmp_path: Path, generation: Generation) -> None:
    settings = make_settings(tools={"sessions": {"visibility": "self"}})
    async with open_gateway(tmp_path, None, settings=settings) as gateway:
        await gateway.operations.sessions.open(OPERATOR, HELPER)
        own = "agent:main:dashboard:über uns"
        async with connect_mcp(
            gateway.served.url,
            gateway.issue(WRITE),
            generation,
            session="agent:main:dashboard:%C3%BCber%20uns",
        ) as client:
            listed = await use_tool(client, "sessions_list")
            assert [row["key"] for row in listed["sessions"]] == [own]
            assert (listed["scope"], listed["hiddenCount"]) == ("self", 1)
            refused = await use_tool(client, "sessions_send", sessionKey=HELPER, message="x")
            assert (refused["status"], refused["code"]) == ("error", "not_found")
            refused = await use_tool(client, "sessions_send", sessionKey="current", message="x")
            assert refused["code"] == "self_send"
            resources = (await client.list_resources()).resources
            assert [resource.name for resource in resources] == [own]
            with pytest.raises(MCPError, match="was not found"):
                await client.read_resource(f"antiphon://sessions/{HELPER}/history")
    settings = make_settings()
    async with (
        open_gateway(tmp_path, None, settings=settings) as gateway,
        connect_mcp(gateway.served.url, gateway.owner, generation, session="main") as client,
    ):
        sent = await use_tool(client, "sessions_send", sessionKey=HELPER, message="say hi", **QUIET)
        assert sent["reply"] == "hi"
        page = await gateway.operations.transcripts.read(OPERATOR, HELPER, HistoryFilter())
        [message] = [item for item in page.messages if item["role"] == "user"]
        assert message["provenance"]["sourceSessionKey"] == MAIN


@pytest.mark.requirement("P3", "SEC6")
async def test_a_sub_agents_session_has_no_session_tools(tmp_path: Path) -> None:
    async with open_gateway(tmp_path, None, settings=make_settings()) as gateway:
        async with connect_mcp(gateway.served.url, gateway.owner) as client:
            spawned = await use_tool(client, "sessions_spawn", task="say x", announce="none")
        child = spawned["childSessionKey"]
        async with connect_mcp(gateway.served.url, gateway.owner, session=child) as client:
            assert (await client.list_tools()).tools == []
            assert (await client.list_resources()).resources == []
            with pytest.raises(MCPError, match="There is no tool 'sessions_list'"):
                await client.call_tool("sessions_list", {})


@pytest.mark.requirement("V3", "SEC4")
@pytest.mark.parametrize("session", [None, "main", "agent:main:dashboard:new"])
@pytest.mark.parametrize("scope", [READ, WRITE, ADMIN])
async def test_a_token_does_nothing_that_its_scopes_do_not_allow(
    tmp_path: Path, scope: str, session: str | None
) -> None:
    """Each tool, as an operator and as a session whose agent may do all of it."""
    calls: dict[str, Json] = {
        "sessions_list": {},
        "sessions_history": {"sessionKey": "main"},
        "sessions_search": {"query": "words"},
        "session_status": {"sessionKey": "main"},
        "agents_list": {},
        "sessions_send": {"sessionKey": HELPER, "message": "x", "timeoutSeconds": 0},
        "sessions_spawn": {"task": "x", "announce": "none"},
        "subagents": {"action": "kill", "target": "all"},
    }
    assert list(calls) == TOOLS
    async with open_gateway(tmp_path, None, settings=make_settings()) as gateway:
        for key in (MAIN, HELPER):
            await gateway.operations.sessions.open(OPERATOR, key)
        if scope == READ and session is not None:
            await gateway.operations.sessions.open(OPERATOR, session)
        before = dump_database(gateway.database)
        async with connect_mcp(gateway.served.url, gateway.issue(scope), session=session) as client:
            offered = [tool.name for tool in (await client.list_tools()).tools]
            assert offered == (READING if scope == READ else TOOLS)
            for name, arguments in calls.items():
                answer = await use_tool(client, name, **arguments)
                if scope == READ and name not in READING:
                    assert answer["status"] == "forbidden", name
                    assert WRITE in answer["error"]
                else:
                    assert answer.get("status", "ok") in ("ok", "accepted"), answer
                if scope == READ:
                    now = dump_database(gateway.database)
                    assert {table for table in now if now[table] != before[table]} <= {
                        "message_words",
                        "search_cursor",
                    }, name


async def test_a_reading_token_creates_no_session_by_naming_it(tmp_path: Path) -> None:
    async with open_gateway(tmp_path, None, settings=make_settings()) as gateway:
        async with connect_mcp(
            gateway.served.url, gateway.issue(READ), session="agent:main:dashboard:new"
        ) as client:
            with pytest.raises(MCPError, match="was not found"):
                await client.list_tools()
        assert (await gateway.operations.sessions.get_summary(OPERATOR)).sessions == 0


# --- resources ---


@pytest.mark.requirement("H3", "H4")
@generations
async def test_transcripts_are_resources_in_pages(
    tmp_path: Path, generation: Generation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mcp, "RESOURCES_PER_PAGE", 2)
    key = "agent:main:telegram:group:a/b c?d#e"
    async with (
        open_gateway(tmp_path, settings=make_settings()) as gateway,
        connect_mcp(gateway.served.url, gateway.issue(READ), generation) as client,
    ):
        for session in (MAIN, HELPER, key):
            await gateway.operations.sessions.open(OPERATOR, session)
        for text in ("one", "two", "three"):
            accepted = await gateway.operations.messages.submit(
                OPERATOR, IncomingMessage(session=key, content=text)
            )
            await gateway.operations.runs.wait(OPERATOR, accepted.run_id, BOUND)
        first = await client.list_resources()
        second = await client.list_resources(cursor=first.next_cursor)
        resources = [*first.resources, *second.resources]
        assert second.next_cursor is None
        assert {resource.name for resource in resources} == {MAIN, HELPER, key}
        [uri] = [resource.uri for resource in resources if resource.name == key]
        [template] = (await client.list_resource_templates()).resource_templates
        assert template.uri_template.startswith("antiphon://sessions/{sessionKey}/history{?")
        shown: list[str] = []
        cursor = ""
        while True:
            [content] = (await client.read_resource(f"{uri}?limit=2{cursor}")).contents
            page = json.loads(getattr(content, "text", ""))
            shown = [item["id"] for item in page["messages"]] + shown
            if not page["hasMore"]:
                break
            cursor = f"&cursor={page['nextCursor']}"
        whole = await gateway.operations.transcripts.read(OPERATOR, key, HistoryFilter())
        assert shown == [item["id"] for item in whole.messages]
        for wrong in (
            f"antiphon://sessions/{MAIN}/other",
            f"antiphon://elsewhere/{MAIN}/history",
            "antiphon://sessions/agent:main:nobody/history",
            "file:///etc/passwd",
            "antiphon://[",
            f"antiphon://sessions/{MAIN}/history?path=x",
            f"antiphon://sessions/{MAIN}/history?limit=many",
        ):
            with pytest.raises(MCPError, match=r"no resource|not found|not a parameter|limit"):
                await client.read_resource(wrong)


# --- waits ---


@generations
async def test_a_wait_without_progress_ends_as_accepted(
    tmp_path: Path, generation: Generation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mcp, "MAX_WAIT_SECONDS", 0.2)
    async with (
        open_slow_gateway(tmp_path) as (gateway, agent),
        connect_mcp(gateway.served.url, gateway.owner, generation, session="main") as client,
    ):
        sent = await use_tool(client, "sessions_send", agentId="helper", message="x", timeoutSeconds=300)
        assert sent["status"] == "accepted"
        assert sent["delivery"]["status"] == "started"
        agent.released.set()
        view = await gateway.operations.runs.wait(OPERATOR, sent["runId"], BOUND)
        assert (view.state, view.reply) == ("ok", "at last")
        page = await gateway.operations.transcripts.read(OPERATOR, HELPER, HistoryFilter())
        assert [item["content"] for item in page.messages if item["role"] == "user"] == ["x"]


async def test_a_wait_that_is_asked_to_be_short_ends_as_a_timeout(tmp_path: Path) -> None:
    async with (
        open_slow_gateway(tmp_path) as (gateway, _),
        connect_mcp(gateway.served.url, gateway.owner) as client,
    ):
        sent = await use_tool(client, "sessions_send", agentId="helper", message="x", timeoutSeconds=0.1)
        assert sent["status"] == "timeout"


@generations
async def test_a_wait_with_progress_lasts_as_long_as_asked(
    tmp_path: Path, generation: Generation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mcp, "MAX_WAIT_SECONDS", 0.05)
    monkeypatch.setattr(mcp, "PROGRESS_SECONDS", 0.1)
    async with (
        open_slow_gateway(tmp_path) as (gateway, agent),
        connect_mcp(gateway.served.url, gateway.owner, generation) as client,
    ):
        reports: list[tuple[float, float | None, str | None]] = []

        async def note(progress: float, total: float | None, message: str | None) -> None:
            reports.append((progress, total, message))
            if len(reports) == 3:
                agent.released.set()

        arguments = {"agentId": "helper", "message": "x", "timeoutSeconds": 300, **QUIET}
        result = await client.call_tool("sessions_send", arguments, progress_callback=note)
        assert result.structured_content is not None
        assert (result.structured_content["status"], result.structured_content["reply"]) == ("ok", "at last")
        assert len(reports) >= 3
        assert {total for _, total, _ in reports} == {300}
        assert all(message and message.startswith("Waiting") for *_, message in reports)


@generations
async def test_a_cancelled_call_drops_the_wait_and_not_the_run(
    tmp_path: Path, generation: Generation
) -> None:
    async with (
        open_slow_gateway(tmp_path) as (gateway, agent),
        connect_mcp(gateway.served.url, gateway.owner, generation) as client,
    ):
        arguments = {"agentId": "helper", "message": "x", "idempotencyKey": "k", "timeoutSeconds": 300}
        call = asyncio.create_task(client.call_tool("sessions_send", arguments))
        async with asyncio.timeout(BOUND):
            await agent.started.wait()
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        assert (await gateway.operations.runs.get(OPERATOR, "k")).state == "running"
        agent.released.set()
        assert (await gateway.operations.runs.wait(OPERATOR, "k", BOUND)).reply == "at last"


async def test_a_client_that_leaves_costs_nothing_and_its_run_goes_on(tmp_path: Path) -> None:
    async with open_slow_gateway(tmp_path) as (gateway, agent):
        before = gateway.app.bus.count_listeners()  # pyright: ignore
        arguments = {"agentId": "helper", "message": "x", "idempotencyKey": "k", "timeoutSeconds": 300}
        call = {"name": "sessions_send", "arguments": arguments, "_meta": {"progressToken": "p"}}
        async with gateway.http() as http:
            body = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": call}
            request = asyncio.create_task(http.post("/mcp", json=body, headers=ACCEPT))
            async with asyncio.timeout(BOUND):
                await agent.started.wait()
            request.cancel()
            await asyncio.gather(request, return_exceptions=True)
        agent.released.set()
        assert (await gateway.operations.runs.wait(OPERATOR, "k", BOUND)).reply == "at last"

        async def is_forgotten() -> bool:
            return gateway.app.bus.count_listeners() == before  # pyright: ignore

        await wait_until(is_forgotten)


async def test_a_gateway_that_stops_ends_waits_as_accepted(tmp_path: Path) -> None:
    async with open_slow_gateway(tmp_path) as (gateway, agent):
        client: Client
        async with connect_mcp(gateway.served.url, gateway.owner) as client:
            call = asyncio.create_task(
                use_tool(client, "sessions_send", agentId="helper", message="x", timeoutSeconds=300)
            )
            async with asyncio.timeout(BOUND):
                await agent.started.wait()
                gateway.served.gateway.closing.set()
                sent = await call
        assert sent["status"] == "accepted"


# --- the door ---

ACCEPT = {"Accept": "application/json, text/event-stream"}
INITIALIZE: Json = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "initialize",
    "params": {
        "protocolVersion": "2025-11-25",
        "capabilities": {},
        "clientInfo": {"name": "test", "version": "1"},
    },
}


def read_answer(response: httpx2.Response) -> Json:
    """The message in a response, which is JSON or one server-sent event."""
    if response.headers["content-type"].startswith("text/event-stream"):
        [data] = [line for line in response.text.splitlines() if line.startswith("data:")]
        return json.loads(data.removeprefix("data:"))
    return response.json()


def make_modern_request(method: str, **params: Any) -> tuple[Json, dict[str, str]]:
    meta = {
        "io.modelcontextprotocol/protocolVersion": "2026-07-28",
        "io.modelcontextprotocol/clientInfo": {"name": "test", "version": "1"},
        "io.modelcontextprotocol/clientCapabilities": {},
    }
    body = {"jsonrpc": "2.0", "id": 1, "method": method, "params": {**params, "_meta": meta}}
    headers = {**ACCEPT, "MCP-Protocol-Version": "2026-07-28", "Mcp-Method": method}
    return body, headers | ({"Mcp-Name": params["name"]} if "name" in params else {})


async def test_2025_11_25_needs_no_session_and_an_unknown_one_is_not_found(tmp_path: Path) -> None:
    async with open_gateway(tmp_path, None, settings=make_settings()) as gateway, gateway.http() as http:
        response = await http.post("/mcp", json=INITIALIZE, headers=ACCEPT)
        assert response.status_code == 200
        assert "mcp-session-id" not in response.headers
        result = read_answer(response)["result"]
        assert result["protocolVersion"] == "2025-11-25"
        assert result["capabilities"].keys() == {"tools", "resources"}
        listed = {"jsonrpc": "2.0", "id": "a", "method": "tools/list"}
        current = {**ACCEPT, "MCP-Protocol-Version": "2025-11-25"}
        response = await http.post("/mcp", json=listed, headers=current)
        assert [tool["name"] for tool in read_answer(response)["result"]["tools"]] == TOOLS
        stale = {**current, "Mcp-Session-Id": "from another server"}
        for body in (listed, INITIALIZE):
            response = await http.post("/mcp", json=body, headers=stale)
            assert response.status_code == 404
            assert response.json()["error"]["message"] == "Session not found. Initialize again."
        initialized = {"jsonrpc": "2.0", "method": "notifications/initialized"}
        assert (await http.post("/mcp", json=initialized, headers=current)).status_code == 202


async def test_2026_07_28_is_discovered_cacheable_and_strict_about_headers(tmp_path: Path) -> None:
    async with open_gateway(tmp_path, None, settings=make_settings()) as gateway, gateway.http() as http:
        body, headers = make_modern_request("server/discover")
        found = (await http.post("/mcp", json=body, headers=headers)).json()["result"]
        assert found["supportedVersions"] == ["2026-07-28"]
        assert found["resultType"] == "complete"
        body, headers = make_modern_request("tools/list")
        listed = (await http.post("/mcp", json=body, headers=headers)).json()["result"]
        assert (listed["ttlMs"], listed["cacheScope"]) == (mcp_ttl(), "private")
        assert listed["_meta"]["io.modelcontextprotocol/serverInfo"]["name"] == "antiphon"
        body, headers = make_modern_request("tools/call", name="sessions_list", arguments={})
        assert (await http.post("/mcp", json=body, headers=headers)).status_code == 200
        for wrong in ({"Mcp-Name": "sessions_send"}, {"Mcp-Method": "tools/list"}):
            response = await http.post("/mcp", json=body, headers={**headers, **wrong})
            assert response.status_code == 400
            assert response.json()["error"]["code"] == -32020  # the header does not match the body
        for missing in ("Mcp-Name", "Mcp-Method"):
            left = {name: value for name, value in headers.items() if name != missing}
            assert (await http.post("/mcp", json=body, headers=left)).status_code == 400
        body, headers = make_modern_request("initialize")
        assert (await http.post("/mcp", json=body, headers=headers)).status_code == 404


def mcp_ttl() -> int:
    from antiphon.mcp.server.protocol import LIST_TTL_MS

    return LIST_TTL_MS


@pytest.mark.requirement("W7", "SEC2")
async def test_who_is_not_let_in_costs_nothing(tmp_path: Path) -> None:
    settings = make_settings()
    async with open_gateway(tmp_path, None, settings=settings) as gateway, gateway.http() as http:
        token = {"Authorization": f"Bearer {gateway.issue('operator.approvals')}"}
        foreign = {"Origin": "https://example.com"}
        own = {"Origin": str(http.base_url).rstrip("/")}
        large = b" " * (mcp.MAX_BODY_BYTES + 1)
        for headers, status in (
            ({"Authorization": ""}, 401),
            ({"Authorization": "Bearer wrong"}, 401),
            (token, 403),
            (foreign, 403),
            ({"X-Antiphon-Session-Key": "%20"}, 400),
            ({}, 413),
        ):
            response = await http.post("/mcp", content=large, headers={**ACCEPT, **headers})
            assert response.status_code == status, (headers, response.text)
        assert (await http.post("/mcp?token=x", json=INITIALIZE, headers=ACCEPT)).status_code == 400
        assert (await http.post("/mcp", json=INITIALIZE, headers={**ACCEPT, **own})).status_code == 200
        for method in ("GET", "DELETE", "PUT"):
            response = await http.request(method, "/mcp", headers=ACCEPT)
            assert (response.status_code, response.headers["allow"]) == (405, "POST")


async def test_the_host_is_checked_where_no_token_is(tmp_path: Path) -> None:
    settings = make_settings(gateway={"auth": {"mode": "none"}})
    async with open_gateway(tmp_path, None, settings=settings) as gateway, gateway.http("") as http:
        http.headers.clear()
        assert (await http.post("/mcp", json=INITIALIZE, headers=ACCEPT)).status_code == 200
        rebound = {**ACCEPT, "Host": "attacker.example"}
        assert (await http.post("/mcp", json=INITIALIZE, headers=rebound)).status_code == 403


async def test_it_can_be_switched_off(tmp_path: Path) -> None:
    settings = make_settings(gateway={"mcp": {"enabled": False}})
    async with open_gateway(tmp_path, None, settings=settings) as gateway, gateway.http() as http:
        response = await http.post("/mcp", json=INITIALIZE, headers=ACCEPT)
        assert response.status_code == 404
        assert "Set gateway.mcp.enabled to true" in response.json()["error"]["message"]


async def test_tools_that_the_gateway_denies_are_not_offered(tmp_path: Path) -> None:
    settings = make_settings(gateway={"tools": {"deny": ["sessions_send", "sessions_spawn"]}})
    async with (
        open_gateway(tmp_path, None, settings=settings) as gateway,
        connect_mcp(gateway.served.url, gateway.owner) as client,
    ):
        offered = {tool.name for tool in (await client.list_tools()).tools}
        assert offered == {*TOOLS} - {"sessions_send", "sessions_spawn"}
        with pytest.raises(MCPError, match="There is no tool"):
            await client.call_tool("sessions_send", {"agentId": "helper", "message": "x"})


async def test_open_requests_are_limited_in_number(tmp_path: Path) -> None:
    agent = SlowAgent()
    async with open_http_gateway(tmp_path, agent) as gateway:
        arguments = {"agentId": "main", "message": "x", "timeoutSeconds": 300, **QUIET}
        body, headers = make_modern_request("tools/call", name="sessions_send", arguments=arguments)
        request = asyncio.create_task(gateway.http.post("/mcp", json=body, headers=headers))
        async with asyncio.timeout(BOUND):
            await agent.started.wait()
        slots = gateway.web.slots
        slots.max_open = slots.open_count
        response = await gateway.http.post("/mcp", json=INITIALIZE, headers=ACCEPT)
        assert response.status_code == 503
        agent.released.set()
        assert (await request).status_code == 200
        response = await gateway.http.post("/mcp", json=INITIALIZE, headers=ACCEPT)
        assert response.status_code == 200
        assert slots.open_count == 0


def test_a_gateway_that_serves_no_mcp_does_not_import_it() -> None:
    import subprocess

    script = (
        "import antiphon.gateway.server, antiphon.cli.up, sys;"
        "print([name for name in ('mcp', 'mcp_types') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


async def test_spaces_around_a_header_do_not_count(tmp_path: Path) -> None:
    """The parser keeps those at the end, and `Mcp-Name` has to match the body."""
    async with open_gateway(tmp_path, None, settings=make_settings()) as gateway:
        host, port = gateway.served.url.removeprefix("ws://").split(":")
        meta = {
            "io.modelcontextprotocol/protocolVersion": "2026-07-28",
            "io.modelcontextprotocol/clientInfo": {"name": "test", "version": "1"},
            "io.modelcontextprotocol/clientCapabilities": {},
        }
        params = {"name": "sessions_list", "arguments": {}, "_meta": meta}
        request = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
        body = json.dumps(request).encode()
        head = (
            f"POST /mcp HTTP/1.1\r\nHost: {host}:{port}\r\nAuthorization: Bearer {gateway.owner}\r\n"
            "Content-Type: application/json\r\nAccept: application/json, text/event-stream\r\n"
            "MCP-Protocol-Version: 2026-07-28\r\nMcp-Method: tools/call\r\nMcp-Name:   sessions_list  \r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        async with asyncio.timeout(BOUND):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(head.encode() + body)
            answer = await reader.read()
            writer.close()
        assert answer.startswith(b"HTTP/1.1 200 "), answer
