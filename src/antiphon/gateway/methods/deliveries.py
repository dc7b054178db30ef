"""What is on its way to people, for whoever looks after it."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from antiphon.access import ADMIN, READ
from antiphon.gateway.frames import Params
from antiphon.gateway.methods.registry import Call, method
from antiphon.views import DeliveryPage, DeliveryView


class List(Params, frozen=True):
    state: Literal["pending", "sending", "delivered", "blocked", "ambiguous", "dead"] | None = None
    limit: Annotated[int, Meta(ge=1, le=500)] = 50
    cursor: str | None = None


@method("deliveries.list", READ, List)
async def list_(call: Call, params: List) -> DeliveryPage:
    return await call.operations.deliveries(call.caller, params.state, params.limit, params.cursor)


class Retry(Params, frozen=True):
    key: Annotated[str, Meta(min_length=1, max_length=512)]


@method("deliveries.retry", ADMIN, Retry)
async def retry(call: Call, params: Retry) -> DeliveryView:
    """Asked again it is refused, because it is on its way: nothing is sent more often than it was asked for."""
    return await call.operations.deliver_again(call.caller, params.key)
