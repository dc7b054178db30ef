"""The keeper's program, started by path, without the environment and the packages of the gateway."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import os
import resource
import socket
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[3]))  # where `antiphon` is, which the option -I leaves out

from antiphon.workspace.keeper import SOCKET_NAME
from antiphon.workspace.keeper.server import JOBS_NAME, MAX_JOBS, Keeper

LOCK_NAME = "keeper.lock"
MAX_OPEN_FILES = 8 * MAX_JOBS

_PR_SET_CHILD_SUBREAPER = 36


def main(directory: Path) -> int:
    """Start a keeper for the directory, unless it has one. Returns when it accepts connections."""
    os.umask(0o077)
    os.chdir(directory)  # the address of a socket may have 108 bytes, and a path more
    (directory / JOBS_NAME).mkdir(mode=0o700, exist_ok=True)
    lock = os.open(LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return 0  # another keeper serves this directory
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = MAX_OPEN_FILES if most == resource.RLIM_INFINITY else min(MAX_OPEN_FILES, most)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, most))
    with contextlib.suppress(FileNotFoundError):
        Path(SOCKET_NAME).unlink()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(SOCKET_NAME)
    Path(SOCKET_NAME).chmod(0o600)
    listener.listen(64)
    if os.fork() == 0:  # the first process returns when connections are accepted
        os.setsid()
        with contextlib.suppress(AttributeError, OSError):  # orphaned processes become its children
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        asyncio.run(Keeper(Path.cwd()).run(listener))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve()))
