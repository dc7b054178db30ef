"""Methods about the gateway: health, status, presence, configuration, agents, models, commands and log."""

from __future__ import annotations

import asyncio
import os
import resource
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta

from antiphon import __version__
from antiphon.access import READ_SCOPE
from antiphon.config import AgentConfig
from antiphon.gateway.methods.registry import MethodCall, NoParams, rpc_method
from antiphon.gateway.slash_commands import SLASH_COMMANDS
from antiphon.gateway.ws.frames import Params
from antiphon.paths import LOG_FILE_NAME


class HealthParams(Params, frozen=True):
    probe: bool = False
    include_sensitive: bool = False


@rpc_method("health", READ_SCOPE, HealthParams)
async def get_health(call: MethodCall, params: HealthParams) -> dict[str, Any]:
    return call.hub.health.build_report()


@rpc_method("status", READ_SCOPE, HealthParams)
async def get_status(call: MethodCall, params: HealthParams) -> dict[str, Any]:
    """Return the status overview for operators."""
    summary = await call.operations.sessions.get_summary(call.caller)
    return {
        "runtimeVersion": __version__,
        "version": __version__,
        "pid": os.getpid(),
        "uptimeMs": call.now - call.gateway.started_at,
        "stateDir": str(call.gateway.state_dir),
        "authMode": call.gateway.authenticator.mode,
        "connections": len(call.hub.connections),
        "rssBytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "agents": list(call.config.agent_ids),
        "defaultAgentId": call.config.default_agent_id,
        "runs": {"queued": summary.queued, "running": summary.running},
        "sessions": {"count": summary.sessions, "path": call.gateway.database_path},
        "cron": await call.gateway.app.operations.jobs.get_status(call.caller),
        "deliveries": (await call.operations.deliveries.list(call.caller, limit=1)).count_by_state,
        "replicas": await call.operations.status.list_replicas(call.caller),
        "channelSummary": [],
        "queuedSystemEvents": [],
    }


@rpc_method("system-presence", READ_SCOPE)
async def get_presence(call: MethodCall, params: NoParams) -> list[dict[str, Any]]:
    return call.hub.presence.list_clients()


@rpc_method("config.get", READ_SCOPE)
async def get_config(call: MethodCall, params: NoParams) -> dict[str, Any]:
    """Return the configuration in use. Secrets are masked by their type, not by their name."""
    config = call.config.model_dump(mode="json", by_alias=True, exclude_unset=True)
    return {"exists": True, "valid": True, "config": config, "issues": [], "legacyIssues": []}


@rpc_method("agents.list", READ_SCOPE)
async def list_agents(call: MethodCall, params: NoParams) -> dict[str, Any]:
    config = call.config
    return {
        "defaultId": config.default_agent_id,
        "mainKey": config.session.main_key,
        "scope": config.session.scope,
        "ownership": "explicit",
        "selectionRequired": False,
        "agents": [_describe_agent(call, agent_id) for agent_id in config.agent_ids],
    }


def _describe_agent(call: MethodCall, agent_id: str) -> dict[str, Any]:
    agent = call.config.get_agent(agent_id)
    name = agent.name or agent.id
    return {
        "id": agent.id,
        "kind": "agent",
        "name": name,
        "identity": {"name": name, **_get_appearance(agent)},
        "model": {"primary": call.config.get_model_ref(agent.id), "fallbacks": []},
        "defaultPermissionMode": "full",
    }


def _get_appearance(agent: AgentConfig) -> dict[str, str]:
    own = agent.identity
    fields = {"emoji": own.emoji, "theme": own.theme} if own else {}
    return {name: value for name, value in fields.items() if value}


class AgentIdentityParams(Params, frozen=True):
    agent_id: str | None = None
    session_key: str | None = None


@rpc_method("agent.identity.get", READ_SCOPE, AgentIdentityParams)
async def get_agent_identity(call: MethodCall, params: AgentIdentityParams) -> dict[str, Any]:
    agent_id = params.agent_id
    if agent_id is None and params.session_key:
        agent_id = (await call.operations.sessions.describe(call.caller, params.session_key)).agent_id
    agent = call.config.get_agent(agent_id or call.config.default_agent_id)
    appearance = _get_appearance(agent)
    return {
        "agentId": agent.id,
        "name": agent.name or agent.id,
        "nameSource": "config",
        "avatarStatus": "none",
        **({"emoji": appearance["emoji"]} if "emoji" in appearance else {}),
    }


class ModelListParams(Params, frozen=True):
    agent_id: str | None = None
    session_key: str | None = None
    auth_profile_id: str | None = None
    provider: str | None = None
    include_details: bool = False
    include_default_models: bool = False
    include_provider_capabilities: bool = False
    prepared_only: bool = False
    refresh: bool = False
    view: Literal["default", "configured", "provider-config", "all"] = "default"


@rpc_method("models.list", READ_SCOPE, ModelListParams)
async def list_models(call: MethodCall, params: ModelListParams) -> dict[str, Any]:
    found = describe_models(call)
    return {"models": [model for model in found if params.provider in (None, model["provider"])]}


def describe_models(call: MethodCall) -> list[dict[str, Any]]:
    return [_describe_model(call, ref) for ref in call.config.model_refs]


def _describe_model(call: MethodCall, ref: str) -> dict[str, Any]:
    found = call.config.find_model(ref)
    window = found.model.context_window
    return {
        "id": found.model.id,
        "name": found.model.name or found.model.id,
        "provider": found.provider_name,
        "available": True,
        **({"contextWindow": window} if window else {}),
    }


@rpc_method("question.list", READ_SCOPE)
async def list_questions(call: MethodCall, params: NoParams) -> dict[str, Any]:
    """Return no questions: runs never stop to ask. Clients poll this and keep retrying if it fails."""
    return {"questions": []}


class CommandListParams(Params, frozen=True):
    session_key: str | None = None
    agent_id: str | None = None
    provider: str | None = None
    scope: Literal["text", "native", "both"] = "both"
    include_args: bool = False


@rpc_method("commands.list", READ_SCOPE, CommandListParams)
async def list_commands(call: MethodCall, params: CommandListParams) -> dict[str, Any]:
    commands = [
        {
            "name": command.name,
            "textAliases": [f"/{command.name}"],
            "description": command.description,
            "category": "session",
            "source": "native",
            "scope": "text",
            "acceptsArgs": command.has_argument,
        }
        for command in SLASH_COMMANDS
    ]
    return {"commands": commands}


class LogTailParams(Params, frozen=True):
    cursor: Annotated[int, Meta(ge=0)] | None = None
    limit: Annotated[int, Meta(ge=1, le=5000)] = 500
    max_bytes: Annotated[int, Meta(ge=1, le=1_000_000)] = 250_000


@rpc_method("logs.tail", READ_SCOPE, LogTailParams)
async def tail_log(call: MethodCall, params: LogTailParams) -> dict[str, Any]:
    return await asyncio.to_thread(
        _read_log_tail, call.gateway.state_dir, params.cursor, params.limit, params.max_bytes
    )


def _read_log_tail(state_dir: Path, cursor: int | None, limit: int, max_bytes: int) -> dict[str, Any]:
    """Return the lines after a cursor, or the last ones without a cursor. Blocks: call it in a thread."""
    path = state_dir / LOG_FILE_NAME
    try:
        size = path.stat().st_size
    except OSError:
        size = 0
    reset = cursor is not None and cursor > size  # the file was rotated
    start = max(0, size - max_bytes) if cursor is None or reset else max(cursor, size - max_bytes)
    content = b""
    if size > start:
        with path.open("rb") as file:
            file.seek(start)
            content = file.read(size - start)
    lines = content.decode(errors="replace").splitlines()
    if start > 0 and cursor is None and lines:
        lines = lines[1:]  # incomplete
    cut = len(lines) > limit
    return {
        "file": str(path),
        "cursor": size,
        "size": size,
        "lines": lines[-limit:],
        "truncated": cut or (start > 0 and start != cursor),
        "reset": reset,
    }
