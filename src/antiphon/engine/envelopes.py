"""What a spawned session may have at most. Computed once, when it is spawned; whatever it spawns has no more.

Rights come from the configuration, which may change at any time; an envelope only ever takes away from them.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from antiphon.access import Cap, Visibility, narrower


class Envelope(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    tools: tuple[str, ...]
    """Names; none of a tool that came to the house later."""
    agents: tuple[str, ...]
    """That it may spawn."""
    read: Visibility
    send: Visibility
    depth: int
    """How many levels it may still spawn."""

    @property
    def text(self) -> str:
        return msgspec.json.encode(self).decode()

    @property
    def cap(self) -> Cap:
        return Cap(self.read, self.send)

    def within(self, other: Envelope) -> Envelope:
        """No more than both."""
        return Envelope(
            tools=_common(self.tools, other.tools),
            agents=_common(self.agents, other.agents),
            read=narrower(self.read, other.read),
            send=narrower(self.send, other.send),
            depth=max(0, min(self.depth, other.depth - 1)),
        )


def read(text: str | None) -> Envelope | None:
    return None if text is None else msgspec.json.decode(text, type=Envelope)


def _common(one: Collection[str], other: Collection[str]) -> tuple[str, ...]:
    return tuple(name for name in one if name in other)
