"""Checks of request parameters, with errors that say what is accepted. For message texts see `engine.validation`."""

from __future__ import annotations

from collections.abc import Sequence

from antiphon import keys
from antiphon.errors import Conflict, InvalidInput
from antiphon.store import Row

VERBOSE_LEVELS = ("off", "on", "full")
SEND_POLICIES = ("allow", "deny")
MAX_LABEL_CHARACTERS = 64


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


def validate_and_clamp(value: int, least: int, most: int, field: str) -> int:
    if value < least:
        raise InvalidInput(
            f"{field!r} is {value}; it must be at least {least}.", f"Use {least} to {most}.", field=field
        )
    return min(value, most)


def validate_printable_name(text: str, most: int, field: str) -> str:
    """Return a display name without surrounding blanks, checked to be printable on one line."""
    trimmed = text.strip()
    if not (0 < len(trimmed) <= most and trimmed.isprintable()):
        raise InvalidInput(
            f"invalid {field} (use 1 to {most} printable characters).", "Shorten or clear it.", field=field
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
