"""Explains invalid data to its sender: where it is, what is wrong, and which name was probably meant.

This is for data that msgspec decodes. A config is explained by `antiphon.config.errors`, which lists every problem
and knows which values may be shown.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

MAX_ERROR_CHARACTERS = (
    240  # characters of an error; it may quote megabytes of input, which are cut in the middle
)

MAX_COMPARED_NAME_CHARACTERS = 64
"""Longest name that is compared with the valid ones; comparing megabytes would take seconds and match nothing."""

MAX_LISTED_OPTIONS = 12
"""Most valid names that an error lists in addition to a suggestion."""

_PATH_PATTERN = re.compile(r" - at `\$\.?(.*)`$", re.DOTALL)
_UNKNOWN_FIELD_PATTERN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_MISSING_FIELD_PATTERN = re.compile(r"Object missing required field `(.*)`", re.DOTALL)
_HIGH_SURROGATE, _LOW_SURROGATE = "[89abAB][0-9a-fA-F]{2}", "[c-fC-F][0-9a-fA-F]{2}"
_LONE_SURROGATE_PATTERN = re.compile(
    rf"\\u[dD](?:{_HIGH_SURROGATE}(?!\\u[dD]{_LOW_SURROGATE})|(?<!\\u[dD]{_HIGH_SURROGATE}\\u[dD]){_LOW_SURROGATE})"
)
"""A high surrogate without a low one after it, or a low one without a high one before it."""


class ValidationIssue(NamedTuple):
    path: str
    """`a.b[1]`; empty for the whole document."""
    what: str
    name: str | None = None
    """The property at that path that is missing or not allowed."""

    missing: bool = False

    @property
    def field(self) -> str:
        return ".".join(filter(None, [self.path, self.name]))

    @property
    def pointer(self) -> str:
        """The path as `/a/b/1`, or `root` for the whole document."""
        parts = re.sub(r"\[(\d+|\.\.\.)\]", r".\1", self.path).split(".")
        return "/" + "/".join(parts) if self.path else "root"


def parse_validation_error(error: Exception) -> ValidationIssue:
    """Converts msgspec's error to the terms of JSON Schema."""
    path, what = split_error(error)
    if unknown := _UNKNOWN_FIELD_PATTERN.fullmatch(what):
        return ValidationIssue(path, f"unexpected property '{unknown[1]}'", unknown[1])
    if missing := _MISSING_FIELD_PATTERN.fullmatch(what):
        return ValidationIssue(path, f"must have required property '{missing[1]}'", missing[1], missing=True)
    what = re.sub(r"Expected `(int|float)` (>=|<=|>|<) (\S+)", r"must be \2 \3", what)
    return ValidationIssue(path, re.sub(r"^Expected `(.+?)`, got `(.+?)`$", r"must be \1, not \2", what))


def split_error(error: Exception) -> tuple[str, str]:
    """The path in msgspec's error, as in `ValidationIssue`, and its text without the path."""
    text = shorten_error(error)
    found = _PATH_PATTERN.search(text)
    return (found[1], text[: found.start()]) if found else ("", text)


def shorten_error(error: Exception) -> str:
    """The text of an error, with the middle of long quotations cut out."""
    text = str(error)
    return (
        text
        if len(text) <= MAX_ERROR_CHARACTERS
        else f"{text[: MAX_ERROR_CHARACTERS // 2]}…{text[-MAX_ERROR_CHARACTERS // 2 :]}"
    )


def replace_lone_surrogates(raw: str | bytes) -> bytes:
    """The same JSON with U+FFFD for each lone surrogate, which cutting a text in UTF-16 leaves behind.

    The document is not parsed, because megabytes of it have to be fast.

    Raises:
        ValueError: the text cannot be JSON. A returned text is not guaranteed to be JSON either.
    """
    text = raw if isinstance(raw, str) else raw.decode("utf-8-sig", "surrogatepass")
    if "\0" in text:
        raise ValueError("JSON has no NUL in it.")
    # Escaped backslashes are replaced temporarily, so that every other backslash begins an escape.
    text = _LONE_SURROGATE_PATTERN.sub(r"\\ufffd", text.replace(r"\\", "\0")).replace("\0", r"\\")
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()


def find_nearest(word: str, options: Iterable[str], *, alike: float = 0.6) -> str | None:
    """The option most similar to `word`, ignoring case, or None if no similarity reaches `alike` (0 to 1)."""
    if len(word) > MAX_COMPARED_NAME_CHARACTERS:
        return None
    by_lower = {option.lower(): option for option in options}
    found = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=alike)
    return by_lower[found[0]] if found else None


def suggest_options(word: str, options: Sequence[str], *, noun: str, prefix: str = "") -> str:
    """A hint with the nearest option if one is close, and with all options if they are few."""
    near = find_nearest(word, options)
    parts = [f"Did you mean {prefix + near!r}?"] if near else []
    if options and (len(options) <= MAX_LISTED_OPTIONS or not near):
        parts.append(f"Valid {noun}: {', '.join(repr(option) for option in options)}.")
    return " ".join(parts) or f"There are no {noun}."
