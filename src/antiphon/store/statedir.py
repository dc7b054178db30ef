"""The state directory: private to its owner, and locked by one process at a time."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from antiphon.errors import StoreError, StoreFull, StoreLocked, StoreReadOnly
from antiphon.paths import CONFIG_FILE_NAME, DATABASE_FILE_NAME, LOG_FILE_NAME

LOCK_WAIT_SECONDS = 1.0  # for another owner to release it
MAX_LOCK_FILE_BYTES = 32
MAX_COMMAND_FILE_BYTES = 128
HANDOVER_FILE_NAME = "handover"
"""Names the command that owns the directory; a lock on it asks the owner to release the directory."""
READ_ONLY_ERRNOS = {errno.EACCES, errno.EPERM, errno.EROFS}
_DISK_FULL_ERRNOS = {errno.ENOSPC, errno.EDQUOT}
_INITIAL_FILES = {CONFIG_FILE_NAME, LOG_FILE_NAME}  # may exist before the first start


class LockOwner(NamedTuple):
    """The process that owns a state directory, as it describes itself there."""

    pid: str
    """`unknown` if the owner could not write it."""
    command: str | None = None
    """The command it was started as, such as `send`."""

    def __str__(self) -> str:
        return f"`{self.command}`, process {self.pid}" if self.command else f"process {self.pid}"


def translate_os_error(error: OSError, path: Path) -> StoreError:
    """Translates an operating-system error on the state directory to one sentence."""
    reason = os.strerror(error.errno) if error.errno else str(error)
    if error.errno in READ_ONLY_ERRNOS:
        return StoreReadOnly(
            f"The state directory {str(path)!r} is not writable ({reason}).",
            "Give this user write access to it, or choose another one with --state-dir.",
            path=str(path),
        )
    if error.errno in _DISK_FULL_ERRNOS:
        return StoreFull(
            f"There is no room left for the state directory {str(path)!r} ({reason}).",
            "Free some disk space and try again.",
            path=str(path),
        )
    return StoreError(
        f"The state directory {str(path)!r} cannot be used ({reason}).",
        "Check the path, or choose another one with --state-dir.",
        path=str(path),
    )


def _make_private(path: Path) -> None:
    """Creates the directory, or makes it private, unless it is exposed and contains other files."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if error := find_exposure(path):
        raise error
    if path.stat().st_mode & 0o077:
        path.chmod(0o700)


def find_exposure(path: Path) -> StoreError | None:
    """Returns an error if other users can enter the directory and it contains other files."""
    if not path.stat().st_mode & 0o077 or _is_ours(path):
        return None
    return StoreError(
        f"The directory {str(path)!r} contains other files and is open to other users.",
        f"Choose an empty or private directory with --state-dir, or make this one private: chmod go= {str(path)!r}",
        path=str(path),
    )


def _is_ours(path: Path) -> bool:
    """Whether it has been a state directory before, or contains only its initial files."""
    names = {found.name for found in path.iterdir()}
    return DATABASE_FILE_NAME in names or names <= _INITIAL_FILES or _is_lock_file(path / "lock")


def _is_lock_file(path: Path) -> bool:
    """Whether this is Antiphon's lock file: it is empty or contains a process id."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        content = file.read(MAX_LOCK_FILE_BYTES).strip()
    return not content or content.isdigit()


def _describe_owner(state_dir: Path, lock_content: bytes) -> LockOwner:
    pid = lock_content.decode(errors="replace").strip() or "unknown"
    try:
        with (state_dir / HANDOVER_FILE_NAME).open("rb") as file:
            owner, _, command = file.read(MAX_COMMAND_FILE_BYTES).decode(errors="replace").partition("\n")
    except OSError:
        return LockOwner(pid)
    return LockOwner(pid, command.strip() or None) if owner == pid else LockOwner(pid)


def _write_command(state_dir: Path, command: str) -> None:
    descriptor = os.open(state_dir / HANDOVER_FILE_NAME, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n{command}\n".encode(), 0)
    finally:
        os.close(descriptor)


def _take_lock(lock: int) -> None:
    """Takes the lock, waiting briefly for owners that hold it only for a moment, such as a search."""
    deadline = time.monotonic() + LOCK_WAIT_SECONDS
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.02)


class StateDir:
    """An opened state directory. Use it as a context manager; leaving it releases the lock."""

    def __init__(self, path: Path, lock: int | None) -> None:
        self.path = path
        self._lock = lock

    @property
    def database(self) -> Path:
        return self.path / DATABASE_FILE_NAME

    @property
    def transcripts(self) -> Path:
        return self.path / "transcripts"

    @classmethod
    def open_locked(cls, path: Path, command: str | None = None) -> Self:
        """Creates the directory if needed and locks it until it is closed.

        Other processes are told the `command` that this process was started as.
        """
        try:
            _make_private(path)
            lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise translate_os_error(error, path) from error
        try:
            _take_lock(lock)
        except OSError as error:
            owner = _describe_owner(path, os.read(lock, MAX_LOCK_FILE_BYTES))
            os.close(lock)
            raise StoreLocked(
                f"The state directory {str(path)!r} is in use by another Antiphon ({owner}).",
                "Stop that one first, or choose another directory with --state-dir.",
                pid=owner.pid,
            ) from error
        try:
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
            if command is not None:
                _write_command(path, command)
        except OSError:
            pass  # They only serve the message above; on a full disk the lock still holds.
        return cls(path, lock)

    @classmethod
    def open_unlocked(cls, path: Path) -> Self:
        """Opens the directory for a reader beside a running owner: nothing is created or locked."""
        return cls(path, None)

    def check_readable(self) -> None:
        """Checks that this user can tell a missing file from one that is not accessible.

        Raises:
            StoreError: this user cannot see what is in the directory.
        """
        try:
            self.database.stat()
        except FileNotFoundError:
            return
        except OSError as error:
            raise StoreError(
                f"The state directory {str(self.path)!r} could not be read ({error.strerror}).",
                "Give this user access to it, or choose another one with --state-dir.",
                path=str(self.path),
            ) from error

    @property
    def holder(self) -> str | None:
        """The process that holds the lock (its id, or `unknown`), or None."""
        owner = self.owner
        return owner.pid if owner else None

    @property
    def owner(self) -> LockOwner | None:
        """The process that holds the lock, or None."""
        try:
            lock = os.open(self.path / "lock", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return _describe_owner(self.path, os.read(lock, MAX_LOCK_FILE_BYTES))
        finally:
            os.close(lock)
        return None

    @contextmanager
    def request_handover(self) -> Generator[None]:
        """Asks the owner to release the directory, until the context is left.

        The request is a lock too, so that a killed process leaves none behind.
        """
        try:
            request = os.open(self.path / HANDOVER_FILE_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise translate_os_error(error, self.path) from error
        try:
            fcntl.flock(request, fcntl.LOCK_SH)  # waits only for an owner that is looking for requests
            yield
        finally:
            os.close(request)

    @property
    def is_handover_requested(self) -> bool:
        """Whether another process has asked the owner to release the directory."""
        try:
            request = os.open(self.path / HANDOVER_FILE_NAME, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(request, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(request)
        return False

    def close(self) -> None:
        if self._lock is not None:
            with suppress(OSError):
                os.ftruncate(self._lock, 0)  # by the time it is read, the id may belong to another process
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
