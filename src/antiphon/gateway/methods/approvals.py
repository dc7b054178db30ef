"""Methods for tool calls that wait for a person; the decisions are in `operations.approvals`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from antiphon.access import APPROVALS_SCOPE
from antiphon.gateway import wire
from antiphon.gateway.methods.registry import MethodCall, NoParams, rpc_method
from antiphon.gateway.ws.frames import Params, SessionReference

ApprovalId = Annotated[str, Meta(min_length=1, max_length=64)]
MAX_WAIT_MS = 60_000


class ApprovalListParams(Params, frozen=True):
    session_key: SessionReference | None = None


@rpc_method("exec.approval.list", APPROVALS_SCOPE, ApprovalListParams)
async def list_approvals(call: MethodCall, params: ApprovalListParams) -> list[dict[str, Any]]:
    """List the calls that wait for a decision, oldest first."""
    found = await call.operations.approvals.list(call.caller, params.session_key)
    return [wire.format_approval(approval) for approval in found]


class ApprovalResolveParams(Params, frozen=True):
    id: ApprovalId
    decision: Literal["allow-once", "allow-always", "deny"]


@rpc_method("exec.approval.resolve", APPROVALS_SCOPE, ApprovalResolveParams)
async def resolve_approval(call: MethodCall, params: ApprovalResolveParams) -> dict[str, Any]:
    """Allow or deny a call. The same decision again has no further effect."""
    decided = await call.operations.approvals.resolve(
        call.caller, params.id, params.decision, call.caller_name
    )
    return {"ok": True, **wire.format_approval(decided)}


class ApprovalWaitParams(Params, frozen=True):
    id: ApprovalId
    timeout_ms: Annotated[int, Meta(ge=0, le=MAX_WAIT_MS)] = MAX_WAIT_MS


@rpc_method("exec.approval.waitDecision", APPROVALS_SCOPE, ApprovalWaitParams, waits=True)
async def wait_for_decision(call: MethodCall, params: ApprovalWaitParams) -> dict[str, Any]:
    """Wait for the decision about a call; `decision` is null if there is none."""
    approval = await call.operations.approvals.wait(call.caller, params.id, params.timeout_ms / 1000)
    return wire.format_approval(approval)


@rpc_method("exec.approval.grants", APPROVALS_SCOPE)
async def list_grants(call: MethodCall, params: NoParams) -> dict[str, Any]:
    """List the calls that are always allowed."""
    return {"grants": await call.operations.approvals.list_grants(call.caller)}


class GrantRevokeParams(Params, frozen=True):
    id: ApprovalId


@rpc_method("exec.approval.revoke", APPROVALS_SCOPE, GrantRevokeParams)
async def revoke_grant(call: MethodCall, params: GrantRevokeParams) -> dict[str, Any]:
    """Ask again about a call that was always allowed."""
    await call.operations.approvals.revoke_grant(call.caller, params.id)
    return {"ok": True}
