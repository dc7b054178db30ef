"""`antiphon logs`: shows the log of a state directory, and follows it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO, cast

import click

from antiphon.cli import _output
from antiphon.cli._options import Settings, common_options
from antiphon.cli._param_types import IntegerParam
from antiphon.paths import LOG_FILE_NAME

POLL_SECONDS = 0.2
MAX_LINES = 100_000
CONTEXT_FIELDS = ("run_id", "session_key")


@click.command(help="Show the end of the log in the state directory.")
@click.option("-f", "--follow", is_flag=True, help="Print new lines as they are logged, until Ctrl-C.")
@click.option("-n", "--lines", type=IntegerParam(0, MAX_LINES), default=50, show_default=True)
@common_options
@click.pass_obj
def command(settings: Settings, follow: bool, lines: int) -> None:
    path = settings.paths.state_dir / LOG_FILE_NAME
    if not path.exists() and not follow:
        click.echo(f"No log exists at {str(path)!r}.", err=True)
        return
    position = 0
    if path.exists():
        with path.open(encoding="utf-8", errors="replace") as log:
            for text in _read_last_lines(log, lines):
                _print_log_line(settings, text)
            position = log.tell()
    if follow:
        for text in _follow_lines(path, position):
            _print_log_line(settings, text)


def _read_last_lines(log: TextIO, count: int) -> Iterator[str]:
    from collections import deque

    yield from deque(iter(log.readline, ""), maxlen=count)


def _follow_lines(path: Path, position: int) -> Iterator[str]:
    """Yield lines as they are written, even after the log file was rotated."""
    log, begun = None, ""
    while True:
        try:
            inode = path.stat().st_ino
        except FileNotFoundError:
            inode = None
        if log is None and inode is not None:
            log = path.open(encoding="utf-8", errors="replace")
            log.seek(position)
        text = log.readline() if log else ""
        begun += text
        if begun.endswith("\n"):
            yield begun
            begun = ""
        if text:
            continue
        if log is not None and inode != _get_inode(log):
            log.close()
            log, position = None, 0
            continue
        time.sleep(POLL_SECONDS)


def _get_inode(log: TextIO) -> int:
    import os

    return os.fstat(log.fileno()).st_ino


def _print_log_line(settings: Settings, text: str) -> None:
    """Print a line of the log, as plain text unless `--json` is given."""
    try:
        decoded: Any = json.loads(text)
    except ValueError:
        decoded = None
    if settings.json or not isinstance(decoded, dict):
        click.echo(_output.clean_text(text.rstrip("\n")))
        return
    entry = cast("dict[str, Any]", decoded)
    about = "".join(f" {name}={entry[name]}" for name in CONTEXT_FIELDS if entry.get(name))
    when, level = str(entry.get("time", ""))[:19], str(entry.get("level", ""))
    click.echo(
        _output.clean_text(f"{when} {level:<8} {entry.get('logger', '')}: {entry.get('event', '')}{about}")
    )
    if trace := entry.get("exception"):
        click.echo("\n".join(f"    {part}" for part in _output.clean_text(str(trace)).splitlines()))
