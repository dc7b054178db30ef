"""`antiphon mcp`: the servers whose tools agents use, and sessions for MCP clients."""

from __future__ import annotations

import click

from antiphon.cli._options import common_options


@click.group(help="Use tools of MCP servers, and offer sessions to MCP clients.")
@common_options
def command() -> None:
    pass
