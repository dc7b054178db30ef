"""Makes any answer storable: no lone surrogates, and token counts that fit a column.

Software that cuts text in UTF-16 can split a surrogate pair: it sends one half now and the other in the next
piece, or never.
"""

from __future__ import annotations

import codecs
from typing import Any, cast

import msgspec

from antiphon.messages import AssistantMessage, TokenUsage, encode_message

MAX_TOKENS_PER_CALL = 10**12  # far beyond any model; millions of such calls can still be summed
_TOKEN_COUNT_FIELDS = ("input", "output", "cache_read", "cache_write", "total_tokens")
_UTF16_ENCODING = "utf-16-le"


def sanitize_answer(answer: AssistantMessage) -> AssistantMessage:
    """The answer in a form that can be stored and sent on."""
    if answer.usage:
        answer = msgspec.structs.replace(answer, usage=clamp_usage(answer.usage))
    try:
        encode_message(answer)
    except UnicodeEncodeError:
        return msgspec.convert(_repair_values(msgspec.to_builtins(answer)), AssistantMessage)
    return answer


def _repair_values(value: Any) -> Any:
    match value:
        case str():
            return repair_surrogates(value)
        case list():
            return [_repair_values(item) for item in cast("list[Any]", value)]
        case dict():
            return {
                repair_surrogates(name): _repair_values(item)
                for name, item in cast("dict[str, Any]", value).items()
            }
        case _:
            return value


def clamp_usage(usage: TokenUsage) -> TokenUsage:
    counts = {name: min(max(getattr(usage, name), 0), MAX_TOKENS_PER_CALL) for name in _TOKEN_COUNT_FIELDS}
    return msgspec.structs.replace(usage, **counts)


def repair_surrogates(text: str) -> str:
    """The text with split surrogate pairs joined, and lone surrogates replaced."""
    return text if text.isascii() else SurrogateRepairer().feed(text, last=True)


class SurrogateRepairer:
    """`repair_surrogates` for a text that arrives in pieces: half a pair is held until the next piece."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder(_UTF16_ENCODING)("replace")

    def feed(self, piece: str, *, last: bool = False) -> str:
        return self._decoder.decode(piece.encode(_UTF16_ENCODING, "surrogatepass"), last)

    def reset(self) -> None:
        self._decoder.reset()
