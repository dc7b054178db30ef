"""Translates SQLite errors, and tracks whether the store can write."""

from __future__ import annotations

import logging
import math
import shutil
import sqlite3
import time
from pathlib import Path

from antiphon.errors import StoreDamaged, StoreError, StoreFull, StoreReadOnly, StoreReplaced
from antiphon.store import STORE_TROUBLE_LOGGER

log = logging.getLogger(STORE_TROUBLE_LOGGER)

RECOVERY_QUIET_SECONDS = 60.0  # without a failure until a recurring problem counts as over
MIN_FREE_DISK_BYTES = 64 * 2**10  # half of it for the index of the log, which reading needs
_DISK_FULL_TEXT = "There is no room left for the database"
_NOTHING_KEPT_TEXT = "nothing of this request was kept"
_NOT_WRITABLE_CODES = {sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM}
NO_LOG_INDEX_CODES = {sqlite3.SQLITE_IOERR_SHMOPEN, sqlite3.SQLITE_IOERR_SHMSIZE, sqlite3.SQLITE_IOERR_SHMMAP}
NO_LOG_CODES = {sqlite3.SQLITE_READONLY_DIRECTORY, sqlite3.SQLITE_CANTOPEN}
_DAMAGED_CODES = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
_UNREADABLE_VALUE_PREFIXES = (
    "Could not decode to UTF-8",
    "JSON cannot hold BLOB",
)  # these messages quote the value
_LASTING_CODES = {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, *_NOT_WRITABLE_CODES, *_DAMAGED_CODES}


def build_damaged_error(path: Path, reason: str) -> StoreDamaged:
    reason = reason.splitlines()[-1]  # the output of SQLite's check starts with headings
    return StoreDamaged(
        f"The database {str(path)!r} is damaged ({reason}).",
        "Restore a backup, or move the file away to start over; nothing was changed.",
        path=str(path),
    )


def translate_sqlite_error(error: sqlite3.Error, path: Path, *, reading: bool = False) -> StoreError:
    """Translates a database error to one sentence with a next step."""
    primary = _get_primary_code(error)
    if primary == sqlite3.SQLITE_FULL or (primary == sqlite3.SQLITE_IOERR and is_disk_full(path)):
        return build_full_error()
    if primary in _NOT_WRITABLE_CODES:
        wrote = error.sqlite_errorcode == sqlite3.SQLITE_READONLY
        return build_unopened_error(str(error), path, reading=reading and not wrote)
    if primary in _DAMAGED_CODES:
        return build_damaged_error(path, str(error))
    if str(error).startswith(_UNREADABLE_VALUE_PREFIXES):
        return build_damaged_error(path, "a value in it cannot be read")
    if primary == sqlite3.SQLITE_IOERR:
        return StoreError(
            f"The database {str(path)!r} cannot be read or written ({error}).",
            f"Check its disk and limits; {_NOTHING_KEPT_TEXT}.",
        )
    return StoreError(
        f"The database {str(path)!r} refused a statement ({error}).",
        f"Try again, and report it if it keeps happening; {_NOTHING_KEPT_TEXT}.",
    )


def build_unopened_error(reason: str, path: Path, *, reading: bool = False) -> StoreError:
    if reading:
        return StoreError(
            f"The database {str(path)!r} cannot be opened for reading ({reason}).",
            "Give this user access to the file and its directory, check the limit of open files, and try again.",
        )
    return StoreReadOnly(
        f"The database {str(path)!r} cannot be opened for writing ({reason}).",
        "Give this user write access to the file and its directory.",
    )


def build_full_error() -> StoreFull:
    return StoreFull(f"{_DISK_FULL_TEXT}; {_NOTHING_KEPT_TEXT}.", "Free some disk space and try again.")


def build_replaced_error(path: Path) -> StoreReplaced:
    return StoreReplaced(
        f"The database {str(path)!r} was deleted or replaced while it was open, so nothing more is accepted.",
        "Put the right file there, then restart Antiphon; docs/operating.md says how to save what was written.",
        path=str(path),
    )


def is_disk_full(path: Path) -> bool:
    """Whether the disk itself is full; an exhausted quota is not detected."""
    try:
        return shutil.disk_usage(path.parent).free < MIN_FREE_DISK_BYTES
    except OSError:
        return False


def _get_primary_code(error: sqlite3.Error) -> int | None:
    code = getattr(error, "sqlite_errorcode", None)
    return code & 0xFF if isinstance(code, int) else None


def is_lasting_error(error: BaseException | None) -> bool:
    """Whether the next commit will most likely fail for the same reason."""
    return isinstance(error, StoreReplaced) or (
        isinstance(error, sqlite3.Error) and _get_primary_code(error) in _LASTING_CODES
    )


class StoreHealth:
    """Tracks whether the store can write, and logs when that changes."""

    def __init__(self, path: Path) -> None:
        self.write_error: StoreError | None = None
        self._path = path
        self._failed_at = self._recovered_at = -math.inf
        self._is_recurring = False

    def record_commit(self, error: BaseException | None, *, changed: bool) -> None:
        """Updates the state by the outcome of a commit; an empty commit (`changed` False) proves nothing."""
        if isinstance(self.write_error, StoreReplaced):
            return  # until a restart
        if isinstance(error, StoreReplaced):
            self._record_failure(error)
        elif isinstance(error, sqlite3.Error):
            self._record_failure(translate_sqlite_error(error, self._path))
        elif self.write_error and changed and self._is_over(self.write_error):
            self.write_error = None
            self._recovered_at = time.monotonic()
            log.warning("The database is writable again")

    def _record_failure(self, failure: StoreError) -> None:
        now = time.monotonic()
        if self.write_error is None or isinstance(failure, StoreReplaced):
            self._is_recurring = now - self._recovered_at < RECOVERY_QUIET_SECONDS
            log.error("%s", _format_failure(failure))
        self.write_error, self._failed_at = failure, now

    def _is_over(self, failure: StoreError) -> bool:
        """Whether a successful commit ends the failure; a small one may fit where a larger one does not.

        An exhausted quota cannot be detected: it counts as over at once the first time, but not if it recurs.
        """
        if isinstance(failure, StoreDamaged) or (isinstance(failure, StoreFull) and is_disk_full(self._path)):
            return False
        return not self._is_recurring or time.monotonic() - self._failed_at >= RECOVERY_QUIET_SECONDS


def _format_failure(failure: StoreError) -> str:
    """The text for the log, where no request has failed."""
    if isinstance(failure, StoreFull):
        return f"{_DISK_FULL_TEXT}; work continues once space is freed."
    return f"{failure.what} {failure.hint}"
