"""The tool `sessions_send`: a message to another session, and its reply if it comes in time."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from antiphon.engine.toolbox import Call, Tool
from antiphon.operations import Operations, Origin, Send
from antiphon.operations.exchanges import LONGEST, TIMEOUT, TURNS_MOST
from antiphon.tools.adapter import adapted
from antiphon.tools.arguments import Arguments, told
from antiphon.views import Sent

DESCRIPTION = (
    "Send a message into another session and wait for its reply. Name the session by sessionKey (a key or sessionId "
    "from sessions_list), by label, or by agentId alone for that agent's main session. A timeout does not mean "
    "that the message was lost: its run goes on, so read sessions_history later instead of sending it again."
)


class SendArguments(Arguments, frozen=True):
    message: Annotated[str, Meta(min_length=1, description="What to say. It arrives word for word.")]
    session_key: Annotated[str, Meta(description="A key or sessionId from sessions_list.")] | None = None
    label: Annotated[str, Meta(description="The session's label, instead of sessionKey.")] | None = None
    agent_id: (
        Annotated[str, Meta(description="With label: whose session it is. Alone: that agent's main session.")]
        | None
    ) = None
    timeout_seconds: Annotated[
        float, told("How long to wait for the reply; 0 returns at once.", 0, LONGEST)
    ] = TIMEOUT
    idempotency_key: (
        Annotated[str, Meta(description="The same key is the same message, however often it is sent.")] | None
    ) = None
    reply_back: (
        Annotated[
            int,
            Meta(ge=0, le=TURNS_MOST, description="How many turns you two may answer each other afterwards."),
        ]
        | None
    ) = None
    announce: Annotated[
        Literal["target", "none"],
        Meta(description="Whether the other agent may tell its chat of it in the end."),
    ] = "target"


def sessions_send(operations: Operations) -> Tool:
    async def answer(call: Call, given: SendArguments) -> Sent:
        wanted = Send(
            message=given.message,
            session=given.session_key,
            label=given.label,
            agent_id=given.agent_id,
            timeout_seconds=min(given.timeout_seconds, LONGEST),
            idempotency_key=given.idempotency_key,
            reply_back=given.reply_back,
            announce=given.announce,
        )
        return await operations.send(call.caller, wanted, Origin(call.run_id, call.key))

    return adapted("sessions_send", DESCRIPTION, SendArguments, answer, acts=True)
