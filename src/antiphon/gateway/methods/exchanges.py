"""What goes on between sessions, for whoever looks after them."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from antiphon.access import READ
from antiphon.gateway.frames import Params
from antiphon.gateway.methods.registry import Call, method
from antiphon.views import ExchangeDetail, ExchangePage


class List(Params, frozen=True):
    session_key: Annotated[str, Meta(min_length=1, max_length=512)] | None = None
    unsettled: bool = False
    limit: Annotated[int, Meta(ge=1, le=500)] = 50
    cursor: str | None = None


@method("exchanges.list", READ, List)
async def list_(call: Call, params: List) -> ExchangePage:
    return await call.operations.exchanges(
        call.caller,
        params.session_key,
        unsettled=params.unsettled,
        limit=params.limit,
        cursor=params.cursor,
    )


class Get(Params, frozen=True):
    id: Annotated[str, Meta(min_length=1, max_length=512)]


@method("exchanges.get", READ, Get)
async def get(call: Call, params: Get) -> ExchangeDetail:
    """One exchange by its id or the beginning of it, with whole texts and every answer."""
    return await call.operations.exchange(call.caller, params.id)
