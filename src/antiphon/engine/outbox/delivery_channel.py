"""The interface between the outbox and a channel, an adapter to a chat service.

An adapter renders and transports. Retries, order, pace, parts and the records of what was sent belong to the outbox.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from antiphon.engine.outbox.delivery_rows import Destination

__all__ = ["UNLIMITED_RATE", "DeliveryChannel", "Pace", "Part", "Rate", "Receipt", "RenderedPart"]


class RenderedPart(msgspec.Struct, frozen=True):
    """A text that fits one message of the service, in its markup."""

    text: str
    plain: str | None = None
    """The same without markup, for a service that refuses the markup. None if `text` has none."""


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """One message to a chat. `key` and `n` identify it permanently."""

    key: str
    n: int
    destination: Destination
    text: str
    has_markup: bool


class Receipt(msgspec.Struct, frozen=True):
    """The answer of a service that took a message."""

    message_id: str | None = None


class Rate(msgspec.Struct, frozen=True):
    """One message every `interval_seconds`, after `burst` messages at once."""

    interval_seconds: float = 0.0
    burst: int = 1


UNLIMITED_RATE = Rate()


class Pace(msgspec.Struct, frozen=True):
    """How fast a service takes messages: from one account, and in one chat."""

    account: Rate = UNLIMITED_RATE
    place: Rate = UNLIMITED_RATE


class DeliveryChannel(Protocol):
    """A channel to people."""

    @property
    def idempotency_seconds(self) -> float:
        """How long after the first attempt the same part can be sent again without effect; 0 where it cannot."""
        ...

    @property
    def can_find(self) -> bool:
        """Whether `find` can look for a message at the service."""
        ...

    def is_ready(self, account_id: str | None) -> bool:
        """Whether the account can send now. Its deliveries wait meanwhile; the channel wakes the outbox afterwards."""
        ...

    def get_pace(self, destination: Destination) -> Pace: ...

    def render(self, text: str, destination: Destination) -> Sequence[RenderedPart]:
        """Return the text in parts that each fit a message there; at least one."""
        ...

    async def send(self, part: Part) -> Receipt:
        """Send one message.

        Raises:
            NotSent: it was certainly not sent.
            Refused: it was certainly not sent, and would be refused again.
            Unsure: it may have been sent, as after any other error.
        """
        ...

    async def find(self, part: Part, since: int) -> Receipt | None:
        """Return the receipt of a part that may have been sent since then, if the service has it."""
        ...
