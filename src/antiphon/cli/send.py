"""`antiphon send`: words for a session, and its answer if somebody waits for it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import click

from antiphon.cli import output
from antiphon.cli.failures import outcome
from antiphon.cli.settings import Settings, common, reaching

if TYPE_CHECKING:
    from antiphon.cli.desk import Desk
    from antiphon.operations import Message
    from antiphon.views import Accepted, RunView

LOOK = 60.0  # seconds of one wait for a run that is waited for to its end
LONGEST = 366 * 86_400  # seconds


@click.command(help="Say something to a session. It is durable when this says so.")
@click.argument("session")
@click.argument("text")
@click.option(
    "--wait",
    "seconds",
    type=click.FloatRange(0, LONGEST),
    metavar="SECONDS",
    help="Wait so long for the answer, and print it.",
)
@click.option(
    "--key", metavar="IDEMPOTENCY", help="Said again with the same key, it is the same message; default: new."
)
@reaching
@common
@click.pass_obj
def command(settings: Settings, session: str, text: str, seconds: float | None, key: str | None) -> int:
    from antiphon.operations import Message

    message = Message(session=session, content=text, idempotency_key=key)
    accepted, view = asyncio.run(_send(settings, message, seconds))
    if seconds is not None:
        return tell(settings, view, seconds)
    if settings.json:
        output.emit(accepted)
    else:
        key = output.line(accepted.session_key)
        click.echo(f"Accepted: run {output.line(accepted.run_id)} in {key}.")
        click.echo(output.dim(f"The answer: antiphon sessions history {key}"), err=True)
    return 0


async def _send(settings: Settings, message: Message, seconds: float | None) -> tuple[Accepted, RunView]:
    from antiphon.cli.desk import talking

    async with talking(settings) as (desk, gateway):
        accepted = await desk.submit(message)
        if seconds is None and gateway is None:  # nobody else answers, so this process stays until it is done
            return accepted, await to_the_end(desk, accepted.run_id)
        return accepted, await desk.wait(accepted.run_id, seconds or 0)


async def to_the_end(desk: Desk, run_id: str) -> RunView:
    while True:
        view = await desk.wait(run_id, LOOK)
        if view.ended:
            return view


def tell(settings: Settings, view: RunView, seconds: float = 0) -> int:
    """Print how a run ended; the exit code that says the same."""
    if settings.json:
        output.emit(view)
    elif not view.ended:
        key = output.line(view.session_key)
        click.echo(
            f"There is no answer after {seconds:g} s; the run goes on. Look later: antiphon sessions history {key}",
            err=True,
        )
    else:
        if view.reply:
            click.echo(output.clean(view.reply))
        if view.state != "ok":
            click.echo(output.clean(view.error or f"The run ended as {view.state!r}."), err=True)
    return outcome(view)
