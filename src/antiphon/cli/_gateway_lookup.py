"""Finds a gateway: one named by the user, or the one that runs on the state directory.

A running gateway records its address there. The record is valid only while the process that wrote it owns the
directory; one left behind by a killed process is ignored.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from antiphon.cli._options import Settings
from antiphon.errors import ConfigError, InvalidInput, Unauthorized, Unavailable
from antiphon.gateway import discovery
from antiphon.gateway.discovery import DiscoveryRecord
from antiphon.paths import REPLICAS_DIRECTORY_NAME, expand_home
from antiphon.store.statedir import StateDir

if TYPE_CHECKING:
    from antiphon.client.connection import Site
    from antiphon.mcp.server.stdio import Endpoint


def find_running_gateway(state_dir: Path) -> DiscoveryRecord | None:
    """Return the gateway that owns the directory now."""
    found = discovery.read(state_dir)
    if (
        found
        and is_process_alive(found.pid)
        and StateDir.open_unlocked(state_dir).holder in {str(found.pid), "unknown"}
    ):
        return found
    return None


def is_process_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return pid > 0


def find_gateway(settings: Settings) -> Site | None:
    """Return the gateway that a command should use; None if none runs and the store itself is to be used."""
    if named := settings.named_gateways:
        return _make_site(_to_websocket_url(named[0]), _read_given_token(settings))
    found = next(find_local_gateways(settings.paths.state_dir), None)
    return (
        _make_site(found.url, _read_given_token(settings) or _read_owner_token(settings)) if found else None
    )


def find_named_gateways(settings: Settings) -> list[Site]:
    """Return the gateways named by the user, in the order in which they are tried."""
    token = _read_given_token(settings)
    return [_make_site(_to_websocket_url(url), token) for url in settings.named_gateways]


def find_mcp_endpoints(settings: Settings) -> list[Endpoint]:
    """Return the MCP endpoints of the gateways that a command should use.

    Raises:
        Unavailable: no gateway runs on the state directory, and none was named.
    """
    from antiphon.mcp.server.stdio import Endpoint

    sites = find_named_gateways(settings) or [site for site in [find_gateway(settings)] if site]
    if not sites:
        raise build_not_running_error(settings)
    return [Endpoint(f"http{site.url.removeprefix('ws').rstrip('/')}/mcp", site.secret) for site in sites]


def build_not_running_error(settings: Settings) -> Unavailable:
    return Unavailable(
        f"No gateway is running in {str(settings.paths.state_dir)!r}.",
        "Start one with `antiphon up`, or name one with --url.",
    )


def find_local_gateways(state_dir: Path) -> Iterator[DiscoveryRecord]:
    """Yield the gateways on this machine: the owner of the directory, and replicas started with `up --join`.

    Raises:
        StoreError: this user cannot read the directory.
    """
    StateDir.open_unlocked(state_dir).check_readable()
    for directory in (state_dir, *sorted((state_dir / REPLICAS_DIRECTORY_NAME).glob("[0-9]*"))):
        if found := find_running_gateway(directory):
            yield found


def _make_site(url: str, secret: str | None) -> Site:
    from antiphon.client.connection import (
        Site,  # imports a WebSocket library, which the store alone does not need
    )

    return Site(url, secret)


def _to_websocket_url(url: str) -> str:
    """Return the WebSocket address, also for one given as http or https."""
    parts = urlsplit(url)
    scheme = {"http": "ws", "https": "wss"}.get(parts.scheme, parts.scheme)
    if scheme not in {"ws", "wss"} or not parts.hostname or parts.username or parts.password:
        raise InvalidInput(
            "The gateway address is not valid.", "Use a form like ws://127.0.0.1:18789.", field="url"
        )
    return parts._replace(scheme=scheme).geturl()


def _read_given_token(settings: Settings) -> str | None:
    """Read the token given for this command. It is never an argument, because other users can read those."""
    if settings.token_file is None:
        return os.environ.get("ANTIPHON_TOKEN") or None
    path = expand_home(settings.token_file)
    try:
        content = path.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(
            f"The token file {str(path)!r} could not be read.",
            "Name a file that contains the token.",
            field="token",
        ) from error
    if not content.startswith("{"):
        return content or None
    from antiphon.gateway.tokens import TokenRegistry  # a gateway's own file, tokens.json

    return TokenRegistry.read(path).owner_token


def _read_owner_token(settings: Settings) -> str | None:
    """Read the token that authenticates the owner of the state directory."""
    from antiphon.gateway.tokens import TOKEN_FILE_NAME as TOKENS
    from antiphon.gateway.tokens import TokenRegistry

    if _has_auth_section(settings):
        auth = settings.load().config.gateway.auth
        secret = auth.password if auth.mode == "password" else auth.token
        if auth.mode == "none":
            return None
        if secret:
            return secret.reveal()
    path = settings.paths.state_dir / TOKENS
    if not path.exists():
        raise Unauthorized(
            f"The token file {str(path)!r} no longer exists.", "Restart the gateway, or pass --token-file."
        )
    return TokenRegistry.read(path).owner_token


def _has_auth_section(settings: Settings) -> bool:
    """Whether the configuration sets how clients authenticate; a broken one does not stop a running gateway."""
    try:
        document = settings.read_config_document()
    except ConfigError:
        return False
    gateway = document.content.get("gateway") if document else None
    return isinstance(gateway, dict) and "auth" in gateway
