"""`antiphon exchanges`: what sessions have said to each other, how far it has come, and what came of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from antiphon.cli import output
from antiphon.cli.settings import Settings, common, reaching

if TYPE_CHECKING:
    from antiphon.views import ExchangeDetail, ExchangePage

F = TypeVar("F", bound=Callable[..., Any])
MAX_TEXT_CHARS = 40  # of a text in a table on a terminal; `exchanges show` prints the whole text


def _filters(function: F) -> F:
    for option in (
        click.option("--cursor", help="Continue after an earlier page."),
        click.option("--limit", type=click.IntRange(1, 500), default=50, show_default=True),
        click.option("--unsettled", is_flag=True, help="Only exchanges that are not finished."),
        click.option("--session", metavar="KEY", help="Only exchanges from or to this session."),
    ):
        function = option(function)
    return function


@click.group(
    help="Show what sessions have said to each other, newest first, and the outcome. Without a subcommand: `list`.",
    invoke_without_command=True,
)
@_filters
@reaching
@common
@click.pass_context
def command(ctx: click.Context, session: str | None, unsettled: bool, limit: int, cursor: str | None) -> None:
    if ctx.invoked_subcommand is None:
        _list(ctx.ensure_object(Settings), session, unsettled=unsettled, limit=limit, cursor=cursor)


@command.command("list")
@_filters
@reaching
@common
@click.pass_obj
def list_exchanges(
    settings: Settings, session: str | None, unsettled: bool, limit: int, cursor: str | None
) -> None:
    """List exchanges, newest first."""
    _list(settings, session, unsettled=unsettled, limit=limit, cursor=cursor)


def _list(
    settings: Settings, session: str | None, *, unsettled: bool, limit: int, cursor: str | None
) -> None:
    page = asyncio.run(_page(settings, session, unsettled=unsettled, limit=limit, cursor=cursor))
    if settings.json:
        output.emit(page)
    elif not page.exchanges:
        click.echo("No exchanges that still go on." if unsettled else "No exchanges.")
    else:
        _print(page)


@command.command()
@click.argument("id", metavar="ID")
@reaching
@common
@click.pass_obj
def show(settings: Settings, id: str) -> None:
    """Print one exchange from its first message to its announcement. ID may be the beginning of an id."""
    detail = asyncio.run(_detail(settings, id))
    if settings.json:
        output.emit(detail)
    else:
        _print_detail(detail)


async def _detail(settings: Settings, id: str) -> ExchangeDetail:
    from antiphon.cli.desk import reading

    async with reading(settings) as desk:
        return await desk.exchange(id)


def _print_detail(detail: ExchangeDetail) -> None:
    exchange = detail.exchange
    sender = exchange.requester_session_key or "an operator"
    facts = [exchange.phase, f"turn {exchange.turn}/{exchange.turns}"]
    facts += [f"announcement {exchange.announced}"] if exchange.announced else []
    facts += [f"now in run {exchange.current_run_id}"] if exchange.current_run_id else []
    click.echo(f"{output.bold('exchange')} {output.line(exchange.id)}")
    click.echo(f"  {output.line(sender)} ↔ {output.line(exchange.target_session_key)}")
    click.echo(f"  {output.line(', '.join(facts))}")
    if exchange.chain_id != exchange.id:
        click.echo(f"  hop {exchange.hop} of chain {output.line(exchange.chain_id)}")
    output.print_entry(exchange.created_at, f"{sender}>", exchange.message or "(forgotten)")
    for step in detail.steps:
        what = (
            "announcement" if step.turn is None else f"turn {step.turn}/{exchange.turns}" if step.turn else ""
        )
        words = step.reply or step.error or f"({step.state})"
        output.print_entry(step.at, f"{', '.join(filter(None, [step.session_key, what]))}>", words)


async def _page(
    settings: Settings, session: str | None, *, unsettled: bool, limit: int, cursor: str | None
) -> ExchangePage:
    from antiphon.cli.desk import reading

    async with reading(settings) as desk:
        return await desk.exchanges(session, unsettled=unsettled, limit=limit, cursor=cursor)


def _print(page: ExchangePage) -> None:
    rows = [
        [
            exchange.phase,
            exchange.requester_session_key or "an operator",
            exchange.target_session_key,
            output.ago(exchange.created_at),
            f"{exchange.turn}/{exchange.turns}",
            exchange.announced or "-",
            exchange.id,
            output.shorten(exchange.message or "-", MAX_TEXT_CHARS),
            output.shorten(exchange.latest_reply or "-", MAX_TEXT_CHARS),
        ]
        for exchange in page.exchanges
    ]
    output.table(
        ["PHASE", "FROM", "TO", "SINCE", "TURNS", "ANNOUNCED", "ID", "MESSAGE", "LATEST REPLY"], rows
    )
    click.echo(output.dim("One exchange in full: antiphon exchanges show ID"))
    if page.next_cursor:
        click.echo(output.dim(f"There are more: --cursor {output.clean(page.next_cursor)}"))
