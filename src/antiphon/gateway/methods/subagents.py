"""Sub-agents: starting one for a session, and what became of those that were."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from antiphon.access import READ, WRITE
from antiphon.engine.attachments import Attachment
from antiphon.gateway.frames import IdempotencyKey, Key, Params
from antiphon.gateway.methods.registry import Call, Nothing, method
from antiphon.tools.sessions_spawn import SpawnArguments
from antiphon.views import Spawned


class Spawn(SpawnArguments, Params, frozen=True):
    """What `sessions_spawn` takes, and for which session it is done."""

    requester_session_key: Key = "main"
    attachments: list[Attachment] = []  # how many there may be is for the configuration alone to say
    idempotency_key: IdempotencyKey | None = None


@method("sessions.spawn", WRITE, Spawn)
async def spawn(call: Call, params: Spawn) -> Spawned:
    """As the tool, for the session that is named. It reports there by itself."""
    return await call.operations.spawn(call.caller, params.wanted, requester=params.requester_session_key)


class List(Params, frozen=True):
    session_key: Key
    recent_minutes: Annotated[int, Meta(ge=1, le=1440)] = 30


@method("subagents.list", READ, List)
async def list_(call: Call, params: List) -> dict[str, Any]:
    """Everything at work, and what has ended lately; the newest first."""
    found = await call.operations.tasks(call.caller, params.session_key, params.recent_minutes)
    return {"total": len(found), "subagents": found}


class Report(Params, frozen=True):
    run_id: Key


@method("subagents.report", READ, Report)
async def report(call: Call, params: Report) -> dict[str, Any]:
    """What was said of one of them, as a whole; null while there is nothing to say."""
    text = await call.operations.task_report(call.caller, params.run_id)
    return {"runId": params.run_id, "report": text}


@method("agents.spawnable", READ)
async def spawnable(call: Call, params: Nothing) -> dict[str, Any]:
    """Every agent, and whom it may start."""
    return {"agents": await call.operations.roster(call.caller)}
