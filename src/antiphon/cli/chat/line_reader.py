"""Reads messages from a pipe or a file, a line each, without blocking the event loop."""

from __future__ import annotations

import asyncio
import os
import queue
import select
import threading
from contextlib import suppress

READ_BYTES = 65536


class LineReader:
    """Reads lines from descriptor 0, and None at its end.

    A daemon thread reads, and from the descriptor itself: a thread blocked in a buffered read would keep the program
    from ending.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._requests: queue.SimpleQueue[asyncio.Future[str | None]] = queue.SimpleQueue()
        self._last: asyncio.Future[str | None] | None = None
        self._buffer = b""
        threading.Thread(target=self._serve_requests, name="antiphon-stdin", daemon=True).start()

    async def read_line(self) -> str | None:
        self._last = self._loop.create_future()
        self._requests.put(self._last)
        return await asyncio.shield(self._last)

    def has_more(self) -> bool:
        """Whether there is more input, as far as that is known without blocking."""
        if self._last is not None and not self._last.done():
            return False  # the thread is waiting for it; reading here too could block forever
        if not self._buffer and select.select([0], [], [], 0)[0]:
            with suppress(OSError):
                self._buffer = os.read(0, READ_BYTES)
        return bool(self._buffer.strip())

    def _serve_requests(self) -> None:
        while True:
            request = self._requests.get()
            try:
                line = self._read_line()
            except OSError:
                line = None
            with suppress(RuntimeError):  # the event loop is closed, so no caller is waiting
                self._loop.call_soon_threadsafe(request.set_result, line)

    def _read_line(self) -> str | None:
        while b"\n" not in self._buffer:
            chunk = os.read(0, READ_BYTES)
            if not chunk:
                rest, self._buffer = self._buffer, b""
                return rest.decode(errors="replace") or None
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line.removesuffix(b"\r").decode(errors="replace")
