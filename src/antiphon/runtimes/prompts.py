"""What a model is told in our words where the transcript has none to send.

Every reader sends these, so a conversation reads the same to a model whatever its API. What people are told when
a provider fails is not here: that is `failure` in `model`.
"""

from __future__ import annotations

import msgspec

from antiphon.messages import ToolResult

OPENING_PROMPT = "(The conversation begins.)"
CONTINUE_PROMPT = "(Continue.)"
EMPTY_MESSAGE_TEXT = "(empty message)"
SUMMARY_PREFIX = "Summary of the conversation so far, which is no longer shown in full:\n\n"
UNREADABLE_IMAGE_TEXT = "[an image that cannot be read]"
_NO_OUTPUT_TEXT = "(no output)"
_INTERRUPTED_TEXT = "[interrupted: this call may or may not have taken effect]"


def format_result(result: ToolResult) -> str:
    """Never blank, and plain text, so that the same result is always the same bytes to the provider's prompt cache."""
    text = result.text if result.text.strip() else _NO_OUTPUT_TEXT
    return f"{_INTERRUPTED_TEXT}\n{text}" if result.interrupted else text


def is_json_object(text: str) -> bool:
    """Whether a result is data that says itself how the call ended: no reader wraps it in JSON of its own."""
    if not text.startswith("{"):
        return False
    try:
        return isinstance(msgspec.json.decode(text), dict)
    except (msgspec.DecodeError, RecursionError):
        return False
