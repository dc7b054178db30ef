"""The WebSocket door: challenge, connect, then requests until somebody hangs up.

Written on bare ASGI: a request passes here in a few steps, and each of them is paid thousands of times a second.
Requests of one connection are answered in their order, except those that wait for something (`Method.waits`).
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

from antiphon import misfits
from antiphon.errors import AntiphonError, Forbidden, InvalidInput, Unauthorized, Unavailable
from antiphon.gateway import auth, frames, handshake, line
from antiphon.gateway.connection import Connection
from antiphon.gateway.gateway import Gateway
from antiphon.gateway.heads import PendingPeers
from antiphon.gateway.hub import Hub
from antiphon.gateway.methods import METHODS, Call, Method
from antiphon.tracing import span

log = logging.getLogger(__name__)

FIRST_WORD = 15.0  # seconds a client may take to say who it is
LAST_WORD = 0.5  # seconds in which a client has to take what was still meant for it
MOST_CONNECTIONS = 4096
MAX_STRANGERS = 64  # unauthenticated connections; a new one beyond these evicts another
MOST_FOREIGN = 8  # strangers among them that come from a page which may not, and only get to hear so
MOST_WAITING = 256  # requests of one connection that wait for something

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
GOING = frames.WireError("UNAVAILABLE", "The gateway is stopping. Connect again in a moment.", retryable=True)


class Hangup(Exception):
    """The connection ends here, with this code."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


class Sockets:
    """The ASGI application for WebSockets."""

    def __init__(self, gateway: Gateway, hub: Hub) -> None:
        self._gateway = gateway
        self._hub = hub
        self._open = 0
        self._strangers = PendingPeers()
        self._foreign = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await receive()  # websocket.connect
        foreign = not self._gateway.guard.allows(auth.origin_of(scope["headers"]))
        if (
            self._gateway.closing.is_set()
            or self._open >= MOST_CONNECTIONS
            or (foreign and self._foreign >= MOST_FOREIGN)
        ):
            await send({"type": "websocket.close", "code": 1013, "reason": "try again later"})
            return
        self._open += 1
        self._foreign += foreign
        try:
            await send({"type": "websocket.accept"})
            await self._serve(scope, receive, send)
        finally:
            self._open -= 1
            self._foreign -= foreign

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection = Connection(
            uuid.uuid4().hex, send, self._gateway.house.clock.now(), at_once=line.at_once(scope)
        )
        writer = asyncio.create_task(connection.write())
        reader = asyncio.create_task(self._read(connection, scope, receive))
        try:
            ended = asyncio.create_task(connection.ended.wait())
            await asyncio.wait({reader, writer, ended}, return_when=asyncio.FIRST_COMPLETED)
            ended.cancel()
            if reader.done() and not reader.cancelled() and (error := reader.exception()):
                log.error("A connection failed", exc_info=error)
                connection.close(1011, "internal error")
        finally:
            connection.close(1000, "")
            await asyncio.wait({writer}, timeout=LAST_WORD)  # what was said before is still heard
            for task in (reader, writer):
                task.cancel()
            await asyncio.gather(reader, writer, return_exceptions=True)
            await connection.end()
            self._hub.leave(connection)
            with suppress(TimeoutError):
                async with asyncio.timeout(LAST_WORD):  # a client that does not read does not get to hear why
                    await connection.hang_up()

    async def _read(self, connection: Connection, scope: Scope, receive: Receive) -> None:
        try:
            await self._greet(connection, scope, receive)
            while (text := await _text(receive)) is not None:
                await self._request(connection, text)
        except Hangup as end:
            connection.close(end.code, end.reason)
        except OSError:  # the client went away before its answer
            connection.close(1000, "")

    # --- before anything else ---

    async def _greet(self, connection: Connection, scope: Scope, receive: Receive) -> None:
        nonce = str(uuid.uuid4())
        now = self._gateway.house.clock.now()
        connection.put(frames.unnumbered(frames.event("connect.challenge", {"nonce": nonce, "ts": now})))
        if len(self._strangers) >= MAX_STRANGERS:
            self._strangers.evict_one()
        evict = partial(connection.close, 1013, "try again later")
        ticket = self._strangers.add(handshake.address_of(scope), evict)
        try:
            async with asyncio.timeout(FIRST_WORD):
                text = await _text(receive)
        except TimeoutError:
            raise Hangup(1008, "handshake timeout") from None
        finally:
            self._strangers.discard(ticket)
        if text is None:
            raise Hangup(1000, "")
        await self._connect(connection, _request(text), nonce, scope)

    async def _connect(
        self, connection: Connection, request: frames.Request, nonce: str, scope: Scope
    ) -> None:
        try:
            client, identity, protocol = await handshake.enter(self._gateway, request, nonce, scope)
        except handshake.Mismatch as error:
            await self._refuse(connection, request.id, error, 1002)
        except Forbidden as error:  # a page of an origin that may not, a node whose token may not speak
            await self._refuse(connection, request.id, error, 1008, "INVALID_REQUEST")
        except (Unauthorized, InvalidInput) as error:
            await self._refuse(connection, request.id, error, 1008, error.data.pop("ws", None))
        else:
            connection.enter(client, identity, protocol)
            line.admit(scope)
            hello = handshake.hello(self._gateway, self._hub, connection)
            connection.put(frames.answer(request.id, hello))
            self._hub.join(connection)

    async def _refuse(
        self, connection: Connection, request_id: str, error: AntiphonError, code: int, ws: str | None = None
    ) -> None:
        wire = frames.wire_error(error, connection.protocol)
        wire = msgspec.structs.replace(wire, code=ws) if ws else wire
        await connection.answer(frames.refusal(request_id, wire))
        raise Hangup(code, str(error))

    # --- requests ---

    async def _request(self, connection: Connection, text: str | bytes) -> None:
        request = _request(text)
        method = METHODS.get(request.method)
        if self._gateway.closing.is_set():
            await connection.answer(frames.refusal(request.id, GOING))
        elif method is not None and method.out_of_turn(request.params):
            self._later(connection, request, method)
        else:
            await connection.answer(await self._respond(connection, request, method))

    def _later(self, connection: Connection, request: frames.Request, method: Method) -> None:
        if len(connection.tasks) >= MOST_WAITING:
            error = Unavailable(
                f"{MOST_WAITING} requests of this connection are waiting already.",
                "Wait for one of them to end.",
            )
            connection.put(frames.refusal(request.id, frames.wire_error(error, connection.protocol)))
            return

        async def work() -> None:
            connection.put(await self._respond(connection, request, method))

        connection.start(work)

    async def _respond(self, connection: Connection, request: frames.Request, method: Method | None) -> str:
        try:
            if method is None:
                raise _unknown(request.method)
            params = frames.read_params(request.method, request.params, method.decoder)
            method.check(connection.caller)
            call = Call(self._gateway, self._hub, connection, request.id)
            with span("request", request.traceparent, method=method.name):
                return frames.answer(request.id, await method.run(call, params))
        except AntiphonError as error:
            payload = error.data.pop("payload", None)
            return frames.refusal(request.id, frames.wire_error(error, connection.protocol), payload)
        except Exception:
            log.exception("Method %r failed", request.method)
            error = frames.WireError(
                "UNAVAILABLE", "The gateway failed at this. See its log, then try again."
            )
            return frames.refusal(request.id, error)


def _unknown(name: str) -> InvalidInput:
    if name == "connect":
        return InvalidInput(
            "connect is only valid as the first request.", "Open another connection.", field="method"
        )
    return InvalidInput(
        f"unknown method: {name[:100]}.", "The methods are listed in the answer to connect.", field="method"
    )


def _request(text: str | bytes) -> frames.Request:
    try:
        return _decoded(text)
    except msgspec.ValidationError as error:
        raise Hangup(1008, f"invalid request frame: {error}") from None
    except RecursionError:
        raise Hangup(1008, "invalid request frame: nested too deeply") from None
    except ValueError:
        raise Hangup(1000, "a frame was not JSON") from None


def _decoded(text: str | bytes) -> frames.Request:
    try:
        return frames.decode(text)
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError:
        return frames.decode(misfits.mended(text))


async def _text(receive: Receive) -> str | bytes | None:
    """The next frame, or None when the client has hung up."""
    message = await receive()
    if message["type"] == "websocket.disconnect":
        return None
    return cast("str | bytes", message.get("text") or message.get("bytes") or "")
