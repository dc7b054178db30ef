"""`antiphon tools`: the tools of an agent or of a session, and the configuration key that decides about each."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import click

from antiphon.cli import _output
from antiphon.cli._options import Settings, common_options

if TYPE_CHECKING:
    from antiphon.config import Config
    from antiphon.engine.sessions.identity import ToolExplanation
    from antiphon.engine.toolbox import Tool, Toolbox


@click.command(
    help="List every tool with the configuration key that decides whether the agent or the session has it."
)
@click.option("--agent", metavar="ID", help="The agent (default: the default agent).")
@click.option(
    "--model", metavar="REF", help="The model that answers, as provider/model (default: the agent's)."
)
@click.option("--sandboxed", is_flag=True, help="Show what a sandboxed session has.")
@click.option("--session", metavar="KEY", help="Show what this stored session has.")
@common_options
@click.pass_obj
def command(
    settings: Settings, agent: str | None, model: str | None, sandboxed: bool, session: str | None
) -> None:
    if session is not None and (agent is not None or model is not None or sandboxed):
        raise click.UsageError("--session decides the agent, the model and the sandbox: use it alone.")
    if session is not None and settings.named_gateways:
        raise click.UsageError("--session reads the store of this machine: use it without --url.")
    config = settings.load().config
    agent_id = config.get_agent(agent or config.default_agent_id).id
    if model is not None:
        config.find_model(model)
    if session is None:
        shown, rows = asyncio.run(_explain_agent(settings, config, agent_id, model, sandboxed=sandboxed))
    else:
        shown, rows = asyncio.run(_explain_session(settings, config, session))
    if settings.json:
        tools = [
            {"name": row.name, "offered": row.is_offered, "path": row.path, "reason": row.reason}
            for row in rows
        ]
        _output.print_json({**shown, "tools": tools})
        return
    _output.print_table(
        ["TOOL", "OFFERED", "KEY", "WHY"],
        [[row.name, "yes" if row.is_offered else "no", row.path or "", row.reason] for row in rows],
    )


async def _explain_agent(
    settings: Settings, config: Config, agent_id: str, model: str | None, *, sandboxed: bool
) -> tuple[dict[str, Any], list[ToolExplanation]]:
    from antiphon.engine.sessions.identity import explain_tools, get_answering_model
    from antiphon.tool_selection import ToolAudience

    is_sandboxed = sandboxed or config.get_agent(agent_id).sandbox.mode == "all"
    audience = ToolAudience(model=get_answering_model(config, agent_id, model), is_sandboxed=is_sandboxed)
    toolbox = await _build_toolbox(settings, config, [agent_id])
    return {"agentId": agent_id}, explain_tools(config, toolbox.tools, agent_id, audience)


async def _explain_session(
    settings: Settings, config: Config, reference: str
) -> tuple[dict[str, Any], list[ToolExplanation]]:
    from antiphon.access import Caller
    from antiphon.engine.sessions.identity import explain_tools, get_answering_model
    from antiphon.state_access import create_operations, open_store_readonly
    from antiphon.store.statedir import StateDir
    from antiphon.tool_selection import ToolAudience

    state_dir = settings.paths.state_dir
    toolbox = await _build_toolbox(settings, config, config.agent_ids)
    async with open_store_readonly(config, state_dir) as store:
        operations = create_operations(config, store, StateDir.open_unlocked(state_dir), toolbox=toolbox)
        session, actor = await operations.sessions.describe_actor(Caller.operator(), reference)
    agent_id, is_sandboxed = session.agent_id or config.default_agent_id, actor.caller.sandboxed
    audience = ToolAudience(
        model=get_answering_model(config, agent_id, session.model), is_sandboxed=is_sandboxed
    )
    shown = {"agentId": agent_id, "sessionKey": session.key, "sandboxed": is_sandboxed}
    return shown, explain_tools(config, toolbox.tools, agent_id, audience, actor.tools)


async def _build_toolbox(
    settings: Settings, config: Config, agent_ids: list[str] | tuple[str, ...]
) -> Toolbox:
    """Return the tools, after finding out whether the sandbox of commands works on this machine."""
    from antiphon.preflight import build_toolbox
    from antiphon.tools.python_tools import load_python_tools
    from antiphon.workspace.sandbox import Sandboxes

    sandboxes = Sandboxes(config, settings.paths.state_dir)
    for agent_id in agent_ids:
        commands = config.get_agent(agent_id).exec
        if commands.host == "sandbox" and commands.security != "deny":
            await sandboxes.find_status(agent_id)
    python_tools = await asyncio.to_thread(load_python_tools, config.tools.python)
    mcp_tools: list[Tool] = []
    if config.enabled_mcp_servers:
        from antiphon.mcp.servers import build_known_tools

        mcp_tools = await asyncio.to_thread(build_known_tools, config, settings.paths.state_dir)
    return build_toolbox(config, [*python_tools, *mcp_tools], sandboxes)
