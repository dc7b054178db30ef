"""Tool calls of an answer as the transcript stores them: with a unique id, and an object for arguments.

They may be sent again under another id, since the next server need not accept the id of the last one. Readers parse
calls from the wire, and the engine runs them.
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
"""One more than are run: the result of the extra one informs the model that it requested too many."""
MAX_TOOL_NAME_CHARACTERS = 128
MAX_ARGUMENT_LEVELS = 64
"""Maximum nesting depth of arguments, since they are read and written recursively."""
TOO_DEEP_TEXT = "(nested too deeply to be kept)"

MAX_CALL_ID_CHARACTERS = 200
_STORABLE_ID_PATTERN = re.compile(rf"[ -~]{{1,{MAX_CALL_ID_CHARACTERS}}}")
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
    """Builds a call. `written` are the arguments as the model wrote them; `taken` the ids already in use."""
    arguments = parse_arguments(written)
    kept = native or {}
    if arguments is None:
        kept = {**kept, INVALID_ARGUMENTS_KEY: written if isinstance(written, str) else TOO_DEEP_TEXT}
    if not call_id or call_id in taken:
        # Some local servers count from zero in every answer; a result must belong to exactly one call.
        call_id = f"call_{uuid.uuid4().hex[:24]}"
    taken.add(call_id)
    return ToolCall(
        id=call_id, name=name[:MAX_TOOL_NAME_CHARACTERS], arguments=arguments or {}, native=kept or None
    )


def parse_arguments(written: str | dict[str, Any] | None) -> dict[str, Any] | None:
    """The arguments as an object, or None if the model did not write one or nested it too deeply."""
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


def make_storable_id(call_id: str) -> str:
    """Return an id that can be part of a key in every database. One that is too long or unprintable is hashed."""
    if _STORABLE_ID_PATTERN.fullmatch(call_id):
        return call_id
    return f"call_{blake2s(call_id.encode('utf-8', 'surrogatepass'), digest_size=16).hexdigest()}"


def make_sendable_id(call_id: str, api: Api) -> str:
    """The id to send for a call and its result, short and plain enough for every server of that kind.

    Two ids never become one: an id that looks like a replacement is replaced as well. Chat completions keep dots and
    colons, because some models expect their `functions.name:0` back.
    """
    fitting = _SENDABLE_CHAT_ID_PATTERN if api == "openai-completions" else _SENDABLE_ID_PATTERN
    if fitting.fullmatch(call_id):
        return call_id
    return f"sent_{blake2s(call_id.encode(), digest_size=12).hexdigest()}"
