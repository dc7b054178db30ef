"""`antiphon chat`: a conversation in this terminal, or driven by a script."""

from __future__ import annotations

import sys
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
    from antiphon.operations.types import RunView, SessionView


@click.command(help="Chat with an agent. If standard input is not a terminal, each line is a message.")
@click.option("--agent", metavar="ID", help="Agent to talk to; default: the default agent.")
@click.option("--session", "key", metavar="KEY", help="Session to use; default: the agent's main session.")
@click.option(
    "--message",
    "messages",
    multiple=True,
    metavar="TEXT",
    help="Send this message, print the answer and exit; may be repeated.",
)
@gateway_options
@common_options
@click.pass_obj
def command(settings: Settings, agent: str | None, key: str | None, messages: Sequence[str]) -> int:
    from antiphon.event_loop import run

    interactive = sys.stdin.isatty() and sys.stdout.isatty() and not messages
    if settings.json and interactive:
        raise click.UsageError("--json is for scripts: add --message, or pipe messages in.")
    return run(_run_chat(settings, get_session_reference(agent, key), messages, interactive=interactive))


async def _run_chat(settings: Settings, reference: str, messages: Sequence[str], *, interactive: bool) -> int:
    from antiphon.cli._backend import open_backend_for_messages
    from antiphon.cli.chat.controller import ChatController
    from antiphon.cli.chat.line_reader import LineReader
    from antiphon.cli.chat.renderer import ChatRenderer

    renderer = ChatRenderer("silent" if settings.json else "conversation" if interactive else "answers")
    async with open_backend_for_messages(settings, renderer.report_connection_change) as (backend, gateway):
        view = await backend.open(reference)
        renderer.speaker = view.agent_id or renderer.speaker
        if interactive:
            from antiphon.cli.chat.prompt import HISTORY_FILE_NAME, ChatPrompt

            await _print_greeting(settings, backend, gateway, view)
            with ChatPrompt(settings.paths.state_dir / HISTORY_FILE_NAME) as prompt:
                chat = ChatController(backend, view.key, renderer, gateway=gateway, prompt=prompt)
                await chat.run(chat.read_messages())
            return 0
        chat = ChatController(
            backend,
            view.key,
            renderer,
            gateway=gateway,
            pipe=None if messages else LineReader(),
            on_end=_print_run_json if settings.json else None,
        )
        await chat.run(chat.send_messages(messages) if messages else chat.read_messages())
    return _get_exit_code(chat)


def _get_exit_code(chat: ChatController) -> int:
    if chat.interrupted:
        return INTERRUPTED_EXIT_CODE
    if chat.provider_failed:
        return ProviderError.exit_code
    return 1 if chat.failed else 0


def _print_run_json(view: RunView) -> None:
    _output.print_json(view, compact=True)


async def _print_greeting(
    settings: Settings, backend: Backend, gateway: Client | None, view: SessionView
) -> None:
    from antiphon import __version__
    from antiphon.engine.sessions.transcripts import HistoryFilter
    from antiphon.keys import REHEARSAL_MODEL_REF

    model = await _fetch_gateway_model(gateway, view) if gateway else _describe_local_model(settings, view)
    page = await backend.read_history(view.key, HistoryFilter(limit=1))
    who = f"agent {_output.bold(_output.clean_line(view.agent_id or 'agent'))} · {_output.clean_line(model)}"
    where = f" · gateway {gateway.site.url}" if gateway else ""
    click.echo(f"{_output.bold('antiphon')} {__version__} · {who}{where}")
    so_far = (
        f"{_output.format_count(page.total, 'entry', 'entries')} so far, see /history"
        if page.total
        else "a new conversation"
    )
    click.echo(_output.dim(f"session {_output.clean_line(view.key)} · {so_far}"))
    if model == REHEARSAL_MODEL_REF:
        from antiphon.cli.config import format_rehearsal_notice

        click.echo(format_rehearsal_notice(settings, None if gateway else settings.load()))
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
