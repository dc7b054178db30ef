"""Parses server-sent events from bytes; it neither interprets nor limits them."""

from __future__ import annotations

from collections.abc import Generator


class UnreadableStream(Exception):
    """The stream is malformed; the text says why."""


class EventStreamParser:
    """Extracts the data of server-sent events from arbitrarily split pieces."""

    def __init__(self) -> None:
        self.has_events = False
        self._rest = bytearray()
        self._data: list[bytearray] = []

    def feed(self, piece: bytes) -> Generator[bytes]:
        """Yields the events that this piece completes."""
        self._rest += piece
        if b"\n" in piece:
            *lines, self._rest = self._rest.split(b"\n")
            yield from filter(None, map(self._complete_event, lines))

    def _complete_event(self, line: bytearray) -> bytes | None:
        """The event completed by this line, if any."""
        text = line.removesuffix(b"\r")
        if text.startswith(b"data:"):
            self._data.append(text[5:].removeprefix(b" "))
        if text or not self._data:
            return None
        data, self._data = b"\n".join(self._data), []
        self.has_events = True
        return data
