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
    help="Maximum time to wait.",
)
@common_options
@click.pass_obj
def command(settings: Settings, replicas: bool, timeout: float) -> None:
    from antiphon.cli._gateway_lookup import find_running_gateway, is_process_alive
    from antiphon.errors import Forbidden, NotFound, Unavailable
    from antiphon.paths import REPLICAS_DIRECTORY_NAME
    from antiphon.store.statedir import StateDir

    state_dir = settings.paths.state_dir
    directories = (
        [state_dir, *sorted((state_dir / REPLICAS_DIRECTORY_NAME).glob("[0-9]*"))]
        if replicas
        else [state_dir]
    )
    found = {directory: gateway for directory in directories if (gateway := find_running_gateway(directory))}
    if not found:
        raise NotFound(
            f"No gateway is running in {str(state_dir)!r}.",
            "Choose another directory with --state-dir, or include replicas with --join.",
        )
    for gateway in found.values():
        try:
            os.kill(gateway.pid, signal.SIGTERM)
        except ProcessLookupError:
            pass  # it has just ended by itself
        except PermissionError as error:
            raise Forbidden(
                f"The gateway (process {gateway.pid}) belongs to another user.", "Stop it as that user."
            ) from error
    until = time.monotonic() + timeout
    # A zombie process looks alive, but has released its lock.
    while left := [
        gateway
        for directory, gateway in found.items()
        if is_process_alive(gateway.pid) and StateDir.open_unlocked(directory).holder is not None
    ]:
        if time.monotonic() > until:
            raise Unavailable(
                f"The gateway (process {left[0].pid}) has not stopped after {timeout:g} s.",
                f"Wait, or kill it with `kill -9 {left[0].pid}`; nothing is lost.",
                pid=left[0].pid,
            )
        time.sleep(POLL_SECONDS)
    if settings.json:
        _output.print_json(
            {"stopped": [{"pid": gateway.pid, "url": gateway.url} for gateway in found.values()]}
        )
    for gateway in () if settings.json else found.values():
        click.echo(f"Stopped the gateway at {gateway.url} (process {gateway.pid}).")
