"""`antiphon up`: the gateway, in the foreground, until a signal says stop."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from antiphon.cli import output
from antiphon.cli.place import Place
from antiphon.cli.running import running
from antiphon.cli.settings import Settings, common
from antiphon.errors import StoreLocked

if TYPE_CHECKING:
    from antiphon.config import Loaded

NAMED = 4  # agents that are named at the start
REHEARSAL = """\
No model provider is configured, so the built-in rehearsal model answers: it does what a line such as
`say hello` tells it to. To talk with a real one, put it under `models.providers` in
"""


@click.command(help="Run the gateway in this terminal, until Ctrl-C.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    metavar="N",
    help="Where to listen; 0 takes any free one. Default: gateway.port of the configuration, else 18789.",
)
@click.option(
    "--join",
    is_flag=True,
    help="Be one more replica on store.url and bus.url, beside others that may run on this machine, too.",
)
@common
@click.pass_obj
def command(settings: Settings, port: int | None, join: bool) -> None:
    from antiphon import tracing
    from antiphon.cli.journal import keep_journal
    from antiphon.loop import run

    loaded = settings.load()
    tracing.export(os.environ)
    place = (
        Place.joining(loaded, settings.paths.state_dir, port)
        if join
        else Place(settings.paths.state_dir, port)
    )
    keep_journal(place.state_dir, debug=settings.debug)
    try:
        run(_up(settings, loaded, place))
    except StoreLocked as error:
        raise _in_use(error, settings.paths.state_dir) from error


async def _up(settings: Settings, loaded: Loaded, place: Place) -> None:
    from antiphon.errors import Unavailable
    from antiphon.gateway.server import serving

    with _told_to_stop() as stopping:
        async with serving(
            loaded.config, place.state_dir, port=place.port, tokens_dir=settings.paths.state_dir
        ) as served:
            place.taken()
            with suppress(OSError):  # whoever started it need not be listening
                _announce(settings, loaded, place.state_dir, served.url)
            told = asyncio.create_task(stopping.wait())
            await asyncio.wait({told, served.ended}, return_when=asyncio.FIRST_COMPLETED)
            told.cancel()
            if not stopping.is_set():
                raise Unavailable("The gateway stopped by itself.", "See the log for the reason.")
            click.echo(output.dim(f"Stopping… {_left_to(loaded)}"), err=True)


def _left_to(loaded: Loaded) -> str:
    if loaded.config.bus.url is not None:
        return "runs in flight end soon, or others carry them on."
    return "runs in flight go on at the next start."


@contextmanager
def _told_to_stop() -> Generator[asyncio.Event]:
    """Set by the first signal. The second one finds nobody listening and ends the process at once."""
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    signals = (signal.SIGINT, signal.SIGTERM)

    def stop() -> None:
        stopping.set()
        for number in signals:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)

    for number in signals:
        loop.add_signal_handler(number, stop)
    yield stopping


def _announce(settings: Settings, loaded: Loaded, state_dir: Path, url: str) -> None:
    from antiphon.cli.config import missing_secrets
    from antiphon.gateway.tokens import NAME

    missing = [*missing_secrets(loaded.config)]
    if settings.json:
        facts = {
            "url": url,
            "pid": os.getpid(),
            "stateDir": str(state_dir),
            "tokenFile": str(settings.paths.state_dir / NAME),
            "warnings": [*loaded.warnings, *missing],
        }
        output.emit(facts, compact=True)
        return
    for warning in loaded.warnings:
        click.echo(output.dim(f"warning: {output.clean(warning)}"))
    for warning in missing:  # shown here because runs that need it will fail
        click.echo(f"{output.red('warning:')} {output.clean(warning)}")
    _tell(settings, loaded, state_dir, url)


def _tell(settings: Settings, loaded: Loaded, state_dir: Path, url: str) -> None:
    from antiphon import __version__
    from antiphon.cli.agents import NO_REACH
    from antiphon.cli.config import answerer
    from antiphon.config import REHEARSAL_REF

    click.echo(f"{output.bold('antiphon')} {__version__} is up (process {os.getpid()}).")
    for name, fact in (
        ("address", f"{url} and {url.replace('ws', 'http', 1)}{_reach(loaded)}"),
        ("answers", _answers(loaded)),
        ("secret", _secret(settings, loaded)),
        ("state", str(state_dir)),
    ):
        click.echo(f"  {name:<8} {output.line(fact)}")
    if answerer(loaded, loaded.config.default_agent_id) == REHEARSAL_REF:
        click.echo(f"{REHEARSAL}{str(settings.paths.config)!r}.")
    if len(loaded.config.agent_ids) > 1 and "agent_to_agent" not in loaded.config.tools.model_fields_set:
        click.echo(output.dim(f"hint: {NO_REACH} See: antiphon agents"))
    click.echo(
        "Talk with it from another terminal: `antiphon chat`. How it is: `antiphon status`. Ctrl-C stops it."
    )


def _reach(loaded: Loaded) -> str:
    return ", and to other machines (gateway.bind is 'lan')" if loaded.config.gateway.bind == "lan" else ""


def _answers(loaded: Loaded) -> str:
    """Everybody who does, the default agent first, as long as they fit a line."""
    from antiphon.cli.config import answerer

    default = loaded.config.default_agent_id
    others = [agent_id for agent_id in loaded.config.agent_ids if agent_id != default]
    if not others:
        return f"agent {default}, {answerer(loaded, default)}"
    named = [f"{default} by default ({answerer(loaded, default)})"]
    named += [f"{agent_id} ({answerer(loaded, agent_id)})" for agent_id in others[: NAMED - 1]]
    more = len(others) - len(named) + 1
    return f"agents {', '.join(named)}" + (f" and {more} more (`antiphon agents`)" if more else "")


def _secret(settings: Settings, loaded: Loaded) -> str:
    """Where the secret is that clients need. Never the secret itself."""
    from antiphon.gateway.tokens import NAME

    auth = loaded.config.gateway.auth
    if auth.mode == "none":
        return "none is asked for (gateway.auth.mode)"
    if auth.mode == "password":
        return "gateway.auth.password of the configuration"
    if auth.token:
        return "gateway.auth.token of the configuration"
    return f"the token of the owner in {settings.paths.state_dir / NAME}; commands on this machine find it"


def _in_use(error: StoreLocked, state_dir: Path) -> StoreLocked:
    """The same refusal, with what is known of who is in the way."""
    found = running(state_dir)
    if found is None:
        return error
    return StoreLocked(
        f"A gateway runs on {str(state_dir)!r} already, at {found.url} (process {found.pid}).",
        "Use that one (`antiphon status`), stop it with `antiphon stop`, or choose another --state-dir.",
        pid=str(found.pid),
        url=found.url,
    )
