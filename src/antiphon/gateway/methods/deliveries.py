"""Methods for operators to list and retry deliveries."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from antiphon.access import ADMIN_SCOPE, READ_SCOPE
from antiphon.gateway.methods.registry import MethodCall, rpc_method
from antiphon.gateway.ws.frames import Params
from antiphon.views import DeliveryPage, DeliveryView


class DeliveryListParams(Params, frozen=True):
    state: Literal["pending", "sending", "delivered", "blocked", "ambiguous", "dead"] | None = None
    limit: Annotated[int, Meta(ge=1, le=500)] = 50
    cursor: str | None = None


@rpc_method("deliveries.list", READ_SCOPE, DeliveryListParams)
async def list_deliveries(call: MethodCall, params: DeliveryListParams) -> DeliveryPage:
    return await call.operations.list_deliveries(call.caller, params.state, params.limit, params.cursor)


class DeliveryRetryParams(Params, frozen=True):
    key: Annotated[str, Meta(min_length=1, max_length=512)]


@rpc_method("deliveries.retry", ADMIN_SCOPE, DeliveryRetryParams)
async def retry_delivery(call: MethodCall, params: DeliveryRetryParams) -> DeliveryView:
    """Send a dead, blocked or doubtful delivery again. Rejected while it is pending, so one request sends it once."""
    return await call.operations.retry_delivery(call.caller, params.key)
