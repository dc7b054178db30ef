"""Calls session tools as an agent does, and fills transcripts for them to find."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from antiphon.access import Caller
from antiphon.engine.sessions import session_rows
from antiphon.engine.toolbox import Tool, ToolOutput, ToolRequest
from antiphon.messages import AssistantMessage, Message, TextBlock, ToolResult, UserMessage
from antiphon.runtimes import Prompt
from antiphon.tools import create_session_tools
from support.app_fixture import MAIN, AppFixture

MAIN_AGENT = Caller.agent("main", MAIN)
NOW = 1_700_000_000_000
OPEN_ACCESS = {"tools": {"sessions": {"visibility": "all"}, "agentToAgent": {"enabled": True}}}


async def answer_briefly(prompt: Prompt) -> str:
    return "."


def list_tools(app: AppFixture) -> dict[str, Tool]:
    return {tool.spec.name: tool for tool in create_session_tools(app.operations)}


async def invoke_tool(
    app: AppFixture, name: str, arguments: Mapping[str, Any], caller: Caller = MAIN_AGENT
) -> ToolOutput:
    call = ToolRequest(caller=caller, run_id="run", call_id="call", arguments=arguments)
    result = await list_tools(app)[name].invoke(call)
    assert json.loads(result.text) == result.details, "text and data differ"
    return result


async def call_tool(
    app: AppFixture, name: str, caller: Caller = MAIN_AGENT, /, **arguments: Any
) -> dict[str, Any]:
    result = await invoke_tool(app, name, arguments, caller)
    assert not result.is_error, result.text
    return result.details


async def call_refused_tool(
    app: AppFixture, name: str, caller: Caller = MAIN_AGENT, /, **arguments: Any
) -> dict[str, Any]:
    result = await invoke_tool(app, name, arguments, caller)
    assert result.is_error
    assert result.details["status"] in ("error", "forbidden")
    assert result.details["error"]
    return result.details


async def append_messages(app: AppFixture, row: Any, *messages: Message) -> None:
    """Append messages to a session's transcript outside any run."""
    for message in messages:
        await app.store.tx(session_rows.append_note, row["id"], message, app.clock.now())


def make_user_message(text: str) -> UserMessage:
    return UserMessage(content=text, timestamp=NOW)


def make_assistant_message(text: str) -> AssistantMessage:
    return AssistantMessage(content=[TextBlock(text=text)], timestamp=NOW, stop_reason="stop")


def make_tool_result(text: str) -> ToolResult:
    return ToolResult(tool_call_id="c", tool_name="t", content=[TextBlock(text=text)], timestamp=NOW)
