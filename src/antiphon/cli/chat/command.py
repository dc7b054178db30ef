"""`antiphon chat`: a conversation in this terminal, or driven by a script."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from antiphon.cli import _output
from antiphon.cli._errors import INTERRUPTED_EXIT_CODE
from antiphon.cli._options import Settings, common_options, gateway_options, get_session_reference
from antiphon.errors import ProviderError

if TYPE_CHECKING:
    from antiphon.cli._backend import Backend
    from antiphon.cli.chat.controller import ChatController
    from antiphon.client import Client
    from antiphon.views import RunView, SessionView

# Same value as in `antiphon.config`, which a client does not import.
REHEARSAL_MODEL_REF = "rehearsal/rehearsal"


@click.command(help="Talk with an agent. Without a terminal each line of the input is a message.")
@click.option("--agent", metavar="ID", help="Whom to talk to; default: the default agent.")
@click.option("--session", "key", metavar="KEY", help="Which session; default: the agent's main one.")
@click.option(
    "--message", "messages", multiple=True, metavar="TEXT", help="Say this and leave; may be repeated."
)
@gateway_options
@common_options
@click.pass_obj
def command(settings: Settings, agent: str | None, key: str | None, messages: Sequence[str]) -> int:
    from antiphon.cli.chat.line_reader import is_interactive
    from antiphon.event_loop import run

    person = is_interactive() and not messages
    if settings.json and person:
        raise click.UsageError("--json is for scripts: add --message, or pipe messages in.")
    return run(_run_chat(settings, get_session_reference(agent, key), messages, person=person))


async def _run_chat(settings: Settings, reference: str, messages: Sequence[str], *, person: bool) -> int:
    from antiphon.cli._backend import open_backend_for_messages
    from antiphon.cli.chat.controller import ChatController
    from antiphon.cli.chat.line_reader import LineReader
    from antiphon.cli.chat.renderer import ChatRenderer

    screen = ChatRenderer("silent" if settings.json else "conversation" if person else "answers")
    async with open_backend_for_messages(settings, screen.print_note) as (desk, gateway):
        view = await desk.open(reference)
        screen.speaker = view.agent_id or screen.speaker
        if person:
            await _print_greeting(settings, desk, gateway, view)
        with LineReader(interactive=person) as keyboard:
            conversation = ChatController(
                desk,
                view.key,
                screen,
                gateway=gateway,
                keyboard=None if messages else keyboard,
                on_end=_print_run_json if settings.json else None,
            )
            await conversation.run(_run_conversation(conversation, messages, person=person))
    return 0 if person else _get_exit_code(conversation)


async def _run_conversation(conversation: ChatController, messages: Sequence[str], *, person: bool) -> None:
    if person:
        await conversation.resume_unfinished_runs()
    if messages:
        await conversation.send_messages(messages)
    else:
        await conversation.read_messages()


def _get_exit_code(conversation: ChatController) -> int:
    if conversation.interrupted:
        return INTERRUPTED_EXIT_CODE
    if conversation.provider_failed:
        return ProviderError.exit_code
    return 1 if conversation.failed else 0


def _print_run_json(view: RunView) -> None:
    _output.print_json(view, compact=True)


async def _print_greeting(
    settings: Settings, desk: Backend, gateway: Client | None, view: SessionView
) -> None:
    from antiphon import __version__
    from antiphon.filters import HistoryFilter

    model = await _fetch_gateway_model(gateway, view) if gateway else _describe_local_model(settings, view)
    page = await desk.history(view.key, HistoryFilter(limit=1))
    who = f"agent {_output.bold(_output.clean_line(view.agent_id or 'agent'))} · {_output.clean_line(model)}"
    where = f" · gateway {gateway.site.url}" if gateway else ""
    click.echo(f"{_output.bold('antiphon')} {__version__} · {who}{where}")
    so_far = f"{page.total} entries so far, /history shows them" if page.total else "a new conversation"
    click.echo(_output.dim(f"session {_output.clean_line(view.key)} · {so_far}"))
    if model == REHEARSAL_MODEL_REF:
        click.echo(
            "No model provider is configured, so the built-in rehearsal model answers: it does what a line\n"
            "such as `say hello` tells it to. To talk with a real one, put it under `models.providers` in\n"
            f"{str(settings.paths.config)!r}; `antiphon config check` says whether it can be used."
        )
    click.echo(_output.dim("/help lists the commands, /quit leaves."))


def _describe_local_model(settings: Settings, view: SessionView) -> str:
    """Return the model that answers, and warnings about the configuration."""
    from antiphon.cli.config import describe_answering_model, find_missing_secrets

    loaded = settings.load()
    for warning in (*loaded.warnings, *find_missing_secrets(loaded.config)):
        click.echo(_output.dim(f"warning: {_output.clean_text(warning)}"))
    return describe_answering_model(loaded, view.agent_id or loaded.config.default_agent_id)


async def _fetch_gateway_model(gateway: Client, view: SessionView) -> str:
    agents = (await gateway.call("agents.list"))["agents"]
    return next((agent["model"]["primary"] for agent in agents if agent["id"] == view.agent_id), "?")
