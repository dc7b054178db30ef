"""`antiphon agents`: the configured agents, their models, and which agents each may spawn and message."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import click

from antiphon.cli import _output
from antiphon.cli._options import Settings, common_options, gateway_options

if TYPE_CHECKING:
    from antiphon.operations.types import AgentCard

NO_MESSAGING_HINT = (
    "No agent can message another. To allow it, set tools.sessions.visibility to 'all' and tools.agentToAgent.enabled"
    " to true in the configuration."
)


@click.command(help="List the agents, what answers for each, and which agents each may spawn and message.")
@gateway_options
@common_options
@click.pass_obj
def command(settings: Settings) -> None:
    cards = asyncio.run(_load_agent_cards(settings))
    if settings.json:
        _output.print_json({"agents": cards})
        return
    rows = [
        [
            f"{card.id} *" if card.default else card.id,
            card.name or "",
            card.model or card.runtime or "",
            _format_spawn_targets(card),
            ", ".join(card.may_message) or "none",
        ]
        for card in cards
    ]
    _output.print_table(["AGENT", "NAME", "MODEL", "MAY SPAWN", "MAY MESSAGE"], rows)
    click.echo(_output.dim("* answers where no agent is named"))
    if len(cards) > 1 and not any(card.may_message for card in cards):
        click.echo(_output.dim(NO_MESSAGING_HINT))


async def _load_agent_cards(settings: Settings) -> list[AgentCard]:
    from antiphon.cli._backend import make_gateway_client

    if client := make_gateway_client(settings):
        async with client:
            return await client.list_agents()
    from antiphon.engine.sessions.resolver import SessionResolver
    from antiphon.operations.agents import AgentDirectory

    config = settings.load().config
    return AgentDirectory(config, SessionResolver(config)).list_cards()


def _format_spawn_targets(card: AgentCard) -> str:
    others = [agent for agent in card.may_spawn if agent != card.id]
    return ", ".join(["itself", *others])
