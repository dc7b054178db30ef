"""The SQLite database that is moved elsewhere: its tables, and their rows in key order. It is never changed.

Tables and columns are read from the file itself, so that none can be forgotten. Three kinds of tables are not
copied: those that belong to a process, those of the full-text indexes, and SQLite's own.
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
from antiphon.store.sqlite.database_file import check_file
from antiphon.store.table_digests import (
    NUL_CHARACTER,
    NUL_REPLACEMENT,
    Column,
    ColumnKind,
    ColumnValue,
    DigestSum,
    RowKey,
    Table,
    compute_digest,
    quote_names,
)

BATCH_ROWS = 5_000
BATCH_BYTES = 8 * 2**20  # bytes after which a batch is full, however few its rows
UNCOPIED_TABLES = frozenset({"owners", "watch", "search_cursor", "tokens"})
"""Leases of processes that are gone, the position of an index that is rebuilt, and tokens.

With SQLite, tokens are in a file, which `antiphon store migrate` takes over.
"""
SESSION_NAMES_TABLE = Table(
    "session_names", (Column("rowid", "integer"), Column("names", "words")), ("rowid",)
)
"""A small full-text index that SQLite stores together with its texts."""

_KINDS_BY_SQL_TYPE: dict[str, ColumnKind] = {
    "INTEGER": "integer",
    "BIGINT": "integer",
    "DOUBLE PRECISION": "real",
    "TEXT": "text",
}


class RowBatch(msgspec.Struct, frozen=True):
    """Rows in a form that any database can store; `last` is the key of the last one in this database."""

    rows: Sequence[tuple[ColumnValue, ...]]
    last: RowKey
    replaced: int
    """Number of texts with a character that PostgreSQL cannot store and that was replaced."""


class CopySource:
    """A database to copy from. One caller at a time; `close` waits for it."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self._path = path
        self._connection = connection
        self._busy = threading.Lock()

    @classmethod
    def open(cls, path: Path) -> Self:
        """Opens the database after a full integrity check.

        Raises:
            StoreError: the file is missing, damaged, not Antiphon's, or has another version.
        """
        check_file(path)
        connection = sqlite3.connect(
            f"{path.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None, check_same_thread=False
        )
        return cls(path, connection)

    def close(self) -> None:
        with self._busy:
            self._connection.close()

    def list_tables(self) -> list[Table]:
        """The tables to copy, each after those that it references."""
        with self._translate_read_errors() as connection:
            names = [
                name
                for (name,) in connection.execute(
                    "SELECT name FROM pragma_table_list WHERE schema = 'main' AND type = 'table' ORDER BY name"
                )
                if not name.startswith("sqlite_") and name not in UNCOPIED_TABLES
            ]
            order = TopologicalSorter(
                {name: sorted(_list_referenced_tables(connection, name)) for name in names}
            )
            return [*(_load_table(connection, name) for name in order.static_order()), SESSION_NAMES_TABLE]

    def count_rows(self, table: Table) -> int:
        with self._translate_read_errors() as connection:
            return connection.execute(f"SELECT count(*) FROM {quote_names(table.name)}").fetchone()[0]  # noqa: S608

    def load_sequences(self) -> dict[str, int]:
        """The highest number each table has ever assigned; none is reused, even if its row is gone."""
        with self._translate_read_errors() as connection:
            return dict(connection.execute("SELECT name, seq FROM sqlite_sequence"))

    def load_batch_after(self, table: Table, last: RowKey | None) -> RowBatch | None:
        """The next rows, or None if all have been read."""
        rows: list[tuple[ColumnValue, ...]] = []
        size = replaced = 0
        latest: Sequence[ColumnValue] = ()
        with self._translate_read_errors() as connection:
            for row in connection.execute(_build_select(table, ">", last), last or ()):
                latest = row
                texts = [value for value in row if isinstance(value, str)]
                size += sum(map(len, texts))
                replaced += sum(NUL_CHARACTER in text for text in texts)
                rows.append(_replace_nul_characters(row))
                if len(rows) >= BATCH_ROWS or size >= BATCH_BYTES:
                    break
        return RowBatch(rows, table.get_key(latest), replaced) if rows else None

    def sum_digests(self, table: Table, last: RowKey | None = None) -> DigestSum:
        """The digest sum of all rows, or of those up to a key."""
        total = DigestSum()
        with self._translate_read_errors() as connection:
            for row in connection.execute(_build_select(table, "<=", last), last or ()):
                total.add(compute_digest(table, _replace_nul_characters(row)))
        return total

    @contextmanager
    def _translate_read_errors(self) -> Generator[sqlite3.Connection]:
        with self._busy:
            try:
                yield self._connection
            except sqlite3.Error as error:
                raise StoreDamaged(
                    f"The database {str(self._path)!r} cannot be read ({error}).",
                    "Run `antiphon doctor`, or restore a backup; nothing in it was changed.",
                    path=str(self._path),
                ) from error


def _load_table(connection: sqlite3.Connection, name: str) -> Table:
    found = connection.execute(
        "SELECT name, type, pk FROM pragma_table_info(?) ORDER BY cid", (name,)
    ).fetchall()
    key = sorted((position, column) for column, _, position in found if position)
    return Table(
        name,
        tuple(Column(column, _KINDS_BY_SQL_TYPE[kind]) for column, kind, _ in found),
        tuple(part for _, part in key),
    )


def _list_referenced_tables(connection: sqlite3.Connection, name: str) -> set[str]:
    return {
        other for (other,) in connection.execute('SELECT "table" FROM pragma_foreign_key_list(?)', (name,))
    }


def _build_select(table: Table, relation: str, key: RowKey | None) -> str:
    columns, key_columns = quote_names(*table.names), quote_names(*table.key)
    where = f"WHERE ({key_columns}) {relation} ({', '.join('?' * len(key))})" if key else ""
    return f"SELECT {columns} FROM {quote_names(table.name)} {where} ORDER BY {key_columns}"  # noqa: S608


def _replace_nul_characters(row: Sequence[ColumnValue]) -> tuple[ColumnValue, ...]:
    if any(isinstance(value, str) and NUL_CHARACTER in value for value in row):
        return tuple(
            value.replace(NUL_CHARACTER, NUL_REPLACEMENT) if isinstance(value, str) else value
            for value in row
        )
    return cast("tuple[ColumnValue, ...]", row)
