"""Bringing a SQLite file to the schema this version was written for.

Migrations are numbered, applied in order and each in one transaction, so a crash leaves the file at one of
two known versions. A file from the future is refused untouched.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from importlib import resources
from typing import NamedTuple

from antiphon.errors import StoreNewer

_FILE = re.compile(r"^(\d{4})_(\w+)\.sql$")
SQLITE_ID = "INTEGER PRIMARY KEY AUTOINCREMENT"


class Migration(NamedTuple):
    version: int
    name: str
    script: str


def migrations() -> list[Migration]:
    """Every migration, oldest first; a `NNNN_name.sqlite.sql` beside one is its SQLite-only part."""
    folder = resources.files("antiphon.store").joinpath("sql", "migrations")
    texts = {item.name: item.read_text("utf-8") for item in folder.iterdir()}
    found = [(match, text) for name, text in texts.items() if (match := _FILE.match(name))]
    return sorted(
        Migration(int(match[1]), match[2], text + texts.get(f"{match[1]}_{match[2]}.sqlite.sql", ""))
        for match, text in found
    )


def version_of(connection: sqlite3.Connection) -> int:
    return connection.execute("PRAGMA user_version").fetchone()[0]


def is_current(connection: sqlite3.Connection) -> bool:
    """Whether nothing is left to apply.

    Raises:
        StoreNewer: the file is from the future.
    """
    present, newest = version_of(connection), migrations()[-1].version
    if present > newest:
        raise StoreNewer(
            f"The database has schema {present}, this Antiphon knows schemas up to {newest}.",
            "Start the newer Antiphon that wrote it, or restore a backup made before the upgrade.",
            schema=present,
        )
    return present == newest


def migrate(connection: sqlite3.Connection) -> None:
    """Apply what is missing. The connection must be in autocommit mode."""
    if is_current(connection):
        return
    present = version_of(connection)
    for migration in migrations():
        if migration.version > present:
            _apply(connection, migration)


def _apply(connection: sqlite3.Connection, migration: Migration) -> None:
    connection.execute("BEGIN IMMEDIATE")
    try:
        for statement in _statements(migration.script.replace("{ID}", SQLITE_ID)):
            connection.execute(statement)
        connection.execute(f"PRAGMA user_version = {migration.version}")
        connection.execute("COMMIT")
    except BaseException:
        connection.execute("ROLLBACK")
        raise


def _statements(script: str) -> Iterator[str]:
    """Split by SQLite's own idea of a complete statement; `executescript` would commit in between."""
    pending = ""
    for line in script.splitlines(keepends=True):
        pending += line
        if sqlite3.complete_statement(pending):
            yield pending
            pending = ""
