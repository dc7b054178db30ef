"""`antiphon tools`: the tools of an agent, and the key of the configuration that decides about each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from antiphon.cli import _output
from antiphon.cli._options import Settings, common_options

if TYPE_CHECKING:
    from antiphon.config import Config


@click.command(
    help="List every tool with the key of the configuration that decides whether the agent has it."
)
@click.option("--agent", metavar="ID", help="The agent (default: the one that answers where none is named).")
@click.option(
    "--model", metavar="REF", help="The model that answers, as provider/model (default: the agent's)."
)
@click.option("--sandboxed", is_flag=True, help="Show what a sandboxed session has.")
@common_options
@click.pass_obj
def command(settings: Settings, agent: str | None, model: str | None, sandboxed: bool) -> None:
    config = settings.load().config
    agent_id = config.get_agent(agent or config.default_agent_id).id
    if model is not None:
        config.find_model(model)
    rows = _explain_tools(config, agent_id, model, sandboxed=sandboxed)
    if settings.json:
        _output.print_json({"agentId": agent_id, "tools": rows})
        return
    _output.print_table(
        ["TOOL", "OFFERED", "KEY", "WHY"],
        [[row["name"], "yes" if row["offered"] else "no", row["path"] or "", row["reason"]] for row in rows],
    )


def _explain_tools(
    config: Config, agent_id: str, model: str | None, *, sandboxed: bool
) -> list[dict[str, Any]]:
    from antiphon.engine.sessions.identity import get_answering_model
    from antiphon.preflight import build_toolbox
    from antiphon.tool_selection import ToolAudience, decide_tool
    from antiphon.tools.python_tools import load_python_tools

    is_sandboxed = sandboxed or config.get_agent(agent_id).sandbox.mode == "all"
    audience = ToolAudience(model=get_answering_model(config, agent_id, model), is_sandboxed=is_sandboxed)
    rows: list[dict[str, Any]] = []
    for name, tool in build_toolbox(config, load_python_tools(config.tools.python)).tools.items():
        decided = decide_tool(tool.facts, config.get_agent(agent_id).tools.selection, audience)
        absence = tool.explain_absence(agent_id) if decided.is_offered else None
        rows.append(
            {
                "name": name,
                "offered": decided.is_offered and absence is None,
                "path": decided.path if absence is None else None,
                "reason": absence or decided.reason,
            }
        )
    return rows
