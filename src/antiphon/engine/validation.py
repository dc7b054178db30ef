"""Checks of messages and idempotency keys that need no lookup."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias, get_args

from antiphon.errors import InvalidInput, TooLarge
from antiphon.messages import ImageBlock, TextBlock, ThinkingLevel

THINKING_LEVELS: tuple[str, ...] = get_args(ThinkingLevel)
DELETED_TRANSCRIPT_PREFIX = "forgotten:"
"""Followed by a key, a space and a session id: the record of a deleted conversation."""
RESERVED_KEY_PREFIXES = ("cron:", "http:", "turn:", "announce:", "note:", "wake:", DELETED_TRANSCRIPT_PREFIX)

SubmittedContent: TypeAlias = str | Sequence[TextBlock | ImageBlock]


def validate_message_content(
    said: SubmittedContent, most: int, *, beside: str | None = None, field: str = "message"
) -> None:
    """Check that a message is not empty and, together with `beside`, not too long."""
    if not _has_content(said):
        raise InvalidInput("The message is empty.", "Say something.", field=field)
    validate_message_size(said, most, beside=beside, field=field)


def validate_message_size(
    said: SubmittedContent, most: int, *, beside: str | None = None, field: str = "message"
) -> None:
    """Check that a message is valid Unicode of at most `most` bytes."""
    size = _count_bytes(said, field) + len((beside or "").encode(errors="replace"))
    if size > most:
        raise TooLarge(
            f"The message has {size} bytes; at most {most} are taken.",
            "Shorten it, or raise store.messageMaxBytes.",
            field=field,
            bytes=size,
            max=most,
        )


def _has_content(said: SubmittedContent) -> bool:
    if isinstance(said, str):
        return bool(said.strip())
    return any(isinstance(block, ImageBlock) or block.text.strip() for block in said)


def _count_bytes(said: SubmittedContent, field: str) -> int:
    texts = (
        [said] if isinstance(said, str) else [b.text if isinstance(b, TextBlock) else b.data for b in said]
    )
    try:
        return sum(len(text.encode()) for text in texts)
    except UnicodeEncodeError as error:
        raise InvalidInput(
            "The message contains half of a surrogate pair, which is not text.",
            "Send valid Unicode.",
            field=field,
        ) from error


def validate_idempotency_key(given: str | None) -> None:
    """Check a caller's idempotency key. Some prefixes are reserved for runs that only the engine may start."""
    if given is None:
        return
    if not (0 < len(given) <= 200 and given.isprintable()):
        raise InvalidInput(
            "The idempotency key must be 1 to 200 printable characters.",
            "Use a UUID.",
            field="idempotencyKey",
        )
    if given.startswith(RESERVED_KEY_PREFIXES):
        raise InvalidInput(
            f"Idempotency keys that begin with {given.partition(':')[0] + ':'!r} are reserved.",
            "Use a UUID.",
            field="idempotencyKey",
        )
