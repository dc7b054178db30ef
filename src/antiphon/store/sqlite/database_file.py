"""A SQLite database file: how it is opened, recognized as Antiphon's, and checked."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Generator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from antiphon.errors import StoreDamaged, StoreError
from antiphon.paths import is_writable
from antiphon.store.migrations import is_current, migrate
from antiphon.store.sqlite.errors import (
    NO_LOG_CODES,
    NO_LOG_INDEX_CODES,
    build_damaged_error,
    build_unopened_error,
    translate_sqlite_error,
)
from antiphon.store.statedir import READ_ONLY_ERRNOS, StateDir, translate_os_error

FileIdentity = tuple[int, int]  # device and inode

APPLICATION_ID = 0x414E5450  # "ANTP": marks the file as Antiphon's
MIN_SQLITE_VERSION = (3, 37, 0)  # RETURNING, pragma_table_list
MAX_CHECKED_AT_OPEN_BYTES = 32 * 2**20  # a larger file is checked by `antiphon doctor`, not at every start
BUSY_TIMEOUT_SECONDS = 10  # for another process that holds the file


class OpenedFiles:
    """The database and its log as they were opened, for comparison with the files now at their paths.

    An open file keeps its inode, so no other file can have the same number. If a path cannot be examined (no access, or
    a network that does not answer), that proves nothing: then SQLite's own errors decide.
    """

    def __init__(self, path: Path) -> None:
        self._database = os.fspath(path)
        self._log = f"{self._database}-wal"
        self._opened_database = _identify(self._database)
        self._opened_log: FileIdentity | None = None

    def note_log(self) -> None:
        """Records the log file, which SQLite creates after the database is opened."""
        self._opened_log = _identify(self._log)

    def are_replaced(self) -> bool:
        return not (_is_at(self._opened_database, self._database) and _is_at(self._opened_log, self._log))

    def has_foreign_log(self) -> bool:
        """Whether closing would delete another database's log: SQLite deletes it by path."""
        found = _identify(self._log)
        return found is not None and found != self._opened_log


def _identify(path: str) -> FileIdentity | None:
    try:
        found = os.stat(path)  # noqa: PTH116 - for every commit
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def _is_at(opened: FileIdentity | None, path: str) -> bool:
    try:
        return _identify(path) == opened
    except NotADirectoryError:
        return False
    except OSError:
        return True


def _connect(path: Path, mode: str = "rw") -> sqlite3.Connection:
    connection = sqlite3.connect(
        f"file:{_quote_path(path)}?mode={mode}",
        uri=True,
        isolation_level=None,
        timeout=BUSY_TIMEOUT_SECONDS,
        check_same_thread=False,
        cached_statements=512,
    )
    connection.row_factory = sqlite3.Row
    connection.execute("PRAGMA foreign_keys = ON")
    return connection


def _connect_reader(path: Path) -> sqlite3.Connection:
    """Opens a connection for reading, even on a full disk or without write permission.

    Readers share the index of the log with the writer, in a file that may have to be created. If there is no room for
    it, an exclusive connection keeps the index in memory, unless another process has the database open. Without a log
    and without permission to create one, the file is opened as immutable.
    """
    try:
        with _closed_on_failure(_connect(path, "ro")) as connection:
            _force_open(connection)
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", None)
        if code in NO_LOG_CODES and _has_no_writer(path):
            return _connect(path, "ro&immutable=1")
        if code not in NO_LOG_INDEX_CODES:
            raise
        with suppress(sqlite3.Error):
            return _connect_exclusive(path)
        raise
    return connection


def _has_no_writer(path: Path) -> bool:
    """Whether this user's file can have no writer: it has no log, and none can be created."""
    return not is_writable(path.parent) and not path.with_name(f"{path.name}-wal").exists()


def _connect_exclusive(path: Path) -> sqlite3.Connection:
    with _closed_on_failure(_connect(path)) as connection:
        connection.execute("PRAGMA busy_timeout = 0")
        connection.execute("PRAGMA query_only = ON")
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        _force_open(connection)
    return connection


@contextmanager
def _closed_on_failure(connection: sqlite3.Connection) -> Generator[sqlite3.Connection]:
    """Closes the connection on failure; otherwise the error's traceback would keep the file open."""
    try:
        yield connection
    except BaseException:
        connection.close()
        raise


def _force_open(connection: sqlite3.Connection) -> None:
    """Makes SQLite open its files, which it otherwise defers to the first query."""
    connection.execute("SELECT 1 FROM sqlite_schema").fetchone()


def _quote_path(path: Path) -> str:
    return str(path.absolute()).replace("%", "%25").replace("?", "%3f").replace("#", "%23")


def check_library() -> None:
    """Checks that Python's SQLite library has the required version and features.

    Raises:
        StoreError: it does not.
    """
    found = sqlite3.sqlite_version_info
    if found < MIN_SQLITE_VERSION:
        raise StoreError(
            f"SQLite {sqlite3.sqlite_version} is too old.",
            f"Use a Python that comes with SQLite {'.'.join(map(str, MIN_SQLITE_VERSION[:2]))} or newer.",
        )
    try:
        with closing(sqlite3.connect(":memory:")) as connection:
            connection.executescript("SELECT json_array(1); CREATE VIRTUAL TABLE words USING fts5(word);")
    except sqlite3.OperationalError as error:
        raise StoreError(
            f"SQLite {sqlite3.sqlite_version} lacks required features ({error}).",
            "Use another Python, such as one from python.org or `uv python install`.",
        ) from error


def open_writer(path: Path, synchronous: str) -> tuple[sqlite3.Connection, OpenedFiles]:
    check_library()
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    except OSError as error:
        denied = error.errno in READ_ONLY_ERRNOS and os.path.exists(path)  # noqa: PTH110 - Path.exists may raise
        raise (
            build_unopened_error(str(error.strerror), path)
            if denied
            else translate_os_error(error, path.parent)
        ) from error
    files = OpenedFiles(path)
    try:
        with _closed_on_failure(_connect(path)) as connection:
            ours = _is_ours(connection, path)
            if path.stat().st_size <= MAX_CHECKED_AT_OPEN_BYTES:
                check_integrity(connection, path, quick=True)
            if not ours:
                connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute(f"PRAGMA synchronous = {synchronous.upper()}")
            connection.execute("PRAGMA wal_autocheckpoint = 4000")
            connection.execute("PRAGMA journal_size_limit = 67108864")
            migrate(connection)
            files.note_log()
    except sqlite3.Error as error:
        raise translate_sqlite_error(error, path) from error
    return connection, files


def open_reader(path: Path) -> sqlite3.Connection:
    try:
        return _connect_reader(path)
    except sqlite3.Error as error:
        raise translate_sqlite_error(error, path, reading=True) from error


def check_exists(path: Path) -> None:
    """Raises if the file is missing or empty; opening it for writing would create it."""
    StateDir.open_unlocked(path.parent).check_readable()
    if not path.exists() or path.stat().st_size == 0:
        raise _build_missing_error(path)


def _build_missing_error(path: Path) -> StoreError:
    return StoreError(
        f"There is no Antiphon database at {str(path)!r} yet.",
        "Start a conversation with `antiphon chat` first.",
    )


def check_readable(path: Path) -> None:
    """Raises if the file is not Antiphon's or has another version, which a reader cannot fix."""
    check_exists(path)
    try:
        with closing(_connect_reader(path)) as connection:
            if not _is_ours(connection, path):
                raise _build_missing_error(path)
            if not is_current(connection):
                raise StoreError(
                    f"The database {str(path)!r} was written by an older Antiphon.",
                    "Start `antiphon up` once to migrate it.",
                )
    except sqlite3.Error as error:
        raise translate_sqlite_error(error, path, reading=True) from error


def _is_ours(connection: sqlite3.Connection, path: Path) -> bool:
    """Whether the file has Antiphon's application id; False if it is empty, an error if it is another program's."""
    owner: int = connection.execute("PRAGMA application_id").fetchone()[0]
    tables: int = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]
    if owner != APPLICATION_ID and tables:
        raise StoreDamaged(
            f"The file {str(path)!r} is another program's database.",
            "Move it away, or choose another directory with --state-dir.",
        )
    return owner == APPLICATION_ID and tables > 0


def check_integrity(connection: sqlite3.Connection, path: Path, *, quick: bool) -> None:
    """Raises `StoreDamaged` with the first finding of SQLite's own check."""
    pragma = "quick_check(1)" if quick else "integrity_check(1)"
    found: str = connection.execute(f"PRAGMA {pragma}").fetchone()[0]
    if found != "ok":
        raise build_damaged_error(path, found)


def check_file(path: Path) -> None:
    """Fully checks a database that has no writer, for `antiphon doctor`."""
    check_readable(path)
    with closing(open_reader(path)) as connection:
        try:
            check_integrity(connection, path, quick=False)
        except sqlite3.Error as error:
            raise translate_sqlite_error(error, path) from error
