"""A WebSocket client with nothing in it: what a benchmark measures should be the server.

It reads frames as they come and hands their texts to `on_text`; it neither checks nor queues anything.
"""

from __future__ import annotations

import asyncio
import base64
import os
from collections.abc import Callable
from typing import Any, cast

import msgspec


class Wire(asyncio.Protocol):
    def __init__(self, on_text: Callable[[bytes], None]) -> None:
        self.on_text = on_text
        self.transport: asyncio.Transport | None = None
        self.lost = asyncio.get_running_loop().create_future()
        self._buffer = bytearray()
        self._upgraded = asyncio.get_running_loop().create_future()

    @classmethod
    async def open(cls, port: int, on_text: Callable[[bytes], None]) -> Wire:
        loop = asyncio.get_running_loop()
        _, wire = await loop.create_connection(lambda: cls(on_text), "127.0.0.1", port)
        await asyncio.wait_for(wire._upgraded, 10)
        return wire

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        key = base64.b64encode(os.urandom(16)).decode()
        self.transport.write(
            f"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
        )

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.lost.done():
            self.lost.set_result(None)

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer
        buffer += data
        if not self._upgraded.done():
            head, end, rest = bytes(buffer).partition(b"\r\n\r\n")
            if not end:
                return
            assert head.startswith(b"HTTP/1.1 101"), head
            self._upgraded.set_result(None)
            buffer[:] = rest
        self._read(buffer)

    def _read(self, buffer: bytearray) -> None:
        start = 0
        while len(buffer) - start >= 2:
            size, offset = buffer[start + 1] & 127, start + 2
            if size == 126:
                size, offset = int.from_bytes(buffer[start + 2 : start + 4]), start + 4
            elif size == 127:
                size, offset = int.from_bytes(buffer[start + 2 : start + 10]), start + 10
            if len(buffer) < offset + size:
                break
            if buffer[start] & 15 == 1:
                self.on_text(bytes(buffer[offset : offset + size]))
            elif buffer[start] & 15 == 9:  # a client that does not answer a ping is taken to be gone
                self._pong(bytes(buffer[offset : offset + size]))
            start = offset + size
        del buffer[:start]

    def _pong(self, payload: bytes) -> None:
        assert self.transport is not None
        self.transport.write(bytes([138, 128 | len(payload)]) + b"\0\0\0\0" + payload)

    def send(self, text: bytes) -> None:
        """A masked text frame; the mask is zero, which leaves the text as it is."""
        assert self.transport is not None
        size = len(text)
        head = bytes([129, 128 | size]) if size < 126 else bytes([129, 254]) + size.to_bytes(2)
        self.transport.write(head + b"\0\0\0\0" + text)

    def close(self) -> None:
        assert self.transport is not None
        self.transport.abort()


class Client:
    """Requests and answers over a wire. Of the events only the ends of runs are looked at."""

    def __init__(self) -> None:
        self._opened: Wire | None = None
        self._answers: dict[str, asyncio.Future[dict[str, Any]]] = {}
        self._number = 0
        self.finals: dict[str, asyncio.Future[None]] = {}
        """Runs whose last `chat` event is waited for."""

    @property
    def wire(self) -> Wire:
        assert self._opened is not None
        return self._opened

    @classmethod
    async def connect(cls, port: int, token: str) -> Client:
        client = cls()
        client._opened = await Wire.open(port, client._text)
        who = {"id": "gateway-client", "version": "1", "platform": "bench", "mode": "backend"}
        await client.ask(
            "connect",
            minProtocol=4,
            maxProtocol=4,
            client=who,
            auth={"token": token},
            scopes=["operator.admin"],
        )
        return client

    def _text(self, text: bytes) -> None:
        if text.startswith(b'{"type":"event"'):
            if self.finals and b'"state":"final"' in text:
                self._final(msgspec.json.decode(text))
            return
        frame: dict[str, Any] = msgspec.json.decode(text)
        if (waiting := self._answers.pop(frame["id"], None)) and not waiting.done():
            waiting.set_result(frame)

    def _final(self, frame: dict[str, Any]) -> None:
        final = self.finals.pop(frame["payload"]["runId"], None)
        if final is not None and not final.done():
            final.set_result(None)

    async def ask(self, method: str, **params: Any) -> Any:
        self._number += 1
        number = str(self._number)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        self.wire.send(msgspec.json.encode({"type": "req", "id": number, "method": method, "params": params}))
        frame = await asyncio.wait_for(answer, 60)
        if not frame["ok"]:
            raise RuntimeError(frame["error"]["message"])
        return frame["payload"]

    def close(self) -> None:
        self.wire.close()
