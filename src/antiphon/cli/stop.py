"""`antiphon stop`: stop the gateway of the state directory, as Ctrl-C in its terminal would."""

from __future__ import annotations

import os
import signal
import time

import click

from antiphon.cli import _output
from antiphon.cli._options import Settings, common_options
from antiphon.cli._param_types import FiniteNumberParam

POLL_SECONDS = 0.05
MAX_TIMEOUT_SECONDS = 3600


@click.command(help="Stop the gateway of the state directory, and wait until it has stopped.")
@click.option(
    "--join", "replicas", is_flag=True, help="Also stop replicas that were started with `up --join`."
)
@click.option(
    "--timeout",
    type=FiniteNumberParam("seconds", 0, MAX_TIMEOUT_SECONDS),
    default=30,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait.",
)
@common_options
@click.pass_obj
def command(settings: Settings, replicas: bool, timeout: float) -> None:
    from antiphon.cli._gateway_lookup import find_running_gateway, is_process_alive
    from antiphon.errors import Forbidden, NotFound, Unavailable
    from antiphon.paths import REPLICAS_DIRECTORY_NAME
    from antiphon.store.statedir import StateDir

    state_dir = settings.paths.state_dir
    places = (
        [state_dir, *sorted((state_dir / REPLICAS_DIRECTORY_NAME).glob("[0-9]*"))]
        if replicas
        else [state_dir]
    )
    found = {place: note for place in places if (note := find_running_gateway(place))}
    if not found:
        raise NotFound(
            f"No gateway is running in {str(state_dir)!r}.",
            "Choose another directory with --state-dir, or include replicas with --join.",
        )
    for note in found.values():
        try:
            os.kill(note.pid, signal.SIGTERM)
        except ProcessLookupError:
            pass  # it has just ended by itself
        except PermissionError as error:
            raise Forbidden(
                f"The gateway (process {note.pid}) belongs to another user.", "Stop it as that user."
            ) from error
    until = time.monotonic() + timeout
    # A zombie process looks alive, but has released its lock.
    while left := [
        note
        for place, note in found.items()
        if is_process_alive(note.pid) and StateDir.open_unlocked(place).holder is not None
    ]:
        if time.monotonic() > until:
            raise Unavailable(
                f"The gateway (process {left[0].pid}) is still stopping after {timeout:g} s.",
                f"Wait, or kill it with `kill -9 {left[0].pid}`; nothing is lost.",
                pid=left[0].pid,
            )
        time.sleep(POLL_SECONDS)
    if settings.json:
        _output.print_json({"stopped": [{"pid": note.pid, "url": note.url} for note in found.values()]})
    for note in () if settings.json else found.values():
        click.echo(f"Stopped the gateway at {note.url} (process {note.pid}).")
