"""The HTTP transport: bounded requests, which leave the origin of the server only for public addresses.

The operator has chosen the server's address, so it may be local. Any other address that a server refers to, such as
that of its authorization server, must be public, unless the server's own is not. A request that fails becomes an error
of that request; otherwise the library would close the whole connection, and cancel the task that opened it.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import anyio
import httpx2
from mcp.client._transport import TransportStreams
from mcp.client.streamable_http import streamable_http_client

from antiphon.mcp.requests import MAX_MESSAGE_BYTES, NEEDS_LOGIN_CODE, NO_ANSWER_CODE, NOT_SENT_CODE
from antiphon.workspace.web import DEFAULT_PORTS, is_public_address, resolve_host

if TYPE_CHECKING:
    from antiphon.mcp.oauth import OAuthSession

CONNECT_TIMEOUT_SECONDS = 10.0
WRITE_TIMEOUT_SECONDS = 30.0
ANSWER_GRACE_SECONDS = 5.0  # beyond the timeout of a call, which the caller of a request watches
MAX_CONNECTIONS = 32
EVENT_STREAM_TYPE = "text/event-stream"
STREAM_INTERVAL_SECONDS = (
    1.0  # between two streams of one task, however soon the server asks for the next one
)
LOGIN_REFUSAL_EXTENSION = "antiphon_login_refusal"
"""The extension of a request that is not sent but answered with its text, since it needs a login."""
_ERROR_STATUS = 502
_UNSENT_ERRORS = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout, httpx2.UnsupportedProtocol)


class RefusedAddress(httpx2.ConnectError):
    """A server refers to an address that is not public."""


class HttpTransport:
    """Speaks streamable HTTP with one server."""

    def __init__(
        self, url: str, headers: Mapping[str, str], auth: OAuthSession | None, call_timeout_seconds: float
    ) -> None:
        self._url = url
        self._headers = headers
        self._auth = auth
        self._call_timeout_seconds = call_timeout_seconds
        self.closed = asyncio.Event()

    @asynccontextmanager
    async def open(self) -> AsyncGenerator[TransportStreams]:
        tls = await asyncio.to_thread(httpx2.create_ssl_context, trust_env=False)
        async with (
            create_http_client(
                self._url,
                tls,
                headers=self._headers,
                auth=self._auth,
                answer_timeout_seconds=self._call_timeout_seconds + ANSWER_GRACE_SECONDS,
            ) as http,
            streamable_http_client(
                self._url, http_client=http, max_sse_event_size=MAX_MESSAGE_BYTES
            ) as streams,
        ):
            try:
                yield streams
            finally:
                self.closed.set()
                if self._auth is not None:
                    with anyio.CancelScope(shield=True):
                        await self._auth.finish_renewals()


def create_http_client(
    url: str,
    tls: ssl.SSLContext,
    *,
    headers: Mapping[str, str] | None = None,
    auth: httpx2.Auth | None = None,
    answer_timeout_seconds: float,
) -> httpx2.AsyncClient:
    """Return a client for a server at an address; every answer is bounded in bytes and time."""
    return httpx2.AsyncClient(
        transport=GuardedTransport(url, tls, answer_timeout_seconds),
        headers={"accept-encoding": "identity", "user-agent": "antiphon", **(headers or {})},
        auth=auth,
        timeout=httpx2.Timeout(
            connect=CONNECT_TIMEOUT_SECONDS,
            read=answer_timeout_seconds,
            write=WRITE_TIMEOUT_SECONDS,
            pool=CONNECT_TIMEOUT_SECONDS,
        ),
        trust_env=False,
    )


class GuardedTransport(httpx2.AsyncBaseTransport):
    """Sends requests, and decides where they may go."""

    def __init__(self, url: str, tls: ssl.SSLContext, answer_timeout_seconds: float) -> None:
        self._server = httpx2.URL(url)
        self._answer_timeout_seconds = answer_timeout_seconds
        limits = httpx2.Limits(max_connections=MAX_CONNECTIONS, max_keepalive_connections=MAX_CONNECTIONS)
        self._inner = httpx2.AsyncHTTPTransport(verify=tls, trust_env=False, limits=limits)
        self._streams = _StreamPacing(answer_timeout_seconds)
        self._has_public_server: bool | None = None
        """Whether the last connection to the server led to a public address; None before the first one."""

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        if refusal := request.extensions.get(LOGIN_REFUSAL_EXTENSION):
            return _build_error_response(request, NEEDS_LOGIN_CODE, str(refusal))
        is_for_server = _get_origin(request.url) == _get_origin(self._server)
        is_message = is_for_server and request.method == "POST" and request.url.path == self._server.path
        try:
            if not is_for_server:
                await self._pin_address(request)
            is_stream = request.method == "GET" and EVENT_STREAM_TYPE in request.headers.get("accept", "")
            if is_message:
                self._streams.begin_request()
            if is_stream:
                await self._streams.wait_to_open()
                request.extensions["timeout"] = {**request.extensions.get("timeout", {}), "read": None}
            response = await self._inner.handle_async_request(request)
            if is_for_server and (address := _find_source(response)) is not None:
                self._has_public_server = is_public_address(address)
        except (httpx2.TransportError, OSError) as error:
            if is_message:
                code = NOT_SENT_CODE if isinstance(error, _UNSENT_ERRORS) else NO_ANSWER_CODE
                return _build_error_response(request, code, describe_error(error))
            raise
        if response.headers.get("content-encoding", "identity").lower() != "identity":
            await response.aclose()
            return _build_error_response(
                request, NO_ANSWER_CODE, "its answer is compressed, which is not supported"
            )
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        response.stream = _BoundedStream(
            response.stream,
            None if is_stream else MAX_MESSAGE_BYTES,
            None if is_stream else self._answer_timeout_seconds,
        )
        return response

    async def aclose(self) -> None:
        await self._inner.aclose()

    async def _pin_address(self, request: httpx2.Request) -> None:
        """Pin a request to a checked address. If the server is public, all addresses of the host must be public.

        What counts for the server is where its answers came from: its owner decides what its name stands for, and could
        make it look local whenever it is looked up.

        Raises:
            RefusedAddress: they are not.
        """
        host, port = request.url.host, _get_port(request.url)
        addresses = await resolve_host(host, port)
        if not addresses:
            raise httpx2.ConnectError(f"the host {host!r} has no address")
        if not all(map(is_public_address, addresses)) and await self._is_server_public():
            raise RefusedAddress(f"it leads to {host!r}, which is not on the public internet")
        request.extensions["sni_hostname"] = host
        request.url = request.url.copy_with(host=addresses[0])

    async def _is_server_public(self) -> bool:
        if self._has_public_server is not None:
            return self._has_public_server
        return any(map(is_public_address, await resolve_host(self._server.host, _get_port(self._server))))


def _find_source(response: httpx2.Response) -> str | None:
    """Return the address that an answer came from, or None if its connection is closed already."""
    with suppress(LookupError):
        return response.extensions["network_stream"].get_extra_info("server_addr")[0]
    return None


class _StreamPacing:
    """Limits how often streams of events are opened again, which the library does as soon as a server asks for it.

    The stream of an answer is resumed in the task of its request, and every time deeper in the same call.
    """

    def __init__(self, request_seconds: float) -> None:
        self._request_seconds = request_seconds
        self._request_ends: WeakKeyDictionary[asyncio.Task[Any], float] = WeakKeyDictionary()
        self._opened_at: WeakKeyDictionary[asyncio.Task[Any], float] = WeakKeyDictionary()

    def begin_request(self) -> None:
        self._request_ends[_get_task()] = time.monotonic() + self._request_seconds

    async def wait_to_open(self) -> None:
        """Wait until this task may open its next stream.

        Raises:
            httpx2.ReadTimeout: it is for an answer that nothing waits for any more.
        """
        task, now = _get_task(), time.monotonic()
        if now > self._request_ends.get(task, now):
            raise httpx2.ReadTimeout("the answer took too long")
        if (opened_at := self._opened_at.get(task)) is not None:
            await asyncio.sleep(opened_at + STREAM_INTERVAL_SECONDS - now)
        self._opened_at[task] = time.monotonic()


def _get_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None
    return task


class _BoundedStream(httpx2.AsyncByteStream):
    """The body of an answer, up to a size and a time. Failures are errors that the library expects."""

    def __init__(
        self, stream: httpx2.AsyncByteStream, max_bytes: int | None, max_seconds: float | None
    ) -> None:
        self._stream = stream
        self._max_bytes = max_bytes
        self._until = None if max_seconds is None else time.monotonic() + max_seconds

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size = 0
        try:
            async for chunk in self._stream:
                size += len(chunk)
                if self._max_bytes is not None and size > self._max_bytes:
                    raise httpx2.StreamError(f"the answer has more than {self._max_bytes} bytes")
                if self._until is not None and time.monotonic() > self._until:
                    raise httpx2.StreamError("the answer took too long")
                yield chunk
        except (httpx2.TransportError, OSError) as error:
            raise httpx2.StreamError(describe_error(error)) from error

    async def aclose(self) -> None:
        await self._stream.aclose()


def describe_error(error: Exception) -> str:
    """Return why a request got no answer, without addresses and headers."""
    match error:
        case RefusedAddress():
            return str(error)
        case httpx2.ConnectTimeout() | httpx2.PoolTimeout():
            return "no connection in time"
        case httpx2.ConnectError():
            return "the connection was refused or failed"
        case httpx2.TimeoutException():
            return "no answer in time"
        case httpx2.RemoteProtocolError():
            return "the server closed the connection without a valid HTTP answer"
        case _:
            return "the connection broke"


def _build_error_response(request: httpx2.Request, code: int, message: str) -> httpx2.Response:
    """Return an answer that the library turns into an error of this one request."""
    body = {"jsonrpc": "2.0", "id": None, "error": {"code": code, "message": message}}
    return httpx2.Response(
        _ERROR_STATUS,
        headers={"content-type": "application/json"},
        content=json.dumps(body).encode(),
        request=request,
    )


def _get_port(url: httpx2.URL) -> int:
    return url.port or DEFAULT_PORTS.get(url.scheme, 0)


def _get_origin(url: httpx2.URL) -> tuple[str, str, int]:
    return url.scheme, url.host, _get_port(url)
