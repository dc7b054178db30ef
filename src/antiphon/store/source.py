"""A SQLite database that is moved elsewhere: its tables, and their rows in the order of their keys. Never changed.

Which tables and columns there are is read from the file itself, so that nothing can be forgotten. Three kinds of
tables stay: those that belong to a process, those of the full-text indexes, and what SQLite keeps for itself.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Self, cast

import msgspec

from antiphon.errors import StoreDamaged
from antiphon.store.sqlite import check_file
from antiphon.store.tables import INSTEAD, NUL, Column, Key, Kind, Sum, Table, Value, digest_of, quoted

BATCH_ROWS = 5_000
BATCH_BYTES = 8 * 2**20  # after which a batch is full, however few its rows
STAYING = frozenset({"owners", "watch", "search_cursor", "tokens"})
"""Leases of processes that are gone, how far an index is that is made anew, and tokens: with SQLite they
are in a file, which `antiphon store migrate` takes over."""
NAMES = Table("session_names", (Column("rowid", "integer"), Column("names", "words")), ("rowid",))
"""An index over few words, whose texts SQLite keeps with it."""

_KINDS: dict[str, Kind] = {
    "INTEGER": "integer",
    "BIGINT": "integer",
    "DOUBLE PRECISION": "real",
    "TEXT": "text",
}


class Batch(msgspec.Struct, frozen=True):
    """Rows as they can be stored anywhere; `last` is the key of the last of them as it is here."""

    rows: Sequence[tuple[Value, ...]]
    last: Key
    replaced: int
    """Texts in which a character had to be replaced that PostgreSQL cannot store."""


class Source:
    """See the module. One caller at a time; closing waits for it."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self._path = path
        self._connection = connection
        self._busy = threading.Lock()

    @classmethod
    def open(cls, path: Path) -> Self:
        """Looks through the whole file first.

        Raises:
            StoreError: it is not there, damaged, somebody else's, or of another version.
        """
        check_file(path)
        connection = sqlite3.connect(
            f"{path.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None, check_same_thread=False
        )
        return cls(path, connection)

    def close(self) -> None:
        with self._busy:
            self._connection.close()

    def tables(self) -> list[Table]:
        """Those that are moved, none before another that it refers to."""
        with self._reading() as connection:
            names = [
                name
                for (name,) in connection.execute(
                    "SELECT name FROM pragma_table_list WHERE schema = 'main' AND type = 'table' ORDER BY name"
                )
                if not name.startswith("sqlite_") and name not in STAYING
            ]
            order = TopologicalSorter({name: sorted(_referred(connection, name)) for name in names})
            return [*(_table(connection, name) for name in order.static_order()), NAMES]

    def count(self, table: Table) -> int:
        with self._reading() as connection:
            return connection.execute(f"SELECT count(*) FROM {quoted(table.name)}").fetchone()[0]  # noqa: S608

    def sequences(self) -> dict[str, int]:
        """The highest number each table has ever given out; none is used again, even if its row is gone."""
        with self._reading() as connection:
            return dict(connection.execute("SELECT name, seq FROM sqlite_sequence"))

    def after(self, table: Table, last: Key | None) -> Batch | None:
        """The next rows, or None if there are no more."""
        rows: list[tuple[Value, ...]] = []
        size = replaced = 0
        found: Sequence[Value] = ()
        with self._reading() as connection:
            for row in connection.execute(_select(table, ">", last), last or ()):
                found = row
                texts = [value for value in row if isinstance(value, str)]
                size += sum(map(len, texts))
                replaced += sum(NUL in text for text in texts)
                rows.append(_storable(row))
                if len(rows) >= BATCH_ROWS or size >= BATCH_BYTES:
                    break
        return Batch(rows, table.key_of(found), replaced) if rows else None

    def sum(self, table: Table, upto: Key | None = None) -> Sum:
        """Of all rows, or of those up to a key."""
        total = Sum()
        with self._reading() as connection:
            for row in connection.execute(_select(table, "<=", upto), upto or ()):
                total.add(digest_of(table, _storable(row)))
        return total

    @contextmanager
    def _reading(self) -> Generator[sqlite3.Connection]:
        with self._busy:
            try:
                yield self._connection
            except sqlite3.Error as error:
                raise StoreDamaged(
                    f"The database {str(self._path)!r} cannot be read ({error}).",
                    "Run `antiphon doctor`, or restore a backup; nothing in it was changed.",
                    path=str(self._path),
                ) from error


def _table(connection: sqlite3.Connection, name: str) -> Table:
    found = connection.execute(
        "SELECT name, type, pk FROM pragma_table_info(?) ORDER BY cid", (name,)
    ).fetchall()
    key = sorted((place, column) for column, _, place in found if place)
    return Table(
        name, tuple(Column(column, _KINDS[kind]) for column, kind, _ in found), tuple(part for _, part in key)
    )


def _referred(connection: sqlite3.Connection, name: str) -> set[str]:
    return {
        other for (other,) in connection.execute('SELECT "table" FROM pragma_foreign_key_list(?)', (name,))
    }


def _select(table: Table, relation: str, key: Key | None) -> str:
    columns, own = quoted(*table.names), quoted(*table.key)
    where = f"WHERE ({own}) {relation} ({', '.join('?' * len(key))})" if key else ""
    return f"SELECT {columns} FROM {quoted(table.name)} {where} ORDER BY {own}"  # noqa: S608


def _storable(row: Sequence[Value]) -> tuple[Value, ...]:
    if any(isinstance(value, str) and NUL in value for value in row):
        return tuple(value.replace(NUL, INSTEAD) if isinstance(value, str) else value for value in row)
    return cast("tuple[Value, ...]", row)
