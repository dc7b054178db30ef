"""`antiphon sessions`: lists sessions, prints their histories, and searches messages."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, get_args

import click

from antiphon.cli import _output, _sessions_edit, _sessions_transfer
from antiphon.cli._options import Settings, common_options, gateway_options
from antiphon.cli._param_types import FiniteNumberParam, IntegerParam, TimeParam
from antiphon.cli.chat import speakers
from antiphon.engine.sessions.transcripts import EntryRole, HistoryFilter
from antiphon.operations.types import ListFilter

if TYPE_CHECKING:
    from antiphon.operations.transcript_types import ConversationView, HistoryPage, SearchPage
    from antiphon.operations.types import SessionPage

SESSION_KINDS = ("main", "group", "cron", "hook", "node", "other")
MAX_ACTIVE_MINUTES = 1e9  # about 1900 years; earlier times have no number in the store
MAX_ENTRY_NUMBER = 2**53  # larger than the number of any entry


@click.group(help="List, read, search, label, delete, export and import sessions.")
@common_options
def command() -> None: ...


for one in (*_sessions_edit.EDIT_COMMANDS, *_sessions_transfer.TRANSFER_COMMANDS):
    command.add_command(one)


@command.command("list")
@click.option(
    "--kind",
    "kinds",
    multiple=True,
    type=click.Choice(SESSION_KINDS),
    help="Only this kind; may be repeated.",
)
@click.option("--agent", metavar="ID", help="Only sessions of this agent.")
@click.option(
    "--active",
    type=FiniteNumberParam("minutes", 0, MAX_ACTIVE_MINUTES, min_open=True),
    metavar="MIN",
    help="Only sessions active in the last MIN minutes.",
)
@click.option("--search", metavar="WORDS", help="Only sessions with names that start with these words.")
@click.option("--label", help="Only sessions with this label.")
@click.option("--limit", type=IntegerParam(1, 200), default=50, show_default=True)
@click.option("--archived", is_flag=True, help="Include archived sessions.")
@click.option("--cursor", help="Continue after an earlier page.")
@gateway_options
@common_options
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
    """List sessions, most recent first."""
    filters = ListFilter(
        kinds=kinds or None,
        agent_id=agent,
        active_minutes=active,
        search=search,
        label=label,
        limit=limit,
        include_archived=archived,
        cursor=cursor,
    )
    page = asyncio.run(_load_page(settings, filters))
    if settings.json:
        _output.print_json(page)
    else:
        _print_page(page)


async def _load_page(settings: Settings, filters: ListFilter) -> SessionPage:
    from antiphon.cli._backend import open_backend_for_reading

    async with open_backend_for_reading(settings) as backend:
        return await backend.list_sessions(filters)


def _print_page(page: SessionPage) -> None:
    if not page.sessions:
        click.echo("No sessions.")
        return
    rows = [
        [
            session.key,
            session.kind,
            _output.format_age(session.updated_at),
            str(session.total_tokens or ""),
            session.model or "",
            session.label or session.display_name or "",
        ]
        for session in page.sessions
    ]
    _output.print_table(["SESSION", "KIND", "ACTIVE", "TOKENS", "MODEL", "NAME"], rows)
    if page.next_cursor:
        click.echo(_output.dim(f"There are more: --cursor '{_output.clean_text(page.next_cursor)}'"))


@command.command()
@click.argument("key")
@click.option("--limit", type=IntegerParam(1, 1000), default=50, show_default=True)
@click.option("--tools", is_flag=True, help="Include tool results.")
@click.option("--all", "everything", is_flag=True, help="Include internal messages.")
@click.option(
    "--before",
    type=IntegerParam(1, MAX_ENTRY_NUMBER),
    metavar="SEQ",
    help="Only entries before this number.",
)
@click.option(
    "--after", type=IntegerParam(0, MAX_ENTRY_NUMBER), metavar="SEQ", help="Only entries after this number."
)
@click.option(
    "--role",
    "roles",
    multiple=True,
    type=click.Choice(get_args(EntryRole)),
    help="Only entries of this role; may be repeated.",
)
@click.option(
    "--since",
    type=TimeParam(),
    metavar="TIME",
    help="Only entries since then, such as 2h (ago) or 2026-08-01T09:00.",
)
@click.option("--errors", is_flag=True, help="Only failed runs and tool calls.")
@click.option("--tool", metavar="NAME", help="Only calls of this tool and their results.")
@gateway_options
@common_options
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
    """Show the messages of a session. KEY is its key, session id or label."""
    if before is not None and after is not None:
        raise click.UsageError("--before and --after cannot be combined. Keep one of them.")
    filters = HistoryFilter(
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
    page, known = asyncio.run(_load_history(settings, key, filters))
    if settings.json:
        _output.print_json(page)
        return
    day = None
    for item in page.messages:
        at: int | None = item.get("timestamp")
        if at is not None and _output.format_day(at) != day:
            day = _output.format_day(at)
            click.echo(_output.dim(f"      {day}"))
        _output.print_entry(
            at, speakers.format_heading(item, known), _output.format_entry_text(item), item["seq"]
        )
    if page.next_cursor:
        way = "--before" if after is None else "--after"
        sure = "may be" if filters.is_narrow else "is"
        click.echo(_output.dim(f"There {sure} more: {way} {_output.clean_line(str(page.next_cursor))}"))


async def _load_history(
    settings: Settings, key: str, filters: HistoryFilter
) -> tuple[HistoryPage, speakers.KnownSpeakers]:
    from antiphon.cli._backend import open_backend_for_reading

    async with open_backend_for_reading(settings) as backend:
        page = await backend.read_history(key, filters)
        known = speakers.KnownSpeakers(page.session_key)
        if not settings.json:
            await speakers.look_up_page_speakers(backend, page.messages, known)
        return page, known


@command.command()
@click.argument("words", nargs=-1, required=True)
@click.option("--session", metavar="KEY", help="Search only this session, including its past conversations.")
@click.option("--agent", metavar="ID", help="Search only this agent's sessions.")
@click.option("--limit", type=IntegerParam(1, 25), default=10, show_default=True)
@gateway_options
@common_options
@click.pass_obj
def search(
    settings: Settings, words: Sequence[str], session: str | None, agent: str | None, limit: int
) -> None:
    """Search for messages with all WORDS, latest first. Quote words to search for a phrase."""
    page = asyncio.run(_search_messages(settings, " ".join(words), session, agent, limit))
    if settings.json:
        _output.print_json(page)
    else:
        _print_search_results(page)


async def _search_messages(
    settings: Settings, query: str, session: str | None, agent: str | None, limit: int
) -> SearchPage:
    from antiphon.cli._backend import open_backend_for_search

    async with open_backend_for_search(settings) as backend:
        only = None if session is None else (await backend.describe(session)).key
        return await backend.search(query, session=only, agent_id=agent, limit=limit)


def _print_search_results(page: SearchPage) -> None:
    for hit in page.results:
        where = f"{_output.clean_line(hit.session_key)} {hit.seq}"
        about = f"{hit.role}, {_output.format_age(hit.timestamp)}, in {_output.clean_line(hit.session_id)}"
        click.echo(f"{_output.bold(where)} {_output.dim(about)}")
        click.echo(f"      {_output.clean_line(hit.snippet)}")
    if not page.results:
        click.echo("Nothing was found.")
    if page.indexing:
        click.echo(_output.dim("The latest messages are not indexed yet. Try again in a moment."))
    if page.truncated:
        click.echo(_output.dim("There may be more: give more words, or a --session."))


@command.command()
@click.argument("key")
@gateway_options
@common_options
@click.pass_obj
def past(settings: Settings, key: str) -> None:
    """List the conversations of a session, newest first. `sessions history ID` shows one of them."""
    conversations = asyncio.run(_load_conversations(settings, key))
    if settings.json:
        _output.print_json({"conversations": conversations})
        return
    rows = [
        [c.session_id, c.reason, _output.format_age(c.started_at), _format_end_time(c)] for c in conversations
    ]
    _output.print_table(["ID", "BEGUN BY", "BEGUN", "ENDED"], rows)


def _format_end_time(conversation: ConversationView) -> str:
    return "current" if conversation.ended_at is None else _output.format_age(conversation.ended_at)


async def _load_conversations(settings: Settings, key: str) -> list[ConversationView]:
    from antiphon.cli._backend import open_backend_for_reading

    async with open_backend_for_reading(settings) as backend:
        return await backend.list_conversations(key)
