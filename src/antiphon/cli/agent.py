"""`antiphon agent`: one message, one answer, and an exit code that says how it went."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import click

from antiphon.cli.quantities import Finite
from antiphon.cli.send import LONGEST, tell
from antiphon.cli.settings import Settings, common, reaching, reference

if TYPE_CHECKING:
    from antiphon.operations import Message
    from antiphon.views import RunView


@click.command(help="Let an agent do one thing, and print its answer.")
@click.option("--message", "text", required=True, metavar="TEXT", help="What to do.")
@click.option("--agent", metavar="ID", help="Who; default: the default agent.")
@click.option("--session", "key", metavar="KEY", help="In which session; default: the agent's main one.")
@click.option(
    "--timeout",
    type=Finite("seconds", 0, LONGEST, min_open=True),
    metavar="SECONDS",
    help="End the run after so long; default: as configured.",
)
@reaching
@common
@click.pass_obj
def command(settings: Settings, text: str, agent: str | None, key: str | None, timeout: float | None) -> int:
    from antiphon.operations import Message

    message = Message(session=reference(agent, key), content=text, origin="agent", timeout_seconds=timeout)
    return tell(settings, asyncio.run(_ask(settings, message)))


async def _ask(settings: Settings, message: Message) -> RunView:
    from antiphon.cli.desk import remember_replicas, talking
    from antiphon.cli.staying import leaving, tell_accepted, to_the_end

    async with talking(settings) as (desk, gateway):
        hosted = gateway is None
        await remember_replicas(settings, gateway)
        with leaving(message.session, hosted=hosted):
            accepted = await desk.submit(message)
        if not settings.json:
            tell_accepted(accepted.run_id, accepted.session_key)
        with leaving(accepted.session_key, hosted=hosted, run_id=accepted.run_id):
            return await to_the_end(desk, accepted.run_id)
