"""Limits for unauthenticated connections: the bytes and seconds of a request's head, and how many are open.

When too many are open, the oldest that have sent nothing yet are closed (`PendingPeers`). The body of a request
is bounded in `responses`, a WebSocket in `ws.protocol` and `ws.server`.
"""

from __future__ import annotations

import asyncio
import resource
from collections import Counter
from collections.abc import Callable
from ipaddress import IPv6Address

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 * 1024  # of the request line, the headers and the trailers
HEAD_TIMEOUT_SECONDS = 15.0  # for a request head to arrive, starting with the connection
MAX_CONNECTIONS = 4096
RESERVED_FILE_DESCRIPTORS = 64  # for the store, the log and child processes
HEAD_TOO_LARGE_MESSAGE = (
    f"The head of the request has more than {MAX_HEAD_BYTES} bytes. Send fewer or shorter headers."
)


def determine_max_connections() -> int:
    """Return how many connections the limit on open files allows, after raising the soft limit if it is too low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = MAX_CONNECTIONS + RESERVED_FILE_DESCRIPTORS
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return (
        MAX_CONNECTIONS
        if soft == resource.RLIM_INFINITY
        else max(1, min(MAX_CONNECTIONS, soft - RESERVED_FILE_DESCRIPTORS))
    )


class PendingPeers:
    """Peers that have not authenticated or sent a request yet. One is evicted when there is no room for a new one.

    It is the oldest one of the address with the most such peers, so an address that opens many silent connections
    loses its own first. The addresses of an IPv6 /64 count as one, since a single host has all of them. If all peers
    share an address, as behind a proxy, it is the oldest of all.
    """

    def __init__(self) -> None:
        self._peers: dict[int, tuple[str, Callable[[], None]]] = {}
        self._count_by_address: Counter[str] = Counter()
        self._next_ticket = 0

    def __len__(self) -> int:
        return len(self._peers)

    def add(self, address: str, evict: Callable[[], None]) -> int:
        """Add a peer and return a ticket to discard it by. `evict` is called at most once, after it was discarded."""
        address = _group_address(address)
        self._next_ticket += 1
        self._peers[self._next_ticket] = address, evict
        self._count_by_address[address] += 1
        return self._next_ticket

    def discard(self, ticket: int) -> None:
        """Remove a peer that has identified itself or disconnected. Evicted peers were removed already."""
        if peer := self._peers.pop(ticket, None):
            address = peer[0]
            self._count_by_address[address] -= 1
            if not self._count_by_address[address]:
                del self._count_by_address[address]

    def evict_one(self) -> bool:
        """Evict one peer; False if there is none."""
        if not self._peers:
            return False
        highest = max(self._count_by_address.values())
        for ticket, (address, evict) in self._peers.items():
            if self._count_by_address[address] == highest:
                self.discard(ticket)
                evict()
                return True
        return False


def _group_address(address: str) -> str:
    """Return the address under which a peer is counted: an IPv4 address, or the /64 of an IPv6 address."""
    if ":" not in address:
        return address
    try:
        found = IPv6Address(address.partition("%")[0])
    except ValueError:
        return address
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return f"{IPv6Address(int(found) >> 64 << 64)}/64"


def create_http_protocol() -> type[LimitedHttpProtocol]:
    """Return a protocol class for one server, whose connections share a limit."""

    class Protocol(LimitedHttpProtocol):
        pending = PendingPeers()

    return Protocol


class LimitedHttpProtocol(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 protocol with limits for unknown peers. At most `limit_concurrency` - 1 are connected."""

    pending: PendingPeers
    """Connections without a request in progress: the head of their next request has not arrived yet."""
    _ticket = 0
    _head_timer: asyncio.TimerHandle | None = None
    _upgraded = False
    _head_bytes = 0
    """Bytes of the current request kept in memory: URL, headers and trailers."""
    _unparsed_bytes = 0
    """Bytes since the last parser callback; the parser buffers a header that does not end."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        if self.limit_concurrency is None or len(self.connections) < self.limit_concurrency:
            self._start_head_timer()
        elif (
            len(self.connections) < self.limit_concurrency + RESERVED_FILE_DESCRIPTORS // 2
            and self.pending.evict_one()
        ):
            self._start_head_timer()  # the evicted peer is gone within this iteration of the event loop
        else:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unparsed_bytes += len(data)
        super().data_received(data)
        if self._upgraded or self.transport.is_closing():
            return
        if self._unparsed_bytes > MAX_HEAD_BYTES:
            self.send_400_response(HEAD_TOO_LARGE_MESSAGE)
        elif not self.cycle or self.cycle.response_complete:  # no request in progress
            self._start_head_timer()

    # --- parser callbacks ---

    def on_message_begin(self) -> None:
        self._head_bytes = self._unparsed_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count_head_bytes(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_head_bytes(len(name) + len(value) + 4)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._stop_head_timer()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unparsed_bytes = 0
        super().on_body(body)

    def handle_websocket_upgrade(self) -> None:
        self._upgraded = True
        super().handle_websocket_upgrade()
        self.parser = None  # breaks a reference cycle

    def _count_head_bytes(self, size: int) -> None:
        self._unparsed_bytes = 0
        self._head_bytes += size
        if self._head_bytes > MAX_HEAD_BYTES:
            raise ValueError(
                HEAD_TOO_LARGE_MESSAGE
            )  # the parser turns this into an invalid request, answered with 400

    # --- timeout ---

    def _start_head_timer(self) -> None:
        """Start the timer unless it runs: occasional bytes do not extend the time."""
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_TIMEOUT_SECONDS, self.transport.abort)
            self._ticket = self.pending.add(self.client[0] if self.client else "", self.transport.abort)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
            self.pending.discard(self._ticket)
