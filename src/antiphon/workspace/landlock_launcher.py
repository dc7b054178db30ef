"""Restricts itself by Landlock and a system call filter, and becomes the command.

This file is a program by itself (`python -I -S landlock_launcher.py DESCRIPTOR`) and imports nothing but the standard
library. The descriptor holds what is allowed, as JSON. Directories are opened before the user changes, without
following links below the directories that the operator chose.
"""

from __future__ import annotations

import base64
import ctypes
import errno
import json
import os
import resource
import signal
import socket
import struct
import sys
from typing import Any

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same on every architecture
_PATH_BENEATH = 1
_GET_VERSION = 1
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _SECCOMP_MODE_FILTER = 1, 22, 38, 2
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIRECTORY, _TRUNCATE = 1, 2, 4, 8, 1 << 14
_READ_RIGHTS = _EXECUTE | _READ_FILE | _READ_DIRECTORY
_MAKE_DEVICE_RIGHTS = (1 << 6) | (1 << 11)  # character and block devices, which nothing allows
_FILE_RIGHTS = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | 1 << 15
_HANDLED_BY_VERSION = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
_TCP_RIGHTS = 3  # bind and connect
_SCOPE_FLAGS = 3  # abstract unix sockets and signals
_REFUSED_STATUS = 126

_libc = ctypes.CDLL(None, use_errno=True)


class LaunchRefused(Exception):
    pass


def _call(number: int, *arguments: Any) -> int:
    result = _libc.syscall(number, *arguments)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def get_version() -> int:
    """Return the version of Landlock in this kernel, or 0."""
    try:
        return _call(_CREATE_RULESET, None, 0, _GET_VERSION)
    except OSError:
        return 0


def open_beneath(root: str, below: str) -> int:
    """Open a directory; of the part below, no component may be a link."""
    current = os.open(root, os.O_PATH | os.O_CLOEXEC)
    for part in below.split("/") if below else []:
        following = os.open(part, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=current)
        os.close(current)
        current = following
    return current


def create_ruleset(version: int) -> tuple[int, int]:
    """Return a ruleset, and the rights to files that it takes away."""
    handled = _HANDLED_BY_VERSION[max(known for known in _HANDLED_BY_VERSION if known <= version)]
    attributes = [handled]
    if version >= 4:
        attributes.append(_TCP_RIGHTS)
    if version >= 6:
        attributes.append(_SCOPE_FLAGS)
    data = struct.pack(f"={len(attributes)}Q", *attributes)
    return _call(_CREATE_RULESET, data, ctypes.c_size_t(len(data)), 0), handled


def allow(ruleset: int, fd: int, rights: int) -> None:
    if not os.path.isdir(f"/proc/self/fd/{fd}"):  # noqa: PTH112 - pathlib would cost its import
        rights &= _FILE_RIGHTS
    data = struct.pack("=Qi", rights, fd)
    _call(_ADD_RULE, ruleset, _PATH_BENEATH, data, 0)


def change_user(user: int) -> None:
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def install_filter(program: bytes) -> None:
    buffer = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))
    if _libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, header, 0, 0) != 0:
        raise LaunchRefused(f"the filter of system calls was refused: {os.strerror(ctypes.get_errno())}")


def examine_sockets() -> str:
    for family in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX):
        try:
            socket.socket(family, socket.SOCK_STREAM).close()
        except OSError:
            continue
        return "open"
    return "refused"


def restrict(spec: dict[str, Any], parent: int) -> None:
    """Give up everything that the description does not allow. It is killed with its parent from then on."""
    version = get_version()
    if version == 0:
        raise LaunchRefused("this kernel has no Landlock, or it is off")
    ruleset, handled = create_ruleset(version)
    everything = handled & ~_MAKE_DEVICE_RIGHTS
    for path in spec["readable"]:
        try:
            fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue
        allow(ruleset, fd, _READ_RIGHTS & handled)
        os.close(fd)
    devices = _WRITE_FILE | _READ_FILE
    for path in spec["devices"]:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        allow(ruleset, fd, devices & handled)
        os.close(fd)
    for root, below, writable in spec["mounts"]:
        fd = open_beneath(root, below)
        allow(ruleset, fd, everything if writable else _READ_RIGHTS & handled)
        os.close(fd)
    fd = open_beneath(*spec["cwd"])
    os.fchdir(fd)
    os.close(fd)
    for name, value in spec["limits"].items():
        resource.setrlimit(getattr(resource, name), (value, value))
    if spec["user"] is not None:
        change_user(spec["user"])
        try:
            os.stat("/".join(map(str, spec["cwd"])))  # noqa: PTH116 - as above
        except OSError:
            raise LaunchRefused(
                f"user {spec['user']} cannot enter the directories above the workspace"
            ) from None
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        raise LaunchRefused("the process that started it has ended")
    _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _call(_RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)
    install_filter(base64.b64decode(spec["filter"]))


def main() -> int:
    parent = os.getppid()  # in a container, it may be process 1
    with open(int(sys.argv[1]), "rb") as file:  # noqa: PTH123 - a descriptor
        spec = json.load(file)
    try:
        restrict(spec, parent)
    except (OSError, LaunchRefused) as error:
        print(f"landlock: {error}", flush=True)  # noqa: T201 - the output of the command
        return _REFUSED_STATUS
    if spec["examine"]:
        print(f"sockets: {examine_sockets()}", flush=True)  # noqa: T201
    try:
        os.execvpe(spec["argv"][0], spec["argv"], spec["env"])  # noqa: S606
    except OSError as error:
        print(f"{spec['argv'][0]}: {error.strerror}", flush=True)  # noqa: T201
        return 127 if error.errno == errno.ENOENT else _REFUSED_STATUS


if __name__ == "__main__":
    sys.exit(main())
