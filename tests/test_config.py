"""The config: what loads, what is refused and in which words, and that no secret is ever shown."""

from __future__ import annotations

import copy
import json
import os
import re
import select
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast, get_args, get_origin
from unittest.mock import Mock

import pyjson5
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import antiphon
from antiphon.clock import SystemClock
from antiphon.config import (
    REHEARSAL_MODEL_REF,
    Config,
    LoadedConfig,
    Secret,
    build_json_schema,
    list_secrets,
    load,
    locate_paths,
    parse,
    secrets,
)
from antiphon.config.base import Section
from antiphon.config.compat import FOREIGN_KEY_ADVICE, FOREIGN_KEYS, UNUSED_KEYS
from antiphon.config_file import find_duplicate_keys
from antiphon.errors import ConfigError, NotFound, UnknownModel
from antiphon.runtimes.registry import RuntimeRegistry
from antiphon.tool_selection import SESSION_TOOL_NAMES, TOOL_GROUPS
from antiphon.tools import (
    create_chat_tools,
    create_file_tools,
    create_memory_tools,
    create_session_tools,
    create_web_tools,
)
from support.privileges import drop_privileges

pytestmark = pytest.mark.requirement("C")

SEND_POLICY = """
{
  "session": {
    "sendPolicy": {
      "rules": [
        {
          "match": { "channel": "discord", "chatType": "group" },
          "action": "deny"
        }
      ],
      "default": "allow"
    }
  }
}
"""

SANDBOX = """
{
  agents: {
    defaults: {
      sandbox: {
        // default: "spawned"
        sessionToolsVisibility: "spawned" // or "all"
      }
    }
  }
}
"""

CONTRACT = """
{ models: { providers: { local: { baseUrl: "http://127.0.0.1:9999/v1", apiKey: "x", api: "openai-completions",
                                  models: [{ id: "m1" }] } } },
  agents: { defaults: { model: { primary: "local/m1" } }, list: [{ id: "main", default: true }, { id: "helper" }] },
  tools: { sessions: { visibility: "all" }, agentToAgent: { enabled: true } },
  gateway: { port: 18789, auth: { token: "…" } } }
"""

FULL = """
{
  $schema: "./schema.json",
  session: {
    scope: "per-sender", mainKey: "main", dmScope: "per-channel-peer",
    identityLinks: { ann: ["telegram:1", "discord:2"] },
    sendPolicy: { rules: [{ action: "allow", match: { keyPrefix: "cron:", rawKeyPrefix: "agent:a:" } },
                          { action: "deny" }] },
    agentToAgent: { maxPingPongTurns: 0, maxHops: 3 },
    threadBindings: { enabled: true, idleHours: 24, maxAgeHours: 0.5, spawnSessions: false },
    reset: { mode: "daily", atHour: 4, idleMinutes: 60 },
    resetByType: { direct: { mode: "idle", idleMinutes: 5 }, dm: {}, group: {}, thread: {} },
    resetByChannel: { discord: { mode: "idle", idleMinutes: 5 } },
    idleMinutes: 60, resetTriggers: ["/new"],
    store: "~/s/{agentId}.json", maintenance: { mode: "warn", pruneAfter: "30d", maxEntries: 500 },
    retention: { archiveAfterDays: 30, deleteArchivedAfterDays: null },
    transcripts: { mirror: true }, announce: { locale: "pt" }, compat: { providerField: true },
  },
  agents: {
    defaults: {
      model: "p/one", instructions: "Be brief.", workspace: "~/w", timeoutSeconds: 60, maxConcurrent: 2, maxSteps: 9,
      thinkingDefault: "low", compaction: { reserveTokens: 1, keepRecentTokens: 2 },
      subagents: { maxConcurrent: 8, maxSpawnDepth: 2, maxChildrenPerAgent: 20, archiveAfterMinutes: 0,
                   runTimeoutSeconds: 5, announceTimeoutMs: 90000,
                   model: "p/two", thinking: "off", allowAgents: ["B"], requireAgentId: true,
                   delegationMode: "prefer" },
      sandbox: { mode: "non-main", sessionToolsVisibility: "all" },
    },
    list: [
      { id: "Ann", default: true, name: "Ann", instructions: "", model: { primary: "p/two", fallbacks: ["p/one"] },
        workspace: "/w", identity: { name: "A", emoji: "🦉", theme: "owl", avatar: "a.png" }, thinkingDefault: "high",
        subagents: { allowAgents: ["*"], model: "p/one", thinking: "max" },
        tools: { sessions: { visibility: "self", send: "agent", control: "tree" }, allow: ["x"], deny: ["y"] },
        sandbox: { mode: "all" } },
      { id: "b", runtime: { type: "function", target: "pkg.mod:answer" } },
      { id: "c", runtime: { type: "embedded" } },
    ],
  },
  tools: {
    sessions: { visibility: "agent", send: "all" }, agentToAgent: { enabled: true, allow: ["Ann", "b*"] },
    subagents: { tools: { allow: ["a"], alsoAllow: ["b"], deny: ["c"] } },
    sessions_spawn: { attachments: { enabled: false, maxFiles: 1, maxFileBytes: 2, maxTotalBytes: 3,
                                     retainOnSessionKeep: true } },
    allow: ["group:sessions"], deny: ["z"],
  },
  models: {
    mode: "merge",
    providers: {
      p: { baseUrl: "https://example.org/v1", apiKey: { env: "ANTIPHON_TEST_KEY" }, api: "anthropic-messages",
           headers: { "x-team": "blue", "x-key": { file: "key" } },
           models: [{ id: "one", name: "One", contextWindow: 1000, maxTokens: 10, reasoning: true,
                      input: ["text", "image"],
                      cost: { input: 3, output: 15.5, cacheRead: 0, cacheWrite: 0 }, api: "openai-responses" },
                    { id: "two" }, { id: "org/three" }] },
    },
  },
  channels: { telegram: { botToken: "t", allowFrom: [1] }, discord: { token: "t" } },
  gateway: {
    port: 0, bind: "custom", customBindHost: "10.0.0.1",
    auth: { mode: "password", token: { exec: ["pass", "show", "x"] }, password: "${GATEWAY_PASSWORD}" },
    tools: { allow: ["sessions_send"], deny: ["cron"] },
    http: { endpoints: { chatCompletions: { enabled: true }, responses: { enabled: true } } },
    controlUi: { enabled: false, basePath: "/ui", allowedOrigins: ["https://a"] },
  },
  hooks: { enabled: true, token: "h", path: "/h", defaultSessionKey: "hook:x", allowRequestSessionKey: true,
           allowedSessionKeyPrefixes: ["hook:"], allowedAgentIds: ["b"] },
  cron: { enabled: false, maxConcurrentRuns: 2 },
  store: { url: "postgresql://u:pw@db/x", synchronous: "normal", messageMaxBytes: 2048, laneMaxQueued: 5 },
  bus: { url: "nats://localhost" },
}
"""

RELATED = """
{
  meta: { lastTouchedVersion: "1" }, wizard: {}, env: { vars: { A: "b" } }, messages: { queue: { mode: "collect" } },
  plugins: { entries: {} }, skills: {}, browser: { enabled: false }, logging: { level: "info" }, bindings: [],
  agents: { defaults: { workspace: "~/w", contextPruning: { mode: "off" }, compaction: { mode: "safeguard" },
                        sandbox: { mode: "off", docker: { image: "x" } } },
            list: [{ id: "main", agentDir: "x", heartbeat: { every: "30m" }, tools: { profile: "full", exec: {} } }] },
  tools: { profile: "coding", web: { search: { enabled: true } }, exec: { ask: "off" } },
  models: { providers: { p: { baseUrl: "http://h/v1", authHeader: true, models: [{ id: "m", compat: {} }] } } },
  gateway: { mode: "local", tailscale: { mode: "off" }, auth: { mode: "token", token: "x", rateLimit: {} },
             controlUi: { allowInsecureAuth: true }, http: { endpoints: { responses: { maxBodyBytes: 1 } } } },
  hooks: { mappings: [] }, cron: { store: "x" },
}
"""

EXAMPLES = {
    "send policy": SEND_POLICY,
    "older send policy": SEND_POLICY.replace("channel", "surface"),
    "sandbox": SANDBOX,
    "contract": CONTRACT,
    "full": FULL,
    "empty": "{}",
}

SENTINEL = "s3cr3t-Qx7"


def refused(raw: object) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        parse(raw)
    return caught.value


def written(directory: Path, text: str, mode: int = 0o600) -> Path:
    path = directory / "config.json5"
    path.write_text(text, encoding="utf-8")
    path.chmod(mode)
    return path


# Loading


@pytest.mark.parametrize(
    ("text", "key", "place"),
    [
        ("{ gateway: { port: 1 },\n  gateway: { port: 2 } }", "gateway", "line 2, column 3"),
        ("{ agents: { list: [{ id: 'a', 'id': 'b' }] } }", "id", "line 1, column 31"),
        ('{ session: {}, /* { */ "sessi\\u006fn": {} }', "session", "line 1, column 24"),
    ],
)
def test_a_key_that_stands_twice_is_refused(tmp_path: Path, text: str, key: str, place: str) -> None:
    with pytest.raises(ConfigError, match=f"{key!r} a second time at {place}"):
        load(written(tmp_path, text))


@pytest.mark.parametrize("name", EXAMPLES)
def test_no_example_has_a_key_twice(name: str) -> None:
    assert list(find_duplicate_keys(EXAMPLES[name])) == []


JSON = st.recursive(
    st.none() | st.integers() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
)


@given(st.dictionaries(st.text(), JSON, min_size=1), st.booleans())
def test_a_repeated_key_is_found_wherever_texts_look_like_keys(document: dict[str, Any], ascii: bool) -> None:
    text = json.dumps(document, ensure_ascii=ascii, indent=1)
    assert list(find_duplicate_keys(text)) == []
    key = next(iter(document))
    again = f"{text[:-1]}, {json.dumps(key)}: {{}}}}"
    assert list(find_duplicate_keys(again)) == [(key, len(text) + 1)]


SPACES = st.lists(
    st.sampled_from([*" \t\v\f\n\r\ufeff\xa0\u2028\u2029\u3000", "/* a: } */", "/**/", '// "{\r', "//\u2029"])
).map("".join)
KEYS = st.sampled_from(
    [
        (written, name)
        for name, spellings in {
            "a": ["a", "'a'", '"a"', r"\u0061", r"'\x61'", r'"\u0061"', "'a\\\n'"],
            "ä$_": ["ä$_", '"ä$_"'],
            "}:,": ["'}:,'"],
            "it's": [r"'it\'s'", '"it\'s"'],
            "//": ['"//"', r"'\/\/'"],
            "null": ["null"],
        }.items()
        for written in spellings
    ]
)
LEAVES = st.sampled_from(["0xF", "+.5e1", "-Infinity", "NaN", "null", "'a: {'", '"\\\\"', "'\\\r\n/*'"])
Document = tuple[str, list[str]]  # the text, and the keys that stand again in it


@st.composite
def documents(draw: st.DrawFn, depth: int = 2) -> Document:
    space, again = (lambda: draw(SPACES)), list[str]()
    if depth == 0 or draw(st.booleans()):
        return draw(LEAVES), []
    if draw(st.booleans()):
        items = draw(st.lists(documents(depth=depth - 1), max_size=3))
        again = [name for _, names in items for name in names]
        return f"[{','.join(space() + text + space() for text, _ in items) or space()}]", again
    seen, parts = set[str](), list[str]()
    for (written, name), (text, names) in draw(
        st.lists(st.tuples(KEYS, documents(depth=depth - 1)), max_size=3)
    ):
        again += [*([name] if name in seen else []), *names]
        seen.add(name)
        parts.append(f"{space()}{written}{space()}:{space()}{text}{space()}")
    return f"{{{','.join(parts) or space()}}}", again


@given(SPACES, documents(), SPACES)
def test_every_repeated_key_is_found_in_any_document_that_parses(
    before: str, document: Document, after: str
) -> None:
    text = f"{before}{document[0]}{after}"
    pyjson5.decode(text)
    assert [name for name, _ in find_duplicate_keys(text)] == document[1]


RUNS_A_COMMAND = '{ gateway: { auth: { token: { exec: ["cat", "token"] } } } }'
IN_DANGER = {
    "gateway.auth.token": RUNS_A_COMMAND,
    "hooks.token": '{ hooks: { enabled: true, token: "a token of sixteen or more" } }',
    "models.providers.p.apiKey": (
        '{ models: { providers: { p: { baseUrl: "http://h/v1", apiKey: { env: "KEY" }, models: [{ id: "m" }] } } } }'
    ),
    "models.providers.p.baseUrl": (
        '{ models: { providers: { p: { baseUrl: "http://a:b@h/v1", models: [{ id: "m" }] } } } }'
    ),
    "mcp.servers.m.url": '{ mcp: { servers: { m: { url: "https://host/mcp?key=0123456789" } } } }',
    "store.password": '{ store: { url: "postgresql://host/db", password: { file: "password" } } }',
}


@pytest.mark.requirement("C")
@pytest.mark.parametrize("key", IN_DANGER)
@pytest.mark.parametrize(
    ("mode", "folder_mode", "owner", "refused"),
    [
        (0o600, 0o700, None, None),
        (0o644, 0o755, None, None),
        (0o600, 0o1777, None, None),
        (0o666, 0o700, None, "can be written to by other users (mode 0666).* chmod go-w "),
        (0o620, 0o700, None, "can be written to by other users (mode 0620).* chmod go-w "),
        (0o600, 0o777, None, "which all users can write to.* chmod o-w "),
        (0o644, 0o755, 4711, "belongs to another user (uid 4711).* chown "),
    ],
)
def test_commands_and_secrets_are_taken_only_from_a_file_that_no_other_user_can_change(
    open_path: Path, mode: int, folder_mode: int, owner: int | None, refused: str | None, key: str
) -> None:
    """They could have a command run, or a secret sent to an address of theirs. Other files only get a warning."""
    if owner is not None and os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    folder = open_path / "kept"
    folder.mkdir()
    file = folder / "config.json5"
    file.write_text(IN_DANGER[key])
    file.chmod(mode)
    folder.chmod(folder_mode)
    if owner is not None:
        os.chown(file, owner, owner)
    if refused is None:
        assert not [it for it in load(file).warnings if "other user" in it or "all users" in it]
        return
    wanted = refused.replace("(", r"\(").replace(")", r"\)")
    with pytest.raises(ConfigError, match=wanted) as error:
        load(file)
    assert error.value.data["path"] == key
    file.write_text("{}")
    loaded = load(file)
    assert loaded.config == Config()
    [warning] = loaded.warnings
    assert re.search(wanted, warning)


@pytest.mark.requirement("C")
@pytest.mark.parametrize("text", [*IN_DANGER.values(), "{}"])
def test_a_file_on_a_read_only_mount_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    """As containers are given one: it keeps the owner and the mode that it has outside."""
    file = written(tmp_path, text, 0o666)
    mounted = os.statvfs_result((*os.statvfs(file)[:8], os.ST_RDONLY, 255))

    def statvfs(_: object) -> os.statvfs_result:
        return mounted

    monkeypatch.setattr(os, "statvfs", statvfs)
    assert not [it for it in load(file).warnings if "other users" in it]


@pytest.mark.requirement("C")
def test_credentials_in_the_address_of_a_provider_are_not_for_others_to_read(tmp_path: Path) -> None:
    file = tmp_path / "config.json5"
    file.write_text(
        '{ models: { providers: { p: { baseUrl: "http://ann:s3cret@host/v1", models: [{ id: "m" }] } } } }'
    )
    file.chmod(0o644)
    [warning] = load(file).warnings
    assert "contains secrets" in warning and "chmod 600" in warning
    assert "s3cret" not in load(file).config.model_dump_json()


def test_an_address_without_a_password_is_no_secret(tmp_path: Path) -> None:
    warned = {
        url: "contains secrets"
        in " ".join(load(written(tmp_path, f"{{store: {{url: '{url}'}}}}", 0o644)).warnings)
        for url in (
            "postgresql://host/db",
            "postgresql://me:pass@host/db",
            "postgresql:///db?host=here&user=me&password=pass",
        )
    }
    assert list(warned.values()) == [False, True, True]


def test_every_secret_is_found_by_its_path() -> None:
    provider = {"apiKey": "k", "models": [{"id": "m"}]}
    config, _ = parse(
        {"models": {"providers": {"openai": provider}}, "gateway": {"auth": {"token": {"env": "X"}}}}
    )
    found = {path: secret.kind for path, secret in list_secrets(config)}
    assert found == {"models.providers.openai.apiKey": "text", "gateway.auth.token": "env"}


@pytest.mark.parametrize("name", EXAMPLES)
def test_documented_examples_load(name: str, tmp_path: Path) -> None:
    loaded = load(written(tmp_path, EXAMPLES[name]))

    assert loaded.path == tmp_path / "config.json5"
    assert not [text for text in loaded.warnings if "does not have" in text]


def test_send_policy_is_read_under_both_names() -> None:
    for text in (
        SEND_POLICY,
        SEND_POLICY.replace("channel", "surface"),
        SEND_POLICY.replace("group", "room"),
    ):
        [rule] = parse(pyjson5.decode(text))[0].session.send_policy.rules
        assert (rule.action, rule.match.channel_name) == ("deny", "discord")
        assert rule.match.chat_type == ("channel" if "room" in text else "group")


def test_contract_example_means_what_it_says() -> None:
    config, warnings = parse(pyjson5.decode(CONTRACT))

    assert warnings == ()
    assert (config.default_agent_id, config.agent_ids) == ("main", ("main", "helper"))
    assert config.get_model_ref("helper") == "local/m1"
    assert config.get_agent("helper").tools.visibility == "all"
    assert config.gateway.auth.token is not None
    assert config.gateway.auth.token.reveal() == "…"


def test_defaults_of_the_contract() -> None:
    config = Config()

    assert config.session.agent_to_agent.max_ping_pong_turns == 5
    assert config.session.agent_to_agent.max_hops == 12
    assert (config.session.reset, config.session.idle_minutes, config.session.reset_by_channel) == (
        None,
        None,
        {},
    )
    assert config.session.retention.archive_after_days is None
    assert config.session.retention.delete_archived_after_days is None
    assert config.tools.sessions.visibility == "tree"
    assert not config.tools.agent_to_agent.enabled
    subagents = config.agents.defaults.subagents
    assert (subagents.max_spawn_depth, subagents.max_children_per_agent) == (1, 200)
    assert (subagents.archive_after_minutes, subagents.run_timeout_seconds) == (60, 0)
    attachments = config.tools.sessions_spawn.attachments
    assert (attachments.max_files, attachments.max_file_bytes, attachments.max_total_bytes) == (
        50,
        2**20,
        5 * 2**20,
    )
    assert (config.gateway.port, config.gateway.bind) == (18789, "loopback")
    assert (config.store.synchronous, config.store.message_max_bytes) == ("full", 2**20)


def test_config_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Config().session.scope = "global"


def test_settings_without_effect_are_told() -> None:
    warnings = " ".join(parse(pyjson5.decode(FULL))[1])

    assert "'session.store' has no effect" in warnings
    assert "'session.maintenance' has no effect" in warnings
    assert "'channels.discord' is accepted but has no effect in this release." in warnings
    assert "'bus.url' has no effect" not in warnings
    (warning,) = parse({"bus": {"url": "nats://localhost"}})[1]
    assert warning.startswith("'bus.url' has no effect without 'store.url'")


P = {"models": {"providers": {"p": {"baseUrl": "http://h", "models": [{"id": "m"}]}}}}


def within(place: str, value: object) -> Any:
    """A document that has this at a place of the table."""
    step, _, rest = place.partition(".")
    inner: Any = within(rest, value) if rest else value
    if step == "[]":
        return [{"id": "m", **inner}]
    if step == "runtime" and "acp" in inner:
        return {"runtime": {"type": "acp", "acp": {"command": "sh", **inner["acp"]}}}
    return {"p": {"baseUrl": "http://h", **inner}} if step == "*" else {step: inner}


@pytest.mark.parametrize("place", UNUSED_KEYS)
def test_each_key_without_effect_is_told_with_what_to_do_instead(place: str) -> None:
    values: dict[str, tuple[object, object]] = {  # one to be told of, and one that asks for nothing
        "fallbacks": (["p/m"], []),
        "backend": ("acpx", None),
        "resetTriggers": (["/fresh"], ["/new", "/reset"]),
        "threadBindings": ({"enabled": True}, {}),
        "maintenance": ({"mode": "warn"}, None),
        "delegationMode": ("prefer", None),
        "input": (["text", "image"], ["text"]),
        "reasoning": (True, False),
        "enabled": (True, False),
        "allowModels": (["p/m"], []),
        "workspaceOnly": (False, True),
    }
    parent, _, key = place.rpartition(".")
    told, silent = values.get(key, ("x", None if key != "basePath" else ""))
    for value, heard in ((told, True), (silent, False)):
        said = {key: value, **({"primary": "p/m"} if key == "fallbacks" else {})}
        _, warnings = parse({**P, **within(parent, said)})
        path = place.replace(".[]", "[0]").replace("*", "p")
        expected = [f"{path!r} has no effect: {UNUSED_KEYS[place]}"] if heard else []
        assert [text for text in warnings if "no effect" in text] == expected


def fields(section: type[Section], path: str = "") -> Iterator[tuple[str, str]]:
    """Every key that holds a value: its place, and what it is called in the code."""
    for name, field in section.model_fields.items():
        place = f"{path}.{field.alias}" if path else str(field.alias)
        found = list(sections(field.annotation))
        if not found:
            yield place, name
        for step, inner in found:
            yield from fields(inner, place + step)


def sections(kind: object, step: str = "") -> Iterator[tuple[str, type[Section]]]:
    if isinstance(kind, type) and issubclass(kind, Section):
        yield step, kind
    step = {dict: ".*", tuple: ".[]"}.get(cast("Any", get_origin(kind)), step)
    for inner in get_args(kind):
        yield from sections(inner, step)


READ_WITHIN = {
    "$schema": "for editors",
    "bindings.[].comment": "for people",
    "session.sendPolicy.rules.[].match.surface": "as channel_name",
    "models.mode": "there is nothing that could be merged or replaced",
    "session.compat.providerField": "rows always have it",
    "store.synchronous": "as store_synchronous",
    "tools.exec.timeoutSec": "as timeout_seconds",
    "agents.list.[].tools.exec.timeoutSec": "as timeout_seconds",
    "tools.fs.workspaceOnly": "file tools always stay inside; only false is warned about",
    "agents.defaults.sandbox.network": "only 'none' is accepted",
    "agents.list.[].sandbox.network": "only 'none' is accepted",
    **{
        f"{place}.*.{key}": "by the methods of McpServerConfig"
        for place in ("mcp.servers", "mcpServers", "tools.mcpServers")
        for key in ("disabled", "disabledTools", "enabledTools", "transport", "workingDirectory")
    },
}


def test_every_key_is_read_somewhere_or_known_to_have_no_effect() -> None:
    """By its name: one that other things are called by, too, can hide. New keys seldom do."""
    source = Path(antiphon.__file__).parent
    texts = [path.read_text() for path in source.rglob("*.py") if path.parent.name != "config"]
    read = set(re.findall(r"\.([a-z_]+)\b", "\n".join(texts)))
    places = dict(fields(Config))
    dead = {place for place, name in places.items() if name not in read} - READ_WITHIN.keys()

    assert not {place for place in dead if not any(f"{place}.".startswith(f"{it}.") for it in UNUSED_KEYS)}
    for place in (*UNUSED_KEYS, *READ_WITHIN):
        assert any(f"{known}.".startswith(f"{place}.") for known in places), place


@pytest.mark.parametrize("host", ["localhost", "192.168.1.2", "::1", "fe80::1%eth0"])
def test_an_address_to_listen_on_is_accepted(host: str) -> None:
    token = {"token": "of sixteen or more"}
    assert parse({"gateway": {"bind": "custom", "customBindHost": host, "auth": token}})[1] == ()
    assert parse({"gateway": {"customBindHost": "of no use"}})[1] == ()


@pytest.mark.requirement("G25")
def test_a_reset_that_never_comes_is_told() -> None:
    idle = {"mode": "idle"}
    for session, path in (
        ({"reset": idle}, "session.reset"),
        ({"resetByType": {"group": idle}}, "session.resetByType.group"),
        ({"idleMinutes": 5, "resetByChannel": {"x": idle}}, "session.resetByChannel.x"),
    ):
        (warning,) = parse({"session": session})[1]
        assert warning == (
            f"{path!r} has the mode 'idle' but no 'idleMinutes', so no session is reset. Set 'idleMinutes'."
        )
    assert parse({"session": {"idleMinutes": 5, "reset": idle, "resetByType": {"dm": idle}}})[1] == ()


@pytest.mark.parametrize("backend", ["bwrap", "landlock"])
def test_settings_of_containers_without_containers_are_told(backend: str) -> None:
    chosen = {"backend": backend, "docker": {"image": "x"}}
    (warning,) = parse({"agents": {"defaults": {"sandbox": chosen}}})[1]
    assert warning.startswith(
        f"'agents.defaults.sandbox.docker' has no effect, because 'backend' is {backend!r}"
    )
    own = {"id": "a", "sandbox": {"docker": {"image": "x"}}}
    (warning,) = parse({"agents": {"defaults": {"sandbox": {"backend": backend}}, "list": [own]}})[1]
    assert warning.startswith("'agents.list[0].sandbox.docker' has no effect")
    for silent in ({"docker": {"image": "x"}}, {**chosen, "backend": "docker"}):
        assert parse({"agents": {"defaults": {"sandbox": silent}}})[1] == ()


def test_settings_of_containers_are_read_as_others_write_them() -> None:
    written: dict[str, Any] = {
        "image": "x:1",
        "memory": "512m",
        "memorySwap": 1024,
        "ulimits": {"nofile": "10:20", "nproc": 5, "core": {"soft": 1, "hard": 2}},
        "setupCommand": ["a", "b"],
        "binds": ["/a:/b", "/c:/d:ro"],
        "env": {"A": "1"},
    }
    own = {"id": "a", "sandbox": {"docker": {"memory": "1G", "env": {"B": "2"}, "binds": ["/e:/f"]}}}
    config, _ = parse({"agents": {"defaults": {"sandbox": {"docker": written}}, "list": [own]}})
    sandbox = config.get_agent("a").sandbox
    docker = sandbox.docker
    assert (docker.image, docker.memory, docker.memory_swap) == ("x:1", 1 << 30, 1024)
    assert {name: (each.soft, each.hard) for name, each in docker.ulimits.items()} == {
        "nofile": (10, 20),
        "nproc": (5, 5),
        "core": (1, 2),
    }
    assert docker.setup_command == "a\nb"
    assert docker.env == {"A": "1", "B": "2"}
    assert sandbox.binds == ("/a:/b:rw", "/c:/d:ro", "/e:/f:rw")


@pytest.mark.parametrize("bind", ["data", "data:/data", "/data", "/a:/b:rx", "/a:b", ""])
@pytest.mark.parametrize("section", ["sandbox", "docker"])
def test_a_bind_of_another_form_is_an_error(section: str, bind: str) -> None:
    binds: dict[str, Any] = {"binds": [bind]}
    sandbox = binds if section == "sandbox" else {"docker": binds}
    with pytest.raises(ConfigError, match=r"binds\[0\]"):
        parse({"agents": {"defaults": {"sandbox": sandbox}}})


def test_a_bind_that_only_others_know_is_read_and_told() -> None:
    (warning,) = parse({"gateway": {"bind": "tailnet"}})[1]
    assert warning.startswith("'gateway.bind' is 'tailnet'")
    assert warning.endswith("Use 'custom' and set gateway.customBindHost to an address of this machine.")


def test_parts_that_are_not_there_yet_refuse_nothing() -> None:
    assert parse({"store": {"synchronous": "full"}, "bus": {}})[1] == ()


@pytest.mark.requirement("W7")
def test_hooks_without_a_secret_are_refused() -> None:
    error = refused({"hooks": {"enabled": True}})

    assert error.data["path"] == "hooks.token"
    assert str(error) == (
        "'hooks.enabled' is true but 'hooks.token' is not set."
        " Set a token that only the senders of hooks know."
    )
    parse({"hooks": {"enabled": True, "token": {"env": "HOOKS"}}})


@pytest.mark.parametrize(
    ("section", "url", "what", "allowed"),
    [
        (
            "store",
            "mysql://x",
            "has the unsupported scheme 'mysql://'",
            "postgresql://user@host/database or postgres://",
        ),
        ("store", "host/database", "has no scheme", "remove it to use SQLite"),
        ("bus", "http://a:4222", "contains 'http://…'", "nats://host:4222 or tls://host:4222"),
        (
            "bus",
            "nats://a:4222, b:4222",
            "contains an address without nats:// or tls://",
            "separated by commas",
        ),
        ("bus", "nats://a:99999", "contains 'nats://…' without a usable host or port", "nats://host:4222"),
    ],
)
def test_an_address_of_another_kind_is_refused(section: str, url: str, what: str, allowed: str) -> None:
    error = refused({section: {"url": url}})

    assert error.data["path"] == f"{section}.url"
    assert error.what.startswith(f"'{section}.url' {what}")
    assert allowed in error.hint


@pytest.mark.parametrize(
    "raw",
    [
        {"store": {"url": "postgres://antiphon@db/antiphon"}},
        {"store": {"url": "postgresql:///antiphon"}, "bus": {"url": "nats://a,tls://b:4223, nats://[::1]:1"}},
        {"store": {"url": {"env": "NOT_SET"}}, "bus": {"url": {"exec": ["false"]}}},
        {"store": {"url": "${NOT_SET}"}, "bus": {"url": {"file": "/nowhere"}}},
    ],
)
def test_addresses_that_may_be_right_are_accepted(raw: object) -> None:
    assert parse(raw)[1] == ()


@given(
    password=st.text(st.characters(min_codepoint=32, max_codepoint=126)),
    beginning=st.sampled_from(["mysql://u:", "u:", "//u:", "nats://u:", "postgres//", ""]),
    section=st.sampled_from(["store", "bus"]),
)
def test_no_refusal_of_an_address_shows_a_part_of_its_password(
    password: str, beginning: str, section: str
) -> None:
    try:
        parse({section: {"url": f"{beginning}{SENTINEL}{password}{SENTINEL}@host:x/y"}})
    except ConfigError as error:  # some are addresses after all
        assert SENTINEL not in str(error)


@pytest.mark.parametrize(
    ("missing", "raw", "told"),
    [
        ("asyncpg", {"store": {"url": "postgres://db"}}, ("'store.url'", "extra cluster`.")),
        (
            "nats",
            {"store": {"url": "postgres://db"}, "bus": {"url": "nats://a"}},
            ("'bus.url'", "extra cluster`."),
        ),
        (
            "google.genai",
            {"models": {"providers": {"google": {"models": [{"id": "m"}]}}}},
            ("'models.providers.google'", "extra google`."),
        ),
        (
            "absent_package",
            {
                "agents": {
                    "list": [{"id": "f", "runtime": {"type": "function", "target": "absent_package.a:b"}}]
                }
            },
            ("'agents.list[0].runtime.target'", "PYTHONPATH."),
        ),
    ],
)
def test_what_is_not_installed_is_told(
    missing: str, raw: object, told: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    [warning] = parse(raw)[1]

    assert warning.startswith(told[0]) and warning.endswith(told[1])


def test_a_function_that_can_be_found_is_not_imported() -> None:
    function = {"type": "function", "target": "this:run"}  # it would print a poem
    main = {"type": "function", "target": "__main__:run"}
    agents = {"list": [{"id": "f", "runtime": function}, {"id": "g", "runtime": main}]}

    assert parse({"agents": agents})[1] == ()
    assert "this" not in sys.modules


@pytest.mark.parametrize(
    ("gateway", "warned"),
    [
        ({"bind": "lan", "auth": {"token": "x" * 15}}, "token"),
        ({"bind": "lan", "auth": {"mode": "password", "password": "short"}}, "password"),
        ({"bind": "custom", "customBindHost": "10.0.0.1", "auth": {"token": "short"}}, "token"),
        ({"bind": "custom", "customBindHost": "127.0.0.1", "auth": {"token": "short"}}, None),
        ({"bind": "lan", "auth": {"token": "x" * 16}}, None),
        ({"bind": "lan", "auth": {"token": "x" * 16, "password": "unused"}}, None),
        ({"bind": "lan", "auth": {"token": {"env": "X"}}}, None),
        ({"bind": "lan"}, None),
        ({"bind": "auto", "auth": {"token": "short"}}, None),
        ({"auth": {"token": "short"}}, None),
    ],
)
def test_a_short_secret_that_others_can_guess_is_told(gateway: dict[str, Any], warned: str | None) -> None:
    warnings = parse({"gateway": gateway})[1]

    expected = [f"'gateway.auth.{warned}' has fewer than 16 characters"] if warned else []
    assert [text.partition(",")[0] for text in warnings] == expected
    assert all("'gateway.bind'" in text and "Set a longer one" in text for text in warnings)


def test_a_provider_without_models_is_told() -> None:
    [warning] = parse({"models": {"providers": {"openai": {}}}})[1]

    assert "'models.providers.openai.models' is empty" in warning


def test_agents_that_may_be_spawned_and_are_not_there_are_told() -> None:
    agents = {
        "defaults": {"subagents": {"allowAgents": ["writer-*", "Main"]}},
        "list": [{"id": "main", "subagents": {"allowAgents": ["helpr", "h*", "*"]}}, {"id": "helper"}],
    }
    pattern, misspelt = parse({"agents": agents})[1]

    assert pattern.startswith("'agents.defaults.subagents.allowAgents' names 'writer-*', but no such agent")
    assert misspelt.startswith("'agents.list[0].subagents.allowAgents' names 'helpr', but no such agent")
    assert "Did you mean 'helper'?" in misspelt


@pytest.mark.parametrize(
    ("path", "config"),
    [
        ("gateway.tools.allow", {"gateway": {"tools": {"allow": ["session_send"]}}}),
        ("gateway.tools.deny", {"gateway": {"tools": {"deny": ["sesions_send"]}}}),
        ("tools.allow", {"tools": {"allow": ["sessions_sned"]}}),
        ("tools.deny", {"tools": {"deny": ["sessions.send"]}}),
        ("tools.subagents.tools.allow", {"tools": {"subagents": {"tools": {"allow": ["Session_Send"]}}}}),
        (
            "tools.subagents.tools.alsoAllow",
            {"tools": {"subagents": {"tools": {"alsoAllow": ["session_send"]}}}},
        ),
        ("tools.subagents.tools.deny", {"tools": {"subagents": {"tools": {"deny": ["sessionssend"]}}}}),
        (
            "agents.list[0].tools.allow",
            {"agents": {"list": [{"id": "a", "tools": {"allow": ["session_send"]}}]}},
        ),
        (
            "agents.list[0].tools.deny",
            {"agents": {"list": [{"id": "a", "tools": {"deny": ["session_send"]}}]}},
        ),
    ],
)
def test_a_session_tool_that_is_misspelt_is_told(path: str, config: dict[str, Any]) -> None:
    warning, *more = parse(config)[1]

    assert warning.startswith(f"{path!r} names ")
    assert all("no tool is allowed" in text for text in more)
    assert "Did you mean 'sessions_send'?" in warning


def test_tools_that_may_come_from_anywhere_are_not_told() -> None:
    names = ["exec", "read", "message", "memory_search", "browser", "cron", "group:sessions", "*"]
    lists = {"allow": [*SESSION_TOOL_NAMES, *names], "deny": ["sessions_*"]}
    assert parse({"tools": lists, "gateway": {"tools": {"allow": list(SESSION_TOOL_NAMES)}}})[1] == ()
    [warning] = parse({"gateway": {"tools": {"allow": ["sessions_*"]}}})[1]
    assert "Write out the name of each tool." in warning


def test_a_group_stands_for_its_tools_and_one_that_has_none_is_told() -> None:
    config, warnings = parse({"gateway": {"tools": {"deny": ["cron", "group:sessions"]}}})
    assert config.gateway.tools.deny == ("cron", *TOOL_GROUPS["group:sessions"])
    assert warnings == ()
    told = {
        name: parse({"tools": {"deny": [name]}})[1] for name in ("group:nodes", "Group:Session", "group:*")
    }
    has_none = "a group without tools here."
    assert told["group:nodes"] == ()
    assert parse({"tools": {"alsoAllow": ["group:nodes"]}})[1] == (
        f"'tools.alsoAllow' names 'group:nodes', {has_none} List the tools by name, or remove it.",
    )
    assert told["Group:Session"] == (
        f"'tools.deny' names 'Group:Session', {has_none} Did you mean 'group:sessions'?",
    )
    assert has_none in told["group:*"][0]


@pytest.mark.parametrize(("name", "near"), [("exce", "exec"), ("raed", "read"), ("web_serach", "web_search")])
def test_a_misspelt_tool_is_named_also_if_its_name_is_short(name: str, near: str) -> None:
    [warning] = parse({"tools": {"deny": [name]}})[1]
    assert warning == f"'tools.deny' names {name!r}, but there is no such tool. Did you mean {near!r}?"


@pytest.mark.parametrize("name", ["browser", "canvas", "nodes", "tts", "pdf", "grep", "ls", "find", "bash"])
def test_a_tool_of_another_program_is_not_taken_for_a_misspelt_one(name: str) -> None:
    assert parse({"tools": {"deny": [name]}})[1] == ()


def test_the_session_tools_are_those_there_are() -> None:
    assert {tool.spec.name for tool in create_session_tools(Mock())} == set(SESSION_TOOL_NAMES)


def test_the_tools_for_work_are_those_there_are() -> None:
    assert {tool.spec.name for tool in create_file_tools(Mock())} == set(TOOL_GROUPS["group:fs"])
    assert {tool.spec.name for tool in create_memory_tools(Mock())} == set(TOOL_GROUPS["group:memory"])
    chat_tools = {tool.spec.name for tool in create_chat_tools(Mock(), parse({})[0])}
    assert chat_tools == {*TOOL_GROUPS["group:automation"], *TOOL_GROUPS["group:messaging"]}
    tools = create_web_tools(parse({"tools": {"web": {"fetch": {"enabled": False}}}})[0], SystemClock())
    assert {tool.spec.name for tool in tools} == set(TOOL_GROUPS["group:web"])
    assert [tool.explain_absence("main", is_sandboxed=False) for tool in tools] == [
        "'tools.web.fetch.enabled' is false.",
        "No search service is configured. Set 'tools.web.search.apiKey' for Brave Search, or"
        " 'tools.web.search.searxng.baseUrl' to the address of your SearXNG.",
    ]
    [warning] = parse({"tools": {"web": {"search": {"enabled": True}}}})[1]
    assert "no search service is configured, so 'web_search' is not offered" in warning
    assert not parse({"tools": {"web": {"search": {"enabled": True, "searxng": {"baseUrl": "http://s"}}}}})[1]
    [warning] = parse({"tools": {"fs": {"workspaceOnly": False}}})[1]
    assert "'tools.fs.workspaceOnly' is false, but file tools stay inside" in warning


@pytest.mark.requirement("V1")
@pytest.mark.requirement("C", "V1")
def test_agents_that_may_reach_each_other_but_do_not_see_that_far_are_told() -> None:
    two = {"list": [{"id": "main", "default": True}, {"id": "helper"}]}
    enabled = {"agentToAgent": {"enabled": True}}
    [warning] = parse({"agents": two, "tools": enabled})[1]
    assert "'tools.agentToAgent.enabled' is true" in warning
    assert "'tools.sessions.visibility' is 'tree'. Set it to 'all'." in warning
    assert parse({"tools": enabled})[1] == ()
    assert parse({"agents": two, "tools": {**enabled, "sessions": {"send": "all"}}})[1] == ()
    own = {"list": [{"id": "main", "tools": {"sessions": {"visibility": "all"}}}, {"id": "helper"}]}
    assert parse({"agents": own, "tools": enabled})[1] == ()


@pytest.mark.requirement("C", "SEC12")
@pytest.mark.parametrize(
    ("raw", "path"),
    [
        ({"tools": {"allow": ["browser", "canvas"]}}, "tools.allow"),
        ({"agents": {"list": [{"id": "a", "tools": {"allow": ["browser*"]}}]}}, "agents.list[0].tools.allow"),
        ({"tools": {"subagents": {"tools": {"allow": ["browser"]}}}}, "tools.subagents.tools.allow"),
    ],
)
def test_a_list_that_leaves_no_tool_is_told(raw: dict[str, Any], path: str) -> None:
    [warning] = parse(raw)[1]
    assert warning.startswith(f"'{path}' matches no existing tool (") and "no tool is allowed" in warning
    assert parse({"tools": {"allow": ["read", "sessions_*"]}})[1] == ()


def test_a_visibility_that_shows_nothing_more_is_told() -> None:
    two = {"list": [{"id": "main"}, {"id": "helper", "tools": {"sessions": {"visibility": "all"}}}]}
    everything = {"sessions": {"visibility": "all"}}
    general, own = parse({"agents": two, "tools": everything})[1]

    assert general.startswith(
        "'tools.sessions.visibility' is 'all', but sessions of other agents stay invisible"
    )
    assert own.startswith("'agents.list[1].tools.sessions.visibility' is 'all'")
    assert "'tools.agentToAgent.enabled' is false" in general
    assert parse({"tools": everything})[1] == ()
    assert parse({"agents": two, "tools": {**everything, "agentToAgent": {"enabled": True}}})[1] == ()


# Parts that belong to others


def test_config_of_a_related_gateway_loads_with_a_warning_for_each_foreign_part() -> None:
    raw = pyjson5.decode(RELATED)
    config, warnings = parse(raw)

    foreign = re.compile(r"'([^']+)' (?:belongs to a feature|has no effect: )")
    named = {match[1] for text in warnings if (match := foreign.match(text))}
    assert {
        "messages.queue",
        "agents.list[0].heartbeat",
        "models.providers.p.authHeader",
        "gateway.mode",
    } <= named
    assert "models.providers.p.models[0].compat" in named
    assert len(named) == 21
    assert not [text for text in warnings if "sandbox.docker" in text]
    assert config.agents.defaults.workspace == "~/w"
    assert raw == pyjson5.decode(RELATED)


def test_no_key_is_both_ours_and_foreign() -> None:
    schema = build_json_schema()
    for place, keys in FOREIGN_KEYS.items():
        node = schema
        for step in place.split(".") if place else ():
            inner = {"*": "additionalProperties", "[]": "items"}
            node = node[inner[step]] if step in inner else node["properties"][step]
            node = schema["$defs"][node["$ref"].rpartition("/")[2]] if "$ref" in node else node
        assert not keys & node["properties"].keys(), place


def test_misspelt_foreign_section_is_an_error() -> None:
    assert refused({"mesages": {}}).data["path"] == "mesages"


# What is refused


@pytest.mark.parametrize(
    ("raw", "path", "instead"),
    [
        ({"session": {"dmScoop": "main"}}, "session.dmScoop", "session.dmScope"),
        ({"gatway": {}}, "gatway", "gateway"),
        ({"session": {"dm_scope": "main"}}, "session.dm_scope", "session.dmScope"),
        (
            {"agents": {"list": [{"id": "a"}, {"id": "b", "modle": "x"}]}},
            "agents.list[1].modle",
            "agents.list[1].model",
        ),
        ({"gateway": {"auth": {"tokn": "x"}}}, "gateway.auth.tokn", "gateway.auth.token"),
        (
            {"models": {"providers": {"models": {"apikey": "x"}}}},
            "models.providers.models.apikey",
            "models.providers.models.apiKey",
        ),
        (
            {"session": {"resetByChannel": {"x": {"athour": 1}}}},
            "session.resetByChannel.x.athour",
            "session.resetByChannel.x.atHour",
        ),
    ],
)
def test_unknown_key_is_named_with_the_nearest(raw: object, path: str, instead: str) -> None:
    error = refused(raw)

    assert error.data["path"] == path
    assert f"Key {path!r} is not known." in str(error)
    assert f"Did you mean {instead!r}?" in error.hint


def test_unknown_key_lists_the_valid_ones_when_nothing_is_near() -> None:
    assert "Valid keys here: 'enabled', 'maxConcurrentRuns'." in refused({"cron": {"zzz": 1}}).hint


@pytest.mark.parametrize(
    ("raw", "path", "says"),
    [
        (
            {"session": {"agentToAgent": {"maxPingPongTurns": 6}}},
            "session.agentToAgent.maxPingPongTurns",
            "at most 5; 6 was",
        ),
        (
            {"session": {"agentToAgent": {"maxPingPongTurns": -1}}},
            "session.agentToAgent.maxPingPongTurns",
            "at least 0; -1",
        ),
        (
            {"session": {"agentToAgent": {"maxHops": "3"}}},
            "session.agentToAgent.maxHops",
            "a whole number; '3'",
        ),
        ({"session": {"scope": "x"}}, "session.scope", "'per-sender' or 'global'; 'x'"),
        ({"session": {"resetTriggers": "/new"}}, "session.resetTriggers", "a list; text"),
        (
            {"session": {"retention": {"archiveAfterDays": 0}}},
            "session.retention.archiveAfterDays",
            "more than 0; 0",
        ),
        (
            {"session": {"retention": {"archiveAfterDays": float("inf")}}},
            "session.retention.archiveAfterDays",
            "finite",
        ),
        ({"cron": {"enabled": 1}}, "cron.enabled", "true or false; 1"),
        (
            {"cron": {"maxConcurrentRuns": 10**5000}},
            "cron.maxConcurrentRuns",
            "at most 1,000,000,000; a number",
        ),
        ({"agents": []}, "agents", "an object; a list"),
        ({"agents": {"defaults": {"model": 5}}}, "agents.defaults.model", "'provider/model'"),
        ({"agents": {"list": [{"name": "x"}]}}, "agents.list[0].id", "is missing"),
        ({"agents": {"list": [{"id": "a b"}]}}, "agents.list[0].id", "an agent id"),
        ({"agents": {"list": [{"id": "é"}]}}, "agents.list[0].id", "an agent id"),
        (
            {"agents": {"list": [{"id": "a", "runtime": {"type": "docker"}}]}},
            "agents.list[0].runtime.type",
            "'function' or 'acp'; 'docker'",
        ),
        (
            {"models": {"providers": {"p": {"baseUrl": "ftp://x"}}}},
            "models.providers.p.baseUrl",
            "must begin with http:// or https://; text was given",
        ),
        (
            {"models": {"providers": {"p": {"api": "openai"}}}},
            "models.providers.p.api",
            "'google-generative-ai'; 'openai' was given",
        ),
        ({"gateway": {"auth": {"mode": "tokn"}}}, "gateway.auth.mode", "'none'; 'tokn' was given"),
        ({"hooks": {"path": "x"}}, "hooks.path", "must begin with '/'"),
        (
            {"agents": {"list": [{"id": "a", "runtime": {"type": "function", "target": "clerk"}}]}},
            "agents.list[0].runtime.target",
            "must have the form 'package.module:callable'; 'clerk' was given",
        ),
        ({"channels": {"x": 5}}, "channels.x", "an object; a number"),
        (
            {"agents": {"defaults": {"sandbox": {"backend": "openshell"}}}},
            "agents.defaults.sandbox.backend",
            "must be 'bwrap', 'docker' or 'landlock', the backends of this release; 'openshell' was given",
        ),
        *(
            (
                {"agents": {"defaults": {"sandbox": {"docker": {key: value}}}}},
                f"agents.defaults.sandbox.docker.{key}",
                says,
            )
            for key, value, says in (
                ("network", "host", "must be 'none', 'bridge' or the name of a network"),
                ("network", "container:web", "must be 'none', 'bridge' or the name of a network"),
                ("seccompProfile", "unconfined", "must be a profile"),
                ("apparmorProfile", "Unconfined", "must be a profile"),
                ("user", "root", "must be the number of a user other than root"),
                ("user", "0:0", "must be the number of a user other than root"),
            )
        ),
        (
            {"agents": {"list": [{"id": "a", "sandbox": {"network": "bridge"}}]}},
            "agents.list[0].sandbox.network",
            "must be 'none' or 'proxy', with the hosts that commands may reach in 'allowHosts'; 'bridge' was given",
        ),
    ],
)
def test_wrong_value_names_path_allowed_and_given(raw: object, path: str, says: str) -> None:
    before = copy.deepcopy(raw)
    error = refused(raw)

    assert error.data["path"] == path
    assert says in str(error)
    assert raw == before


@pytest.mark.parametrize(
    ("raw", "path", "says"),
    [
        ({"agents": {"list": [{"id": "A"}, {"id": "a"}]}}, "agents.list[1].id", "'a' is used by both"),
        (
            {"agents": {"list": [{"id": "a", "default": True}, {"id": "b", "default": True}]}},
            "agents.list[1].default",
            "More than one",
        ),
        ({"agents": {"defaults": {"model": "x/y"}}}, "agents.defaults.model", "'x/y'"),
        (
            {"agents": {"defaults": {"subagents": {"model": "x/y"}}}},
            "agents.defaults.subagents.model",
            "'x/y'",
        ),
        ({"agents": {"list": [{"id": "a", "model": "x/y"}]}}, "agents.list[0].model", "'x/y'"),
        ({"agents": {"defaults": {"model": "openai/"}}}, "agents.defaults.model", "'openai/'"),
        (
            {
                "models": {"providers": {"openai": {"models": [{"id": "m"}]}}},
                "agents": {"defaults": {"model": "openai/n"}},
            },
            "agents.defaults.model",
            "Did you mean 'openai/m'?",
        ),
        (
            {"agents": {"list": [{"id": "a", "runtime": {"type": "function"}}]}},
            "agents.list[0].runtime.target",
            "'target'",
        ),
        ({"models": {"providers": {"rehearsal": {}}}}, "models.providers.rehearsal", "reserved"),
        ({"models": {"providers": {"a/b": {}}}}, "models.providers.a/b", "'/'"),
        (
            {"models": {"providers": {"openai": {"models": [{"id": "m"}, {"id": "m"}]}}}},
            "models.providers.openai.models",
            "twice",
        ),
        ({"models": {"providers": {"ollama": {}}}}, "models.providers.ollama.baseUrl", "needs an address"),
        ({"gateway": {"bind": "lan", "auth": {"mode": "none"}}}, "gateway.auth.mode", "loopback"),
        ({"gateway": {"bind": "custom"}}, "gateway.customBindHost", "not set"),
        (
            {"gateway": {"bind": "custom", "customBindHost": "no host"}},
            "gateway.customBindHost",
            "an IP address or",
        ),
        (
            {"gateway": {"bind": "custom", "customBindHost": "[::1]"}},
            "gateway.customBindHost",
            "'[::1]' was given",
        ),
        ({"gateway": {"auth": {"mode": "password"}}}, "gateway.auth.password", "not set"),
        (
            {
                "session": {
                    "sendPolicy": {"rules": [{"action": "deny", "match": {"channel": "a", "surface": "b"}}]}
                }
            },
            "session.sendPolicy.rules[0].match.surface",
            "differ",
        ),
    ],
)
def test_contradiction_is_refused(raw: object, path: str, says: str) -> None:
    error = refused(raw)

    assert error.data["path"] == path
    assert says in str(error)
    assert error.hint


def test_all_problems_are_reported_at_once() -> None:
    error = refused({"session": {"scope": "x", "dmScoop": 1}, "cron": {"enabled": 0}})

    everything = [str(error), *error.data["problems"]]
    assert "(2 more in the same config.)" in str(error)
    assert len(error.data["problems"]) == 2
    assert all(
        any(path in text for text in everything)
        for path in ("session.scope", "session.dmScoop", "cron.enabled")
    )


# Files


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("{a: 1,\n b: }", "line 2, column 5"),
        ("{} x", "line 1, column 4"),
        ('{\n  a: "x', "line 2, column 6"),
        ("[" * 100, "nested too deeply"),
    ],
)
def test_syntax_error_gives_line_and_column(text: str, where: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not JSON5") as caught:
        load(written(tmp_path, text))
    assert where in str(caught.value)


@pytest.mark.parametrize("text", ["", " \n"])
def test_an_empty_file_is_named_as_such(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is empty\. Write {} into it, or remove it\."):
        load(written(tmp_path, text))


def test_document_must_be_an_object(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not an object"):
        load(written(tmp_path, "[1]"))


def test_file_must_be_small_readable_text(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="larger than"):
        load(written(tmp_path, " " * (2**20 + 1)))
    (tmp_path / "binary").write_bytes(b'{a: "\xff"}')
    with pytest.raises(ConfigError, match="not UTF-8"):
        load(tmp_path / "binary")
    with pytest.raises(ConfigError, match="could not be read"):
        load(tmp_path)
    with pytest.raises(ConfigError, match="could not be read"):
        load(Path("a\0b"))


def test_byte_order_mark_is_ignored(tmp_path: Path) -> None:
    assert load(written(tmp_path, "\ufeff{cron: {enabled: false}}")).config.cron.enabled is False


def test_missing_file_is_an_error_only_when_it_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = tmp_path / "none.json5"
    with pytest.raises(ConfigError, match="does not exist"):
        load(missing)
    assert load(missing, required=False) == LoadedConfig(Config(), None, ())

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("ANTIPHON_STATE_DIR", raising=False)
    monkeypatch.delenv("ANTIPHON_CONFIG", raising=False)
    assert load(None).path is None
    monkeypatch.setenv("ANTIPHON_CONFIG", str(missing))
    with pytest.raises(ConfigError, match="does not exist"):
        load(None)


def test_readable_file_with_secrets_gets_a_warning(tmp_path: Path) -> None:
    provider = "{models: {providers: {openai: {apiKey: %s, models: [{id: 'm'}]}}}}"
    plain, reference = provider % "'x'", provider % "{env: 'X'}"

    assert "chmod 600" in load(written(tmp_path, plain, 0o644)).warnings[0]
    assert load(written(tmp_path, plain, 0o600)).warnings == ()
    assert load(written(tmp_path, reference, 0o644)).warnings == ()


def test_paths_prefer_flags_then_environment_then_home() -> None:
    home = {"HOME": "/h"}
    environ = {**home, "ANTIPHON_CONFIG": "/e/c.json5", "ANTIPHON_STATE_DIR": "/e/state"}

    default = locate_paths(None, None, home)
    assert (str(default.config), default.config_explicit) == ("/h/.antiphon/config.json5", False)
    assert str(default.state_dir) == "/h/.antiphon"

    named = locate_paths(None, None, environ)
    assert (str(named.config), named.config_explicit, str(named.state_dir)) == (
        "/e/c.json5",
        True,
        "/e/state",
    )

    flagged = locate_paths("~/c.json5", "/f", environ)
    assert (str(flagged.config), flagged.config_explicit, str(flagged.state_dir)) == (
        "/h/c.json5",
        True,
        "/f",
    )

    moved = locate_paths("", "/f", home)
    assert (str(moved.config), moved.config_explicit) == ("/f/config.json5", False)
    assert locate_paths("c.json5", None, home).config == Path.cwd() / "c.json5"


# Questions


def test_agent_is_merged_with_the_defaults() -> None:
    config, _ = parse(pyjson5.decode(FULL))
    ann, b = config.get_agent("ann"), config.get_agent("b")

    assert config.agent_ids == ("ann", "b", "c")
    assert (ann.instructions, b.instructions) == ("", "Be brief.")
    assert (ann.thinking_default, b.thinking_default) == ("high", "low")
    assert (ann.workspace, b.workspace) == ("/w", "~/w")
    assert ann.subagents.model is not None
    assert (ann.subagents.model.primary, ann.subagents.thinking, ann.subagents.max_spawn_depth) == (
        "p/one",
        "max",
        2,
    )
    assert (ann.subagents.allow_agents, b.subagents.allow_agents) == (("*",), ("b",))
    assert (ann.sandbox.mode, ann.sandbox.session_tools_visibility, b.sandbox.mode) == (
        "all",
        "all",
        "non-main",
    )
    selection = ann.tools.selection
    lists = [
        (level.path, level.allow, level.deny) for level in (selection.general.level, selection.own.level)
    ]
    assert lists == [
        ("tools", TOOL_GROUPS["group:sessions"], ("z",)),
        ("agents.list[0].tools", ("x",), ("y",)),
    ]
    assert (b.runtime.type, b.runtime.target, config.get_agent("c").runtime.type) == (
        "function",
        "pkg.mod:answer",
        "model",
    )
    assert (config.get_model_ref("ann"), config.get_model_ref("b")) == ("p/two", "p/one")


@pytest.mark.requirement("V1")
@pytest.mark.parametrize(
    ("general", "own", "reach"),
    [
        ({}, {}, ("tree", "tree", "tree")),
        ({"visibility": "all"}, {}, ("all", "all", "tree")),
        ({"visibility": "self"}, {}, ("self", "self", "self")),
        ({"visibility": "self", "send": "all"}, {}, ("self", "all", "self")),
        (
            {"visibility": "all", "send": "all", "control": "tree"},
            {"visibility": "self"},
            ("self", "self", "self"),
        ),
        ({"visibility": "all", "control": "self"}, {"send": "tree"}, ("all", "tree", "self")),
    ],
)
def test_reach_of_session_tools_is_decided_by_the_nearest_level(
    general: dict[str, str], own: dict[str, str], reach: tuple[str, str, str]
) -> None:
    raw = {"tools": {"sessions": general}, "agents": {"list": [{"id": "a", "tools": {"sessions": own}}]}}
    rules = parse(raw)[0].get_agent("a").tools

    assert (rules.visibility, rules.send, rules.control) == reach


def test_default_agent_is_the_marked_one_else_the_first_else_main() -> None:
    assert Config().default_agent_id == "main"
    assert Config().get_agent("main").timeout_seconds == 172_800
    assert parse({"agents": {"list": [{"id": "x"}, {"id": "y"}]}})[0].default_agent_id == "x"
    assert parse({"agents": {"list": [{"id": "x"}, {"id": "y", "default": True}]}})[0].default_agent_id == "y"


def test_unknown_agent_lists_the_known_ones() -> None:
    config, _ = parse({"agents": {"list": [{"id": "alpha"}, {"id": "beta"}]}})
    with pytest.raises(NotFound, match="Did you mean 'alpha'") as caught:
        config.get_agent("alhpa")
    assert "'beta'" in caught.value.hint


def test_model_falls_back_to_the_first_there_is_then_to_the_rehearsal() -> None:
    assert Config().get_model_ref("main") == REHEARSAL_MODEL_REF == "rehearsal/rehearsal"
    config, _ = parse({"models": {"providers": {"openai": {}, "google": {"models": [{"id": "m"}]}}}})
    assert config.get_model_ref("main") == "google/m"


def test_models_are_found_by_reference() -> None:
    config, _ = parse(pyjson5.decode(FULL))

    name, provider, model = config.find_model("p/org/three")
    assert (name, provider.api, model.id) == ("p", "anthropic-messages", "org/three")
    assert config.find_model(REHEARSAL_MODEL_REF).model.id == "rehearsal"
    with pytest.raises(UnknownModel, match="Did you mean 'p/two'"):
        config.find_model("p/tow")
    with pytest.raises(UnknownModel, match=r"Valid models: .*'p/one'"):
        config.find_model("")


@pytest.mark.anyio
async def test_choosing_a_model_of_a_known_provider_implies_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = {"primary": "anthropic/claude-opus-4-5", "fallbacks": ["openai/gpt-5.2"]}
    subagents = {"model": "anthropic/claude-haiku-4-5"}
    listed = [{"id": "a"}, {"id": "b", "model": "google/org/m"}, {"id": "c", "model": model}]
    monkeypatch.setattr("antiphon.config.validate.find_spec", str)  # as if everything were installed
    config, warnings = parse(
        {"agents": {"defaults": {"model": model, "subagents": subagents}, "list": listed}}
    )

    paths = ["agents.defaults.model.fallbacks", "agents.list[2].model.fallbacks"]
    assert [text.partition(" has no effect")[0] for text in warnings] == [repr(path) for path in paths]
    assert config.model_refs == (
        REHEARSAL_MODEL_REF,  # first: what is meant for one agent answers for no other that has no model
        "anthropic/claude-opus-4-5",
        "anthropic/claude-haiku-4-5",
        "google/org/m",
    )
    keys = {"anthropic": "ANTHROPIC_API_KEY", "google": "GEMINI_API_KEY"}
    implied = {name: provider.api_key for name, provider in config.models.providers.items()}
    assert implied == {name: Secret.parse({"env": variable}) for name, variable in keys.items()}
    monkeypatch.delenv("ANTHROPIC_API_KEY", raising=False)
    with pytest.raises(ConfigError, match=r"The environment variable 'ANTHROPIC_API_KEY'.* is not set\."):
        await RuntimeRegistry(config).get_runtime("a", None)


def test_a_fallback_that_nothing_has_refuses_nothing() -> None:
    [warning] = parse(
        {"agents": {"defaults": {"model": {"primary": REHEARSAL_MODEL_REF, "fallbacks": ["x/y"]}}}}
    )[1]
    assert warning.startswith("'agents.defaults.model.fallbacks' has no effect")


# Several people in one session


@pytest.mark.requirement("K7", "G34")
@pytest.mark.parametrize(
    ("channels", "session", "warned"),
    [
        ({"telegram": {"allowFrom": [1, 2]}}, {}, True),
        ({"telegram": {"allowFrom": ["*"]}}, {}, True),
        ({"telegram": {"dmPolicy": "open", "allowFrom": ["*"]}}, {}, True),
        ({"whatsapp": {"dmPolicy": "open"}}, {}, True),
        ({"telegram": {"allowFrom": [1]}, "discord": {"dm": {"allowFrom": ["2"]}}}, {}, True),
        ({"telegram": {"accounts": {"a": {"allowFrom": [1]}, "b": {"allowFrom": [2]}}}}, {}, True),
        ({"telegram": {"allowFrom": [1, 2]}}, {"dmScope": "per-peer"}, False),
        ({"telegram": {"allowFrom": [1, 2], "enabled": False}}, {}, False),
        ({"telegram": {"allowFrom": [1]}}, {}, False),
        ({"telegram": {}}, {}, False),
        (
            {"telegram": {"allowFrom": [1]}, "discord": {"allowFrom": [2]}},
            {"identityLinks": {"ann": ["telegram:1", "discord:2"]}},
            False,
        ),
    ],
)
def test_one_session_for_several_senders_is_warned_of(
    channels: dict[str, Any], session: dict[str, Any], warned: bool
) -> None:
    _, warnings = parse({"channels": channels, "session": session})

    told = [text for text in warnings if "no effect" not in text]
    assert [text for text in told if "'session.dmScope' is 'main'" in text] == told
    assert bool(told) is warned


@pytest.mark.parametrize(
    ("channels", "session"),
    [
        ({"telegram": {"allowFrom": ["1", "2"]}}, {"dmScope": "per-channel-peer"}),
        (
            {"telegram": {"allowFrom": [1]}, "discord": {"allowFrom": [2]}},
            {"identityLinks": {"ann": ["telegram:1", "discord:2"]}},
        ),
    ],
)
def test_what_parts_or_joins_senders_is_not_to_be_left_out_again(
    channels: dict[str, Any], session: dict[str, Any]
) -> None:
    *others, advice = parse({"channels": channels})[1]
    assert "Set it to 'per-channel-peer'" in advice
    assert parse({"channels": channels, "session": session})[1] == tuple(others)
    assert parse({"session": session})[1] == ()


# Secrets

SECRET_PLACES: list[Callable[[object], dict[str, Any]]] = [
    lambda secret: {"gateway": {"auth": {"token": secret}}},
    lambda secret: {"gateway": {"auth": {"password": secret}}},
    lambda secret: {"hooks": {"token": secret}},
    lambda secret: {"models": {"providers": {"openai": {"apiKey": secret}}}},
    lambda secret: {"models": {"providers": {"openai": {"headers": {"authorization": secret}}}}},
    lambda secret: {"store": {"password": secret}},
    lambda secret: {"bus": {"token": secret}},
    lambda secret: {"channels": {"telegram": {"botToken": secret}}},
]


def shown(config: Config) -> str:
    views = (
        repr(config),
        str(config),
        config.model_dump_json(),
        repr(config.model_dump()),
        str(dict(config)["gateway"]),
    )
    return "\n".join(views)


@given(
    place=st.sampled_from(SECRET_PLACES),
    tail=st.text(alphabet=st.characters(exclude_categories=["Cs", "Cc"]), max_size=30),
    other=st.sampled_from(["scope", "dmScoop"]),
)
def test_no_secret_is_ever_shown(place: Callable[[object], dict[str, Any]], tail: str, other: str) -> None:
    secret = SENTINEL + tail
    config, warnings = parse(place(secret))

    assert SENTINEL not in shown(config) + "\n".join(warnings)
    error = refused({**place(secret), "session": {other: "x"}})
    assert SENTINEL not in "".join(traceback.format_exception(error)) + repr(error.data)


@pytest.mark.parametrize("index", range(len(SECRET_PLACES)))
@pytest.mark.parametrize(
    "wrong",
    [
        [SENTINEL],
        {"envv": SENTINEL},
        {"env": SENTINEL, "file": SENTINEL},
        {"env": [SENTINEL]},
        {"exec": SENTINEL},
        {"exec": SENTINEL, "x": 1},
        {"exec": [SENTINEL, 5]},
        {"exec": []},
        {"file": SENTINEL + "\0"},
        "",
        5,
        None,
        True,
    ],
)
def test_wrong_secret_is_refused_without_showing_it(index: int, wrong: object) -> None:
    raw = SECRET_PLACES[index](wrong)
    if wrong is None and "headers" not in str(raw):
        parse(raw)
        return
    error = refused(raw)
    assert "a secret: text, {env" in str(error)
    assert SENTINEL not in "".join(traceback.format_exception(error)) + repr(error.data)


@pytest.mark.parametrize(
    "raw",
    [
        {"gateway": {"auth": SENTINEL}},
        {"gateway": {"auth": {"mode": SENTINEL}}},
        {"gateway": {"auth": {"tokn": SENTINEL}}},
        {"gateway": SENTINEL},
        {"models": {"providers": {"p": SENTINEL}}},
        {"models": {"providers": {"p": {"baseUrl": SENTINEL}}}},
        {"models": {"providers": {"models": {"baseUrl": SENTINEL}}}},
        {"models": {"providers": {"p": {"headers": SENTINEL}}}},
        {"models": {"providers": {"p": {"headers": [SENTINEL]}}}},
        {"hooks": {"path": SENTINEL}},
        {"channels": {"telegram": SENTINEL}},
        {"channels": SENTINEL},
        {"store": {"synchronous": SENTINEL}},
    ],
)
def test_secret_in_the_wrong_place_is_not_shown_either(raw: object) -> None:
    error = refused(raw)

    assert SENTINEL not in "".join(traceback.format_exception(error)) + repr(error.data)


def test_syntax_error_does_not_show_the_document(tmp_path: Path) -> None:
    path = written(tmp_path, f"{{hooks: {{token: '{SENTINEL}'}}, !}}")
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert SENTINEL not in "".join(traceback.format_exception(caught.value))
    assert caught.value.__context__ is None


def test_secret_masks_itself() -> None:
    secret = Secret.parse(SENTINEL)

    assert (str(secret), repr(secret), f"{secret}") == ("***", "Secret(text)", "***")
    assert secret == Secret.parse(SENTINEL) != Secret.parse("other")
    assert hash(secret) == hash(Secret.parse(SENTINEL))
    assert copy.deepcopy(secret).reveal() == SENTINEL


def test_secret_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    forms: list[object] = [
        {"env": "ANTIPHON_T"},
        "${ANTIPHON_T}",
        {"source": "env", "provider": "default", "id": "ANTIPHON_T"},
    ]
    for form in forms:
        secret = Secret.parse(form)
        monkeypatch.delenv("ANTIPHON_T", raising=False)
        with pytest.raises(ConfigError, match=r"'ANTIPHON_T'.* is not set"):
            secret.reveal()
        monkeypatch.setenv("ANTIPHON_T", SENTINEL)
        assert secret.reveal() == SENTINEL


def test_secret_from_a_file_beside_the_config(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(SENTINEL.encode() + b"\r\n")
    (tmp_path / "key").chmod(0o600)
    loaded = load(written(tmp_path, "{hooks: {token: {file: 'key'}}}"))

    assert loaded.config.hooks.token is not None
    assert loaded.config.hooks.token.reveal() == SENTINEL


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o660, 0o604, 0o601])
def test_secret_file_that_others_can_use_is_refused(mode: int, tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text(SENTINEL)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=f"mode {mode:04o}") as caught:
        Secret.parse({"file": str(path)}).reveal()
    assert "chmod 600" in caught.value.hint
    assert SENTINEL not in str(caught.value)


def test_secret_file_has_to_be_a_small_text(tmp_path: Path) -> None:
    def reason(content: bytes) -> str:
        (tmp_path / "key").write_bytes(content)
        (tmp_path / "key").chmod(0o600)
        with pytest.raises(ConfigError) as caught:
            Secret.parse({"file": "key"}, tmp_path).reveal()
        assert SENTINEL not in "".join(traceback.format_exception(caught.value))
        return str(caught.value)

    assert "larger than 65536" in reason(SENTINEL.encode() * 10_000)
    assert "empty or not UTF-8" in reason(SENTINEL.encode() + b"\xff")
    assert "empty or not UTF-8" in reason(b"\n")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("none", "No such file"),
        ("~no such user/token", "No such file"),
        ("x" * 300, "File name too long"),
        ("locked/token", "Permission denied"),
    ],
)
def test_a_secret_file_that_is_not_there_is_missed_without_being_opened(
    name: str, why: str, open_path: Path
) -> None:
    (open_path / "locked").mkdir()
    (open_path / "locked" / "token").touch(0o600)
    (open_path / "locked").chmod(0)
    secret = Secret.parse({"file": name}, open_path)
    with drop_privileges():
        missed = secret.availability_error
        with pytest.raises(ConfigError) as caught:
            secret.reveal()
    assert missed is not None
    assert str(missed) == str(caught.value)
    assert why in missed.what and missed.hint == "Fix the path, or create the file."


def test_secret_file_has_to_be_a_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name, why in (("pipe", "not a regular file"), ("none", "No such file"), ("/", "Is a directory")):
        with pytest.raises(ConfigError, match=why):
            Secret.parse({"file": name}, tmp_path).reveal()


def command(code: str) -> Secret:
    return Secret.parse({"exec": [sys.executable, "-c", code]})


def test_secret_from_a_command_is_its_first_line(tmp_path: Path) -> None:
    assert command(f"print('{SENTINEL}'); print('more')").reveal() == SENTINEL
    # No shell: what looks like shell syntax is an argument.
    assert Secret.parse({"exec": ["echo", "$HOME; true"]}).reveal() == "$HOME; true"
    (tmp_path / "here").touch()
    assert Secret.parse({"exec": ["ls"]}, tmp_path).reveal() == "here"


@pytest.mark.parametrize(
    ("code", "why"),
    [
        (f"print('{SENTINEL}'); raise SystemExit(3)", "exited with status 3"),
        (f"print('{SENTINEL}' * 10_000)", "printed more than"),
        ("print()", "empty"),
        (f"import sys; sys.stdout.buffer.write(b'{SENTINEL}\\xff')", "not UTF-8"),
    ],
)
def test_failing_secret_command_shows_nothing_of_its_output(code: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as caught:
        command(code).reveal()
    assert SENTINEL not in "".join(traceback.format_exception(caught.value)) + repr(caught.value.data)


def test_missing_secret_command_is_told() -> None:
    with pytest.raises(ConfigError, match="could not be started"):
        Secret.parse({"exec": ["/nonexistent/command"]}).reveal()


def ended(pid: int) -> bool:
    """Whether a process is gone, given it a moment to die of the signal it was sent."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    ready, _, _ = select.select([descriptor], [], [], 10)
    os.close(descriptor)
    return bool(ready)


@pytest.mark.parametrize("detached", [False, True])
def test_secret_command_that_hangs_is_ended(
    detached: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "never")
    hang = 'sh -c "echo \\$\\$ > pid; exec cat never"'
    monkeypatch.setattr(secrets, "EXEC_TIMEOUT_SECONDS", 1.0)
    # A child of the command that keeps the output open must not keep us waiting either.
    secret = Secret.parse({"exec": ["sh", "-c", f"{hang} &" if detached else hang]}, tmp_path)

    with pytest.raises(ConfigError, match=r"did not finish within 1 s"):
        secret.reveal()
    assert ended(int((tmp_path / "pid").read_text()))


# The published schema


def fits(value: object, schema: dict[str, Any], root: dict[str, Any]) -> bool:
    """As much of JSON Schema as ours uses."""
    if "$ref" in schema:
        schema = root["$defs"][schema["$ref"].rpartition("/")[2]]
    if "anyOf" in schema:
        return any(fits(value, option, root) for option in schema["anyOf"])
    return value in schema.get("enum", [value]) and _type_fits(value, schema, root)


def _type_fits(value: object, schema: dict[str, Any], root: dict[str, Any]) -> bool:
    match value:
        case None | bool():
            return schema.get("type", "any") in ("any", "null" if value is None else "boolean")
        case str():
            return _text_fits(value, schema)
        case int() | float():
            return _number_fits(value, schema)
        case list():
            items = cast("list[object]", value)
            return schema.get("type") == "array" and all(fits(item, schema["items"], root) for item in items)
        case _:
            return _object_fits(cast("dict[str, object]", value), schema, root)


def _text_fits(value: str, schema: dict[str, Any]) -> bool:
    pattern = schema.get("pattern", "")
    long_enough = len(value) >= schema.get("minLength", 0)
    return schema.get("type", "string") == "string" and long_enough and bool(re.search(pattern, value))


def _number_fits(value: float, schema: dict[str, Any]) -> bool:
    if schema.get("type") not in (None, "number", "integer" if isinstance(value, int) else "number"):
        return False
    return schema.get("minimum", value) <= value <= schema.get("maximum", value)


def _object_fits(value: dict[str, object], schema: dict[str, Any], root: dict[str, Any]) -> bool:
    known: dict[str, Any] = schema.get("properties", {})
    others: Any = schema.get("additionalProperties", True)
    if schema.get("type", "object") != "object" or not set(schema.get("required", ())) <= value.keys():
        return False
    rules = {key: known.get(key, others) for key in value}
    return all(
        rule if isinstance(rule, bool) else fits(value[key], rule, root) for key, rule in rules.items()
    )


@pytest.mark.parametrize("name", EXAMPLES)
def test_schema_accepts_the_examples(name: str) -> None:
    schema = build_json_schema()
    assert fits(pyjson5.decode(EXAMPLES[name]), schema, schema)


@pytest.mark.parametrize(
    "raw",
    [
        {"session": {"dmScoop": 1}},
        {"session": {"scope": "x"}},
        {"session": {"agentToAgent": {"maxPingPongTurns": 6}}},
        {"agents": {"list": [{"name": "x"}]}},
        {"hooks": {"token": {"envv": "x"}}},
        {"hooks": {"token": {"exec": "echo key"}}},
        {"agents": {"defaults": {"model": {"primary": 5}}}},
    ],
)
def test_schema_refuses_what_the_loader_refuses(raw: dict[str, Any]) -> None:
    schema = build_json_schema()
    assert not fits(raw, schema, schema)
    refused(raw)


def test_schema_has_titles_and_descriptions_and_is_json() -> None:
    schema = json.loads(json.dumps(build_json_schema()))

    assert (schema["title"], schema["$schema"][:30]) == ("Antiphon config", "https://json-schema.org/draft/")
    assert all(definition.get("description") for definition in schema["$defs"].values())
    turns = schema["$defs"]["AgentToAgentTurns"]["properties"]["maxPingPongTurns"]
    assert (turns["title"], turns["default"], turns["maximum"]) == ("Max ping pong turns", 5, 5)
    assert "sessions_spawn" in schema["$defs"]["ToolsConfig"]["properties"]


# Any content of the file loads or is a ConfigError

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["\ud800", "*", "/", "a\0b", "local/m1", 10**4000, -1, 0]),
    lambda children: (
        st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=5), children, max_size=3)
    ),
    max_leaves=5,
)


def places(node: object) -> Iterator[tuple[Any, Any]]:
    """Every container of a document with each of its keys or indexes."""
    if isinstance(node, dict | list):
        held = cast("Any", node)
        for key in list(held) if isinstance(node, dict) else range(len(held)):
            yield held, key
            yield from places(held[key])


@st.composite
def mutated(draw: st.DrawFn) -> dict[str, Any]:
    document = copy.deepcopy(pyjson5.decode(draw(st.sampled_from([FULL, CONTRACT, RELATED]))))
    for _ in range(draw(st.integers(1, 3))):
        choices = list(places(document))
        if not choices:
            break
        container, key = draw(st.sampled_from(choices))
        change = draw(st.sampled_from(["replace", "remove", "rename", "swap"]))
        if change == "remove":
            del container[key]
        elif change == "rename" and isinstance(key, str):
            container[draw(st.text(max_size=8))] = container.pop(key)
        elif change == "swap":
            container[key] = copy.deepcopy(draw(st.sampled_from([holder[at] for holder, at in choices])))
        else:
            container[key] = draw(json_values)
    return document


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(document=mutated() | json_values)
def test_any_document_loads_or_is_a_config_error(document: object) -> None:
    try:
        config, warnings = parse(document)
    except ConfigError as error:
        assert error.hint
        assert "path" in error.data
        return
    for agent_id in config.agent_ids:
        config.find_model(config.get_model_ref(agent_id))
    assert config.default_agent_id in config.agent_ids
    shown(config)
    assert all(warnings)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    content=st.binary(max_size=40)
    | st.text(alphabet="{}[]:,'\"\\/*+-.0x1eaEn \n", max_size=30).map(str.encode)
)
def test_any_bytes_load_or_are_a_config_error(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "any.json5"
    path.write_bytes(content)
    try:
        load(path)
    except ConfigError as error:
        assert str(path) in str(error) or error.data.get("file") == str(path)


# Cost


def test_importing_the_config_loads_no_model_library() -> None:
    code = (
        "import sys, antiphon.config\n"
        "sys.exit(any(name in sys.modules for name in ('pydantic_ai', 'openai', 'anthropic')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


@pytest.mark.requirement("T2")
@pytest.mark.parametrize("suffix", FOREIGN_KEY_ADVICE)
def test_a_foreign_key_about_tools_says_why_and_what_to_use_instead(suffix: str) -> None:
    places = [
        f"{place}.{key}".removeprefix(".")
        for place, keys in FOREIGN_KEYS.items()
        for key in keys
        if f".{place}.{key}".endswith(f".{suffix}")
    ]
    assert places, "the advice is about no key of the table"
    for place in places:
        section, _, key = place.rpartition(".")
        needed = {"url": "http://localhost/mcp"} if section.endswith("ervers.*") else {}
        raw: Any = (
            within(section.replace("*", "one"), {**needed, key: {"enabled": True}}) if section else {key: {}}
        )
        warnings = [warning for warning in parse(raw)[1] if "has no effect: " in warning]
        assert [warning.endswith(FOREIGN_KEY_ADVICE[suffix]) for warning in warnings] == [True]


@pytest.mark.requirement("M3")
def test_a_default_program_that_no_agent_runs_gives_a_warning_as_related_gateways_have_it() -> None:
    config, warnings = parse({"acp": {"defaultAgent": "codex"}})
    assert config.acp.default_agent == "codex"
    assert [warning for warning in warnings if "'acp.defaultAgent' is 'codex'" in warning]


@pytest.mark.requirement("M3")
@pytest.mark.parametrize("default", ["coder", "codex"])
def test_a_default_program_must_otherwise_be_an_agent_with_one(default: str) -> None:
    agents = {"list": [{"id": "main"}, {"id": "codex"}]}
    with pytest.raises(ConfigError, match="is not an agent with an ACP program"):
        parse({"acp": {"defaultAgent": default}, "agents": agents})
