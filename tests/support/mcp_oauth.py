"""An authorization server for tests, in the process of the MCP server that it protects.

Access tokens live as long as `TOKEN_SECONDS` says, and a refresh token is valid once. Each step is a line in the file
that `CALLS_FILE` names. While the file that `HOLD_FILE` names exists, exchanged tokens are not handed out.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable

import anyio
from mcp.server.auth.provider import (
    AccessToken,
    AuthorizationCode,
    AuthorizationParams,
    OAuthAuthorizationServerProvider,
    RefreshToken,
    construct_redirect_uri,
)
from mcp.server.auth.settings import AuthSettings, ClientRegistrationOptions
from mcp.shared.auth import OAuthClientInformationFull, OAuthToken
from pydantic import AnyHttpUrl

SCOPE = "notes"


class TestAuthorizationServer(OAuthAuthorizationServerProvider[AuthorizationCode, RefreshToken, AccessToken]):
    """Lets everybody in, as a person who always clicks "Allow" would."""

    __test__ = False

    def __init__(self, record: Callable[[str], None]) -> None:
        self._record = record
        self._clients: dict[str, OAuthClientInformationFull] = {}
        self._codes: dict[str, AuthorizationCode] = {}
        self.access_tokens: dict[str, AccessToken] = {}
        self.refresh_tokens: dict[str, RefreshToken] = {}

    async def get_client(self, client_id: str) -> OAuthClientInformationFull | None:
        return self._clients.get(client_id)

    async def register_client(self, client_info: OAuthClientInformationFull) -> None:
        assert client_info.client_id is not None
        self._record("registered")
        self._clients[client_info.client_id] = client_info

    async def authorize(self, client: OAuthClientInformationFull, params: AuthorizationParams) -> str:
        assert client.client_id is not None
        self._record("authorized")
        code = AuthorizationCode(
            code=secrets.token_urlsafe(32),
            scopes=params.scopes or [SCOPE],
            expires_at=time.time() + 60,
            client_id=client.client_id,
            code_challenge=params.code_challenge,
            redirect_uri=params.redirect_uri,
            redirect_uri_provided_explicitly=params.redirect_uri_provided_explicitly,
            resource=params.resource,
        )
        self._codes[code.code] = code
        return construct_redirect_uri(str(params.redirect_uri), code=code.code, state=params.state)

    async def load_authorization_code(
        self, client: OAuthClientInformationFull, authorization_code: str
    ) -> AuthorizationCode | None:
        return self._codes.get(authorization_code)

    async def exchange_authorization_code(
        self, client: OAuthClientInformationFull, authorization_code: AuthorizationCode
    ) -> OAuthToken:
        del self._codes[authorization_code.code]
        return self._issue(authorization_code.client_id, authorization_code.resource)

    async def load_refresh_token(
        self, client: OAuthClientInformationFull, refresh_token: str
    ) -> RefreshToken | None:
        found = self.refresh_tokens.get(refresh_token)
        if found is None:
            self._record("refused")
        return found

    async def exchange_refresh_token(
        self, client: OAuthClientInformationFull, refresh_token: RefreshToken, scopes: list[str]
    ) -> OAuthToken:
        self._record("refreshed")
        del self.refresh_tokens[refresh_token.token]
        issued = self._issue(refresh_token.client_id, refresh_token.resource)
        while os.path.exists(os.environ.get("HOLD_FILE", "")):  # noqa: ASYNC110, ASYNC240, PTH110
            await anyio.sleep(0.01)
        return issued

    async def load_access_token(self, token: str) -> AccessToken | None:
        found = self.access_tokens.get(token)
        return found if found and (found.expires_at or 0) > time.time() else None

    async def revoke_token(self, token: AccessToken | RefreshToken) -> None:
        self.access_tokens.pop(token.token, None)

    def _issue(self, client_id: str, resource: str | None) -> OAuthToken:
        seconds = int(os.environ.get("TOKEN_SECONDS", "3600"))
        access = AccessToken(
            token=secrets.token_urlsafe(32),
            client_id=client_id,
            scopes=[SCOPE],
            expires_at=int(time.time()) + seconds,
            resource=resource,
        )
        refresh = RefreshToken(
            token=secrets.token_urlsafe(32), client_id=client_id, scopes=[SCOPE], resource=resource
        )
        self.access_tokens[access.token] = access
        self.refresh_tokens[refresh.token] = refresh
        return OAuthToken(
            access_token=access.token, refresh_token=refresh.token, expires_in=seconds, scope=SCOPE
        )


def build_auth_settings(port: int) -> AuthSettings:
    return AuthSettings(
        issuer_url=AnyHttpUrl(f"http://127.0.0.1:{port}"),
        resource_server_url=AnyHttpUrl(f"http://127.0.0.1:{port}/mcp"),
        validate_token_resource=True,
        client_registration_options=ClientRegistrationOptions(
            enabled=True, valid_scopes=[SCOPE], default_scopes=[SCOPE]
        ),
        required_scopes=[SCOPE],
    )
