"""Transcript entries on their way to a model: cut, masked and no more of them than fit.

Only what leaves is bounded; the store keeps every byte. An entry stays in the raw format, with what nobody but a
provider or a program can use (signatures, `native`, `details`) left out; that is not told as a loss. Texts that
were cut, images and whole entries that were left out are.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple, cast

import msgspec

from antiphon.engine.redaction import redact

TEXT_CHARS = 4000
HISTORY_BYTES = 80 * 1024
LIST_BYTES = 64 * 1024
CUT = "\n…(truncated)…"
DEEPEST = 32  # levels of data in an entry; a transcript may have been imported from anywhere

_WINDOW = (
    64 * 1024
)  # characters of a text that are searched for secrets; only the first few thousand are shown
_LONGEST_SECRET = 16 * 1024
_NOT_FOR_MODELS = frozenset({"details", "native", "thinkingSignature"})
_NAMES = frozenset(
    {"id", "runId", "role", "type", "toolCallId", "toolName", "mimeType"}
)  # to be kept exactly


class Bounded(NamedTuple):
    """One entry as it may be shown, its size, and what was done to it."""

    message: dict[str, Any]
    bytes: int
    truncated: bool
    redacted: bool


class Fitted(NamedTuple):
    """The entries that fit, oldest first; `dropped` is how many did not."""

    messages: list[dict[str, Any]]
    dropped: int
    bytes: int
    truncated: bool
    redacted: bool


def fit(items: Sequence[dict[str, Any]], most: int, *, from_newest: bool) -> Fitted:
    """As many as there is room for without a gap, beginning at the newest or at the oldest. At least one, if any."""
    kept: list[Bounded] = []
    size = len("[]")
    for item in reversed(items) if from_newest else items:
        shown = bounded(item, most - len("[]"))
        if kept and size + shown.bytes + len(",") > most:
            break
        size += shown.bytes + (len(",") if kept else 0)
        kept.append(shown)
    if from_newest:
        kept.reverse()
    return Fitted(
        messages=[shown.message for shown in kept],
        dropped=len(items) - len(kept),
        bytes=size,
        truncated=any(shown.truncated for shown in kept),
        redacted=any(shown.redacted for shown in kept),
    )


def bounded(item: dict[str, Any], most: int) -> Bounded:
    """The entry with every text masked and cut; if it is still larger than `most`, only that there is one."""
    sieve = _Sieve(most)
    message = sieve.message(item)
    size = len(msgspec.json.encode(message))
    if size > most:
        return placeholder(item)
    return Bounded(message, size, sieve.truncated, sieve.redacted)


def placeholder(item: dict[str, Any]) -> Bounded:
    """In the place of an entry that is too large: who said it, and where it is."""
    place = {name: item[name] for name in ("role", "timestamp", "id", "seq") if name in item}
    said = {"type": "text", "text": "[omitted: this message is too large]"}
    message = {**place, "content": [said], "omitted": True}
    return Bounded(message, len(msgspec.json.encode(message)), truncated=True, redacted=False)


class _Sieve:
    """Goes through one entry and remembers whether anything was held back."""

    def __init__(self, room: int) -> None:
        self._room = room
        self.truncated = False
        self.redacted = False

    def message(self, item: dict[str, Any]) -> dict[str, Any]:
        return {
            name: self._content(value) if name == "content" else self._part(name, value)
            for name, value in item.items()
            if name not in _NOT_FOR_MODELS
        }

    def _content(self, content: Any) -> Any:
        if isinstance(content, list):
            return [self._block(block) for block in cast("list[Any]", content)]
        return self._value(content)

    def _block(self, block: Any) -> Any:
        if not isinstance(block, dict):
            return self._value(block)
        parts = cast("dict[str, Any]", block)
        data = parts.get("data")
        if parts.get("type") == "image" and isinstance(data, str):
            self.truncated = True
            kept = {name: self._part(name, value) for name, value in parts.items() if name != "data"}
            return {**kept, "omitted": True, "bytes": len(data.rstrip("=")) * 3 // 4}
        return {name: self._part(name, value) for name, value in parts.items() if name not in _NOT_FOR_MODELS}

    def _part(self, name: str, value: Any) -> Any:
        return value if name in _NAMES and isinstance(value, str) else self._value(value)

    def _value(self, value: Any, name: str = "", depth: int = 0) -> Any:
        if isinstance(value, str):
            return self._named(name, value)
        if not isinstance(value, dict | list):
            return value
        if depth >= DEEPEST:
            self.truncated = True
            return CUT.strip()
        if isinstance(value, list):
            return [self._value(item, name, depth + 1) for item in cast("list[Any]", value)]
        items = cast("dict[str, Any]", value).items()
        return {key: self._value(item, key, depth + 1) for key, item in items}

    def _named(self, name: str, text: str) -> str:
        """In data, a name can say that a text is secret which does not look like it."""
        if text and name and _secret(name[:64]):
            self.redacted = True
            return "***"
        return self._text(text)

    def _text(self, text: str) -> str:
        if self._room < 0:  # it will not be shown anyhow, and looking for secrets is most of the work
            return ""
        shown = self._masked(text)
        self._room -= len(shown)
        return shown

    def _masked(self, text: str) -> str:
        window = text[:_WINDOW]
        masked = redact(window)
        self.redacted |= masked != window
        if (
            len(text) > _WINDOW
        ):  # a secret that the window's edge cuts apart is not recognised: it is not shown
            masked = masked[: max(0, len(masked) - _LONGEST_SECRET)]
        if len(masked) <= TEXT_CHARS and len(text) <= _WINDOW:
            return masked
        self.truncated = True
        return masked[:TEXT_CHARS] + CUT


@lru_cache(1024)
def _secret(name: str) -> bool:
    """Whether whatever has this name is masked where it stands in JSON."""
    written = f'"{name}": "plain words"'
    return redact(written) != written
