"""Webhooks: other programs start runs with a separate secret that grants nothing else.

The text of a hook is stored as sent, in an entry marked as coming from a hook. The operator chooses the session and
the agent; the sender can choose only where the configuration allows it.
"""

from __future__ import annotations

import asyncio
import uuid
from fnmatch import fnmatchcase
from typing import Annotated, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from antiphon import keys
from antiphon.access import WRITE_SCOPE, Caller
from antiphon.errors import Forbidden, InvalidInput
from antiphon.gateway.http.responses import build_json_response, read_json
from antiphon.gateway.state import GatewayState
from antiphon.gateway.wire import check_channel
from antiphon.messages import Provenance
from antiphon.operations.types import IncomingMessage, MessageReceipt

_SESSION_NAMESPACE = uuid.UUID("0d0c4b1e-52f3-4d0e-8a53-6f0f3a2b7c95")
HOOK_CALLER = Caller.operator([WRITE_SCOPE])
"""Hooks may write. Write implies read, but a hook's response only names the run and its session."""


class _HookBody(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    pass


class AgentHook(_HookBody, frozen=True):
    """Body of `POST /hooks/agent`. The answer stays in the session, which is what the channel `webchat` shows."""

    message: str
    name: Annotated[str, msgspec.Meta(max_length=200)] | None = None
    agent_id: str | None = None
    session_key: str | None = None
    wake_mode: Literal["now", "next-heartbeat"] | None = None
    deliver: bool | None = None
    channel: str | None = None
    to: str | None = None
    model: str | None = None
    thinking: str | None = None
    timeout_seconds: float | None = None


class WakeHook(_HookBody, frozen=True):
    text: str
    mode: Literal["now", "next-heartbeat"] | None = None


class HookReceipt(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    ok: bool
    run_id: str
    session_key: str | None = None


class HookEndpoints:
    def __init__(self, gateway: GatewayState) -> None:
        self._gateway = gateway
        self._settings = gateway.app.config.hooks
        self._token: str | None = None

    async def open(self) -> None:
        """Read the secret once, in a thread: it may come from a file or a command."""
        assert self._settings.token is not None  # the configuration requires it when hooks are enabled
        self._token = await asyncio.to_thread(self._settings.token.reveal)

    async def authenticate(self, address: str, request: Request) -> None:
        """Check the sender's secret; failures are rate limited like those of other credentials."""
        if self._token is None:
            await self.open()
        kind, _, bearer = request.headers.get("authorization", "").partition(" ")
        secret = bearer.strip() if kind.lower() == "bearer" else request.headers.get("x-openclaw-token")
        origin = request.headers.get("origin")
        self._gateway.authenticator.check_endpoint_secret(
            address, origin, secret, self._token or "", "hook token"
        )

    async def post_agent(self, request: Request) -> Response:
        hook = await read_json(request, AgentHook)
        _check_name(hook.name)
        if hook.deliver is not False:
            check_channel("channel", hook.channel)
        idempotency_key = request.headers.get("idempotency-key")
        session = self._choose_session(hook, idempotency_key)
        accepted = await self._submit(
            IncomingMessage(
                session=session,
                content=hook.message,
                idempotency_key=idempotency_key,
                origin="hook",
                model=hook.model,
                thinking=hook.thinking,
                timeout_seconds=hook.timeout_seconds,
                provenance=Provenance(kind="hook", source_tool=hook.name),
            )
        )
        return build_json_response(
            HookReceipt(ok=True, run_id=accepted.run_id, session_key=accepted.session_key)
        )

    async def post_wake(self, request: Request) -> Response:
        hook = await read_json(request, WakeHook)
        self._check_agent(None)
        accepted = await self._submit(
            IncomingMessage(
                session="main",
                content=hook.text,
                idempotency_key=request.headers.get("idempotency-key"),
                origin="hook",
                provenance=Provenance(kind="hook", source_tool="wake"),
            )
        )
        return build_json_response(HookReceipt(ok=True, run_id=accepted.run_id))

    async def _submit(self, message: IncomingMessage) -> MessageReceipt:
        return await self._gateway.app.operations.messages.submit(HOOK_CALLER, message)

    def _choose_session(self, hook: AgentHook, idempotency_key: str | None) -> str:
        if hook.session_key is not None:
            return self._check_requested_session(hook.session_key, hook.agent_id)
        if self._settings.default_session_key is not None and hook.agent_id is None:
            return self._check_default_session(self._settings.default_session_key)
        # A retry with the same idempotency key must go to the same session, or it would be another message.
        unique = uuid.uuid5(_SESSION_NAMESPACE, idempotency_key) if idempotency_key else uuid.uuid4()
        return str(keys.owned_key(self._check_agent(hook.agent_id), "hook", str(unique)))

    def _check_default_session(self, reference: str) -> str:
        if self._settings.allowed_agent_ids is not None:
            self._check_agent(self._canonicalize_key(reference, None).agent_id or None)
        return reference

    def _check_requested_session(self, reference: str, agent_id: str | None) -> str:
        if not self._settings.allow_request_session_key:
            raise InvalidInput(
                "Hooks may not choose their session here.",
                "Leave 'sessionKey' out, or set hooks.allowRequestSessionKey.",
                field="sessionKey",
            )
        key = self._canonicalize_key(reference, agent_id)
        allowed = self._settings.allowed_session_key_prefixes
        spellings = (str(key), key.rest)
        if allowed is not None and not any(
            text.startswith(prefix) for prefix in allowed for text in spellings
        ):
            raise Forbidden(
                f"Hooks may not choose the session {reference[:200]!r}.",
                "Use one that hooks.allowedSessionKeyPrefixes allows.",
            )
        if key.shape != "global" and agent_id is not None and key.agent_id != agent_id.lower():
            raise InvalidInput(
                f"Session {str(key)!r} does not belong to the agent {agent_id!r}.",
                "Leave 'agentId' out.",
                field="agentId",
            )
        agent = self._check_agent(key.agent_id or agent_id)
        return f"agent:{agent}:main" if key.shape == "global" else str(key)

    def _canonicalize_key(self, reference: str, agent_id: str | None) -> keys.SessionKey:
        """Return the canonical key, so that prefixes are compared with the actual session, not with its spelling."""
        config = self._gateway.app.config
        key = keys.canonicalize(
            reference,
            agent_id=agent_id or config.default_agent_id,
            main_key=config.session.main_key,
            scope=config.session.scope,
        )
        if isinstance(key, keys.SessionIdRef):
            raise InvalidInput(
                "Hooks name a session by its key.",
                "Write agent:<agentId>:hook:<name>, or leave 'sessionKey' out.",
                field="sessionKey",
            )
        return key

    def _check_agent(self, agent_id: str | None) -> str:
        config = self._gateway.app.config
        agent_id = config.get_agent(keys.validate_agent_id(agent_id or config.default_agent_id)).id
        allowed = self._settings.allowed_agent_ids
        if allowed is not None and not any(fnmatchcase(agent_id, pattern.lower()) for pattern in allowed):
            raise Forbidden(
                f"Hooks may not start agent {agent_id!r}.", "Use one that hooks.allowedAgentIds allows."
            )
        return agent_id


def _check_name(name: str | None) -> None:
    if name is not None and not name.isprintable():
        raise InvalidInput(
            "'name' contains characters that cannot be displayed.",
            "Use letters, digits, punctuation and spaces.",
            field="name",
        )
