"""`antiphon store`: operations on the database as a whole."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

import click

from antiphon.cli import _output
from antiphon.cli._options import Settings, common_options

if TYPE_CHECKING:
    from antiphon.config import Config
    from antiphon.store.postgres.connection import PgServer
    from antiphon.transfers.postgres_migration import MigrationProgress, MigrationResult

BAR_CHARACTERS = 20
STEP_LABELS = {"copy": "Copying", "check": "Comparing"}


@click.group(help="Migrate to another database.")
@common_options
def command() -> None: ...


@command.command()
@click.option(
    "--from",
    "origin",
    metavar="sqlite:[PATH]",
    default="sqlite:",
    help="Database to migrate; default: the one in the state directory.",
)
@click.option(
    "--to", "goal", metavar="postgres:URL", help="Target database; default: store.url in the configuration."
)
@click.option(
    "--password-file",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="File with the password for --to.",
)
@common_options
@click.pass_obj
def migrate(settings: Settings, origin: str, goal: str | None, password_file: Path | None) -> None:
    """Migrate an SQLite database into an empty PostgreSQL database. The source is not changed.

    If it is interrupted, run the same command again to continue.
    """
    from antiphon.transfers.postgres_migration import migrate_to_postgres as move

    source = _get_source_database(settings, origin)
    server = _get_target_server(settings.load().config, goal, password_file)
    show = _JsonProgress() if settings.json else _BarProgress() if _is_live_terminal() else _LineProgress()
    moved = asyncio.run(move(source, server, show))
    tokens = _move_tokens(source, server)
    if settings.json:
        _output.print_json({"event": "done", **_build_result(moved), "tokens": tokens}, compact=True)
    else:
        _print_result(moved, tokens, server)


def _move_tokens(source: Path, server: PgServer) -> int:
    """Copy the tokens from the file beside the database into rows, and return their number."""
    from antiphon.gateway.shared_tokens import adopt_tokens
    from antiphon.gateway.tokens import TOKEN_FILE_NAME, TokenRegistry
    from antiphon.paths import DATABASE_FILE_NAME
    from antiphon.store.postgres import PgStore

    path = source.with_name(TOKEN_FILE_NAME)
    if source.name != DATABASE_FILE_NAME or not path.exists():
        return 0
    issued = [record for record in TokenRegistry.read(path).records if record.token is None]

    async def adopt() -> None:
        store = await PgStore.open(server, writers=1, readers=1, migrate=False)
        try:
            await store.tx(adopt_tokens, issued, store.clock.now())
        finally:
            await store.close()

    if issued:
        asyncio.run(adopt())
    return len(issued)


def _get_source_database(settings: Settings, origin: str) -> Path:
    from antiphon.paths import DATABASE_FILE_NAME, expand_home

    scheme, _, path = origin.partition(":")
    if scheme != "sqlite":
        raise click.UsageError(
            "Only an SQLite database can be migrated. Use --from sqlite:/path/antiphon.db."
        )
    return expand_home(path).resolve() if path else settings.paths.state_dir / DATABASE_FILE_NAME


def _get_target_server(config: Config, goal: str | None, password_file: Path | None) -> PgServer:
    """Return the server to migrate to; the configured password is used only for the configured server."""
    from msgspec.structs import replace

    from antiphon.store.factory import build_server
    from antiphon.store.postgres.connection import PgServer

    known = build_server(config) if config.store.url is not None else None
    url = _parse_target_url(goal) if goal else None
    if url is None and known is None:
        raise click.UsageError("No target given. Use --to postgres://user@host/database, or set store.url.")
    server = known if known and url in {None, known.url} else PgServer(str(url))
    return replace(server, password=password_file.read_text("utf-8").strip()) if password_file else server


def _parse_target_url(goal: str) -> str:
    from urllib.parse import urlsplit

    from antiphon.config.addresses import STORE_URL_SCHEMES

    url = next(
        (
            goal.removeprefix("postgres:")
            for scheme in STORE_URL_SCHEMES
            if goal.startswith(f"postgres:{scheme}:")
        ),
        goal,
    )
    if not any(url.startswith(f"{scheme}://") for scheme in STORE_URL_SCHEMES):
        raise click.UsageError("Only PostgreSQL can be the target. Use --to postgres://user@host/database.")
    if urlsplit(url).password:
        raise click.UsageError("Other users can see a password in --to. Use --password-file instead.")
    return url


def _is_live_terminal() -> bool:
    import os

    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def _build_result(moved: MigrationResult) -> dict[str, object]:
    return {"tables": moved.tables, "replaced": moved.replaced, "already": moved.was_finished}


def _print_result(moved: MigrationResult, tokens: int, server: PgServer) -> None:
    rows = sum(moved.tables.values())
    done = "Everything was copied before" if moved.was_finished else "Everything is copied"
    click.echo(f"{done}: {rows:,} rows of {len(moved.tables)} tables, the same on both sides.")
    if moved.replaced:
        click.echo(
            f"In {moved.replaced:,} texts U+0000, which PostgreSQL cannot store, was replaced by U+FFFD."
        )
    if tokens:
        click.echo(f"Issued tokens that stay valid there: {tokens:,}.")
    click.echo(
        f"Next: set store.url to the database {server.display_name} and start `{_output.format_program()} up`."
    )


# --- progress ---


class _JsonProgress:
    """Prints progress as one JSON object per line."""

    def __call__(self, progress: MigrationProgress) -> None:
        fields = {
            "step": progress.step,
            "table": progress.table,
            "rows": progress.rows,
            "total": progress.total,
        }
        _output.print_json({"event": "progress", **fields}, compact=True)
        sys.stdout.flush()


class _LineProgress:
    """Prints a line for each finished table."""

    def __call__(self, progress: MigrationProgress) -> None:
        if progress.rows == progress.total and progress.total:
            click.echo(f"{STEP_LABELS[progress.step]} {progress.table}: {progress.total:,} rows")


class _BarProgress:
    """Draws a progress bar for each table."""

    def __init__(self) -> None:
        self._line = ("", "")
        self._began = 0.0
        self._first = 0

    def __call__(self, progress: MigrationProgress) -> None:
        if not progress.total:
            return
        if self._line != (progress.step, progress.table):
            self._line = (progress.step, progress.table)
            self._began, self._first = monotonic(), progress.rows
        done = progress.rows == progress.total
        click.echo(f"\r{self._draw_bar(progress)}\033[K", nl=done)

    def _draw_bar(self, progress: MigrationProgress) -> str:
        full = BAR_CHARACTERS * progress.rows // progress.total
        bar = "#" * full + "-" * (BAR_CHARACTERS - full)
        line = f"{STEP_LABELS[progress.step]:<9} {progress.table:<13} [{bar}] {progress.rows:>9,} of {progress.total:,}"
        return line + self._format_pace(progress)

    def _format_pace(self, progress: MigrationProgress) -> str:
        """Return the speed and the remaining time; empty while they are unknown."""
        seconds, rows = monotonic() - self._began, progress.rows - self._first
        if not rows or not seconds:
            return ""
        left = (progress.total - progress.rows) * seconds / rows
        remaining = (
            f", {_output.format_duration(round(left * 1000))} left" if progress.rows < progress.total else ""
        )
        return f"  {rows / seconds:,.0f}/s{remaining}"
