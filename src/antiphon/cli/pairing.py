"""`antiphon pairing`: lists, admits and removes people who write directly to the agents in chat apps."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import click

from antiphon.cli import _output
from antiphon.cli._options import Settings, common_options, gateway_options

if TYPE_CHECKING:
    from antiphon.operations.types import PairingView


@click.group(
    help="Admit people who write to the agents in chat apps. Without a subcommand: `list`.",
    invoke_without_command=True,
)
@gateway_options
@common_options
@click.pass_context
def command(ctx: click.Context) -> None:
    if ctx.invoked_subcommand is None:
        _show_pairings(ctx.ensure_object(Settings), None)


@command.command("list")
@click.argument("channel", required=False)
@gateway_options
@common_options
@click.pass_obj
def list_pairings(settings: Settings, channel: str | None) -> None:
    """List people who are paired, and those who ask to be."""
    _show_pairings(settings, channel)


def _show_pairings(settings: Settings, channel: str | None) -> None:
    found = [view for view in asyncio.run(_load(settings)) if channel in (None, view.channel)]
    if settings.json:
        _output.print_json({"pairings": found})
    elif not found:
        click.echo("No one is paired, and no one has asked to be.")
    else:
        rows = [_format_row(view) for view in found]
        _output.print_table(["STATE", "CHANNEL", "ACCOUNT", "ID", "NAME", "CODE", "SINCE"], rows)


def _format_row(view: PairingView) -> list[str]:
    state = "owner" if view.is_owner else view.state
    since = _output.format_age(view.approved_at or view.requested_at)
    return [state, view.channel, view.account, view.sender, view.name or "", view.code or "-", since]


async def _load(settings: Settings) -> list[PairingView]:
    from antiphon.cli._backend import open_backend_for_reading

    async with open_backend_for_reading(settings) as backend:
        return await backend.list_pairings()


@command.command()
@click.argument("channel")
@click.argument("code")
@click.option("--account", metavar="NAME", help="The account that showed the code; default: the default one.")
@gateway_options
@common_options
@click.pass_obj
def approve(settings: Settings, channel: str, code: str, account: str | None) -> None:
    """Admit the person who was shown this code. The first one becomes the owner if there is none."""
    view = asyncio.run(_approve(settings, channel.lower(), code, account))
    if settings.json:
        _output.print_json(view)
        return
    who = _output.clean_line(f"{view.name or 'The person'} ({view.sender})")
    click.echo(
        f"{who} may write to the agents on {view.channel} now{', as its owner' if view.is_owner else ''}."
    )
    if view.warning:
        _output.print_wrapped("warning: ", view.warning)


async def _approve(settings: Settings, channel: str, code: str, account: str | None) -> PairingView:
    from antiphon.cli._backend import open_backend_for_changes

    async with open_backend_for_changes(settings) as backend:
        return await backend.approve_pairing(channel, code, account)


@command.command()
@click.argument("channel")
@click.argument("sender", metavar="ID")
@click.option("--account", metavar="NAME", help="Default: the default account.")
@gateway_options
@common_options
@click.pass_obj
def revoke(settings: Settings, channel: str, sender: str, account: str | None) -> None:
    """Remove a pairing, or a request for one."""
    asyncio.run(_revoke(settings, channel.lower(), sender, account))
    if settings.json:
        _output.print_json({"ok": True})
    else:
        click.echo(f"{_output.clean_line(sender)} is not paired any more.")


async def _revoke(settings: Settings, channel: str, sender: str, account: str | None) -> None:
    from antiphon.cli._backend import open_backend_for_changes

    async with open_backend_for_changes(settings) as backend:
        await backend.revoke_pairing(channel, sender, account)
