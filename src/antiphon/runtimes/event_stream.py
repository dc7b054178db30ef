"""Server-sent events out of bytes; what their data means is not known here."""

from __future__ import annotations

from collections.abc import Generator

LONGEST_EVENT = 16 * 1024 * 1024
LONGEST_ANSWER = 64 * 1024 * 1024


class Unreadable(Exception):
    """The stream is not what it should be; the text says why."""


class Events:
    """The data of server-sent events, out of pieces that are cut anywhere."""

    def __init__(self) -> None:
        self.any = False
        self._rest = bytearray()
        self._data: list[bytearray] = []
        self._held = 0
        self._seen = 0

    def of(self, piece: bytes) -> Generator[bytes]:
        """The events that this piece completes."""
        self._seen += len(piece)
        self._rest += piece
        if b"\n" in piece:
            *lines, self._rest = self._rest.split(b"\n")
            yield from filter(None, map(self._completed, lines))
        if self._held + len(self._rest) > LONGEST_EVENT:
            raise Unreadable(f"a piece of the stream is longer than {LONGEST_EVENT} bytes")
        if self._seen > LONGEST_ANSWER:
            raise Unreadable(f"the answer is longer than {LONGEST_ANSWER} bytes")

    def _completed(self, line: bytearray) -> bytes | None:
        """The event that ends with this line, if one does."""
        text = line.removesuffix(b"\r")
        if text.startswith(b"data:"):
            self._data.append(text[5:].removeprefix(b" "))
            self._held += len(text)
        if text or not self._data:
            return None
        data, self._data, self._held = b"\n".join(self._data), [], 0
        self.any = True
        return data
