"""Spaces messages to chat services: per account and per chat, as the services allow.

Each process paces only its own messages, which avoids most refusals. The wait that a service asks for in a refusal
(`NotSent.retry_after`) is kept in the store.
"""

from __future__ import annotations

import msgspec

from antiphon.engine.outbox.delivery_channel import Pace, Rate

MAX_TRACKED_PLACES = 10_000


class Pacer(msgspec.Struct):
    """Remembers per account and per place when the next message may be sent, in milliseconds."""

    _free_at: dict[str, float] = msgspec.field(default_factory=dict[str, float])

    def compute_delay(self, account: str, place: str, pace: Pace, now: int) -> int:
        """Return how many milliseconds the next message has to wait."""
        return max(
            self._compute_wait(f"account {account}", pace.account, now),
            self._compute_wait(f"place {place}", pace.place, now),
        )

    def record(self, account: str, place: str, pace: Pace, now: int) -> None:
        """Record that a message is sent now."""
        for name, rate in ((f"account {account}", pace.account), (f"place {place}", pace.place)):
            if rate.interval_seconds:
                self._free_at[name] = max(self._free_at.get(name, 0.0), now) + rate.interval_seconds * 1000
        if len(self._free_at) > MAX_TRACKED_PLACES:
            self._free_at = {name: at for name, at in self._free_at.items() if at > now}

    def _compute_wait(self, name: str, rate: Rate, now: int) -> int:
        burst_ms = rate.interval_seconds * 1000 * (rate.burst - 1)
        return max(0, round(self._free_at.get(name, 0.0) - burst_ms - now))
