"""Data that does not have the shape it should have: where and why, in words for whoever sent it."""

from __future__ import annotations

import re
from typing import NamedTuple

_PLACE = re.compile(r" - at `\$\.?(.*)`$", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*)`", re.DOTALL)


class Misfit(NamedTuple):
    path: str
    """`a.b[1]`, and nothing for the whole."""
    what: str
    name: str | None = None
    """The property at that path that is missing, or should not be there."""

    @property
    def field(self) -> str:
        return ".".join(filter(None, [self.path, self.name]))

    @property
    def pointer(self) -> str:
        """The path as `/a/b/1`, and `root` for the whole."""
        parts = re.sub(r"\[(\d+|\.\.\.)\]", r".\1", self.path).split(".")
        return "/" + "/".join(parts) if self.path else "root"


def read(error: Exception) -> Misfit:
    """What msgspec says of it, in the words of JSON Schema."""
    text = str(error)
    place = _PLACE.search(text)
    path, what = (place[1], text[: place.start()]) if place else ("", text)
    if unknown := _UNKNOWN.fullmatch(what):
        return Misfit(path, f"unexpected property '{unknown[1]}'", unknown[1])
    if missing := _MISSING.fullmatch(what):
        return Misfit(path, f"must have required property '{missing[1]}'", missing[1])
    what = re.sub(r"Expected `(int|float)` (>=|<=|>|<) (\S+)", r"must be \2 \3", what)
    return Misfit(path, re.sub(r"^Expected `(.+?)`, got `(.+?)`$", r"must be \1, not \2", what))
