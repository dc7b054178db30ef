"""The agents' tools: which there are, and invoking one as a session would."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any

from msgspec import Meta

from antiphon.access import READ, WRITE
from antiphon.engine.toolbox import Tool
from antiphon.gateway import invocations
from antiphon.gateway.frames import IdempotencyKey, Params
from antiphon.gateway.invocations import Invocation, ToolMissing
from antiphon.gateway.methods.registry import Call, method


class Catalog(Params, frozen=True):
    agent_id: str | None = None
    include_plugins: bool = True


@method("tools.catalog", READ, Catalog)
async def catalog(call: Call, params: Catalog) -> dict[str, Any]:
    agent = call.config.agent(params.agent_id or call.config.default_agent_id)
    tools = call.gateway.house.toolbox.allowed(agent.tools.allow, agent.tools.deny)
    return {"agentId": agent.id, "profiles": [], "groups": _groups(tools, _in_catalog)}


class Effective(Params, frozen=True):
    session_key: str
    agent_id: str | None = None


@method("tools.effective", READ, Effective)
async def effective(call: Call, params: Effective) -> dict[str, Any]:
    """What a run in this session would have, which for a spawned one is less than its agent has."""
    session, actor = await call.operations.tools_of(call.caller, params.session_key)
    return {"agentId": session.agent_id, "profile": "full", "groups": _groups(actor.tools, _in_effect)}


def _in_catalog(tool: Tool) -> dict[str, Any]:
    return {"defaultProfiles": []}


def _in_effect(tool: Tool) -> dict[str, Any]:
    return {"rawDescription": tool.spec.description}


def _groups(tools: Mapping[str, Tool], beside: Callable[[Tool], dict[str, Any]]) -> list[dict[str, Any]]:
    listed = [
        {
            "id": tool.spec.name,
            "label": tool.spec.name,
            "description": tool.spec.description,
            "source": "core",
            **beside(tool),
        }
        for tool in tools.values()
    ]
    return [{"id": "core", "label": "Sessions", "source": "core", "tools": listed}] if listed else []


class Invoke(Params, frozen=True):
    name: Annotated[str, Meta(min_length=1)]
    args: dict[str, Any] = {}
    session_key: str | None = None
    agent_id: str | None = None
    idempotency_key: IdempotencyKey | None = None
    confirm: bool = False
    conversation_read_origin: str | None = None


@method("tools.invoke", WRITE, Invoke, waits=True)
async def invoke(call: Call, params: Invoke) -> dict[str, Any]:
    wanted = Invocation(
        tool=params.name, args=params.args, session_key=params.session_key, agent_id=params.agent_id
    )
    try:
        result, _ = await invocations.invoke(call.gateway, call.caller, wanted, params.idempotency_key)
    except ToolMissing as error:
        return {"ok": False, "toolName": params.name, "error": {"code": error.code, "message": str(error)}}
    if result.is_error:
        error = {"code": "tool_error", **invocations.complaint(result)}
        return {"ok": False, "toolName": params.name, "error": error}
    output = {"content": [{"type": "text", "text": result.text}], "details": result.details}
    return {"ok": True, "toolName": params.name, "output": output, "source": "core"}
