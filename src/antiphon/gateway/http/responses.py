"""Reading of JSON bodies, and HTTP responses: JSON, errors and event streams.

Sizes are checked before parsing, and every response has the same security headers. A stream ends with its events, when
the reader disconnects or stops reading, and when the gateway closes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Generator, Mapping
from contextlib import aclosing, contextmanager
from functools import partial
from typing import Any, TypeVar

import anyio
import msgspec
from msgspec import UnsetType
from sse_starlette import EventSourceResponse, ServerSentEvent
from sse_starlette.sse import SendTimeoutError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from antiphon import validation_errors
from antiphon.errors import (
    AntiphonError,
    InvalidInput,
    RunContinues,
    TooLarge,
    TooManyFailures,
    Unauthorized,
    Unavailable,
)
from antiphon.gateway.auth import ClientIdentity
from antiphon.gateway.state import GatewayState

log = logging.getLogger(__name__)
T = TypeVar("T")

BYTES_PER_MIB = 1024 * 1024
MAX_BODY_BYTES = 2 * BYTES_PER_MIB  # of a request body
BODY_TIMEOUT_SECONDS = 30.0  # for the body to arrive
KEEP_ALIVE_SECONDS = 15.0  # between keep-alive comments on an idle stream
SEND_TIMEOUT_SECONDS = 20.0  # for a reader to take one event, before it is dropped
MAX_OPEN_STREAMS = 1000  # per gateway, including requests that wait for a run

SECURITY_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
}
UNEXPECTED_ERROR_MESSAGE = (
    "The gateway failed to handle this request. See its log for the details, then try again."
)


def build_json_response(
    content: object, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    return Response(
        msgspec.json.encode(content),
        status,
        headers={**SECURITY_HEADERS, **(headers or {})},
        media_type="application/json",
    )


# --- errors ---


class ErrorInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    type: str
    message: str
    details: Any = None
    """What a tool returned as its error."""


class ErrorResponse(msgspec.Struct, frozen=True, kw_only=True):
    """An error. The OpenAI endpoints and failed authentication leave `ok` out."""

    ok: bool | UnsetType = False
    error: ErrorInfo


def get_error_type(error: AntiphonError) -> str:
    """Return the machine-readable error type; every 400 has the same one, the message has the details."""
    return "invalid_request" if error.http == 400 else error.code


def build_error_headers(error: AntiphonError) -> dict[str, str]:
    if isinstance(error, TooManyFailures):
        return {"Retry-After": str(max(1, round(error.data.get("retryAfterMs", 1000) / 1000)))}
    if isinstance(error, Unauthorized):
        return {"WWW-Authenticate": "Bearer"}
    if isinstance(error, RunContinues):
        return {"x-should-retry": "false"}
    return {}


def build_error_response(error: AntiphonError) -> Response:
    body: object = ErrorResponse(error=ErrorInfo(get_error_type(error), str(error)))
    if isinstance(error, Unauthorized):
        reason = str(error).removeprefix("unauthorized: ")
        message = f"Unauthorized: {reason}" if error.http == 401 else str(error)
        body = {"error": {"message": message, "type": error.code}}
    return build_json_response(body, error.http, build_error_headers(error))


def build_unexpected_error_response() -> Response:
    return build_json_response(ErrorResponse(error=ErrorInfo("internal", UNEXPECTED_ERROR_MESSAGE)), 500)


def build_wrong_method_response(allowed: str) -> Response:
    error = ErrorInfo("method_not_allowed", f"This path does not support the method. Use {allowed}.")
    return build_json_response(ErrorResponse(error=error), 405, {"Allow": allowed})


# --- bodies ---


async def read_json(
    request: Request, shape: type[T], max_bytes: int = MAX_BODY_BYTES, *, hint: str = "Fix that field."
) -> T:
    """Return the body decoded as `shape`. A body over `max_bytes` bytes is rejected without being kept."""
    _check_media_type(request.headers.get("content-type"))
    body = await read_body(request, max_bytes)
    try:
        return msgspec.json.decode(body, type=shape)
    except msgspec.ValidationError as error:
        found = validation_errors.parse_validation_error(error)
        raise InvalidInput(
            f"The body is invalid: {validation_errors.shorten_error(error)}.",
            hint,
            **({"field": found.field} if found.field else {}),
        ) from error
    except (ValueError, RecursionError) as error:
        raise InvalidInput("The body is not valid JSON.", "Send a JSON object in UTF-8.") from error


def _check_media_type(header: str | None) -> None:
    kind = (header or "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise InvalidInput(
            f"Bodies of type {kind[:80]!r} are not accepted.", "Send it with content-type: application/json."
        )


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Return the body, which must not have more than `max_bytes` bytes and must arrive in time."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise _build_too_large_error(int(declared), max_bytes)  # the server discards the rest
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_SECONDS):
            async for chunk in request.stream():
                body += chunk
                if len(body) > max_bytes:
                    raise _build_too_large_error(len(body), max_bytes)
    except TimeoutError:
        raise InvalidInput(
            f"The body did not arrive within {BODY_TIMEOUT_SECONDS:g} seconds.", "Send it faster."
        ) from None
    return bytes(body)


def _build_too_large_error(size: int, max_bytes: int) -> TooLarge:
    return TooLarge(
        f"The body has {size} bytes or more; at most {max_bytes} are accepted.",
        "Send less.",
        bytes=size,
        max=max_bytes,
    )


# --- streams and waits ---


class StreamSlots:
    """Limits the number of open streams and waits; requests beyond the limit are rejected immediately."""

    def __init__(self, max_open: int = MAX_OPEN_STREAMS) -> None:
        self.max_open = max_open
        self.open_count = 0

    def acquire(self) -> None:
        if self.open_count >= self.max_open:
            raise Unavailable(
                f"{self.max_open} requests are open, which is the limit.",
                "Try again later.",
            )
        self.open_count += 1

    def release(self) -> None:
        self.open_count -= 1

    @contextmanager
    def hold_slot(self) -> Generator[None]:
        self.acquire()
        try:
            yield
        finally:
            self.release()


class EventStream(EventSourceResponse):
    """Server-sent events. Create it with `open`: failures before the first event become HTTP errors."""

    def __init__(
        self,
        first: ServerSentEvent,
        events: AsyncGenerator[ServerSentEvent],
        gateway: GatewayState,
        slots: StreamSlots,
        identity: ClientIdentity,
    ) -> None:
        self._events = events
        self._slots = slots
        self._is_still_valid = partial(gateway.authenticator.is_still_valid, identity)
        self._revoked = asyncio.Event()
        super().__init__(  # pyright: ignore[reportUnknownMemberType] - its own annotations say `dict`
            _prepend_event(first, iterate_until(events, gateway.closing, self._revoked)),
            headers=SECURITY_HEADERS,
            ping=KEEP_ALIVE_SECONDS,
            ping_message_factory=self._build_keep_alive,
            sep="\n",
            send_timeout=SEND_TIMEOUT_SECONDS,
        )

    @classmethod
    async def open(
        cls,
        events: AsyncGenerator[ServerSentEvent],
        gateway: GatewayState,
        slots: StreamSlots,
        identity: ClientIdentity,
    ) -> EventStream:
        """Return a stream whose first event is ready. It ends soon after the client's token is revoked."""
        slots.acquire()  # released after the response, or below if there is none
        try:
            return cls(await anext(events), events, gateway, slots, identity)
        except BaseException:
            slots.release()
            raise

    def _build_keep_alive(self) -> ServerSentEvent:
        if not self._is_still_valid():
            self._revoked.set()
        return ServerSentEvent(comment="keepalive", sep="\n")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with aclosing(self._events):
                await super().__call__(scope, receive, send)
        except SendTimeoutError:
            log.info("Stream closed: the client did not read for %g s", SEND_TIMEOUT_SECONDS)
        except AntiphonError as error:
            log.warning("Stream ended early: %s", error)
        finally:
            self._slots.release()


async def _prepend_event(
    first: ServerSentEvent, rest: AsyncGenerator[ServerSentEvent]
) -> AsyncGenerator[ServerSentEvent]:
    async with aclosing(rest):
        yield first
        async for event in rest:
            yield event


def build_sse_event(content: object, *, event: str | None = None, id: str | None = None) -> ServerSentEvent:
    return ServerSentEvent(msgspec.json.encode(content).decode(), event=event, id=id, sep="\n")


async def iterate_until(items: AsyncGenerator[T], *stops: asyncio.Event) -> AsyncGenerator[T]:
    """Yield from `items` until one of `stops` is set."""
    stopped = [asyncio.ensure_future(stop.wait()) for stop in stops]
    coming: asyncio.Future[T] | None = None
    try:
        while not any(stop.is_set() for stop in stops):
            coming = asyncio.ensure_future(anext(items))
            await asyncio.wait({coming, *stopped}, return_when=asyncio.FIRST_COMPLETED)
            if not coming.done():
                return
            try:
                item = coming.result()
            except StopAsyncIteration:
                return
            yield item
    finally:
        await cancel_and_wait(*stopped, coming)
        await items.aclose()


async def wait_while_connected(request: Request, closing: asyncio.Event, work: Awaitable[T]) -> T:
    """Return the result of `work`, unless the client disconnects or the gateway closes first.

    Raises:
        ClientDisconnect: the client has disconnected.
        RunContinues: the gateway is closing.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_wait_for_disconnect(request))
    closed = asyncio.ensure_future(closing.wait())
    try:
        await asyncio.wait({task, gone, closed}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        if gone.done():
            raise ClientDisconnect
        raise RunContinues(
            "The gateway is stopping; the run continues after the restart.",
            "Send the request again then, with the same Idempotency-Key.",
        )
    finally:
        await cancel_and_wait(task, gone, closed)


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def cancel_and_wait(*tasks: asyncio.Future[Any] | None) -> None:
    """Cancel these tasks and wait for their end, even if the caller is cancelled repeatedly."""
    running = [task for task in tasks if task is not None]
    for task in running:
        task.cancel()
    with anyio.CancelScope(shield=True):
        await asyncio.gather(*running, return_exceptions=True)
