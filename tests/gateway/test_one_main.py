"""`session.scope: "global"`: one main session for all agents, which every door takes and calls `main`."""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any

import httpx2
import pytest

from antiphon.runtimes import Prompt
from support.app_fixture import BOUND, OPERATOR
from support.gateway_http import ALL_ENDPOINTS, HOOK_TOKEN
from support.gateway_ws import Client, open_gateway

pytestmark = [pytest.mark.anyio, pytest.mark.requirement("K3")]

SETTINGS: dict[str, Any] = {
    **ALL_ENDPOINTS,
    "gateway": {**ALL_ENDPOINTS["gateway"], "tools": {"allow": ["sessions_send", "sessions_spawn"]}},
    "hooks": {**ALL_ENDPOINTS["hooks"], "allowRequestSessionKey": True},
    "session": {"scope": "global"},
    "agents": {"list": [{"id": "main", "default": True}, {"id": "helper"}]},
    "tools": {"sessions": {"visibility": "all"}, "agentToAgent": {"enabled": True}},
}
ALIASES = ("main", "agent:main:main", "agent:helper:main")
SIDE = "agent:main:dashboard:side"


async def main(prompt: Prompt) -> str:
    return "main was here"


async def helper(prompt: Prompt) -> str:
    return "helper was here"


class Walk:
    """Everything that was answered and told on the way."""

    def __init__(self, client: Client, http: httpx2.AsyncClient) -> None:
        self.client, self.http = client, http
        self.heard: list[str] = []

    async def call(self, method: str, **params: Any) -> Any:
        answer = await self.client.ask(method, params)
        self.heard.append(json.dumps(answer))
        assert answer.ok, (method, params, answer.error)
        return answer.payload

    async def get(self, method: str, path: str, **options: Any) -> Any:
        response = await self.http.request(method, path, **options)
        self.heard.append(response.text)
        assert response.status_code == 200, (path, response.text)
        return response.json()

    async def tool(self, name: str, session: str = SIDE, **args: Any) -> Any:
        body = {"tool": name, "args": args, "sessionKey": session}
        return (await self.get("POST", "/tools/invoke", json=body))["result"]["details"]

    async def says(self, session: str, **params: Any) -> str:
        given = {"sessionKey": session, "message": "hello", "idempotencyKey": uuid.uuid4().hex, **params}
        sent = await self.call("chat.send", **given)
        return (await self.call("agent.wait", runId=sent["runId"]))["reply"]


@pytest.mark.parametrize("alias", ALIASES)
async def test_every_door_takes_every_name_of_the_one_session_and_calls_it_main(
    tmp_path: Path, alias: str, caplog: pytest.LogCaptureFixture
) -> None:
    agents = {"helper": helper}
    async with (
        open_gateway(tmp_path, main, settings=SETTINGS, agents=agents) as gateway,
        gateway.client() as client,
        gateway.http() as http,
    ):
        walk = Walk(client, http)
        await walk.call("sessions.subscribe")
        await walk.says(alias)
        assert (await walk.call("sessions.messages.subscribe", key=alias))["key"] == "main"
        await walk.says(SIDE)
        for method in ("chat.history", "chat.startup"):
            assert (await walk.call(method, sessionKey=alias))["sessionInfo"]["key"] == "main"
        for method in ("sessions.describe", "sessions.get", "sessions.history", "sessions.usage"):
            assert await walk.call(method, key=alias)
        assert (await walk.call("sessions.resolve", key=alias))["key"] == "main"
        assert (await walk.call("sessions.preview", keys=[alias]))["previews"][0]["status"] == "ok"
        assert (await walk.call("sessions.search", query="here", sessionKeys=[alias]))["results"]
        assert {row["key"] for row in (await walk.call("sessions.list"))["sessions"]} == {"main", SIDE}
        assert (await walk.call("sessions.patch", key=alias, label="ours"))["key"] == "main"
        key = uuid.uuid4().hex
        assert (await walk.call("sessions.send", key=alias, message="hi", idempotencyKey=key))["runId"] == key
        assert (await walk.call("agent.wait", runId=key))["run"]["sessionKey"] == "main"
        key = uuid.uuid4().hex
        await walk.call("agent", message="hi", sessionKey=alias, idempotencyKey=key)
        await walk.call("agent.wait", runId=key)
        sent = await walk.call("sessions.send", key=alias, message="hi", fromSessionKey=SIDE, replyBack=1)
        assert (sent["status"], sent["sessionKey"]) == ("ok", "main")
        await walk.call("chat.abort", sessionKey=alias)
        await walk.call("sessions.steer", key=alias, message="hi")
        await walk.call("exchanges.list")
        await walk.call("status")
        page = await walk.get("GET", f"/sessions/{alias}/history")
        assert page["sessionKey"] == "main"
        completions = {"model": "antiphon/default", "messages": [{"role": "user", "content": "hi"}]}
        named = {"x-antiphon-session-key": "main"}
        await walk.get("POST", "/v1/chat/completions", json=completions, headers=named)
        hook = {"Authorization": f"Bearer {HOOK_TOKEN}"}
        body = {"message": "hi", "sessionKey": alias}
        hooked = await walk.get("POST", "/hooks/agent", json=body, headers=hook)
        assert hooked["sessionKey"] == "main"
        for tool in ("sessions_history", "session_status"):
            assert (await walk.tool(tool, sessionKey=alias))["sessionKey"] == "main"
        answered = await walk.tool("sessions_send", sessionKey=alias, message="hi", replyBack=1)
        assert (answered["status"], answered["sessionKey"]) == ("ok", "main")
        rows = {row["key"] for row in (await walk.tool("sessions_list", messageLimit=20))["sessions"]}
        assert "main" in rows
        for run in (hooked["runId"], f"announce:{sent['runId']}", f"announce:{answered['runId']}"):
            await walk.call("agent.wait", runId=run)
        await walk.call("sessions.compact", key=alias, maxLines=1)
        assert (await walk.call("sessions.reset", key=alias))["key"] == "main"
        await client.settled()
        walk.heard += [json.dumps(frame) for frame in client.events]
        assert not [text for text in walk.heard if "global" in text.lower()]
    assert "global" not in caplog.text.lower()


async def test_the_addressed_agent_answers_in_the_one_session(tmp_path: Path) -> None:
    agents = {"helper": helper}
    async with (
        open_gateway(tmp_path, main, settings=SETTINGS, agents=agents) as gateway,
        gateway.client() as client,
        gateway.http() as http,
    ):
        walk = Walk(client, http)
        assert await walk.says("main") == "main was here"
        assert await walk.says("main", agentId="helper") == "helper was here"
        for params, expected in (
            ({"agentId": "helper"}, "helper was here"),
            ({"agentId": "main"}, "main was here"),
            ({}, "main was here"),
            ({"sessionKey": "agent:helper:main"}, "helper was here"),
        ):
            key = uuid.uuid4().hex
            await walk.call("agent", message="who?", idempotencyKey=key, **params)
            assert (await walk.call("agent.wait", runId=key))["reply"] == expected
        await walk.says(SIDE)
        sent = await walk.tool("sessions_send", agentId="helper", message="who?")
        assert (sent["status"], sent["reply"], sent["sessionKey"]) == ("ok", "helper was here", "main")
        hook = {"Authorization": f"Bearer {HOOK_TOKEN}"}
        body = {"message": "who?", "agentId": "helper", "sessionKey": "main"}
        hooked = await walk.get("POST", "/hooks/agent", json=body, headers=hook)
        assert (
            await gateway.operations.runs.wait(OPERATOR, hooked["runId"], BOUND)
        ).reply == "helper was here"
        body = {"model": "antiphon/helper", "messages": [{"role": "user", "content": "who?"}]}
        named = {"x-antiphon-session-key": "main"}
        answer = await walk.get("POST", "/v1/chat/completions", json=body, headers=named)
        assert answer["choices"][0]["message"]["content"] == "helper was here"
        given = {"sessionKey": "agent:nobody:main", "message": "x", "idempotencyKey": "n"}
        assert (await client.ask("chat.send", given)).error["details"]["type"] == "not_found"


async def test_every_step_of_an_exchange_is_answered_by_whom_it_was_addressed_to(tmp_path: Path) -> None:
    agents = {"helper": helper}
    async with (
        open_gateway(tmp_path, main, settings=SETTINGS, agents=agents) as gateway,
        gateway.client() as client,
        gateway.http() as http,
    ):
        walk = Walk(client, http)
        await walk.says(SIDE)
        sent = await walk.tool("sessions_send", agentId="helper", message="who?", replyBack=2)
        for step in (f"turn:{sent['runId']}:2", f"announce:{sent['runId']}"):
            assert (await walk.call("agent.wait", runId=step))["reply"] == "helper was here"
        assert (await walk.call("agent.wait", runId=f"turn:{sent['runId']}:1"))["reply"] == "main was here"
