"""Texts of foreign programs, made safe to show."""

from __future__ import annotations

import unicodedata

_CONTROL_CATEGORIES = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})


def clean_text(text: str, max_characters: int, *, keeps_lines: bool = False) -> str:
    """Return a text without control characters and other invisible ones, cut to `max_characters` characters."""
    kept = "".join(
        char
        for char in text[: 4 * max_characters]
        if (keeps_lines and char in "\n\t") or unicodedata.category(char) not in _CONTROL_CATEGORIES
    )
    return kept if len(kept) <= max_characters else kept[: max_characters - 1] + "…"
