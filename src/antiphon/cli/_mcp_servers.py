"""`antiphon mcp add`, `list`, `test` and `remove`: the servers whose tools agents use."""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from antiphon.cli import _output
from antiphon.cli._options import Settings, common_options, gateway_options
from antiphon.cli._param_types import IntegerParam

if TYPE_CHECKING:
    from antiphon.config import Config
    from antiphon.config.mcp import McpServerConfig
    from antiphon.mcp.probe import ProbeResult

SERVER_KEY_PATHS = (("mcp", "servers"), ("mcpServers",), ("tools", "mcpServers"))
"""The keys under which servers are configured; new ones go to the first of these that is in use."""
MAX_DESCRIPTION_CHARACTERS = 100


# --- add ---


class _AddCommand(click.Command):
    """A command whose last argument is another command, which may have options of its own."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            raise click.UsageError(
                f"{error.format_message()} If it belongs to the program, put `--` before the command: "
                "NAME -- COMMAND [ARG]...",
                ctx,
            ) from None


@click.command(cls=_AddCommand)
@click.argument("name", required=False)
@click.argument("target", metavar="[COMMAND [ARG]...|URL]", nargs=-1)
@click.option(
    "-e",
    "--env",
    metavar="NAME[=VALUE]",
    multiple=True,
    help="Environment variable for the program; without a value, the gateway's own is used.",
)
@click.option(
    "-H",
    "--header",
    metavar="'NAME: VALUE'",
    multiple=True,
    help="HTTP header for the URL; ${NAME} stands for a variable of the gateway.",
)
@click.option("--cwd", metavar="DIR", help="Working directory of the program (default: the home directory).")
@click.option("--timeout", type=float, metavar="SECONDS", help="Timeout of a call (default: 120).")
@click.option("--tool", "tools", metavar="NAME", multiple=True, help="Offer only this tool; may be repeated.")
@click.option("--required", is_flag=True, help="Runs fail if the server cannot be used.")
@click.option(
    "--trust", is_flag=True, help="Trust what the server says about its tools, such as that one only reads."
)
@click.option("--ask", is_flag=True, help="A person must allow each call.")
@click.option("--client-id", metavar="ID", help="An OAuth client that was registered by hand.")
@click.option(
    "--scope", metavar="SCOPES", help="The OAuth scopes to ask for (default: what the server names)."
)
@click.option("--replace", is_flag=True, help="Replace the server with this name.")
@click.option("--no-test", is_flag=True, help="Do not start or contact the server.")
@common_options
@click.pass_obj
def add(settings: Settings, name: str | None, target: tuple[str, ...], **options: Any) -> None:
    """Add a server to the configuration, try it, and list its tools.

    \b
    antiphon mcp add files -- npx -y @modelcontextprotocol/server-filesystem ~/notes
    antiphon mcp add tickets https://mcp.example.com/mcp --header 'Authorization: Bearer ${TICKETS_TOKEN}'
    antiphon mcp add            (asks for everything)
    """
    document = settings.read_config_document()
    content = document.content if document else {}
    is_asked = name is None or not target
    if is_asked and not _is_conversation(settings):
        raise click.UsageError("Give a name and, after it, `-- COMMAND [ARG]...` or a URL.")
    name = name or _ask_name(content)
    if not options["replace"] and _find_place(content, name) is not None:
        raise click.UsageError(
            f"An MCP server {name!r} already exists. Choose another name, or pass --replace."
        )
    target = target or _ask_target()
    if is_asked:
        options["env" if not _is_address(target) else "header"] += _ask_secrets(target)
    server = _build_server(target, options)
    keys = (*(_find_place(content, name) or _choose_place(content)), name)
    parsed = _parse_with(settings, content, keys, server)
    result = None if options["no_test"] else _probe(settings, name, parsed)
    if result is not None and result.state == "failed" and not _confirm_anyway(settings, result):
        raise _build_probe_error(result, "It was not added. To add it without a test, pass --no-test.")
    _write_server(settings, keys, server)
    if result is not None and result.state == "needs_auth" and _is_conversation(settings):
        click.echo("The server asks for a login.")
        result = _log_in(settings, name, parsed, port=0, opens_browser=True)
    _show_added(settings, keys, result)


def _build_server(target: Sequence[str], options: dict[str, Any]) -> dict[str, Any]:
    """Return a server as it is written in the configuration."""
    is_address = _is_address(target)
    for option in ("env", "cwd") if is_address else ("header", "client_id", "scope"):
        if options[option]:
            kinds = "programs, not for a URL" if is_address else "a URL, not for a program"
            raise click.UsageError(f"--{option.replace('_', '-')} is for {kinds}.")
    server = _build_address(target, options) if is_address else _build_program(target, options)
    if options["timeout"] is not None:
        server["timeout"] = options["timeout"]
    if options["tools"]:
        server["enabledTools"] = list(options["tools"])
    return {**server, **{flag: True for flag in ("required", "trust", "ask") if options[flag]}}


def _build_address(target: Sequence[str], options: dict[str, Any]) -> dict[str, Any]:
    if len(target) > 1:
        raise click.UsageError("A URL takes no arguments. Put options before it.")
    server: dict[str, Any] = {"url": target[0]}
    if options["header"]:
        server["headers"] = dict(map(_split_header, options["header"]))
    oauth = {"clientId": options["client_id"], "scope": options["scope"]}
    if any(oauth.values()):
        server["auth"] = {"type": "oauth", **{key: value for key, value in oauth.items() if value}}
    return server


def _build_program(target: Sequence[str], options: dict[str, Any]) -> dict[str, Any]:
    server: dict[str, Any] = {"command": target[0]}
    if len(target) > 1:
        server["args"] = list(target[1:])
    if options["env"]:
        server["env"] = dict(map(_split_variable, options["env"]))
    if options["cwd"]:
        server["cwd"] = str(Path(options["cwd"]).absolute())
    return server


def _is_address(target: Sequence[str]) -> bool:
    return "://" in target[0]  # which schemes are served is checked with the configuration


def _split_variable(given: str) -> tuple[str, Any]:
    name, separator, value = given.partition("=")
    return name, value if separator else {"env": name}


def _split_header(given: str) -> tuple[str, str]:
    name, separator, value = given.partition(":")
    if not separator or not value.strip():
        raise click.UsageError(f"{name!r} is not a header. Write it as 'Name: value'.")
    return name.strip(), value.strip()


def _find_place(content: dict[str, Any], name: str) -> tuple[str, ...] | None:
    """Return the configuration keys of the server with this name."""
    return next((place for place in SERVER_KEY_PATHS if name in (_get(content, place) or {})), None)


def _choose_place(content: dict[str, Any]) -> tuple[str, ...]:
    return next((place for place in SERVER_KEY_PATHS if _get(content, place)), SERVER_KEY_PATHS[0])


def _get(content: dict[str, Any], keys: Sequence[str]) -> dict[str, Any] | None:
    found: Any = content
    for key in keys:
        found = cast("dict[str, Any]", found).get(key) if isinstance(found, dict) else None
    return cast("dict[str, Any]", found) if isinstance(found, dict) else None


def _parse_with(
    settings: Settings, content: dict[str, Any], keys: Sequence[str], server: dict[str, Any]
) -> McpServerConfig:
    """Return the server as it will be understood, after checking the whole configuration with it."""
    from copy import deepcopy

    from antiphon.config import parse

    changed = deepcopy(content)
    at = changed
    for key in keys[:-1]:
        at = at.setdefault(key, {})
    at[keys[-1]] = server
    path = settings.paths.config
    config, _ = parse(changed, base=path.parent, file=str(path))
    return _find_server(config, keys[-1])


def _write_server(settings: Settings, keys: Sequence[str], server: dict[str, Any]) -> None:
    from antiphon.config.edit import format_member, set_member
    from antiphon.errors import ConfigError

    try:
        set_member(settings.paths.config, keys, server)
    except ConfigError:
        click.echo("To add the server by hand, put this into the configuration:", err=True)
        click.echo(format_member(keys, server), err=True)
        raise


def _show_added(settings: Settings, keys: Sequence[str], result: ProbeResult | None) -> None:
    from antiphon.cli._gateway_lookup import find_running_gateway

    path = settings.paths.config
    is_running = find_running_gateway(settings.paths.state_dir) is not None
    if settings.json:
        shown = {"name": keys[-1], "config": str(path), "key": ".".join(keys), "restartNeeded": is_running}
        _output.print_json({**shown, "test": result})
        return
    click.echo(f"Added {_output.clean_line(keys[-1])!r} to {str(path)!r}.")
    if result is not None:
        _show_result(result)
    if is_running:
        click.echo(f"The running gateway uses it after a restart: {_output.format_program()} stop, then up.")


# --- questions ---


def _is_conversation(settings: Settings) -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty() and not settings.json


def _ask_name(content: dict[str, Any]) -> str:
    while True:
        name: str = click.prompt("Name (its tools will be called mcp__NAME__…)", type=str).strip()
        if _find_place(content, name) is None:
            return name
        click.echo(f"An MCP server {name!r} already exists.")


def _ask_target() -> tuple[str, ...]:
    while True:
        try:
            return tuple(shlex.split(click.prompt("Command, or URL", type=str)))
        except ValueError:
            click.echo("A quotation mark is not closed.")


def _ask_secrets(target: Sequence[str]) -> tuple[str, ...]:
    """Return the variables of a program, or the headers of an address, that a person types."""
    if _is_address(target):
        question = "Header, as 'Name: value' (${NAME} is a variable of the gateway; press Enter to continue)"
    else:
        question = "Variable it needs, as NAME=VALUE or NAME (press Enter to continue)"
    given: list[str] = []
    while line := click.prompt(question, default="", show_default=False, type=str).strip():
        given.append(line)
    return tuple(given)


def _confirm_anyway(settings: Settings, result: ProbeResult) -> bool:
    if not _is_conversation(settings):
        return False
    _show_result(result)
    return click.confirm("Add it anyway?")


# --- list ---


@click.command("list")
@gateway_options
@common_options
@click.pass_obj
def list_servers(settings: Settings) -> None:
    """List the configured servers with their states.

    The states are those in the running gateway, or the last known ones if none runs. If a server cannot be used, the
    reason is shown. `antiphon mcp test` tries a server.
    """
    servers = asyncio.run(_load_states(settings))
    if settings.json:
        _output.print_json({"servers": servers})
    elif not servers:
        click.echo(_output.name_program("No MCP server is configured. Add one: antiphon mcp add"))
    else:
        _output.print_table(
            ["NAME", "STATE", "TOOLS", "LAST ANSWER", "WHY"], [_format_row(server) for server in servers]
        )


async def _load_states(settings: Settings) -> list[dict[str, Any]]:
    from antiphon.cli._gateway_lookup import find_gateway

    if site := find_gateway(settings):
        from antiphon.client import Client

        async with Client.of_replicas([site]) as client:
            running: list[dict[str, Any]] = (await client.call("mcp.status"))["servers"]
        return running if settings.named_gateways else _add_changes(settings, running)
    from antiphon.mcp.servers import describe_known_servers

    return await asyncio.to_thread(describe_known_servers, settings.load().config, settings.paths.state_dir)


def _add_changes(settings: Settings, running: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the servers of the gateway, marked where a restart will add or remove them."""
    configured = {name for _, name, _ in settings.load().config.list_mcp_servers()}
    known = {server["name"] for server in running}
    removed = "removed from the configuration; in use until the gateway is restarted"
    added = "in the configuration; used after a restart of the gateway"
    return [
        *(server if server["name"] in configured else {**server, "reason": removed} for server in running),
        *({"name": name, "state": "new", "reason": added, "tools": 0} for name in sorted(configured - known)),
    ]


def _format_row(server: dict[str, Any]) -> list[str]:
    contact = server.get("lastContactAt")
    reason = server.get("reason") or ""
    if server["state"] == "needs_auth":
        reason += f". Run: {_output.format_program()} mcp login {server['name']}"
    return [
        server["name"],
        server["state"].replace("_", " "),
        str(server.get("offeredTools", server["tools"])) if server["tools"] or contact else "",
        _output.format_age(contact) if contact else "never",
        reason,
    ]


# --- test ---


@click.command()
@click.argument("names", metavar="[NAME]...", nargs=-1)
@common_options
@click.pass_context
def test(ctx: click.Context, names: tuple[str, ...]) -> None:
    """Connect to servers and list their tools.

    Without NAME, all servers are tested. The exit code is 5 if one cannot be used.
    """
    settings = ctx.ensure_object(Settings)
    config = settings.load().config
    servers = {name: _find_server(config, name) for name in names} or dict(config.enabled_mcp_servers)
    results = [_probe(settings, name, server) for name, server in servers.items()]
    if settings.json:
        _output.print_json({"servers": results})
    elif not results:
        click.echo(_output.name_program("No MCP server is configured. Add one: antiphon mcp add"))
    for result in results if not settings.json else []:
        if len(results) > 1:
            click.echo(_output.bold(_output.clean_line(result.name)))
        _show_result(result)
    if any(result.state != "ready" for result in results):
        from antiphon.errors import McpServerUnavailable

        ctx.exit(McpServerUnavailable.exit_code)


def _probe(settings: Settings, name: str, server: McpServerConfig) -> ProbeResult:
    from antiphon.mcp.probe import probe_server

    _keep_log_apart(settings)
    return asyncio.run(probe_server(settings.paths.state_dir, name, server))


def _keep_log_apart(settings: Settings) -> None:
    """Print the log only with `--debug`: the result has the same facts, and the log file belongs to the gateway."""
    import logging

    from antiphon.cli._logging import configure_logging

    if settings.debug:
        configure_logging(settings.paths.state_dir, debug=True)
    else:
        logging.getLogger().addHandler(logging.NullHandler())


def _show_result(result: ProbeResult) -> None:
    if result.state != "ready":
        hint = (
            f" Run: {_output.format_program()} mcp login {result.name}"
            if result.state == "needs_auth"
            else ""
        )
        click.echo(_output.clean_text(f"It cannot be used: {result.reason}.{hint}"))
        return
    count = _output.format_count(len(result.tools), "tool")
    left = result.listed_tools - len(result.tools)
    more = f" ({left} left out by enabledTools and disabledTools)" if left > 0 else ""
    click.echo(f"It answered in {result.duration_ms} ms and offers {count}{more}:")
    for tool in result.tools:
        description = _output.shorten_text(_output.clean_line(tool.description), MAX_DESCRIPTION_CHARACTERS)
        click.echo(f"  {tool.name}  {_output.dim(description)}".rstrip())
    for note in result.notes:
        click.echo(f"Note: {_output.clean_text(note)}")


def _build_probe_error(result: ProbeResult, hint: str) -> Exception:
    from antiphon.errors import McpServerUnavailable

    return McpServerUnavailable(
        f"The MCP server {result.name!r} cannot be used: {result.reason}.", hint, server=result.name
    )


def _find_server(config: Config, name: str) -> McpServerConfig:
    from antiphon.errors import NotFound

    for _, found, server in config.list_mcp_servers():
        if found == name:
            return server
    known = ", ".join(repr(found) for _, found, _ in config.list_mcp_servers()) or "none"
    raise NotFound(f"No MCP server {name!r} is configured.", f"Configured: {known}.")


# --- login ---


@click.command()
@click.argument("name")
@click.option(
    "--port",
    type=IntegerParam(0, 65535),
    default=0,
    help="Local port that the browser is sent back to (default: a free one).",
)
@click.option("--no-browser", is_flag=True, help="Print the address instead of opening a browser.")
@common_options
@click.pass_obj
def login(settings: Settings, name: str, port: int, no_browser: bool) -> None:
    """Log in to a server with OAuth.

    This opens a browser, stores the tokens, and lists the tools. If the browser runs on another machine, paste the
    address of the page that it shows at the end.
    """
    server = _find_server(settings.load().config, name)
    result = _log_in(settings, name, server, port=port, opens_browser=not no_browser)
    if settings.json:
        _output.print_json(result)
    else:
        _show_result(result)
    if result.state != "ready":
        raise _build_probe_error(result, f"Run: antiphon mcp test {name}")


def _log_in(
    settings: Settings, name: str, server: McpServerConfig, *, port: int, opens_browser: bool
) -> ProbeResult:
    from antiphon.mcp.login import log_in

    def show_page(url: str, offer: Callable[[str], bool]) -> None:
        click.echo(f"To log in, open: {_output.clean_line(url)}", err=True)
        if opens_browser and _is_conversation(settings) and _has_display():
            click.launch(url)
        if sys.stdin.isatty():
            click.echo(
                "If the browser ends on a page that cannot be shown, paste its address here.", err=True
            )
            _read_pasted(offer)

    _keep_log_apart(settings)
    state_dir = settings.paths.state_dir
    try:
        has_logged_in = asyncio.run(log_in(state_dir, name, server, port=port, show_page=show_page))
    finally:
        sys.stderr.flush()
    if not settings.json:
        click.echo("Logged in." if has_logged_in else "The server asks for no login.")
    return _probe(settings, name, server)


def _has_display() -> bool:
    """Whether a browser can show a window; without one, programs that open addresses fill the terminal with errors."""
    return sys.platform != "linux" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def _read_pasted(offer: Callable[[str], bool]) -> None:
    """Read pasted addresses from the terminal while waiting for the browser."""
    loop = asyncio.get_running_loop()

    def read() -> None:
        line = sys.stdin.readline()
        if not line:
            loop.remove_reader(sys.stdin)
        elif line.strip() and not offer(line):
            click.echo("This address does not belong to this login.", err=True)

    loop.add_reader(sys.stdin, read)


# --- remove ---


@click.command()
@click.argument("name")
@common_options
@click.pass_obj
def remove(settings: Settings, name: str) -> None:
    """Remove a server from the configuration.

    Its login and stored state are removed, too.
    """
    from antiphon.config.edit import remove_member
    from antiphon.mcp.logins import forget_server

    document = settings.read_config_document()
    place = _find_place(document.content, name) if document else None
    if document is None or place is None:
        _find_server(settings.load().config, name)
        raise AssertionError("unreachable")
    remove_member(settings.paths.config, (*place, name))
    forget_server(settings.paths.state_dir, name)
    if settings.json:
        _output.print_json({"removed": name, "config": str(settings.paths.config)})
    else:
        click.echo(f"Removed {_output.clean_line(name)!r} from {str(settings.paths.config)!r}.")


SERVER_COMMANDS = (add, list_servers, test, login, remove)
