"""The command line: thin commands that read options, call the gateway or the store (`_backend`), and print.

Only click is imported here. A command's module is imported when the command is called, and imports what it needs when
it runs: `antiphon --version` is done before a model library would have loaded.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence

import click

from antiphon import __version__
from antiphon.cli._errors import report_error
from antiphon.cli._options import common_options
from antiphon.cli._output import PROGRAM_NAME, clear_global_options, name_program

COMMAND_MODULES = {
    "demo": ("antiphon.cli.demo", "Watch agents work together. Needs no setup."),
    "up": ("antiphon.cli.up", "Run the gateway."),
    "stop": ("antiphon.cli.stop", "Stop the gateway of the state directory."),
    "chat": ("antiphon.cli.chat.command", "Chat with an agent in this terminal."),
    "send": ("antiphon.cli.send", "Send a message to a session."),
    "agent": ("antiphon.cli.agent", "Send one message to an agent and print the answer."),
    "spawn": ("antiphon.cli.spawn", "Start a sub-agent for a session."),
    "subagents": ("antiphon.cli.subagents", "List, stop and redirect a session's sub-agents."),
    "status": ("antiphon.cli.status", "Show the state of the gateway, or of the store if none runs."),
    "sessions": ("antiphon.cli.sessions", "List, read, search, label, delete, export and import sessions."),
    "agents": ("antiphon.cli.agents", "List the configured agents and whom each may spawn."),
    "tools": ("antiphon.cli.tools", "List an agent's tools, and the setting that decides about each."),
    "exchanges": ("antiphon.cli.exchanges", "List messages between sessions and their outcome."),
    "deliveries": ("antiphon.cli.deliveries", "List deliveries to people; retry failed ones."),
    "channels": ("antiphon.cli.channels", "List, add and test chat channels such as Telegram."),
    "pairing": ("antiphon.cli.pairing", "Admit people who write to the agents in chat apps."),
    "approvals": ("antiphon.cli.approvals", "List tool calls that wait for you; allow or deny them."),
    "mcp": ("antiphon.cli.mcp", "Use tools of MCP servers, and offer sessions to MCP clients."),
    "acp": ("antiphon.cli.acp.command", "Offer agents to editors that speak the Agent Client Protocol."),
    "sandbox": ("antiphon.cli.sandbox", "Show what isolates commands; list and remove directories."),
    "cron": ("antiphon.cli.cron", "Manage scheduled jobs."),
    "tokens": ("antiphon.cli.tokens", "List, issue and revoke access tokens."),
    "config": ("antiphon.cli.config", "Check the configuration, or print its schema."),
    "store": ("antiphon.cli.store", "Migrate to another database."),
    "logs": ("antiphon.cli.logs", "Show or follow the log."),
    "doctor": ("antiphon.cli.doctor", "Check the installation and suggest fixes."),
}

ROOT_HELP = """\
Antiphon hosts agents' chat sessions and lets them find, read, message and spawn each other.

All data is in one state directory (default: ~/.antiphon). Without a configured provider, a built-in
rehearsal model answers, so everything can be tried offline.

Start with `antiphon demo`, then `antiphon up`, and `antiphon chat` in another terminal.
"""


class LazyCommandGroup(click.Group):
    """A group whose commands are imported when they are called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMAND_MODULES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMAND_MODULES:
            return None
        from importlib import import_module

        return import_module(COMMAND_MODULES[cmd_name][0]).command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.NoSuchCommand as error:  # click knows only the commands imported so far
            raise click.NoSuchCommand(
                error.command_name, possibilities=list(COMMAND_MODULES), ctx=ctx
            ) from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, about) for name, (_, about) in COMMAND_MODULES.items()])


@click.group(
    cls=LazyCommandGroup,
    invoke_without_command=True,
    help=name_program(ROOT_HELP),
    epilog=name_program("Run `antiphon COMMAND --help` for more about a command."),
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="antiphon", message="%(prog)s %(version)s")
@common_options
@click.pass_context
def root(ctx: click.Context) -> None:
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program and return its exit code."""
    command_line = list(sys.argv[1:] if arguments is None else arguments)
    gc.disable()  # imports create hardly any garbage; an event loop enables it again
    os.umask(0o077)  # every file written may contain conversations
    # Pydantic would look for plugins in the metadata of every installed package at each start.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    clear_global_options()
    try:
        code = root.main(command_line, prog_name=PROGRAM_NAME, standalone_mode=False)
        sys.stdout.flush()
    except BrokenPipeError:
        _abandon_stdout()
        return 1
    except Exception as error:  # noqa: BLE001 - the outermost handler; `report_error` prints it in one sentence
        return report_error(error, command_line)
    finally:
        gc.freeze()  # at exit, the interpreter would look for garbage among everything imported
    return code if isinstance(code, int) else 0


def _abandon_stdout() -> None:
    """Redirect stdout after its reader has closed it, so that the interpreter can still flush at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
