"""How much a connection may cost before anybody knows whose it is: the bytes and the seconds of a request's head,
and how many connections are open.

The rest of a request is bounded by what answers it (`replies`), and a WebSocket by its door (`socket`).
"""

from __future__ import annotations

import asyncio
import resource

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD = 64 * 1024  # bytes of the first line and the headers, and of the trailers
HEAD_TIME = 15.0  # seconds in which a head has to arrive, from the first connection on
MOST = 4096  # connections
SPARE = 64  # files that are left for the store, the log and programs that are started
TOO_LARGE = f"The head of the request has more than {HEAD} bytes. Send fewer or shorter headers."


def most_connections() -> int:
    """As many as the system lets this process have, which is asked for more if it gives few."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST + SPARE
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return MOST if soft == resource.RLIM_INFINITY else max(1, min(MOST, soft - SPARE))


class BoundedProtocol(HttpToolsProtocol):
    """HTTP/1.1 as uvicorn speaks it, for peers that nobody knows. At most `limit_concurrency` - 1 are connected."""

    _timer: asyncio.TimerHandle | None = None
    _upgraded = False
    _size = 0
    """Bytes of this request that are kept: its address, its headers, its trailers."""
    _unheard = 0
    """Bytes since the parser last had something whole to tell; a header without an end is kept inside it."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        if self.limit_concurrency is not None and len(self.connections) >= self.limit_concurrency:
            transport.abort()
        else:
            self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unheard += len(data)
        super().data_received(data)
        if self._upgraded or self.transport.is_closing():
            return
        if self._unheard > HEAD:
            self.send_400_response(TOO_LARGE)
        elif not self.cycle or self.cycle.response_complete:  # nothing is being answered
            self._arm()

    # --- what the parser tells ---

    def on_message_begin(self) -> None:
        self._size = self._unheard = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + 4)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._disarm()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unheard = 0
        super().on_body(body)

    def handle_websocket_upgrade(self) -> None:
        self._upgraded = True
        super().handle_websocket_upgrade()

    def _count(self, size: int) -> None:
        self._unheard = 0
        self._size += size
        if self._size > HEAD:
            raise ValueError(TOO_LARGE)  # which the parser makes an invalid request, answered with 400

    # --- time ---

    def _arm(self) -> None:
        """Not again while it runs: a byte now and then gives nobody more time."""
        self._timer = self._timer or self.loop.call_later(HEAD_TIME, self.transport.abort)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
