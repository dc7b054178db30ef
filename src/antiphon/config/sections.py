"""The config sections other than agents, tools, MCP and ACP: types, defaults and JSON Schema descriptions.

Whether the values of different keys fit together is checked in `antiphon.config.validate`.
"""

from typing import Annotated, Any, Literal, cast

from pydantic import BeforeValidator, Field, Strict, field_serializer

from antiphon.config.addresses import mask_url
from antiphon.config.base import (
    BYTES_PER_MIB,
    MAX_NUMBER,
    URL_PATH_PATTERN,
    WEB_ADDRESS_PATTERN,
    AgentPatterns,
    Count,
    Days,
    Quantity,
    Section,
    Strings,
    Text,
)
from antiphon.config.compat import ToolNames
from antiphon.config.secrets import SECRET_MASK, Secret
from antiphon.messages import Locale
from antiphon.send_policy import SendDecision


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
