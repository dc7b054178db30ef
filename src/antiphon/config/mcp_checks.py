"""Checks the configured MCP servers for settings that cannot work."""

from __future__ import annotations

import re
from collections.abc import Iterator

from antiphon.config.errors import Problem
from antiphon.config.mcp import McpServerConfig

MAX_SERVERS = 64
MAX_SERVER_NAME_CHARACTERS = 64
SERVER_NAME_PATTERN = re.compile(rf"[A-Za-z0-9@._/-][A-Za-z0-9@._/ -]{{0,{MAX_SERVER_NAME_CHARACTERS - 1}}}")
OLD_HTTP_TRANSPORT = "sse"


def check_servers(servers: list[tuple[str, str, McpServerConfig]]) -> Iterator[Problem]:
    """Yield the problems of the servers, each of which is given with its path and name."""
    seen: dict[str, str] = {}
    if len(servers) > MAX_SERVERS:
        path = servers[MAX_SERVERS][0]
        yield Problem(
            path, f"There are {len(servers)} MCP servers; at most {MAX_SERVERS} can be used.", "Remove some."
        )
    for path, name, server in servers:
        first = seen.setdefault(name, path)
        if first != path:
            yield Problem(
                path, f"The MCP server {name!r} is configured in {first!r} and {path!r}.", "Keep one."
            )
        if not SERVER_NAME_PATTERN.fullmatch(name):
            yield Problem(
                path,
                f"{name[:80]!r} is not a valid name of an MCP server.",
                f"Use 1 to {MAX_SERVER_NAME_CHARACTERS} letters, digits and any of '@._/-'.",
            )
        yield from _check_transport(path, server)
        yield from _check_texts(path, server)


def _check_transport(path: str, server: McpServerConfig) -> Iterator[Problem]:
    if (server.command is None) == (server.url is None):
        what = "both 'command' and 'url'" if server.url is not None else "neither 'command' nor 'url'"
        yield Problem(path, f"{path!r} has {what}.", "Set 'command' for a program, or 'url' for an address.")
        return
    if server.type is not None and server.transport is not None and server.type != server.transport:
        yield Problem(f"{path}.transport", f"'type' and 'transport' of {path!r} differ.", "Keep 'type'.")
    chosen = server.type or server.transport
    if chosen == OLD_HTTP_TRANSPORT:
        yield Problem(
            f"{path}.type",
            f"{path + '.type'!r} is 'sse', the HTTP transport of 2024, which is not supported.",
            "Use the server's address for streamable HTTP, which often ends in '/mcp', with type 'http'.",
        )
    elif chosen is not None and chosen != server.transport_name:
        needed = "command" if chosen == "stdio" else "url"
        yield Problem(
            f"{path}.type", f"{path + '.type'!r} is {chosen!r}, which needs {needed!r}.", "Remove 'type'."
        )
    foreign = (
        ("headers", "auth") if server.command is not None else ("args", "env", "cwd", "working_directory")
    )
    for field in sorted(server.model_fields_set.intersection(foreign)):
        if getattr(server, field) not in ((), {}, None):
            key = "workingDirectory" if field == "working_directory" else field
            yield Problem(
                f"{path}.{key}",
                f"{key!r} of {path!r} has no meaning for a server with {_name_kind(server)}.",
                "Remove it.",
            )
    if server.cwd and server.working_directory and server.cwd != server.working_directory:
        yield Problem(
            f"{path}.workingDirectory", f"'cwd' and 'workingDirectory' of {path!r} differ.", "Keep 'cwd'."
        )


def _name_kind(server: McpServerConfig) -> str:
    return "'command'" if server.command is not None else "'url'"


def _check_texts(path: str, server: McpServerConfig) -> Iterator[Problem]:
    """Yield problems with texts that cannot be passed to a process or sent in a request."""
    for name in server.env:
        if not name or "=" in name or "\0" in name:
            yield Problem(
                f"{path}.env",
                f"{name[:80]!r} in {path + '.env'!r} is not a valid variable name.",
                "Use a name without '=' and NUL characters.",
            )
    for name in server.headers:
        if not re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", name):
            yield Problem(
                f"{path}.headers",
                f"{name[:80]!r} in {path + '.headers'!r} is not a valid header name.",
                "Use letters, digits and '-'.",
            )
    for text in (server.command or "", *server.args, server.directory or ""):
        if "\0" in text:
            yield Problem(path, f"{path!r} contains a NUL character.", "Remove it.")
    if server.enabled_tools is not None and not server.enabled_tools:
        yield Problem(
            f"{path}.enabledTools",
            f"{path + '.enabledTools'!r} is empty, so no tool is offered.",
            "Use 'enabled: false'.",
        )
