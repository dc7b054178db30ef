"""`antiphon sessions label`, `reset`, `restore` and `delete`: what is done to a session apart from talking in it."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING

import click

from antiphon.cli import output
from antiphon.cli.settings import Settings, common, reaching

if TYPE_CHECKING:
    from antiphon.views import SessionView


@click.command()
@click.argument("key")
@click.argument("text", required=False)
@click.option("--remove", is_flag=True, help="Take its label away.")
@reaching
@common
@click.pass_obj
def label(settings: Settings, key: str, text: str | None, remove: bool) -> None:
    """Give a session a label, by which it can be named wherever a KEY is asked for."""
    if remove == (text is not None):
        raise click.UsageError("Give the label, or say --remove.")
    session = asyncio.run(_label(settings, key, text))
    if settings.json:
        output.emit(session)
    else:
        now = f"is called {output.line(session.label)!r}" if session.label else "has no label"
        click.echo(f"{output.line(session.key)} {now}.")


async def _label(settings: Settings, key: str, text: str | None) -> SessionView:
    from antiphon.cli.desk import changing

    async with changing(settings) as desk:
        return await desk.label((await desk.describe(key)).key, text)


@click.command()
@click.argument("key")
@reaching
@common
@click.pass_obj
def reset(settings: Settings, key: str) -> None:
    """Begin a new conversation in a session; the old one is kept and can be restored."""
    old, session = asyncio.run(_reset(settings, key))
    if settings.json:
        output.emit(session)
    else:
        click.echo(
            f"{output.line(session.key)} begins a new conversation. "
            f"The old one: antiphon sessions history {output.line(old)}"
        )


async def _reset(settings: Settings, key: str) -> tuple[str, SessionView]:
    from antiphon.cli.desk import changing

    async with changing(settings) as desk:
        old = (await desk.describe(key)).session_id
        return old, await desk.renew(key, expected=old)


@click.command()
@click.argument("session_id", metavar="ID")
@reaching
@common
@click.pass_obj
def restore(settings: Settings, session_id: str) -> None:
    """Go back to an earlier conversation of a session; the current one is kept and can be restored in turn."""
    session = asyncio.run(_restore(settings, session_id))
    if settings.json:
        output.emit(session)
    else:
        click.echo(f"{output.line(session.key)} goes on with conversation {output.line(session.session_id)}.")


async def _restore(settings: Settings, session_id: str) -> SessionView:
    from antiphon.cli.desk import changing

    async with changing(settings) as desk:
        return await desk.restore(session_id)


@click.command()
@click.argument("key")
@click.option("--yes", is_flag=True, help="Do not ask.")
@reaching
@common
@click.pass_obj
def delete(settings: Settings, key: str, yes: bool) -> int:
    """Remove a session and everything that was ever said in it. What it spawned stays."""
    if not yes and (settings.json or not (sys.stdin.isatty() and sys.stdout.isatty())):
        raise click.UsageError("What is deleted cannot be brought back. Say --yes if you mean it.")
    session = asyncio.run(_named(settings, key))
    if not (yes or _meant(session.key)):
        click.echo("Nothing was deleted.")
        return 1
    asyncio.run(_delete(settings, session))
    if settings.json:
        output.emit({"deleted": session.key})
    else:
        click.echo(f"Deleted {output.line(session.key)}.")
    return 0


def _meant(session: str) -> bool:
    return click.confirm(
        f"Delete {output.line(session)} and everything said in it, earlier conversations too?"
    )


async def _named(settings: Settings, reference: str) -> SessionView:
    """The session, unless it cannot be deleted, or an earlier conversation of it was named."""
    from antiphon.cli.desk import reading
    from antiphon.filters import HistoryFilter
    from antiphon.operations import checks

    async with reading(settings) as desk:
        named = await desk.history(reference, HistoryFilter(limit=1))
        session = await desk.describe(named.session_key)
    if named.session_id != session.session_id:
        raise checks.ended(reference)
    checks.deletable(session.key)
    return session


async def _delete(settings: Settings, session: SessionView) -> None:
    """With the conversation that was looked at: by now the key, or the label, may stand for something else."""
    from antiphon.access import missing
    from antiphon.cli.desk import changing

    async with changing(settings) as desk:
        if not await desk.delete(session.key, session.session_id):
            raise missing(session.key)


COMMANDS = (label, reset, restore, delete)
