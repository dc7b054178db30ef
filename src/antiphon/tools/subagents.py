"""The tool `subagents`: the sub-agents of the caller's session, and stopping or redirecting one."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from antiphon.engine.toolbox import Call, Tool
from antiphon.errors import Ambiguous, InvalidInput, NotFound
from antiphon.operations import Message, Operations
from antiphon.tools.adapter import adapted
from antiphon.tools.arguments import Arguments
from antiphon.views import TaskView

DESCRIPTION = (
    "See the sub-agents you have started ('list'), stop one or all of them ('kill'), or tell one to do something "
    "else ('steer': it drops what it was doing)."
)
EVERY = frozenset({"all", "*"})
RESULT_SHOWN = 300  # characters


class SubagentsArguments(Arguments, frozen=True):
    action: Annotated[Literal["list", "kill", "steer"], Meta(description="What to do.")] = "list"
    target: (
        Annotated[
            str,
            Meta(
                description="Which one: its label, key, runId, number in the list, 'last', or for kill 'all'."
            ),
        ]
        | None
    ) = None
    message: Annotated[str, Meta(max_length=4000, description="For steer: what it is to do now.")] | None = (
        None
    )
    recent_minutes: Annotated[
        int, Meta(ge=1, le=1440, description="For list: how far back to show those that have ended.")
    ] = 30


def subagents(operations: Operations) -> Tool:
    async def answer(call: Call, given: SubagentsArguments) -> dict[str, Any]:
        found = await operations.tasks(call.caller, recent_minutes=given.recent_minutes)
        match given.action:
            case "list":
                return _listed(found)
            case "kill":
                return await _kill(operations, call, given, found)
            case "steer":
                return await _steer(operations, call, given, found)

    return adapted("subagents", DESCRIPTION, SubagentsArguments, answer, acts=True)


def _listed(found: list[TaskView]) -> dict[str, Any]:
    active = [_shown(number, task) for number, task in enumerate(found, 1) if task.phase != "settled"]
    recent = [_shown(number, task) for number, task in enumerate(found, 1) if task.phase == "settled"]
    return {"status": "ok", "action": "list", "total": len(found), "active": active, "recent": recent}


def _shown(number: int, task: TaskView) -> dict[str, Any]:
    shown = {
        "number": number,
        "runId": task.run_id,
        "childSessionKey": task.child_session_key,
        "agentId": task.agent_id,
        "label": task.label,
        "task": task.task[:RESULT_SHOWN],
        "phase": task.phase,
        "outcome": task.status,
        "result": task.result[:RESULT_SHOWN] if task.result else None,
        "error": task.error,
        "announced": task.announced,
        "createdAt": task.created_at,
        "endedAt": task.ended_at,
        "totalTokens": task.total_tokens,
        "lastActivityAt": task.last_activity_at,
    }
    return {name: value for name, value in shown.items() if value is not None}


async def _kill(
    operations: Operations, call: Call, given: SubagentsArguments, found: list[TaskView]
) -> dict[str, Any]:
    wanted = [task for task in found if task.phase != "settled"]
    if given.target not in EVERY:
        wanted = [_chosen(given.target, found)]
    if wanted and all(task.phase == "settled" for task in wanted):
        return {"status": "done", "action": "kill", "message": f"{_name(wanted[0])} has already finished."}
    for task in wanted:
        await operations.stop(call.caller, task.child_session_key)
    return {
        "status": "ok",
        "action": "kill",
        "killed": len(wanted),
        "labels": [_name(task) for task in wanted],
    }


async def _steer(
    operations: Operations, call: Call, given: SubagentsArguments, found: list[TaskView]
) -> dict[str, Any]:
    if not (given.message or "").strip():
        raise InvalidInput("There is no message.", "Say what the sub-agent is to do now.", field="message")
    task = _chosen(given.target, found)
    if task.phase == "settled":
        return {"status": "done", "action": "steer", "message": f"{_name(task)} has already finished."}
    message = Message(
        session=task.child_session_key,
        content=given.message or "",
        idempotency_key=f"{call.key}"[:200],
        origin="steer",
    )
    accepted, _ = await operations.steer(call.caller, message)
    return {"status": "accepted", "action": "steer", "runId": accepted.run_id, "label": _name(task)}


def _name(task: TaskView) -> str:
    return task.label or task.child_session_key


def _chosen(target: str | None, found: list[TaskView]) -> TaskView:
    """By what a model is likely to write: a number, a key, an id or a label, in full or its beginning."""
    if not target:
        raise InvalidInput(
            "No sub-agent is named.", "Set target to one that action 'list' shows.", field="target"
        )
    if target == "last" and found:
        return found[0]
    if target.isdecimal() and 0 < int(target) <= len(found):
        return found[int(target) - 1]
    exact = [t for t in found if target in (t.child_session_key, t.run_id, t.label)]
    said = target.lower()
    fitting = exact or [
        t for t in found if (t.label or "").lower().startswith(said) or t.run_id.startswith(target)
    ]
    if len(fitting) > 1:
        candidates = [task.child_session_key for task in fitting]
        raise Ambiguous(
            f"{len(fitting)} sub-agents fit {target[:80]!r}: {', '.join(candidates[:10])}.",
            "Pass one of these keys.",
            candidates=candidates,
        )
    if not fitting:
        raise NotFound(f"No sub-agent fits {target[:80]!r}.", "Use action 'list' to see them.")
    return fitting[0]
