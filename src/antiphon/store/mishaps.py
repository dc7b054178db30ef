"""What the errors of SQLite amount to: what is wrong, whether it lasts, and what to do about it."""

from __future__ import annotations

import logging
import math
import os
import shutil
import sqlite3
import time
from pathlib import Path

from antiphon.errors import StoreDamaged, StoreError, StoreFull, StoreReadOnly, StoreReplaced
from antiphon.store import TROUBLES

log = logging.getLogger(TROUBLES)

FileIdentity = tuple[int, int]  # device and inode

CALM = 60.0  # seconds without a failure after which a trouble that had come back is over
LEAST_ROOM = 64 * 2**10  # bytes; the index of the log, without which nothing is read, has half of it
_NO_ROOM = "There is no room left for the database"
_UNDONE = "nothing of this request was kept"
_NO_WRITING = {sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM}
NO_INDEX = {sqlite3.SQLITE_IOERR_SHMOPEN, sqlite3.SQLITE_IOERR_SHMSIZE, sqlite3.SQLITE_IOERR_SHMMAP}
NO_LOG = {sqlite3.SQLITE_READONLY_DIRECTORY, sqlite3.SQLITE_CANTOPEN}
_DAMAGED = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
_UNREADABLE = ("Could not decode to UTF-8", "JSON cannot hold BLOB")  # with a piece of what was read
_LASTING = {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, *_NO_WRITING, *_DAMAGED}


def damaged(path: Path, reason: str) -> StoreDamaged:
    reason = reason.splitlines()[-1]  # SQLite's check has headings
    return StoreDamaged(
        f"The database {str(path)!r} is damaged ({reason}).",
        "Restore a backup, or move the file away to start afresh; nothing was changed.",
        path=str(path),
    )


def told(error: sqlite3.Error, path: Path, *, reading: bool = False) -> StoreError:
    """A database error, in one sentence with a next step."""
    primary = _primary(error)
    if primary == sqlite3.SQLITE_FULL or (primary == sqlite3.SQLITE_IOERR and is_full(path)):
        return full()
    if primary in _NO_WRITING:
        wrote = error.sqlite_errorcode == sqlite3.SQLITE_READONLY
        return unopened(str(error), path, reading=reading and not wrote)
    if primary in _DAMAGED:
        return damaged(path, str(error))
    if str(error).startswith(_UNREADABLE):
        return damaged(path, "a value in it cannot be read")
    if primary == sqlite3.SQLITE_IOERR:
        return StoreError(
            f"The database {str(path)!r} cannot be read or written ({error}).",
            f"Look at the disk it is on and at its limits; {_UNDONE}.",
        )
    return StoreError(
        f"The database {str(path)!r} refused a statement ({error}).",
        f"Try again, and report it if it stays so; {_UNDONE}.",
    )


def unopened(reason: str, path: Path, *, reading: bool = False) -> StoreError:
    if reading:
        return StoreError(
            f"The database {str(path)!r} cannot be opened for reading ({reason}).",
            "Give this user access to the file and its directory, look at the limit of open files, and try again.",
        )
    return StoreReadOnly(
        f"The database {str(path)!r} cannot be opened for writing ({reason}).",
        "Give this user write access to the file and its directory.",
    )


def full() -> StoreFull:
    return StoreFull(f"{_NO_ROOM}; {_UNDONE}.", "Free some disk space and try again.")


def replaced(path: Path) -> StoreReplaced:
    return StoreReplaced(
        f"The database {str(path)!r} was deleted or replaced while it was open, so nothing more is accepted.",
        "Put the right file there, then restart Antiphon; docs/operating.md says how to save what was written.",
        path=str(path),
    )


class OpenedFiles:
    """The database and its log as they were opened, to be compared with what is at their paths now.

    An open file keeps its inode, so no other file can have the same number. What a path cannot be asked (no access, a
    network that does not answer) proves nothing: then SQLite's own errors decide.
    """

    def __init__(self, path: Path) -> None:
        self._database = os.fspath(path)
        self._log = f"{self._database}-wal"
        self._opened_database = _identify(self._database)
        self._opened_log: FileIdentity | None = None

    def note_log(self) -> None:
        """Remember the log, which SQLite creates after the database is opened."""
        self._opened_log = _identify(self._log)

    def are_replaced(self) -> bool:
        return not (_is_at(self._opened_database, self._database) and _is_at(self._opened_log, self._log))

    def has_foreign_log(self) -> bool:
        """Whether closing would remove a log that belongs to another database: SQLite removes it by its path."""
        found = _identify(self._log)
        return found is not None and found != self._opened_log


def _identify(path: str) -> FileIdentity | None:
    try:
        found = os.stat(path)  # noqa: PTH116 - twice per commit
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


def is_full(path: Path) -> bool:
    """Whether the disk is; a quota that is used up does not count as that."""
    try:
        return shutil.disk_usage(path.parent).free < LEAST_ROOM
    except OSError:
        return False


def _primary(error: sqlite3.Error) -> int | None:
    code = getattr(error, "sqlite_errorcode", None)
    return code & 0xFF if isinstance(code, int) else None


def lasts(error: BaseException | None) -> bool:
    """Whether the next commit will most likely fail for the same reason."""
    return isinstance(error, StoreReplaced) or (
        isinstance(error, sqlite3.Error) and _primary(error) in _LASTING
    )


class Health:
    """Whether anything can be kept; it says so when that changes."""

    def __init__(self, path: Path) -> None:
        self.trouble: StoreError | None = None
        self._path = path
        self._failed = self._mended = -math.inf
        self._returned = False

    def judge(self, error: BaseException | None, *, kept: bool) -> None:
        """By what came of a commit; one of nothing does not tell."""
        if isinstance(self.trouble, StoreReplaced):
            return  # until a restart
        if isinstance(error, StoreReplaced):
            self._fail(error)
        elif isinstance(error, sqlite3.Error):
            self._fail(told(error, self._path))
        elif self.trouble and kept and self._over(self.trouble):
            self.trouble = None
            self._mended = time.monotonic()
            log.warning("The database can be written again, and everything goes on.")

    def _fail(self, trouble: StoreError) -> None:
        now = time.monotonic()
        if self.trouble is None or isinstance(trouble, StoreReplaced):
            self._returned = now - self._mended < CALM
            log.error("%s", _said(trouble))
        self.trouble, self._failed = trouble, now

    def _over(self, trouble: StoreError) -> bool:
        """A small commit may find its place where there is none for a larger one, or beside the damage.

        Within a quota that cannot be seen: there it is over at once the first time, and not when it comes back.
        """
        if isinstance(trouble, StoreDamaged) or (isinstance(trouble, StoreFull) and is_full(self._path)):
            return False
        return not self._returned or time.monotonic() - self._failed >= CALM


def _said(trouble: StoreError) -> str:
    """The same for who has asked for nothing."""
    if isinstance(trouble, StoreFull):
        return f"{_NO_ROOM}; what is under way goes on when there is."
    return f"{trouble.what} {trouble.hint}"
