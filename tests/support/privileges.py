"""What the system does not let everybody do."""

from __future__ import annotations

import os
from collections.abc import Generator
from concurrent.futures import thread
from contextlib import contextmanager

assert thread, "else imported at its first use, and nobody may read Python's own files"


@contextmanager
def drop_privileges() -> Generator[None]:
    """Root may write everywhere, so a test run as root becomes nobody for a while."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)
