"""The agents of the config: defaults, entries, and the merged view that the rest of the system reads.

`AgentDefaults` and `AgentEntry` mirror the file; `AgentConfig` is the result of merging both.
"""

from typing import Annotated, Any, Literal, TypeVar, cast

import msgspec
from pydantic import BeforeValidator, Field, Strict

from antiphon.access import Control, Visibility
from antiphon.config.acp import AcpProgramConfig
from antiphon.config.base import (
    CALLABLE_TARGET_PATTERN,
    AgentId,
    AgentPatterns,
    Amount,
    ConfiguredThinkingLevel,
    Count,
    Section,
    Strings,
    Text,
    build_expected_error,
)
from antiphon.config.channels import MentionPatterns
from antiphon.config.compat import ToolNames
from antiphon.config.sandbox import EntrySandbox, SandboxConfig, merge_sandbox
from antiphon.config.tools import (
    MIN_LOOP_COUNT,
    ExecConfig,
    LoopDetectionConfig,
    ProviderToolLists,
    SandboxToolLists,
    ToolLists,
    ToolsByProvider,
    ToolsConfig,
)
from antiphon.tool_selection import ToolLevel, ToolProfile, ToolScope, ToolSelection

IMPLICIT_AGENT_ID = "main"
"""The agent that exists when the config lists none."""


class ModelChoice(Section):
    """A model as `provider/model`. `fallbacks` is accepted, but has no effect."""

    primary: Text
    fallbacks: Strings = ()


def _normalize_model_choice(value: object) -> object:
    if isinstance(value, str):
        return {"primary": value}
    if not isinstance(value, dict | ModelChoice):
        raise build_expected_error(
            "text such as 'provider/model', or an object with 'primary' and 'fallbacks'"
        )
    return cast("object", value)


Choice = Annotated[ModelChoice, BeforeValidator(_normalize_model_choice, Text | ModelChoice)]


class CompactionConfig(Section):
    """When a long conversation is summarized."""

    reserve_tokens: Amount = Field(default=16384, description="Tokens kept free for the answer.")
    keep_recent_tokens: Amount = Field(
        default=20000,
        description="Maximum tokens of recent messages kept verbatim; never more than a quarter of the conversation.",
    )


class SubagentsConfig(Section):
    """Limits and defaults for sub-agents."""

    max_concurrent: Count = 8
    max_spawn_depth: int = Field(default=1, ge=1, le=5, description="1 = sub-agents may not spawn.")
    max_children_per_agent: int = Field(
        default=200,
        ge=1,
        le=1000,
        description="Maximum active sub-agents of one session; further ones are refused, not queued.",
    )
    archive_after_minutes: Amount = Field(default=60, description="0 = never.")
    run_timeout_seconds: Amount = Field(default=0, description="0 = none.")
    announce_timeout_ms: Count = 90_000
    model: Choice | None = None
    thinking: ConfiguredThinkingLevel | None = None
    allow_agents: AgentPatterns | None = Field(default=None, description="Default: only the agent itself.")
    require_agent_id: bool = False
    delegation_mode: Literal["suggest", "prefer"] | None = None


class EntrySubagents(Section):
    """One agent's overrides of `agents.defaults.subagents`."""

    allow_agents: AgentPatterns | None = None
    model: Choice | None = None
    thinking: ConfiguredThinkingLevel | None = None
    require_agent_id: bool | None = None
    delegation_mode: Literal["suggest", "prefer"] | None = None


class EntrySessionTools(Section):
    """One agent's overrides of `tools.sessions`."""

    visibility: Visibility | None = None
    send: Visibility | None = None
    control: Control | None = None


class EntryTools(Section):
    """Tools of one agent, within what the top-level `tools` permits."""

    sessions: EntrySessionTools = Field(default_factory=EntrySessionTools.model_construct)
    exec: ExecConfig = Field(default_factory=ExecConfig.model_construct)
    loop_detection: LoopDetectionConfig = Field(default_factory=LoopDetectionConfig.model_construct)
    profile: ToolProfile | None = Field(default=None, description="Instead of `tools.profile`.")
    allow: ToolNames | None = None
    also_allow: ToolNames = Field(default=(), description="Added to the profile and to the agent's `allow`.")
    deny: ToolNames = ()
    by_provider: ToolsByProvider = Field(default_factory=dict[str, ProviderToolLists])
    sandbox: SandboxToolLists = Field(default_factory=SandboxToolLists.model_construct)


class IdentityConfig(Section):
    """How an agent presents itself."""

    name: str | None = None
    theme: str | None = None
    emoji: str | None = None
    avatar: str | None = None


def _normalize_runtime_type(value: object) -> object:
    return "model" if value == "embedded" else value


RuntimeType = Annotated[
    Literal["model", "function", "acp"],
    BeforeValidator(_normalize_runtime_type, Literal["model", "function", "acp", "embedded"]),
]


class RuntimeConfig(Section):
    """What answers for an agent: a model (`embedded` is its older name), a Python callable or an ACP program."""

    type: RuntimeType = "model"
    target: Annotated[str, Field(pattern=CALLABLE_TARGET_PATTERN)] | None = Field(
        default=None, description="`package.module:callable`, for a function."
    )
    history: bool = Field(
        default=True, description="Whether a function receives the earlier messages of the session."
    )
    acp: AcpProgramConfig | None = Field(default=None, description="The program, for `acp`.")


class AgentDefaults(Section):
    """Defaults for all agents."""

    model: Choice | None = None
    image_model: Choice | None = Field(
        default=None, description="The model that looks at images for the tool `image`."
    )
    instructions: str | None = Field(default=None, description="The system prompt.")
    workspace: Text | None = None
    timeout_seconds: Count = Field(default=172_800, description="Maximum duration of a run.")
    max_concurrent: Count = Field(
        default=256, description="Maximum concurrent model steps in one process, per provider."
    )
    max_steps: Count = Field(default=100, description="Maximum model steps in one run.")
    thinking_default: ConfiguredThinkingLevel | None = None
    compaction: CompactionConfig = Field(default_factory=CompactionConfig.model_construct)
    subagents: SubagentsConfig = Field(default_factory=SubagentsConfig.model_construct)
    sandbox: SandboxConfig = Field(default_factory=SandboxConfig.model_construct)
    bootstrap_max_chars: Count = Field(
        default=20_000, description="Characters of each workspace file (AGENTS.md, …) in the system prompt."
    )
    bootstrap_total_max_chars: Count = Field(
        default=150_000, description="Characters of all these files together."
    )


class AgentGroupChatConfig(Section):
    """When a message in a group addresses this agent."""

    mention_patterns: MentionPatterns | None = Field(
        default=None, description="Instead of `messages.groupChat.mentionPatterns`."
    )


class AgentEntry(Section):
    """One agent."""

    id: AgentId
    default: bool = False
    name: str | None = None
    instructions: str | None = Field(default=None, description="The system prompt.")
    model: Choice | None = None
    image_model: Choice | None = Field(default=None, description="Instead of `agents.defaults.imageModel`.")
    workspace: Text | None = None
    identity: IdentityConfig | None = None
    thinking_default: ConfiguredThinkingLevel | None = None
    runtime: RuntimeConfig = Field(default_factory=RuntimeConfig.model_construct)
    subagents: EntrySubagents = Field(default_factory=EntrySubagents.model_construct)
    tools: EntryTools = Field(default_factory=EntryTools.model_construct)
    sandbox: EntrySandbox = Field(default_factory=EntrySandbox.model_construct)
    group_chat: AgentGroupChatConfig = Field(default_factory=AgentGroupChatConfig.model_construct)
    bootstrap_max_chars: Count | None = None
    bootstrap_total_max_chars: Count | None = None


class AgentsConfig(Section):
    """The agents of this gateway. If none is listed, there is one agent, `main`."""

    defaults: AgentDefaults = Field(default_factory=AgentDefaults.model_construct)
    list: Annotated[tuple[AgentEntry, ...], Strict(False)] = ()


class ToolRules(msgspec.Struct, frozen=True, kw_only=True):
    """The tools of an agent and the reach of its session tools, with all levels merged."""

    visibility: Visibility
    send: Visibility
    lifted_visibility: Visibility
    """Visibility in a sandbox with `sessionToolsVisibility: "all"`: everything, unless `visibility` is set."""
    lifted_send: Visibility
    control: Control
    selection: ToolSelection


DEFAULT_BACKGROUND_MS = 10_000
DEFAULT_COMMAND_TIMEOUT_SECONDS = 1800
DEFAULT_CLEANUP_MS = 1_800_000


class ExecSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How an agent's commands run, with all levels merged and the defaults of the host filled in."""

    host: Literal["sandbox", "gateway", "node"]
    security: Literal["deny", "allowlist", "full"]
    ask: Literal["off", "on-miss", "always"]
    allowlist: tuple[str, ...]
    safe_bins: tuple[str, ...] | None
    safe_bin_trusted_dirs: tuple[str, ...] | None
    background_ms: int
    timeout_seconds: int
    cleanup_ms: int
    notify_on_exit: bool
    notify_on_exit_empty_success: bool
    path_prepend: tuple[str, ...]


class LoopDetectionSettings(msgspec.Struct, frozen=True, kw_only=True):
    """When a run that repeats a tool call is warned, refused the call, and ended."""

    history_size: int = 30
    warning_threshold: int = 10
    critical_threshold: int = 20
    global_circuit_breaker_threshold: int = 30


class AgentConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One agent with the defaults filled in."""

    id: str
    name: str | None
    instructions: str | None
    model: ModelChoice | None
    image_model: ModelChoice | None
    workspace: str | None
    identity: IdentityConfig | None
    thinking_default: ConfiguredThinkingLevel | None
    runtime: RuntimeConfig
    timeout_seconds: int
    max_concurrent: int
    max_steps: int
    compaction: CompactionConfig
    subagents: SubagentsConfig
    sandbox: SandboxConfig
    tools: ToolRules
    exec: ExecSettings
    loop_detection: LoopDetectionSettings | None
    bootstrap_max_chars: int
    bootstrap_total_max_chars: int


def merge_agent(entry: AgentEntry, path: str, defaults: AgentDefaults, tools: ToolsConfig) -> AgentConfig:
    """The agent with the defaults filled in, ready to run. `path` is where its entry is in the file."""
    return AgentConfig(
        id=entry.id,
        name=entry.name or (entry.identity and entry.identity.name),
        instructions=entry.instructions if entry.instructions is not None else defaults.instructions,
        model=entry.model or defaults.model,
        image_model=entry.image_model or defaults.image_model,
        workspace=entry.workspace or defaults.workspace,
        identity=entry.identity,
        thinking_default=entry.thinking_default or defaults.thinking_default,
        runtime=entry.runtime,
        timeout_seconds=defaults.timeout_seconds,
        max_concurrent=defaults.max_concurrent,
        max_steps=defaults.max_steps,
        compaction=defaults.compaction,
        subagents=_apply_overrides(defaults.subagents, entry.subagents),
        sandbox=merge_sandbox(defaults.sandbox, entry.sandbox),
        tools=_merge_tool_rules(entry.tools, f"{path}.tools", tools),
        exec=merge_exec_settings(entry.tools.exec, tools.exec),
        loop_detection=merge_loop_detection(entry.tools.loop_detection, tools.loop_detection),
        bootstrap_max_chars=entry.bootstrap_max_chars or defaults.bootstrap_max_chars,
        bootstrap_total_max_chars=entry.bootstrap_total_max_chars or defaults.bootstrap_total_max_chars,
    )


def merge_exec_settings(own: ExecConfig, general: ExecConfig) -> ExecSettings:
    """Return the settings for commands; an agent's own keys win."""
    merged = _apply_overrides(general, own)
    host = merged.host or "sandbox"
    return ExecSettings(
        host=host,
        security=merged.security or ("full" if host == "sandbox" else "deny"),
        ask=merged.ask or ("off" if host == "sandbox" else "on-miss"),
        allowlist=merged.allowlist or (),
        safe_bins=merged.safe_bins,
        safe_bin_trusted_dirs=merged.safe_bin_trusted_dirs,
        background_ms=DEFAULT_BACKGROUND_MS if merged.background_ms is None else merged.background_ms,
        timeout_seconds=merged.timeout_sec or DEFAULT_COMMAND_TIMEOUT_SECONDS,
        cleanup_ms=DEFAULT_CLEANUP_MS if merged.cleanup_ms is None else merged.cleanup_ms,
        notify_on_exit=merged.notify_on_exit is not False,
        notify_on_exit_empty_success=merged.notify_on_exit_empty_success is not False,
        path_prepend=merged.path_prepend or (),
    )


def merge_loop_detection(
    own: LoopDetectionConfig, general: LoopDetectionConfig
) -> LoopDetectionSettings | None:
    """Return the limits of an agent, or None if its calls are not counted; its own keys win.

    A threshold that is not set gives way to those that are, and the history has room for the circuit breaker.
    """
    merged = _apply_overrides(general, own)
    if not merged.enabled:
        return None
    defaults, least = LoopDetectionSettings(), MIN_LOOP_COUNT
    warning, critical = merged.warning_threshold, merged.critical_threshold
    breaker = merged.global_circuit_breaker_threshold or max(
        defaults.global_circuit_breaker_threshold, (critical or 0) + 1, (warning or 0) + 2
    )
    critical = critical or max(min(defaults.critical_threshold, breaker - 1), (warning or 0) + 1, least)
    return LoopDetectionSettings(
        history_size=max(merged.history_size or defaults.history_size, breaker),
        warning_threshold=warning or max(min(defaults.warning_threshold, critical - 1), least),
        critical_threshold=critical,
        global_circuit_breaker_threshold=breaker,
    )


_S = TypeVar("_S", bound=Section)


def _apply_overrides(base: _S, override: Section) -> _S:
    overrides: dict[str, Any] = {name: value for name, value in override if value is not None}
    return base.model_copy(update=overrides)


def _merge_tool_rules(own: EntryTools, path: str, general: ToolsConfig) -> ToolRules:
    # The most specific level that is set decides, so that an agent that narrows its visibility also narrows its
    # sends, even if the general section grants more.
    near, far = own.sessions, general.sessions
    stated = near.visibility or (far.visibility if "visibility" in far.model_fields_set else None)
    return ToolRules(
        lifted_visibility=stated or "all",
        lifted_send=near.send or near.visibility or far.send or stated or "all",
        visibility=near.visibility or far.visibility,
        send=near.send or near.visibility or far.send or far.visibility,
        control=near.control
        or _derive_control(near.visibility)
        or far.control
        or _derive_control(far.visibility)
        or "tree",
        selection=ToolSelection(
            general=_build_tool_scope("tools", general), own=_build_tool_scope(path, own)
        ),
    )


def _build_tool_scope(path: str, tools: ToolsConfig | EntryTools) -> ToolScope:
    by_provider = {
        name: _build_tool_level(f'{path}.byProvider["{name}"]', lists, lists.profile)
        for name, lists in tools.by_provider.items()
    }
    below = tools.subagents.tools if isinstance(tools, ToolsConfig) else None
    return ToolScope(
        level=_build_tool_level(path, tools, tools.profile),
        by_provider=by_provider,
        sandbox=_build_tool_level(f"{path}.sandbox.tools", tools.sandbox.tools),
        subagents=None if below is None else _build_tool_level(f"{path}.subagents.tools", below),
    )


def _build_tool_level(
    path: str, lists: ToolLists | ToolsConfig | EntryTools, profile: ToolProfile | None = None
) -> ToolLevel:
    patch = None if isinstance(lists, ToolLists) else lists.exec.apply_patch
    denied_patch = ("apply_patch",) if patch is not None and patch.enabled is False else ()
    return ToolLevel(
        path=path,
        profile=profile,
        allow=lists.allow,
        also_allow=lists.also_allow,
        deny=(*lists.deny, *denied_patch),
    )


def _derive_control(visibility: Visibility | None) -> Control | None:
    """The control scope implied by a visibility: an agent can stop and steer at most its own tree."""
    return "self" if visibility == "self" else "tree" if visibility else None
