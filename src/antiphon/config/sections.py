"""The config sections other than the agents: types, defaults and JSON Schema descriptions.

Whether the values of different keys fit together is checked in `antiphon.config.validate`.
"""

from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import AfterValidator, BeforeValidator, Field, Strict, ValidationInfo, field_serializer

from antiphon.access import Control, Visibility
from antiphon.command_patterns import parse_pattern
from antiphon.config.addresses import mask_url
from antiphon.config.base import (
    MAX_NUMBER,
    PYTHON_TARGET_PATTERN,
    URL_PATH_PATTERN,
    WEB_ADDRESS_PATTERN,
    AgentPatterns,
    Amount,
    Count,
    Days,
    Quantity,
    Section,
    Strings,
    Text,
    build_expected_error,
)
from antiphon.config.compat import ToolNames
from antiphon.config.mcp import McpServerConfig, McpServers
from antiphon.config.secrets import SECRET_MASK, Secret
from antiphon.messages import Locale
from antiphon.paths import expand_home
from antiphon.send_policy import SendDecision
from antiphon.tool_selection import DEFAULT_TOOL_PROFILE, ToolProfile

BYTES_PER_MIB = 1024 * 1024


def _normalize_chat_type(value: object) -> object:
    return {"dm": "direct", "room": "channel"}.get(value, value) if isinstance(value, str) else value


ChatType = Annotated[
    Literal["direct", "group", "channel"],
    BeforeValidator(_normalize_chat_type, Literal["direct", "group", "channel", "dm", "room"]),
]
"""The kind of a chat; older names are accepted as well."""


class SendMatch(Section):
    """The sessions that a send rule applies to; every key that is set must match."""

    channel: Text | None = None
    surface: Text | None = Field(default=None, description="Older name of `channel`.")
    chat_type: ChatType | None = None
    key_prefix: str | None = Field(
        default=None, description="Prefix of the key, with or without `agent:<id>:`."
    )
    raw_key_prefix: str | None = Field(default=None, description="Prefix of the whole key.")

    @property
    def channel_name(self) -> str | None:
        """The channel under either of its names."""
        return self.channel or self.surface


class SendRuleConfig(Section):
    """Allows or denies sending in the sessions that match."""

    action: SendDecision
    match: SendMatch = Field(
        default_factory=SendMatch.model_construct,
        description="Sessions that the rule applies to. Default: every session.",
    )


class SendPolicyConfig(Section):
    """Which sessions may post to their chats: a matching deny wins, then a matching allow, then the default."""

    rules: Annotated[tuple[SendRuleConfig, ...], Strict(False)] = ()
    default: SendDecision = "allow"


class AgentToAgentTurns(Section):
    """Limits for conversations between agents."""

    max_ping_pong_turns: int = Field(
        default=5, ge=0, le=5, description="Maximum reply-back turns after the first reply."
    )
    max_hops: int = Field(default=12, ge=1, le=1000, description="Maximum length of a chain of sends.")
    max_runs: int = Field(default=1000, ge=1, le=1_000_000, description="Maximum runs in one chain of sends.")


class ThreadBindings(Section):
    """Sub-agent sessions bound to a thread of a channel."""

    enabled: bool = True
    idle_hours: Quantity = Field(
        default=24, description="Hours without a message after which a session is unbound; 0 = never."
    )
    max_age_hours: Quantity = Field(
        default=0, description="Hours after which a session is unbound in any case; 0 = never."
    )
    spawn_sessions: bool = True


class ResetConfig(Section):
    """When a session is reset automatically."""

    mode: Literal["daily", "idle"] = "daily"
    at_hour: int = Field(default=4, ge=0, le=23, description="Local hour of the daily reset.")
    idle_minutes: Count | None = Field(
        default=None,
        description="Reset after this many idle minutes; mode `daily` resets every day as well.",
    )


class ResetByType(Section):
    """Automatic reset by type of chat."""

    direct: ResetConfig | None = None
    dm: ResetConfig | None = Field(default=None, description="Older name of `direct`.")
    group: ResetConfig | None = None
    thread: ResetConfig | None = None


class Retention(Section):
    """How long sessions are kept. Nothing is archived or deleted unless a number is set."""

    archive_after_days: Days | None = None
    delete_archived_after_days: Days | None = None


class Transcripts(Section):
    """Transcript files beside the store."""

    mirror: bool | None = Field(
        default=None,
        description="Mirror each session to a JSONL file. Default: true unless `store.url` or `bus.url` is set.",
    )


class AnnounceConfig(Section):
    """Language of the reports of sub-agents."""

    locale: Locale = "en"


class Compat(Section):
    """Field names for older clients."""

    provider_field: bool = Field(
        default=False, description="Accepted, but has no effect: session rows always have `provider`."
    )


SessionScope = Literal["per-sender", "global"]


class SessionConfig(Section):
    """How messages are assigned to sessions, and what sessions may do. Resets happen only if configured here."""

    scope: SessionScope = "per-sender"
    main_key: Text = "main"
    dm_scope: Literal["main", "per-peer", "per-channel-peer", "per-account-channel-peer"] = Field(
        default="main", description="Which direct chats share a session."
    )
    identity_links: dict[str, Strings] = Field(
        default_factory=dict[str, Strings], description="Name of a person → their `channel:peer` ids."
    )
    send_policy: SendPolicyConfig = Field(default_factory=SendPolicyConfig.model_construct)
    agent_to_agent: AgentToAgentTurns = Field(default_factory=AgentToAgentTurns.model_construct)
    thread_bindings: ThreadBindings = Field(default_factory=ThreadBindings.model_construct)
    reset: ResetConfig | None = None
    reset_by_type: ResetByType = Field(default_factory=ResetByType.model_construct)
    reset_by_channel: dict[str, ResetConfig] = Field(default_factory=dict[str, ResetConfig])
    idle_minutes: Count | None = Field(default=None, description="Older form of `reset: {mode: 'idle'}`.")
    reset_triggers: Strings = ("/new", "/reset")
    store: str | None = Field(
        default=None, description="Accepted, but has no effect; see the top-level `store`."
    )
    maintenance: dict[str, Any] | None = Field(
        default=None, description="Accepted, but has no effect; see `retention`."
    )
    retention: Retention = Field(default_factory=Retention.model_construct)
    transcripts: Transcripts = Field(default_factory=Transcripts.model_construct)
    announce: AnnounceConfig = Field(default_factory=AnnounceConfig.model_construct)
    compat: Compat = Field(default_factory=Compat.model_construct)


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
        description="As `mcp.servers`, where other programs have it.",
    )
    python: Annotated[tuple[PythonTarget, ...], Strict(False)] = Field(
        default=(),
        description="Python functions marked with `@antiphon.tool`: `./file.py:name` or `package.module:name`.",
    )


Api = Literal["openai-completions", "openai-responses", "anthropic-messages", "google-generative-ai"]


class ModelCost(Section):
    """US dollars per million tokens; a price that is left out is unknown, not free."""

    input: Quantity | None = None
    output: Quantity | None = None
    cache_read: Quantity | None = None
    cache_write: Quantity | None = None


class ModelConfig(Section):
    """One model of a provider."""

    id: Text
    name: str | None = None
    context_window: Count | None = None
    max_tokens: Count | None = None
    reasoning: bool = False
    input: Annotated[tuple[Literal["text", "image"], ...], Strict(False)] = ("text",)
    cost: ModelCost | None = None
    api: Api | None = Field(default=None, description="Default: the provider's.")


NATIVE_PROVIDER_APIS: dict[str, Api] = {"anthropic": "anthropic-messages", "google": "google-generative-ai"}
"""APIs of providers with these names; every other provider is assumed to speak OpenAI chat completions."""


class ProviderConfig(Section):
    """Address, credentials, API and models of a provider."""

    base_url: Annotated[str, Field(pattern=WEB_ADDRESS_PATTERN)] | None = Field(
        default=None, description="Required unless the provider is `openai`, `anthropic` or `google`."
    )
    api_key: Secret | None = None
    api: Api | None = Field(
        default=None,
        description="Default: the native API of `anthropic` and `google`, for other names openai-completions.",
    )
    headers: dict[str, Secret] = Field(default_factory=dict[str, Secret])
    models: Annotated[tuple[ModelConfig, ...], Strict(False)] = ()

    @field_serializer("base_url")
    def _hide_credentials(self, base_url: str | None) -> str | None:
        return base_url and mask_url(base_url)


PUBLIC_PROVIDER_KEY_VARIABLES = {
    "openai": "OPENAI_API_KEY",
    "anthropic": "ANTHROPIC_API_KEY",
    "google": "GEMINI_API_KEY",
}
"""Providers whose address is known, and the environment variable that usually holds their key."""


class ImpliedProvider(ProviderConfig):
    """A well-known provider that is used but not configured: see `Config.add_implied_providers`."""


class ModelsConfig(Section):
    """The model providers."""

    mode: Literal["merge", "replace"] = Field(default="merge", description="Accepted, but has no effect.")
    providers: dict[str, ProviderConfig] = Field(default_factory=dict[str, ProviderConfig])


class GatewayAuth(Section):
    """How clients authenticate. If no token is set, one is generated at the first start."""

    mode: Literal["token", "password", "none"] = "token"
    token: Secret | None = None
    password: Secret | None = None


class GatewayTools(Section):
    """Which tools may be invoked over HTTP."""

    allow: ToolNames = ()
    deny: ToolNames = ()


class HttpEndpoint(Section):
    """One HTTP endpoint that is off by default."""

    enabled: bool = False


class HttpEndpoints(Section):
    """The HTTP endpoints that are off by default."""

    chat_completions: HttpEndpoint = Field(default_factory=HttpEndpoint.model_construct)
    responses: HttpEndpoint = Field(default_factory=HttpEndpoint.model_construct)


class GatewayHttp(Section):
    """HTTP in addition to the WebSocket."""

    endpoints: HttpEndpoints = Field(default_factory=HttpEndpoints.model_construct)


class GatewayMcp(Section):
    """Sessions for MCP clients, at `/mcp`."""

    enabled: bool = True


class ControlUi(Section):
    """The web interface."""

    enabled: bool = True
    base_path: str = ""
    allowed_origins: Strings = ()


class GatewayConfig(Section):
    """Where the gateway listens, and how clients authenticate."""

    port: int = Field(default=18789, ge=0, le=65535, description="0 chooses a free port.")
    bind: Literal["loopback", "lan", "auto", "tailnet", "custom"] = Field(
        default="loopback", description="`tailnet` is accepted here, but `up` refuses it: use `custom`."
    )
    custom_bind_host: Text | None = Field(default=None, description="The address for `bind: 'custom'`.")
    auth: GatewayAuth = Field(default_factory=GatewayAuth.model_construct)
    tools: GatewayTools = Field(default_factory=GatewayTools.model_construct)
    http: GatewayHttp = Field(default_factory=GatewayHttp.model_construct)
    mcp: GatewayMcp = Field(default_factory=GatewayMcp.model_construct)
    control_ui: ControlUi = Field(default_factory=ControlUi.model_construct)


class HooksConfig(Section):
    """Runs started by webhooks."""

    enabled: bool = False
    token: Secret | None = None
    path: Annotated[str, Field(pattern=URL_PATH_PATTERN)] = "/hooks"
    default_session_key: Text | None = None
    allow_request_session_key: bool = False
    allowed_session_key_prefixes: Strings | None = Field(default=None, description="Default: any.")
    allowed_agent_ids: AgentPatterns | None = Field(default=None, description="Default: any.")


class CronConfig(Section):
    """Scheduled runs."""

    enabled: bool = True
    max_concurrent_runs: Count = 1


StoreSynchronous = Literal["full", "normal"]


class StoreConfig(Section):
    """Where sessions are stored, and size limits."""

    url: Secret | None = Field(
        default=None,
        description="`postgresql://user@host/database`. Default: SQLite in the state directory.",
    )
    password: Secret | None = Field(default=None, description="Password of the user in `url`.")
    tls_ca: Text | None = Field(
        default=None,
        description="File with the CA certificates for the database's certificate; TLS is then required.",
    )
    prepared_statements: bool = Field(
        default=True, description="Set to false behind a PgBouncer without support for prepared statements."
    )
    connections: Annotated[int, Field(ge=2, le=100)] = Field(
        default=12, description="Maximum database connections of one gateway."
    )
    synchronous: StoreSynchronous = Field(
        default="full", description="`normal` may lose the latest commits in a power failure."
    )
    message_max_bytes: int = Field(
        default=BYTES_PER_MIB,
        ge=1024,
        le=MAX_NUMBER,
        description="Maximum size of one message or one answer.",
    )
    lane_max_queued: Count = Field(default=1000, description="Maximum queued messages of one session.")


class BusConfig(Section):
    """The message bus between gateways that share a store."""

    url: Secret | None = Field(
        default=None,
        description="`nats://host:4222`, several separated by commas. Default: none, for a single gateway.",
    )
    user: str | None = None
    password: Secret | None = None
    token: Secret | None = None
    credentials: Text | None = Field(default=None, description="Path of a `.creds` file.")
    tls_ca: Text | None = Field(
        default=None,
        description="File with the CA certificates for the server's certificate; TLS is then required.",
    )
    namespace: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,32}$")] = Field(
        default="antiphon", description="Name of this installation, if several share the NATS servers."
    )
    replicas: Literal[1, 3, 5] = Field(
        default=1, description="Copies that JetStream keeps of the queue of lanes."
    )
    ack_wait_seconds: Annotated[float, Field(ge=1, le=300)] = Field(
        default=10, description="Seconds of silence after which other gateways take over a gateway's work."
    )
    lanes: Count = Field(default=256, description="Maximum sessions that one gateway works on at a time.")
    drain_seconds: Annotated[float, Field(ge=0, le=600)] = Field(
        default=5,
        description="Seconds for runs to finish when their gateway stops, before other gateways continue them.",
    )


def mask_values(value: object) -> object:
    """The shape of a value without its contents, since it is not known here which channel settings are secret."""
    if isinstance(value, dict):
        return {key: mask_values(item) for key, item in cast("dict[str, object]", value).items()}
    if isinstance(value, list):
        return [mask_values(item) for item in cast("list[object]", value)]
    return value if value is None or isinstance(value, bool) else SECRET_MASK
