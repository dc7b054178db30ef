"""The real client of the `mcp` library, connected to a gateway in either generation of the specification."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Literal

import httpx2
from mcp.client.client import Client
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client

from support.app_fixture import BOUND

Json = dict[str, Any]
Generation = Literal["2025-11-25", "2026-07-28"]
GENERATIONS: tuple[Generation, ...] = ("2025-11-25", "2026-07-28")


def _mode(generation: Generation) -> str:
    return "legacy" if generation == "2025-11-25" else "auto"


@asynccontextmanager
async def connect_mcp(
    url: str, token: str | None, generation: Generation = "2026-07-28", *, session: str | None = None
) -> AsyncGenerator[Client]:
    """Connect to `/mcp` of a gateway, at its address for WebSockets or HTTP."""
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    if session is not None:
        headers["X-Antiphon-Session-Key"] = session
    async with httpx2.AsyncClient(headers=headers, timeout=BOUND) as http:
        transport = streamable_http_client(f"{url.replace('ws://', 'http://')}/mcp", http_client=http)
        async with Client(transport, mode=_mode(generation)) as client:
            yield client


@asynccontextmanager
async def start_mcp(
    command: list[str], environ: Mapping[str, str], generation: Generation = "2026-07-28"
) -> AsyncGenerator[Client]:
    """Start a server on standard input and output, as programs do that are configured with a command."""
    server = StdioServerParameters(command=command[0], args=command[1:], env=dict(environ))
    async with Client(stdio_client(server), mode=_mode(generation)) as client:
        yield client


async def use_tool(client: Client, tool: str, **arguments: Any) -> Json:
    """Call a tool; return its answer, which is the same as text and as data."""
    result = await client.call_tool(tool, arguments)
    [content] = result.content
    assert content.type == "text"
    assert result.structured_content is not None
    data = json.dumps(result.structured_content, separators=(",", ":"), ensure_ascii=False)
    assert content.text == data  # byte for byte
    return result.structured_content
