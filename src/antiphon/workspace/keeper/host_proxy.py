"""An HTTP proxy that connects a sandbox to listed hosts and to nothing else.

It listens on a socket that was opened inside the sandbox (`sandbox_network`), where it is the only way out. It takes
`CONNECT` and requests with a whole address, resolves names itself, and connects to the very address that it checked.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from antiphon.host_rules import HostRules, split_authority

MAX_CONNECTIONS_PER_PROXY = 64
MAX_CONNECTIONS = 512  # of all proxies of this process
MAX_HEAD_BYTES = 16 * 1024
MAX_ADDRESSES_TRIED = 4
MAX_KEPT_REFUSALS = 20
CHUNK_BYTES = 64 * 1024

_METHOD_PATTERN = re.compile(r"[A-Z]{1,20}")
_HEADERS_OF_ONE_CONNECTION = frozenset(
    {b"connection", b"host", b"keep-alive", b"proxy-authorization", b"proxy-connection"}
)

_all_connections: set[asyncio.Task[None]] = set()

Resolver = Callable[[str, int], Awaitable[Sequence[str]]]


class ProxyTimeouts(NamedTuple):
    head_seconds: float = 20.0
    connect_seconds: float = 20.0  # including the resolution of the name
    idle_seconds: float = 300.0


class ProxyRequest(NamedTuple):
    host: str
    port: int
    head: bytes
    """What is sent to the host first; nothing for a tunnel."""
    is_tunnel: bool


class RequestFailed(Exception):
    """A request that is not forwarded: the status and the sentence of the answer."""

    def __init__(self, status: str, text: str) -> None:
        super().__init__(text)
        self.status = status


async def resolve(host: str, port: int) -> Sequence[str]:
    """Return the addresses of a host."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


class HostProxy:
    def __init__(
        self,
        rules: HostRules,
        *,
        resolver: Resolver = resolve,
        timeouts: ProxyTimeouts | None = None,
    ) -> None:
        self.refused: dict[str, None] = {}
        """The first hosts that were refused, with their ports."""
        self._rules = rules
        self._resolve = resolver
        self._timeouts = timeouts or ProxyTimeouts()
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._is_closed = False

    async def start(self, listener: socket.socket) -> None:
        """Serve the connections that a listening socket accepts, until `close`."""
        self._server = await asyncio.start_server(self._accept, sock=listener, limit=MAX_HEAD_BYTES)
        if self._is_closed:
            self._server.close()

    def close(self) -> None:
        """Stop listening, and end every connection."""
        self._is_closed = True
        if self._server is not None:
            self._server.close()
        for task in self._connections:
            task.cancel()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._connections) >= MAX_CONNECTIONS_PER_PROXY or len(_all_connections) >= MAX_CONNECTIONS:
            writer.write(build_answer("503 Service Unavailable", "Too many connections are open."))
            writer.close()
            return
        task = asyncio.ensure_future(self._serve(reader, writer))
        for tasks in (self._connections, _all_connections):
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._pass_on(reader, writer)
        except RequestFailed as error:
            writer.write(build_answer(error.status, str(error)))
        except (OSError, asyncio.IncompleteReadError):  # one side has disconnected
            pass
        finally:
            writer.transport.abort()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(self._timeouts.head_seconds):
                head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            raise RequestFailed("431 Request Header Fields Too Large", "The headers are too long.") from None
        except TimeoutError:
            raise RequestFailed("408 Request Timeout", "The request was not complete in time.") from None
        request = parse_request(head)
        host_reader, host_writer = await self._connect(request)
        try:
            if request.is_tunnel:
                writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            else:
                host_writer.write(request.head)
            await self._relay(reader, writer, host_reader, host_writer)
        finally:
            host_writer.transport.abort()

    async def _connect(self, request: ProxyRequest) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host, port = request.host, request.port
        if not self._rules.permits_host(host, port):
            raise self._refuse(host, port, "is not allowed for commands of this agent")
        try:
            async with asyncio.timeout(self._timeouts.connect_seconds):
                addresses = await self._resolve(host, port)
                permitted = [
                    address for address in addresses if self._rules.permits_address(host, address, port)
                ]
                if addresses and not permitted:
                    raise self._refuse(host, port, "has an address that is not public and not listed")
                for address in permitted[:MAX_ADDRESSES_TRIED]:
                    with contextlib.suppress(OSError):
                        return await asyncio.open_connection(address, port)
        except TimeoutError:
            raise RequestFailed("504 Gateway Timeout", f"{host}:{port} did not answer in time.") from None
        except OSError as error:  # of the resolution
            raise RequestFailed("502 Bad Gateway", f"{host} could not be resolved: {error}.") from None
        raise RequestFailed("502 Bad Gateway", f"{host}:{port} refused the connection.")

    def _refuse(self, host: str, port: int, fault: str) -> RequestFailed:
        name = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        if len(self.refused) < MAX_KEPT_REFUSALS:
            self.refused[name] = None
        cure = f"To allow it, the operator can add {name!r} to 'agents.defaults.sandbox.allowHosts'"
        if "address" in fault:
            cure = "To allow it, the operator can add the address to 'agents.defaults.sandbox.allowHosts'"
        text = f"{name} {fault}. {cure} or to 'allowHosts' of the agent's own 'sandbox'."
        return RequestFailed("403 Forbidden", text)

    async def _relay(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        host_reader: asyncio.StreamReader,
        host_writer: asyncio.StreamWriter,
    ) -> None:
        """Copy in both directions until the host has sent everything, or no data moves for a while.

        Nothing waits in our own buffers then, so both ends can be aborted: closing one that does not read would wait
        for it for ever.
        """
        loop, seconds = asyncio.get_running_loop(), self._timeouts.idle_seconds
        for end in (writer, host_writer):
            end.transport.set_write_buffer_limits(0)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds) as idle:

                async def copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
                    while data := await source.read(CHUNK_BYTES):
                        idle.reschedule(loop.time() + seconds)
                        target.write(data)
                        await target.drain()
                    if target.can_write_eof():
                        target.write_eof()

                sending = asyncio.ensure_future(copy(reader, host_writer))
                try:
                    await copy(host_reader, writer)
                finally:
                    sending.cancel()
                    await asyncio.gather(sending, return_exceptions=True)


def parse_request(head: bytes) -> ProxyRequest:
    """Return the host a request goes to, and what is sent there.

    A connection is for one request, since the next one could be for another host.
    """
    line, *fields = head[:-4].split(b"\r\n")
    try:
        method, target, version = line.decode("ascii").split(" ")
        if not _METHOD_PATTERN.fullmatch(method) or version not in ("HTTP/1.0", "HTTP/1.1"):
            raise ValueError("its first line is not a request line of HTTP/1")
        if method == "CONNECT":
            host, port = split_authority(target)
            if port is None:
                raise ValueError("it names no port")
            return ProxyRequest(host, port, b"", is_tunnel=True)
        scheme, separator, rest = target.partition("://")
        if not separator or scheme.lower() != "http":
            raise ValueError("a proxy takes http:// addresses and CONNECT")
        authority, path = _split_path(rest)
        host, port = split_authority(authority)
        names = [field.partition(b":")[0].lower() for field in fields]
        if any(not name or name != name.strip() for name in names) or any(b":" not in f for f in fields):
            raise ValueError("a header is not valid")
    except ValueError as error:
        raise RequestFailed("400 Bad Request", f"The request is not valid: {error}.") from None
    kept = [
        field for name, field in zip(names, fields, strict=True) if name not in _HEADERS_OF_ONE_CONNECTION
    ]
    first = f"{method} {path} {version}".encode("ascii")
    lines = [first, b"Host: " + authority.encode("ascii"), b"Connection: close", *kept]
    return ProxyRequest(host, port or 80, b"\r\n".join(lines) + b"\r\n\r\n", is_tunnel=False)


def _split_path(rest: str) -> tuple[str, str]:
    end = min((rest.find(sign) for sign in "/?#" if sign in rest), default=len(rest))
    path = rest[end:].partition("#")[0]
    return rest[:end], path if path.startswith("/") else f"/{path}"


def build_answer(status: str, text: str) -> bytes:
    body = f"{text}\n".encode()
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: {len(body)}\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode("ascii") + body
