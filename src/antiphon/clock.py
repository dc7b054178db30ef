"""Wall-clock milliseconds behind a protocol, so that tests of deadlines, leases and retention can move time."""

from __future__ import annotations

import time
from typing import Protocol

MILLISECONDS_PER_DAY = 86_400_000


class Clock(Protocol):
    """Reads the wall-clock time. Deadlines are stored in it because they outlive the process."""

    def now(self) -> int:
        """Milliseconds since the epoch."""
        ...


class SystemClock:
    """The machine's clock."""

    def now(self) -> int:
        return time.time_ns() // 1_000_000


class ManualClock:
    """A clock that moves only when `advance` is called."""

    def __init__(self, now: int = 1_700_000_000_000) -> None:
        self._now = now

    def now(self) -> int:
        return self._now

    def advance(self, *, seconds: float = 0, days: float = 0) -> None:
        self._now += round((seconds + days * 86_400) * 1000)
