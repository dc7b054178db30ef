"""Named SQL, read from `sql/queries/*.sql`.

A file holds statements headed by `-- name: …`. One text serves every database: parameters are `:name`, and text
for PostgreSQL only is in a comment of the form `/*pg: … */`, which SQLite ignores. Where it replaces something,
that begins with `/*lite*/`.
"""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

_QUERIES_DIR = Path(__file__).parent / "sql" / "queries"  # `importlib.resources` takes 5 ms to import

_COMMENT_LINE_PATTERN = re.compile(r"^--[^\n]*\n", re.MULTILINE)
_NAME_HEADER_PATTERN = re.compile(r"^-- name: (\w+)[^\n]*\n", re.MULTILINE)
_DIALECT_ALTERNATIVE_PATTERN = re.compile(r"/\*lite\*/.*?/\*pg:(.*?)\*/", re.DOTALL)
_POSTGRES_ONLY_PATTERN = re.compile(r"/\*pg:(.*?)\*/", re.DOTALL)
_NAMED_PARAMETER_PATTERN = re.compile(r"(?<![:\w]):([a-z_]\w*)")


class Query(NamedTuple):
    """A statement and its name in errors, logs and tests."""

    name: str
    text: str


class Queries:
    """The statements of one file, as attributes."""

    def __init__(self, topic: str) -> None:
        source = (_QUERIES_DIR / f"{topic}.sql").read_text("utf-8")
        parts = _NAME_HEADER_PATTERN.split(source)[1:]
        self._queries = {
            name: Query(f"{topic}.{name}", _COMMENT_LINE_PATTERN.sub("", text).strip().removesuffix(";"))
            for name, text in zip(parts[::2], parts[1::2], strict=True)
        }

    def __getattr__(self, name: str) -> Query:
        try:
            query = self._queries[name]
        except KeyError:
            raise AttributeError(f"no query named {name!r}; add it to the SQL file") from None
        setattr(self, name, query)
        return query

    def names(self) -> frozenset[str]:
        return frozenset(self._queries)


@lru_cache(maxsize=4096)
def translate_to_postgres(text: str) -> tuple[str, tuple[str, ...]]:
    """The text with `$1`, `$2` … for its parameters, and their names in that order."""
    text = _POSTGRES_ONLY_PATTERN.sub(r"\1", _DIALECT_ALTERNATIVE_PATTERN.sub(r"\1", text))
    names = tuple(dict.fromkeys(_NAMED_PARAMETER_PATTERN.findall(text)))
    numbers = {name: f"${number}" for number, name in enumerate(names, 1)}
    return _NAMED_PARAMETER_PATTERN.sub(lambda found: numbers[found[1]], text), names
