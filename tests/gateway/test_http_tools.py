"""Tools over HTTP: what is on offer, as whom it acts, and how it fails."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from antiphon.access import Caller
from antiphon.engine.toolbox import Tool, ToolOutput, ToolRequest
from antiphon.errors import Forbidden, NotFound, StoreFull
from antiphon.gateway import tool_invocations
from antiphon.operations.types import ListFilter
from antiphon.runtimes import Prompt, ToolSpec
from support.app_fixture import MAIN, OPERATOR, make_tool
from support.gateway_http import HttpGatewayFixture, open_http_gateway

pytestmark = [pytest.mark.anyio, pytest.mark.requirement("W5")]

IN_SANDBOXES = {"sandbox": {"tools": {"alsoAllow": ["look", "other"]}}}
AGENTS = {"list": [{"id": "main"}, {"id": "work", "tools": {"deny": ["look"]}, "sandbox": {"mode": "all"}}]}


class Box:
    """Tools that remember their calls."""

    def __init__(self) -> None:
        self.calls: list[ToolRequest] = []

    def tools(self, *_: object) -> Iterable[Tool]:
        spec = ToolSpec(name="look", description="", parameters={"properties": {"action": {}}})
        yield Tool(spec=spec, invoke=self._look, has_side_effects=False)
        for name in ("sessions_send", "exec", "other"):
            yield make_tool(name, self._look, has_side_effects=name != "other")
        yield make_tool("refuses", self._refuses, has_side_effects=False)
        yield make_tool("misses", self._misses, has_side_effects=False)
        yield make_tool("breaks", self._breaks, has_side_effects=False)
        yield make_tool("full", self._full, has_side_effects=False)
        yield make_tool("hangs", self._hangs, has_side_effects=False)

    async def _look(self, call: ToolRequest) -> ToolOutput:
        self.calls.append(call)
        return ToolOutput(text="seen", details={"n": len(self.calls)})

    async def _refuses(self, _: ToolRequest) -> ToolOutput:
        return ToolOutput(text="I would rather not.", is_error=True)

    async def _misses(self, _: ToolRequest) -> ToolOutput:
        raise NotFound("It is not here.", "Look elsewhere.")

    async def _breaks(self, _: ToolRequest) -> ToolOutput:
        raise RuntimeError("a secret detail")

    async def _full(self, _: ToolRequest) -> ToolOutput:
        raise StoreFull("The disk is full.", "Make room.")

    async def _hangs(self, _: ToolRequest) -> ToolOutput:
        await asyncio.Event().wait()
        return ToolOutput(text="")


def opened(path: Path, box: Box, **gateway: Any) -> AbstractAsyncContextManager[HttpGatewayFixture]:
    settings = {"agents": AGENTS, "gateway": gateway, "tools": IN_SANDBOXES}
    return open_http_gateway(path, settings=settings, tools=box.tools)


async def invoke(
    http_gateway: HttpGatewayFixture, body: dict[str, Any], **headers: str
) -> tuple[int, dict[str, Any]]:
    reply = await http_gateway.http.post("/tools/invoke", json=body, headers=headers)
    return reply.status_code, reply.json()


async def test_a_tool_acts_as_the_main_session_unless_another_is_named(tmp_path: Path) -> None:
    box = Box()
    async with opened(tmp_path, box) as http_gateway:
        status, body = await invoke(http_gateway, {"tool": "look", "args": {"a": 1}})
        assert status == 200
        assert body == {
            "ok": True,
            "result": {"content": [{"type": "text", "text": "seen"}], "details": {"n": 1}},
        }
        await invoke(http_gateway, {"name": "other", "sessionKey": "agent:work:telegram:group:7"})
        await invoke(http_gateway, {"tool": "other", "agentId": "work"})
        callers = [
            (call.caller.agent_id, call.caller.session_key, call.caller.sandboxed) for call in box.calls
        ]
        assert callers == [
            ("main", MAIN, False),
            ("work", "agent:work:telegram:group:7", True),
            ("work", "agent:work:main", True),
        ]
        assert box.calls[0].arguments == {"a": 1}
        assert not any(call.caller.is_operator for call in box.calls)


async def test_a_tool_that_is_not_there_looks_like_one_that_is_denied(tmp_path: Path) -> None:
    box = Box()
    async with opened(tmp_path, box, tools={"deny": ["other"]}) as http_gateway:
        for name in ("nothing", "sessions_send", "exec", "other"):
            status, body = await invoke(
                http_gateway, {"tool": name, "sessionKey": "agent:main:telegram:group:new"}
            )
            assert status == 404
            assert body["error"]["type"] == "not_found"
            assert body["error"]["message"].startswith(f"Tool not available: {name}")
        status, body = await invoke(http_gateway, {"tool": "look", "agentId": "work"})
        assert (status, body["error"]["type"]) == (404, "not_found")
        sessions = (await http_gateway.app.operations.sessions.list(OPERATOR, ListFilter())).sessions
        assert [session.key for session in sessions] == ["agent:work:main"]
        assert not box.calls


@pytest.mark.requirement("SEC12")
async def test_a_tool_that_acts_is_lifted_by_its_name_alone(tmp_path: Path) -> None:
    box = Box()
    async with opened(tmp_path, box, tools={"allow": ["sessions_send", "*"]}) as http_gateway:
        assert (await invoke(http_gateway, {"tool": "sessions_send"}))[0] == 200
        assert (await invoke(http_gateway, {"tool": "exec"}))[0] == 404
    async with opened(tmp_path, box, tools={"allow": ["exec"], "deny": ["exec"]}) as http_gateway:
        assert (await invoke(http_gateway, {"tool": "exec"}))[0] == 404


async def test_a_field_that_is_not_known_is_named_shortly(tmp_path: Path) -> None:
    async with opened(tmp_path, Box()) as http_gateway:
        status, body = await invoke(http_gateway, {"tool": "look", "x" * 1_000_000: 1})
        assert (status, body["error"]["type"]) == (400, "invalid_request")
        assert "unknown field `xxx" in body["error"]["message"]
        assert len(body["error"]["message"]) < 1000


async def test_an_idempotency_key_becomes_the_key_of_the_call(tmp_path: Path) -> None:
    box = Box()
    async with opened(tmp_path, box) as http_gateway:
        await invoke(http_gateway, {"tool": "look"}, **{"Idempotency-Key": "again"})
        await invoke(http_gateway, {"tool": "look"})
        assert [box.calls[0].key, box.calls[1].key != "http:agent:main:main:again"] == [
            "http:agent:main:main:again",
            True,
        ]
        status, _ = await invoke(http_gateway, {"tool": "look"}, **{"Idempotency-Key": "x" * 201})
        assert status == 400


async def test_an_action_is_an_argument_where_the_tool_knows_one(tmp_path: Path) -> None:
    box = Box()
    async with opened(tmp_path, box) as http_gateway:
        await invoke(http_gateway, {"tool": "look", "action": "up"})
        await invoke(http_gateway, {"tool": "look", "action": "up", "args": {"action": "down"}})
        await invoke(http_gateway, {"tool": "other", "action": "up"})
        assert [call.arguments for call in box.calls] == [{"action": "up"}, {"action": "down"}, {}]


async def test_a_dry_run_calls_nothing(tmp_path: Path) -> None:
    box = Box()
    async with opened(tmp_path, box) as http_gateway:
        status, body = await invoke(http_gateway, {"tool": "look", "dryRun": True})
        assert (status, body["result"]["details"]) == (200, {"dryRun": True})
        assert not box.calls


async def test_what_contradicts_itself_is_refused(tmp_path: Path) -> None:
    async with opened(tmp_path, Box()) as http_gateway:
        bodies: list[dict[str, Any]] = [
            {},
            {"tool": ""},
            {"tool": "look", "sessionKey": "main", "agentId": "work"},
            {"tool": "look", "sessionKey": ""},
            {"tool": "look", "agentId": "no such/agent"},
            {"tool": "look", "args": []},
        ]
        for body in bodies:
            status, answer = await invoke(http_gateway, body)
            assert (status, answer["error"]["type"]) == (400, "invalid_request"), body
        assert (await invoke(http_gateway, {"tool": "look", "agentId": "nobody"}))[0] == 404
        assert (await invoke(http_gateway, {"tool": "look", "sessionKey": "agent:nobody:main"}))[0] == 404


async def test_a_tool_that_fails_says_how_if_it_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool_invocations, "TOOL_TIMEOUT_SECONDS", 0.05)
    async with opened(tmp_path, Box()) as http_gateway:
        status, body = await invoke(http_gateway, {"tool": "refuses"})
        assert (status, body["ok"]) == (200, True)
        assert body["result"] == {
            "content": [{"type": "text", "text": "I would rather not."}],
            "details": {"status": "error", "error": "I would rather not."},
        }
        status, body = await invoke(http_gateway, {"tool": "misses"})
        assert (status, body["result"]["details"]["status"]) == (200, "error")
        status, body = await invoke(http_gateway, {"tool": "breaks"})
        assert (status, body["error"]["type"]) == (500, "tool_error")
        assert "secret" not in body["error"]["message"]
        assert (await invoke(http_gateway, {"tool": "hangs"}))[0] == 504
        assert (await invoke(http_gateway, {"tool": "full"}))[0] == 503


@pytest.mark.requirement("V2", "SEC6")
async def test_a_session_that_was_put_into_a_sandbox_stays_there(tmp_path: Path) -> None:
    box, group = Box(), "agent:work:telegram:group:7"
    async with opened(tmp_path, box) as http_gateway:
        await http_gateway.app.operations.sessions.open(OPERATOR, group)
    free = {"agents": {"list": [{"id": "main"}, {"id": "work"}]}, "tools": IN_SANDBOXES}
    async with open_http_gateway(tmp_path, settings=free, tools=box.tools) as http_gateway:
        await invoke(http_gateway, {"tool": "other", "sessionKey": group})
        await invoke(http_gateway, {"tool": "other", "agentId": "work"})
        assert [call.caller.sandboxed for call in box.calls] == [True, False]


@pytest.mark.requirement("SEC4")
async def test_an_agent_acts_only_as_itself(tmp_path: Path) -> None:
    async with opened(tmp_path, Box()) as http_gateway:
        with pytest.raises(Forbidden):
            await http_gateway.app.operations.sessions.act_as(Caller.agent("main", MAIN), MAIN)


@pytest.mark.requirement("G4", "003-send-timeout")
async def test_a_tool_may_wait_as_long_as_it_is_told_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool_invocations, "TOOL_TIMEOUT_SECONDS", 1)
    settings = {
        "gateway": {"tools": {"allow": ["sessions_send"]}},
        "tools": {"sessions": {"visibility": "all"}},
    }
    async with open_http_gateway(tmp_path, _never, settings=settings) as http_gateway:
        await http_gateway.app.operations.sessions.open(OPERATOR, "agent:main:dashboard:other")
        args = {"sessionKey": "agent:main:dashboard:other", "message": "hello", "timeoutSeconds": 1.5}
        status, body = await invoke(http_gateway, {"tool": "sessions_send", "args": args})
        assert (status, body["result"]["details"]["status"]) == (200, "timeout")
        assert body["result"]["details"]["delivery"]["status"] == "started"


async def _never(_: Prompt) -> str:
    await asyncio.Event().wait()
    return ""
