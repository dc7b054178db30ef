"""`antiphon tokens`: who may talk to the gateway, and what they may do. A running one knows of changes at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import click

from antiphon.cli import output
from antiphon.cli.settings import Settings, common

if TYPE_CHECKING:
    from antiphon.config import Config
    from antiphon.gateway.tokens import Record, Tokens
    from antiphon.store import Store

T = TypeVar("T")

SCOPES = ("read", "write", "admin")


@click.group(help="List, issue and revoke the tokens of the gateway.")
@common
def command() -> None: ...


def _shared(settings: Settings) -> Config | None:
    """The configuration, where tokens are rows of a database that replicas share."""
    config = settings.config_when_needed()
    return config if config.store.url is not None else None


def _on_store(settings: Settings, config: Config, work: Callable[[Store], Awaitable[T]]) -> T:
    from antiphon.visits import reading

    async def connected() -> T:
        async with reading(config, settings.paths.state_dir) as store:
            return await work(store)

    return asyncio.run(connected())


def _tokens(settings: Settings) -> Tokens:
    from antiphon.errors import NotFound
    from antiphon.gateway.tokens import NAME, Tokens
    from antiphon.store.statedir import StateDir

    path = settings.paths.state_dir / NAME
    StateDir.look(settings.paths.state_dir).check()
    if not path.exists():
        raise NotFound(
            f"There are no tokens in {str(path.parent)!r} yet.", "The first `antiphon up` makes the owner's."
        )
    return Tokens.read(path)


@command.command("list")
@common
@click.pass_obj
def list_tokens(settings: Settings) -> None:
    """Names and scopes; never a token itself."""
    from antiphon.gateway.tokens import NAME, Tokens

    path = settings.paths.state_dir / NAME
    if config := _shared(settings):
        from antiphon.gateway.shared_tokens import read_tokens

        shared = _on_store(settings, config, lambda store: store.read(read_tokens))
        digests = {record.digest for record in shared}
        in_file = Tokens.read(path).records if path.exists() else ()
        records = [*(record for record in in_file if record.digest not in digests), *shared]
    else:
        records = _tokens(settings).records
    if settings.json:
        output.emit({"tokens": [_facts(record) for record in records]})
    else:
        output.table(["NAME", "SCOPES"], [[record.name, ", ".join(record.scopes)] for record in records])


def _facts(record: Record) -> dict[str, object]:
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
    type=click.Choice(SCOPES),
    help="What it may do; may be repeated. `write` may read, `admin` may do everything.",
)
@common
@click.pass_obj
def issue(settings: Settings, name: str, scopes: Sequence[str]) -> None:
    """Make a token. It is printed once, on standard output, and kept nowhere."""
    full = [f"operator.{scope}" for scope in scopes]
    if config := _shared(settings):
        from antiphon.errors import Conflict
        from antiphon.gateway.shared_tokens import issue as issue_shared
        from antiphon.gateway.tokens import OWNER

        if name == OWNER or _is_in_file(settings, name):
            raise Conflict(
                f"A token named {name!r} already exists.",
                "Choose another name." if name == OWNER else "Choose another name, or revoke that one.",
            )
        token = _on_store(settings, config, lambda store: issue_shared(store, name, full))
    else:
        token = _tokens(settings).issue(name, full)
    if settings.json:
        output.emit({"name": name, "scopes": full, "token": token})
        return
    click.echo(token)
    click.echo("Keep it now: it is not shown again.", err=True)


def _is_in_file(settings: Settings, name: str) -> bool:
    """Whether a token from before the database was shared is meant."""
    from antiphon.gateway.tokens import NAME, Tokens

    path = settings.paths.state_dir / NAME
    return path.exists() and any(record.name == name for record in Tokens.read(path).records)


@command.command()
@click.argument("name")
@common
@click.pass_obj
def revoke(settings: Settings, name: str) -> None:
    """Revoke a token; connections that use it end within seconds."""
    from antiphon.errors import InvalidInput
    from antiphon.gateway.tokens import OWNER

    if name == OWNER:
        raise InvalidInput(
            "The owner's token is what the commands on this machine use.",
            "To replace it, stop the gateway, remove tokens.json and start it again.",
            field="name",
        )
    config, in_file = _shared(settings), _is_in_file(settings, name)
    if in_file or config is None:
        _tokens(settings).revoke(name)
    if config is not None:
        from antiphon.gateway.shared_tokens import revoke_token

        _on_store(settings, config, lambda store: store.tx(revoke_token, name, or_none=in_file))
    if settings.json:
        output.emit({"revoked": name})
    else:
        click.echo(f"Revoked {output.line(name)}.")
