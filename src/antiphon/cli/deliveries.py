"""`antiphon deliveries`: lists pending, delivered and failed messages to people, and retries failed ones."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from antiphon.cli import _output
from antiphon.cli._options import Settings, common_options, gateway_options
from antiphon.cli._param_types import IntegerParam

if TYPE_CHECKING:
    from antiphon.operations.collaboration_types import DeliveryPage, DeliveryView

F = TypeVar("F", bound=Callable[..., Any])
DELIVERY_STATES = ("pending", "sending", "delivered", "blocked", "ambiguous", "expired", "dead")
STUCK_STATES = frozenset({"blocked", "ambiguous", "expired", "dead"})
MAX_TEXT_CHARS = 60  # of a text in a table on a terminal; --json shows more of it


def _add_filter_options(function: F) -> F:
    for option in (
        click.option("--cursor", help="Continue after an earlier page."),
        click.option("--limit", type=IntegerParam(1, 500), default=50, show_default=True),
        click.option("--state", type=click.Choice(DELIVERY_STATES), help="Only deliveries in this state."),
    ):
        function = option(function)
    return function


@click.group(
    help="List deliveries to people and retry failed ones. Without a subcommand: `list`.",
    invoke_without_command=True,
)
@_add_filter_options
@gateway_options
@common_options
@click.pass_context
def command(ctx: click.Context, state: str | None, limit: int, cursor: str | None) -> None:
    if ctx.invoked_subcommand is None:
        _show_deliveries(ctx.ensure_object(Settings), state, limit, cursor)


@command.command("list")
@_add_filter_options
@gateway_options
@common_options
@click.pass_obj
def list_deliveries(settings: Settings, state: str | None, limit: int, cursor: str | None) -> None:
    """List deliveries, newest first."""
    _show_deliveries(settings, state, limit, cursor)


def _show_deliveries(settings: Settings, state: str | None, limit: int, cursor: str | None) -> None:
    page = asyncio.run(_load_page(settings, state, limit, cursor))
    if settings.json:
        _output.print_json(page)
    elif not page.deliveries:
        click.echo(f"No {state} deliveries." if state else "No deliveries.")
    else:
        _print_page(page)


async def _load_page(settings: Settings, state: str | None, limit: int, cursor: str | None) -> DeliveryPage:
    from antiphon.cli._backend import open_backend_for_reading

    async with open_backend_for_reading(settings) as backend:
        return await backend.list_deliveries(state, limit, cursor)


def _print_page(page: DeliveryPage) -> None:
    rows = [
        [
            _format_state(delivery),
            _format_destination(delivery),
            _output.format_age(delivery.created_at),
            _format_attempts(delivery),
            delivery.key,
            delivery.error or "",
            _output.shorten_text(delivery.text, MAX_TEXT_CHARS),
        ]
        for delivery in page.deliveries
    ]
    _output.print_table(["STATE", "WHERE", "SINCE", "TRIES", "KEY", "ERROR", "TEXT"], rows)
    if page.next_cursor:
        click.echo(_output.dim(f"There are more: --cursor {_output.clean_text(page.next_cursor)}"))
    if any(delivery.state in STUCK_STATES for delivery in page.deliveries):
        click.echo(
            _output.dim(f"After you have fixed the cause: {_output.format_program()} deliveries retry KEY")
        )


def _format_state(delivery: DeliveryView) -> str:
    """Format the state; of a text in several parts also how many of them were sent."""
    if delivery.parts is None or delivery.parts < 2 or delivery.state == "delivered":
        return delivery.state
    return f"{delivery.state} ({delivery.parts_sent or 0}/{delivery.parts})"


def _format_destination(delivery: DeliveryView) -> str:
    return f"{delivery.channel} {delivery.to or delivery.session_key}"


def _format_attempts(delivery: DeliveryView) -> str:
    """Format the attempts; a delivery to a web chat takes none, since it is delivered by being stored."""
    return str(delivery.attempts) if delivery.attempts or delivery.state != "delivered" else "-"


@command.command()
@click.argument("key")
@gateway_options
@common_options
@click.pass_obj
def retry(settings: Settings, key: str) -> int:
    """Retry a dead, ambiguous, blocked or expired delivery. An ambiguous one may arrive twice."""
    delivery = asyncio.run(_retry_delivery(settings, key))
    if settings.json:
        _output.print_json(delivery)
    elif delivery.state in STUCK_STATES:
        click.echo(_output.clean_text(f"It is {delivery.state} again: {delivery.error}"), err=True)
    elif delivery.state == "delivered":
        click.echo("It was delivered.")
    else:
        click.echo(f"It is on its way. See: {_output.format_program()} deliveries")
    return 1 if delivery.state in STUCK_STATES else 0


async def _retry_delivery(settings: Settings, key: str) -> DeliveryView:
    """Retry a delivery and return its state a moment later; without a gateway, this process sends it."""
    from antiphon.cli._backend import open_backend_for_messages
    from antiphon.cli._wait import wait_for_delivery

    async with open_backend_for_messages(settings) as (backend, _):
        return await wait_for_delivery(backend, await backend.retry_delivery(key))
