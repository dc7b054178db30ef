"""`antiphon sessions`: conversations as rows and as text, and what was said in them found again."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, get_args

import click

from antiphon.cli import output, transfers, upkeep, voices
from antiphon.cli.quantities import Finite, Moment
from antiphon.cli.settings import Settings, common, reaching
from antiphon.filters import HistoryFilter, ListFilter, Role

if TYPE_CHECKING:
    from antiphon.views import Conversation, HistoryPage, SearchPage, SessionPage

KINDS = ("main", "group", "cron", "hook", "node", "other")
MOST_MINUTES = 1e9  # two thousand years; a time before that has no number in the store
LAST = 2**53  # a number that no entry has


@click.group(help="List, read, find, name, delete, export and import conversations.")
@common
def command() -> None: ...


for one in (*upkeep.COMMANDS, *transfers.COMMANDS):
    command.add_command(one)


@command.command("list")
@click.option(
    "--kind", "kinds", multiple=True, type=click.Choice(KINDS), help="Only this kind; may be repeated."
)
@click.option("--agent", metavar="ID", help="Only this agent's.")
@click.option(
    "--active",
    type=Finite("minutes", 0, MOST_MINUTES, min_open=True),
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
@click.option("--all", "everything", is_flag=True, help="Show what was not meant for people, too.")
@click.option(
    "--before", type=click.IntRange(1, LAST), metavar="SEQ", help="Only entries before this number."
)
@click.option("--after", type=click.IntRange(0, LAST), metavar="SEQ", help="Only entries after this number.")
@click.option(
    "--role",
    "roles",
    multiple=True,
    type=click.Choice(get_args(Role)),
    help="Only of this role; may be repeated.",
)
@click.option(
    "--since", type=Moment(), metavar="TIME", help="Only since then, such as 2h (ago) or 2026-08-01T09:00."
)
@click.option("--errors", is_flag=True, help="Only what failed, tools too.")
@click.option("--tool", metavar="NAME", help="Only answers that called this tool, and what it returned.")
@reaching
@common
@click.pass_obj
def history(
    settings: Settings,
    key: str,
    limit: int,
    tools: bool,
    everything: bool,
    before: int | None,
    after: int | None,
    roles: tuple[str, ...],
    since: int | None,
    errors: bool,
    tool: str | None,
) -> None:
    """What was said in a session. KEY is its key, its session id or its label."""
    if before is not None and after is not None:
        raise click.UsageError("--before and --after read in two directions; keep one of them.")
    wanted = HistoryFilter(
        limit=limit,
        include_tools=tools,
        before=before,
        after=after,
        roles=roles or None,
        since=since,
        errors=errors,
        tool=tool,
        without_internal=not everything,
    )
    page, known = asyncio.run(_history(settings, key, wanted))
    if settings.json:
        output.emit(page)
        return
    day = None
    for item in page.messages:
        at: int | None = item.get("timestamp")
        if at is not None and output.format_day(at) != day:
            day = output.format_day(at)
            click.echo(output.dim(f"      {day}"))
        output.print_entry(at, voices.heading(item, known), output.said(item), item["seq"])
    if page.next_cursor:
        way = "--before" if after is None else "--after"
        sure = "may be" if wanted.narrow else "is"
        click.echo(output.dim(f"There {sure} more: {way} {output.line(str(page.next_cursor))}"))


async def _history(settings: Settings, key: str, wanted: HistoryFilter) -> tuple[HistoryPage, voices.Known]:
    from antiphon.cli.desk import reading

    async with reading(settings) as desk:
        page = await desk.history(key, wanted)
        known = voices.Known(page.session_key)
        if not settings.json:
            await voices.look_up_speakers(desk, page.messages, known)
        return page, known


@command.command()
@click.argument("words", nargs=-1, required=True)
@click.option("--session", metavar="KEY", help="Only in this session, its earlier conversations too.")
@click.option("--agent", metavar="ID", help="Only in this agent's sessions.")
@click.option("--limit", type=click.IntRange(1, 25), default=10, show_default=True)
@reaching
@common
@click.pass_obj
def search(
    settings: Settings, words: Sequence[str], session: str | None, agent: str | None, limit: int
) -> None:
    """What was said with all these WORDS in it, the latest first. Quotes within them make a phrase."""
    page = asyncio.run(_search(settings, " ".join(words), session, agent, limit))
    if settings.json:
        output.emit(page)
    else:
        _print_found(page)


async def _search(
    settings: Settings, query: str, session: str | None, agent: str | None, limit: int
) -> SearchPage:
    from antiphon.cli.desk import searching

    async with searching(settings) as desk:
        only = None if session is None else (await desk.describe(session)).key
        return await desk.search(query, session=only, agent_id=agent, limit=limit)


def _print_found(page: SearchPage) -> None:
    for hit in page.results:
        where = f"{output.line(hit.session_key)} {hit.seq}"
        about = f"{hit.role}, {output.ago(hit.timestamp)}, in {output.line(hit.session_id)}"
        click.echo(f"{output.bold(where)} {output.dim(about)}")
        click.echo(f"      {output.line(hit.snippet)}")
    if not page.results:
        click.echo("Nothing was found.")
    if page.indexing:
        click.echo(output.dim("What was said last cannot be found yet; try again in a moment."))
    if page.truncated:
        click.echo(output.dim("There may be more: give more words, or a --session."))


@command.command()
@click.argument("key")
@reaching
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
