"""The tool calls of an answer as the transcript keeps them: an id of their own, and an object for arguments.

The id they are sent under again may be another one: the next server need not take what the last one gave. How a call
comes over the wire is a reader's business, and running it the engine's.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable
from hashlib import blake2s
from typing import Any, cast

import msgspec

from antiphon.messages import ToolCall
from antiphon.runtimes.model import INVALID_ARGUMENTS_KEY, Api

MAX_TOOL_CALLS_PER_ANSWER = 128
MAX_KEPT_TOOL_CALLS = MAX_TOOL_CALLS_PER_ANSWER + 1
"""One more than are run: its result tells the model that it asked for too many."""
MAX_TOOL_NAME_CHARACTERS = 128
MAX_ARGUMENT_LEVELS = 64
"""How deep arguments may be nested: what reads and writes them recurses."""
_TOO_DEEP_TEXT = "(nested too deeply to be kept)"

_SENDABLE_ID_PATTERN = re.compile(r"(?!sent_)[A-Za-z0-9_-]{1,40}")
_SENDABLE_CHAT_ID_PATTERN = re.compile(r"(?!sent_)[A-Za-z0-9_.:-]{1,40}")


def build_tool_call(
    call_id: str,
    name: str,
    written: str | dict[str, Any] | None,
    *,
    native: dict[str, Any] | None,
    taken: set[str],
) -> ToolCall:
    """`written` are the arguments as the model wrote them; `taken` the ids that are no longer free."""
    arguments = parse_arguments(written)
    kept = native or {}
    if arguments is None:
        kept = {**kept, INVALID_ARGUMENTS_KEY: written if isinstance(written, str) else _TOO_DEEP_TEXT}
    if not call_id or call_id in taken:
        # Some local servers count from nought in every answer; a result must belong to one call only.
        call_id = f"call_{uuid.uuid4().hex[:24]}"
    taken.add(call_id)
    return ToolCall(
        id=call_id, name=name[:MAX_TOOL_NAME_CHARACTERS], arguments=arguments or {}, native=kept or None
    )


def parse_arguments(written: str | dict[str, Any] | None) -> dict[str, Any] | None:
    """None when the model did not write a JSON object, or one that is nested too deeply."""
    if not isinstance(written, str):
        return None if is_too_deep(written) else written or {}
    if not written.strip():
        return {}
    try:
        read = msgspec.json.decode(written, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError):
        return None
    brackets = written.count("{") + written.count("[")
    return None if brackets > MAX_ARGUMENT_LEVELS and is_too_deep(read) else read


def is_too_deep(value: object) -> bool:
    level = [value]
    for _ in range(MAX_ARGUMENT_LEVELS + 1):
        level = [child for item in level for child in _list_children(item)]
        if not level:
            return False
    return True


def _list_children(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return cast("dict[str, object]", value).values()
    return cast("list[object]", value) if isinstance(value, list) else ()


def make_sendable_id(call_id: str, api: Api) -> str:
    """The id to send for a call and its result, short and plain enough for every server of that kind.

    Two ids never become one: what looks like a replacement is replaced as well. Chat completions keep the dot and the
    colon, for there are models that expect their `functions.name:0` back.
    """
    fitting = _SENDABLE_CHAT_ID_PATTERN if api == "openai-completions" else _SENDABLE_ID_PATTERN
    if fitting.fullmatch(call_id):
        return call_id
    return f"sent_{blake2s(call_id.encode(), digest_size=12).hexdigest()}"
