"""The interface between the host of channels and an adapter, which speaks to one service for one account."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

import msgspec

from antiphon.clock import Clock
from antiphon.engine.inbound.events import Inbound, InboundMedia
from antiphon.engine.outbox.delivery_channel import Pace, Part, Receipt, RenderedPart
from antiphon.engine.outbox.delivery_rows import Destination

__all__ = ["AccountHealth", "ChannelAdapter", "HealthState", "InboundSink"]

HealthState = Literal["starting", "ready", "degraded", "down"]


class InboundSink(Protocol):
    """Takes what a service reports. What returns was stored, and is acknowledged to the service then."""

    async def take(self, inbound: Inbound) -> bool:
        """Take a message. False: it was not stored, and has to be reported again."""
        ...

    async def reject(self, event_id: str, error: str) -> bool:
        """Count an event that could not be read. False: it has to be reported again."""
        ...


class AccountHealth(msgspec.Struct):
    """Whether an account can send and receive. Its last proof of life is what the service last answered."""

    clock: Clock
    max_silence_seconds: float
    """How long the service may be silent; after that, the account is degraded."""
    state: HealthState = "starting"
    reason: str | None = None
    since: int = 0
    proof_at: int | None = None
    last_inbound_at: int | None = None

    def prove(self) -> None:
        """Record that the service has answered just now."""
        self.proof_at = self.clock.now()
        self._change("ready", None)

    def report(self, state: HealthState, reason: str) -> None:
        self._change(state, reason)

    def _change(self, state: HealthState, reason: str | None) -> None:
        if state != self.state:
            self.since = self.clock.now()
        self.state, self.reason = state, reason

    @property
    def current(self) -> tuple[HealthState, str | None]:
        """The state and its reason; an account without a recent proof of life is not ready."""
        silent_ms = self.clock.now() - (self.proof_at or 0)
        if self.state == "ready" and silent_ms > self.max_silence_seconds * 1000:
            return "degraded", f"the service has not answered for {silent_ms // 1000} s"
        return self.state, self.reason


class ChannelAdapter(Protocol):
    """Translates and transports for one account. It decides nothing and retries nothing."""

    health: AccountHealth

    @property
    def identity(self) -> str | None:
        """The account as the service calls it, once it is known."""
        ...

    @property
    def webhook_secret(self) -> str | None:
        """The secret that requests to the webhook must carry; None if the account has no webhook."""
        ...

    webhook_secret_header: str

    async def connect(self) -> None:
        """Find out who the account is.

        Raises:
            AntiphonError: the service cannot be reached, or refuses the credentials.
        """
        ...

    async def receive(self, sink: InboundSink) -> None:
        """Receive until cancelled. It is called again, after a pause, if it raises."""
        ...

    async def take_webhook(self, body: bytes, sink: InboundSink) -> bool:
        """Take the body of a request that carried the secret. False: the service has to send it again."""
        ...

    async def close(self) -> None: ...

    def get_pace(self, destination: Destination) -> Pace: ...

    def render(self, text: str) -> Sequence[RenderedPart]: ...

    async def send(self, part: Part) -> Receipt: ...

    async def show_typing(self, destination: Destination) -> None: ...

    async def fetch(self, media: InboundMedia, limit: int) -> bytes: ...


AdapterFactory = Callable[[str, Any, Clock], Awaitable[ChannelAdapter]]
"""Creates the adapter of an account from its name and settings. It may read secrets, in a thread."""
Headers = Mapping[str, str]
