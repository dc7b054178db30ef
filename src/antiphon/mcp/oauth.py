"""OAuth of MCP servers: tokens that outlive a restart, and a login that needs a person.

The library forgets when a stored token expires and where its authorization server is, and would then open a browser
instead of refreshing. Both are stored here. The gateway itself never starts a login: without a usable token a server is
in the state `needs_auth`, until `antiphon mcp login` has stored one.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import msgspec
from mcp.client.auth.exceptions import OAuthFlowError
from mcp.client.auth.oauth2 import OAuthClientProvider
from mcp.client.auth.utils import extract_field_from_www_auth
from mcp.shared._httpx_utils import next_request_within_origin
from mcp.shared.auth import (
    AuthorizationCodeResult,
    OAuthClientInformationFull,
    OAuthClientMetadata,
    OAuthMetadata,
    OAuthToken,
    ProtectedResourceMetadata,
)
from pydantic import AnyUrl

from antiphon.config.mcp import McpOAuth
from antiphon.mcp.http import LOGIN_REFUSAL_EXTENSION, create_http_client
from antiphon.mcp.listings import write_private_file
from antiphon.mcp.logins import locate_login_file, read_login_version

UNAUTHORIZED_STATUS, FORBIDDEN_STATUS, MIN_SERVER_ERROR_STATUS = 401, 403, 500
LOCK_TIMEOUT_SECONDS, LOCK_POLL_SECONDS = 30.0, 0.05
RENEWAL_TIMEOUT_SECONDS = 20.0  # less than another process waits for it
FINISH_TIMEOUT_SECONDS = 5.0  # how long the end of a connection waits for a renewal
MAX_REDIRECTS = 3
EXPIRY_MARGIN_SECONDS = 30.0  # a token that expires sooner is refreshed before it is used


class AuthorizationRequired(Exception):
    """A person must log in. The text says why."""


class StoredLogin(msgspec.Struct, kw_only=True, rename="camel"):
    """A login as it is stored. Tokens and clients are in the form of the library."""

    url: str
    tokens: dict[str, Any] | None = None
    expires_at: float | None = None
    client: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    resource: dict[str, Any] | None = None
    authorization_server: str | None = None
    redirect_port: int | None = None


class LoginFile:
    """The login of one server, in a file that only its owner can read."""

    def __init__(self, state_dir: Path, server: str, url: str) -> None:
        self._path = locate_login_file(state_dir, server)
        self._state_dir, self._server, self._url = state_dir, server, url

    def load(self) -> StoredLogin:
        """Return the stored login, or an empty one if it belongs to another address."""
        try:
            login = msgspec.json.decode(self._path.read_bytes(), type=StoredLogin)
        except (OSError, msgspec.MsgspecError):
            return StoredLogin(url=self._url)
        return login if login.url == self._url else StoredLogin(url=self._url)

    def save(self, login: StoredLogin) -> None:
        write_private_file(self._path, msgspec.json.encode(login))

    @asynccontextmanager
    async def lock(self) -> AsyncGenerator[None]:
        """Keep other processes from refreshing the login meanwhile, since a refresh token may be valid only once.

        Raises:
            AuthorizationRequired: another process holds it for too long.
        """
        descriptor = await asyncio.to_thread(self._open_lock_file)
        try:
            until = time.monotonic() + LOCK_TIMEOUT_SECONDS
            while not _try_lock(descriptor):
                if time.monotonic() > until:
                    raise AuthorizationRequired("another process has been renewing it for too long")
                await asyncio.sleep(LOCK_POLL_SECONDS)
            yield
        finally:
            os.close(descriptor)

    def _open_lock_file(self) -> int:
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return os.open(self._path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    @property
    def version(self) -> int | None:
        """A number that changes with the file; None if there is none."""
        return read_login_version(self._state_dir, self._server)


class _Storage:
    """The library's interface to a login file."""

    def __init__(self, file: LoginFile, settings: McpOAuth, *, is_login: bool) -> None:
        self.file = file
        self.login = StoredLogin(url="")
        self._settings = settings
        self._is_login = is_login

    async def load(self) -> None:
        self.login = await asyncio.to_thread(self.file.load)

    async def save(self) -> None:
        await asyncio.to_thread(self.file.save, self.login)

    async def _save_unless_login(self) -> None:
        """A login is stored as a whole at its end, so that one that fails leaves the earlier one as it is."""
        if not self._is_login:
            await self.save()

    async def get_tokens(self) -> OAuthToken | None:
        return None if self.login.tokens is None else OAuthToken.model_validate(self.login.tokens)

    async def set_tokens(self, tokens: OAuthToken) -> None:
        self.login.tokens = tokens.model_dump(mode="json", exclude_none=True)
        self.login.expires_at = None if tokens.expires_in is None else time.time() + tokens.expires_in
        await self._save_unless_login()

    async def get_client_info(self) -> OAuthClientInformationFull | None:
        if self._settings.client_id is None:
            stored = self.login.client
            return None if stored is None else OAuthClientInformationFull.model_validate(stored)
        secret = self._settings.client_secret
        revealed = None if secret is None else await asyncio.to_thread(secret.reveal)
        return OAuthClientInformationFull(
            client_id=self._settings.client_id,
            client_secret=revealed,
            redirect_uris=None,
            token_endpoint_auth_method="none" if revealed is None else "client_secret_post",
        )

    async def set_client_info(self, client_info: OAuthClientInformationFull) -> None:
        self.login.client = client_info.model_dump(mode="json", exclude_none=True)
        await self._save_unless_login()


class OAuthSession(OAuthClientProvider):
    """Adds a server's token to requests, and refreshes it before it expires or when it is refused."""

    def __init__(
        self,
        url: str,
        settings: McpOAuth,
        file: LoginFile,
        *,
        redirect_uri: str = "http://127.0.0.1/callback",
        open_page: Callable[[str], Awaitable[None]] | None = None,
        wait_for_code: Callable[[], Awaitable[AuthorizationCodeResult]] | None = None,
    ) -> None:
        self._is_interactive = open_page is not None
        self._storage = _Storage(file, settings, is_login=self._is_interactive)
        self._redirect_uri = redirect_uri
        self._has_fixed_client = settings.client_id is not None
        self.has_logged_in = False
        self._loaded_version: int | None = -1
        self._renewals: set[asyncio.Task[None]] = set()
        super().__init__(
            url,
            OAuthClientMetadata(
                client_name="Antiphon",
                redirect_uris=[AnyUrl(redirect_uri)],
                grant_types=["authorization_code", "refresh_token"],
                response_types=["code"],
                scope=settings.scope,
                token_endpoint_auth_method="none" if settings.client_secret is None else "client_secret_post",
            ),
            self._storage,
            open_page,
            wait_for_code,
        )

    async def _initialize(self) -> None:
        """Load what is stored, with what the library leaves out."""
        self._loaded_version = self._storage.file.version
        await self._storage.load()
        await super()._initialize()
        login, context = self._storage.login, self.context
        context.token_expiry_time = (
            None if login.expires_at is None else login.expires_at - EXPIRY_MARGIN_SECONDS
        )
        if login.metadata is not None:
            context.oauth_metadata = OAuthMetadata.model_validate(login.metadata)
        if login.resource is not None:
            context.protected_resource_metadata = ProtectedResourceMetadata.model_validate(login.resource)
        context.auth_server_url = login.authorization_server
        if self._is_interactive:
            context.clear_tokens()
            registered = map(str, context.client_info.redirect_uris or ()) if context.client_info else ()
            if not self._has_fixed_client and self._redirect_uri not in registered:
                context.client_info = None  # it is registered again, for the port that is used now

    def _auth_flow(self, request: httpx2.Request) -> AsyncGenerator[httpx2.Request, httpx2.Response]:
        return self._log_in(request) if self._is_interactive else self._use_login_or_refuse(request)

    async def _log_in(self, request: httpx2.Request) -> AsyncGenerator[httpx2.Request, httpx2.Response]:
        """Run the library's flow, which asks a person, and then store where the tokens came from."""
        flow = super()._auth_flow(request)
        try:
            outgoing = await flow.__anext__()
            while True:
                outgoing = await flow.asend((yield outgoing))
        except StopAsyncIteration:
            if self.context.current_tokens is not None:
                await self._keep_addresses()
                self.has_logged_in = True
        finally:
            await flow.aclose()

    # --- without a person ---

    async def _use_login_or_refuse(
        self, request: httpx2.Request
    ) -> AsyncGenerator[httpx2.Request, httpx2.Response]:
        """Answer a request that needs a login with an error of its own: an exception would end the connection."""
        flow = self._use_login(request)
        try:
            outgoing = await flow.__anext__()
            while True:
                outgoing = await flow.asend((yield outgoing))
        except StopAsyncIteration:
            pass
        except AuthorizationRequired as error:
            request.extensions = {**request.extensions, LOGIN_REFUSAL_EXTENSION: f"it needs a login: {error}"}
            yield request
        finally:
            await flow.aclose()

    async def _use_login(self, request: httpx2.Request) -> AsyncGenerator[httpx2.Request, httpx2.Response]:
        """Send a request with the stored token. Only a renewal is made under the lock, so that calls run side by side.

        Raises:
            AuthorizationRequired: there is no token that the server takes.
        """
        context = self.context
        await self._load_login()
        await self._renew(lambda: not context.is_token_valid() and context.can_refresh_token())
        used = context.current_tokens
        self._add_auth_header(request)
        response = yield request
        if response.status_code == FORBIDDEN_STATUS:
            if extract_field_from_www_auth(response, "error") == "insufficient_scope":
                raise AuthorizationRequired("the login does not cover what the server asks for")
            return
        if response.status_code != UNAUTHORIZED_STATUS:
            return
        await self._renew(lambda: context.current_tokens is used)
        self._add_auth_header(request)
        response = yield request
        if response.status_code == UNAUTHORIZED_STATUS:
            raise AuthorizationRequired("the server refuses it, although it was renewed")

    async def _load_login(self) -> None:
        async with self.context.lock:
            if not self._initialized:
                await self._initialize()
            await self._load_newer()

    async def _renew(self, is_due: Callable[[], bool]) -> None:
        """Renew the tokens if that is due.

        A refresh token is valid once, so what it is exchanged for is stored even if this request is cancelled.

        Raises:
            AuthorizationRequired: they cannot be renewed.
        """
        if is_due():
            renewing = asyncio.create_task(self._renew_in_turn(is_due))
            self._renewals.add(renewing)
            renewing.add_done_callback(self._forget_renewal)
            await asyncio.shield(renewing)

    async def _renew_in_turn(self, is_due: Callable[[], bool]) -> None:
        """Let one request of one process renew the tokens, if that is still due."""
        context = self.context
        async with context.lock:
            if not is_due():
                return
            async with self._storage.file.lock():
                await self._load_newer()
                if not is_due():
                    return
                if not context.can_refresh_token():
                    raise AuthorizationRequired(
                        "no login has been stored"
                        if context.current_tokens is None
                        else "the server refuses it"
                    )
                await self._take_refreshed(await self._request_tokens())

    async def _request_tokens(self) -> httpx2.Response:
        """Exchange the refresh token, on a connection that no cancelled request and no ending session closes."""
        tls = await asyncio.to_thread(httpx2.create_ssl_context, trust_env=False)
        async with create_http_client(
            self.context.server_url, tls, answer_timeout_seconds=RENEWAL_TIMEOUT_SECONDS
        ) as http:
            response = await http.send(await self._refresh_token())
            for _ in range(MAX_REDIRECTS):
                if (following := next_request_within_origin(response)) is None:
                    break
                response = await http.send(following)
            return response

    def _forget_renewal(self, renewing: asyncio.Task[None]) -> None:
        self._renewals.discard(renewing)
        if not renewing.cancelled():
            renewing.exception()  # it may be that nothing waits for it any more

    async def finish_renewals(self) -> None:
        """Wait a while for what is under way."""
        if self._renewals:
            await asyncio.wait(self._renewals, timeout=FINISH_TIMEOUT_SECONDS)

    async def _load_newer(self) -> None:
        """Load the login again if another process has stored one: its refresh token may be the only valid one."""
        if self._storage.file.version != self._loaded_version:
            await self._initialize()

    async def _take_refreshed(self, response: httpx2.Response) -> None:
        before = self.context.current_tokens
        if response.status_code >= MIN_SERVER_ERROR_STATUS:
            raise httpx2.ConnectError(f"the authorization server answered with status {response.status_code}")
        if not await self._handle_refresh_response(response):
            self.context.current_tokens = before
            raise AuthorizationRequired("it has expired, and the authorization server does not renew it")
        if self.context.token_expiry_time is not None:
            self.context.token_expiry_time -= EXPIRY_MARGIN_SECONDS
        self._loaded_version = self._storage.file.version

    async def _keep_addresses(self) -> None:
        """Store where the tokens came from, which a refresh after a restart needs."""
        context, login = self.context, self._storage.login
        login.metadata = _dump(context.oauth_metadata)
        login.resource = _dump(context.protected_resource_metadata)
        login.authorization_server = context.auth_server_url
        login.redirect_port = urlsplit(self._redirect_uri).port
        await self._storage.save()


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _dump(model: OAuthMetadata | ProtectedResourceMetadata | None) -> dict[str, Any] | None:
    return None if model is None else model.model_dump(mode="json", exclude_none=True)


def describe_flow_error(error: OAuthFlowError) -> str:
    """Return the reason for a failed login."""
    return str(error)[:300] or type(error).__name__
