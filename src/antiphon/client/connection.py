"""One WebSocket connection to a gateway: sends requests, receives responses and events."""

from __future__ import annotations

import asyncio
import platform
import uuid
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import Any

import msgspec
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidURI, WebSocketException
from websockets.frames import CloseCode

from antiphon import PROTOCOL_VERSIONS, __version__
from antiphon.errors import AntiphonError, TooLarge, Unavailable

RESPONSE_TIMEOUT_SECONDS = 30.0  # for a response, in addition to the wait that a request asks for
CONNECT_TIMEOUT_SECONDS = 10.0  # for a connection to be established
CLOSE_TIMEOUT_SECONDS = 0.5  # for the gateway to answer a close frame
DEFAULT_MAX_REQUEST_BYTES = 8 * 2**20  # size of a request if the gateway does not announce its limit
MAX_FRAME_BYTES = 32 * 2**20  # of a received frame: a page of some MiB, or a single entry larger than that
MAX_PENDING_EVENTS = 20_000  # per listener; a gateway queues no more than that for a client

Json = dict[str, Any]
ReceivedEvent = tuple[str, Json]
"""The name of an event and its payload."""


class Site(msgspec.Struct, frozen=True):
    """The address of a gateway and the secret to authenticate with. `repr` leaves the secret out."""

    url: str
    secret: str | None

    def __repr__(self) -> str:
        return f"Site({self.url!r})"


class GatewayUnreachable(Unavailable):
    """The gateway cannot be reached, or the connection to it was lost."""


def build_unreachable_error(site: Site, why: object) -> GatewayUnreachable:
    reason = str(why) or type(why).__name__
    return GatewayUnreachable(
        f"The gateway at {site.url} cannot be reached ({reason}).",
        "Check the address, or start one with `antiphon up`.",
        url=site.url,
    )


def _explain_close(site: Site, error: Exception) -> AntiphonError:
    """Return the error for a closed connection. `TooLarge` is permanent: reconnecting would fail the same way."""
    closes = (error.rcvd, error.sent) if isinstance(error, ConnectionClosed) else ()
    if any(close and close.code == CloseCode.MESSAGE_TOO_BIG for close in closes):
        return TooLarge(
            "A request or its answer is too large for the connection to the gateway.",
            "Send or ask for less at once.",
            max=MAX_FRAME_BYTES,
        )
    return build_unreachable_error(site, error)


class _GatewayFrame(msgspec.Struct, frozen=True):
    """Any frame that a gateway sends."""

    type: str
    id: str | None = None
    ok: bool = False
    payload: Any = None
    error: Any = None
    event: str | None = None


_frame_decoder = msgspec.json.Decoder(_GatewayFrame)


class GatewayConnection:
    """One connection to a gateway. It does not reconnect; `Client` does."""

    def __init__(self, site: Site, socket: ClientConnection) -> None:
        self.site = site
        self.hello: Json = {}
        self.lost = asyncio.Event()
        self.close_error: AntiphonError = build_unreachable_error(site, "the connection was closed")
        """The error that pending requests get when the connection is lost."""
        self._socket = socket
        self._pending_responses: dict[str, asyncio.Future[_GatewayFrame]] = {}
        self._listeners: set[asyncio.Queue[ReceivedEvent | None]] = set()
        self._reader = asyncio.create_task(self._read_frames())

    @classmethod
    async def open(cls, site: Site) -> GatewayConnection:
        """Connect and authenticate.

        Raises:
            GatewayUnreachable: no gateway answers there. Any other error is the gateway's refusal.
        """
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_SECONDS):
                socket = await connect(site.url, max_size=MAX_FRAME_BYTES, compression=None, proxy=None)
        except (OSError, TimeoutError, InvalidHandshake, InvalidURI) as error:
            raise build_unreachable_error(site, error) from error
        connection = cls(site, socket)
        try:
            connection.hello = await connection.request(
                "connect", _build_connect_params(site), CONNECT_TIMEOUT_SECONDS
            )
        except BaseException:
            await connection.close()
            raise
        return connection

    async def request(self, method: str, params: Json, seconds: float = RESPONSE_TIMEOUT_SECONDS) -> Any:
        """Send a request and return the payload of its response."""
        if self.lost.is_set():
            raise self.close_error
        request_id = uuid.uuid4().hex
        raw = msgspec.json.encode({"type": "req", "id": request_id, "method": method, "params": params})
        self._check_size(method, len(raw))
        response = self._pending_responses[request_id] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(seconds):
                await self._socket.send(raw, text=True)
                frame = await response
        except TimeoutError as error:
            raise build_unreachable_error(
                self.site, f"{method} was not answered in {seconds:.0f} s"
            ) from error
        except (OSError, WebSocketException) as error:
            raise _explain_close(self.site, error) from error
        finally:
            self._pending_responses.pop(request_id, None)
        if frame.ok:
            return frame.payload
        raise _to_error(self.site, frame.error or {})

    def _check_size(self, method: str, size: int) -> None:
        """Reject an oversized request before it is sent; the gateway might hang up without giving a reason."""
        max_bytes: int = self.hello.get("policy", {}).get("maxPayload", DEFAULT_MAX_REQUEST_BYTES)
        if size > max_bytes:
            raise TooLarge(
                f"This {method} has {size} bytes; the gateway accepts at most {max_bytes}.",
                "Send less at once.",
                bytes=size,
                max=max_bytes,
            )

    @contextmanager
    def listen(self) -> Generator[asyncio.Queue[ReceivedEvent | None]]:
        """Return a queue that gets every event while the context lasts, and None when the connection is lost.

        If a listener lags too far behind, the connection is dropped, as a gateway does with a slow client: the
        listener gets the events still queued, then None, and resumes from the last number over another connection.
        Waiting for it instead would delay the responses that it may itself be waiting for.
        """
        queue: asyncio.Queue[ReceivedEvent | None] = asyncio.Queue(
            MAX_PENDING_EVENTS + 1
        )  # one extra slot for None
        self._listeners.add(queue)
        try:
            yield queue
        finally:
            self._listeners.discard(queue)

    async def close(self) -> None:
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        with suppress(OSError, WebSocketException, TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_SECONDS):
                await self._socket.close()
        self._socket.transport.abort()  # a hung gateway does not answer the close and would keep the loop running
        await self._socket.wait_closed()

    async def _read_frames(self) -> None:
        try:
            async for text in self._socket:
                self._handle_frame(_frame_decoder.decode(text))
        except (OSError, WebSocketException) as error:
            self.close_error = _explain_close(self.site, error)
        except asyncio.QueueFull:
            self.close_error = build_unreachable_error(
                self.site, "its events came faster than they were taken"
            )
        except msgspec.MsgspecError:
            pass  # the peer is not a gateway
        finally:
            self.lost.set()
            for response in self._pending_responses.values():
                if not response.done():
                    response.set_exception(self.close_error)
            for queue in self._listeners:
                queue.put_nowait(None)

    def _handle_frame(self, frame: _GatewayFrame) -> None:
        if frame.type == "event" and frame.event:
            for queue in self._listeners:
                if queue.qsize() >= MAX_PENDING_EVENTS:
                    raise asyncio.QueueFull
                queue.put_nowait((frame.event, frame.payload or {}))
        elif (response := self._pending_responses.get(frame.id or "")) and not response.done():
            response.set_result(frame)


def _build_connect_params(site: Site) -> Json:
    return {
        "minProtocol": PROTOCOL_VERSIONS[0],
        "maxProtocol": PROTOCOL_VERSIONS[-1],
        "client": {
            "id": "cli",
            "mode": "cli",
            "version": __version__,
            "platform": platform.system().lower(),
        },
        "caps": ["tool-events", "chat-deltas"],
        **({"auth": {"token": site.secret}} if site.secret else {}),
    }


def _to_error(site: Site, wire: Json) -> AntiphonError:
    """Return the error that the gateway raised, as an exception of the same type."""
    details: Json = dict(wire.get("details") or {})
    kind = _collect_error_types().get(details.pop("type", ""))
    text = str(wire.get("message") or "The gateway refused without a reason.")
    if kind is None and wire.get("retryable"):
        return build_unreachable_error(site, text)  # the gateway is stopping
    hint = details.pop("hint", "")
    what = text.removesuffix(hint).rstrip() if hint else text
    error = AntiphonError.__new__(kind or AntiphonError)
    AntiphonError.__init__(error, what, hint, **details)
    return error


def _collect_error_types() -> dict[str, type[AntiphonError]]:
    """Return every error class by its code; where two share a code, the one in `errors`."""
    found: dict[str, type[AntiphonError]] = {}
    kinds = [AntiphonError]
    for kind in kinds:
        kinds += kind.__subclasses__()
        found.setdefault(kind.code, kind)
    return found
