"""What somebody says, and the key they say it under: what can be refused without looking anything up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias, get_args

from antiphon.errors import InvalidInput, TooLarge
from antiphon.messages import Image, Text

Thinking = Literal["off", "minimal", "low", "medium", "high", "xhigh"]
THINKING: tuple[str, ...] = get_args(Thinking)
FORGOTTEN = "forgotten:"
"""With a key, a blank and a session id: the record of a conversation that was deleted."""
RESERVED = ("cron:", "http:", "turn:", "announce:", "note:", "wake:", FORGOTTEN)

Content: TypeAlias = str | Sequence[Text | Image]


def check(said: Content, most: int, *, beside: str | None = None, field: str = "message") -> None:
    """Words that say something and are not too long, together with what is sent beside them."""
    if not _says_something(said):
        raise InvalidInput("The message is empty.", "Say something.", field=field)
    check_size(said, most, beside=beside, field=field)


def check_size(said: Content, most: int, *, beside: str | None = None, field: str = "message") -> None:
    """Check that a message is valid Unicode of at most `most` bytes."""
    size = _bytes(said, field) + len((beside or "").encode(errors="replace"))
    if size > most:
        raise TooLarge(
            f"The message has {size} bytes; at most {most} are taken.",
            "Shorten it, or raise store.messageMaxBytes.",
            field=field,
            bytes=size,
            max=most,
        )


def _says_something(said: Content) -> bool:
    if isinstance(said, str):
        return bool(said.strip())
    return any(isinstance(block, Image) or block.text.strip() for block in said)


def _bytes(said: Content, field: str) -> int:
    texts = [said] if isinstance(said, str) else [b.text if isinstance(b, Text) else b.data for b in said]
    try:
        return sum(len(text.encode()) for text in texts)
    except UnicodeEncodeError as error:
        raise InvalidInput(
            "The message contains half of a surrogate pair, which is not text.",
            "Send valid Unicode.",
            field=field,
        ) from error


def check_key(given: str | None) -> None:
    """An idempotency key of a caller. Some names are for runs that nobody but the engine may start."""
    if given is None:
        return
    if not (0 < len(given) <= 200 and given.isprintable()):
        raise InvalidInput(
            "The idempotency key must be 1 to 200 printable characters.",
            "Use a UUID.",
            field="idempotencyKey",
        )
    if given.startswith(RESERVED):
        raise InvalidInput(
            f"Idempotency keys that begin with {given.partition(':')[0] + ':'!r} are reserved.",
            "Use a UUID.",
            field="idempotencyKey",
        )
