"""Tests without the privileges of root."""

from __future__ import annotations

import os
from collections.abc import Generator
from concurrent.futures import thread
from contextlib import contextmanager
from pathlib import Path

assert thread, "imported now: as another user, Python's own files may not be readable"


@contextmanager
def drop_privileges() -> Generator[None]:
    """Run the block as the user nobody if the test runs as root, which may write everywhere."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def open_way_to(directory: Path) -> None:
    """Let other users enter a temporary directory, as the directories of a test run usually do not.

    They stay open, since other tests use the same directories at the same time.
    """
    for parent in (directory, *directory.parents):
        if parent.stat().st_uid == os.geteuid() and not parent.stat().st_mode & 0o001 and parent != Path("/"):
            parent.chmod(parent.stat().st_mode | 0o011)
