"""Formats the output of a command for a model: all of it, or its beginning and its end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import NamedTuple

from antiphon.engine.toolbox import OutputListener
from antiphon.errors import AntiphonError
from antiphon.workspace.keeper_client import OutputPart

MAX_SHOWN_CHARACTERS = 29_000  # with the state of the command, a result has at most 30,000
MAX_BYTES_PER_CHARACTER = 4
READ_BYTES = 256 * 1024
MAX_PROGRESS_CHARACTERS = 2000
FIRST_PROGRESS_SECONDS, MAX_PROGRESS_SECONDS = 0.5, 10.0  # per update about a running command
PROGRESS_INTERVAL_FACTOR = 1.3

PartReader = Callable[[int, int], Awaitable[OutputPart]]
"""Returns kept output from an offset on, up to a number of bytes."""


class ShownOutput(NamedTuple):
    text: str
    is_whole: bool


def decode_output(data: bytes) -> str:
    """Return output as text that every store and model accepts; bytes that are not text become `?`."""
    return data.decode("utf-8", "replace").replace("\ufffd", "?").replace("\0", "?")


async def read_all(read: PartReader, total: int, start: int = 0) -> bytes:
    """Return all kept output from `start` on, with a line in place of what was not kept."""
    parts: list[bytes] = []
    offset = start
    while offset < total:
        part = await read(offset, min(READ_BYTES, total - offset))
        if not part.data:
            break
        if part.offset > offset:
            parts.append(format_gap(part.offset - offset))
        parts.append(part.data)
        offset = part.offset + len(part.data)
    if offset < total:
        parts.append(format_gap(total - offset))
    return b"".join(parts)


async def read_shown(read: PartReader, total: int, most: int = MAX_SHOWN_CHARACTERS) -> ShownOutput:
    """Return the output if it has at most `most` characters, else its beginning and its end."""
    half_bytes = MAX_BYTES_PER_CHARACTER * most // 2
    if total <= 2 * half_bytes:
        return cut_middle(decode_output(await read_all(read, total)), most)
    head = await read_all(read, half_bytes)
    tail = await read_all(read, total, total - half_bytes)
    left_out = f"\n[… about {total - most} of {total} bytes left out …]\n"
    half = (most - len(left_out)) // 2
    return ShownOutput(decode_output(head)[:half] + left_out + decode_output(tail)[-half:], is_whole=False)


async def show_progress(
    measure: Callable[[], Awaitable[int]], read: PartReader, listener: OutputListener
) -> None:
    """Show the end of a growing output until cancelled, less often the longer it takes."""
    shown, seconds = 0, FIRST_PROGRESS_SECONDS
    with suppress(AntiphonError, OSError, TimeoutError):  # the result will have all of it
        while True:
            await asyncio.sleep(seconds)
            seconds = min(seconds * PROGRESS_INTERVAL_FACTOR, MAX_PROGRESS_SECONDS)
            if listener.is_listening() and (total := await measure()) > shown:
                start = max(0, total - MAX_BYTES_PER_CHARACTER * MAX_PROGRESS_CHARACTERS)
                part = await read(start, total - start)
                listener.show(decode_output(part.data)[-MAX_PROGRESS_CHARACTERS:], total)
                shown = total


def cut_middle(text: str, most: int) -> ShownOutput:
    """Return the text, or its beginning and its end if it has more than `most` characters."""
    if len(text) <= most:
        return ShownOutput(text, is_whole=True)
    left_out = f"\n[… {len(text) - most} of {len(text)} characters left out …]\n"
    half = (most - len(left_out)) // 2
    return ShownOutput(text[:half] + left_out + text[-half:], is_whole=False)


def format_gap(count: int) -> bytes:
    return f"\n[… {count} bytes were not kept …]\n".encode()
