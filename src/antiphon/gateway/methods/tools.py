"""Methods that list the agents' tools and invoke one on behalf of a session."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import Annotated, Any

from msgspec import Meta

from antiphon.access import READ_SCOPE, WRITE_SCOPE
from antiphon.engine.sessions.identity import explain_tools, get_answering_model
from antiphon.engine.toolbox import Tool
from antiphon.errors import ToolMissing
from antiphon.gateway import tool_invocations
from antiphon.gateway.methods.registry import MethodCall, rpc_method
from antiphon.gateway.tool_invocations import ToolInvocation
from antiphon.gateway.ws.frames import IdempotencyKey, Params
from antiphon.tool_selection import ToolAudience


class ToolCatalogParams(Params, frozen=True):
    agent_id: str | None = None
    include_plugins: bool = True


@rpc_method("tools.catalog", READ_SCOPE, ToolCatalogParams)
async def get_tool_catalog(call: MethodCall, params: ToolCatalogParams) -> dict[str, Any]:
    agent = call.config.get_agent(params.agent_id or call.config.default_agent_id)
    audience = ToolAudience(model=get_answering_model(call.config, agent.id, None))
    permitted = call.gateway.app.toolbox.select_permitted(agent.id, agent.tools.selection, audience)
    return {
        "agentId": agent.id,
        "profiles": [],
        "groups": _group_tools(permitted.select_usable(), _format_catalog_fields),
        "absent": _list_absent(call, agent.id, audience),
    }


class EffectiveToolsParams(Params, frozen=True):
    session_key: str
    agent_id: str | None = None


@rpc_method("tools.effective", READ_SCOPE, EffectiveToolsParams)
async def get_effective_tools(call: MethodCall, params: EffectiveToolsParams) -> dict[str, Any]:
    """List the tools of a run in this session; a spawned session has fewer than its agent."""
    session, actor = await call.operations.sessions.describe_actor(call.caller, params.session_key)
    agent = call.config.get_agent(session.agent_id or call.config.default_agent_id)
    model = get_answering_model(call.config, agent.id, session.model)
    audience = ToolAudience(model=model, is_sandboxed=actor.caller.sandboxed)
    return {
        "agentId": session.agent_id,
        "profile": agent.tools.selection.profile,
        "groups": _group_tools(actor.tools, _format_effective_fields),
        "absent": _list_absent(call, agent.id, audience, actor.tools),
    }


def _list_absent(
    call: MethodCall, agent_id: str, audience: ToolAudience, offered: Container[str] | None = None
) -> list[dict[str, Any]]:
    """List the tools that are not offered, with the key of the configuration that decides, and why."""
    explained = explain_tools(call.config, call.gateway.app.toolbox.tools, agent_id, audience, offered)
    return [
        {"id": tool.name, "key": tool.path, "reason": tool.reason}
        for tool in explained
        if not tool.is_offered
    ]


def _format_catalog_fields(tool: Tool) -> dict[str, Any]:
    return {"defaultProfiles": []}


def _format_effective_fields(tool: Tool) -> dict[str, Any]:
    return {"rawDescription": tool.spec.description}


def _group_tools(
    tools: Mapping[str, Tool], format_fields: Callable[[Tool], dict[str, Any]]
) -> list[dict[str, Any]]:
    listed = [
        {
            "id": tool.spec.name,
            "label": tool.spec.name,
            "description": tool.spec.description,
            "source": "core",
            **format_fields(tool),
        }
        for tool in tools.values()
    ]
    return [{"id": "core", "label": "Built-in tools", "source": "core", "tools": listed}] if listed else []


class ToolInvokeParams(Params, frozen=True):
    name: Annotated[str, Meta(min_length=1)]
    args: dict[str, Any] = {}
    session_key: str | None = None
    agent_id: str | None = None
    idempotency_key: IdempotencyKey | None = None
    confirm: bool = False
    conversation_read_origin: str | None = None


@rpc_method("tools.invoke", WRITE_SCOPE, ToolInvokeParams, waits=True)
async def invoke_tool(call: MethodCall, params: ToolInvokeParams) -> dict[str, Any]:
    invocation = ToolInvocation(
        tool=params.name, args=params.args, session_key=params.session_key, agent_id=params.agent_id
    )
    try:
        result, _ = await tool_invocations.invoke_tool(
            call.gateway, call.caller, invocation, params.idempotency_key
        )
    except ToolMissing as error:
        return {"ok": False, "toolName": params.name, "error": {"code": error.code, "message": str(error)}}
    if result.is_error:
        error = {"code": "tool_error", **tool_invocations.format_tool_error(result)}
        return {"ok": False, "toolName": params.name, "error": error}
    output = {"content": [{"type": "text", "text": result.text}], "details": result.details}
    return {"ok": True, "toolName": params.name, "output": output, "source": "core"}
