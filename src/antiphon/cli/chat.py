"""`antiphon chat`: a conversation in this terminal, or for a script."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from antiphon.cli import output
from antiphon.cli.failures import INTERRUPTED
from antiphon.cli.settings import Settings, common
from antiphon.errors import ProviderError

if TYPE_CHECKING:
    from antiphon.cli.conversation import Conversation
    from antiphon.config import Loaded
    from antiphon.operations import Operations
    from antiphon.views import RunView, SessionView


@click.command(help="Talk with an agent. Without a terminal each line of the input is a message.")
@click.option("--agent", metavar="ID", help="Whom to talk to; default: the default agent.")
@click.option("--session", "key", metavar="KEY", help="Which session; default: the agent's main one.")
@click.option(
    "--message", "messages", multiple=True, metavar="TEXT", help="Say this and leave; may be repeated."
)
@common
@click.pass_obj
def command(settings: Settings, agent: str | None, key: str | None, messages: Sequence[str]) -> int:
    from antiphon.cli.journal import keep_journal
    from antiphon.cli.keyboard import interactive
    from antiphon.loop import run

    if agent and key:
        raise click.UsageError("--agent and --session both say where to talk; keep one of them.")
    person = interactive() and not messages
    if settings.json and person:
        raise click.UsageError("--json is for scripts: add --message, or pipe messages in.")
    loaded = settings.load()
    keep_journal(settings.paths.state_dir, debug=settings.debug)
    return run(_chat(settings, loaded, _reference(agent, key), messages, person=person))


def _reference(agent: str | None, key: str | None) -> str:
    return key or (f"agent:{agent}:main" if agent else "main")


async def _chat(
    settings: Settings, loaded: Loaded, reference: str, messages: Sequence[str], *, person: bool
) -> int:
    from antiphon.access import Caller
    from antiphon.cli.conversation import Conversation
    from antiphon.cli.keyboard import Keyboard
    from antiphon.cli.screen import Screen
    from antiphon.host import hosting

    async with hosting(loaded.config, settings.paths.state_dir) as operations:
        view = await operations.open(Caller.operator(), reference)
        style = "silent" if settings.json else "conversation" if person else "answers"
        screen = Screen(style, view.agent_id or "agent")
        if person:
            await _greet(settings, loaded, operations, view)
        with Keyboard(interactive=person) as keyboard:
            conversation = Conversation(
                operations,
                view.key,
                screen,
                keyboard=None if messages else keyboard,
                on_end=_emit if settings.json else None,
            )
            async with conversation.attended():
                await _converse(conversation, messages, person=person)
    return 0 if person else _outcome(conversation)


async def _converse(conversation: Conversation, messages: Sequence[str], *, person: bool) -> None:
    if person:
        await conversation.carry_on()
    if not messages:
        await conversation.talk()
    for message in messages:
        if not conversation.interrupted:
            await conversation.say(message)


def _outcome(conversation: Conversation) -> int:
    if conversation.interrupted:
        return INTERRUPTED
    if conversation.provider_failed:
        return ProviderError.exit_code
    return 1 if conversation.failed else 0


def _emit(view: RunView) -> None:
    output.emit(view, compact=True)


async def _greet(settings: Settings, loaded: Loaded, operations: Operations, view: SessionView) -> None:
    from antiphon import __version__
    from antiphon.access import Caller
    from antiphon.cli.config import answerer
    from antiphon.config import REHEARSAL_REF
    from antiphon.operations import HistoryFilter

    agent_id = view.agent_id or loaded.config.default_agent_id
    model = answerer(loaded, agent_id)
    page = await operations.history(Caller.operator(), view.key, HistoryFilter(limit=1))
    who = f"agent {output.bold(output.line(agent_id))} · {output.line(model)}"
    click.echo(f"{output.bold('antiphon')} {__version__} · {who}")
    so_far = f"{page.total} entries so far, /history shows them" if page.total else "a new conversation"
    click.echo(output.dim(f"session {output.line(view.key)} · {so_far}"))
    if model == REHEARSAL_REF:
        click.echo(
            "No model provider is configured, so the built-in rehearsal model answers: it does what a line\n"
            "such as `say hello` tells it to. To talk with a real one, put it under `models.providers` in\n"
            f"{str(settings.paths.config)!r}; `antiphon config check` says whether it can be used."
        )
    for warning in loaded.warnings:
        click.echo(output.dim(f"warning: {output.clean(warning)}"))
    click.echo(output.dim("/help lists the commands, /quit leaves."))
