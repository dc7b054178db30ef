"""The clock shared by all processes that use a database."""

from __future__ import annotations

from time import monotonic

from antiphon.store import Tx
from antiphon.store.queries import Query

CLOCK_SAMPLES = 3
MAX_ROUND_TRIP_SECONDS = 0.5  # longest usable round trip in seconds; a sample is uncertain by half of it
_NOW_QUERY = Query(
    "clock.now", "SELECT CAST(extract(epoch FROM clock_timestamp()) AS DOUBLE PRECISION) AS seconds"
)


class SharedClock:
    """The database's clock, extrapolated with the local monotonic clock. It never goes back and ignores wall clocks."""

    def __init__(self) -> None:
        self._ahead: float | None = None
        self._last = 0

    def now(self) -> int:
        self._last = max(self._last, round((monotonic() + (self._ahead or 0.0)) * 1000))
        return self._last

    async def synchronize(self, tx: Tx) -> None:
        """Reads the clock several times and uses the fastest answer, since the network may stall during one."""
        took, ahead = min([await _sample_clock(tx) for _ in range(CLOCK_SAMPLES)])
        if self._ahead is None or took < MAX_ROUND_TRIP_SECONDS:
            self._ahead = ahead


async def _sample_clock(tx: Tx) -> tuple[float, float]:
    """The round-trip time, and the offset of the database's clock to the local monotonic one."""
    began = monotonic()
    row = await tx.one(_NOW_QUERY)
    ended = monotonic()
    assert row is not None
    return ended - began, row["seconds"] - (began + ended) / 2
