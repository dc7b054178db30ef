"""The config section `tools`: which tools agents have, and what each of them may do.

Whether the values of different keys fit together is checked in `antiphon.config.validate`.
"""

from pathlib import Path
from typing import Annotated, Literal, cast

from pydantic import AfterValidator, BeforeValidator, Field, Strict, ValidationInfo

from antiphon.access import Control, Visibility
from antiphon.command_patterns import parse_pattern
from antiphon.config.base import (
    BYTES_PER_MIB,
    MAX_NUMBER,
    PYTHON_TARGET_PATTERN,
    WEB_ADDRESS_PATTERN,
    AgentPatterns,
    Amount,
    Count,
    Section,
    Strings,
    Text,
    build_expected_error,
)
from antiphon.config.compat import ToolNames
from antiphon.config.mcp import McpServerConfig, McpServers
from antiphon.config.secrets import Secret
from antiphon.paths import expand_home
from antiphon.tool_selection import DEFAULT_TOOL_PROFILE, ToolProfile


class SessionTools(Section):
    """Which sessions the session tools can reach."""

    visibility: Visibility = "tree"
    send: Visibility | None = Field(default=None, description="For sending. Default: as `visibility`.")
    control: Control | None = Field(default=None, description="For stopping and steering.")


class AgentToAgent(Section):
    """Whether agents may reach each other's sessions."""

    enabled: bool = False
    allow: AgentPatterns = Field(default=(), description="Agent id patterns; `*` matches any text.")


class ToolLists(Section):
    """Adjusts a default set of tools; deny wins."""

    allow: ToolNames | None = None
    also_allow: ToolNames = ()
    deny: ToolNames = ()


class ProviderToolLists(ToolLists):
    """Tools of an agent while the models of one provider, or one model, answer for it."""

    profile: ToolProfile | None = Field(
        default=None, description="A further profile; `alsoAllow` adds to this one and to `allow`."
    )


ProviderName = Annotated[str, AfterValidator(lambda name: name.strip().lower())]
ToolsByProvider = dict[ProviderName, ProviderToolLists]
"""By `provider` or `provider/model`. The more specific `profile` and `allow` count; both `deny` lists do."""


class SandboxToolLists(Section):
    """Tools of sandboxed sessions."""

    tools: ToolLists = Field(
        default_factory=ToolLists.model_construct,
        description="`allow` replaces the default list; a Python tool must be named in full.",
    )


class SubagentTools(Section):
    """Tools of sub-agents."""

    tools: ToolLists = Field(default_factory=ToolLists.model_construct)


class Attachments(Section):
    """Files passed to a sub-agent."""

    enabled: bool = True
    max_files: Amount = 50
    max_file_bytes: Amount = BYTES_PER_MIB
    max_total_bytes: Amount = 5 * BYTES_PER_MIB
    retain_on_session_keep: bool = False


class SessionsSpawn(Section):
    """The `sessions_spawn` tool."""

    attachments: Attachments = Field(default_factory=Attachments.model_construct)


def _locate_python_file(target: str, info: ValidationInfo) -> str:
    """Return the target with an absolute path; a relative one starts at the configuration file."""
    module, _, name = target.rpartition(":")
    context = cast("dict[str, Path | None]", info.context or {})
    if not module.endswith(".py"):
        return target
    return f"{(context.get('base') or Path()).absolute() / expand_home(module)}:{name}"


PythonTarget = Annotated[str, Field(pattern=PYTHON_TARGET_PATTERN), AfterValidator(_locate_python_file)]


class FileTools(Section):
    """The tools for files."""

    workspace_only: bool = Field(
        default=True, description="File tools always stay inside the workspace; `false` changes nothing."
    )


class WebFetchConfig(Section):
    """The `web_fetch` tool."""

    enabled: bool = True
    max_chars: Count = Field(default=50_000, description="Characters that are shown, at most 50,000.")
    max_response_bytes: Count = 2_000_000
    max_redirects: Amount = 3
    timeout_seconds: Count = 30
    user_agent: Text = "Antiphon"


SearchProvider = Literal["brave", "searxng"]
UnsupportedSearchProvider = Literal[
    "perplexity", "grok", "gemini", "kimi", "firecrawl", "tavily", "exa", "duckduckgo"
]
"""Search services of related gateways that are not built here."""
WebAddress = Annotated[str, Field(pattern=WEB_ADDRESS_PATTERN)]


class SearchService(Section):
    """The address of a search service."""

    base_url: WebAddress | None = None


class WebSearchConfig(Section):
    """The `web_search` tool. It is offered if a service is configured."""

    enabled: bool = True
    provider: SearchProvider | UnsupportedSearchProvider | None = Field(
        default=None,
        description="Default: `searxng` if its address is set, `brave` if a key is set.",
    )
    api_key: Secret | None = Field(default=None, description="The key for Brave Search.")
    searxng: SearchService = Field(
        default_factory=SearchService.model_construct, description="Your own SearXNG; it may be local."
    )
    brave: SearchService = Field(
        default_factory=SearchService.model_construct, description="Instead of Brave's own address."
    )
    max_results: int = Field(default=5, ge=1, le=10)
    timeout_seconds: Count = 30
    cache_ttl_minutes: Amount = Field(default=15, description="0 = answers are not kept.")


class WebTools(Section):
    """The tools for the web."""

    search: WebSearchConfig = Field(default_factory=WebSearchConfig.model_construct)

    fetch: WebFetchConfig = Field(default_factory=WebFetchConfig.model_construct)


def _normalize_exec_host(value: object) -> object:
    return "sandbox" if value == "auto" else value


ExecHost = Annotated[
    Literal["sandbox", "gateway", "node"],
    BeforeValidator(_normalize_exec_host, Literal["sandbox", "gateway", "node", "auto"]),
]


class ApplyPatchConfig(Section):
    """The `apply_patch` tool, where related gateways configure it."""

    enabled: bool | None = Field(default=None, description="`false` denies the tool.")
    workspace_only: bool | None = None
    allow_models: Strings | None = None


def _check_command_pattern(value: str) -> str:
    try:
        parse_pattern(value)
    except ValueError as error:
        raise build_expected_error(f"a command such as 'ls' or 'git log ...'; {error}") from None
    return value


CommandPatterns = Annotated[tuple[Annotated[str, AfterValidator(_check_command_pattern)], ...], Strict(False)]


class ExecConfig(Section):
    """The tools `exec` and `process`: commands of agents."""

    host: ExecHost | None = Field(
        default=None,
        description="Where commands run: `sandbox` (default), or `gateway`, which is this machine without protection.",
    )
    security: Literal["deny", "allowlist", "full"] | None = Field(
        default=None,
        description="Which commands may run: none, those of `allowlist` and `safeBins`, or all. Default in the sandbox:"
        " `full`. Required for the host `gateway`.",
    )
    ask: Literal["off", "on-miss", "always"] | None = Field(
        default=None,
        description="Whether a person is asked: never, for commands that are not listed, or for all. Default: `off` in"
        " the sandbox, otherwise `on-miss`.",
    )
    allowlist: CommandPatterns | None = Field(
        default=None,
        description="Commands that may run: whole ones such as `git status`, with `*` for a part of a word and `...`"
        " for further words that are no options; or programs, by name or absolute path.",
    )
    safe_bins: Strings | None = Field(
        default=None,
        description="Programs that may run as long as they are given no file. Default: jq, cut, uniq, head, tail, tr,"
        " wc.",
    )
    safe_bin_trusted_dirs: Strings | None = Field(
        default=None, description="Directories of these programs. Default: /bin, /usr/bin."
    )
    background_ms: Amount | None = Field(
        default=None,
        description="How long `exec` waits before the command goes on in the background. Default: 10000.",
    )
    timeout_sec: Count | None = Field(
        default=None, description="Maximum duration of a command. Default: 1800."
    )
    cleanup_ms: Amount | None = Field(
        default=None, description="How long the whole output is kept after the end. Default: 1800000."
    )
    notify_on_exit: bool | None = Field(
        default=None, description="Whether the end of a background command wakes its session. Default: true."
    )
    notify_on_exit_empty_success: bool | None = Field(
        default=None, description="Also if it succeeded without output. Default: true."
    )
    path_prepend: Strings | None = Field(default=None, description="Directories to put in front of PATH.")
    apply_patch: ApplyPatchConfig | None = None


MIN_TOTAL_OUTPUT_BYTES, DEFAULT_TOTAL_OUTPUT_BYTES = 16 * BYTES_PER_MIB, 1024 * BYTES_PER_MIB


class SharedExecConfig(ExecConfig):
    """The tools `exec` and `process` of all agents, and what their commands share."""

    max_total_output_bytes: Annotated[int, Field(ge=MIN_TOTAL_OUTPUT_BYTES, le=MAX_NUMBER)] = Field(
        default=DEFAULT_TOTAL_OUTPUT_BYTES,
        description="Bytes that the outputs of all commands may occupy in the state directory.",
    )


class ApprovalsConfig(Section):
    """Tool calls that a person must allow."""

    timeout_seconds: Count = Field(
        default=1800, description="How long a call waits for a decision. Then it is denied."
    )


MIN_LOOP_COUNT, MAX_LOOP_HISTORY = 2, 1000

LoopCount = Annotated[int, Field(ge=MIN_LOOP_COUNT, le=MAX_LOOP_HISTORY)]


class LoopDetectionConfig(Section):
    """What happens to a tool call that a run repeats with the same arguments and the same result."""

    enabled: bool | None = Field(
        default=None, description="Whether repeated calls are counted. Default: false."
    )
    history_size: LoopCount | None = Field(
        default=None, description="Calls of the run that count. Default: 30."
    )
    warning_threshold: LoopCount | None = Field(
        default=None, description="From this repetition on, the model is warned. Default: 10."
    )
    critical_threshold: LoopCount | None = Field(
        default=None, description="From this repetition on, the call is refused. Default: 20."
    )
    global_circuit_breaker_threshold: LoopCount | None = Field(
        default=None, description="At this repetition, the run ends with the error `tool_loop`. Default: 30."
    )


class ToolsConfig(Section):
    """Which tools agents have, and which sessions they can reach."""

    sessions: SessionTools = Field(default_factory=SessionTools.model_construct)
    agent_to_agent: AgentToAgent = Field(default_factory=AgentToAgent.model_construct)
    subagents: SubagentTools = Field(default_factory=SubagentTools.model_construct)
    sessions_spawn: SessionsSpawn = Field(
        default_factory=SessionsSpawn.model_construct, alias="sessions_spawn"
    )
    by_provider: ToolsByProvider = Field(default_factory=dict[str, ProviderToolLists])
    sandbox: SandboxToolLists = Field(default_factory=SandboxToolLists.model_construct)
    fs: FileTools = Field(default_factory=FileTools.model_construct)
    web: WebTools = Field(default_factory=WebTools.model_construct)
    exec: SharedExecConfig = Field(default_factory=SharedExecConfig.model_construct)
    approvals: ApprovalsConfig = Field(default_factory=ApprovalsConfig.model_construct)
    loop_detection: LoopDetectionConfig = Field(default_factory=LoopDetectionConfig.model_construct)
    profile: ToolProfile | None = Field(
        default=None, description=f"Which built-in tools agents have. Default: {DEFAULT_TOOL_PROFILE}."
    )
    allow: ToolNames | None = Field(default=None, description="Default: every tool of the profile.")
    also_allow: ToolNames = Field(default=(), description="Added to the profile and to `allow`.")
    deny: ToolNames = ()
    mcp_servers: McpServers = Field(
        default_factory=dict[str, McpServerConfig],
        description="Same as `mcp.servers`, under the name that other programs use.",
    )
    python: Annotated[tuple[PythonTarget, ...], Strict(False)] = Field(
        default=(),
        description="Python functions marked with `@antiphon.tool`: `./file.py:name` or `package.module:name`.",
    )
