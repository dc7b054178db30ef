"""Text to and from models: what is sent where the transcript has no text, and sanitizing of answers for storage.

All readers share the former, so a conversation reads the same to a model on every API. Stored answers have no
lone surrogates: software that cuts text in UTF-16 can split a pair, and sends one half now and the other in the next
piece, or never. Their token counts fit a column.
"""

from __future__ import annotations

import codecs
import json
from typing import Any, cast

import msgspec

from antiphon.messages import AssistantMessage, TokenUsage, ToolResult, encode_message

OPENING_PROMPT = "(The conversation begins.)"
CONTINUE_PROMPT = "(Continue.)"
EMPTY_MESSAGE_TEXT = "(empty message)"
SUMMARY_PREFIX = "Summary of the conversation so far, which is no longer shown in full:\n\n"
UNREADABLE_IMAGE_TEXT = "[an image that cannot be read]"
_NO_OUTPUT_TEXT = "(no output)"
_INTERRUPTED_TEXT = "[interrupted: this call may or may not have taken effect]"

MAX_TOKENS_PER_CALL = 10**12  # far beyond any model; millions of such calls can still be summed
_TOKEN_COUNT_FIELDS = ("input", "output", "cache_read", "cache_write", "total_tokens")
_UTF16_ENCODING = "utf-16-le"


def format_result(result: ToolResult) -> str:
    """The result as plain text, never blank, so that it always has the same bytes for the provider's prompt cache."""
    text = result.text if result.text.strip() else _NO_OUTPUT_TEXT
    return f"{_INTERRUPTED_TEXT}\n{text}" if result.interrupted else text


def is_json_object(text: str) -> bool:
    """Whether a result is a JSON object, which states its own outcome and is not wrapped again."""
    if not text.startswith("{"):
        return False
    try:
        return isinstance(msgspec.json.decode(text), dict)
    except (msgspec.DecodeError, RecursionError):
        return False


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
        self._decoder: codecs.IncrementalDecoder | None = None  # made when needed; most texts are ASCII
        self._holds_half = False

    def feed(self, piece: str, *, last: bool = False) -> str:
        if not self._holds_half and piece.isascii():
            return piece
        if piece or last:
            self._holds_half = not last and "\ud800" <= piece[-1] <= "\udbff"
        self._decoder = self._decoder or codecs.getincrementaldecoder(_UTF16_ENCODING)("replace")
        return self._decoder.decode(piece.encode(_UTF16_ENCODING, "surrogatepass"), last)

    def reset(self) -> None:
        self._holds_half = False
        if self._decoder is not None:
            self._decoder.reset()


def cut_middle(text: str, most: int) -> str:
    """Return a text of at most about `most` characters, without its middle."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"


def decode_foreign_json(data: bytes) -> object:
    """Return a JSON value, even one with unpaired surrogates, which some programs send.

    Raises:
        ValueError, RecursionError: it is not JSON, or nested too deeply.
    """
    try:
        return msgspec.json.decode(data)
    except msgspec.DecodeError:
        text = json.dumps(json.loads(data), ensure_ascii=False)
        return msgspec.json.decode(repair_surrogates(text))
