"""`antiphon tokens`: manages access to the gateway. A running gateway applies changes at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import click

from antiphon.cli import _output
from antiphon.cli._options import Settings, common_options

if TYPE_CHECKING:
    from antiphon.config import Config
    from antiphon.gateway.tokens import TokenRecord, TokenRegistry
    from antiphon.store import Store

T = TypeVar("T")

TOKEN_SCOPES = ("read", "write", "admin", "approvals")


@click.group(help="List, issue and revoke the tokens of the gateway.")
@common_options
def command() -> None: ...


def _load_shared_store_config(settings: Settings) -> Config | None:
    """Return the configuration if tokens are rows of a database shared by replicas, else None."""
    config = settings.load_config_lazily()
    return config if config.store_url is not None else None


def _run_on_store(settings: Settings, config: Config, work: Callable[[Store], Awaitable[T]]) -> T:
    from antiphon.state_access import open_store_readonly

    async def connected() -> T:
        async with open_store_readonly(config, settings.paths.state_dir) as store:
            return await work(store)

    return asyncio.run(connected())


def _read_token_file(settings: Settings) -> TokenRegistry:
    from antiphon.errors import NotFound
    from antiphon.gateway.tokens import TOKEN_FILE_NAME, TokenRegistry
    from antiphon.store.statedir import StateDir

    path = settings.paths.state_dir / TOKEN_FILE_NAME
    StateDir.open_unlocked(settings.paths.state_dir).check_readable()
    if not path.exists():
        raise NotFound(
            f"There are no tokens in {str(path.parent)!r} yet.",
            "The first `antiphon up` creates one for the owner.",
        )
    return TokenRegistry.read(path)


@command.command("list")
@common_options
@click.pass_obj
def list_tokens(settings: Settings) -> None:
    """List the names and scopes of all tokens."""
    from antiphon.gateway.tokens import TOKEN_FILE_NAME, TokenRegistry

    path = settings.paths.state_dir / TOKEN_FILE_NAME
    if config := _load_shared_store_config(settings):
        from antiphon.gateway.shared_tokens import read_tokens

        shared = _run_on_store(settings, config, lambda store: store.read(read_tokens))
        digests = {record.digest for record in shared}
        in_file = TokenRegistry.read(path).records if path.exists() else ()
        records = [*(record for record in in_file if record.digest not in digests), *shared]
    else:
        records = _read_token_file(settings).records
    if settings.json:
        _output.print_json({"tokens": [_describe_token(record) for record in records]})
    else:
        _output.print_table(
            ["NAME", "SCOPES"], [[record.name, ", ".join(record.scopes)] for record in records]
        )


def _describe_token(record: TokenRecord) -> dict[str, object]:
    facts: dict[str, object] = {"name": record.name, "scopes": record.scopes}
    if record.created_at is not None:
        facts |= {"createdAt": record.created_at, "lastUsedAt": record.last_used_at}
    return facts


@command.command()
@click.argument("name")
@click.option(
    "--scope",
    "scopes",
    multiple=True,
    required=True,
    type=click.Choice(TOKEN_SCOPES),
    help="Permission of the token; may be repeated. `write` includes `read`, `admin` includes all.",
)
@common_options
@click.pass_obj
def issue(settings: Settings, name: str, scopes: Sequence[str]) -> None:
    """Issue a token. It is printed once and not stored."""
    full = [f"operator.{scope}" for scope in scopes]
    if config := _load_shared_store_config(settings):
        from antiphon.errors import Conflict
        from antiphon.gateway.shared_tokens import issue_shared_token as issue_shared
        from antiphon.gateway.tokens import OWNER_TOKEN_NAME

        if name == OWNER_TOKEN_NAME or _is_in_file(settings, name):
            raise Conflict(
                f"A token named {name!r} already exists.",
                "Choose another name."
                if name == OWNER_TOKEN_NAME
                else "Choose another name, or revoke that one.",
            )
        token = _run_on_store(settings, config, lambda store: issue_shared(store, name, full))
    else:
        token = _read_token_file(settings).issue_token(name, full)
    if settings.json:
        _output.print_json({"name": name, "scopes": full, "token": token})
        return
    click.echo(token)
    click.echo("Store it now: it is not shown again.", err=True)


def _is_in_file(settings: Settings, name: str) -> bool:
    """Whether the name belongs to a token in the file, from before the database was shared."""
    from antiphon.gateway.tokens import TOKEN_FILE_NAME, TokenRegistry

    path = settings.paths.state_dir / TOKEN_FILE_NAME
    return path.exists() and any(record.name == name for record in TokenRegistry.read(path).records)


@command.command()
@click.argument("name")
@common_options
@click.pass_obj
def revoke(settings: Settings, name: str) -> None:
    """Revoke a token; connections that use it end within seconds."""
    from antiphon.errors import InvalidInput
    from antiphon.gateway.tokens import OWNER_TOKEN_NAME

    if name == OWNER_TOKEN_NAME:
        raise InvalidInput(
            "The owner's token is what the commands on this machine use.",
            "To replace it, stop the gateway, remove tokens.json and start it again.",
            field="name",
        )
    config, in_file = _load_shared_store_config(settings), _is_in_file(settings, name)
    if in_file or config is None:
        _read_token_file(settings).revoke_token(name)
    if config is not None:
        from antiphon.gateway.shared_tokens import revoke_token

        _run_on_store(settings, config, lambda store: store.tx(revoke_token, name, or_none=in_file))
    if settings.json:
        _output.print_json({"revoked": name})
    else:
        click.echo(f"Revoked {_output.clean_line(name)}.")
