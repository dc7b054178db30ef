"""What a configuration of a related gateway says about tools and sandboxes has an effect here, or a warning why not.

The keys are those that such a gateway documents for this area, with values that differ from the defaults.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from antiphon.config import AgentConfig, Config, parse
from antiphon.tool_selection import ToolLevel, ToolScope

pytestmark = pytest.mark.requirement("T2", "T6")


@dataclass(frozen=True)
class Row:
    path: str
    value: object
    effect: Callable[[Config, AgentConfig], object] | None = None
    """What is read in place of the key; None if it has no effect but a warning with the reason."""
    meaning: object = ...
    """What is read, if it is not the value itself."""


def scope(agent: AgentConfig, place: str) -> ToolScope:
    selection = agent.tools.selection
    return selection.general if place.startswith("tools.") else selection.own


def list_level_rows(place: str, get_level: Callable[[AgentConfig], ToolLevel | None]) -> list[Row]:
    """The rows of an object with lists of tools."""

    def read(agent: AgentConfig, name: str) -> object:
        return getattr(get_level(agent), name)

    profile = Row(f"{place}.profile", "minimal", lambda _, agent: read(agent, "profile"))
    return [
        *([] if place.endswith(".tools") and place.count("tools") > 1 else [profile]),
        Row(f"{place}.allow", ["group:fs"], lambda _, agent: read(agent, "allow"), FILE_TOOLS),
        Row(f"{place}.alsoAllow", ["Cron"], lambda _, agent: read(agent, "also_allow"), ("cron",)),
        Row(f"{place}.deny", ["bash"], lambda _, agent: read(agent, "deny"), ("exec",)),
    ]


FILE_TOOLS = ("read", "write", "edit", "apply_patch")
COMMAND_KEYS = [
    Row("security", "allowlist", lambda _, agent: agent.exec.security),
    Row("ask", "always", lambda _, agent: agent.exec.ask),
    Row("backgroundMs", 5, lambda _, agent: agent.exec.background_ms),
    Row("timeoutSec", 5, lambda _, agent: agent.exec.timeout_seconds),
    Row("cleanupMs", 5, lambda _, agent: agent.exec.cleanup_ms),
    Row("notifyOnExit", False, lambda _, agent: agent.exec.notify_on_exit),
    Row("notifyOnExitEmptySuccess", False, lambda _, agent: agent.exec.notify_on_exit_empty_success),
    Row("pathPrepend", ["/opt/bin"], lambda _, agent: agent.exec.path_prepend, ("/opt/bin",)),
    Row("safeBins", ["sort"], lambda _, agent: agent.exec.safe_bins, ("sort",)),
    Row("safeBinTrustedDirs", ["/opt"], lambda _, agent: agent.exec.safe_bin_trusted_dirs, ("/opt",)),
    Row("safeBinProfiles", {"jq": {}}),
    Row("host", "node"),
    Row("node", "kitchen"),
    Row("strictInlineEval", True),
    Row("approvalRunningNoticeMs", 5),
    Row("applyPatch.workspaceOnly", False),
    Row("applyPatch.allowModels", ["openai/gpt-5"]),
]
SANDBOX_KEYS = [
    Row("mode", "all", lambda _, agent: agent.sandbox.mode),
    Row("scope", "session", lambda _, agent: agent.sandbox.scope),
    Row("workspaceAccess", "ro", lambda _, agent: agent.sandbox.workspace_access),
    Row("workspaceRoot", "/srv/boxes", lambda _, agent: agent.sandbox.workspace_root),
    Row("sessionToolsVisibility", "all", lambda _, agent: agent.sandbox.session_tools_visibility),
    Row("prune.idleHours", 1, lambda _, agent: agent.sandbox.prune.idle_hours),
    Row("prune.maxAgeDays", 1, lambda _, agent: agent.sandbox.prune.max_age_days),
    Row("browser", {"enabled": True}),
    Row("perSession", True),
    Row("ssh", {"target": "user@host"}),
]
LOOP_KEYS = [
    Row("enabled", True, lambda _, agent: agent.loop_detection is not None),
    Row("historySize", 40, lambda _, agent: agent.loop_detection and agent.loop_detection.history_size),
    Row("historySize", 20),
    Row("warningThreshold", 5, lambda _, a: a.loop_detection and a.loop_detection.warning_threshold),
    Row("criticalThreshold", 15, lambda _, a: a.loop_detection and a.loop_detection.critical_threshold),
    Row(
        "globalCircuitBreakerThreshold",
        25,
        lambda _, agent: agent.loop_detection and agent.loop_detection.global_circuit_breaker_threshold,
    ),
    Row("detectors", {"genericRepeat": True}),
]
FETCH_KEYS = [
    Row("enabled", False, lambda config, _: config.tools.web.fetch.enabled),
    Row("timeoutSeconds", 5, lambda config, _: config.tools.web.fetch.timeout_seconds),
    Row("maxChars", 500, lambda config, _: config.tools.web.fetch.max_chars),
    Row("maxResponseBytes", 500, lambda config, _: config.tools.web.fetch.max_response_bytes),
    Row("maxRedirects", 1, lambda config, _: config.tools.web.fetch.max_redirects),
    Row("userAgent", "browser", lambda config, _: config.tools.web.fetch.user_agent),
    Row("cacheTtlMinutes", 5),
    Row("maxCharsCap", 500),
    Row("readability", False),
    Row("firecrawl", {"enabled": True}),
]
SEARCH_KEYS = [
    Row("enabled", False, lambda config, _: config.tools.web.search.enabled),
    Row("provider", "brave", lambda config, _: config.tools.web.search.provider),
    *(Row("provider", name) for name in ("perplexity", "grok", "gemini", "kimi")),
    Row("apiKey", "key", lambda config, _: config.tools.web.search.api_key is not None, meaning=True),
    Row("maxResults", 3, lambda config, _: config.tools.web.search.max_results),
    Row("timeoutSeconds", 3, lambda config, _: config.tools.web.search.timeout_seconds),
    Row("cacheTtlMinutes", 3, lambda config, _: config.tools.web.search.cache_ttl_minutes),
    Row("perplexity", {"apiKey": "key"}),
]
AGENT = "agents.list.[]"


def put_below(place: str, rows: list[Row]) -> list[Row]:
    return [replace(row, path=f"{place}.{row.path}") for row in rows]


ROWS = [
    *list_level_rows("tools", lambda agent: scope(agent, "tools.").level),
    *list_level_rows(f"{AGENT}.tools", lambda agent: scope(agent, AGENT).level),
    *list_level_rows(
        "tools.byProvider.openai", lambda agent: dict(scope(agent, "tools.").by_provider)["openai"]
    ),
    *list_level_rows(
        f"{AGENT}.tools.byProvider.openai", lambda agent: dict(scope(agent, AGENT).by_provider)["openai"]
    ),
    *list_level_rows("tools.sandbox.tools", lambda agent: scope(agent, "tools.").sandbox),
    *list_level_rows(f"{AGENT}.tools.sandbox.tools", lambda agent: scope(agent, AGENT).sandbox),
    *list_level_rows("tools.subagents.tools", lambda agent: scope(agent, "tools.").subagents),
    *put_below("tools.exec", COMMAND_KEYS),
    *put_below(f"{AGENT}.tools.exec", COMMAND_KEYS),
    *put_below("agents.defaults.sandbox", SANDBOX_KEYS),
    *put_below(f"{AGENT}.sandbox", SANDBOX_KEYS),
    *put_below("tools.loopDetection", LOOP_KEYS),
    *put_below(f"{AGENT}.tools.loopDetection", LOOP_KEYS),
    *put_below("tools.web.fetch", FETCH_KEYS),
    *put_below("tools.web.search", SEARCH_KEYS),
    Row("tools.subagents.model", "openai/gpt-5-mini"),
    Row("tools.web.search.brave.mode", "llm-context"),
    Row("tools.fs.workspaceOnly", False),
    Row(f"{AGENT}.tools.fs.workspaceOnly", False),
    Row("tools.elevated.enabled", True),
    Row("tools.elevated.allowFrom", {"discord": ["1"]}),
    Row(f"{AGENT}.tools.elevated.enabled", True),
    Row("approvals.exec.enabled", True),
    Row("approvals.exec.mode", "both"),
    Row("approvals.exec.agentFilter", ["main"]),
    Row("approvals.exec.sessionFilter", ["discord"]),
    Row("approvals.exec.targets", [{"channel": "discord", "to": "1"}]),
    Row("agents.defaults.workspace", "/srv/work", lambda _, agent: agent.workspace),
    Row(f"{AGENT}.workspace", "/srv/work", lambda _, agent: agent.workspace),
    Row("agents.defaults.bootstrapMaxChars", 500, lambda _, agent: agent.bootstrap_max_chars),
    Row("agents.defaults.bootstrapTotalMaxChars", 500, lambda _, agent: agent.bootstrap_total_max_chars),
    Row("agents.defaults.skipBootstrap", True),
]


def build_document(path: str, value: object) -> Any:
    step, _, rest = path.partition(".")
    inner: Any = build_document(rest, value) if rest else value
    return [{"id": "main", **inner}] if step == "[]" else {step: inner}


def list_names(path: str) -> list[str]:
    """Return how a warning may name a key: by its path, or by a section that has no effect as a whole."""
    steps = path.replace(".[]", "[0]").split(".")
    paths = [".".join(steps[:count]) for count in range(1, len(steps) + 1)]
    return [f"'{name}'" for name in (*paths, paths[-1].removeprefix("agents.list[0]."))]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.path}={row.value}")
def test_a_key_has_an_effect_or_a_warning_with_the_reason(row: Row) -> None:
    document = build_document(row.path, row.value)
    if "loopDetection" in row.path:
        document.setdefault("tools", {}).setdefault("loopDetection", {}).setdefault("enabled", True)
    config, warnings = parse(document)
    if row.effect is None:
        told = [text for text in warnings if any(name in text for name in list_names(row.path))]
        assert told, warnings
        assert not any("belongs to a feature" in text for text in told), "a reason is missing"
        return
    meaning = row.value if row.meaning is ... else row.meaning
    assert row.effect(config, config.get_agent("main")) == meaning
    default = parse({"tools": {"byProvider": {"openai": {}}}, "agents": {"list": [{"id": "main"}]}})[0]
    if "byProvider" not in row.path:
        assert row.effect(default, default.get_agent("main")) != meaning, "the value is the default"


def test_a_patch_tool_that_is_off_is_not_offered() -> None:
    for place in ("tools", f"{AGENT}.tools"):
        config, _ = parse(build_document(f"{place}.exec.applyPatch.enabled", False))
        assert "apply_patch" in scope(config.get_agent("main"), f"{place}.").level.deny
