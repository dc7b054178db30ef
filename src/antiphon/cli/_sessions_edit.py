"""`antiphon sessions label`, `reset`, `restore` and `delete`: changes to a session other than messages."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING

import click

from antiphon.cli import _output
from antiphon.cli._options import Settings, common_options, gateway_options

if TYPE_CHECKING:
    from antiphon.operations.types import SessionView


@click.command()
@click.argument("key")
@click.argument("text", required=False)
@click.option("--remove", is_flag=True, help="Remove the label.")
@gateway_options
@common_options
@click.pass_obj
def label(settings: Settings, key: str, text: str | None, remove: bool) -> None:
    """Set a session's label, which can be used in place of its key."""
    if remove == (text is not None):
        raise click.UsageError("Give a label, or use --remove.")
    session = asyncio.run(_set_label(settings, key, text))
    if settings.json:
        _output.print_json(session)
    else:
        now = f"is called {_output.clean_line(session.label)!r}" if session.label else "has no label"
        click.echo(f"{_output.clean_line(session.key)} {now}.")


async def _set_label(settings: Settings, key: str, text: str | None) -> SessionView:
    from antiphon.cli._backend import open_backend_for_changes

    async with open_backend_for_changes(settings) as backend:
        return await backend.set_label((await backend.describe(key)).key, text)


@click.command()
@click.argument("key")
@gateway_options
@common_options
@click.pass_obj
def reset(settings: Settings, key: str) -> None:
    """Start a new conversation in a session. The old one is kept and can be restored."""
    old, session = asyncio.run(_reset_session(settings, key))
    if settings.json:
        _output.print_json(session)
    else:
        click.echo(
            f"{_output.clean_line(session.key)} begins a new conversation. "
            f"The old one: {_output.format_program()} sessions history {_output.clean_line(old)}"
        )


async def _reset_session(settings: Settings, key: str) -> tuple[str, SessionView]:
    from antiphon.cli._backend import open_backend_for_changes

    async with open_backend_for_changes(settings) as backend:
        old = (await backend.describe(key)).session_id
        return old, await backend.renew(key, expected=old)


@click.command()
@click.argument("session_id", metavar="ID")
@gateway_options
@common_options
@click.pass_obj
def restore(settings: Settings, session_id: str) -> None:
    """Return to an earlier conversation of a session. The current one is kept."""
    session = asyncio.run(_restore_conversation(settings, session_id))
    if settings.json:
        _output.print_json(session)
    else:
        click.echo(
            f"{_output.clean_line(session.key)} continues with conversation {_output.clean_line(session.session_id)}."
        )


async def _restore_conversation(settings: Settings, session_id: str) -> SessionView:
    from antiphon.cli._backend import open_backend_for_changes

    async with open_backend_for_changes(settings) as backend:
        return await backend.restore(session_id)


@click.command()
@click.argument("key")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@gateway_options
@common_options
@click.pass_obj
def delete(settings: Settings, key: str, yes: bool) -> int:
    """Delete a session with all its conversations. Sessions that it spawned stay."""
    if not yes and (settings.json or not (sys.stdin.isatty() and sys.stdout.isatty())):
        raise click.UsageError("Deleting cannot be undone. Confirm with --yes.")
    session = asyncio.run(_load_deletable_session(settings, key))
    if not (yes or _confirm_delete(session.key)):
        click.echo("Nothing was deleted.")
        return 1
    asyncio.run(_delete_session(settings, session))
    if settings.json:
        _output.print_json({"deleted": session.key})
    else:
        click.echo(f"Deleted {_output.clean_line(session.key)}.")
    return 0


def _confirm_delete(session: str) -> bool:
    return click.confirm(
        f"Delete {_output.clean_line(session)} and all its messages, including earlier conversations?"
    )


async def _load_deletable_session(settings: Settings, reference: str) -> SessionView:
    """Return the session; raise if it cannot be deleted, or if the reference names an earlier conversation of it."""
    from antiphon.cli._backend import open_backend_for_reading
    from antiphon.engine import validation
    from antiphon.engine.sessions.transcripts import HistoryFilter

    async with open_backend_for_reading(settings) as backend:
        named = await backend.read_history(reference, HistoryFilter(limit=1))
        session = await backend.describe(named.session_key)
    if named.session_id != session.session_id:
        raise validation.build_conversation_ended_error(reference)
    validation.require_deletable_key(session.key)
    return session


async def _delete_session(settings: Settings, session: SessionView) -> None:
    """Delete the session only if it still has the confirmed conversation: its key or label may have been reused."""
    from antiphon.access import build_session_missing_error
    from antiphon.cli._backend import open_backend_for_changes

    async with open_backend_for_changes(settings) as backend:
        if not await backend.delete(session.key, session.session_id):
            raise build_session_missing_error(session.key)


EDIT_COMMANDS = (label, reset, restore, delete)
