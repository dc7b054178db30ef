"""What an answer has to be so that it can be kept, whoever made it: whole characters, and counts that fit a column.

Half a character is half of a surrogate pair: what cuts its text in UTF-16 sends one now and the other in the next
piece, or never.
"""

from __future__ import annotations

import codecs
from typing import Any, cast

import msgspec

from antiphon.messages import Assistant, Usage, encode

MOST_TOKENS = 10**12  # of one call; no model has as many, and millions of such calls can be added up
_COUNTS = ("input", "output", "cache_read", "cache_write", "total_tokens")
_UTF16 = "utf-16-le"


def sound(answer: Assistant) -> Assistant:
    """The answer as it can be stored and sent on."""
    if answer.usage:
        answer = msgspec.structs.replace(answer, usage=bounded(answer.usage))
    try:
        encode(answer)
    except UnicodeEncodeError:
        return msgspec.convert(_mended(msgspec.to_builtins(answer)), Assistant)
    return answer


def _mended(value: Any) -> Any:
    match value:
        case str():
            return whole(value)
        case list():
            return [_mended(item) for item in cast("list[Any]", value)]
        case dict():
            return {whole(name): _mended(item) for name, item in cast("dict[str, Any]", value).items()}
        case _:
            return value


def bounded(usage: Usage) -> Usage:
    counts = {name: min(max(getattr(usage, name), 0), MOST_TOKENS) for name in _COUNTS}
    return msgspec.structs.replace(usage, **counts)


def whole(text: str) -> str:
    """The text with its halves of characters put together, and the ones that are alone replaced."""
    return text if text.isascii() else Whole().feed(text, last=True)


class Whole:
    """`whole` for a text that arrives in pieces: half a character waits for the other one."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder(_UTF16)("replace")

    def feed(self, piece: str, *, last: bool = False) -> str:
        return self._decoder.decode(piece.encode(_UTF16, "surrogatepass"), last)

    def reset(self) -> None:
        self._decoder.reset()
