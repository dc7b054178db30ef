"""The WebSocket server: challenge, `connect`, then requests until the connection closes.

Written on bare ASGI, because each step of a request is executed thousands of times a second. Requests of one
connection are answered in order, except those that wait for something (`Method.waits`).
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from functools import partial
from typing import Any, cast

import msgspec

from antiphon import validation_errors
from antiphon.errors import (
    AntiphonError,
    Forbidden,
    InvalidInput,
    ProtocolMismatch,
    Unauthorized,
    Unavailable,
)
from antiphon.gateway import auth
from antiphon.gateway.http.limits import PendingPeers
from antiphon.gateway.hub import Hub
from antiphon.gateway.methods import METHODS_BY_NAME, Method, MethodCall
from antiphon.gateway.state import GatewayState
from antiphon.gateway.ws import frames, handshake, protocol
from antiphon.gateway.ws.connection import WebSocketConnection
from antiphon.tracing import start_span

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_SECONDS = 15.0  # for a client to authenticate
CLOSE_TIMEOUT_SECONDS = 0.5  # for a client to read what is still queued
MAX_CONNECTIONS = 4096
MAX_UNAUTHENTICATED_CONNECTIONS = 64  # a new one beyond these evicts another
MAX_FOREIGN_ORIGIN_CONNECTIONS = 8  # connections from origins that are not allowed; they only get the refusal
MAX_WAITING_REQUESTS_PER_CONNECTION = 256  # see `Method.waits`

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
STOPPING_ERROR = frames.WireError(
    "UNAVAILABLE", "The gateway is stopping. Connect again in a moment.", retryable=True
)


class CloseConnection(Exception):
    """Ends the connection with this close code."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


class WebSocketServer:
    """The ASGI application for WebSockets."""

    def __init__(self, gateway: GatewayState, hub: Hub) -> None:
        self._gateway = gateway
        self._hub = hub
        self._open_count = 0
        self._unauthenticated_peers = PendingPeers()
        self._foreign_origin_count = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await receive()  # websocket.connect
        foreign = not self._gateway.authenticator.is_origin_allowed(auth.find_origin_header(scope["headers"]))
        if (
            self._gateway.closing.is_set()
            or self._open_count >= MAX_CONNECTIONS
            or (foreign and self._foreign_origin_count >= MAX_FOREIGN_ORIGIN_CONNECTIONS)
        ):
            await send({"type": "websocket.close", "code": 1013, "reason": "try again later"})
            return
        self._open_count += 1
        self._foreign_origin_count += foreign
        try:
            await send({"type": "websocket.accept"})
            await self._serve_connection(scope, receive, send)
        finally:
            self._open_count -= 1
            self._foreign_origin_count -= foreign

    async def _serve_connection(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection = WebSocketConnection(
            uuid.uuid4().hex,
            send,
            self._gateway.app.clock.now(),
            send_now=protocol.find_send_now(scope),
            ping=protocol.find_ping(scope),
        )
        writer = asyncio.create_task(connection.run_writer())
        reader = asyncio.create_task(self._read_requests(connection, scope, receive))
        try:
            ended = asyncio.create_task(connection.ended.wait())
            await asyncio.wait({reader, writer, ended}, return_when=asyncio.FIRST_COMPLETED)
            ended.cancel()
            if reader.done() and not reader.cancelled() and (error := reader.exception()):
                log.error("Connection failed", exc_info=error)
                connection.close(1011, "internal error")
        finally:
            connection.close(1000, "")
            await asyncio.wait({writer}, timeout=CLOSE_TIMEOUT_SECONDS)  # deliver what is still queued
            for task in (reader, writer):
                task.cancel()
            await asyncio.gather(reader, writer, return_exceptions=True)
            await connection.release_resources()
            self._hub.remove_connection(connection)
            with suppress(TimeoutError):
                async with asyncio.timeout(
                    CLOSE_TIMEOUT_SECONDS
                ):  # a client that does not read gets no reason
                    await connection.send_close_frame()

    async def _read_requests(self, connection: WebSocketConnection, scope: Scope, receive: Receive) -> None:
        try:
            await self._run_handshake(connection, scope, receive)
            while (text := await _receive_text(receive)) is not None:
                await self._handle_request(connection, text)
        except CloseConnection as end:
            connection.close(end.code, end.reason)
        except OSError:  # the client disconnected before its response
            connection.close(1000, "")

    # --- handshake ---

    async def _run_handshake(self, connection: WebSocketConnection, scope: Scope, receive: Receive) -> None:
        nonce = str(uuid.uuid4())
        now = self._gateway.app.clock.now()
        connection.enqueue(
            frames.finish_unnumbered_event(
                frames.encode_event("connect.challenge", {"nonce": nonce, "ts": now})
            )
        )
        if len(self._unauthenticated_peers) >= MAX_UNAUTHENTICATED_CONNECTIONS:
            self._unauthenticated_peers.evict_one()
        evict = partial(connection.close, 1013, "try again later")
        ticket = self._unauthenticated_peers.add(handshake.get_client_address(scope), evict)
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_SECONDS):
                text = await _receive_text(receive)
        except TimeoutError:
            raise CloseConnection(1008, "handshake timeout") from None
        finally:
            self._unauthenticated_peers.discard(ticket)
        if text is None:
            raise CloseConnection(1000, "")
        await self._handle_connect(connection, _parse_request(text), nonce, scope)

    async def _handle_connect(
        self, connection: WebSocketConnection, request: frames.RequestFrame, nonce: str, scope: Scope
    ) -> None:
        try:
            client, identity, version = await handshake.authenticate_client(
                self._gateway, request, nonce, scope
            )
        except ProtocolMismatch as error:
            await self._refuse_connect(connection, request.id, error, 1002)
        except Forbidden as error:  # origin not allowed, or a node token without the write scope
            await self._refuse_connect(connection, request.id, error, 1008, "INVALID_REQUEST")
        except (Unauthorized, InvalidInput) as error:
            await self._refuse_connect(connection, request.id, error, 1008, error.data.pop("ws", None))
        else:
            connection.mark_authenticated(client, identity, version)
            protocol.raise_limits(scope)
            hello = handshake.build_hello(self._gateway, self._hub, connection)
            connection.enqueue(frames.encode_response(request.id, hello))
            self._hub.add_connection(connection)

    async def _refuse_connect(
        self,
        connection: WebSocketConnection,
        request_id: str,
        error: AntiphonError,
        code: int,
        ws: str | None = None,
    ) -> None:
        response = frames.to_wire_error(error, connection.protocol)
        response = msgspec.structs.replace(response, code=ws) if ws else response
        await connection.send_response(frames.encode_error_response(request_id, response))
        raise CloseConnection(code, str(error))

    # --- requests ---

    async def _handle_request(self, connection: WebSocketConnection, text: str | bytes) -> None:
        request = _parse_request(text)
        method = METHODS_BY_NAME.get(request.method)
        if self._gateway.closing.is_set():
            await connection.send_response(frames.encode_error_response(request.id, STOPPING_ERROR))
        elif method is not None and method.is_answered_out_of_turn(request.params):
            self._respond_later(connection, request, method)
        else:
            await connection.send_response(await self._respond(connection, request, method))

    def _respond_later(
        self, connection: WebSocketConnection, request: frames.RequestFrame, method: Method
    ) -> None:
        if len(connection.tasks) >= MAX_WAITING_REQUESTS_PER_CONNECTION:
            error = Unavailable(
                f"{MAX_WAITING_REQUESTS_PER_CONNECTION} requests of this connection are waiting already.",
                "Wait for one of them to finish.",
            )
            connection.enqueue(
                frames.encode_error_response(request.id, frames.to_wire_error(error, connection.protocol))
            )
            return

        async def work() -> None:
            connection.enqueue(await self._respond(connection, request, method))

        connection.start_task(work())

    async def _respond(
        self, connection: WebSocketConnection, request: frames.RequestFrame, method: Method | None
    ) -> str:
        try:
            if method is None:
                raise _build_unknown_method_error(request.method)
            params = frames.read_params(request.method, request.params, method.decoder)
            method.check_scope(connection.caller)
            call = MethodCall(self._gateway, self._hub, connection, request.id)
            with start_span("request", request.traceparent, method=method.name):
                return frames.encode_response(request.id, await method.run(call, params))
        except AntiphonError as error:
            payload = error.data.pop("payload", None)
            return frames.encode_error_response(
                request.id, frames.to_wire_error(error, connection.protocol), payload
            )
        except Exception:
            log.exception("Method %r failed", request.method)
            error = frames.WireError("UNAVAILABLE", "Internal error. See the gateway's log, then try again.")
            return frames.encode_error_response(request.id, error)


def _build_unknown_method_error(name: str) -> InvalidInput:
    if name == "connect":
        return InvalidInput(
            "connect is only valid as the first request.", "Open another connection.", field="method"
        )
    return InvalidInput(
        f"unknown method: {name[:100]}.", "The methods are listed in the answer to connect.", field="method"
    )


def _parse_request(text: str | bytes) -> frames.RequestFrame:
    try:
        return _decode_request(text)
    except msgspec.ValidationError as error:
        raise CloseConnection(1008, f"invalid request frame: {error}") from None
    except RecursionError:
        raise CloseConnection(1008, "invalid request frame: nested too deeply") from None
    except ValueError:
        raise CloseConnection(1000, "a frame was not JSON") from None


def _decode_request(text: str | bytes) -> frames.RequestFrame:
    try:
        return frames.decode_request(text)
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError:
        return frames.decode_request(validation_errors.replace_lone_surrogates(text))


async def _receive_text(receive: Receive) -> str | bytes | None:
    """Return the next frame, or None if the client has disconnected."""
    message = await receive()
    if message["type"] == "websocket.disconnect":
        return None
    return cast("str | bytes", message.get("text") or message.get("bytes") or "")
