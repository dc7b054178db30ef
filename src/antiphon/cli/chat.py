"""`antiphon chat`: a conversation in this terminal, or for a script."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from antiphon.cli import output
from antiphon.cli.failures import INTERRUPTED
from antiphon.cli.settings import Settings, common, reaching, reference
from antiphon.errors import ProviderError

if TYPE_CHECKING:
    from antiphon.cli.conversation import Conversation
    from antiphon.cli.desk import Desk
    from antiphon.client import Client
    from antiphon.views import RunView, SessionView

REHEARSAL = "rehearsal/rehearsal"  # as `antiphon.config` calls it, which a client does not load


@click.command(help="Talk with an agent. Without a terminal each line of the input is a message.")
@click.option("--agent", metavar="ID", help="Whom to talk to; default: the default agent.")
@click.option("--session", "key", metavar="KEY", help="Which session; default: the agent's main one.")
@click.option(
    "--message", "messages", multiple=True, metavar="TEXT", help="Say this and leave; may be repeated."
)
@reaching
@common
@click.pass_obj
def command(settings: Settings, agent: str | None, key: str | None, messages: Sequence[str]) -> int:
    from antiphon.cli.keyboard import interactive
    from antiphon.loop import run

    person = interactive() and not messages
    if settings.json and person:
        raise click.UsageError("--json is for scripts: add --message, or pipe messages in.")
    return run(_chat(settings, reference(agent, key), messages, person=person))


async def _chat(settings: Settings, reference: str, messages: Sequence[str], *, person: bool) -> int:
    from antiphon.cli.conversation import Conversation
    from antiphon.cli.desk import talking
    from antiphon.cli.keyboard import Keyboard
    from antiphon.cli.screen import Screen

    screen = Screen("silent" if settings.json else "conversation" if person else "answers")
    async with talking(settings, screen.note) as (desk, gateway):
        view = await desk.open(reference)
        screen.speaker = view.agent_id or screen.speaker
        if person:
            await _greet(settings, desk, gateway, view)
        with Keyboard(interactive=person) as keyboard:
            conversation = Conversation(
                desk,
                view.key,
                screen,
                gateway=gateway,
                keyboard=None if messages else keyboard,
                on_end=_emit if settings.json else None,
            )
            await conversation.attend(_converse(conversation, messages, person=person))
    return 0 if person else _outcome(conversation)


async def _converse(conversation: Conversation, messages: Sequence[str], *, person: bool) -> None:
    if person:
        await conversation.carry_on()
    if messages:
        await conversation.say(messages)
    else:
        await conversation.talk()


def _outcome(conversation: Conversation) -> int:
    if conversation.interrupted:
        return INTERRUPTED
    if conversation.provider_failed:
        return ProviderError.exit_code
    return 1 if conversation.failed else 0


def _emit(view: RunView) -> None:
    output.emit(view, compact=True)


async def _greet(settings: Settings, desk: Desk, gateway: Client | None, view: SessionView) -> None:
    from antiphon import __version__
    from antiphon.filters import HistoryFilter

    model = await _answered_by_gateway(gateway, view) if gateway else _answered_here(settings, view)
    page = await desk.history(view.key, HistoryFilter(limit=1))
    who = f"agent {output.bold(output.line(view.agent_id or 'agent'))} · {output.line(model)}"
    where = f" · gateway {gateway.site.url}" if gateway else ""
    click.echo(f"{output.bold('antiphon')} {__version__} · {who}{where}")
    so_far = f"{page.total} entries so far, /history shows them" if page.total else "a new conversation"
    click.echo(output.dim(f"session {output.line(view.key)} · {so_far}"))
    if model == REHEARSAL:
        click.echo(
            "No model provider is configured, so the built-in rehearsal model answers: it does what a line\n"
            "such as `say hello` tells it to. To talk with a real one, put it under `models.providers` in\n"
            f"{str(settings.paths.config)!r}; `antiphon config check` says whether it can be used."
        )
    click.echo(output.dim("/help lists the commands, /quit leaves."))


def _answered_here(settings: Settings, view: SessionView) -> str:
    """What answers; and what the configuration warns of."""
    from antiphon.cli.config import answerer, missing_secrets

    loaded = settings.load()
    for warning in (*loaded.warnings, *missing_secrets(loaded.config)):
        click.echo(output.dim(f"warning: {output.clean(warning)}"))
    return answerer(loaded, view.agent_id or loaded.config.default_agent_id)


async def _answered_by_gateway(gateway: Client, view: SessionView) -> str:
    agents = (await gateway.call("agents.list"))["agents"]
    return next((agent["model"]["primary"] for agent in agents if agent["id"] == view.agent_id), "?")
