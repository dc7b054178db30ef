"""Methods for operators to inspect exchanges between sessions."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from antiphon.access import READ_SCOPE
from antiphon.gateway.methods.registry import MethodCall, rpc_method
from antiphon.gateway.ws.frames import Params
from antiphon.views import ExchangeDetail, ExchangePage


class ExchangeListParams(Params, frozen=True):
    session_key: Annotated[str, Meta(min_length=1, max_length=512)] | None = None
    unsettled: bool = False
    limit: Annotated[int, Meta(ge=1, le=500)] = 50
    cursor: str | None = None


@rpc_method("exchanges.list", READ_SCOPE, ExchangeListParams)
async def list_exchanges(call: MethodCall, params: ExchangeListParams) -> ExchangePage:
    return await call.operations.list_exchanges(
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
    return await call.operations.get_exchange(call.caller, params.id)
