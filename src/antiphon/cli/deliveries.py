"""`antiphon deliveries`: what is on its way to people, what did not get there, and sending it once more."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from antiphon.cli import output
from antiphon.cli.settings import Settings, common, reaching

if TYPE_CHECKING:
    from antiphon.views import DeliveryPage, DeliveryView

F = TypeVar("F", bound=Callable[..., Any])
STATES = ("pending", "sending", "delivered", "blocked", "ambiguous", "dead")
STUCK = frozenset({"blocked", "ambiguous", "dead"})
MAX_TEXT_CHARS = 60  # of a text in a table on a terminal; --json has more of it


def _filters(function: F) -> F:
    for option in (
        click.option("--cursor", help="Go on after an earlier page."),
        click.option("--limit", type=click.IntRange(1, 500), default=50, show_default=True),
        click.option("--state", type=click.Choice(STATES), help="Only these."),
    ):
        function = option(function)
    return function


@click.group(
    help="See what is on its way to people, and send again what did not get there. Alone: as `list`.",
    invoke_without_command=True,
)
@_filters
@reaching
@common
@click.pass_context
def command(ctx: click.Context, state: str | None, limit: int, cursor: str | None) -> None:
    if ctx.invoked_subcommand is None:
        _list(ctx.ensure_object(Settings), state, limit, cursor)


@command.command("list")
@_filters
@reaching
@common
@click.pass_obj
def list_deliveries(settings: Settings, state: str | None, limit: int, cursor: str | None) -> None:
    """Deliveries, the newest first."""
    _list(settings, state, limit, cursor)


def _list(settings: Settings, state: str | None, limit: int, cursor: str | None) -> None:
    page = asyncio.run(_page(settings, state, limit, cursor))
    if settings.json:
        output.emit(page)
    elif not page.deliveries:
        click.echo(f"No deliveries that are {state}." if state else "No deliveries.")
    else:
        _print_page(page)


async def _page(settings: Settings, state: str | None, limit: int, cursor: str | None) -> DeliveryPage:
    from antiphon.cli.desk import reading

    async with reading(settings) as desk:
        return await desk.deliveries(state, limit, cursor)


def _print_page(page: DeliveryPage) -> None:
    rows = [
        [
            delivery.state,
            _where(delivery),
            output.ago(delivery.created_at),
            _tries(delivery),
            delivery.key,
            delivery.error or "",
            output.shorten(delivery.text, MAX_TEXT_CHARS),
        ]
        for delivery in page.deliveries
    ]
    output.table(["STATE", "WHERE", "SINCE", "TRIES", "KEY", "ERROR", "TEXT"], rows)
    if page.next_cursor:
        click.echo(output.dim(f"There are more: --cursor {output.clean(page.next_cursor)}"))
    if any(delivery.state in STUCK for delivery in page.deliveries):
        click.echo(output.dim("Once the reason is gone: antiphon deliveries retry KEY"))


def _where(delivery: DeliveryView) -> str:
    return f"{delivery.channel} {delivery.to or delivery.session_key}"


def _tries(delivery: DeliveryView) -> str:
    """What is shown in a web chat is there when it is written: it takes no attempt."""
    return str(delivery.attempts) if delivery.attempts or delivery.state != "delivered" else "-"


@command.command()
@click.argument("key")
@reaching
@common
@click.pass_obj
def retry(settings: Settings, key: str) -> int:
    """Send once more what is dead, ambiguous or blocked. What is ambiguous may arrive a second time."""
    delivery = asyncio.run(_retried(settings, key))
    if settings.json:
        output.emit(delivery)
    elif delivery.state in STUCK:
        click.echo(output.clean(f"It is {delivery.state} again: {delivery.error}"), err=True)
    elif delivery.state == "delivered":
        click.echo("It was delivered.")
    else:
        click.echo("It is on its way. See: antiphon deliveries")
    return 1 if delivery.state in STUCK else 0


async def _retried(settings: Settings, key: str) -> DeliveryView:
    """What has become of it a moment later; without a gateway, this process is what sends it."""
    from antiphon.cli.desk import talking
    from antiphon.cli.staying import sent_out

    async with talking(settings) as (desk, _):
        return await sent_out(desk, await desk.deliver_again(key))
