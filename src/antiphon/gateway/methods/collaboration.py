"""Methods about what sessions do for one another: exchanges, sub-agents, and deliveries to people."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from antiphon.access import ADMIN_SCOPE, READ_SCOPE, WRITE_SCOPE
from antiphon.engine.collaboration.attachments import SpawnAttachment
from antiphon.gateway.methods.registry import MethodCall, NoParams, rpc_method
from antiphon.gateway.ws.frames import IdempotencyKey, Params, SessionReference
from antiphon.operations.collaboration_types import (
    DeliveryPage,
    DeliveryView,
    ExchangeDetail,
    ExchangePage,
    SpawnResult,
)
from antiphon.tools.sessions_spawn import SpawnArguments


class ExchangeListParams(Params, frozen=True):
    session_key: SessionReference | None = None
    unsettled: bool = False
    limit: Annotated[int, Meta(ge=1, le=500)] = 50
    cursor: str | None = None


@rpc_method("exchanges.list", READ_SCOPE, ExchangeListParams)
async def list_exchanges(call: MethodCall, params: ExchangeListParams) -> ExchangePage:
    return await call.operations.exchanges.list(
        call.caller,
        params.session_key,
        unsettled=params.unsettled,
        limit=params.limit,
        cursor=params.cursor,
    )


class ExchangeGetParams(Params, frozen=True):
    id: Annotated[str, Meta(min_length=1, max_length=512)]


@rpc_method("exchanges.get", READ_SCOPE, ExchangeGetParams)
async def get_exchange(call: MethodCall, params: ExchangeGetParams) -> ExchangeDetail:
    """Return one exchange by its id or an id prefix, with full texts and all replies."""
    return await call.operations.exchanges.get(call.caller, params.id)


class SessionSpawnParams(SpawnArguments, Params, frozen=True):
    """The arguments of `sessions_spawn`, and the session that spawns."""

    requester_session_key: SessionReference = "main"
    attachments: list[SpawnAttachment] = []  # the configuration sets the maximum
    idempotency_key: IdempotencyKey | None = None


@rpc_method("sessions.spawn", WRITE_SCOPE, SessionSpawnParams)
async def spawn_subagent(call: MethodCall, params: SessionSpawnParams) -> SpawnResult:
    """Start a sub-agent for the named session, like the tool. It reports to that session when it is done."""
    return await call.operations.subagents.spawn(
        call.caller, params.spawn_request, requester=params.requester_session_key
    )


class SubagentListParams(Params, frozen=True):
    session_key: SessionReference
    recent_minutes: Annotated[int, Meta(ge=1, le=1440)] = 30


@rpc_method("subagents.list", READ_SCOPE, SubagentListParams)
async def list_subagents(call: MethodCall, params: SubagentListParams) -> dict[str, Any]:
    """List active and recently ended sub-agents, newest first."""
    found = await call.operations.subagents.list(call.caller, params.session_key, params.recent_minutes)
    return {"total": len(found), "subagents": found}


class SubagentReportParams(Params, frozen=True):
    run_id: SessionReference


@rpc_method("subagents.report", READ_SCOPE, SubagentReportParams)
async def get_subagent_report(call: MethodCall, params: SubagentReportParams) -> dict[str, Any]:
    """Return the full report of a sub-agent; null if it has none yet."""
    text = await call.operations.subagents.get_report(call.caller, params.run_id)
    return {"runId": params.run_id, "report": text}


@rpc_method("agents.spawnable", READ_SCOPE)
async def list_spawnable_agents(call: MethodCall, params: NoParams) -> dict[str, Any]:
    """List all agents, each with the agents that it may start."""
    return {"agents": await call.operations.agents.list(call.caller)}


class DeliveryListParams(Params, frozen=True):
    state: Literal["pending", "sending", "delivered", "blocked", "ambiguous", "expired", "dead"] | None = None
    limit: Annotated[int, Meta(ge=1, le=500)] = 50
    cursor: str | None = None


@rpc_method("deliveries.list", READ_SCOPE, DeliveryListParams)
async def list_deliveries(call: MethodCall, params: DeliveryListParams) -> DeliveryPage:
    return await call.operations.deliveries.list(call.caller, params.state, params.limit, params.cursor)


class DeliveryRetryParams(Params, frozen=True):
    key: Annotated[str, Meta(min_length=1, max_length=512)]


@rpc_method("deliveries.retry", ADMIN_SCOPE, DeliveryRetryParams)
async def retry_delivery(call: MethodCall, params: DeliveryRetryParams) -> DeliveryView:
    """Send a dead, blocked, ambiguous or expired delivery again. Rejected while it is pending."""
    return await call.operations.deliveries.retry(call.caller, params.key)
