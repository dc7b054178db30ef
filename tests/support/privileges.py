"""Tests without the privileges of root."""

from __future__ import annotations

import os
from collections.abc import Generator
from concurrent.futures import thread
from contextlib import contextmanager

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
