"""The MCP servers whose tools agents use: `mcp.servers`, and `mcpServers` as other programs write it."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, field_serializer

from antiphon.config.addresses import mask_url
from antiphon.config.base import WEB_ADDRESS_PATTERN, Section, Strings, Text
from antiphon.config.secrets import ENV_REFERENCE_PATTERN, Secret, read_env

DEFAULT_CALL_TIMEOUT_SECONDS = 120.0
MAX_CALL_TIMEOUT_SECONDS = 3600.0


McpTransportName = Literal["stdio", "http", "sse"]


def _normalize_transport(value: object) -> object:
    is_http = isinstance(value, str) and value.lower().replace("_", "-") in _HTTP_NAMES
    return "http" if is_http else value


_HTTP_NAMES = ("http", "streamable-http", "streamablehttp", "remote")
McpTransport = Annotated[
    McpTransportName,
    BeforeValidator(_normalize_transport, Literal["stdio", "http", "streamable-http", "sse"]),
]


class McpOAuth(Section):
    """OAuth of a server, where its defaults do not fit."""

    type: Literal["oauth"] = "oauth"
    client_id: Text | None = Field(
        default=None, description="A client registered by hand. Default: one is registered at the login."
    )
    client_secret: Secret | None = None
    scope: Text | None = Field(default=None, description="Default: what the server asks for.")


class McpServerConfig(Section):
    """A program (`command`) or an address (`url`) that offers tools to agents."""

    command: Text | None = Field(
        default=None, description="The program to start; it speaks on stdin and stdout."
    )
    args: Strings = ()
    env: dict[str, Secret] = Field(
        default_factory=dict[str, Secret],
        description="Added to HOME, LOGNAME, PATH, SHELL, TERM and USER, the only variables that it inherits.",
    )
    cwd: Text | None = Field(default=None, description="Default: the home directory.")
    working_directory: Text | None = Field(default=None, description="Same as `cwd`.")
    url: Annotated[str, Field(pattern=WEB_ADDRESS_PATTERN)] | None = Field(
        default=None, description="The address of a server on streamable HTTP; it may be local."
    )
    headers: dict[str, Secret] = Field(
        default_factory=dict[str, Secret],
        description="`${NAME}` in a text, also in `env`, stands for a variable of the gateway.",
    )
    type: McpTransport | None = Field(default=None, description="Default: `stdio` or `http`, by what is set.")
    transport: McpTransport | None = Field(default=None, description="Same as `type`.")
    auth: Literal["oauth", "none"] | McpOAuth | None = Field(
        default=None,
        description="Default: OAuth if the server asks for it and `headers` has no Authorization.",
    )
    timeout: float = Field(
        default=DEFAULT_CALL_TIMEOUT_SECONDS,
        gt=0,
        le=MAX_CALL_TIMEOUT_SECONDS,
        description="Timeout of a call, in seconds.",
    )
    enabled: bool = True
    disabled: bool = Field(default=False, description="`true` is the same as `enabled: false`.")
    enabled_tools: Strings | None = Field(
        default=None,
        description="The tools to offer, by the server's names; `*` matches any text. Default: all.",
    )
    disabled_tools: Strings = ()
    required: bool = Field(
        default=False,
        description="Whether a run fails if the server cannot be used, instead of going on without.",
    )
    trust: bool = Field(
        default=False,
        description="Whether to believe what the server says about its tools, such as that one only reads.",
    )
    ask: bool | Strings = Field(
        default=False, description="Whether a person must allow each call, or the tools for which this is so."
    )

    @field_serializer("url")
    def _hide_credentials(self, url: str | None) -> str | None:
        return url and mask_url(url)

    @property
    def is_enabled(self) -> bool:
        return self.enabled and not self.disabled

    @property
    def directory(self) -> str | None:
        return self.cwd or self.working_directory

    @property
    def transport_name(self) -> Literal["stdio", "http"]:
        return "stdio" if self.command is not None else "http"

    @property
    def oauth(self) -> McpOAuth | None:
        """How to log in, or None if the server is used without OAuth."""
        if self.url is None or self.auth == "none":
            return None
        if isinstance(self.auth, McpOAuth):
            return self.auth
        has_credentials = any(name.lower() == "authorization" for name in self.headers)
        return None if has_credentials and self.auth is None else McpOAuth()

    def offers(self, tool: str) -> bool:
        """Whether a tool of the server, by its own name, is to be offered."""
        if self.enabled_tools is not None and not matches_name(tool, self.enabled_tools):
            return False
        return not matches_name(tool, self.disabled_tools)

    def asks_about(self, tool: str) -> bool:
        """Whether a person must allow calls of a tool."""
        return self.ask if isinstance(self.ask, bool) else matches_name(tool, self.ask)


McpServers = dict[str, McpServerConfig]


def reveal_all(secrets: Mapping[str, Secret]) -> dict[str, str]:
    """Return variables or headers with their values, in which `${NAME}` stands for a variable of the gateway. Blocks.

    Raises:
        ConfigError: one is missing.
    """
    return {name: _expand(secret) for name, secret in secrets.items()}


def _expand(secret: Secret) -> str:
    revealed = secret.reveal()
    if secret.kind != "text":
        return revealed
    return ENV_REFERENCE_PATTERN.sub(lambda found: read_env(found[1]), revealed)


def matches_name(name: str, patterns: Strings) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


class McpConfig(Section):
    """The Model Context Protocol."""

    servers: McpServers = Field(
        default_factory=dict[str, McpServerConfig],
        description="Servers by their names, which become part of the names of their tools.",
    )
