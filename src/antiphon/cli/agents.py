"""`antiphon agents`: the configured agents, their models, and which agents each may spawn and message."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import click

from antiphon.cli import _output
from antiphon.cli._options import Settings, common_options, gateway_options

if TYPE_CHECKING:
    from antiphon.operations.types import AgentSummary

NO_MESSAGING_HINT = (
    "No agent can message another. To allow it, set tools.sessions.visibility to 'all' and tools.agentToAgent.enabled"
    " to true in the configuration."
)


@click.command(
    help="List the agents, the model or function that answers for each, and which agents each may spawn and message."
)
@gateway_options
@common_options
@click.pass_obj
def command(settings: Settings) -> None:
    agents = asyncio.run(_load_agents(settings))
    if settings.json:
        _output.print_json({"agents": agents})
        return
    rows = [
        [
            f"{agent.id} *" if agent.default else agent.id,
            agent.name or "",
            agent.model or agent.runtime or "",
            _format_spawn_targets(agent),
            ", ".join(agent.may_message) or "none",
        ]
        for agent in agents
    ]
    _output.print_table(["AGENT", "NAME", "MODEL", "MAY SPAWN", "MAY MESSAGE"], rows)
    click.echo(_output.dim("* answers where no agent is named"))
    if len(agents) > 1 and not any(agent.may_message for agent in agents):
        click.echo(_output.dim(NO_MESSAGING_HINT))


async def _load_agents(settings: Settings) -> list[AgentSummary]:
    from antiphon.cli._backend import make_gateway_client

    if client := make_gateway_client(settings):
        async with client:
            return await client.list_agents()
    from antiphon.engine.sessions.resolver import SessionResolver
    from antiphon.operations.agents import AgentDirectory

    config = settings.load().config
    return AgentDirectory(config, SessionResolver(config)).list_summaries()


def _format_spawn_targets(agent: AgentSummary) -> str:
    others = [other for other in agent.may_spawn if other != agent.id]
    return ", ".join(["itself", *others])
