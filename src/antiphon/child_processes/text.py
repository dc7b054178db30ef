"""Texts of foreign programs, made safe to show."""

from __future__ import annotations

import unicodedata

_CONTROL_CATEGORIES = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})


def clean_text(text: str, most: int, *, keeps_lines: bool = False) -> str:
    """Return a text without control characters and other invisible ones, cut to `most` characters."""
    kept = "".join(
        char
        for char in text[: 4 * most]
        if (keeps_lines and char in "\n\t") or unicodedata.category(char) not in _CONTROL_CATEGORIES
    )
    return kept if len(kept) <= most else kept[: most - 1] + "…"
