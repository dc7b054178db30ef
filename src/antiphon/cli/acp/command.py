"""`antiphon acp`: agents of the running gateway for editors that speak the Agent Client Protocol."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from antiphon.cli._options import Settings, common_options, gateway_options

if TYPE_CHECKING:
    from antiphon.client import Client
    from antiphon.errors import AntiphonError


@click.command()
@click.option("--agent", "agent_id", metavar="ID", help="Agent of new sessions; default: the default agent.")
@click.option(
    "--session", "session_key", metavar="KEY", help="Use this session whenever the editor asks for a new one."
)
@gateway_options
@common_options
@click.pass_obj
def command(settings: Settings, agent_id: str | None, session_key: str | None) -> None:
    """Serve agents to an editor on standard input and output, with the Agent Client Protocol.

    The editor starts this command, which connects it to the running gateway. In Zed's settings.json:
    {"agent_servers": {"Antiphon": {"type": "custom", "command": "antiphon", "args": ["acp"]}}}
    """
    from antiphon.event_loop import run

    if agent_id is not None and session_key is not None:
        raise click.UsageError("--agent and --session cannot be combined. Keep one of them.")
    for name, value in (("--agent", agent_id), ("--session", session_key)):
        if value is not None and not value.strip():
            raise click.UsageError(f"{name} is empty. Give a value, or leave the option out.")
    code = run(_serve_editor(settings, agent_id, session_key))
    if code:
        click.get_current_context().exit(code)


async def _serve_editor(settings: Settings, agent_id: str | None, session_key: str | None) -> int:
    """Serve until the end of the input. Return the exit code: that of the last error if no gateway was reached."""
    from antiphon.cli._errors import report_error
    from antiphon.cli.acp.agent import EditorAgent
    from antiphon.cli.acp.connection import EditorConnection

    _configure_logging(settings)
    exit_codes = [0]

    def report(error: AntiphonError) -> None:
        exit_codes.append(report_error(error, ()))

    agent = EditorAgent(
        lambda on_change: _make_client(settings, on_change),
        agent_id=agent_id,
        session_key=session_key,
        report=report,
        report_change=lambda text: click.echo(text, err=True),
    )
    connection = EditorConnection(agent, report)
    agent.attach(connection)
    try:
        await connection.run()
    finally:
        await agent.close()
    return 0 if agent.has_reached_gateway else exit_codes[-1]


def _make_client(settings: Settings, on_change: Callable[[str], None]) -> Client:
    from antiphon.cli._backend import make_gateway_client
    from antiphon.cli._gateway_lookup import build_not_running_error

    client = make_gateway_client(settings, on_change)
    if client is None:
        raise build_not_running_error(settings)
    return client


def _configure_logging(settings: Settings) -> None:
    """Print warnings, and with `--debug` everything, on standard error. The log file belongs to the gateway."""
    import logging

    logging.basicConfig(level=logging.INFO if settings.debug else logging.WARNING)
