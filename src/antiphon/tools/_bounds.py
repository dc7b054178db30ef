"""Bounds transcript entries for a model: cuts and masks texts, and drops entries that do not fit.

Only the output is bounded; the store keeps every byte. An entry keeps its raw format, without the fields that only a
provider or a program can use (`thinkingSignature`, `native`, `details`); their removal is not reported. Cut texts,
omitted images and omitted entries are reported.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple, cast

import msgspec

from antiphon.engine.outbox.redaction import redact

MAX_TEXT_CHARACTERS = 4000
MAX_HISTORY_RESULT_BYTES = 80 * 1024
MAX_LIST_RESULT_BYTES = 64 * 1024
TRUNCATION_MARK = "\n…(truncated)…"
MAX_DATA_DEPTH = 32  # nesting levels of data in an entry; imported transcripts may contain anything

# Part of a text that is searched for secrets; only the first few thousand characters are shown.
_SCANNED_CHARACTERS = 64 * 1024
_MAX_SECRET_CHARACTERS = 16 * 1024
_HIDDEN_FIELDS = frozenset({"details", "native", "thinkingSignature"})
# Neither masked nor cut.
_VERBATIM_FIELDS = frozenset({"id", "runId", "role", "type", "toolCallId", "toolName", "mimeType"})


class BoundedEntry(NamedTuple):
    """One entry as it may be shown, its size, and whether it was cut or masked."""

    message: dict[str, Any]
    bytes: int
    truncated: bool
    redacted: bool


class FittedEntries(NamedTuple):
    """The entries that fit, oldest first; `dropped` is the number of the others."""

    messages: list[dict[str, Any]]
    dropped: int
    bytes: int
    truncated: bool
    redacted: bool


def fit_entries(items: Sequence[dict[str, Any]], maximum: int, *, from_newest: bool) -> FittedEntries:
    """Return as many consecutive entries as fit, from the newest or the oldest on; at least one, if any."""
    kept: list[BoundedEntry] = []
    size = len("[]")
    for item in reversed(items) if from_newest else items:
        shown = bound_entry(item, maximum - len("[]"))
        if kept and size + shown.bytes + len(",") > maximum:
            break
        size += shown.bytes + (len(",") if kept else 0)
        kept.append(shown)
    if from_newest:
        kept.reverse()
    return FittedEntries(
        messages=[shown.message for shown in kept],
        dropped=len(items) - len(kept),
        bytes=size,
        truncated=any(shown.truncated for shown in kept),
        redacted=any(shown.redacted for shown in kept),
    )


def bound_entry(item: dict[str, Any], maximum: int) -> BoundedEntry:
    """Return the entry with every text masked and cut, or a placeholder if it is still larger than `maximum`."""
    bounder = _EntryBounder(maximum)
    message = bounder.bound_message(item)
    size = len(msgspec.json.encode(message))
    if size > maximum:
        return build_placeholder(item)
    return BoundedEntry(message, size, bounder.truncated, bounder.redacted)


def build_placeholder(item: dict[str, Any]) -> BoundedEntry:
    """Return a placeholder for an entry that is too large, with its role, time, id and number."""
    place = {name: item[name] for name in ("role", "timestamp", "id", "seq") if name in item}
    notice = {"type": "text", "text": "[omitted: this message is too large]"}
    message = {**place, "content": [notice], "omitted": True}
    return BoundedEntry(message, len(msgspec.json.encode(message)), truncated=True, redacted=False)


class _EntryBounder:
    """Bounds the texts of one entry and records whether any was cut or masked."""

    def __init__(self, room: int) -> None:
        self._characters_left = room
        self.truncated = False
        self.redacted = False

    def bound_message(self, item: dict[str, Any]) -> dict[str, Any]:
        return {
            name: self._bound_content(value) if name == "content" else self._bound_field(name, value)
            for name, value in item.items()
            if name not in _HIDDEN_FIELDS
        }

    def _bound_content(self, content: Any) -> Any:
        if isinstance(content, list):
            return [self._bound_block(block) for block in cast("list[Any]", content)]
        return self._bound_value(content)

    def _bound_block(self, block: Any) -> Any:
        if not isinstance(block, dict):
            return self._bound_value(block)
        parts = cast("dict[str, Any]", block)
        data = parts.get("data")
        if parts.get("type") == "image" and isinstance(data, str):
            self.truncated = True
            kept = {name: self._bound_field(name, value) for name, value in parts.items() if name != "data"}
            return {**kept, "omitted": True, "bytes": len(data.rstrip("=")) * 3 // 4}
        return {
            name: self._bound_field(name, value)
            for name, value in parts.items()
            if name not in _HIDDEN_FIELDS
        }

    def _bound_field(self, name: str, value: Any) -> Any:
        return value if name in _VERBATIM_FIELDS and isinstance(value, str) else self._bound_value(value)

    def _bound_value(self, value: Any, name: str = "", depth: int = 0) -> Any:
        if isinstance(value, str):
            return self._bound_named_text(name, value)
        if not isinstance(value, dict | list):
            return value
        if depth >= MAX_DATA_DEPTH:
            self.truncated = True
            return TRUNCATION_MARK.strip()
        if isinstance(value, list):
            return [self._bound_value(item, name, depth + 1) for item in cast("list[Any]", value)]
        items = cast("dict[str, Any]", value).items()
        return {key: self._bound_value(item, key, depth + 1) for key, item in items}

    def _bound_named_text(self, name: str, text: str) -> str:
        """Bound a text in data; a name such as `password` has it masked even if it does not look like a secret."""
        if text and name and _is_secret_name(name[:64]):
            self.redacted = True
            return "***"
        return self._bound_text(text)

    def _bound_text(self, text: str) -> str:
        # The entry is too large to be shown, and the search for secrets is expensive.
        if self._characters_left < 0:
            return ""
        shown = self._mask_and_cut(text)
        self._characters_left -= len(shown)
        return shown

    def _mask_and_cut(self, text: str) -> str:
        window = text[:_SCANNED_CHARACTERS]
        masked = redact(window)
        self.redacted |= masked != window
        # A secret cut at the window's edge is not recognized, so the edge is not shown.
        if len(text) > _SCANNED_CHARACTERS:
            masked = masked[: max(0, len(masked) - _MAX_SECRET_CHARACTERS)]
        if len(masked) <= MAX_TEXT_CHARACTERS and len(text) <= _SCANNED_CHARACTERS:
            return masked
        self.truncated = True
        return masked[:MAX_TEXT_CHARACTERS] + TRUNCATION_MARK


@lru_cache(1024)
def _is_secret_name(name: str) -> bool:
    """Whether a JSON field with this name is masked regardless of its value."""
    written = f'"{name}": "plain words"'
    return redact(written) != written
