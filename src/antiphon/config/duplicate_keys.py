"""Finds keys that occur twice in one object of a JSON5 document; the parser silently keeps the last one."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pyjson5

_TOKEN_PATTERN = re.compile(
    r"""(?P<text>"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')|(?P<note>//[^\n\r\u2028\u2029]*|/\*.*?\*/)"""
    r"""|(?P<mark>[{}\[\],:])|(?P<word>[^\s\ufeff{}\[\],:"'/]+)""",
    re.DOTALL,
)


def find_duplicate_keys(content: str) -> Iterator[tuple[str, int]]:
    """Yields each duplicate key and its position. The document must already have been accepted by the parser."""
    objects: list[set[str]] = []
    key: tuple[str, int] | None = None
    for token in _TOKEN_PATTERN.finditer(content):
        match token.lastgroup, token[0]:
            case (("text" | "word"), said):
                key = said, token.start()
            case "mark", ":" if key is not None:
                name = _decode_key(key[0])
                if name in objects[-1]:
                    yield name, key[1]
                objects[-1].add(name)
            case "mark", ("{" | "["):
                objects.append(set())
            case "mark", ("}" | "]"):
                objects.pop()
            case _:
                pass


def _decode_key(said: str) -> str:
    """The decoded key: without quotes and escapes."""
    return next(iter(pyjson5.decode(f"{{{said}: 0}}")))
