"""Servers that lead elsewhere, that drip, and that do not follow the protocol."""

from __future__ import annotations

import asyncio
import json
import re
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2
import pytest

from antiphon.errors import ToolFailed
from antiphon.mcp import http
from antiphon.mcp.http import RefusedAddress, create_http_client
from support.mcp_servers import describe_scripted_server, open_client, run_http_server, wait_until

pytestmark = [pytest.mark.anyio, pytest.mark.sqlite_only, pytest.mark.requirement("M1", "AT18")]

ADDRESSES = {
    "server.example": ["93.184.216.34"],
    "inside.example": ["93.184.216.34", "10.0.0.1"],
    "localhost": ["93.184.216.34"],
    "127.0.0.1": ["127.0.0.1"],
    "169.254.169.254": ["169.254.169.254"],
}


@pytest.fixture
def resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    async def resolve(host: str, port: int) -> list[str]:
        return ADDRESSES[host]

    monkeypatch.setattr(http, "resolve_host", resolve)


@pytest.mark.parametrize(
    "target",
    [
        "http://169.254.169.254/latest/meta-data",
        "https://inside.example/token",
        "http://127.0.0.1:9/authorize",
    ],
)
async def test_a_public_server_leads_nowhere_inside(resolved: None, target: str) -> None:
    """Such as by the address of its authorization server: all of a host's addresses must be public."""
    tls = httpx2.create_ssl_context()
    async with create_http_client("https://server.example/mcp", tls, answer_timeout_seconds=5) as client:
        with pytest.raises(RefusedAddress, match="not on the public internet"):
            await client.get(target)


async def test_a_server_with_a_local_address_among_public_ones_leads_nowhere_inside(resolved: None) -> None:
    """Its owner decides what its name stands for, and could make it look local."""
    tls = httpx2.create_ssl_context()
    async with create_http_client("https://inside.example/mcp", tls, answer_timeout_seconds=5) as client:
        with pytest.raises(RefusedAddress, match="not on the public internet"):
            await client.get("http://127.0.0.1:9/token")


async def test_a_server_is_local_if_its_answers_came_from_there(resolved: None) -> None:
    """What its name is looked up as later does not count."""
    async with run_http_server() as server, run_http_server() as other:
        tls, url = httpx2.create_ssl_context(), server.url.replace("127.0.0.1", "localhost")
        async with create_http_client(url, tls, answer_timeout_seconds=5) as client:
            with pytest.raises(RefusedAddress):
                await client.get(other.url)
            await client.get(url)
            assert (await client.get(other.url)).status_code in (400, 406)


async def test_a_local_server_may_lead_to_a_local_one(resolved: None) -> None:
    async with run_http_server() as other:
        tls = httpx2.create_ssl_context()
        async with create_http_client("http://127.0.0.1:9/mcp", tls, answer_timeout_seconds=5) as client:
            assert (await client.get(other.url)).status_code in (400, 406)


async def test_what_never_ends_is_given_up_and_does_not_disturb_the_next_call(tmp_path: Path) -> None:
    server = describe_scripted_server("misbehaving", timeout=0.5)
    async with open_client(tmp_path, {"s": server, "good": describe_scripted_server("plain")}) as client:
        await client.prepare()
        began = time.monotonic()
        with pytest.raises(ToolFailed, match="did not answer within"):
            await client.call("mcp__s__drip")
        assert time.monotonic() - began < 10
        assert json.loads((await client.call("mcp__good__echo", a=1)).text) == {"a": 1}


async def test_answers_that_are_none_are_errors_of_their_call(tmp_path: Path) -> None:
    servers = {
        "s": describe_scripted_server("misbehaving"),
        "list": describe_scripted_server("wrong_list"),
    }
    async with open_client(tmp_path, servers) as client:
        await client.prepare()
        with pytest.raises(ToolFailed, match="not a result of the protocol"):
            await client.call("mcp__s__wrong")
        assert json.loads((await client.call("mcp__s__echo", a=1)).text) == {"a": 1}
        assert client.states == {"s": "ready", "list": "failed"}
        described = {each["name"]: each for each in client.servers.describe()}
        assert "does not follow the protocol" in described["list"]["reason"]


async def test_a_list_that_takes_long_and_always_changes_is_read_seldom(tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    server = describe_scripted_server("restless", env={"CALLS_FILE": str(calls)})
    async with open_client(tmp_path, {"s": server}) as client:
        await client.prepare()
        began = time.monotonic()
        before = calls.read_text().count("list")
        await wait_until(lambda: calls.read_text().count("list") >= before + 3, "it is read again")
        assert time.monotonic() - began > 2 * 20 * 0.2  # two pauses, and the time that the list took


class EndingStreamsServer:
    """Ends each stream of events at once, and asks for the next one without a pause, with and without an answer due."""

    def __init__(self) -> None:
        self.streams = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                length = re.search(r"content-length: (\d+)", head)
                body = await reader.readexactly(int(length[1]) if length else 0)
                status, kind, content = self._answer(head, body)
                fields = (
                    f"content-type: {kind}\r\ncontent-length: {len(content)}\r\nmcp-session-id: x\r\n\r\n"
                )
                writer.write(f"HTTP/1.1 {status} \r\n{fields}".encode() + content)
                await writer.drain()
        writer.close()

    def _answer(self, head: str, body: bytes) -> tuple[int, str, bytes]:
        if head.startswith("get "):
            self.streams += 1
            return 200, "text/event-stream", b"id: 1\nretry: 0\ndata: \n\n"
        message: dict[str, Any] = json.loads(body) if body else {}
        results: dict[str, Any] = {
            "initialize": {
                "protocolVersion": "2025-06-18",
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "ending", "version": "1"},
            },
            "tools/list": {"tools": [{"name": "t", "inputSchema": {"type": "object"}}]},
        }
        if message.get("method") == "tools/call":
            return 200, "text/event-stream", b"id: 1\nretry: 0\ndata: \n\n"
        if "id" not in message:
            return 202, "text/plain", b""
        result = results.get(message["method"])
        answer: dict[str, Any] = (
            {"result": result} if result else {"error": {"code": -32601, "message": "unknown"}}
        )
        return 200, "application/json", json.dumps({"jsonrpc": "2.0", "id": message["id"], **answer}).encode()


async def test_streams_that_end_at_once_are_opened_again_after_a_pause(tmp_path: Path) -> None:
    ending = EndingStreamsServer()
    server = await asyncio.start_server(ending.serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/mcp"
    async with server, open_client(tmp_path, {"s": {"url": url, "timeout": 2}}) as client:
        await client.prepare()
        began = time.monotonic()
        with pytest.raises(ToolFailed, match="did not answer within 2 s"):
            await client.call("mcp__s__t")
        assert ending.streams >= 4  # they are opened again
        assert ending.streams <= 2 * (time.monotonic() - began) + 4
