"""`antiphon sessions`: conversations as rows, as text and as files."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from antiphon.cli import output, voices
from antiphon.cli.settings import Settings, common, reaching

if TYPE_CHECKING:
    from antiphon.filters import HistoryFilter, ListFilter
    from antiphon.transfers.exports import Exported
    from antiphon.transfers.imports import Imported
    from antiphon.views import Conversation, HistoryPage, SessionPage, SessionView

KINDS = ("main", "group", "cron", "hook", "node", "other")
MOST_MINUTES = 1e9  # two thousand years; a time before that has no number in the store


class Minutes(click.FloatRange):
    """A number of minutes. `inf` and `nan` are numbers to Python and no time to anybody."""

    name = "minutes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = click.FLOAT.convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a number of minutes; give one such as 90.", param, ctx)
        return super().convert(number, param, ctx)


@click.group(help="List, read, export and import conversations.")
@common
def command() -> None: ...


@command.command("list")
@click.option(
    "--kind", "kinds", multiple=True, type=click.Choice(KINDS), help="Only this kind; may be repeated."
)
@click.option("--agent", metavar="ID", help="Only this agent's.")
@click.option(
    "--active",
    type=Minutes(min=0, min_open=True, max=MOST_MINUTES),
    metavar="MIN",
    help="Only those active in the last MIN minutes.",
)
@click.option("--search", metavar="WORDS", help="Only those whose names begin with these words.")
@click.option("--label", help="Only those with this label.")
@click.option("--limit", type=click.IntRange(1, 200), default=50, show_default=True)
@click.option("--archived", is_flag=True, help="Archived ones too.")
@click.option("--cursor", help="Go on after an earlier page.")
@reaching
@common
@click.pass_obj
def list_sessions(
    settings: Settings,
    kinds: Sequence[str],
    agent: str | None,
    active: float | None,
    search: str | None,
    label: str | None,
    limit: int,
    archived: bool,
    cursor: str | None,
) -> None:
    """Sessions, the most recent first."""
    from antiphon.filters import ListFilter

    wanted = ListFilter(
        kinds=kinds or None,
        agent_id=agent,
        active_minutes=active,
        search=search,
        label=label,
        limit=limit,
        include_archived=archived,
        cursor=cursor,
    )
    page = asyncio.run(_list(settings, wanted))
    if settings.json:
        output.emit(page)
    else:
        _print_page(page)


async def _list(settings: Settings, wanted: ListFilter) -> SessionPage:
    from antiphon.cli.desk import reading

    async with reading(settings) as desk:
        return await desk.list(wanted)


def _print_page(page: SessionPage) -> None:
    if not page.sessions:
        click.echo("No sessions.")
        return
    rows = [
        [
            session.key,
            session.kind,
            output.ago(session.updated_at),
            str(session.total_tokens or ""),
            session.model or "",
            session.label or session.display_name or "",
        ]
        for session in page.sessions
    ]
    output.table(["SESSION", "KIND", "ACTIVE", "TOKENS", "MODEL", "NAME"], rows)
    if page.next_cursor:
        click.echo(output.dim(f"There are more: --cursor '{output.clean(page.next_cursor)}'"))


@command.command()
@click.argument("key")
@click.option("--limit", type=click.IntRange(1, 1000), default=50, show_default=True)
@click.option("--tools", is_flag=True, help="Show what tools returned, too.")
@click.option("--before", type=click.IntRange(min=1), metavar="SEQ", help="Only entries before this number.")
@click.option("--after", type=click.IntRange(min=0), metavar="SEQ", help="Only entries after this number.")
@reaching
@common
@click.pass_obj
def history(
    settings: Settings, key: str, limit: int, tools: bool, before: int | None, after: int | None
) -> None:
    """What was said in a session. KEY is its key, its session id or its label."""
    from antiphon.filters import HistoryFilter

    wanted = HistoryFilter(limit=limit, include_tools=tools, before=before, after=after)
    page, labels = asyncio.run(_history(settings, key, wanted))
    if settings.json:
        output.emit(page)
        return
    for item in page.messages:
        who = output.bold(voices.heading(item, labels))
        click.echo(f"{output.dim(str(item['seq']).rjust(5))} {who} {output.said(item)}")
    if page.next_cursor:
        way = "--before" if after is None else "--after"
        click.echo(output.dim(f"There is more: {way} {output.line(str(page.next_cursor))}"))


async def _history(settings: Settings, key: str, wanted: HistoryFilter) -> tuple[HistoryPage, voices.Labels]:
    from antiphon.cli.desk import reading

    labels: voices.Labels = {}
    async with reading(settings) as desk:
        page = await desk.history(key, wanted)
        if not settings.json:
            await voices.learn(desk, page.messages, labels)
        return page, labels


@command.command()
@click.argument("key")
@common
@click.pass_obj
def past(settings: Settings, key: str) -> None:
    """The conversations a session has had, the newest first. `history` reads each by its id."""
    conversations = asyncio.run(_past(settings, key))
    if settings.json:
        output.emit(conversations)
        return
    rows = [[c.session_id, c.reason, output.ago(c.started_at), _ended(c)] for c in conversations]
    output.table(["ID", "BEGUN BY", "BEGUN", "ENDED"], rows)


def _ended(conversation: Conversation) -> str:
    return "current" if conversation.ended_at is None else output.ago(conversation.ended_at)


async def _past(settings: Settings, key: str) -> list[Conversation]:
    from antiphon.cli.desk import reading

    async with reading(settings) as desk:
        return await desk.conversations(key)


@command.command()
@click.argument("session_id", metavar="ID")
@common
@click.pass_obj
def restore(settings: Settings, session_id: str) -> None:
    """Go back to an earlier conversation of a session; the current one is kept and can be restored in turn."""
    session = asyncio.run(_restore(settings, session_id))
    if settings.json:
        output.emit(session)
    else:
        click.echo(
            f"{output.clean(session.key)} goes on with conversation {output.clean(session.session_id)}."
        )


async def _restore(settings: Settings, session_id: str) -> SessionView:
    from antiphon.cli.desk import calling

    if client := calling(settings):
        async with client:
            return await client.restore(session_id)
    from antiphon.access import Caller
    from antiphon.store.statedir import StateDir
    from antiphon.visits import keeping, operations_on

    config = settings.load().config
    async with keeping(config, settings.paths.state_dir) as store:
        operations = operations_on(config, store, StateDir.look(settings.paths.state_dir))
        return await operations.restore(Caller.operator(), session_id)


@command.command("export")
@click.argument("keys", nargs=-1, metavar="[KEY]...")
@click.option("--all", "everything", is_flag=True, help="Every conversation there is.")
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), help="Default: the state's transcripts."
)
@common
@click.pass_obj
def export_sessions(settings: Settings, keys: Sequence[str], everything: bool, out: Path | None) -> None:
    """Write conversations as JSONL. What was said is written as it was said: nothing is masked."""
    if everything == bool(keys):
        raise click.UsageError("Name the sessions to export, or say --all.")
    done = asyncio.run(_export(settings, keys, out))
    if settings.json:
        output.emit(done)
        return
    click.echo(f"Wrote {done.files} conversations with {done.messages} entries to {done.directory!r}.")
    if done.damaged:
        click.echo(f"{done.damaged} damaged entries were left out; `antiphon doctor` names them.")


async def _export(settings: Settings, keys: Sequence[str], out: Path | None) -> Exported:
    from antiphon.engine.door import Door
    from antiphon.store.statedir import StateDir
    from antiphon.transfers.exports import export_all, export_named
    from antiphon.visits import reading

    state_dir = settings.paths.state_dir
    directory = out or StateDir.look(state_dir).transcripts
    config = settings.config_when_needed()
    async with reading(config, state_dir) as store:
        if keys:
            return await export_named(store, Door(config), directory, keys)
        return await export_all(store, directory)


@command.command("import")
@click.argument("directory", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--agent", metavar="ID", help="Only this agent's, or whose the short keys are.")
@click.option("--dry-run", is_flag=True, help="Only say what would be imported.")
@common
@click.pass_obj
def import_sessions(settings: Settings, directory: Path, agent: str | None, dry_run: bool) -> int:
    """Bring in sessions from a state directory of the OpenClaw family, or from an export."""
    done = asyncio.run(_import(settings, directory, agent, dry_run=dry_run))
    if settings.json:
        output.emit(done)
    else:
        _print_import(done)
    return 1 if done.failed_count else 0


async def _import(settings: Settings, directory: Path, agent: str | None, *, dry_run: bool) -> Imported:
    import tempfile

    from antiphon.clock import SystemClock
    from antiphon.store.statedir import StateDir
    from antiphon.transfers.imports import bring
    from antiphon.visits import keeping

    config, state_dir = settings.load().config, settings.paths.state_dir
    with tempfile.TemporaryDirectory() as empty:
        if dry_run and not StateDir.look(state_dir).database.exists():
            state_dir = Path(empty)
        async with keeping(config, state_dir) as store:
            return await bring(store, config, directory, SystemClock().now(), agent_id=agent, dry_run=dry_run)


def _print_import(done: Imported) -> None:
    verb = "Would import" if done.dry_run else "Imported"
    click.echo(
        f"{verb} {done.imported} sessions with {done.messages} messages; {done.skipped} were here already."
    )
    notes = {
        "had a key that is in use: readable by their session id": done.beside,
        "had no transcript": done.missing_transcripts,
        "lines were damaged and left out": done.damaged_lines,
        "entries were no part of a conversation and left out": done.left_out_entries,
        "archived files were ignored": done.archived_files,
        "transcripts are not in sessions.json and were ignored": done.unlisted_files,
    }
    for note, count in notes.items():
        if count:
            click.echo(f"  {count} {note}")
    if done.unknown_agents:
        names = output.line(", ".join(done.unknown_agents[:20]))
        click.echo(f"  Not configured here: {names}. Add them to agents.list before speaking to them.")
    for failure in done.failed[:20]:
        click.echo(f"  {output.red('failed')} {output.clean(failure.key)}: {output.clean(failure.reason)}")
    if done.failed_count > 20:
        click.echo(f"  … and {done.failed_count - 20} more failed; --json lists them.")
