"""uvicorn's WebSocket protocol with resource limits per peer, synchronous sending and pings.

Limits apply to message size (tighter until the peer has authenticated, see `raise_limits`), fragments per message,
control frames per second and frames per event loop callback. A closed connection is freed with its last reference,
without the garbage collector.

ASGI sends with a coroutine, so an event for a thousand listeners would wake a thousand tasks for one write each.
`send_now` frames a text and hands it to the socket in one call. If the client lags or the connection is not open, it
refuses, and the text goes into the send queue (`connection`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

from uvicorn._types import ASGIReceiveEvent
from uvicorn.config import Config
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState
from websockets.frames import CTRL_OPCODES, Frame, Opcode
from websockets.http11 import Request
from websockets.protocol import Event, State

from antiphon.gateway.ws import frames

SendNow = Callable[[str], bool]
Ping = Callable[[Callable[[], None]], bool]
ASGI_EXTENSION_NAME = "antiphon.at_once"
TEXT_FRAME_FIRST_BYTE = 0x81  # a complete text in one frame; servers do not mask frames

MAX_FRAGMENTS_PER_UNAUTHENTICATED_MESSAGE = 64  # before the peer has authenticated
MAX_FRAGMENTS_PER_MESSAGE = 4096  # some clients cut messages into pieces of 2 KiB
CONTROL_FRAMES_PER_SECOND = 20
CONTROL_FRAME_BURST = 100
MAX_FRAMES_PER_CALLBACK = 64  # then other connections get their turn
MIN_SLICE_BYTES, MAX_SLICE_BYTES = 1024, 16 * 1024  # parsed before frames are counted
UNAUTHENTICATED_CLOSE_TIMEOUT_SECONDS = 0.5  # for an unauthenticated peer to answer a close frame


class LimitedWebSocketProtocol(WebSocketsSansIOProtocol):
    """WebSocket protocol with limits. Does not support extensions such as compression, which must see every frame."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.conn.max_message_size = frames.MAX_UNAUTHENTICATED_FRAME_BYTES
        self._max_fragments = MAX_FRAGMENTS_PER_UNAUTHENTICATED_MESSAGE
        self._authenticated_close_timeout = self.close_timeout
        self.close_timeout = UNAUTHENTICATED_CLOSE_TIMEOUT_SECONDS
        self._unparsed = bytearray()
        """Received, but not parsed yet; reading is paused while it holds anything."""
        self._slice_bytes = MIN_SLICE_BYTES
        self._parsing_is_scheduled = False
        self._fragments = 0
        self._control_frames_left = float(CONTROL_FRAME_BURST)
        self._control_frames_counted_at = 0.0
        self._owed_pong = b""
        self._ping_count = 0
        self._on_pong: Callable[[], None] | None = None
        """What to call when the peer answers the newest ping; None once it has."""

    def handle_connect(self, event: Request) -> None:
        super().handle_connect(event)
        if not self.close_sent:  # accepted
            extensions = self.scope.setdefault("extensions", {})
            extensions[ASGI_EXTENSION_NAME] = {
                "send": self.send_now,
                "ping": self.ping,
                "admit": self.raise_limits,
            }

    def raise_limits(self) -> None:
        """Raise the limits: the peer has authenticated."""
        self.conn.max_message_size = self.config.ws_max_size
        self._max_fragments = MAX_FRAGMENTS_PER_MESSAGE
        self.close_timeout = self._authenticated_close_timeout

    def send_now(self, text: str) -> bool:
        """Send a text synchronously; return False if it was not accepted."""
        if not self.writable.is_set() or self.disconnected or self.conn.state is not State.OPEN:
            return False
        payload = text.encode()
        self.transport.write(_encode_frame_head(len(payload)) + payload)
        return True

    def ping(self, on_pong: Callable[[], None]) -> bool:
        """Call `on_pong` when the peer has read everything sent so far; return False if no ping could be sent.

        Answers to earlier pings are ignored from now on.
        """
        if self.disconnected or self.conn.state is not State.OPEN:
            return False
        self._ping_count += 1
        self._on_pong = on_pong
        self.conn.send_ping(self._ping_count.to_bytes(8))
        self.transport.write(b"".join(self.conn.data_to_send()))
        return True

    # --- receiving ---

    def data_received(self, data: bytes) -> None:
        if not self._unparsed and len(data) <= MIN_SLICE_BYTES and not self._must_hold():
            self._feed_parser(data)
            return
        self._unparsed += data
        self._parse()

    async def receive(self) -> ASGIReceiveEvent:
        if self._unparsed:
            self._resume_reading()
        message = await self.queue.get()
        if self.read_paused and self.queue.empty():
            self.read_paused = False
            self._resume_reading()
        return message

    def _must_hold(self) -> bool:
        """Whether to hold what arrives until the application has taken a message or accepted the handshake."""
        return self.read_paused or (self.handshake_initiated and not self.handshake_complete)

    def _resume_reading(self) -> None:
        if self.disconnected or self.transport.is_closing():
            return
        if self._unparsed:
            self._schedule_parsing()
        else:
            self.transport.resume_reading()

    def _schedule_parsing(self) -> None:
        if not self._parsing_is_scheduled:
            self._parsing_is_scheduled = True
            self.loop.call_soon(self._parse_later)

    def _parse_later(self) -> None:
        self._parsing_is_scheduled = False
        self._parse()

    def _parse(self) -> None:
        """Parse received bytes until none are left, the application must act, or other connections get their turn."""
        handled = 0
        while self._unparsed and not self._must_hold():
            if self.disconnected or self.transport.is_closing():
                self._unparsed.clear()
                return
            if handled >= MAX_FRAMES_PER_CALLBACK:
                self._schedule_parsing()
                break
            piece = bytes(self._unparsed[: self._slice_bytes])
            del self._unparsed[: self._slice_bytes]
            count = self._feed_parser(piece)
            handled += count
            self._slice_bytes = MIN_SLICE_BYTES if count else min(self._slice_bytes * 2, MAX_SLICE_BYTES)
        if self.disconnected or self.transport.is_closing():
            return
        if self._unparsed:
            self.transport.pause_reading()
        elif not self.read_paused:
            self.transport.resume_reading()

    def _feed_parser(self, data: bytes) -> int:
        """Parse these bytes, handle the frames that are complete, and return their number."""
        self.conn.receive_data(data)
        if self.conn.parser_exc is not None:
            self.handle_parser_exception()
            return 0
        events = self.conn.events
        if not events:
            return 0
        count = len(events)
        if excess := self._find_excess(events):
            self.conn.events_received()
            self._fail_connection(1008, excess)
        else:
            self.handle_events()
        return count

    def _find_excess(self, events: Sequence[Event]) -> str | None:
        """Return why these frames exceed a limit; None if they do not."""
        control = 0
        has_awaited_pong = False
        for event in events:
            if not isinstance(event, Frame):
                continue
            if not has_awaited_pong and self._is_awaited_pong(event):
                has_awaited_pong = True  # not counted, because it was asked for
            elif event.opcode in CTRL_OPCODES:
                control += 1
            elif event.fin:
                self._fragments = 0
            else:
                self._fragments += 1
                if self._fragments > self._max_fragments:
                    return "too many fragments"
        if control and not self._can_handle_control_frames(control):
            return "too many control frames"
        return None

    def _can_handle_control_frames(self, count: int) -> bool:
        now = self.loop.time()
        earned = (now - self._control_frames_counted_at) * CONTROL_FRAMES_PER_SECOND
        self._control_frames_counted_at = now
        self._control_frames_left = min(self._control_frames_left + earned, CONTROL_FRAME_BURST) - count
        return self._control_frames_left >= 0

    def _fail_connection(self, code: int, reason: str) -> None:
        self.conn.fail(code, reason)
        self.handle_parser_exception()

    # --- control frames ---

    def handle_ping(self) -> None:
        """Answer a ping. While the peer does not read, only its latest ping is answered, once it reads again."""
        if self.writable.is_set():
            super().handle_ping()
        elif output := self.conn.data_to_send():
            self._owed_pong = output[-1]

    def handle_pong(self, event: Frame) -> None:
        if self._on_pong and self._is_awaited_pong(event):
            on_pong, self._on_pong = self._on_pong, None
            on_pong()
        else:
            super().handle_pong(event)

    def _is_awaited_pong(self, event: Frame) -> bool:
        return (
            self._on_pong is not None
            and event.opcode is Opcode.PONG
            and event.data == self._ping_count.to_bytes(8)
        )

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._owed_pong and self.conn.state is State.OPEN:
            self.transport.write(self._owed_pong)
        self._owed_pong = b""

    # --- closing ---

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unparsed.clear()
        self.frames.clear()
        self.conn.reader.discard()
        self.conn.parser.close()  # breaks a cycle: the generator refers to its owner
        self.conn.parser_exc = None  # breaks a cycle through the traceback
        self.conn.events.clear()
        self._on_pong = None
        if scope := getattr(self, "scope", None):  # breaks a cycle: it holds bound methods of this object
            scope.get("extensions", {}).pop(ASGI_EXTENSION_NAME, None)


def _encode_frame_head(size: int) -> bytes:
    if size < 126:
        return bytes((TEXT_FRAME_FIRST_BYTE, size))
    if size < 2**16:
        return b"%c\x7e%b" % (TEXT_FRAME_FIRST_BYTE, size.to_bytes(2))
    return b"%c\x7f%b" % (TEXT_FRAME_FIRST_BYTE, size.to_bytes(8))


def find_send_now(scope: MutableMapping[str, Any]) -> SendNow:
    """Return `send_now` of this connection; under other servers, a function that always refuses."""
    return scope.get("extensions", {}).get(ASGI_EXTENSION_NAME, {}).get("send", refuse_to_send)


def find_ping(scope: MutableMapping[str, Any]) -> Ping:
    """Return `ping` of this connection; under other servers, a function that always refuses."""
    return scope.get("extensions", {}).get(ASGI_EXTENSION_NAME, {}).get("ping", refuse_to_ping)


def raise_limits(scope: MutableMapping[str, Any]) -> None:
    """Raise the limits of this connection: its peer has authenticated."""
    if extension := scope.get("extensions", {}).get(ASGI_EXTENSION_NAME):
        extension["admit"]()


def refuse_to_send(_: str) -> bool:
    return False


def refuse_to_ping(_: Callable[[], None]) -> bool:
    return False
