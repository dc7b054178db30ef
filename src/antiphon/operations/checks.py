"""What can be refused without looking anything up, in words that say what would be accepted."""

from __future__ import annotations

from collections.abc import Sequence

from antiphon.errors import Conflict, InvalidInput, TooLarge
from antiphon.messages import Image, Text
from antiphon.store import Row

THINKING = ("off", "minimal", "low", "medium", "high", "xhigh")
VERBOSE = ("off", "on", "full")
SEND_POLICIES = ("allow", "deny")


def current(row: Row, reference: str) -> None:
    """For what is done to the conversation that goes on: an id that names an earlier one must not mean another."""
    if row["named_transcript"] != row["transcript"]:
        raise Conflict(
            f"The conversation {reference!r} has ended.", "Restore it first, or name its session by the key."
        )


RESERVED = ("cron:", "http:")


def key(given: str | None) -> None:
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


def content(said: str | Sequence[Text | Image], most: int, *, beside: str | None = None) -> None:
    """Words that say something and are not too long, together with what is sent beside them."""
    size = _bytes(said) + len((beside or "").encode(errors="replace"))
    if not _says_something(said):
        raise InvalidInput("The message is empty.", "Say something.", field="message")
    if size > most:
        raise TooLarge(
            f"The message has {size} bytes; at most {most} are taken.",
            "Shorten it, or raise store.messageMaxBytes.",
            field="message",
            bytes=size,
            max=most,
        )


def _says_something(said: str | Sequence[Text | Image]) -> bool:
    if isinstance(said, str):
        return bool(said.strip())
    return any(isinstance(block, Image) or block.text.strip() for block in said)


def _bytes(said: str | Sequence[Text | Image]) -> int:
    texts = [said] if isinstance(said, str) else [b.text if isinstance(b, Text) else b.data for b in said]
    try:
        return sum(len(text.encode()) for text in texts)
    except UnicodeEncodeError as error:
        raise InvalidInput(
            "The message contains half of a surrogate pair, which is not text.",
            "Send valid Unicode.",
            field="message",
        ) from error


def between(value: int, least: int, most: int, field: str) -> int:
    if value < least:
        raise InvalidInput(
            f"{field!r} is {value}; it must be at least {least}.", f"Use {least} to {most}.", field=field
        )
    return min(value, most)


def name(text: str, most: int, field: str) -> str:
    """A name for people: without the blanks around it, and fit to be shown on one line."""
    trimmed = text.strip()
    if not (0 < len(trimmed) <= most and trimmed.isprintable()):
        raise InvalidInput(
            f"invalid {field} (use 1 to {most} printable characters).", "Shorten or clear it.", field=field
        )
    return trimmed


def one_of(value: str, choices: Sequence[str], field: str) -> str:
    if value not in choices:
        listed = "|".join(f'"{choice}"' for choice in choices)
        raise InvalidInput(f"invalid {field} (use {listed}).", "Pass one of these.", field=field)
    return value
