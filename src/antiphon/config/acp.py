"""Agents that are programs and speak the Agent Client Protocol: `acp`, and `runtime.acp` of an agent."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, Strict

from antiphon.config.base import AgentId, AgentPatterns, Amount, Count, Section, Strings, Text
from antiphon.config.secrets import Secret

ToolKind = Literal[
    "read", "edit", "delete", "move", "search", "execute", "think", "fetch", "switch_mode", "other"
]
ToolKinds = Annotated[tuple[ToolKind, ...], Strict(False)]

DEFAULT_ALLOWED_KINDS: tuple[ToolKind, ...] = ("read", "search", "think")

KNOWN_PROGRAMS: dict[str, tuple[tuple[str, ...], str]] = {
    "codex": (("codex-acp",), "npm install -g @agentclientprotocol/codex-acp"),
    "claude": (("claude-agent-acp",), "npm install -g @agentclientprotocol/claude-agent-acp"),
    "gemini": (("gemini", "--acp"), "npm install -g @google/gemini-cli"),
    "opencode": (("opencode", "acp"), "npm install -g opencode-ai"),
    "qwen": (("qwen", "--acp"), "npm install -g @qwen-code/qwen-code"),
}
"""The command of each known program, and how to install it."""

PROGRAMS_WITH_PRIVATE_HEADERS = frozenset({"codex", "opencode", "qwen"})
"""Programs known to keep headers of MCP servers out of command lines, which every user can read."""


class AcpProgramConfig(Section):
    """The program that answers for an agent: one that is known by its name, or any command."""

    agent: Text | None = Field(
        default=None,
        description="A known program: " + ", ".join(f"`{name}`" for name in KNOWN_PROGRAMS) + ".",
    )
    command: Text | None = Field(
        default=None, description="The program, which speaks ACP on stdin and stdout."
    )
    args: Strings = ()
    env: dict[str, Secret] = Field(
        default_factory=dict[str, Secret],
        description="Added to HOME, LOGNAME, PATH, SHELL, TERM and USER, the only variables that it inherits.",
    )
    cwd: Text | None = Field(
        default=None, description="The directory it works in. Default: the workspace of the session."
    )
    mode: Literal["persistent", "oneshot"] = Field(
        default="persistent",
        description="`oneshot`: each turn has a new process, which remembers no earlier turn.",
    )
    allow_kinds: ToolKinds | None = Field(default=None, description="Instead of `acp.allowKinds`.")
    backend: Text | None = Field(default=None, description="Accepted, but has no effect.")

    @property
    def known_name(self) -> str | None:
        """The name of a known program, if it is one."""
        name = None if self.agent is None else self.agent.lower()
        return name if name in KNOWN_PROGRAMS else None

    @property
    def keeps_headers_private(self) -> bool:
        return self.known_name in PROGRAMS_WITH_PRIVATE_HEADERS

    @property
    def argv(self) -> tuple[str, ...]:
        """The command line."""
        if self.command is not None:
            return (self.command, *self.args)
        assert self.known_name is not None  # checked when the configuration is loaded
        return (*KNOWN_PROGRAMS[self.known_name][0], *self.args)

    @property
    def name(self) -> str:
        """The name to show to people."""
        return self.agent or (self.command or "").rpartition("/")[2]


class AcpRuntimeConfig(Section):
    """The processes of all ACP programs."""

    ttl_minutes: Amount = Field(
        default=30, description="Minutes without a turn after which a process ends. 0 = never."
    )


class AcpConfig(Section):
    """The Agent Client Protocol."""

    enabled: bool = True
    default_agent: AgentId | None = Field(
        default=None,
        description="The agent for `sessions_spawn` with `runtime: 'acp'` and without an `agentId`.",
    )
    allowed_agents: AgentPatterns | None = Field(
        default=None,
        description="Agents that may be spawned with `runtime: 'acp'`. Default: any that may be spawned.",
    )
    max_concurrent_sessions: Count = Field(
        default=16, description="Maximum number of processes; idle ones are ended when others are needed."
    )
    allow_kinds: ToolKinds = Field(
        default=DEFAULT_ALLOWED_KINDS,
        description="Kinds of tool calls that are allowed unasked when the program asks for permission.",
    )
    runtime: AcpRuntimeConfig = Field(default_factory=AcpRuntimeConfig.model_construct)
