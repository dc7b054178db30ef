"""The time that everybody who shares a database agrees on."""

from __future__ import annotations

from time import monotonic

from antiphon.store import Tx
from antiphon.store.queries import Query

CLOCK_SAMPLES = 3
MAX_ROUND_TRIP_SECONDS = (
    0.5  # seconds that an answer may take: what the time was when it was given is half as uncertain
)
_NOW_QUERY = Query(
    "clock.now", "SELECT CAST(extract(epoch FROM clock_timestamp()) AS DOUBLE PRECISION) AS seconds"
)


class SharedClock:
    """The database's clock, carried on by the machine's steady one; nobody's wall clock matters. It never goes back."""

    def __init__(self) -> None:
        self._ahead: float | None = None
        self._last = 0

    def now(self) -> int:
        self._last = max(self._last, round((monotonic() + (self._ahead or 0.0)) * 1000))
        return self._last

    async def synchronize(self, tx: Tx) -> None:
        """Of several looks the quickest counts: one of them may meet with a network that stands still."""
        took, ahead = min([await _sample_clock(tx) for _ in range(CLOCK_SAMPLES)])
        if self._ahead is None or took < MAX_ROUND_TRIP_SECONDS:
            self._ahead = ahead


async def _sample_clock(tx: Tx) -> tuple[float, float]:
    """How long the answer took, and how far the database's clock is ahead of the steady one."""
    began = monotonic()
    row = await tx.one(_NOW_QUERY)
    ended = monotonic()
    assert row is not None
    return ended - began, row["seconds"] - (began + ended) / 2
