"""`antiphon sessions export` and `import`: conversations as files."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from antiphon.cli import _output
from antiphon.cli._options import Settings, common_options

if TYPE_CHECKING:
    from antiphon.transfers.exports import ExportReport
    from antiphon.transfers.import_source import ImportReport, MergedSession


@click.command("export")
@click.argument("keys", nargs=-1, metavar="[KEY]...")
@click.option("--all", "everything", is_flag=True, help="Export every session.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    help="Target directory; default: transcripts in the state directory.",
)
@common_options
@click.pass_obj
def export_sessions(settings: Settings, keys: Sequence[str], everything: bool, out: Path | None) -> None:
    """Export conversations as JSONL. Nothing is redacted."""
    if everything == bool(keys):
        raise click.UsageError("Name the sessions to export, or use --all.")
    done = asyncio.run(_export(settings, keys, out))
    if settings.json:
        _output.print_json(done)
        return
    click.echo(
        f"Wrote {_output.format_count(done.files, 'conversation')} with "
        f"{_output.format_count(done.messages, 'entry', 'entries')} to {done.directory!r}."
    )
    if done.damaged:
        click.echo(
            f"Left out {_output.format_count(done.damaged, 'damaged entry', 'damaged entries')}; "
            "`antiphon doctor` names them."
        )


async def _export(settings: Settings, keys: Sequence[str], out: Path | None) -> ExportReport:
    from antiphon.engine.sessions.resolver import SessionResolver
    from antiphon.state_access import open_store_readonly
    from antiphon.store.statedir import StateDir
    from antiphon.transfers.exports import export_all, export_named

    state_dir = settings.paths.state_dir
    directory = out or StateDir.open_unlocked(state_dir).transcripts
    config = settings.load_config_lazily()
    async with open_store_readonly(config, state_dir) as store:
        if keys:
            return await export_named(store, SessionResolver(config), directory, keys)
        return await export_all(store, directory, is_ours=out is None)


@click.command("import")
@click.argument("directory", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--agent", metavar="ID", help="Import only this agent; also used for keys without an agent.")
@click.option("--dry-run", is_flag=True, help="Only print what would be imported.")
@common_options
@click.pass_obj
def import_sessions(settings: Settings, directory: Path, agent: str | None, dry_run: bool) -> int:
    """Import sessions from an OpenClaw state directory or from an export."""
    done = asyncio.run(_import(settings, directory, agent, dry_run=dry_run))
    if settings.json:
        _output.print_json(done)
    else:
        _print_import(done)
    return 1 if done.failed_count else 0


async def _import(settings: Settings, directory: Path, agent: str | None, *, dry_run: bool) -> ImportReport:
    import tempfile

    from antiphon.clock import SystemClock
    from antiphon.state_access import open_store_exclusive
    from antiphon.store.statedir import StateDir
    from antiphon.transfers.import_source import scan_source
    from antiphon.transfers.imports import import_source

    config, state_dir = settings.load().config, settings.paths.state_dir
    # Before the store is opened, so that a refused import leaves no state directory behind.
    source = scan_source(directory, config, agent)
    with tempfile.TemporaryDirectory() as empty:
        home = StateDir.open_unlocked(state_dir)
        home.check_readable()
        if dry_run and not home.database.exists():
            state_dir = Path(empty)
        async with open_store_exclusive(config, state_dir) as store:
            return await import_source(store, config, source, SystemClock().now(), dry_run=dry_run)


def _print_import(done: ImportReport) -> None:
    verb = "Would import" if done.dry_run else "Imported"
    click.echo(
        f"{verb} {_output.format_count(done.imported, 'session')} with "
        f"{_output.format_count(done.messages, 'message')}; {done.skipped} already existed."
    )
    notes = {
        "had a key that is in use: readable by their session id": done.beside,
        "had a label that is in use: imported without it": done.left_out_labels,
        "entries named 'unknown' were skipped: they are not sessions": done.passed_over,
        "had no transcript": done.missing_transcripts,
        "lines were damaged and left out": done.damaged_lines,
        "entries did not belong to a conversation and were left out": done.left_out_entries,
        "archived files were ignored": done.archived_files,
        "transcripts are not in sessions.json and were ignored": done.unlisted_files,
    }
    for note, count in notes.items():
        if count:
            click.echo(f"  {count} {note}")
    for merged in done.merged[:20]:
        _print_merged(merged)
    if len(done.merged) > 20:
        click.echo(f"  … and {len(done.merged) - 20} more; --json lists them.")
    if done.unknown_agents:
        names = _output.clean_line(", ".join(done.unknown_agents[:20]))
        click.echo(
            f"  Not configured here: {names}. Add them to agents.list before you send messages to them."
        )
    for failure in done.failed[:20]:
        click.echo(
            f"  {_output.red('failed')} {_output.clean_text(failure.key)}: {_output.clean_text(failure.reason)}"
        )
    if done.failed_count > 20:
        click.echo(f"  … and {done.failed_count - 20} more failed; --json lists them.")


def _print_merged(merged: MergedSession) -> None:
    taken, left = (
        _output.clip_text(_output.clean_line(", ".join(names)) or "nothing", 400)
        for names in (merged.taken_over, merged.left_behind)
    )
    click.echo(f"  {_output.clean_line(merged.key)} is in use; imported: {taken}; not imported: {left}")


TRANSFER_COMMANDS = (export_sessions, import_sessions)
