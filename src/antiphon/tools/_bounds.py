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

from antiphon.engine.outbox.redaction import redact

MAX_TEXT_CHARACTERS = 4000
MAX_HISTORY_RESULT_BYTES = 80 * 1024
MAX_LIST_RESULT_BYTES = 64 * 1024
TRUNCATION_MARK = "\n…(truncated)…"
MAX_DATA_DEPTH = 32  # levels of data in an entry; a transcript may have been imported from anywhere

_SCANNED_CHARACTERS = (
    64 * 1024
)  # characters of a text that are searched for secrets; only the first few thousand are shown
_MAX_SECRET_CHARACTERS = 16 * 1024
_HIDDEN_FIELDS = frozenset({"details", "native", "thinkingSignature"})
_VERBATIM_FIELDS = frozenset(
    {"id", "runId", "role", "type", "toolCallId", "toolName", "mimeType"}
)  # to be kept exactly


class BoundedEntry(NamedTuple):
    """One entry as it may be shown, its size, and what was done to it."""

    message: dict[str, Any]
    bytes: int
    truncated: bool
    redacted: bool


class FittedEntries(NamedTuple):
    """The entries that fit, oldest first; `dropped` is how many did not."""

    messages: list[dict[str, Any]]
    dropped: int
    bytes: int
    truncated: bool
    redacted: bool


def fit_entries(items: Sequence[dict[str, Any]], most: int, *, from_newest: bool) -> FittedEntries:
    """As many as there is room for without a gap, beginning at the newest or at the oldest. At least one, if any."""
    kept: list[BoundedEntry] = []
    size = len("[]")
    for item in reversed(items) if from_newest else items:
        shown = bound_entry(item, most - len("[]"))
        if kept and size + shown.bytes + len(",") > most:
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


def bound_entry(item: dict[str, Any], most: int) -> BoundedEntry:
    """The entry with every text masked and cut; if it is still larger than `most`, only that there is one."""
    sieve = _EntryBounder(most)
    message = sieve.bound_message(item)
    size = len(msgspec.json.encode(message))
    if size > most:
        return build_placeholder(item)
    return BoundedEntry(message, size, sieve.truncated, sieve.redacted)


def build_placeholder(item: dict[str, Any]) -> BoundedEntry:
    """In the place of an entry that is too large: who said it, and where it is."""
    place = {name: item[name] for name in ("role", "timestamp", "id", "seq") if name in item}
    said = {"type": "text", "text": "[omitted: this message is too large]"}
    message = {**place, "content": [said], "omitted": True}
    return BoundedEntry(message, len(msgspec.json.encode(message)), truncated=True, redacted=False)


class _EntryBounder:
    """Goes through one entry and remembers whether anything was held back."""

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
        """In data, a name can say that a text is secret which does not look like it."""
        if text and name and _is_secret_name(name[:64]):
            self.redacted = True
            return "***"
        return self._bound_text(text)

    def _bound_text(self, text: str) -> str:
        if (
            self._characters_left < 0
        ):  # it will not be shown anyhow, and looking for secrets is most of the work
            return ""
        shown = self._mask_and_cut(text)
        self._characters_left -= len(shown)
        return shown

    def _mask_and_cut(self, text: str) -> str:
        window = text[:_SCANNED_CHARACTERS]
        masked = redact(window)
        self.redacted |= masked != window
        if (
            len(text) > _SCANNED_CHARACTERS
        ):  # a secret that the window's edge cuts apart is not recognised: it is not shown
            masked = masked[: max(0, len(masked) - _MAX_SECRET_CHARACTERS)]
        if len(masked) <= MAX_TEXT_CHARACTERS and len(text) <= _SCANNED_CHARACTERS:
            return masked
        self.truncated = True
        return masked[:MAX_TEXT_CHARACTERS] + TRUNCATION_MARK


@lru_cache(1024)
def _is_secret_name(name: str) -> bool:
    """Whether whatever has this name is masked where it stands in JSON."""
    written = f'"{name}": "plain words"'
    return redact(written) != written
