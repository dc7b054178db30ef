"""Named SQL, read from `sql/queries/*.sql`.

A file holds statements headed by `-- name: …`. One text serves every database: parameters are `:name`, and
what only PostgreSQL needs stands in a comment of the form `/*pg: … */`, which SQLite skips by itself.
"""

from __future__ import annotations

import re
from importlib import resources
from typing import NamedTuple

_COMMENT = re.compile(r"^--[^\n]*\n", re.MULTILINE)
_NAME = re.compile(r"^-- name: (\w+)[^\n]*\n", re.MULTILINE)


class Query(NamedTuple):
    """A statement and the name it is known by in errors, logs and tests."""

    name: str
    text: str


class Queries:
    """The statements of one file, as attributes."""

    def __init__(self, topic: str) -> None:
        source = (
            resources.files("antiphon.store").joinpath("sql", "queries", f"{topic}.sql").read_text("utf-8")
        )
        parts = _NAME.split(source)[1:]
        self._queries = {
            name: Query(f"{topic}.{name}", _COMMENT.sub("", text).strip().removesuffix(";"))
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
