"""`antiphon up`: runs the gateway in the foreground until a signal stops it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Generator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from antiphon.cli import _output
from antiphon.cli._gateway_lookup import find_running_gateway
from antiphon.cli._join import JoinSlot
from antiphon.cli._options import Settings, common_options
from antiphon.cli._ownership import COMMANDS_THAT_HAND_OVER, explain_owner, open_when_free
from antiphon.cli._param_types import IntegerParam
from antiphon.errors import StoreLocked
from antiphon.store.statedir import LockOwner, StateDir

if TYPE_CHECKING:
    from antiphon.config import LoadedConfig
    from antiphon.gateway.server import ListeningGateway

OWNER_WAIT_SECONDS = 60.0  # for a command that owns the directory to release it
MAX_AGENTS_NAMED = 4  # agents listed at the start


@click.command(help="Run the gateway in this terminal, until Ctrl-C.")
@click.option(
    "--port",
    type=IntegerParam(0, 65535),
    metavar="N",
    help="Port to listen on; 0 picks a free one. Default: gateway.port in the configuration, else 18789.",
)
@click.option(
    "--join",
    is_flag=True,
    help="Start another replica on store.url and bus.url; others may run on this machine.",
)
@common_options
@click.pass_obj
def command(settings: Settings, port: int | None, join: bool) -> None:
    from antiphon import tracing
    from antiphon.cli._logging import configure_logging
    from antiphon.event_loop import run

    loaded = settings.load()
    tracing.configure_export(os.environ)
    slot = (
        JoinSlot.reserve(loaded, settings.paths.state_dir, port)
        if join
        else JoinSlot(settings.paths.state_dir, port)
    )
    configure_logging(slot.state_dir, debug=settings.debug)
    try:
        run(_run_gateway(settings, loaded, slot))
    except StoreLocked as error:
        raise _make_in_use_error(error, settings.paths.state_dir) from error


async def _run_gateway(settings: Settings, loaded: LoadedConfig, slot: JoinSlot) -> None:
    from antiphon.errors import Unavailable
    from antiphon.gateway.server import serve_gateway

    def serve() -> AbstractAsyncContextManager[ListeningGateway]:
        if stopping.is_set():  # while it waited for the directory
            raise click.Abort
        return serve_gateway(
            loaded.config, slot.state_dir, port=slot.port, tokens_dir=settings.paths.state_dir, command="up"
        )

    with _stop_on_signal() as stopping:
        async with AsyncExitStack() as stack:
            served = await _start_when_free(stack, slot.state_dir, serve)
            slot.release_join_lock()
            with suppress(OSError):  # the reader of the startup output may be gone
                _print_startup(settings, loaded, slot.state_dir, served.url)
            stop_requested = asyncio.create_task(stopping.wait())
            await asyncio.wait({stop_requested, served.ended}, return_when=asyncio.FIRST_COMPLETED)
            stop_requested.cancel()
            if not stopping.is_set():
                raise Unavailable("The gateway stopped unexpectedly.", "See the log for the reason.")
            click.echo(_output.dim(f"Stopping… {_describe_unfinished_runs(loaded)}"), err=True)


async def _start_when_free(
    stack: AsyncExitStack,
    state_dir: Path,
    serve: Callable[[], AbstractAsyncContextManager[ListeningGateway]],
) -> ListeningGateway:
    """Start the gateway; a command that owns the directory is asked to release it."""
    with ExitStack() as requests:

        def ask_owner(owner: LockOwner) -> None:
            requests.enter_context(StateDir.open_unlocked(state_dir).request_handover())
            _output.print_wrapped("", _output.name_program(_describe_wait(owner)), err=True)

        return await open_when_free(stack, state_dir, serve, seconds=OWNER_WAIT_SECONDS, on_wait=ask_owner)


def _describe_wait(owner: LockOwner) -> str:
    wait = f"Waiting up to {OWNER_WAIT_SECONDS:g} s for the state directory, which is in use by {owner}."
    if owner.command in COMMANDS_THAT_HAND_OVER:
        return f"{wait} It hands its run over to this gateway."
    return f"{wait} {explain_owner(owner)}"


def _describe_unfinished_runs(loaded: LoadedConfig) -> str:
    if loaded.config.bus.url is not None:
        return "active runs finish soon or continue on other replicas."
    return "active runs continue at the next start."


@contextmanager
def _stop_on_signal() -> Generator[asyncio.Event]:
    """Set the event on the first signal; the second one ends the process at once."""
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


def _print_startup(settings: Settings, loaded: LoadedConfig, state_dir: Path, url: str) -> None:
    from antiphon.cli.config import find_missing_secrets
    from antiphon.gateway.tokens import TOKEN_FILE_NAME

    missing = [*find_missing_secrets(loaded.config)]
    if settings.json:
        facts = {
            "url": url,
            "pid": os.getpid(),
            "stateDir": str(state_dir),
            "tokenFile": str(settings.paths.state_dir / TOKEN_FILE_NAME),
            "warnings": [*loaded.warnings, *missing],
        }
        _output.print_json(facts, compact=True)
        return
    for warning in loaded.warnings:
        _output.print_wrapped("warning: ", _output.clean_text(warning))
    for warning in missing:  # shown here because runs that need the secret will fail
        start = f"{_output.red('warning:')} "
        _output.print_wrapped(start, _output.clean_text(warning), width=len("warning: "))
    _print_startup_summary(settings, loaded, state_dir, url)


def _print_startup_summary(settings: Settings, loaded: LoadedConfig, state_dir: Path, url: str) -> None:
    from antiphon import __version__
    from antiphon.cli.agents import NO_MESSAGING_HINT
    from antiphon.cli.config import describe_answering_model, format_rehearsal_notice
    from antiphon.config import REHEARSAL_MODEL_REF

    click.echo(f"{_output.bold('antiphon')} {__version__} is up (process {os.getpid()}).")
    for name, fact in (
        ("address", f"{url} and {url.replace('ws', 'http', 1)}{_describe_network_reach(loaded)}"),
        ("answers", _describe_agents(loaded)),
        ("secret", _describe_secret_source(settings, loaded)),
        ("state", str(state_dir)),
    ):
        _output.print_wrapped(f"  {name:<8} ", _output.clean_line(fact))
    program = _output.format_program()
    if describe_answering_model(loaded, loaded.config.default_agent_id) == REHEARSAL_MODEL_REF:
        click.echo(format_rehearsal_notice(settings, loaded))
    if len(loaded.config.agent_ids) > 1 and "agent_to_agent" not in loaded.config.tools.model_fields_set:
        _output.print_wrapped("hint: ", f"{NO_MESSAGING_HINT} See: {program} agents")
    _output.print_wrapped(
        "", f"Chat from another terminal: `{program} chat`. State: `{program} status`. Ctrl-C stops it."
    )


def _describe_network_reach(loaded: LoadedConfig) -> str:
    return ", and to other machines (gateway.bind is 'lan')" if loaded.config.gateway.bind == "lan" else ""


def _describe_agents(loaded: LoadedConfig) -> str:
    """Return the agents that answer, the default agent first, as far as they fit on a line."""
    from antiphon.cli.config import describe_answering_model

    default = loaded.config.default_agent_id
    others = [agent_id for agent_id in loaded.config.agent_ids if agent_id != default]
    if not others:
        return f"agent {default}, {describe_answering_model(loaded, default)}"
    named = [f"{default} by default ({describe_answering_model(loaded, default)})"]
    named += [
        f"{agent_id} ({describe_answering_model(loaded, agent_id)})"
        for agent_id in others[: MAX_AGENTS_NAMED - 1]
    ]
    more = len(others) - len(named) + 1
    return f"agents {', '.join(named)}" + (
        f" and {more} more (`{_output.format_program()} agents`)" if more else ""
    )


def _describe_secret_source(settings: Settings, loaded: LoadedConfig) -> str:
    """Describe where clients find the secret; never the secret itself."""
    from antiphon.gateway.tokens import TOKEN_FILE_NAME

    auth = loaded.config.gateway.auth
    if auth.mode == "none":
        return "not required (gateway.auth.mode)"
    if auth.mode == "password":
        return "gateway.auth.password of the configuration"
    if auth.token:
        return "gateway.auth.token of the configuration"
    return f"the token of the owner in {settings.paths.state_dir / TOKEN_FILE_NAME}; commands on this machine find it"


def _make_in_use_error(error: StoreLocked, state_dir: Path) -> StoreLocked:
    """Return the same error, with what is known about the process that holds the lock."""
    found = find_running_gateway(state_dir)
    if found is None:
        return error
    return StoreLocked(
        f"A gateway runs on {str(state_dir)!r} already, at {found.url} (process {found.pid}).",
        "Use that one (`antiphon status`), stop it with `antiphon stop`, or choose another --state-dir.",
        pid=str(found.pid),
        url=found.url,
    )
