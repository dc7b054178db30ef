"""Lines on the standard streams of a program that speaks a protocol there, such as `antiphon mcp serve`.

Threads read and write, because the streams may be pipes, files or terminals and may be shared with other processes,
which must not find them non-blocking. The threads are daemons: the process can end while they wait.
"""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from collections.abc import AsyncGenerator
from concurrent import futures
from contextlib import suppress

from antiphon.errors import TooLarge

READ_CHUNK_BYTES = 65536


async def read_lines(fd: int, max_bytes: int) -> AsyncGenerator[bytes]:
    """Yield lines until the end of a file of any kind.

    Raises:
        TooLarge: a line is longer than `max_bytes`.
    """
    loop = asyncio.get_running_loop()
    lines: asyncio.Queue[bytes | None] = asyncio.Queue(1)

    def pass_on(line: bytes | None) -> None:
        adding = lines.put(line)
        try:
            asyncio.run_coroutine_threadsafe(adding, loop).result()
        except RuntimeError:  # the loop is closed
            adding.close()
            raise

    def read() -> None:
        begun = bytearray()
        with suppress(RuntimeError, futures.CancelledError, OSError):  # the loop or the file is closed
            while len(begun) <= max_bytes and (chunk := os.read(fd, READ_CHUNK_BYTES)):
                *ends, rest = chunk.split(b"\n")
                for end in ends:
                    pass_on(bytes(begun) + end)
                    begun.clear()
                begun += rest
            pass_on(bytes(begun) if begun else None)
            pass_on(None)

    threading.Thread(target=read, name="stdin", daemon=True).start()
    while (line := await lines.get()) is not None:
        if len(line) > max_bytes:
            raise TooLarge(f"A message has more than {max_bytes} bytes.", "Send less at once.", max=max_bytes)
        yield line


class LineWriter:
    """Writes whole lines to a file, in the order in which they are given, one at a time."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lock = asyncio.Lock()
        self._lines: queue.SimpleQueue[tuple[bytes, asyncio.Future[None]]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    async def write(self, line: bytes) -> None:
        """Write a line and return when it is written.

        Raises:
            OSError: the file cannot be written any more, such as a pipe without a reader.
        """
        async with self._lock:
            loop = asyncio.get_running_loop()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, args=(loop,), name="stdout", daemon=True)
                self._thread.start()
            written: asyncio.Future[None] = loop.create_future()
            self._lines.put((line + b"\n", written))
            await written

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        while True:
            line, written = self._lines.get()
            error: OSError | None = None
            try:
                _write_all(self._fd, line)
            except OSError as problem:
                error = problem
            try:
                loop.call_soon_threadsafe(_settle, written, error)
            except RuntimeError:  # the loop is closed
                return


def _write_all(fd: int, content: bytes) -> None:
    while content:
        content = content[os.write(fd, content) :]


def _settle(written: asyncio.Future[None], error: OSError | None) -> None:
    if written.done():  # it is not waited for any more
        return
    if error is None:
        written.set_result(None)
    else:
        written.set_exception(error)
