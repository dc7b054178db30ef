"""`antiphon exchanges`: lists messages between sessions, with their progress and outcome."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from antiphon.cli import _output
from antiphon.cli._options import Settings, common_options, gateway_options
from antiphon.cli._param_types import IntegerParam

if TYPE_CHECKING:
    from antiphon.operations.collaboration_types import ExchangeDetail, ExchangePage

F = TypeVar("F", bound=Callable[..., Any])
MAX_TEXT_CHARS = 40  # of a text in a table on a terminal; `exchanges show` prints the whole text


def _add_filter_options(function: F) -> F:
    for option in (
        click.option("--cursor", help="Continue after an earlier page."),
        click.option("--limit", type=IntegerParam(1, 500), default=50, show_default=True),
        click.option("--unsettled", is_flag=True, help="Only exchanges that are not finished."),
        click.option("--session", metavar="KEY", help="Only exchanges from or to this session."),
    ):
        function = option(function)
    return function


@click.group(
    help="Show messages between sessions, newest first, and their outcome. Without a subcommand: `list`.",
    invoke_without_command=True,
)
@_add_filter_options
@gateway_options
@common_options
@click.pass_context
def command(ctx: click.Context, session: str | None, unsettled: bool, limit: int, cursor: str | None) -> None:
    if ctx.invoked_subcommand is None:
        _show_exchanges(ctx.ensure_object(Settings), session, unsettled=unsettled, limit=limit, cursor=cursor)


@command.command("list")
@_add_filter_options
@gateway_options
@common_options
@click.pass_obj
def list_exchanges(
    settings: Settings, session: str | None, unsettled: bool, limit: int, cursor: str | None
) -> None:
    """List exchanges, newest first."""
    _show_exchanges(settings, session, unsettled=unsettled, limit=limit, cursor=cursor)


def _show_exchanges(
    settings: Settings, session: str | None, *, unsettled: bool, limit: int, cursor: str | None
) -> None:
    page = asyncio.run(_load_page(settings, session, unsettled=unsettled, limit=limit, cursor=cursor))
    if settings.json:
        _output.print_json(page)
    elif not page.exchanges:
        click.echo("No unfinished exchanges." if unsettled else "No exchanges.")
    else:
        _print_page(page)


@command.command()
@click.argument("id", metavar="ID")
@gateway_options
@common_options
@click.pass_obj
def show(settings: Settings, id: str) -> None:
    """Print one exchange from its first message to its announcement. ID may be the beginning of an id."""
    detail = asyncio.run(_load_detail(settings, id))
    if settings.json:
        _output.print_json(detail)
    else:
        _print_detail(detail)


async def _load_detail(settings: Settings, id: str) -> ExchangeDetail:
    from antiphon.cli._backend import open_backend_for_reading

    async with open_backend_for_reading(settings) as backend:
        return await backend.get_exchange(id)


def _print_detail(detail: ExchangeDetail) -> None:
    exchange = detail.exchange
    sender = exchange.requester_session_key or "an operator"
    facts = [exchange.phase, f"turn {exchange.turn}/{exchange.turns}"]
    facts += [f"announcement {exchange.announced.replace('_', ' ')}"] if exchange.announced else []
    facts += [f"now in run {exchange.current_run_id}"] if exchange.current_run_id else []
    click.echo(f"{_output.bold('exchange')} {_output.clean_line(exchange.id)}")
    click.echo(f"  {_output.clean_line(sender)} ↔ {_output.clean_line(exchange.target_session_key)}")
    click.echo(f"  {_output.clean_line(', '.join(facts))}")
    if exchange.chain_id != exchange.id:
        click.echo(f"  hop {exchange.hop} of chain {_output.clean_line(exchange.chain_id)}")
    _output.print_entry(exchange.created_at, f"{sender}>", exchange.message or "(forgotten)")
    for step in detail.steps:
        what = (
            "announcement" if step.turn is None else f"turn {step.turn}/{exchange.turns}" if step.turn else ""
        )
        words = step.reply or step.error or f"({step.state})"
        _output.print_entry(step.at, f"{', '.join(filter(None, [step.session_key, what]))}>", words)


async def _load_page(
    settings: Settings, session: str | None, *, unsettled: bool, limit: int, cursor: str | None
) -> ExchangePage:
    from antiphon.cli._backend import open_backend_for_reading

    async with open_backend_for_reading(settings) as backend:
        return await backend.list_exchanges(session, unsettled=unsettled, limit=limit, cursor=cursor)


def _print_page(page: ExchangePage) -> None:
    rows = [
        [
            exchange.phase,
            exchange.requester_session_key or "an operator",
            exchange.target_session_key,
            _output.format_age(exchange.created_at),
            f"{exchange.turn}/{exchange.turns}",
            exchange.announced or "-",
            exchange.id,
            _output.shorten_text(exchange.message or "-", MAX_TEXT_CHARS),
            _output.shorten_text(exchange.latest_reply or "-", MAX_TEXT_CHARS),
        ]
        for exchange in page.exchanges
    ]
    _output.print_table(
        ["PHASE", "FROM", "TO", "SINCE", "TURNS", "ANNOUNCED", "ID", "MESSAGE", "LATEST REPLY"], rows
    )
    click.echo(_output.dim(f"One exchange in full: {_output.format_program()} exchanges show ID"))
    if page.next_cursor:
        click.echo(_output.dim(f"There are more: --cursor {_output.clean_text(page.next_cursor)}"))
