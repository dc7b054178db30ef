"""A WebSocket as uvicorn serves it, and one thing more: a text that goes out at once.

What ASGI offers is a coroutine. To tell a thousand listeners something, it would wake a thousand tasks, each for one
write, and wrap the text for each of them in what the protocol needs for the rest of its life. Here a text is framed
and handed to the socket in one call. A client that lags, or a connection that is not open, refuses it, and the
outbox takes over (`connection`).
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.http11 import Request
from websockets.protocol import State

AtOnce = Callable[[str], bool]
EXTENSION = "antiphon.at_once"
TEXT = 0x81  # a whole text in one frame; frames of a server have no mask


class LineProtocol(WebSocketsSansIOProtocol):
    """Only without extensions of the protocol, such as compression, which would have to see every frame."""

    def handle_connect(self, event: Request) -> None:
        super().handle_connect(event)
        if not self.close_sent:  # it was not refused
            self.scope.setdefault("extensions", {})[EXTENSION] = {"send": self.send_at_once}

    def send_at_once(self, text: str) -> bool:
        """Whether it was taken."""
        if not self.writable.is_set() or self.disconnected or self.conn.state is not State.OPEN:
            return False
        payload = text.encode()
        self.transport.write(_head(len(payload)) + payload)
        return True


def _head(size: int) -> bytes:
    if size < 126:
        return bytes((TEXT, size))
    if size < 2**16:
        return b"%c\x7e%b" % (TEXT, size.to_bytes(2))
    return b"%c\x7f%b" % (TEXT, size.to_bytes(8))


def at_once(scope: MutableMapping[str, Any]) -> AtOnce:
    """How to send at once over this connection; a server that has no such thing always refuses."""
    return scope.get("extensions", {}).get(EXTENSION, {}).get("send", refused)


def refused(_: str) -> bool:
    return False
