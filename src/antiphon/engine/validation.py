"""Checks of requests that need no lookup: messages, idempotency keys and other parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias, get_args

from antiphon import keys
from antiphon.errors import Conflict, InvalidInput, TooLarge
from antiphon.messages import ImageBlock, TextBlock
from antiphon.send_policy import SendDecision
from antiphon.store import Row

VERBOSE_LEVELS = ("off", "on", "full")
SEND_POLICIES: tuple[str, ...] = get_args(SendDecision)
MAX_LABEL_CHARACTERS = 64
DELETED_TRANSCRIPT_PREFIX = "forgotten:"
"""Followed by a key, a space and a session id: the record of a deleted conversation."""
RESERVED_KEY_PREFIXES = ("cron:", "http:", "turn:", "announce:", "note:", "wake:", DELETED_TRANSCRIPT_PREFIX)

SubmittedContent: TypeAlias = str | Sequence[TextBlock | ImageBlock]


def validate_message_content(
    content: SubmittedContent, max_bytes: int, *, extra_text: str | None = None, field: str = "message"
) -> None:
    """Check that a message is not empty and, together with `extra_text`, not too long."""
    if isinstance(content, str):
        is_empty = not content.strip()
    else:
        is_empty = not any(isinstance(block, ImageBlock) or block.text.strip() for block in content)
    if is_empty:
        raise InvalidInput("The message is empty.", "Send a text or an image.", field=field)
    validate_message_size(content, max_bytes, extra_text=extra_text, field=field)


def validate_message_size(
    content: SubmittedContent, max_bytes: int, *, extra_text: str | None = None, field: str = "message"
) -> None:
    """Check that a message is valid Unicode and, together with `extra_text`, has at most `max_bytes`."""
    texts = (
        [content]
        if isinstance(content, str)
        else [block.text if isinstance(block, TextBlock) else block.data for block in content]
    )
    try:
        size = sum(len(text.encode()) for text in texts)
    except UnicodeEncodeError as error:
        raise InvalidInput(
            "The message contains half of a surrogate pair, which is not text.",
            "Send valid Unicode.",
            field=field,
        ) from error
    if extra_text:
        size += len(extra_text.encode(errors="replace"))
    if size > max_bytes:
        raise TooLarge(
            f"The message has {size} bytes; the maximum is {max_bytes}.",
            "Shorten it, or raise store.messageMaxBytes.",
            field=field,
            bytes=size,
            max=max_bytes,
        )


def validate_idempotency_key(key: str | None) -> None:
    """Check a caller's idempotency key. Some prefixes are reserved for runs that only the engine may start."""
    if key is None:
        return
    if not (0 < len(key) <= 200 and key.isprintable()):
        raise InvalidInput(
            "The idempotency key must be 1 to 200 printable characters.",
            "Use a UUID.",
            field="idempotencyKey",
        )
    if key.startswith(RESERVED_KEY_PREFIXES):
        raise InvalidInput(
            f"Idempotency keys that begin with {key.partition(':')[0] + ':'!r} are reserved.",
            "Use a UUID.",
            field="idempotencyKey",
        )


def require_current_conversation(row: Row, reference: str, expected: str | None = None) -> None:
    """Refuse a reference to an ended conversation, for operations that apply to the current one.

    `expected` is the id of the conversation that the caller has seen.
    """
    if row["named_transcript"] != row["transcript"]:
        raise build_conversation_ended_error(reference)
    if expected is not None and row["session_id"] != expected:
        raise Conflict(
            f"Session {reference!r} has moved on to another conversation.",
            "Look at it again first.",
            key=reference,
        )


def build_conversation_ended_error(reference: str) -> Conflict:
    return Conflict(
        f"The conversation {reference!r} has ended.", "Restore it first, or name its session by the key."
    )


def require_deletable_key(key: str) -> None:
    if keys.parse(key).kind == "main":
        raise Conflict(
            f"Cannot delete the main session ({key}).",
            f"Reset it instead, as `antiphon sessions reset {key}` does.",
            key=key,
        )


def validate_and_clamp(value: int, minimum: int, maximum: int, field: str) -> int:
    if value < minimum:
        raise InvalidInput(
            f"{field!r} is {value}; it must be at least {minimum}.",
            f"Use {minimum} to {maximum}.",
            field=field,
        )
    return min(value, maximum)


def validate_printable_name(text: str, maximum: int, field: str) -> str:
    """Return a display name without surrounding blanks, checked to be printable on one line."""
    trimmed = text.strip()
    if not (0 < len(trimmed) <= maximum and trimmed.isprintable()):
        raise InvalidInput(
            f"invalid {field} (use 1 to {maximum} printable characters).", "Shorten or clear it.", field=field
        )
    return trimmed


def validate_choice(value: str, choices: Sequence[str], field: str) -> str:
    if value not in choices:
        listed = "|".join(f'"{choice}"' for choice in choices)
        raise InvalidInput(f"invalid {field} (use {listed}).", "Pass one of these.", field=field)
    return value


def parse_row_cursor(cursor: str | None) -> int:
    """Return the row number before which the next page, which goes backwards, begins."""
    if cursor is None:
        return 2**62
    if not (cursor.isdecimal() and len(cursor) < 19):
        raise InvalidInput(
            f"{cursor[:80]!r} is not a valid cursor.",
            "Pass nextCursor unchanged.",
            field="cursor",
        )
    return int(cursor)
