"""What holds for every HTTP door: who gets in, how errors look, how much is read, and how the gateway is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

import msgspec
import pytest

from antiphon.clock import ManualClock
from antiphon.errors import StoreError
from antiphon.gateway.http import limits as heads
from antiphon.gateway.http import responses
from antiphon.runtimes import Prompt
from support.app_fixture import BOUND, MAIN
from support.gateway_http import HttpGatewayFixture, open_http_gateway
from support.gateway_ws import GatewayFixture, open_gateway

pytestmark = pytest.mark.anyio

HISTORY = f"/sessions/{quote(MAIN, safe='')}/history"
PROTECTED = [
    ("GET", HISTORY), ("POST", "/sessions/x/kill"), ("POST", "/tools/invoke"), ("GET", "/metrics"),
    ("GET", "/openapi.json"), ("POST", "/v1/chat/completions"), ("POST", "/v1/responses"), ("GET", "/v1/models"),
    ("POST", "/hooks/agent"), ("POST", "/hooks/wake"),
]  # fmt: skip
WRITING = ("/tools/invoke", "/v1/chat/completions", "/v1/responses")
BODIES = {
    "/tools/invoke": {"tool": "x"},
    "/v1/chat/completions": {"model": "antiphon", "messages": [{"role": "user", "content": "x"}]},
    "/v1/responses": {"model": "antiphon", "input": "x"},
}


@pytest.mark.requirement("W7")
async def test_a_client_without_a_secret_is_refused(http_gateway: HttpGatewayFixture) -> None:
    for method, path in PROTECTED:
        reply = await http_gateway.stranger.request(method, path)
        assert reply.status_code == 401, path
        error = reply.json()["error"]
        assert reply.headers["www-authenticate"] == "Bearer"
        if path.startswith("/v1/"):
            assert error["code"]
        else:
            assert error["message"].startswith("Unauthorized: ")
            assert error["message"].lower().count("unauthorized") == 1
            assert error["type"] == "unauthorized"
        assert reply.headers["x-content-type-options"] == "nosniff"
        assert reply.headers["cache-control"] == "no-store"
        assert reply.headers["referrer-policy"] == "no-referrer"


@pytest.mark.requirement("W7")
async def test_the_token_of_hooks_opens_nothing_else(http_gateway: HttpGatewayFixture) -> None:
    for method, path in PROTECTED[:8]:
        reply = await http_gateway.stranger.request(
            method, path, headers={"Authorization": "Bearer a-hook-token"}
        )
        assert reply.status_code == 401, path


@pytest.mark.requirement("W7")
async def test_a_token_that_may_only_read_changes_nothing_and_one_without_scopes_reads_nothing(
    http_gateway: HttpGatewayFixture,
) -> None:
    await http_gateway.ask("one")
    reader = http_gateway.limited("operator.read")
    assert (await http_gateway.stranger.get(HISTORY, headers=reader)).status_code == 200
    assert (await http_gateway.stranger.get("/metrics", headers=reader)).status_code == 200
    for path in WRITING:
        reply = await http_gateway.stranger.post(path, headers=reader, json=BODIES[path])
        assert reply.status_code == 403, path
    writer = http_gateway.limited("operator.write")
    assert (await http_gateway.stranger.get(HISTORY, headers=writer)).status_code == 200
    reply = await http_gateway.stranger.post(
        "/v1/chat/completions", headers=writer, json=BODIES["/v1/chat/completions"]
    )
    assert reply.status_code == 200


@pytest.mark.requirement("W7")
async def test_pages_of_other_origins_are_refused_even_with_the_token(
    http_gateway: HttpGatewayFixture,
) -> None:
    await http_gateway.ask("one")
    for origin in ("https://evil.example", "null", http_gateway.url.replace("127.0.0.1", "127.evil.com")):
        for method, path in PROTECTED:
            reply = await http_gateway.http.request(method, path, headers={"Origin": origin})
            assert reply.status_code == 403, (origin, path)
    assert (await http_gateway.http.get(HISTORY, headers={"Origin": http_gateway.url})).status_code == 200


@pytest.mark.requirement("W7")
async def test_wrong_secrets_are_counted_over_all_doors_and_then_refused_before_anything_else(
    tmp_path: Path,
) -> None:
    clock = ManualClock()
    async with open_http_gateway(tmp_path, clock=clock) as http_gateway:
        wrong = {"Authorization": "Bearer wrong"}
        for number in range(10):
            path = "/metrics" if number % 2 else HISTORY
            assert (await http_gateway.stranger.get(path, headers=wrong)).status_code == 401
        reply = await http_gateway.stranger.get(
            "/metrics", headers={**wrong, "Origin": "http://evil.example"}
        )
        assert (reply.status_code, reply.json()["error"]["type"]) == (429, "rate_limited")
        assert 0 < int(reply.headers["retry-after"]) <= 60
        assert (await http_gateway.stranger.get("/metrics")).status_code == 429
        assert (await http_gateway.http.get("/metrics")).status_code == 200  # the owner is not locked out
        assert (
            await http_gateway.http.get("/metrics", headers={"Origin": "http://evil.example"})
        ).status_code == 403
        clock.advance(seconds=61)
        assert (await http_gateway.stranger.get("/metrics", headers=wrong)).status_code == 401
        assert "antiphon_auth_failures_total 11.0" in (await http_gateway.http.get("/metrics")).text


@pytest.mark.requirement("W7")
async def test_wrong_secrets_of_hooks_are_counted_apart(tmp_path: Path) -> None:
    async with open_http_gateway(tmp_path, mode="password", clock=ManualClock()) as http_gateway:
        hook, password = ({"Authorization": f"Bearer {secret}"} for secret in ("a-hook-token", "a password"))
        for _ in range(10):
            assert (await http_gateway.stranger.post("/hooks/wake", headers=password)).status_code == 401
        assert (
            await http_gateway.stranger.post("/hooks/wake", headers=hook)
        ).status_code == 429  # short: guessable
        assert (await http_gateway.stranger.get("/metrics", headers=password)).status_code == 200


@pytest.mark.requirement("W7")
async def test_a_secret_in_an_address_is_refused(http_gateway: HttpGatewayFixture) -> None:
    for method, path in PROTECTED:
        reply = await http_gateway.http.request(method, f"{path}?token=x")
        assert reply.status_code == 400, path
        assert "Authorization" in reply.json()["error"]["message"]


@pytest.mark.requirement("W7")
async def test_without_credentials_only_this_machines_names_are_answered(tmp_path: Path) -> None:
    async with open_http_gateway(tmp_path, mode="none") as http_gateway:
        assert (await http_gateway.stranger.get("/metrics")).status_code == 200
        for host in ("evil.example", "127.0.0.1.evil.example:80", ""):
            assert (await http_gateway.stranger.get("/metrics", headers={"Host": host})).status_code == 403
        assert (
            await http_gateway.stranger.get("/metrics", headers={"Host": "localhost:1"})
        ).status_code == 200
        assert (
            await http_gateway.stranger.get("/metrics", headers={"Origin": "http://evil.example"})
        ).status_code == 403


@pytest.mark.requirement("W7")
async def test_what_a_proxy_would_say_is_not_believed(http_gateway: HttpGatewayFixture) -> None:
    headers = {"X-Forwarded-For": "127.0.0.1", "X-Forwarded-User": "owner", "Forwarded": "for=127.0.0.1"}
    assert (await http_gateway.stranger.get("/metrics", headers=headers)).status_code == 401


@pytest.mark.requirement("W5")
async def test_a_method_that_is_not_taken_is_answered_with_those_that_are(
    http_gateway: HttpGatewayFixture,
) -> None:
    for method, path in [
        ("DELETE", HISTORY),
        ("GET", "/tools/invoke"),
        ("POST", "/healthz"),
        ("PUT", "/v1/models"),
    ]:
        reply = await http_gateway.http.request(method, path)
        assert reply.status_code == 405, path
        assert reply.json()["error"]["type"] == "method_not_allowed"
        assert method not in reply.headers["allow"].split(", ")
    assert (await http_gateway.http.options(HISTORY)).status_code == 405


@pytest.mark.requirement("W5")
async def test_an_unknown_path_is_not_found_without_credentials_too(http_gateway: HttpGatewayFixture) -> None:
    for path in ("/nothing", "/sessions", "/sessions/x", "/v1/embeddings", "/hooks", "/hooks/other", "/../x"):
        reply = await http_gateway.stranger.get(path)
        assert reply.status_code == 404, path
        assert "unauthorized" not in reply.text.lower()
        assert reply.headers["x-content-type-options"] == "nosniff"


@pytest.mark.requirement("W5")
async def test_a_body_is_refused_before_it_is_read_when_it_says_that_it_is_too_large(
    http_gateway: HttpGatewayFixture,
) -> None:
    host, _, port = http_gateway.url.removeprefix("http://").partition(":")
    for path in ("/tools/invoke", "/hooks/wake", "/v1/responses"):
        secret = "Bearer a-hook-token" if path == "/hooks/wake" else http_gateway.owner["Authorization"]
        reader, writer = await asyncio.open_connection(host, int(port))
        head = (
            f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: {secret}\r\nContent-Length: 99999999\r\n\r\n"
        )
        writer.write(head.encode())
        status = await asyncio.wait_for(reader.readline(), BOUND)  # nothing of the body was sent
        assert b" 413 " in status
        writer.close()


@pytest.mark.requirement("W5")
async def test_a_body_that_does_not_say_how_large_it_is_is_cut_off(http_gateway: HttpGatewayFixture) -> None:
    async def endless() -> AsyncGenerator[bytes]:
        for _ in range(100):
            yield b" " * 100_000

    reply = await http_gateway.http.post("/tools/invoke", content=endless())
    assert (reply.status_code, reply.json()["error"]["type"]) == (413, "too_large")


@pytest.mark.requirement("W5")
async def test_a_body_that_does_not_come_is_not_waited_for_for_ever(
    http_gateway: HttpGatewayFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(responses, "BODY_TIMEOUT_SECONDS", 0.05)
    host, _, port = http_gateway.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    secret = http_gateway.owner["Authorization"]
    head = f"POST /tools/invoke HTTP/1.1\r\nHost: x\r\nAuthorization: {secret}\r\nContent-Length: 9\r\n\r\n"
    writer.write(head.encode())
    assert b" 400 " in await asyncio.wait_for(reader.readline(), BOUND)
    writer.close()


@pytest.mark.requirement("W5")
async def test_a_body_that_is_not_what_it_should_be_is_refused(http_gateway: HttpGatewayFixture) -> None:
    texts = [
        b"",
        b"{",
        b"[]",
        b'"x"',
        b'{"tool": 1}',
        b'{"tool": "\xff"}',
        b"[" * 100_000,
        b'{"tool":"x","y":1}',
    ]
    for body in texts:
        reply = await http_gateway.http.post("/tools/invoke", content=body)
        assert (reply.status_code, reply.json()["error"]["type"]) == (400, "invalid_request"), body[:20]


@pytest.mark.requirement("W5")
async def test_a_body_of_another_type_is_refused(http_gateway: HttpGatewayFixture) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        reply = await http_gateway.http.post("/tools/invoke", content=b"{}", headers={"Content-Type": kind})
        assert reply.status_code == 400
        assert kind in reply.json()["error"]["message"]
    for kind in ("application/json; charset=utf-8", "application/vnd.x+json"):
        reply = await http_gateway.http.post(
            "/tools/invoke", content=b'{"tool":"x"}', headers={"Content-Type": kind}
        )
        assert reply.status_code == 404


@pytest.mark.requirement("W5")
async def test_an_unexpected_error_is_logged_and_reported_without_details(
    http_gateway: HttpGatewayFixture, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(*_: object) -> None:
        raise RuntimeError("a secret detail")

    monkeypatch.setattr(http_gateway.app.operations.transcripts, "read", broken)
    monkeypatch.setattr(http_gateway.app.operations.messages, "submit", broken)
    reply = await http_gateway.http.get(HISTORY)
    assert (reply.status_code, reply.json()["error"]["type"]) == (500, "internal")
    assert "secret detail" not in reply.text
    assert "a secret detail" in caplog.text
    reply = await http_gateway.http.post("/v1/responses", json=BODIES["/v1/responses"])
    assert (reply.status_code, reply.json()["error"]["code"]) == (500, "internal")


@pytest.mark.requirement("W5")
async def test_health_and_readiness_need_no_credentials(
    http_gateway: HttpGatewayFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in ("/healthz", "/health"):
        assert (await http_gateway.stranger.get(path)).json() == {"ok": True, "status": "live"}
    for path in ("/readyz", "/ready"):
        assert (await http_gateway.stranger.get(path)).json() == {"ready": True}
    assert (await http_gateway.stranger.head("/healthz")).status_code == 200

    async def full(*_: object) -> None:
        raise StoreError("The disk is full.", "Make room.")

    monkeypatch.setattr(http_gateway.app.operations.sessions, "list", full)
    http_gateway.state.closing.set()
    reply = await http_gateway.stranger.get("/readyz")
    assert reply.status_code == 503
    assert reply.json() == {"ready": False, "failing": ["closing", "store"]}
    assert (await http_gateway.stranger.get("/healthz")).status_code == 200


@pytest.mark.requirement("W5")
async def test_the_root_says_what_this_is(http_gateway: HttpGatewayFixture) -> None:
    assert (await http_gateway.stranger.get("/")).json()["name"] == "antiphon"


@pytest.mark.requirement("W5")
async def test_figures_count_what_happened_and_name_nothing_that_a_client_wrote(
    http_gateway: HttpGatewayFixture,
) -> None:
    await http_gateway.ask("one")
    await http_gateway.ask("two", "agent:main:telegram:group:private")
    await http_gateway.http.get("/sessions/agent:main:telegram:group:private/history")
    await http_gateway.http.get("/private-path")
    await http_gateway.http.request("PURGE", "/healthz")
    text = (await http_gateway.http.get("/metrics")).text
    for line in (
        'antiphon_runs_total{outcome="ok"} 2.0',
        "antiphon_messages_appended_total 4.0",
        "antiphon_runs_queued 0.0",
        "antiphon_runs_running 0.0",
        "antiphon_sockets 0.0",
        'antiphon_http_requests_total{method="GET",route="/sessions/{key:path}/history",status="200"} 1.0',
        'antiphon_http_requests_total{method="other",route="*",status="404"} 1.0',
        'antiphon_http_requests_total{method="other",route="/healthz",status="405"} 1.0',
    ):
        assert line in text, line
    assert "private" not in text.lower()
    for name in (
        "antiphon_event_loop_lag_seconds",
        "process_resident_memory_bytes",
        "process_start_time_seconds",
    ):
        assert name in text


@pytest.mark.requirement("W5")
async def test_each_gateway_has_its_own_figures(tmp_path: Path) -> None:
    async with open_http_gateway(tmp_path / "a") as one, open_http_gateway(tmp_path / "b") as other:
        await one.ask("one")
        assert 'outcome="ok"' in (await one.http.get("/metrics")).text
        assert 'outcome="ok"' not in (await other.http.get("/metrics")).text


@pytest.mark.requirement("W5")
async def test_what_is_switched_off_is_not_there(tmp_path: Path) -> None:
    async with open_http_gateway(tmp_path, settings={}) as http_gateway:
        for path in ("/v1/chat/completions", "/v1/responses", "/v1/models", "/hooks/agent", "/hooks/wake"):
            reply = await http_gateway.http.post(path, json={})
            assert reply.status_code == 404, path
            error = reply.json()["error"]["message"]
            assert ("hooks.enabled" if "hooks" in path else "gateway.http.endpoints.") in error
            if path.startswith("/v1"):
                assert set(reply.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.requirement("W5")
async def test_the_document_describes_every_route(http_gateway: HttpGatewayFixture) -> None:
    described = (await http_gateway.http.get("/openapi.json")).json()
    assert described["openapi"] == "3.1.0"
    routed = {route.path.replace("{key:path}", "{key}") for route in http_gateway.web.routes}  # pyright: ignore
    aliases = {"/health", "/ready", "/v1/{path:path}", "/{path:path}", "/mcp"}
    assert set(described["paths"]) == routed - aliases
    assert msgspec.json.encode(described)


# --- before a request is one ---


async def _connected(gateway: GatewayFixture) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = gateway.served.url.removeprefix("ws://").partition(":")
    return await asyncio.open_connection(host, int(port))


async def _answer_to(gateway: GatewayFixture, *pieces: bytes) -> bytes:
    """What is said until the gateway hangs up."""
    reader, writer = await _connected(gateway)
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        return await asyncio.wait_for(reader.read(), BOUND)
    except ConnectionError:
        return b""  # hung up while it was still sent
    finally:
        writer.close()


@pytest.mark.requirement("W5")
async def test_a_head_has_a_size(gateway: GatewayFixture) -> None:
    begin = b"GET /healthz HTTP/1.1\r\nHost: x\r\n"
    chunked = b"POST /healthz HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n"
    line = b"X-Y: " + b"y" * 8000 + b"\r\n"
    for pieces in (
        [begin, *[line] * 10],
        [begin + line * 9 + b"\r\n"],
        [begin, b"X-Endless: ", *[b"y" * 8000] * 50],  # what is received at once is not counted
        [b"GET /", *[b"y" * 8000] * 9],
        [b"\r\n" * 8000] * 5,
        [chunked, *[line] * 10],
    ):
        assert b" 200 " not in await _answer_to(gateway, *pieces), pieces[0][:30]
    fits = await _answer_to(gateway, begin, *[line] * 7, b"Connection: close\r\n\r\n")
    assert fits.startswith(b"HTTP/1.1 200 ")


@pytest.mark.requirement("W5")
async def test_a_head_has_a_time(gateway: GatewayFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads, "HEAD_TIMEOUT_SECONDS", 0.05)
    begin = b"GET /healthz HTTP/1.1\r\nHost: x\r\n"
    assert await _answer_to(gateway) == b""
    assert await _answer_to(gateway, begin) == b""
    endless = b"POST /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 99999\r\n\r\n"
    reader, writer = await _connected(gateway)
    writer.write(endless)
    assert b" 405 " in await asyncio.wait_for(reader.readline(), BOUND)
    writer.write(b"what nobody waits for")
    await asyncio.wait_for(reader.read(), BOUND)
    writer.close()


@pytest.mark.requirement("W5")
async def test_who_came_in_time_may_be_answered_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heads, "HEAD_TIMEOUT_SECONDS", 0.05)
    go = asyncio.Event()

    async def agent(prompt: Prompt) -> str:
        await go.wait()
        return "late"

    async with open_gateway(tmp_path, agent) as gateway, gateway.client() as client, gateway.http() as http:
        asking = asyncio.create_task(http.post("/v1/responses", json=BODIES["/v1/responses"]))
        assert await _answer_to(gateway) == b""  # which comes when that time has passed
        go.set()
        assert (await asking).status_code == 200
        await client.settled()


@pytest.mark.requirement("W5")
async def test_there_are_only_so_many_connections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads, "MAX_CONNECTIONS", 3)
    async with open_gateway(tmp_path) as gateway, gateway.client() as client:
        held = [await _connected(gateway) for _ in range(3)]
        assert await asyncio.wait_for(held[0][0].read(), BOUND) == b"", "the oldest makes room"
        async with gateway.http() as http:
            assert (await http.get("/healthz")).status_code == 200
        for _, each in held:
            each.close()
            with suppress(ConnectionError):  # of those that made room
                await each.wait_closed()
        await client.settled()


@pytest.mark.requirement("W5")
async def test_no_more_than_that_are_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads, "MAX_CONNECTIONS", 1)
    async with open_gateway(tmp_path) as gateway, gateway.client() as client:
        reader, writer = await _connected(gateway)
        assert await asyncio.wait_for(reader.read(), BOUND) == b"", "who has authenticated is not hung up on"
        writer.close()
        await client.settled()


@pytest.mark.requirement("W5")
def test_connections_leave_files_for_everything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(heads.resource, "setrlimit", lambda _, limits: asked.append(limits))  # pyright: ignore
    for soft, hard, most, raised in (
        (1024, 1_048_576, 4096, [(4160, 1_048_576)]),
        (1024, 1024, 960, [(1024, 1024)]),
        (65_536, 65_536, 4096, []),
        (heads.resource.RLIM_INFINITY, heads.resource.RLIM_INFINITY, 4096, []),
    ):
        monkeypatch.setattr(heads.resource, "getrlimit", lambda _, limits=(soft, hard): limits)  # pyright: ignore
        assert (heads.determine_max_connections(), asked) == (most, raised)
        asked.clear()
