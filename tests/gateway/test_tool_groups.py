"""Groups of tools: in every list `group:sessions` stands for its tools, and what is denied so is not there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from antiphon.engine.toolbox import Tool, ToolOutput, ToolRequest
from antiphon.operations.operations import Operations
from antiphon.operations.types import SpawnRequest
from support.app_fixture import BOUND, MAIN, OPERATOR, make_tool
from support.gateway_ws import open_gateway

pytestmark = [pytest.mark.anyio, pytest.mark.requirement("C", "V3")]

GROUP = "group:sessions"
LOOKING = {"sessions_list", "sessions_history", "sessions_search", "session_status"}
ACTING = {"sessions_send", "sessions_spawn", "sessions_yield", "subagents"}
OTHERS = {"agents_list", "read", "own"}
FOR_WORK = {
    "write", "edit", "apply_patch", "exec", "process", "web_fetch", "memory_search", "memory_get", "cron", "message",
}  # fmt: skip
"""Built-in tools that `tests/test_tool_selection.py` is about."""
EVERY = LOOKING | ACTING | OTHERS


def tools(operations: Operations) -> list[Tool]:
    async def look(call: ToolRequest) -> ToolOutput:
        return ToolOutput(text="looked")

    return [make_tool("read", look), make_tool("own", look)]


@pytest.mark.parametrize(
    ("lists", "left"),
    [
        ({"deny": [GROUP]}, OTHERS),
        ({"allow": [GROUP]}, LOOKING | ACTING),
        ({"allow": [GROUP, "read"], "deny": ["sessions_*"]}, {"session_status", "subagents", "read"}),
        ({"deny": ["group:agents"]}, EVERY - {"agents_list"}),
        ({"deny": ["group:openclaw"]}, {"read", "own"}),
        ({"deny": ["Group:FS"]}, EVERY - {"read"}),
        ({"profile": "minimal"}, {"session_status", "own"}),
        ({"profile": "minimal", "alsoAllow": ["group:fs"]}, {"session_status", "own", "read"}),
    ],
)
@pytest.mark.parametrize("own", [False, True])
async def test_an_agent_has_what_the_group_stands_for(
    lists: dict[str, list[str]], left: set[str], own: bool, tmp_path: Path
) -> None:
    main = {"id": "main", "tools": lists if own else {}}
    settings = {"agents": {"list": [main]}, "tools": {} if own else lists}
    async with open_gateway(tmp_path, settings=settings, tools=tools) as gateway:
        assert set((await gateway.operations.sessions.act_as(OPERATOR, MAIN)).actor.tools) - FOR_WORK == left


@pytest.mark.parametrize(
    ("lists", "left"),
    [
        ({}, {"read", "own"}),
        ({"allow": [GROUP]}, (LOOKING | ACTING) - {"sessions_spawn"}),  # it is a leaf
        ({"alsoAllow": [GROUP]}, (LOOKING | ACTING | {"read", "own"}) - {"sessions_spawn"}),
        ({"alsoAllow": ["*"], "deny": [GROUP]}, OTHERS),
    ],
)
async def test_a_sub_agent_has_what_the_group_stands_for(
    lists: dict[str, list[str]], left: set[str], tmp_path: Path
) -> None:
    settings = {"tools": {"subagents": {"tools": lists}}}
    async with open_gateway(tmp_path, settings=settings, tools=tools) as gateway:
        spawned = await gateway.operations.subagents.spawn(
            OPERATOR, SpawnRequest(task="look", announce="none")
        )
        assert (await gateway.operations.runs.wait(OPERATOR, spawned.run_id, BOUND)).has_ended
        acting = await gateway.operations.sessions.act_as(OPERATOR, spawned.child_session_key)
        assert set(acting.actor.tools) - FOR_WORK == left


@pytest.mark.requirement("SEC12")
@pytest.mark.parametrize(
    ("lists", "left"),
    [
        ({}, LOOKING | {"agents_list"}),
        ({"allow": [GROUP]}, LOOKING | ACTING | {"agents_list"}),
        ({"allow": [GROUP, "read"], "deny": [GROUP]}, OTHERS - {"own"}),
    ],
)
async def test_over_http_there_is_what_the_group_stands_for(
    lists: dict[str, list[str]], left: set[str], tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"gateway": {"tools": lists}}
    async with open_gateway(tmp_path, settings=settings, tools=tools) as gateway, gateway.http() as http:
        replies = {
            name: await http.post("/tools/invoke", json={"tool": name, "dryRun": True}) for name in EVERY
        }
    assert {name for name, reply in replies.items() if reply.status_code == 200} == left


@pytest.mark.requirement("T2")
async def test_a_tool_is_offered_only_while_it_is_available_to_the_agent(tmp_path: Path) -> None:
    missing = {"main": "It needs a sandbox."}

    async def look(call: ToolRequest) -> ToolOutput:
        return ToolOutput(text="looked")

    def create(operations: Operations) -> list[Tool]:
        return [make_tool("own", look, unavailable=lambda agent_id, _: missing.get(agent_id))]

    settings = {"agents": {"list": [{"id": "main"}, {"id": "other"}]}}
    async with open_gateway(tmp_path, settings=settings, tools=create) as gateway, gateway.client() as client:

        async def has_tool(agent_id: str) -> list[bool]:
            actor = (await gateway.operations.sessions.act_as(OPERATOR, f"agent:{agent_id}:main")).actor
            [catalog] = (await client.call("tools.catalog", agentId=agent_id))["groups"]
            return ["own" in actor.tools, "own" in {tool["id"] for tool in catalog["tools"]}]

        assert (await has_tool("main"), await has_tool("other")) == ([False] * 2, [True] * 2)
        missing.clear()
        assert await has_tool("main") == [True] * 2


@pytest.mark.requirement("T2")
async def test_a_list_that_matches_no_tool_of_the_gateway_is_reported_at_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_gateway(tmp_path, settings={"tools": {"allow": ["nothing"]}}, tools=tools):
        pass
    assert "'tools.allow' matches no existing tool ('nothing')" in caplog.text
