"""`antiphon channels`: lists, adds and tests chat channels, and shows their state."""

from __future__ import annotations

import asyncio
import sys
from typing import Any, cast

import click

from antiphon.cli import _output
from antiphon.cli._options import Settings, common_options, gateway_options

TEST_MESSAGE = "This is a test message of Antiphon."
TEST_TIMEOUT_SECONDS = 30.0


@click.group(
    help="List, add and test chat channels such as Telegram. Without a subcommand: `status`.",
    invoke_without_command=True,
)
@gateway_options
@common_options
@click.pass_context
def command(ctx: click.Context) -> None:
    if ctx.invoked_subcommand is None:
        _show_status(ctx.ensure_object(Settings))


@command.command("list")
@common_options
@click.pass_obj
def list_channels(settings: Settings) -> None:
    """List the channels of this release, and the accounts that are configured."""
    from antiphon.channel_manifest import list_channel_names, load_manifest

    sections = settings.load().config.channel_sections
    rows: list[dict[str, Any]] = []
    for name in list_channel_names():
        manifest, section = load_manifest(name), sections.get(name)
        assert manifest is not None
        accounts = section.list_accounts() if section else {}
        enabled = section.list_enabled_accounts() if section else {}
        rows += [
            {"channel": name, "label": manifest.label, "account": account, "enabled": account in enabled}
            for account in accounts or [None]
        ]
    if settings.json:
        _output.print_json({"channels": rows})
        return
    states = {None: "not configured", True: "enabled", False: "disabled"}
    table = [
        [row["channel"], row["account"] or "-", states[row["enabled"] if row["account"] else None]]
        for row in rows
    ]
    _output.print_table(["CHANNEL", "ACCOUNT", "STATE"], table)


@command.command()
@gateway_options
@common_options
@click.pass_obj
def status(settings: Settings) -> None:
    """Show which accounts are connected, and what is wrong with the others."""
    _show_status(settings)


def _show_status(settings: Settings) -> None:
    accounts = asyncio.run(load_accounts(settings))
    if settings.json:
        _output.print_json({"accounts": accounts})
    elif accounts is None:
        click.echo(f"No gateway runs, so no channel is connected. Start it: {_output.PROGRAM_NAME} up")
    elif not accounts:
        click.echo(f"No channel is configured. Add one: {_output.PROGRAM_NAME} channels add telegram")
    else:
        rows = [_format_account(account) for account in accounts]
        _output.print_table(["STATE", "CHANNEL", "ACCOUNT", "IDENTITY", "ANSWERED", "REASON"], rows)


async def load_accounts(settings: Settings) -> list[dict[str, Any]] | None:
    """Return the accounts of the running gateway; None if none runs."""
    from antiphon.cli._backend import make_gateway_client

    client = make_gateway_client(settings)
    if client is None:
        return None
    async with client:
        answer = cast("dict[str, Any]", await client.call("channels.status", {}))
    return [account for found in answer["channelAccounts"].values() for account in found]


def _format_account(account: dict[str, Any]) -> list[str]:
    proof = account.get("proofAt")
    reason = account.get("reason") or ""
    if account.get("givenUp"):
        reason = f"{account['givenUp']} messages could not be taken. {reason}".strip()
    return [
        account["state"],
        account["channel"],
        account["accountId"],
        account.get("identity") or "-",
        _output.format_age(proof) if proof else "never",
        reason,
    ]


@command.command()
@click.argument("channel")
@click.option("--account", metavar="NAME", help="Default: the default account.")
@click.option("--to", metavar="ID", help="Also send a test message to this chat.")
@common_options
@click.pass_obj
def test(settings: Settings, channel: str, account: str | None, to: str | None) -> None:
    """Connect to the service once, with what is configured; the gateway need not run."""
    identity = asyncio.run(_test(settings, channel.lower(), account, to))
    if settings.json:
        _output.print_json({"ok": True, "identity": identity, "sent": to is not None})
        return
    click.echo(f"Connected as {_output.clean_line(identity)}.")
    if to is not None:
        click.echo(f"A test message was sent to {_output.clean_line(to)}.")


async def _test(settings: Settings, channel: str, account: str | None, to: str | None) -> str:
    from antiphon.errors import NotFound

    section = settings.load().config.channel_sections.get(channel)
    accounts = section.list_accounts() if section else {}
    account_id = account or (section.default_account_id if section else "")
    if account_id not in accounts:
        raise NotFound(
            f"The account {account_id!r} of {channel!r} is not configured.",
            f"See `{_output.PROGRAM_NAME} channels list`.",
        )
    return await _connect(channel, account_id, accounts[account_id], to)


async def _connect(channel: str, account_id: str, settings: Any, to: str | None) -> str:
    """Connect an account, optionally send a test message, and return its identity."""
    from antiphon.channel_manifest import load_manifest
    from antiphon.channels.adapter import ChannelAdapter
    from antiphon.clock import SystemClock
    from antiphon.engine.outbox.delivery_channel import Part
    from antiphon.engine.outbox.delivery_rows import Destination

    manifest = load_manifest(channel)
    assert manifest is not None
    adapter: ChannelAdapter = await manifest.load_adapter().create(account_id, settings, SystemClock())
    try:
        async with asyncio.timeout(TEST_TIMEOUT_SECONDS):
            await adapter.connect()
            if to is not None:
                place = Destination(channel=channel, to=to, account_id=account_id)
                await adapter.send(
                    Part(key="test", n=1, destination=place, text=TEST_MESSAGE, has_markup=False)
                )
        return adapter.identity or "unknown"
    finally:
        await adapter.close()


@command.command()
@click.argument("channel", type=click.Choice(["telegram"]))
@click.option("--token-file", metavar="FILE", help="A file with the token; only its path is written.")
@click.option("--api-root", metavar="URL", help="Another Bot API server.")
@click.option("--allow-from", metavar="ID", multiple=True, help="Your own id, so that you need no pairing.")
@click.option("--no-test", is_flag=True, help="Do not connect.")
@common_options
@click.pass_obj
def add(
    settings: Settings,
    channel: str,
    token_file: str | None,
    api_root: str | None,
    allow_from: tuple[str, ...],
    no_test: bool,
) -> None:
    """Add a bot to the configuration, after it has answered. Asks for the token if --token-file is not given."""
    from antiphon.config import load
    from antiphon.config.edit import format_member, set_member
    from antiphon.config.load import parse
    from antiphon.errors import ConfigError

    document = settings.read_config_document()
    content = document.content if document else {}
    if channel in content.get("channels", {}):
        raise click.UsageError(f"'channels.{channel}' is configured already. Change it in the file.")
    block: dict[str, Any] = {"tokenFile": token_file} if token_file else {"botToken": _ask_token(settings)}
    block |= {"apiRoot": api_root} if api_root else {}
    block |= {"allowFrom": list(allow_from)} if allow_from else {}
    config, _ = parse({"channels": {channel: block}}, base=settings.paths.config.parent)
    [(account_id, account)] = config.channel_sections[channel].list_accounts().items()
    identity = None if no_test else asyncio.run(_connect(channel, account_id, account, None))
    try:
        set_member(settings.paths.config, ("channels", channel), block)
        load(settings.paths.config)
    except ConfigError:
        shown = {**block, **({"botToken": "..."} if "botToken" in block else {})}
        click.echo("To add the channel by hand, put this into the configuration:", err=True)
        click.echo(format_member(("channels", channel), shown), err=True)
        raise
    if settings.json:
        _output.print_json({"channel": channel, "identity": identity, "config": str(settings.paths.config)})
        return
    click.echo(f"Added {channel} to {str(settings.paths.config)!r}{f' as {identity}' if identity else ''}.")
    click.echo(
        f"Start the gateway (`{_output.PROGRAM_NAME} up`) and write to the bot. It shows you a code:"
        f" `{_output.PROGRAM_NAME} pairing approve {channel} CODE` admits you."
    )


def _ask_token(settings: Settings) -> str:
    if not sys.stdin.isatty() or settings.json:
        raise click.UsageError("Give --token-file, or run this on a terminal to be asked for the token.")
    click.echo("Create a bot in Telegram: write /newbot to @BotFather, and copy the token that it shows.")
    return click.prompt("Token", hide_input=True, type=str).strip()
