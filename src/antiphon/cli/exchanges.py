"""`antiphon exchanges`: what sessions have said to each other, how far it has come, and what came of it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import click

from antiphon.cli import output
from antiphon.cli.settings import Settings, common, reaching

if TYPE_CHECKING:
    from antiphon.views import ExchangePage

MAX_TEXT_CHARS = 40  # of a text in a table on a terminal; `exchanges show` has all of it


@click.command(help="See what sessions have said to each other, the newest first, and what came of it.")
@click.option("--session", metavar="KEY", help="Only those from or to this session.")
@click.option("--unsettled", is_flag=True, help="Only those that still go on.")
@click.option("--limit", type=click.IntRange(1, 500), default=50, show_default=True)
@click.option("--cursor", help="Go on after an earlier page.")
@reaching
@common
@click.pass_obj
def command(settings: Settings, session: str | None, unsettled: bool, limit: int, cursor: str | None) -> None:
    page = asyncio.run(_page(settings, session, unsettled=unsettled, limit=limit, cursor=cursor))
    if settings.json:
        output.emit(page)
    elif not page.exchanges:
        click.echo("No exchanges that still go on." if unsettled else "No exchanges.")
    else:
        _print(page)


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
            output.brief(exchange.message or "-", MAX_TEXT_CHARS),
            output.brief(exchange.latest_reply or "-", MAX_TEXT_CHARS),
        ]
        for exchange in page.exchanges
    ]
    output.table(
        ["PHASE", "FROM", "TO", "SINCE", "TURNS", "ANNOUNCED", "ID", "MESSAGE", "LATEST REPLY"], rows
    )
    if page.next_cursor:
        click.echo(output.dim(f"There are more: --cursor {output.clean(page.next_cursor)}"))
