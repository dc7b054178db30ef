"""What a model is told in our words where the transcript has none to send.

Every reader sends these, so a conversation reads the same to a model whatever its API. What people are told when
a provider fails is not here: that is `failure` in `model`.
"""

from __future__ import annotations

import msgspec

from antiphon.messages import ToolResult

OPENING = "(The conversation begins.)"
CONTINUE = "(Continue.)"
BLANK = "(empty message)"
SUMMARY = "Summary of the conversation so far, which is no longer shown in full:\n\n"
UNREADABLE_IMAGE = "[an image that cannot be read]"
_NO_OUTPUT = "(no output)"
_INTERRUPTED = "[interrupted: this call may or may not have taken effect]"


def result_text(result: ToolResult) -> str:
    """Never blank, and plain text, so that the same result is always the same bytes to the provider's prompt cache."""
    text = result.text if result.text.strip() else _NO_OUTPUT
    return f"{_INTERRUPTED}\n{text}" if result.interrupted else text


def is_json_object(text: str) -> bool:
    """Whether a result is data that says itself how the call ended: no reader wraps it in JSON of its own."""
    if not text.startswith("{"):
        return False
    try:
        return isinstance(msgspec.json.decode(text), dict)
    except (msgspec.DecodeError, RecursionError):
        return False
