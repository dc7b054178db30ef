"""Entering: the `connect` request, checked in order, and the `hello-ok` that answers it."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any, Literal

import msgspec

from antiphon import __version__, keys
from antiphon.access import READ, Caller
from antiphon.config.addresses import is_loopback
from antiphon.errors import InvalidInput
from antiphon.gateway import devices, frames
from antiphon.gateway.auth import Identity
from antiphon.gateway.connection import Client, Connection
from antiphon.gateway.devices import Device
from antiphon.gateway.frames import Params
from antiphon.gateway.gateway import Gateway
from antiphon.gateway.hub import EVENTS, Hub
from antiphon.gateway.methods import METHODS


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


class Mismatch(InvalidInput):
    """No version of the protocol that both sides speak."""

    code = "protocol_mismatch"


_connect = msgspec.json.Decoder(ConnectParams)


async def enter(
    gateway: Gateway, request: frames.Request, nonce: str, scope: MutableMapping[str, Any]
) -> tuple[Client, Identity, int]:
    """Whoever may come in: who it says it is, who it is, and the protocol to speak."""
    if request.method != "connect":
        raise InvalidInput("The first request must be connect.", "Send it first.", field="method")
    params = frames.read_params("connect", request.params, _connect)
    protocol = _protocol(params)
    address = address_of(scope)
    identity = gateway.guard.admit(
        address, _header(scope, b"origin"), token=params.auth.token, password=params.auth.password
    )
    granted = [] if params.role == "node" else identity.granted(params.scopes)
    if params.device:
        _check_device(gateway, params, params.device, nonce, address)
    client = _client(params, address, granted)
    if client.role == "node":
        await _found_node(gateway, identity.caller(), client)
    return client, identity, protocol


def address_of(scope: MutableMapping[str, Any]) -> str:
    return (scope.get("client") or ("unknown", 0))[0]


def _protocol(params: ConnectParams) -> int:
    """The newest that both speak."""
    spoken = [p for p in frames.PROTOCOLS if params.min_protocol <= p <= params.max_protocol]
    if not spoken:
        raise Mismatch(
            "protocol mismatch.",
            f"This gateway speaks protocols {frames.PROTOCOLS[0]} to {frames.PROTOCOLS[-1]}.",
            code="PROTOCOL_MISMATCH",
            expectedProtocol=frames.PROTOCOLS[-1],
            clientMinProtocol=params.min_protocol,
            clientMaxProtocol=params.max_protocol,
        )
    return spoken[-1]


def _check_device(gateway: Gateway, params: ConnectParams, device: Device, nonce: str, address: str) -> None:
    client, auth = params.client, params.auth
    devices.verify(
        device,
        nonce=nonce,
        now=gateway.house.clock.now(),
        client_id=client.id,
        client_mode=client.mode,
        role=params.role,
        scopes=params.scopes or [],
        token=auth.token or auth.device_token or "",
        platform=client.platform,
        family=client.device_family or "",
        local=is_loopback(address),
    )


def _client(params: ConnectParams, address: str, scopes: list[str]) -> Client:
    said = params.client
    return Client(
        id=said.id[:64],
        mode=said.mode[:32],
        version=said.version[:64],
        platform=said.platform[:64],
        address=address,
        name=said.display_name and said.display_name[:100],
        role=params.role,
        scopes=tuple(scopes),
        caps=frozenset(params.caps[:64]),
        instance=said.instance_id and said.instance_id[:128],
        device=params.device.id if params.device else None,
    )


def _header(scope: MutableMapping[str, Any], name: bytes) -> str | None:
    return next((value.decode("latin-1") for key, value in scope.get("headers", ()) if key == name), None)


async def _found_node(gateway: Gateway, caller: Caller, client: Client) -> None:
    """A node has a session of its own, which exists from when it first connects."""
    name = client.device or client.instance or client.id
    key = keys.owned_key(gateway.house.config.default_agent_id, "node", name)
    await gateway.house.operations.open(caller, str(key))


def hello(gateway: Gateway, hub: Hub, connection: Connection) -> dict[str, Any]:
    client = connection.client
    assert client is not None
    config, now = gateway.house.config, gateway.house.clock.now()
    return {
        "type": "hello-ok",
        "protocol": connection.protocol,
        "server": {"version": __version__, "connId": connection.id},
        "features": {"methods": sorted(METHODS), "events": EVENTS, "capabilities": []},
        "snapshot": {
            "presence": hub.presence() if READ in connection.caller.scopes else [],
            "health": hub.health(),
            "stateVersion": hub.state_version,
            "uptimeMs": now - gateway.started_at,
            "stateDir": str(gateway.state_dir),
            "authMode": gateway.guard.mode,
            "sessionDefaults": {
                "defaultAgentId": config.default_agent_id,
                "modelConfigured": True,
                "mainKey": config.session.main_key,
                "mainSessionKey": main_key(gateway, config.default_agent_id),
                "scope": config.session.scope,
            },
        },
        "auth": {"role": client.role, "scopes": list(client.scopes)},
        "policy": {
            "maxPayload": frames.MAX_BYTES,
            "maxBufferedBytes": frames.MAX_BUFFERED,
            "tickIntervalMs": frames.TICK,
            "attachments": {
                "maxBytes": config.store.message_max_bytes,
                "maxImageBytes": config.store.message_max_bytes,
            },
        },
    }


def main_key(gateway: Gateway, agent_id: str) -> str:
    return keys.spoken(str(keys.main_session(agent_id, scope=gateway.house.config.session.scope)))
