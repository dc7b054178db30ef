"""Stands between a client and its server, and does to their connection what networks do."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Literal, Self

Side = Literal["before", "after"]
_TLS = bytes.fromhex("0000000804d2162f")  # how PostgreSQL's clients ask for it, before anything else
_CHUNK = 1 << 16


@dataclass
class Moment:
    """When certain bytes have come from a client: `before` the server gets them, or `after` it has answered."""

    said: bytes
    side: Side
    then: Callable[[], Awaitable[object]] | None
    reached: asyncio.Event = field(default_factory=asyncio.Event)
    over: asyncio.Event = field(default_factory=asyncio.Event)

    async def happen(self) -> None:
        """Once; later callers wait until it is over."""
        if self.reached.is_set():
            await self.over.wait()
            return
        self.reached.set()
        if self.then is not None:
            await self.then()
        self.over.set()


class Proxy:
    """Listens on a port of the loopback while it is entered. Every fault lasts until it is taken back."""

    def __init__(self, port: int, *, tls: ssl.SSLContext | None = None) -> None:
        self.port = 0
        self.delay = 0.0
        """Seconds by which every answer is late."""
        self.connections = 0
        """That were ever made."""
        self._to = port
        self._tls = tls
        self._moments: list[Moment] = []
        self._pairs: dict[asyncio.Task[None], tuple[asyncio.StreamWriter, ...]] = {}
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._refusing = False

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.cut()
        await asyncio.gather(*self._pairs, return_exceptions=True)
        await self._server.wait_closed()

    # --- faults ---

    def cut(self) -> None:
        """Every connection there is, at once."""
        for task, writers in self._pairs.items():
            for writer in writers:
                writer.transport.abort()
            task.cancel()

    def cut_at(self, said: bytes, side: Side, then: Callable[[], Awaitable[object]] | None = None) -> Moment:
        """Cut the connection on which these bytes come next; what is to happen `then` comes first."""
        moment = Moment(said, side, then)
        self._moments.append(moment)
        return moment

    def stall(self) -> None:
        """Nothing goes through any more, without a notice."""
        self._flowing.clear()

    def flow(self) -> None:
        self._flowing.set()

    def refuse(self, *, refusing: bool = True) -> None:
        """New connections are closed at once."""
        self._refusing = refusing

    # --- what goes through ---

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._pairs[task] = (writer,)
        self.connections += 1
        try:
            await self._join(task, reader, writer)
        except (OSError, EOFError, asyncio.CancelledError):
            pass  # either side went, or was cut off
        finally:
            for each in self._pairs.pop(task):
                each.transport.abort()

    async def _join(
        self, task: asyncio.Task[None], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if self._refusing:
            return
        if self._tls is not None and await reader.readexactly(len(_TLS)) == _TLS:
            writer.write(b"S")
            await writer.start_tls(self._tls)
        there, onward = await asyncio.open_connection("127.0.0.1", self._to)
        self._pairs[task] = (writer, onward)
        due: list[Moment] = []
        up = asyncio.create_task(self._up(reader, onward, due))
        down = asyncio.create_task(self._down(there, writer, due))
        try:
            await asyncio.wait({up, down}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            up.cancel()
            down.cancel()
            await asyncio.gather(up, down, return_exceptions=True)

    async def _up(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, due: list[Moment]
    ) -> None:
        while chunk := await reader.read(_CHUNK):
            await self._flowing.wait()
            moment = next((moment for moment in self._moments if moment.said in chunk), None)
            if moment is not None:
                self._moments.remove(moment)
                due.append(moment)
                if moment.side == "before":
                    await moment.happen()
                    return
            writer.write(chunk)
            await writer.drain()

    async def _down(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, due: list[Moment]
    ) -> None:
        while (chunk := await reader.read(_CHUNK)) and not due:
            await self._flowing.wait()
            await asyncio.sleep(self.delay)
            writer.write(chunk)
            await writer.drain()
        for moment in due:
            await moment.happen()
