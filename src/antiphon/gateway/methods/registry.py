"""Registry of the protocol's methods: name, required scope, parameters and handler."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import cached_property
from typing import Any, TypeVar

import msgspec

from antiphon.access import Caller
from antiphon.config import Config
from antiphon.errors import Forbidden, InvalidInput
from antiphon.gateway.hub import Hub
from antiphon.gateway.state import GatewayState
from antiphon.gateway.ws.connection import WebSocketConnection
from antiphon.gateway.ws.frames import Params
from antiphon.operations.operations import Operations

P = TypeVar("P", bound=Params)


class MethodCall(msgspec.Struct, frozen=True):
    """One request. `caller` comes from the server's own record of the token."""

    gateway: GatewayState
    hub: Hub
    connection: WebSocketConnection
    request_id: str

    @property
    def caller(self) -> Caller:
        return self.connection.caller

    @property
    def caller_name(self) -> str:
        """The name of the caller's token, for records of who did something."""
        identity = self.connection.identity
        return identity.name if identity else "unknown"

    @property
    def operations(self) -> Operations:
        return self.gateway.app.operations

    @property
    def config(self) -> Config:
        return self.gateway.app.config

    @property
    def now(self) -> int:
        return self.gateway.app.clock.now()


class Method(msgspec.Struct, frozen=True, dict=True):
    name: str
    scope: str
    params: type[Params]
    run: Callable[[MethodCall, Any], Awaitable[Any]]
    waits: bool | Callable[[Any], bool]
    """Whether it may wait, possibly depending on the parameters; it is then answered out of order."""

    @cached_property  # built for the first request: building all of them takes a few percent of a gateway's start
    def decoder(self) -> msgspec.json.Decoder[Any]:
        return msgspec.json.Decoder(self.params)

    def is_answered_out_of_turn(self, raw: msgspec.Raw) -> bool:
        if isinstance(self.waits, bool):
            return self.waits
        try:
            return self.waits(self.decoder.decode(raw))
        except (msgspec.MsgspecError, RecursionError):
            return False  # rejected later, in order

    def check_scope(self, caller: Caller) -> None:
        """Check the scope of the method; `access` checks each operation again."""
        if self.scope not in caller.scopes:
            raise Forbidden(
                f"missing scope: {self.scope}.",
                "Use a token that was issued with it, and ask for it in connect.",
                scope=self.scope,
            )


METHODS_BY_NAME: dict[str, Method] = {}


class NoParams(Params, frozen=True):
    """No parameters."""


def rpc_method(
    name: str, scope: str, params: type[P] = NoParams, *, waits: bool | Callable[[P], bool] = False
) -> Callable[[Callable[[MethodCall, P], Awaitable[Any]]], Callable[[MethodCall, P], Awaitable[Any]]]:
    def register(run: Callable[[MethodCall, P], Awaitable[Any]]) -> Callable[[MethodCall, P], Awaitable[Any]]:
        METHODS_BY_NAME[name] = Method(name, scope, params, run, waits)
        return run

    return register


def qualify_session_key(key: str, agent_id: str | None) -> str:
    """Return a session key with its agent, which a client may pass separately."""
    if agent_id is None:
        return key
    if not key.lower().startswith("agent:"):
        return f"agent:{agent_id}:{key}"
    if key.split(":", 2)[1].lower() != agent_id.lower():
        raise InvalidInput(
            f"Session {key!r} does not belong to agent {agent_id!r}.", "Leave agentId out.", field="agentId"
        )
    return key
