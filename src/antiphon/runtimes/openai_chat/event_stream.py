"""Server-sent events out of bytes; what their data means, and how many there may be, is not known here."""

from __future__ import annotations

from collections.abc import Generator


class UnreadableStream(Exception):
    """The stream is not what it should be; the text says why."""


class EventStreamParser:
    """The data of server-sent events, out of pieces that are cut anywhere."""

    def __init__(self) -> None:
        self.has_events = False
        self._rest = bytearray()
        self._data: list[bytearray] = []

    def feed(self, piece: bytes) -> Generator[bytes]:
        """The events that this piece completes."""
        self._rest += piece
        if b"\n" in piece:
            *lines, self._rest = self._rest.split(b"\n")
            yield from filter(None, map(self._complete_event, lines))

    def _complete_event(self, line: bytearray) -> bytes | None:
        """The event that ends with this line, if one does."""
        text = line.removesuffix(b"\r")
        if text.startswith(b"data:"):
            self._data.append(text[5:].removeprefix(b" "))
        if text or not self._data:
            return None
        data, self._data = b"\n".join(self._data), []
        self.has_events = True
        return data
