"""Texts that we send to a model where the transcript has none.

All readers share them, so a conversation reads the same to a model whatever its API. Messages for people about a
failed provider are in `model.build_provider_error`.
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
