"""`antiphon agents`: who is configured, what answers for them, and who may start whom."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import click

from antiphon.cli import output
from antiphon.cli.settings import Settings, common, reaching

if TYPE_CHECKING:
    from antiphon.views import AgentCard


@click.command(help="The configured agents, what answers for them, and who may spawn whom.")
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
        ]
        for card in cards
    ]
    output.table(["AGENT", "NAME", "MODEL", "MAY SPAWN"], rows)
    click.echo(output.dim("* answers where no agent is named"))


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
