"""Compatibility with configs of related gateways: foreign keys and keys without effect.

A config written for one of those gateways loads here with a warning per key that does nothing. The tables list only
keys that exist there or in the schema, so a misspelt key is still an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, cast

from pydantic import AfterValidator, Strict

from antiphon.config.base import format_path
from antiphon.tool_selection import expand_tool_names

if TYPE_CHECKING:
    from antiphon.config.schema import Config

ToolNames = Annotated[tuple[str, ...], Strict(False), AfterValidator(expand_tool_names)]
"""A list of tool names in lower case, with aliases replaced and groups expanded."""


_SANDBOX_KEYS = "browser perSession ssh"
_DOCKER_KEYS = (
    "dangerouslyAllowContainerNamespaceJoin dangerouslyAllowExternalBindSources"
    " dangerouslyAllowReservedContainerTargets workspaceMountPropagation"
)
_TOOL_KEYS = "codeMode elevated message swarm toolsBySender"
_LOOP_KEYS = "detectors detectorCooldownMs postCompactionGuard repeatThreshold unknownToolThreshold"
_EXEC_KEYS = "approvalRunningNoticeMs commandHighlighting mode node reviewer safeBinProfiles strictInlineEval"
_SEARCH_SERVICE_KEYS = "exa firecrawl gemini grok kimi openaiCodex perplexity tavily"
_MCP_SERVER_KEYS = (
    "alwaysAllow autoApprove clientCert clientKey connectionTimeoutMs description icon oauth requestTimeoutMs sslVerify"
    " supportsParallelToolCalls"
)
_ENDPOINT_KEYS = "files images maxBodyBytes maxImageParts maxTotalImageBytes maxUrlParts"
_AGENT_KEYS = (
    "contextInjection contextLimits contextTokens"
    " heartbeat humanDelay memorySearch models params reasoningDefault skills"
    " typingIntervalSeconds typingMode verboseDefault"
)

FOREIGN_KEYS: dict[str, frozenset[str]] = {
    place: frozenset(keys.split())
    for place, keys in {
        "": (
            "approvals audio auth broadcast browser canvasHost cli commands"
            " crestodian diagnostics discovery env logging media memory meta"
            " nodeHost plugins proxy secrets skills talk ui update web wizard"
        ),
        "session": "groupScope heartbeatIdleMinutes parentForkMaxTokens typingIntervalSeconds typingMode",
        "session.threadBindings": "defaultSpawnContext",
        "agents": "ownership",
        "agents.defaults": (
            f"{_AGENT_KEYS} additionalSystemPrompt blockStreamingBreak blockStreamingChunk"
            " blockStreamingCoalesce blockStreamingDefault bootstrapPromptTruncationWarning"
            " cliBackends contextPruning elevatedDefault embeddedPi envelopeElapsed"
            " envelopeTimestamp envelopeTimezone imageGenerationModel imageMaxDimensionPx"
            " mediaMaxMb pdfMaxBytesMb pdfMaxPages pdfModel repoRoot skipBootstrap"
            " timeFormat userTimezone"
        ),
        "agents.defaults.compaction": (
            "customInstructions identifierInstructions identifierPolicy maxHistoryShare"
            " memoryFlush mode model postCompactionSections postIndexSync qualityGuard"
            " recentTurnsPreserve reserveTokensFloor timeoutSeconds"
        ),
        "agents.defaults.sandbox": _SANDBOX_KEYS,
        "agents.defaults.sandbox.docker": _DOCKER_KEYS,
        "agents.list.[]": f"{_AGENT_KEYS} agentDir description embeddedPi memory tts utilityModel",
        "agents.list.[].sandbox": _SANDBOX_KEYS,
        "agents.list.[].sandbox.docker": _DOCKER_KEYS,
        "agents.list.[].tools": f"{_TOOL_KEYS} fs",
        "tools": f"{_TOOL_KEYS} links media toolSearch",
        "tools.loopDetection": _LOOP_KEYS,
        "agents.list.[].tools.loopDetection": _LOOP_KEYS,
        "tools.subagents": "model",
        "tools.web.search": _SEARCH_SERVICE_KEYS,
        "tools.web.search.brave": "mode",
        "tools.exec": _EXEC_KEYS,
        "agents.list.[].tools.exec": _EXEC_KEYS,
        "tools.web.fetch": "cacheTtlMinutes firecrawl maxCharsCap provider readability",
        "acp": "backend dispatch fallbacks stream",
        "acp.runtime": "installCommand",
        "mcp": "allowed excluded serverCommand",
        "mcp.servers.*": _MCP_SERVER_KEYS,
        "mcpServers.*": _MCP_SERVER_KEYS,
        "tools.mcpServers.*": _MCP_SERVER_KEYS,
        "models": "bedrockDiscovery pricing proxy",
        "models.providers.*": "auth authHeader injectNumCtxForOpenAICompat request",
        "models.providers.*.models.[]": "compat headers params",
        "gateway": (
            "allowRealIpFallback channelHealthCheckMinutes channelMaxRestartsPerHour"
            " channelStaleEventThresholdMinutes handshakeTimeoutMs mode nodes push reload remote"
            " tailscale tls trustedProxies webchat"
        ),
        "gateway.auth": "allowTailscale rateLimit trustedProxy",
        "gateway.http": "securityHeaders",
        "gateway.http.endpoints.chatCompletions": _ENDPOINT_KEYS,
        "gateway.http.endpoints.responses": _ENDPOINT_KEYS,
        "gateway.controlUi": (
            "allowExternalEmbedUrls allowInsecureAuth dangerouslyAllowHostHeaderOriginFallback"
            " dangerouslyDisableDeviceAuth embedSandbox root"
        ),
        "messages": (
            "ackReaction ackReactionScope inbound messagePrefix queue removeAckAfterReply responsePrefix"
            " responseUsage statusReactions suppressToolErrors tts usageTemplate visibleReplies"
        ),
        "agents.list.[].groupChat": "historyLimit",
        "bindings.[]": "acp session",
        "hooks": "gmail internal mappings maxBodyBytes presets transformsDir",
        "cron": "failureAlert failureDestination retry runLog sessionRetention store webhook webhookToken",
    }.items()
}
"""Keys of features that Antiphon does not have, by the path of their section."""

FOREIGN_KEY_ADVICE: dict[str, str] = {
    "tools.elevated": "no sender leaves the sandbox. Use 'tools.exec.host' of an agent for commands on this machine.",
    "tools.codeMode": "models call tools directly. Remove it.",
    "tools.toolsBySender": "tools depend on the session, not on the sender. Give senders an agent of their own.",
    "loopDetection.repeatThreshold": "Use 'tools.loopDetection.warningThreshold'.",
    **dict.fromkeys(
        (f"loopDetection.{key}" for key in _LOOP_KEYS.split() if key != "repeatThreshold"),
        "every repeated call with the same result is counted. Use the thresholds of 'tools.loopDetection'.",
    ),
    "requestTimeoutMs": "the timeout of a call is in seconds. Use 'timeout'.",
    "connectionTimeoutMs": "a server has 30 seconds to start. Remove it.",
    **dict.fromkeys(
        ("alwaysAllow", "autoApprove"), "calls need no approval by default. Use 'ask' for those that do."
    ),
    "oauth": "logins have another key. Use 'auth' with type 'oauth', and run `antiphon mcp login`.",
    **dict.fromkeys(
        ("sslVerify", "clientCert", "clientKey"),
        "certificates are those of the system, and always verified. Use 'headers' or a login.",
    ),
    "supportsParallelToolCalls": "calls of a server run concurrently. Remove it.",
    "tools.message": "posting follows the send policy. Use 'session.sendPolicy' and 'tools.sessions'.",
    "tools.swarm": "sub-agents have limits of their own. Use 'agents.defaults.subagents'.",
    "tools.media": (
        "audio and video are not supported. For images use 'agents.defaults.imageModel' and the tool 'image'."
    ),
    "tools.links": "links are read only if the agent asks. Use the tool 'web_fetch'.",
    "tools.toolSearch": "every tool is in the prompt. Use 'tools.allow' and 'tools.deny' for fewer.",
    "tools.fs": "it is the same for all agents. Use 'workspace' of the agent.",
    "memorySearch": (
        "notes are searched by their words, without embeddings. Use 'MEMORY.md', 'memory/*.md' and 'memory_search'."
    ),
    "memory": "notes are files of the workspace. Use 'MEMORY.md', 'memory/*.md' and the tool 'memory_search'.",
    "skills": "every skill in 'skills/' of the agent's workspace is listed. Add or remove its directory.",
    "tools.subagents.model": "the model is a setting of agents. Use 'agents.defaults.subagents.model'.",
    "web.search.brave.mode": "results are titles, addresses and extracts. Remove it.",
    "web.fetch.cacheTtlMinutes": "pages are not kept. Remove it.",
    "web.fetch.firecrawl": "pages are fetched from this machine only. Remove it.",
    "web.fetch.maxCharsCap": "no call shows more than 50,000 characters. Use 'tools.web.fetch.maxChars' for fewer.",
    "web.fetch.provider": "pages are fetched from this machine only. Remove it.",
    "web.fetch.readability": "pages are always reduced to their text. Remove it.",
    **dict.fromkeys(
        (f"web.search.{name}" for name in _SEARCH_SERVICE_KEYS.split()),
        "this service is not supported. Use 'tools.web.search.searxng', or 'apiKey' for Brave Search.",
    ),
    "skipBootstrap": "no files are put into a workspace. Remove it.",
    "bootstrapPromptTruncationWarning": "a file that is cut always says so in the prompt. Remove it.",
    "exec.approvalRunningNoticeMs": "people see the output of a command while it runs. Remove it.",
    "exec.commandHighlighting": "requests for approval are plain text. Remove it.",
    "exec.mode": "the levels are separate. Use 'tools.exec.host', 'security' and 'ask'.",
    "exec.node": "commands run only on this machine. Use 'tools.exec.host'.",
    "exec.reviewer": "people decide, not a model. Use 'tools.exec.ask' and `antiphon approvals`.",
    "exec.safeBinProfiles": "the arguments of 'safeBins' follow one rule. Use 'tools.exec.allowlist' for others.",
    "exec.strictInlineEval": "inline code is never covered by 'allowlist'. Remove it.",
    "acp.backend": "programs are started directly. Set 'runtime.acp' of an agent.",
    "sandbox.browser": "agents have no browser. Use the tool 'web_fetch'.",
    "sandbox.perSession": "'sandbox.scope' replaces it. Use 'session', 'agent' or 'shared'.",
    "sandbox.ssh": "commands run on this machine. Use 'sandbox.backend' with 'bwrap'.",
    "docker.dangerouslyAllowContainerNamespaceJoin": "containers share no namespaces. Use 'network' with a name.",
    "docker.dangerouslyAllowExternalBindSources": "all but system directories can be bound. Remove it.",
    "docker.dangerouslyAllowReservedContainerTargets": "'/workspace', '/agent' and '/tmp' are taken. Remove it.",
    "docker.workspaceMountPropagation": "mounts below the workspace are not shown. Use 'sandbox.binds' for them.",
    "groupChat.historyLimit": "the limit is the same for all agents. Use 'historyLimit' of the channel.",
    "messages.queue": "messages of a session are answered one after the other. Remove it.",
    "messages.inbound": "each message is answered by itself. Remove it.",
    "approvals": "requests are shown to every approver. Use `antiphon approvals` and 'tools.approvals.timeoutSeconds'.",
}
"""Why foreign keys about tools have no effect and what to use instead, by how their paths end."""

_FALLBACKS_ADVICE = "a failed request is retried with the same model only. Set the model to use as 'primary'."
_DELEGATION_ADVICE = "the agent decides when to delegate. Describe your preference in its 'instructions'."
_PATCH_MODELS_ADVICE = "the tool does not depend on the model. Use 'tools.deny' of an agent."
_PATCH_PLACE_ADVICE = "patches always stay inside the workspace. Remove it."
_CONTROL_UI_ADVICE = (
    "this release serves no web interface. To use one from elsewhere, add its origin to"
    " 'gateway.controlUi.allowedOrigins'."
)

UNUSED_KEYS: dict[str, str] = {
    "session.store": "all sessions are in one store. Use '--state-dir' to move it.",
    "session.maintenance": "nothing is pruned automatically. Use 'session.retention'.",
    "session.resetTriggers": (
        "the triggers cannot be changed. Use `/new` or `/reset` in a chat, `antiphon sessions reset` or the method"
        " 'sessions.reset' to start a new conversation."
    ),
    "session.threadBindings": (
        "sessions are not bound to threads. Use `/new`, 'session.reset' and 'session.retention' to end conversations."
    ),
    "agents.defaults.model.fallbacks": _FALLBACKS_ADVICE,
    "agents.defaults.imageModel.fallbacks": _FALLBACKS_ADVICE,
    "agents.defaults.subagents.model.fallbacks": _FALLBACKS_ADVICE,
    "agents.defaults.subagents.delegationMode": _DELEGATION_ADVICE,
    "agents.list.[].model.fallbacks": _FALLBACKS_ADVICE,
    "agents.list.[].imageModel.fallbacks": _FALLBACKS_ADVICE,
    "agents.list.[].subagents.model.fallbacks": _FALLBACKS_ADVICE,
    "agents.list.[].subagents.delegationMode": _DELEGATION_ADVICE,
    "tools.exec.applyPatch.allowModels": _PATCH_MODELS_ADVICE,
    "tools.exec.applyPatch.workspaceOnly": _PATCH_PLACE_ADVICE,
    "agents.list.[].tools.exec.applyPatch.allowModels": _PATCH_MODELS_ADVICE,
    "agents.list.[].tools.exec.applyPatch.workspaceOnly": _PATCH_PLACE_ADVICE,
    "agents.list.[].identity.avatar": "clients do not show pictures. Use 'identity.emoji'.",
    "models.providers.*.models.[].reasoning": (
        "the capabilities of a model are derived from its name. Use an agent's 'thinkingDefault' to enable thinking."
    ),
    "agents.list.[].runtime.acp.backend": "programs are started directly. Remove it.",
    "gateway.controlUi.enabled": _CONTROL_UI_ADVICE,
    "gateway.controlUi.basePath": _CONTROL_UI_ADVICE,
}
"""Keys that are accepted but have no effect, with advice on what to do instead.

A test finds keys that nothing reads and that are missing here.
"""

_HARMLESS_VALUES: tuple[object, ...] = (None, False, "", [], {}, ["text"], "main", "none", ["/new", "/reset"])
"""Values that only ask for the existing behaviour."""

_HARMLESS_VALUES_BY_KEY: dict[str, tuple[object, ...]] = {"workspaceOnly": (None, True)}
"""The same, for keys where 'false' asks for something else."""


def drop_foreign_keys(raw: dict[str, Any]) -> list[str]:
    """Removes the table's keys from `raw` and returns a warning for each."""
    warnings: list[str] = []
    for place, keys in FOREIGN_KEYS.items():
        for path, node in _find_nodes(raw, place.split(".") if place else [], ()):
            for key in sorted(keys & node.keys()):
                del node[key]
                warnings.append(_describe_foreign_key(format_path((*path, key)), f"{place}.{key}"))
    return warnings


def _describe_foreign_key(shown_path: str, path: str) -> str:
    for suffix, advice in FOREIGN_KEY_ADVICE.items():
        if f".{path}".endswith(f".{suffix}"):
            return f"{shown_path!r} has no effect: {advice}"
    return f"{shown_path!r} belongs to a feature that Antiphon does not have; it is ignored."


def _find_nodes(
    node: object, place: list[str], path: tuple[str | int, ...]
) -> Iterator[tuple[tuple[str | int, ...], dict[str, Any]]]:
    """Yields the objects at a path of the table: `*` matches every value of an object, `[]` every item of a list."""
    if not place:
        if isinstance(node, dict):
            yield path, cast("dict[str, Any]", node)
        return
    step, *rest = place
    for key, child in _list_children(node, step):
        yield from _find_nodes(child, rest, (*path, key))


def _list_children(node: object, step: str) -> list[tuple[str | int, object]]:
    if isinstance(node, list):
        return list(enumerate(cast("list[object]", node))) if step == "[]" else []
    if not isinstance(node, dict):
        return []
    entries = cast("dict[str, object]", node)
    return [(key, child) for key, child in entries.items() if step in ("*", key)]


def find_unused_keys(config: Config) -> Iterator[str]:
    """Yields a warning for each key that is set and has no effect."""
    written = config.model_dump(mode="json", by_alias=True, exclude_unset=True)
    for place, advice in UNUSED_KEYS.items():
        parent, _, key = place.rpartition(".")
        for path, node in _find_nodes(written, parent.split("."), ()):
            if node.get(key) not in _HARMLESS_VALUES_BY_KEY.get(key, _HARMLESS_VALUES):
                yield f"{format_path((*path, key))!r} has no effect: {advice}"
