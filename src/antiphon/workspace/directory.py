"""A directory that file operations cannot leave.

`WorkspaceDirectory` holds an open descriptor, and the kernel resolves every path below it (`openat2` with
RESOLVE_BENEATH): a symbolic link cannot lead outside, even if it is swapped in meanwhile. Where `openat2` is missing,
paths are walked one component at a time and no link is followed.

All methods block, so call them in a thread. `locations` decides which session uses which directory.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import os
import stat
import sys
import time
import uuid
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Self

import msgspec

from antiphon.errors import AntiphonError, Forbidden, InvalidInput, NotFound, StaleFile, TooLarge, Unavailable

MAX_PATH_BYTES = 4096
LOCK_TIMEOUT_SECONDS = 10.0
LOCK_RETRY_SECONDS = 0.005
MAX_OPEN_ATTEMPTS = 64  # the kernel asks for a retry while a directory on the path is being renamed
TEMPORARY_FILE_PREFIX = ".antiphon-"

_OPENAT2_SYSCALL = 437  # the same on every architecture
_RESOLVE_NO_MAGICLINKS, _RESOLVE_BENEATH = 0x02, 0x08
_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_READ_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC  # a FIFO must not block the thread
_CREATE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class FileContent(msgspec.Struct, frozen=True):
    """The content of a file, and the hash by which a later change is noticed."""

    data: bytes
    sha256: str


class FileReplacement(msgspec.Struct, frozen=True):
    """The new content of a file, or None to delete it."""

    path: str
    expected_sha256: str | None
    """The version that the writer has seen; None if the file must not exist."""
    data: bytes | None


class WorkspaceDirectory:
    """An open directory. Use it as a context manager."""

    def __init__(self, root: Path, *, below: str = "", aliases: tuple[str, ...] = ()) -> None:
        """Open `root`, or the directory `below` it, which is created and cannot be a link that leads outside `root`.

        Absolute paths in it, or below one of `aliases`, are accepted as paths inside.
        """
        self.root = root / below
        self._prefixes = [PurePosixPath(prefix) for prefix in (str(self.root), *aliases)]
        self._root_fd = self._fd = os.open(root, _DIRECTORY_FLAGS)
        if below:
            try:
                with self._report_errors(below):
                    self._fd = self._open_or_create_directory(below)
            except BaseException:
                os.close(self._root_fd)
                raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for fd in {self._fd, self._root_fd}:
            os.close(fd)

    def get_number(self) -> str:
        """Return the device and inode number of the directory, by which another program recognizes it."""
        status = os.fstat(self._fd)
        return f"{status.st_dev}:{status.st_ino}"

    def get_owner(self) -> int:
        """Return the id of the user that the directory belongs to."""
        return os.fstat(self._fd).st_uid

    def require_directory(self, path: str) -> None:
        """Check that the path names a directory inside.

        Raises:
            NotFound: there is no such directory.
            Forbidden: it leads outside.
        """
        name = self.normalize(path)
        try:
            with self._report_errors(name):
                os.close(self._open_directory(name))
        except (NotFound, InvalidInput):
            raise NotFound(
                f"There is no directory {name!r}.", "Use one that exists.", field="workdir"
            ) from None

    def make_directory(self, path: str) -> None:
        """Create a directory and those above it, if they do not exist."""
        name = self.normalize(path)
        with self._report_errors(name):
            os.close(self._open_or_create_directory(name))

    def give_to(self, user: int) -> None:
        """Make a user the owner of everything in it that belongs to root, unless the directory is that user's already.

        Links are not followed. Files of other users keep their owner.
        """
        if os.fstat(self._fd).st_uid == user:
            return
        for _, names, files, folder in os.fwalk(".", dir_fd=self._fd, follow_symlinks=False):
            for name in (*names, *files):
                with suppress(FileNotFoundError):
                    if os.stat(name, dir_fd=folder, follow_symlinks=False).st_uid == 0:
                        os.chown(name, user, user, dir_fd=folder, follow_symlinks=False)
        os.fchown(self._fd, user, user)

    def read_file(self, path: str, max_bytes: int) -> FileContent:
        """Return the content of a regular file.

        Raises:
            NotFound: there is no such file.
            Forbidden: the path leads outside.
            InvalidInput: it is a directory, a device, a pipe or a socket.
            TooLarge: it has more than `max_bytes`.
        """
        name = self.normalize(path)
        with self._report_errors(name):
            fd = _open_beneath(self._fd, name, _READ_FLAGS)
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            os.close(fd)
            raise _build_file_type_error(name, status.st_mode)
        with os.fdopen(fd, "rb") as file:
            data = file.read(max_bytes + 1)
        if len(data) > max_bytes:
            raise TooLarge(
                f"{name!r} has {max(status.st_size, len(data))} bytes; at most {max_bytes} can be read at once.",
                "Split it into smaller files.",
                field="path",
                bytes=status.st_size,
                max=max_bytes,
            )
        return FileContent(data, hashlib.sha256(data).hexdigest())

    def list_files(self, path: str, suffix: str, max_files: int) -> list[str]:
        """Return the names of files in a directory, sorted; of too many, the last ones; none if it does not exist."""
        name = self.normalize(path)
        try:
            with self._report_errors(name):
                fd = self._open_directory(name)
        except NotFound:
            return []
        try:
            with os.scandir(fd) as entries:
                found = [
                    entry.name
                    for entry in entries
                    if entry.name.endswith(suffix) and entry.is_file(follow_symlinks=False)
                ]
        finally:
            os.close(fd)
        return sorted(found)[-max_files:]

    def find_sha256(self, path: str, max_bytes: int) -> str | None:
        """Return the hash of a file, or None if it does not exist."""
        content = self.find_content(path, max_bytes)
        return content.sha256 if content else None

    def replace_files(self, replacements: Sequence[FileReplacement], max_bytes: int) -> None:
        """Replace, create and delete files: all of them, or none if one fails.

        Each file is replaced atomically, in the given order. Writers of this class exclude each other; programs that
        agents start do not take part.

        Raises:
            StaleFile: a file does not have the content that its writer expects.
            TooLarge: the existing files have more than `max_bytes` together.
            Unavailable: another program holds the workspace locked.
        """
        with self._lock():
            before: list[FileContent | None] = []
            bytes_left = max_bytes
            for each in replacements:
                content = self.find_content(each.path, bytes_left)
                _require_version(each, content.sha256 if content else None)
                bytes_left -= len(content.data) if content else 0
                if each.data is not None:
                    self._require_replaceable(each.path)
                before.append(content)
            done: list[FileReplacement] = []
            try:
                for each, content in zip(replacements, before, strict=True):
                    if done:  # a link may have made two names one file
                        _require_version(each, self.find_sha256(each.path, max_bytes))
                    done.append(FileReplacement(each.path, None, content.data if content else None))
                    self._replace(each.path, each.data)
            except BaseException:
                for undo in reversed(done):
                    with suppress(OSError, AntiphonError):
                        self._replace(undo.path, undo.data)
                raise

    def find_content(self, path: str, max_bytes: int) -> FileContent | None:
        """Return the content of a file, or None if it does not exist."""
        try:
            return self.read_file(path, max_bytes)
        except NotFound:
            return None

    def list_names(self, path: str) -> list[str]:
        """Return the names in a directory, the oldest first; none if it does not exist."""
        try:
            with self._report_errors(path):
                fd = self._open_directory(self.normalize(path))
        except NotFound:
            return []
        try:
            ages: dict[str, int] = {}
            for name in os.listdir(fd):  # noqa: PTH208 - of a descriptor
                with suppress(FileNotFoundError):  # it has been removed meanwhile
                    ages[name] = os.stat(name, dir_fd=fd, follow_symlinks=False).st_mtime_ns
        finally:
            os.close(fd)
        return sorted(ages, key=lambda name: ages[name])

    def normalize(self, path: str) -> str:
        """Return the path relative to the directory, without `.` and `..`.

        Raises:
            InvalidInput: the path is empty, too long or has a NUL character.
            Forbidden: the path escapes the workspace without following a link.
        """
        if not path or "\0" in path or len(os.fsencode(path)) > MAX_PATH_BYTES:
            raise InvalidInput(
                f"The path must have 1 to {MAX_PATH_BYTES} bytes and no NUL character.",
                "Use a path inside the workspace.",
                field="path",
            )
        given = PurePosixPath(path)
        for prefix in self._prefixes if given.is_absolute() else ():
            if given.is_relative_to(prefix):
                given = given.relative_to(prefix)
                break
        if given.is_absolute():
            raise _build_outside_error(path)
        parts: list[str] = []
        for part in given.parts:
            if part == "..":
                if not parts:
                    raise _build_outside_error(path)
                parts.pop()
            else:
                parts.append(part)
        return "/".join(parts) or "."

    @contextmanager
    def _lock(self) -> Generator[None]:
        """Lock the root, also for work below it. A program of an agent can hold the lock, so waiting is bounded."""
        fd = os.open(
            ".", _DIRECTORY_FLAGS, dir_fd=self._root_fd
        )  # a file description of its own, so that threads exclude each other
        try:
            until = time.monotonic() + LOCK_TIMEOUT_SECONDS
            while not _try_lock(fd):
                if time.monotonic() > until:
                    raise Unavailable(
                        f"Another program has held the workspace locked for {LOCK_TIMEOUT_SECONDS:g} s.",
                        "End that program, or try again later.",
                    )
                time.sleep(LOCK_RETRY_SECONDS)
            yield
        finally:
            os.close(fd)

    def _require_replaceable(self, path: str) -> None:
        """Raise unless a path is a regular file or does not exist."""
        name = self.normalize(path)
        with suppress(NotFound), self._open_parent(name) as parent, self._report_errors(name):
            _find_mode(parent, PurePosixPath(name).name, name)

    def _replace(self, path: str, data: bytes | None) -> None:
        """Replace a file, or delete it if there is no data."""
        name = self.normalize(path)
        target = PurePosixPath(name).name
        with self._open_parent(name, create=data is not None) as parent, self._report_errors(name):
            if data is None:
                with suppress(FileNotFoundError):
                    os.unlink(target, dir_fd=parent)
            else:
                _write_atomically(parent, target, data, _find_mode(parent, target, name))
            os.fsync(parent)

    @contextmanager
    def _open_parent(self, name: str, *, create: bool = False) -> Generator[int]:
        if name == ".":
            raise InvalidInput("The path names the workspace itself.", "Name a file in it.", field="path")
        parent = str(PurePosixPath(name).parent)
        with self._report_errors(name):
            fd = self._open_or_create_directory(parent) if create else self._open_directory(parent)
        try:
            yield fd
        finally:
            os.close(fd)

    def _open_directory(self, name: str) -> int:
        return _open_beneath(self._fd, name, _DIRECTORY_FLAGS)

    def _open_or_create_directory(self, name: str) -> int:
        fd = self._open_directory(".")
        path = ""
        for part in PurePosixPath(name).parts:
            path = f"{path}/{part}" if path else part
            try:
                _make_directory(fd, part)
                following = self._open_directory(path)
            finally:
                os.close(fd)
            fd = following
        return fd

    @contextmanager
    def _report_errors(self, name: str) -> Generator[None]:
        """Translate errors of the operating system into `AntiphonError`."""
        try:
            yield
        except OSError as error:
            match error.errno:
                case errno.ENOENT:
                    raise NotFound(f"There is no file {name!r}.", "Check the path.", field="path") from None
                case errno.EXDEV | errno.ELOOP:
                    raise _build_outside_error(name) from None
                case errno.ENOTDIR | errno.EISDIR | errno.ENXIO | errno.ENODEV:
                    raise InvalidInput(
                        f"{name!r} is not a file that can be read or written.",
                        "Name a regular file.",
                        field="path",
                    ) from None
                case errno.ENAMETOOLONG:
                    raise InvalidInput(
                        "A name in the path is too long.", "Use a shorter one.", field="path"
                    ) from None
                case errno.EAGAIN | errno.EBUSY | errno.ETXTBSY:
                    raise Unavailable(
                        f"{name!r} is being used by another program.", "Try again later."
                    ) from None
                case errno.ENOSPC | errno.EDQUOT | errno.EFBIG:
                    raise Unavailable(
                        f"{name!r} could not be written: {error.strerror}.",
                        "Delete files that are not needed.",
                    ) from None
                case errno.EACCES | errno.EPERM | errno.EROFS:
                    raise Forbidden(
                        f"{name!r} may not be accessed: {error.strerror}.",
                        "Use another file, or change its permissions.",
                        field="path",
                    ) from None
                case _:
                    raise


class _OpenHow(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


_libc = ctypes.CDLL(None, use_errno=True)


def has_openat2() -> bool:
    """Whether the kernel can resolve paths beneath a directory."""
    return sys.platform == "linux" and _probe_openat2()


def _probe_openat2() -> bool:
    try:
        fd = os.open("/", _DIRECTORY_FLAGS)
    except OSError:
        return False
    try:
        os.close(_openat2(fd, ".", _DIRECTORY_FLAGS))
    except OSError:  # an old kernel, or a seccomp filter that refuses it
        return False
    finally:
        os.close(fd)
    return True


def _openat2(directory: int, name: str, flags: int) -> int:
    how = _OpenHow(flags, 0, _RESOLVE_BENEATH | _RESOLVE_NO_MAGICLINKS)
    for _ in range(MAX_OPEN_ATTEMPTS):
        fd = _libc.syscall(
            _OPENAT2_SYSCALL, directory, os.fsencode(name), ctypes.byref(how), ctypes.sizeof(how)
        )
        if fd >= 0:
            return fd
        if ctypes.get_errno() not in (errno.EAGAIN, errno.EINTR):
            break
    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), name)


def _walk_beneath(directory: int, name: str, flags: int) -> int:
    """Open a path one component at a time, following no link."""
    *parents, last = PurePosixPath(name).parts or (".",)
    current = os.open(".", _DIRECTORY_FLAGS, dir_fd=directory)
    try:
        for part in parents:
            following = os.open(part, _DIRECTORY_FLAGS | os.O_NOFOLLOW, dir_fd=current)
            os.close(current)
            current = following
        return os.open(last, flags | os.O_NOFOLLOW, dir_fd=current)
    finally:
        os.close(current)


_open_beneath = _openat2 if has_openat2() else _walk_beneath


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _make_directory(parent: int, name: str) -> None:
    with suppress(FileExistsError):
        os.mkdir(name, 0o755, dir_fd=parent)
        if os.geteuid() == 0:
            owner = os.fstat(parent)
            os.chown(name, owner.st_uid, owner.st_gid, dir_fd=parent, follow_symlinks=False)


def _write_atomically(parent: int, target: str, data: bytes, mode: int) -> None:
    temporary, fd = _create_temporary_file(parent, target)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fchmod(fd, mode)
            if os.geteuid() == 0:  # what root writes belongs to the user that works in the directory
                owner = os.fstat(parent)
                os.fchown(fd, owner.st_uid, owner.st_gid)
            os.fsync(fd)
        os.rename(temporary, target, src_dir_fd=parent, dst_dir_fd=parent)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary, dir_fd=parent)
        raise


def _create_temporary_file(parent: int, target: str) -> tuple[str, int]:
    """Create the file that will become `target`. Its name is always the same, so one that a crash left is replaced."""
    name = TEMPORARY_FILE_PREFIX + hashlib.sha256(os.fsencode(target)).hexdigest()[:32]
    with suppress(OSError):
        os.unlink(name, dir_fd=parent)
    try:
        return name, os.open(name, _CREATE_FLAGS, 0o600, dir_fd=parent)
    except FileExistsError:  # a program of the agent has made it
        name = TEMPORARY_FILE_PREFIX + uuid.uuid4().hex
        return name, os.open(name, _CREATE_FLAGS, 0o600, dir_fd=parent)


def _require_version(replacement: FileReplacement, current_sha256: str | None) -> None:
    expected, path = replacement.expected_sha256, replacement.path
    if current_sha256 == expected:
        return
    if expected is None:
        raise StaleFile(
            f"{path!r} exists, and this session has not read it.",
            "Read it, then write it again.",
            field="path",
        )
    what = "was deleted" if current_sha256 is None else "was changed"
    raise StaleFile(f"{path!r} {what} since this session last read it.", "Read it again first.", field="path")


def _find_mode(parent: int, target: str, name: str) -> int:
    """Return the permissions for a file that replaces `target`; a link is refused, since it would be replaced."""
    try:
        status = os.stat(target, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return 0o644
    if stat.S_ISLNK(status.st_mode):
        raise Forbidden(
            f"{name!r} is a symbolic link to {os.readlink(target, dir_fd=parent)!r}.",
            "Write to the file itself.",
            field="path",
        )
    if not stat.S_ISREG(status.st_mode):
        raise _build_file_type_error(name, status.st_mode)
    return stat.S_IMODE(status.st_mode) & 0o777


def _build_outside_error(path: str) -> Forbidden:
    return Forbidden(
        f"{path[:200]!r} leads outside the workspace.", "Use a path inside the workspace.", field="path"
    )


def _build_file_type_error(name: str, mode: int) -> InvalidInput:
    kinds = ((stat.S_ISDIR, "directory"), (stat.S_ISFIFO, "pipe"), (stat.S_ISSOCK, "socket"))
    kind = next((word for is_kind, word in kinds if is_kind(mode)), "device")
    return InvalidInput(f"{name!r} is a {kind}.", "Name a regular file.", field="path")
