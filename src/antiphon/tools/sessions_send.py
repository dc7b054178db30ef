"""The tool `sessions_send`: sends a message to another session, and returns the reply if it comes in time."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from antiphon.engine.toolbox import Tool, ToolRequest
from antiphon.messages import AnnounceMode
from antiphon.operations.collaboration_types import SendResult
from antiphon.operations.exchanges import MAX_REPLY_BACK_TURNS
from antiphon.operations.operations import Operations
from antiphon.operations.types import (
    DEFAULT_REPLY_TIMEOUT_SECONDS,
    MAX_REPLY_TIMEOUT_SECONDS,
    RequestOrigin,
    SendRequest,
)
from antiphon.tools._adapter import ToolArguments, build_tool, describe_clamped_range

TOOL_DESCRIPTION = (
    "Send a message into another session and wait for its reply. Name the session by sessionKey (a key or sessionId "
    "from sessions_list), by label, or by agentId alone for that agent's main session. A timeout does not mean "
    "that the message was lost: its run continues, so read sessions_history later instead of sending it again."
)


class SendArguments(ToolArguments, frozen=True):
    message: Annotated[str, Meta(min_length=1, description="The message, delivered verbatim.")]
    session_key: Annotated[str, Meta(description="A key or sessionId from sessions_list.")] | None = None
    label: Annotated[str, Meta(description="The session's label, instead of sessionKey.")] | None = None
    agent_id: (
        Annotated[
            str,
            Meta(
                description="With label: the agent that owns the session. Alone: that agent's main session."
            ),
        ]
        | None
    ) = None
    timeout_seconds: Annotated[
        float,
        describe_clamped_range(
            "How long to wait for the reply; 0 returns immediately.", 0, MAX_REPLY_TIMEOUT_SECONDS
        ),
    ] = DEFAULT_REPLY_TIMEOUT_SECONDS
    idempotency_key: (
        Annotated[str, Meta(description="Retries with the same key send the message once.")] | None
    ) = None
    reply_back: (
        Annotated[
            int,
            Meta(
                ge=0,
                le=MAX_REPLY_BACK_TURNS,
                description="Maximum follow-up turns between the two sessions after the reply.",
            ),
        ]
        | None
    ) = None
    announce: Annotated[
        AnnounceMode,
        Meta(description="Whether the other agent may announce the result in its chat at the end."),
    ] = "target"


def sessions_send(operations: Operations) -> Tool:
    async def run(call: ToolRequest, arguments: SendArguments) -> SendResult:
        request = SendRequest(
            message=arguments.message,
            session=arguments.session_key,
            label=arguments.label,
            agent_id=arguments.agent_id,
            timeout_seconds=min(arguments.timeout_seconds, MAX_REPLY_TIMEOUT_SECONDS),
            idempotency_key=arguments.idempotency_key,
            reply_back=arguments.reply_back,
            announce=arguments.announce,
        )
        return await operations.exchanges.send(call.caller, request, RequestOrigin(call.run_id, call.key))

    return build_tool("sessions_send", TOOL_DESCRIPTION, SendArguments, run, has_side_effects=True)
