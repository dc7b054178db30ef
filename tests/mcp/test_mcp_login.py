"""Logins with OAuth at a real authorization server: once by a person, then refreshed across restarts."""

from __future__ import annotations

import asyncio
import json
import re
import signal
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from antiphon.client import Client, Site
from antiphon.errors import McpServerUnavailable
from antiphon.mcp.logins import locate_login_file
from cli.gateways import token, up
from cli.terminal import Program, Terminal
from support.mcp_servers import BOUND, HttpServer, open_client, run_http_server, wait_until
from support.model_provider import Answer, Call, Provider

pytestmark = [pytest.mark.anyio, pytest.mark.sqlite_only, pytest.mark.requirement("M1", "AT18")]


@pytest.fixture
def program(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Program:
    return Program(tmp_path, tmp_path_factory.getbasetemp().parent / "antiphon-bytecode")


@asynccontextmanager
async def run_protected_server(
    calls: Path, *, token_seconds: int = 3600, **variables: str
) -> AsyncGenerator[HttpServer]:
    settings = {"CALLS_FILE": str(calls), "TOKEN_SECONDS": str(token_seconds), **variables}
    async with run_http_server("oauth", **settings) as server:
        yield server


async def log_in(program: Program, *options: str, forges_first: bool = False) -> tuple[int, str, str]:
    """Run `antiphon mcp login` and do what the person's browser does."""
    process = await asyncio.create_subprocess_exec(
        *program.command,
        *("mcp", "login", "s", *options),
        env=program.environ,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    async with asyncio.timeout(BOUND):
        line = (await process.stderr.readline()).decode()
        if found := re.search(r"open: (http\S+)", line):
            async with httpx2.AsyncClient(trust_env=False) as browser:
                page = await browser.get(found[1])
                assert page.status_code == 302, page.text
                back = page.headers["location"]
                assert back.startswith("http://127.0.0.1:")
                if forges_first:  # another program of this machine tries its own code
                    forged = re.sub(r"state=[^&]+", "state=other", re.sub(r"code=[^&]+", "code=evil", back))
                    assert (await browser.get(forged)).status_code == 404
                    assert (await browser.get(back.replace("/callback", "/other"))).status_code == 404
                assert "You can close this window" in (await browser.get(back)).text
        out, err = await process.communicate()
    return process.returncode or 0, out.decode(), line + err.decode()


async def test_a_login_is_stored_privately_and_used_after_a_restart(program: Program, tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    async with run_protected_server(calls) as server:
        servers = {"s": {"url": server.url}}
        program.configure({"mcp": {"servers": servers}})
        tried = program.run("mcp", "test", "--json").json["servers"][0]
        assert (tried["state"], "login" in tried["reason"]) == ("needs_auth", True)
        assert "antiphon mcp login s" in program.run("mcp", "list").out
        async with open_client(program.state, servers) as client:
            await client.prepare()
            assert client.states == {"s": "needs_auth"}
            code, out, err = await log_in(program, forges_first=True)
            assert code == 0 and "Logged in." in out and "mcp__s__add" in out, err
            await client.prepare()  # the next run uses it, without a restart
            assert client.states == {"s": "ready"}
            assert (await client.call("mcp__s__add", a=1, b=2)).text == "3"
        async with open_client(program.state, servers) as client:
            assert (await client.call("mcp__s__add", a=2, b=2)).text == "4"
        file = locate_login_file(program.state, "s")
        assert file.stat().st_mode & 0o777 == 0o600 and file.parent.stat().st_mode & 0o777 == 0o700
        stored = json.loads(file.read_text())["tokens"]
        assert stored["access_token"] not in out + err
        await log_in(program)  # again: the same client, since the same port is used
        assert calls.read_text().splitlines().count("registered") == 1
        assert calls.read_text().splitlines().count("authorized") == 2
        assert program.run("mcp", "remove", "s").code == 0
        assert not file.exists()


async def test_an_expired_token_is_refreshed_after_a_restart_and_only_once(
    program: Program, tmp_path: Path
) -> None:
    """The refresh tokens are valid once, and two gateways' worth of clients use them at the same time."""
    calls = tmp_path / "calls"
    async with run_protected_server(calls, token_seconds=31) as server:  # expires a second from its margin
        servers = {"s": {"url": server.url}}
        program.configure({"mcp": {"servers": servers}})
        assert (await log_in(program))[0] == 0
        file = locate_login_file(program.state, "s")
        login = json.loads(file.read_text())
        file.write_text(json.dumps({**login, "expiresAt": 1}))  # as an hour later
        async with open_client(program.state, servers) as one, open_client(program.state, servers) as two:
            results = await asyncio.gather(
                *(client.call("mcp__s__add", a=1, b=number) for client in (one, two) for number in range(8))
            )
            assert [result.text for result in results] == [str(1 + number) for number in range(8)] * 2
        lines = calls.read_text().splitlines()
        assert lines.count("refreshed") >= 1 and "refused" not in lines
        assert json.loads(file.read_text())["tokens"]["refresh_token"] != login["tokens"]["refresh_token"]


@pytest.mark.parametrize("is_stopped", [False, True])
async def test_a_renewal_is_stored_although_its_call_is_cancelled_or_the_gateway_stops(
    program: Program, tmp_path: Path, is_stopped: bool
) -> None:
    """A refresh token is valid once: what it was exchanged for must not be lost."""
    calls, hold = tmp_path / "calls", tmp_path / "hold"
    async with run_protected_server(calls, HOLD_FILE=str(hold)) as server:
        servers = {"s": {"url": server.url}}
        program.configure({"mcp": {"servers": servers}})
        assert (await log_in(program))[0] == 0
        file = locate_login_file(program.state, "s")
        async with AsyncExitStack() as running:
            client = await running.enter_async_context(open_client(program.state, servers))
            assert (await client.call("mcp__s__add", a=1, b=2)).text == "3"
            login = json.loads(file.read_text())
            hold.touch()
            file.write_text(json.dumps({**login, "expiresAt": 1}))  # as an hour later
            call = asyncio.create_task(client.call("mcp__s__add", a=1, b=2))
            await wait_until(lambda: "refreshed" in calls.read_text(), "the token is exchanged")
            if is_stopped:
                stopping = asyncio.create_task(running.aclose())
                await asyncio.wait([call])
                hold.unlink()
                await stopping
            else:
                call.cancel()
                await asyncio.wait([call])
                hold.unlink()
                assert (await client.call("mcp__s__add", a=1, b=2)).text == "3"
            await asyncio.gather(call, return_exceptions=True)
        async with open_client(program.state, servers) as client:
            assert (await client.call("mcp__s__add", a=2, b=2)).text == "4"
        assert calls.read_text().splitlines().count("refreshed") == 1
        assert "refused" not in calls.read_text()


async def test_a_revoked_token_is_refreshed_and_a_dead_login_is_a_state(
    program: Program, tmp_path: Path
) -> None:
    calls = tmp_path / "calls"
    async with run_protected_server(calls) as server:
        servers = {"s": {"url": server.url}}
        program.configure({"mcp": {"servers": servers}})
        assert (await log_in(program))[0] == 0
        async with open_client(program.state, servers) as client:
            await client.call("mcp__s__revoke", refresh_tokens=False)
            assert (await client.call("mcp__s__add", a=1, b=2)).text == "3"
            assert "refreshed" in calls.read_text()
            await client.call("mcp__s__revoke", refresh_tokens=True)
            with pytest.raises(McpServerUnavailable, match="needs a login"):
                await client.call("mcp__s__add", a=1, b=2)
            with pytest.raises(McpServerUnavailable, match="antiphon mcp login s"):
                await client.call("mcp__s__add", a=1, b=2)
            assert client.states == {"s": "needs_auth"}


async def test_a_login_that_is_not_allowed_keeps_the_earlier_one(program: Program, tmp_path: Path) -> None:
    async with run_protected_server(tmp_path / "calls") as server:
        program.configure({"mcp": {"servers": {"s": {"url": server.url}}}})
        assert (await log_in(program))[0] == 0
        file = locate_login_file(program.state, "s")
        before = file.read_bytes()
        with program.terminal("mcp", "login", "s", "--no-browser") as terminal:
            shown = terminal.expect(r"open: (http\S+)")[1]
            state = re.search(r"state=([^&]+)", shown)
            back = re.search(r"redirect_uri=([^&]+)", shown)
            assert state and back
            terminal.expect("paste its address")
            terminal.type("http://127.0.0.1:1/callback?code=a&state=other")
            terminal.expect("does not belong to this login")
            terminal.type(f"http://127.0.0.1:1/callback?error=access_denied&state={state[1]}")
            terminal.expect("was not allowed")
            assert terminal.ended() == 5
        assert file.read_bytes() == before
        assert program.run("mcp", "test", "s").code == 0
    program.configure({"mcp": {"servers": {"s": {"command": "prog"}}}})
    assert program.run("mcp", "login", "s").code == 2


async def test_a_login_survives_kills_of_the_gateway(program: Program, tmp_path: Path) -> None:
    """The whole way: the operator reads that a login is needed, logs in, and the model's calls work from then on."""
    async with run_protected_server(tmp_path / "calls") as server, Provider().running() as provider:
        models = {"providers": {"local": {"baseUrl": f"{provider.url}/v1", "models": [{"id": "m"}]}}}
        program.configure({"models": models, "mcp": {"servers": {"s": {"url": server.url}}}})

        async def ask(url: str, number: int) -> Any:
            site = Site(url, token(program))

            async def find() -> Site:
                return site

            async with Client(find) as client:
                message = {"sessionKey": "main", "message": "Add.", "idempotencyKey": str(number)}
                sent = await client.call("chat.send", message)
                await client.call("agent.wait", {"runId": sent["runId"], "timeoutMs": 60_000}, seconds=BOUND)
                return (await client.call("mcp.status"))["servers"][0]

        provider.script(Answer(text=("I cannot.",)))
        with up(program) as gateway:
            status = await ask(gateway.url, 1)
            assert status["state"] == "needs_auth"
            assert "needs a login" in provider.bodies[0]["messages"][0]["content"]
            assert (await log_in(program))[0] == 0
            for number in (2, 3):
                call = Call("mcp__s__add", '{"a": 20, "b": 22}', f"call_{number}")
                provider.script(Answer(calls=(call,)), Answer(text=("It is 42.",)))
                if number == 2:
                    assert (await ask(gateway.url, number))["state"] == "ready"
                    assert provider.bodies[-1]["messages"][-1]["content"] == "42"
                    gateway.stop(signal.SIGKILL)
        with up(program) as again:
            assert (await ask(again.url, 3))["state"] == "ready"
            assert provider.bodies[-1]["messages"][-1]["content"] == "42"
            assert again.stop() == 0


async def test_adding_a_server_that_needs_a_login_ends_with_its_tools(
    program: Program, tmp_path: Path
) -> None:
    """At a terminal where no browser can be opened, with everything asked for."""
    async with run_protected_server(tmp_path / "calls") as server:
        with Terminal(program, ("mcp", "add"), screen_columns=2000) as terminal:
            terminal.expect("Name")
            terminal.type("s")
            terminal.expect("Command, or URL")
            terminal.type(server.url)
            terminal.expect("Header")
            terminal.type("")
            terminal.expect("asks for a login")
            shown = terminal.expect(r"open: (http\S+)")[1]
            terminal.expect("paste its address")
            page = httpx2.get(shown, trust_env=False)
            assert "close this window" in httpx2.get(page.headers["location"], trust_env=False).text
            terminal.expect("Logged in")
            terminal.expect("Added 's'")
            terminal.expect("mcp__s__add")
            assert terminal.ended() == 0
            assert "xdg-open" not in terminal.text
        assert program.run("mcp", "test", "s").code == 0
