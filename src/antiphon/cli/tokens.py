"""`antiphon tokens`: who may talk to the gateway, and what they may do. A running one knows of changes at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from antiphon.cli import output
from antiphon.cli.settings import Settings, common

if TYPE_CHECKING:
    from antiphon.gateway.tokens import Tokens

SCOPES = ("read", "write", "admin")


@click.group(help="List, issue and revoke the tokens of the gateway.")
@common
def command() -> None: ...


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
    records = _tokens(settings).records
    if settings.json:
        output.emit({"tokens": [{"name": record.name, "scopes": record.scopes} for record in records]})
    else:
        output.table(["NAME", "SCOPES"], [[record.name, ", ".join(record.scopes)] for record in records])


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
    token = _tokens(settings).issue(name, full)
    if settings.json:
        output.emit({"name": name, "scopes": full, "token": token})
        return
    click.echo(token)
    click.echo("Keep it now: it is not shown again.", err=True)


@command.command()
@click.argument("name")
@common
@click.pass_obj
def revoke(settings: Settings, name: str) -> None:
    """Let nobody in with this token any more; what is open with it ends within a minute."""
    from antiphon.errors import InvalidInput
    from antiphon.gateway.tokens import OWNER

    tokens = _tokens(settings)
    if name == OWNER:
        raise InvalidInput(
            "The owner's token is what the commands on this machine use.",
            "To replace it, stop the gateway, remove tokens.json and start it again.",
            field="name",
        )
    tokens.revoke(name)
    if settings.json:
        output.emit({"revoked": name})
    else:
        click.echo(f"Revoked {output.line(name)}.")
