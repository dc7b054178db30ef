"""Keys of related gateways for features that Antiphon does not have.

A config written for one of them loads here with a warning per key instead of an error. The table lists only keys
that exist in those gateways, so a misspelt key is still an error; it does not describe their meaning.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

_SANDBOX_KEYS = "backend browser docker perSession prune scope ssh workspaceAccess workspaceRoot"
_TOOL_KEYS = (
    "alsoAllow byProvider codeMode elevated exec fs loopDetection message profile sandbox swarm toolsBySender"
)
_ENDPOINT_KEYS = "files images maxBodyBytes maxImageParts maxTotalImageBytes maxUrlParts"
_AGENT_KEYS = (
    "bootstrapMaxChars bootstrapTotalMaxChars contextInjection contextLimits contextTokens"
    " heartbeat humanDelay memorySearch models params reasoningDefault skills"
    " typingIntervalSeconds typingMode verboseDefault"
)

FOREIGN_KEYS: dict[str, frozenset[str]] = {
    place: frozenset(keys.split())
    for place, keys in {
        "": (
            "acp approvals audio auth bindings broadcast browser canvasHost cli commands"
            " crestodian diagnostics discovery env logging mcp media memory messages meta"
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
            " imageModel mediaMaxMb pdfMaxBytesMb pdfMaxPages pdfModel repoRoot skipBootstrap"
            " timeFormat userTimezone"
        ),
        "agents.defaults.compaction": (
            "customInstructions identifierInstructions identifierPolicy maxHistoryShare"
            " memoryFlush mode model postCompactionSections postIndexSync qualityGuard"
            " recentTurnsPreserve reserveTokensFloor timeoutSeconds"
        ),
        "agents.defaults.sandbox": _SANDBOX_KEYS,
        "agents.list.[]": f"{_AGENT_KEYS} agentDir description embeddedPi groupChat memory tts utilityModel",
        "agents.list.[].sandbox": _SANDBOX_KEYS,
        "agents.list.[].tools": _TOOL_KEYS,
        "tools": f"{_TOOL_KEYS} links media toolSearch web",
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
        "hooks": "gmail internal mappings maxBodyBytes presets transformsDir",
        "cron": "failureAlert failureDestination retry runLog sessionRetention store webhook webhookToken",
    }.items()
}


def drop_foreign_keys(raw: dict[str, Any]) -> list[tuple[str | int, ...]]:
    """Removes the table's keys from `raw` and returns their paths."""
    dropped: list[tuple[str | int, ...]] = []
    for place, keys in FOREIGN_KEYS.items():
        for path, node in find_nodes(raw, place.split(".") if place else [], ()):
            for key in sorted(keys & node.keys()):
                del node[key]
                dropped.append((*path, key))
    return dropped


def find_nodes(
    node: object, place: list[str], path: tuple[str | int, ...]
) -> Iterator[tuple[tuple[str | int, ...], dict[str, Any]]]:
    """Yields the objects at a path of the table: `*` matches every value of an object, `[]` every item of a list."""
    if not place:
        if isinstance(node, dict):
            yield path, cast("dict[str, Any]", node)
        return
    step, *rest = place
    for key, child in _list_children(node, step):
        yield from find_nodes(child, rest, (*path, key))


def _list_children(node: object, step: str) -> list[tuple[str | int, object]]:
    if isinstance(node, list):
        return list(enumerate(cast("list[object]", node))) if step == "[]" else []
    if not isinstance(node, dict):
        return []
    entries = cast("dict[str, object]", node)
    return [(key, child) for key, child in entries.items() if step in ("*", key)]
