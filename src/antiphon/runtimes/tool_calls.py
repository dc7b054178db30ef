"""The tool calls of an answer as the transcript keeps them: an id of their own, and an object for arguments.

How a call comes over the wire is a reader's business, and running it the engine's.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from typing import Any

import msgspec

from antiphon.messages import Assistant, Message, ToolCall
from antiphon.runtimes.model import INVALID_ARGUMENTS


def call_ids(messages: Iterable[Message]) -> set[str]:
    return {call.id for message in messages if isinstance(message, Assistant) for call in message.tool_calls}


def tool_call(
    call_id: str,
    name: str,
    written: str | dict[str, Any] | None,
    *,
    native: dict[str, Any] | None,
    taken: set[str],
) -> ToolCall:
    """`written` are the arguments as the model wrote them; `taken` the ids that are no longer free."""
    arguments = arguments_in(written)
    kept = native or {}
    if arguments is None:
        kept = {**kept, INVALID_ARGUMENTS: written}
    if not call_id or call_id in taken:
        # Some local servers count from nought in every answer; a result must belong to one call only.
        call_id = f"call_{uuid.uuid4().hex[:24]}"
    taken.add(call_id)
    return ToolCall(id=call_id, name=name, arguments=arguments or {}, native=kept or None)


def arguments_in(written: str | dict[str, Any] | None) -> dict[str, Any] | None:
    """None when the model did not write a JSON object."""
    if not isinstance(written, str):
        return written or {}
    if not written.strip():
        return {}
    try:
        return msgspec.json.decode(written, type=dict[str, Any])
    except msgspec.MsgspecError:
        return None
