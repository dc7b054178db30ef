"""The tool calls of an answer as the transcript keeps them: an id of their own, and an object for arguments.

The id they are sent under again may be another one: the next server need not take what the last one gave. How a call
comes over the wire is a reader's business, and running it the engine's.
"""

from __future__ import annotations

import re
import uuid
from hashlib import blake2s
from typing import Any

import msgspec

from antiphon.messages import ToolCall
from antiphon.runtimes.model import INVALID_ARGUMENTS, Api

_SENDABLE = re.compile(r"(?!sent_)[A-Za-z0-9_-]{1,40}")
_SENDABLE_IN_CHAT = re.compile(r"(?!sent_)[A-Za-z0-9_.:-]{1,40}")


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


def sendable_id(call_id: str, api: Api) -> str:
    """The id to send for a call and its result, short and plain enough for every server of that kind.

    Two ids never become one: what looks like a replacement is replaced as well. Chat completions keep the dot and the
    colon, for there are models that expect their `functions.name:0` back.
    """
    fitting = _SENDABLE_IN_CHAT if api == "openai-completions" else _SENDABLE
    if fitting.fullmatch(call_id):
        return call_id
    return f"sent_{blake2s(call_id.encode(), digest_size=12).hexdigest()}"
