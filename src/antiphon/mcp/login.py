"""Logs in to a server: a person confirms in a browser, which sends the result to a port of this machine.

If the browser runs elsewhere, the person pastes the address that it ended at instead.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import httpx2
from mcp.client.auth.exceptions import OAuthFlowError
from mcp.shared.auth import AuthorizationCodeResult

from antiphon.child_processes.text import clean_text
from antiphon.config.mcp import McpServerConfig, reveal_all
from antiphon.errors import InvalidInput, McpServerUnavailable
from antiphon.mcp.http import create_http_client, describe_error
from antiphon.mcp.listings import MAX_REASON_CHARACTERS
from antiphon.mcp.oauth import LoginFile, OAuthSession, describe_flow_error

LOGIN_TIMEOUT_SECONDS = 600.0
ANSWER_TIMEOUT_SECONDS = 30.0
CALLBACK_HOST, CALLBACK_PATH = "127.0.0.1", "/callback"
CALLBACK_READ_SECONDS = 10.0
MAX_REQUEST_BYTES = 16 * 1024
_PING_REQUEST = {"jsonrpc": "2.0", "id": 1, "method": "ping"}
_PAGE_TEMPLATE = "<!doctype html><meta charset=utf-8><title>Antiphon</title><p>{text}"


class Callback:
    """Waits for the one answer of the browser that belongs to this login; all others are ignored."""

    def __init__(self) -> None:
        self._state: str | None = None
        self._answer: asyncio.Future[AuthorizationCodeResult] = asyncio.get_running_loop().create_future()
        self.port = 0

    @property
    def redirect_uri(self) -> str:
        return f"http://{CALLBACK_HOST}:{self.port}{CALLBACK_PATH}"

    def expect(self, page_url: str) -> None:
        """Note which answer belongs to the page that is shown."""
        self._state = _get_parameters(page_url).get("state")

    async def wait(self) -> AuthorizationCodeResult:
        return await self._answer

    def offer(self, url: str) -> bool:
        """Accept the address that the browser ended at. False if it does not belong to this login."""
        given = _get_parameters(url)
        if self._state is None or given.get("state") != self._state or self._answer.done():
            return False
        if "error" in given:
            why = clean_text(given.get("error_description") or given["error"], MAX_REASON_CHARACTERS)
            self._answer.set_exception(OAuthFlowError(f"it was not allowed ({why})"))
        elif "code" in given:
            self._answer.set_result(
                AuthorizationCodeResult(code=given["code"], state=given["state"], iss=given.get("iss"))
            )
        else:
            return False
        return True

    @asynccontextmanager
    async def listen(self, port: int) -> AsyncGenerator[None]:
        server = await asyncio.start_server(self._respond, CALLBACK_HOST, port, limit=MAX_REQUEST_BYTES)
        self.port = server.sockets[0].getsockname()[1]
        async with server:
            yield

    async def _respond(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(CALLBACK_READ_SECONDS):
                head = await reader.readuntil(b"\r\n\r\n")
            method, target, *_ = head.decode(errors="replace").split(" ")
            is_taken = method == "GET" and urlsplit(target).path == CALLBACK_PATH and self.offer(target)
            status = "200 OK" if is_taken else "404 Not Found"
            text = "Done. You can close this window." if is_taken else "This page belongs to no login."
            page = _PAGE_TEMPLATE.format(text=text).encode()
            writer.write(
                f"HTTP/1.1 {status}\r\nContent-Type: text/html\r\nContent-Length: {len(page)}\r\n"
                "Referrer-Policy: no-referrer\r\nCache-Control: no-store\r\nConnection: close\r\n\r\n".encode()
                + page
            )
            await writer.drain()
        except (TimeoutError, OSError, ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # not a browser
        finally:
            writer.close()


def _get_parameters(url: str) -> dict[str, str]:
    return {name: values[0] for name, values in parse_qs(urlsplit(url.strip()).query).items()}


async def log_in(
    state_dir: Path,
    name: str,
    config: McpServerConfig,
    *,
    port: int,
    show_page: Callable[[str, Callable[[str], bool]], None],
) -> bool:
    """Log in to a server and store its tokens. False if the server asks for no login.

    `show_page` gets the address to open, and a function that takes the address where the browser ended.

    Raises:
        InvalidInput: the server is used without OAuth.
        McpServerUnavailable: there was no login; the earlier one, if any, is kept.
    """
    if config.url is None or config.oauth is None:
        why = (
            "is a program"
            if config.url is None
            else "is configured with a header 'Authorization' or without OAuth"
        )
        raise InvalidInput(
            f"The MCP server {name!r} {why}, so it has no login.", "Use it without a login.", field="name"
        )
    callback, file = Callback(), LoginFile(state_dir, name, config.url)
    try:
        async with asyncio.timeout(LOGIN_TIMEOUT_SECONDS), _listen(callback, port, file):

            async def open_page(url: str) -> None:
                callback.expect(url)
                show_page(url, callback.offer)

            session = OAuthSession(
                config.url,
                config.oauth,
                file,
                redirect_uri=callback.redirect_uri,
                open_page=open_page,
                wait_for_code=callback.wait,
            )
            await _ask(config, session)
    except TimeoutError:
        raise _build_error(
            name, f"no login was completed within {LOGIN_TIMEOUT_SECONDS / 60:.0f} minutes"
        ) from None
    except OAuthFlowError as error:
        raise _build_error(name, clean_text(describe_flow_error(error), MAX_REASON_CHARACTERS)) from error
    except (httpx2.HTTPError, httpx2.StreamError) as error:
        raise _build_error(name, describe_error(error)) from error
    return session.has_logged_in


@asynccontextmanager
async def _listen(callback: Callback, port: int, file: LoginFile) -> AsyncGenerator[None]:
    """Listen on the given port, or on that of the last login, for which the client is registered."""
    last_port = (await asyncio.to_thread(file.load)).redirect_port
    wanted = port or last_port or 0
    listening = callback.listen(wanted)
    try:
        await listening.__aenter__()
    except OSError as error:
        if port:
            raise InvalidInput(
                f"Port {port} cannot be used: {error.strerror}.", "Choose another with --port.", field="port"
            ) from error
        listening = callback.listen(0)
        await listening.__aenter__()
    try:
        yield
    finally:
        await listening.__aexit__(None, None, None)


async def _ask(config: McpServerConfig, session: OAuthSession) -> None:
    """Send a request that has no effect, so that the server asks for a login."""
    assert config.url is not None
    tls = await asyncio.to_thread(httpx2.create_ssl_context, trust_env=False)
    headers = {
        **await asyncio.to_thread(reveal_all, config.headers),
        "accept": "application/json, text/event-stream",
        "mcp-protocol-version": "2025-11-25",
    }
    async with create_http_client(
        config.url, tls, headers=headers, auth=session, answer_timeout_seconds=ANSWER_TIMEOUT_SECONDS
    ) as http:
        response = await http.post(config.url, json=_PING_REQUEST)
    if response.status_code >= 500:
        raise httpx2.ConnectError(f"it answered with status {response.status_code}")


def _build_error(name: str, reason: str) -> McpServerUnavailable:
    return McpServerUnavailable(
        f"The login to the MCP server {name!r} failed: {reason}.", "Try again.", server=name
    )
