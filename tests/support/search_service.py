"""A search service over HTTP, which answers as SearXNG or as Brave Search, depending on the path."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, urlsplit


@dataclass(frozen=True)
class SearchRequest:
    path: str
    query: dict[str, list[str]]
    headers: dict[str, str]


@dataclass
class SearchService:
    results: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    status: int = 200
    body: bytes | None = None
    """Instead of the results."""
    requests: list[SearchRequest] = field(default_factory=list[SearchRequest])
    url: str = ""

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[SearchService]:
        server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
        address = urlsplit(first.split()[1])
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        self.requests.append(SearchRequest(address.path, parse_qs(address.query), headers))
        is_brave = address.path.startswith("/res/")
        answer = {"web": {"results": self.results}} if is_brave else {"results": self.results}
        body = json.dumps(answer).encode() if self.body is None else self.body
        location = "location: /elsewhere\r\n" if self.status == 302 else ""
        head = (
            f"HTTP/1.1 {self.status} X\r\n{location}content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        writer.write(head.encode() + body)
        await writer.drain()
        writer.close()
