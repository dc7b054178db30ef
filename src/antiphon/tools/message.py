"""The tool `message`: posts a text to the people in a chat."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from antiphon.engine.toolbox import Tool, ToolRequest
from antiphon.operations.operations import Operations
from antiphon.operations.posts import PostView
from antiphon.tools._adapter import ToolArguments, build_tool

TOOL_DESCRIPTION = (
    "Post a message to the people in a chat: this session's, or that of another session that you may send to. The "
    "model of that session does not answer; use sessions_send to ask another agent. Your normal answer is posted by "
    "itself, so do not repeat it here."
)


class MessageArguments(ToolArguments, frozen=True):
    message: Annotated[str, Meta(min_length=1, description="The text.")]
    action: Annotated[Literal["send"], Meta(description="Only 'send'.")] = "send"
    target: Annotated[
        str, Meta(min_length=1, description="A session key from sessions_list. Default: this session.")
    ] = "current"
    channel: Annotated[str, Meta(description="The channel of that chat; normally left out.")] | None = None


def message(operations: Operations) -> Tool:
    async def run(call: ToolRequest, arguments: MessageArguments) -> PostView:
        return await operations.posts.post(
            call.caller, arguments.message, call.key, arguments.target, arguments.channel
        )

    return build_tool(
        "message",
        TOOL_DESCRIPTION,
        MessageArguments,
        run,
        aliases={"to": "target", "sessionKey": "target", "text": "message", "content": "message"},
        has_side_effects=True,
    )
