"""Whether the gateway lives, and whether it can take work. Both are told to anybody, and say nothing else."""

from __future__ import annotations

import asyncio
import logging

from starlette.requests import Request
from starlette.responses import Response

from antiphon.access import READ, Caller
from antiphon.errors import AntiphonError
from antiphon.gateway.gateway import Gateway
from antiphon.gateway.replies import json_reply
from antiphon.operations import ListFilter

log = logging.getLogger(__name__)

PROBE_TIME = 2.0  # seconds in which the store has to answer
_PROBE = Caller.operator([READ])


async def get_health(request: Request) -> Response:
    return json_reply({"ok": True, "status": "live"})


async def get_ready(gateway: Gateway, request: Request) -> Response:
    failing = [
        *(["closing"] if gateway.closing.is_set() else []),
        *([] if await _store_answers(gateway) else ["store"]),
    ]
    if failing:
        return json_reply({"ready": False, "failing": failing}, 503)
    # Without the bus everything is still accepted and kept, so requests may go on coming here.
    return json_reply(
        {"ready": True} if gateway.house.links.connected() else {"ready": True, "degraded": ["bus"]}
    )


async def _store_answers(gateway: Gateway) -> bool:
    if gateway.house.trouble():
        return False  # The store has said so itself. What is kept can be read, but nothing can be added.
    try:
        async with asyncio.timeout(PROBE_TIME):
            await gateway.house.operations.list(_PROBE, ListFilter(limit=1))
    except (AntiphonError, TimeoutError) as error:
        log.warning("The store did not answer: %s", error or "it took too long")
        return False
    return True
