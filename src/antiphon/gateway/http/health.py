"""Liveness and readiness endpoints. They need no authentication and reveal nothing else."""

from __future__ import annotations

import asyncio
import logging

from starlette.requests import Request
from starlette.responses import Response

from antiphon.access import READ_SCOPE, Caller
from antiphon.errors import AntiphonError
from antiphon.gateway.http.responses import build_json_response
from antiphon.gateway.state import GatewayState
from antiphon.operations import ListFilter

log = logging.getLogger(__name__)

STORE_PROBE_TIMEOUT_SECONDS = 2.0  # for the store to answer
_PROBE_CALLER = Caller.operator([READ_SCOPE])


async def get_health(request: Request) -> Response:
    return build_json_response({"ok": True, "status": "live"})


async def get_readiness(gateway: GatewayState, request: Request) -> Response:
    failing = [
        *(["closing"] if gateway.closing.is_set() else []),
        *([] if await _can_reach_store(gateway) else ["store"]),
    ]
    if failing:
        return build_json_response({"ready": False, "failing": failing}, 503)
    # Without the bus, requests are still accepted and stored, so the gateway stays ready.
    return build_json_response(
        {"ready": True} if gateway.app.links.is_connected() else {"ready": True, "degraded": ["bus"]}
    )


async def _can_reach_store(gateway: GatewayState) -> bool:
    if gateway.app.trouble():
        return False  # the store has reported a failure: it can be read, but not written
    try:
        async with asyncio.timeout(STORE_PROBE_TIMEOUT_SECONDS):
            await gateway.app.operations.list(_PROBE_CALLER, ListFilter(limit=1))
    except (AntiphonError, TimeoutError) as error:
        log.warning("The store did not answer: %s", error or "it took too long")
        return False
    return True
