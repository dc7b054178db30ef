"""Sub-agents: starting one for a session, and what became of those that were."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from antiphon.access import READ, WRITE
from antiphon.engine.attachments import Attachment
from antiphon.engine.words import Thinking
from antiphon.gateway.frames import IdempotencyKey, Params
from antiphon.gateway.methods.registry import Call, Nothing, method
from antiphon.operations import Spawn as Wanted
from antiphon.views import Spawned

Key = Annotated[str, Meta(min_length=1, max_length=512)]


class AttachAs(Params, frozen=True):
    mount_path: str | None = None


class Spawn(Params, frozen=True):
    """What `sessions_spawn` takes, and for which session it is done."""

    task: Annotated[str, Meta(min_length=1)]
    requester_session_key: Key = "main"
    label: str | None = None
    agent_id: str | None = None
    model: str | None = None
    thinking: Thinking | None = None
    run_timeout_seconds: Annotated[float, Meta(ge=0)] | None = None
    thread: bool = False
    mode: Literal["run", "session"] | None = None
    cleanup: Literal["delete", "keep"] = "keep"
    sandbox: Literal["inherit", "require"] = "inherit"
    attachments: list[Attachment] = []
    attach_as: AttachAs | None = None
    runtime: Literal["subagent", "acp"] = "subagent"
    idempotency_key: IdempotencyKey | None = None
    announce: Literal["channel", "parent", "none"] = "channel"


@method("sessions.spawn", WRITE, Spawn)
async def spawn(call: Call, params: Spawn) -> Spawned:
    """As the tool, for the session that is named. It reports there by itself."""
    wanted = Wanted(
        task=params.task,
        label=params.label,
        agent_id=params.agent_id,
        model=params.model,
        thinking=params.thinking,
        run_timeout_seconds=params.run_timeout_seconds,
        thread=params.thread,
        mode=params.mode,
        cleanup=params.cleanup,
        sandbox=params.sandbox,
        attachments=params.attachments,
        mount_path=params.attach_as.mount_path if params.attach_as else None,
        runtime=params.runtime,
        idempotency_key=params.idempotency_key,
        announce=params.announce,
    )
    return await call.operations.spawn(call.caller, wanted, requester=params.requester_session_key)


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
