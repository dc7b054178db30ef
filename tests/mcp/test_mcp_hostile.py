"""Servers that lead elsewhere, that drip, and that do not follow the protocol."""

from __future__ import annotations

import json
import time
from pathlib import Path

import httpx2
import pytest

from antiphon.errors import ToolFailed
from antiphon.mcp import http
from antiphon.mcp.http import RefusedAddress, create_http_client
from support.mcp_servers import describe_scripted_server, open_client, run_http_server

pytestmark = [pytest.mark.anyio, pytest.mark.sqlite_only, pytest.mark.requirement("M1", "AT18")]

ADDRESSES = {
    "server.example": ["93.184.216.34"],
    "inside.example": ["93.184.216.34", "10.0.0.1"],
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
