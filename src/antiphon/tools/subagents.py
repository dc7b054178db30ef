"""The tool `subagents`: lists the sub-agents of the caller's session, and stops or redirects one."""

from __future__ import annotations

import uuid
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from antiphon.engine.toolbox import Tool, ToolRequest
from antiphon.errors import InvalidInput
from antiphon.messages import Provenance
from antiphon.operations.collaboration_types import TaskView
from antiphon.operations.exchanges import REQUEST_ID_NAMESPACE
from antiphon.operations.operations import Operations
from antiphon.operations.types import IncomingMessage, RequestOrigin
from antiphon.tools._adapter import ToolArguments, build_tool
from antiphon.tools._bounds import MAX_LIST_RESULT_BYTES

TOOL_DESCRIPTION = (
    "List the sub-agents you have started ('list'), stop one or all of them ('kill'), or redirect one ('steer': it "
    "drops what it was doing)."
)

_LIST_OVERHEAD_BYTES = 300  # of a list without its rows


class SubagentsArguments(ToolArguments, frozen=True):
    action: Annotated[Literal["list", "kill", "steer"], Meta(description="What to do.")] = "list"
    target: (
        Annotated[
            str,
            Meta(
                description="The sub-agent: its label, key, runId, number in the list, 'last', or for kill 'all'."
            ),
        ]
        | None
    ) = None
    message: Annotated[str, Meta(max_length=4000, description="For steer: what it should do now.")] | None = (
        None
    )
    recent_minutes: Annotated[
        int, Meta(ge=1, le=1440, description="For list: how far back to show those that have ended.")
    ] = 30


def subagents(operations: Operations) -> Tool:
    async def run(call: ToolRequest, arguments: SubagentsArguments) -> dict[str, Any]:
        match arguments.action:
            case "list":
                return _build_list(
                    await operations.subagents.list(
                        call.caller, _get_own_session(call), recent_minutes=arguments.recent_minutes
                    )
                )
            case "kill":
                return await _kill(operations, call, arguments)
            case "steer":
                return await _steer(operations, call, arguments)

    return build_tool(
        "subagents", TOOL_DESCRIPTION, SubagentsArguments, run, has_side_effects=True, is_destructive=True
    )


def _build_list(found: list[TaskView]) -> dict[str, Any]:
    """Build a list of as many sub-agents as fit: active ones before ended ones, newest first."""
    numbered = list(enumerate(found, 1))
    at_work = [item for item in numbered if item[1].phase != "settled"]
    ended = [item for item in numbered if item[1].phase == "settled"]
    room = MAX_LIST_RESULT_BYTES - _LIST_OVERHEAD_BYTES
    active, room = _fit_rows(at_work, room)
    recent, _ = _fit_rows(ended, room if len(active) == len(at_work) else 0)
    listed: dict[str, Any] = {"status": "ok", "action": "list", "total": len(found)}
    listed |= {"active": active, "recent": recent}
    cut = {"active": len(at_work) - len(active), "recent": len(ended) - len(recent)}
    return listed | ({"truncated": True, "cut": cut} if any(cut.values()) else {})


def _fit_rows(tasks: list[tuple[int, TaskView]], room: int) -> tuple[list[dict[str, Any]], int]:
    """Return the rows that fit, and the room that is left."""
    kept: list[dict[str, Any]] = []
    for number, task in tasks:
        shown = _build_row(number, task)
        size = len(msgspec.json.encode(shown)) + len(",")
        if size > room:
            break
        kept.append(shown)
        room -= size
    return kept, room


def _build_row(number: int, task: TaskView) -> dict[str, Any]:
    shown = {
        "number": number,
        "runId": task.run_id,
        "childSessionKey": task.child_session_key,
        "agentId": task.agent_id,
        "label": task.label,
        "task": task.task,
        "phase": task.phase,
        "outcome": task.status,
        "result": task.result or None,
        "error": task.error,
        "announced": task.announced,
        "createdAt": task.created_at,
        "endedAt": task.ended_at,
        "totalTokens": task.total_tokens,
        "lastActivityAt": task.last_activity_at,
    }
    return {name: value for name, value in shown.items() if value is not None}


async def _kill(operations: Operations, call: ToolRequest, arguments: SubagentsArguments) -> dict[str, Any]:
    killed = await operations.subagents.kill(
        call.caller,
        arguments.target,
        _get_own_session(call),
        arguments.recent_minutes,
        key=_derive_request_id(call),
    )
    if killed.finished is not None:
        return _build_finished_answer("kill", killed.finished)
    return {"status": "ok", "action": "kill", "killed": len(killed.keys), "labels": killed.names}


async def _steer(operations: Operations, call: ToolRequest, arguments: SubagentsArguments) -> dict[str, Any]:
    if not (arguments.message or "").strip():
        raise InvalidInput(
            "The message is missing.", "Describe what the sub-agent should do now.", field="message"
        )
    run_id = _derive_request_id(call)
    name = await operations.subagents.find_steered(call.caller, run_id)
    if name is None:
        task = await operations.subagents.find(
            call.caller, arguments.target, _get_own_session(call), arguments.recent_minutes
        )
        if task.phase == "settled":
            return _build_finished_answer("steer", task.name)
        name = task.name
        message = IncomingMessage(
            session=task.child_session_key,
            content=arguments.message or "",
            idempotency_key=run_id,
            origin="steer",
            provenance=Provenance(
                kind="steer", source_session_key=call.caller.session_key, source_tool="subagents"
            ),
        )
        await operations.messages.steer(call.caller, message, RequestOrigin(call.run_id, call.key))
    return {"status": "accepted", "action": "steer", "runId": run_id, "label": name}


def _get_own_session(call: ToolRequest) -> str:
    """Return the session whose sub-agents are meant; an operator's spawns report to the default agent's main one."""
    return "main" if call.caller.is_operator else "current"


def _derive_request_id(call: ToolRequest) -> str:
    """Return an id for the call that is stable if it is repeated; the call's own key may be of any length."""
    return str(uuid.uuid5(REQUEST_ID_NAMESPACE, call.key))


def _build_finished_answer(action: str, name: str) -> dict[str, Any]:
    return {"status": "done", "action": action, "message": f"{name} has already finished."}
