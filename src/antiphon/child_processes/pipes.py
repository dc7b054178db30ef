"""The pipes of a child process: bounded lines in, writes that never block the event loop, and its error output."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from antiphon.child_processes.text import clean_text

MAX_LINE_BYTES = 16 * 1024 * 1024  # of one message
WRITE_TIMEOUT_SECONDS = 30.0
READ_BYTES = 256 * 1024
MAX_KEPT_ERROR_BYTES = 4096
MAX_SHOWN_ERROR_CHARACTERS = 300
MAX_SEARCHED_ERROR_LINES = 20
_ERROR_LINE_PATTERN = re.compile(
    r"(?!\s).*?(error\b|exception\b|\b(fatal|failed|cannot|can't|could not|not found|denied|panic(ked)?)\b)",
    re.IGNORECASE,
)


class LineTooLong(Exception):
    """A program sent a line of more than `MAX_LINE_BYTES`."""


class ErrorOutput:
    """The end of what a program has printed to its error output, which shows why it failed."""

    def __init__(self) -> None:
        self._kept = b""

    def append(self, data: bytes) -> None:
        self._kept = (self._kept + data)[-MAX_KEPT_ERROR_BYTES:]

    async def keep(self, stderr: asyncio.StreamReader) -> None:
        """Read until the program closes it."""
        while data := await stderr.read(READ_BYTES):
            self.append(data)

    @property
    def telling_line(self) -> str:
        """The first of the last lines that names an error, or else the last line.

        Programs tend to end with advice. Indented lines quote code.
        """
        text = self._kept.decode(errors="replace")
        if len(self._kept) == MAX_KEPT_ERROR_BYTES:
            text = text.partition("\n")[2] or text  # the first line may be cut
        lines = text.strip().splitlines()[-MAX_SEARCHED_ERROR_LINES:]
        found = next((line for line in lines if _ERROR_LINE_PATTERN.match(line)), lines[-1] if lines else "")
        return clean_text(found, MAX_SHOWN_ERROR_CHARACTERS)


@asynccontextmanager
async def open_pipe(descriptor: int) -> AsyncGenerator[asyncio.StreamReader]:
    """Read from a descriptor, and close it at the end."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=READ_BYTES)
    transport, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(descriptor, "rb", buffering=0)
    )
    try:
        yield reader
    finally:
        transport.close()


async def read_lines(reader: asyncio.StreamReader) -> AsyncGenerator[bytes]:
    """Yield each complete, non-blank line without its line ending.

    Raises:
        LineTooLong: a line is too long.
    """
    unfinished: list[bytes] = []
    size = 0
    while data := await reader.read(READ_BYTES):
        *lines, rest = data.split(b"\n")
        for line in lines:
            whole = b"".join([*unfinished, line])
            unfinished, size = [], 0
            if whole.strip():
                yield whole
        unfinished.append(rest)
        size += len(rest)
        if size > MAX_LINE_BYTES:
            raise LineTooLong


async def write_all(descriptor: int, data: bytes) -> None:
    """Write to a descriptor that does not block.

    Raises:
        TimeoutError: nothing reads it.
        OSError: it is closed.
    """
    loop = asyncio.get_running_loop()
    left = memoryview(data)
    async with asyncio.timeout(WRITE_TIMEOUT_SECONDS):
        while left:
            try:
                left = left[os.write(descriptor, left) :]
            except BlockingIOError:
                writable = loop.create_future()
                loop.add_writer(descriptor, lambda future=writable: future.done() or future.set_result(None))
                try:
                    await writable
                finally:
                    loop.remove_writer(descriptor)


def open_memory_file(data: bytes) -> int:
    """Return a descriptor from which a program reads `data`."""
    descriptor = os.memfd_create("antiphon")
    with open(descriptor, "wb", closefd=False) as file:
        file.write(data)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor
