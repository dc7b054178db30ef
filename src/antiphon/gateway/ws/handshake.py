"""The WebSocket handshake: checks the `connect` request and builds the `hello-ok` response."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any, Literal

import msgspec

from antiphon import PROTOCOL_VERSIONS, __version__, keys
from antiphon.access import READ_SCOPE, Caller
from antiphon.config.addresses import is_loopback
from antiphon.errors import InvalidInput, ProtocolMismatch
from antiphon.gateway.auth import ClientIdentity
from antiphon.gateway.hub import EVENT_NAMES, Hub
from antiphon.gateway.methods import METHODS_BY_NAME
from antiphon.gateway.state import GatewayState
from antiphon.gateway.ws import devices, frames
from antiphon.gateway.ws.connection import ConnectedClient, WebSocketConnection
from antiphon.gateway.ws.devices import Device
from antiphon.gateway.ws.frames import Params


class ClientParams(Params, frozen=True):
    id: str
    version: str
    platform: str
    mode: str
    display_name: str | None = None
    build_id: str | None = None
    device_family: str | None = None
    model_identifier: str | None = None
    time_zone: str | None = None
    instance_id: str | None = None


class AuthParams(Params, frozen=True):
    token: str | None = None
    password: str | None = None
    device_token: str | None = None
    bootstrap_token: str | None = None
    approval_runtime_token: str | None = None
    agent_runtime_identity_token: str | None = None


class ConnectParams(Params, frozen=True):
    min_protocol: int
    max_protocol: int
    client: ClientParams
    caps: list[str] = []
    commands: list[str] = []
    permissions: dict[str, bool] = {}
    path_env: str | None = None
    computer_use: Any = None
    worker_runs: Any = None
    model_catalog: Any = None
    role: Literal["operator", "node"] = "operator"
    scopes: list[str] | None = None
    device: Device | None = None
    auth: AuthParams = AuthParams()
    locale: str | None = None
    user_agent: str | None = None


_connect_decoder = msgspec.json.Decoder(ConnectParams)


async def authenticate_client(
    gateway: GatewayState, request: frames.RequestFrame, nonce: str, scope: MutableMapping[str, Any]
) -> tuple[ConnectedClient, ClientIdentity, int]:
    """Authenticate a client; return its self-description, its identity and the protocol version."""
    if request.method != "connect":
        raise InvalidInput("The first request must be connect.", "Send it first.", field="method")
    params = frames.read_params("connect", request.params, _connect_decoder)
    protocol = _negotiate_protocol(params)
    address = get_client_address(scope)
    identity = gateway.authenticator.authenticate(
        address, _find_header(scope, b"origin"), token=params.auth.token, password=params.auth.password
    )
    granted = [] if params.role == "node" else identity.grant_scopes(params.scopes)
    if params.device:
        _check_device(gateway, params, params.device, nonce, address)
    client = _build_client(params, address, granted)
    if client.role == "node":
        await _open_node_session(gateway, identity.to_caller(), client)
    return client, identity, protocol


def get_client_address(scope: MutableMapping[str, Any]) -> str:
    return (scope.get("client") or ("unknown", 0))[0]


def _negotiate_protocol(params: ConnectParams) -> int:
    """Return the newest protocol version that both sides support."""
    supported = [p for p in PROTOCOL_VERSIONS if params.min_protocol <= p <= params.max_protocol]
    if not supported:
        raise ProtocolMismatch(
            "protocol mismatch.",
            f"This gateway speaks protocols {PROTOCOL_VERSIONS[0]} to {PROTOCOL_VERSIONS[-1]}.",
            code="PROTOCOL_MISMATCH",
            expectedProtocol=PROTOCOL_VERSIONS[-1],
            clientMinProtocol=params.min_protocol,
            clientMaxProtocol=params.max_protocol,
        )
    return supported[-1]


def _check_device(
    gateway: GatewayState, params: ConnectParams, device: Device, nonce: str, address: str
) -> None:
    client, auth = params.client, params.auth
    devices.verify_device(
        device,
        nonce=nonce,
        now=gateway.app.clock.now(),
        client_id=client.id,
        client_mode=client.mode,
        role=params.role,
        scopes=params.scopes or [],
        token=auth.token or auth.device_token or "",
        platform=client.platform,
        family=client.device_family or "",
        local=is_loopback(address),
    )


def _build_client(params: ConnectParams, address: str, scopes: list[str]) -> ConnectedClient:
    client = params.client
    return ConnectedClient(
        id=client.id[:64],
        mode=client.mode[:32],
        version=client.version[:64],
        platform=client.platform[:64],
        address=address,
        name=client.display_name and client.display_name[:100],
        role=params.role,
        scopes=tuple(scopes),
        caps=frozenset(params.caps[:64]),
        instance=client.instance_id and client.instance_id[:128],
        device=params.device.id if params.device else None,
    )


def _find_header(scope: MutableMapping[str, Any], name: bytes) -> str | None:
    return next((value.decode("latin-1") for key, value in scope.get("headers", ()) if key == name), None)


async def _open_node_session(gateway: GatewayState, caller: Caller, client: ConnectedClient) -> None:
    """Create the session of a node the first time it connects."""
    name = client.device or client.instance or client.id
    key = keys.owned_key(gateway.app.config.default_agent_id, "node", name)
    await gateway.app.operations.sessions.open(caller, str(key))


def build_hello(gateway: GatewayState, hub: Hub, connection: WebSocketConnection) -> dict[str, Any]:
    client = connection.client
    assert client is not None
    config, now = gateway.app.config, gateway.app.clock.now()
    return {
        "type": "hello-ok",
        "protocol": connection.protocol,
        "server": {"version": __version__, "connId": connection.id},
        "features": {"methods": sorted(METHODS_BY_NAME), "events": EVENT_NAMES, "capabilities": []},
        "snapshot": {
            "presence": hub.presence.list_clients() if READ_SCOPE in connection.caller.scopes else [],
            "health": hub.health.build_report(),
            "stateVersion": hub.presence.state_version,
            "uptimeMs": now - gateway.started_at,
            "stateDir": str(gateway.state_dir),
            "authMode": gateway.authenticator.mode,
            "sessionDefaults": {
                "defaultAgentId": config.default_agent_id,
                "modelConfigured": True,
                "mainKey": config.session.main_key,
                "mainSessionKey": find_main_session_key(gateway, config.default_agent_id),
                "scope": config.session.scope,
            },
        },
        "auth": {"role": client.role, "scopes": list(client.scopes)},
        "policy": {
            "maxPayload": frames.MAX_FRAME_BYTES,
            "maxBufferedBytes": frames.MAX_BUFFERED_BYTES,
            "tickIntervalMs": frames.TICK_INTERVAL_MS,
            "attachments": {
                "maxBytes": config.store.message_max_bytes,
                "maxImageBytes": config.store.message_max_bytes,
            },
        },
    }


def find_main_session_key(gateway: GatewayState, agent_id: str) -> str:
    return keys.display_full_key(str(keys.main_session_key(agent_id, scope=gateway.app.config.session.scope)))
