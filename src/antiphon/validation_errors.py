"""Data that does not have the shape it should have: where and why, in words for whoever sent it."""

from __future__ import annotations

import re
from typing import NamedTuple

MAX_ERROR_CHARACTERS = (
    240  # characters of what is said of it; what was sent may be megabytes, and stand in the middle
)

_PATH_PATTERN = re.compile(r" - at `\$\.?(.*)`$", re.DOTALL)
_UNKNOWN_FIELD_PATTERN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_MISSING_FIELD_PATTERN = re.compile(r"Object missing required field `(.*)`", re.DOTALL)
_HIGH_SURROGATE, _LOW_SURROGATE = "[89abAB][0-9a-fA-F]{2}", "[c-fC-F][0-9a-fA-F]{2}"
_LONE_SURROGATE_PATTERN = re.compile(
    rf"\\u[dD](?:{_HIGH_SURROGATE}(?!\\u[dD]{_LOW_SURROGATE})|(?<!\\u[dD]{_HIGH_SURROGATE}\\u[dD]){_LOW_SURROGATE})"
)
"""A high half that no low one follows, or a low one that follows no high one."""


class ValidationIssue(NamedTuple):
    path: str
    """`a.b[1]`, and nothing for the whole."""
    what: str
    name: str | None = None
    """The property at that path that is missing, or should not be there."""

    missing: bool = False

    @property
    def field(self) -> str:
        return ".".join(filter(None, [self.path, self.name]))

    @property
    def pointer(self) -> str:
        """The path as `/a/b/1`, and `root` for the whole."""
        parts = re.sub(r"\[(\d+|\.\.\.)\]", r".\1", self.path).split(".")
        return "/" + "/".join(parts) if self.path else "root"


def parse_validation_error(error: Exception) -> ValidationIssue:
    """What msgspec says of it, in the words of JSON Schema."""
    text = shorten_error(error)
    place = _PATH_PATTERN.search(text)
    path, what = (place[1], text[: place.start()]) if place else ("", text)
    if unknown := _UNKNOWN_FIELD_PATTERN.fullmatch(what):
        return ValidationIssue(path, f"unexpected property '{unknown[1]}'", unknown[1])
    if missing := _MISSING_FIELD_PATTERN.fullmatch(what):
        return ValidationIssue(path, f"must have required property '{missing[1]}'", missing[1], missing=True)
    what = re.sub(r"Expected `(int|float)` (>=|<=|>|<) (\S+)", r"must be \2 \3", what)
    return ValidationIssue(path, re.sub(r"^Expected `(.+?)`, got `(.+?)`$", r"must be \1, not \2", what))


def shorten_error(error: Exception) -> str:
    """What an error says, without the middle of what it quotes at length."""
    text = str(error)
    return (
        text
        if len(text) <= MAX_ERROR_CHARACTERS
        else f"{text[: MAX_ERROR_CHARACTERS // 2]}…{text[-MAX_ERROR_CHARACTERS // 2 :]}"
    )


def replace_lone_surrogates(raw: str | bytes) -> bytes:
    """The same JSON, with U+FFFD for each half of a surrogate pair: cutting a text in UTF-16 leaves them behind.

    It is not parsed for that: megabytes of it have to be quick.

    Raises:
        ValueError: it can be no JSON. What is returned may be none either.
    """
    text = raw if isinstance(raw, str) else raw.decode("utf-8-sig", "surrogatepass")
    if "\0" in text:
        raise ValueError("JSON has no NUL in it.")
    # An escaped backslash is put out of the way, so that every other one begins an escape.
    text = _LONE_SURROGATE_PATTERN.sub(r"\\ufffd", text.replace(r"\\", "\0")).replace("\0", r"\\")
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()
