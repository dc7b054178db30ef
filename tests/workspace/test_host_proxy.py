"""The proxy of a sandbox: what it passes on, what it refuses with which words, and what it bounds."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from antiphon.host_rules import HostRules
from antiphon.workspace.keeper import host_proxy
from antiphon.workspace.keeper.host_proxy import HostProxy, ProxyTimeouts, RequestFailed, parse_request
from support.keepers import wait_until_true

pytestmark = pytest.mark.anyio

BOUND_SECONDS = 20.0
PUBLIC_ADDRESS = "93.184.216.34"


@asynccontextmanager
async def serving() -> AsyncGenerator[tuple[int, list[bytes]]]:
    """A server on the loopback that answers each request with `hello`, and what it was sent."""
    received: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        received.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1], received


@asynccontextmanager
async def proxying(
    *patterns: str, addresses: Sequence[str] = ("127.0.0.1",), timeouts: ProxyTimeouts | None = None
) -> AsyncGenerator[tuple[HostProxy, int]]:
    async def resolve(host: str, port: int) -> Sequence[str]:
        return [host] if host[0].isdigit() else addresses

    proxy = HostProxy(HostRules(patterns), resolver=resolve, timeouts=timeouts)
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    await proxy.start(listener)
    try:
        yield proxy, port
    finally:
        proxy.close()


async def exchange(port: int, request: bytes) -> bytes:
    async with asyncio.timeout(BOUND_SECONDS):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request)
        answer = await reader.read()
        writer.close()
        return answer


def build_get(address: str, *headers: str) -> bytes:
    return "\r\n".join([f"GET {address} HTTP/1.1", *headers, "", ""]).encode()


async def test_a_request_goes_to_a_listed_host_under_its_own_name() -> None:
    async with serving() as (server, received), proxying(f"127.0.0.1:{server}") as (proxy, port):
        answer = await exchange(
            port,
            build_get(
                f"http://127.0.0.1:{server}/a?b#c",
                "Host: other.example",
                "Proxy-Authorization: x",
                "Accept: */*",
            ),
        )
        assert answer.endswith(b"\r\n\r\nhello")
        assert received == [
            f"GET /a?b HTTP/1.1\r\nHost: 127.0.0.1:{server}\r\nConnection: close\r\nAccept: */*\r\n\r\n".encode()
        ]
        assert not proxy.refused


async def test_a_tunnel_leads_to_a_listed_host() -> None:
    async with serving() as (server, received), proxying(f"127.0.0.1:{server}") as (_, port):
        request = f"CONNECT 127.0.0.1:{server} HTTP/1.1\r\n\r\n".encode() + b"GET / HTTP/1.1\r\n\r\n"
        answer = await exchange(port, request)
        assert answer.startswith(b"HTTP/1.1 200 Connection established\r\n\r\nHTTP/1.1 200 OK")
        assert received == [b"GET / HTTP/1.1\r\n\r\n"]


@pytest.mark.parametrize(
    "target", ["other.example:443", "169.254.169.254:80", "127.0.0.1:1", "[::1]:80", "listed.example:22"]
)
async def test_a_host_that_is_not_listed_is_refused_with_the_key_to_change(target: str) -> None:
    async with proxying("listed.example") as (proxy, port):
        for request in (f"CONNECT {target} HTTP/1.1\r\n\r\n".encode(), build_get(f"http://{target}/")):
            answer = (await exchange(port, request)).decode()
            assert answer.startswith("HTTP/1.1 403 Forbidden\r\n")
            assert f"the operator can add '{target}' to 'agents.defaults.sandbox.allowHosts'" in answer
        assert list(proxy.refused) == [target]


async def test_a_listed_name_cannot_be_pointed_at_this_machine() -> None:
    async with serving() as (server, received):
        for pattern in (f"listed.example:{server}", f"*.listed.example:{server}"):
            host = pattern.replace("*", "www").partition(":")[0]
            async with proxying(pattern) as (proxy, port):
                answer = await exchange(port, build_get(f"http://{host}:{server}/"))
                assert answer.startswith(b"HTTP/1.1 403"), answer
                assert b"has an address that is not public and not listed" in answer
                assert len(proxy.refused) == 1
        assert received == []


async def test_the_address_that_was_checked_is_the_one_that_is_used() -> None:
    async with serving() as (server, _):
        answers = [["127.0.0.1"], [PUBLIC_ADDRESS]]

        async def resolve(_host: str, _port: int) -> Sequence[str]:
            return answers.pop(0)

        rules = HostRules([f"listed.example:{server}", f"127.0.0.1:{server}"])
        proxy, listener = HostProxy(rules, resolver=resolve), socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        await proxy.start(listener)
        answer = await exchange(port, build_get(f"http://listed.example:{server}/"))
        assert answer.endswith(b"hello")
        assert answers == [[PUBLIC_ADDRESS]], "the name was resolved twice"
        proxy.close()


@pytest.mark.parametrize(
    "head",
    [
        b"GET / HTTP/1.1",
        b"GET https://a.example/ HTTP/1.1",
        b"GET ftp://a.example/ HTTP/1.1",
        b"GET http://user@a.example/ HTTP/1.1",
        b"GET http:///x HTTP/1.1",
        b"GET http://a.example:x/ HTTP/1.1",
        b"CONNECT a.example HTTP/1.1",
        b"CONNECT a.example:443 HTTP/2",
        b"CONNECT a.example:443 HTTP/1.1 x",
        b"get http://a.example/ HTTP/1.1",
        b"GET http://a.example/ HTTP/1.1\r\nnot a header",
        b"GET http://a.example/ HTTP/1.1\r\nA: b\r\n folded: c",
        b"GET http://a.example/ HTTP/1.1\r\nHost : b",
        b"\xff\xfe",
    ],
)
def test_what_is_no_request_for_a_proxy_is_refused(head: bytes) -> None:
    with pytest.raises(RequestFailed, match="The request is not valid"):
        parse_request(head + b"\r\n\r\n")


async def test_headers_time_and_connections_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_proxy, "MAX_CONNECTIONS_PER_PROXY", 2)
    short = ProxyTimeouts(head_seconds=0.05, idle_seconds=0.05)
    async with proxying(timeouts=short) as (_, port):
        assert (await exchange(port, b"GET http://a.example/")).startswith(b"HTTP/1.1 408")
        long = build_get("http://a.example/", "A: " + "a" * host_proxy.MAX_HEAD_BYTES)
        assert (await exchange(port, long)).startswith(b"HTTP/1.1 431")

    async def stay(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.wait_for(_reader.read(), BOUND_SECONDS)
        writer.close()

    async with await asyncio.start_server(stay, "127.0.0.1", 0) as server:
        silent = server.sockets[0].getsockname()[1]
        tunnel = f"CONNECT 127.0.0.1:{silent} HTTP/1.1\r\n\r\n".encode()
        async with proxying(f"127.0.0.1:{silent}", timeouts=short) as (_, port):
            assert (await exchange(port, tunnel)).endswith(b"established\r\n\r\n"), (
                "an idle tunnel stays open"
            )
        async with proxying(f"127.0.0.1:{silent}") as (proxy, port):
            opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
            for reader, writer in opened:
                writer.write(tunnel)
                await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), BOUND_SECONDS)
            assert (await exchange(port, tunnel)).startswith(b"HTTP/1.1 503")
            proxy.close()
            for reader, writer in opened:
                assert await asyncio.wait_for(reader.read(), BOUND_SECONDS) == b"", (
                    "a tunnel outlives its proxy"
                )
                writer.close()


async def test_ends_that_do_not_read_leave_no_descriptor_open() -> None:
    """Else one command could use up those of all commands, and an upload would outlive its command."""
    told = asyncio.Event()

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        with contextlib.suppress(OSError):
            while True:
                writer.write(b"x" * host_proxy.CHUNK_BYTES)
                await writer.drain()
        writer.transport.abort()
        told.set()

    async with (
        await asyncio.start_server(flood, "127.0.0.1", 0) as server,
        proxying(
            f"127.0.0.1:{server.sockets[0].getsockname()[1]}", timeouts=ProxyTimeouts(idle_seconds=0.2)
        ) as (_, port),
    ):
        before = count_descriptors()
        with socket.create_connection(("127.0.0.1", port)) as silent:
            flooding = server.sockets[0].getsockname()[1]
            silent.sendall(build_get(f"http://127.0.0.1:{flooding}/"))
            await asyncio.wait_for(told.wait(), BOUND_SECONDS)
            await wait_until_true(
                lambda: has_fewer_descriptors(before + 2)
            )  # with the connection of this test


async def test_a_long_answer_arrives_whole_although_it_is_read_slowly() -> None:
    body = b"0123456789abcdef" * 2**18

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(body)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        host = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with proxying(host) as (_, port), asyncio.timeout(BOUND_SECONDS):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
            writer.write(build_get(f"http://{host}/"))
            received = b""
            while part := await reader.read(4096):
                received += part
            writer.close()
            assert received == body


def count_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def has_fewer_descriptors(limit: int) -> bool:
    return count_descriptors() < limit


async def test_a_host_that_cannot_be_reached_is_said_so() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        closed = free.getsockname()[1]
        async with proxying(f"127.0.0.1:{closed}") as (_, port):
            answer = await exchange(port, build_get(f"http://127.0.0.1:{closed}/"))
            assert answer.startswith(b"HTTP/1.1 502")
            assert b"refused the connection" in answer
