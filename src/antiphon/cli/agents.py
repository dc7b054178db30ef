"""`antiphon agents`: the configured agents, what answers for each, and which agents each may spawn and message."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import click

from antiphon.cli import output
from antiphon.cli.settings import Settings, common, reaching

if TYPE_CHECKING:
    from antiphon.views import AgentCard

NO_REACH = (
    "No agent can message another. To allow it, set tools.sessions.visibility to 'all' and tools.agentToAgent.enabled"
    " to true in the configuration."
)


@click.command(help="List the agents, what answers for each, and which agents each may spawn and message.")
@reaching
@common
@click.pass_obj
def command(settings: Settings) -> None:
    cards = asyncio.run(_cards(settings))
    if settings.json:
        output.emit({"agents": cards})
        return
    rows = [
        [
            f"{card.id} *" if card.default else card.id,
            card.name or "",
            card.model or card.runtime or "",
            _spawns(card),
            ", ".join(card.may_message) or "none",
        ]
        for card in cards
    ]
    output.table(["AGENT", "NAME", "MODEL", "MAY SPAWN", "MAY MESSAGE"], rows)
    click.echo(output.dim("* answers where no agent is named"))
    if len(cards) > 1 and not any(card.may_message for card in cards):
        click.echo(output.dim(NO_REACH))


async def _cards(settings: Settings) -> list[AgentCard]:
    from antiphon.cli.desk import calling

    if client := calling(settings):
        async with client:
            return await client.roster()
    from antiphon.engine.door import Door
    from antiphon.operations.agents import Roster

    config = settings.load().config
    return Roster(config, Door(config)).cards()


def _spawns(card: AgentCard) -> str:
    others = [agent for agent in card.may_spawn if agent != card.id]
    return ", ".join(["itself", *others])
