"""`antiphon mcp`: the servers whose tools agents use, and sessions for MCP clients."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from antiphon.cli._mcp_servers import SERVER_COMMANDS
from antiphon.cli._options import Settings, common_options, gateway_options

if TYPE_CHECKING:
    from antiphon.errors import AntiphonError


@click.group(help="Use tools of MCP servers, and offer sessions to MCP clients.")
@common_options
def command() -> None: ...


for one in SERVER_COMMANDS:
    command.add_command(one)


@command.command()
@click.option(
    "--as",
    "session_key",
    metavar="SESSION",
    help="Act as this session, with its agent's rights, instead of as an operator.",
)
@gateway_options
@common_options
@click.pass_obj
def serve(settings: Settings, session_key: str | None) -> None:
    """Serve sessions to an MCP client on standard input and output.

    The client starts this command, which connects it to the running gateway. For Claude Code:
    `claude mcp add antiphon -- antiphon mcp serve`.
    """
    import asyncio

    from antiphon.cli._errors import report_error
    from antiphon.cli._gateway_lookup import find_mcp_endpoints
    from antiphon.mcp.server.stdio import StdioBridge

    if session_key is not None and not session_key.strip():
        raise click.UsageError("--as is empty. Name a session, or leave the option out.")
    exit_codes = [0]

    def report(error: AntiphonError) -> None:
        exit_codes.append(report_error(error, ()))

    bridge = StdioBridge(lambda: find_mcp_endpoints(settings), session_key=session_key, report=report)
    asyncio.run(bridge.run())
    if not bridge.has_reached_gateway:
        click.get_current_context().exit(exit_codes[-1])
