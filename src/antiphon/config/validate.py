"""Checks across keys: contradictions, and settings that deserve a warning."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from importlib.util import find_spec
from typing import get_args

from antiphon.command_patterns import has_wildcards, is_wrapper, parse_pattern, runs_programs
from antiphon.config.acp_checks import check_acp, check_program, find_program_warnings
from antiphon.config.addresses import check_store_url, is_ip, is_loopback, parse_bus_addresses
from antiphon.config.agents import merge_loop_detection
from antiphon.config.base import Section, format_path
from antiphon.config.channel_checks import check_channels, find_channel_warnings
from antiphon.config.compat import find_unused_keys
from antiphon.config.errors import Problem
from antiphon.config.mcp_checks import check_servers
from antiphon.config.sandbox import merge_sandbox
from antiphon.config.schema import Config
from antiphon.config.sections import NATIVE_PROVIDER_APIS, PUBLIC_PROVIDER_KEY_VARIABLES
from antiphon.config.tool_lists import find_tool_list_warnings
from antiphon.config.tools import LoopDetectionConfig, UnsupportedSearchProvider
from antiphon.errors import ConfigError, UnknownModel, format_install_hint
from antiphon.keys import REHEARSAL_PROVIDER
from antiphon.validation_errors import suggest_options

GOOGLE_API = "google-generative-ai"  # the only API whose packages are an extra
TAILNET_ERROR = (
    "'gateway.bind' is 'tailnet', but its address cannot be determined, so `up` refuses it.",
    "Use 'custom' and set gateway.customBindHost to an address of this machine.",
)
MIN_SECRET_CHARACTERS = 16  # minimum length of a secret that remote callers could guess
LOCALHOST = "localhost"


def find_contradictions(config: Config) -> list[Problem]:
    """Problems in a well-formed config whose settings contradict each other."""
    return [
        *_check_agents(config),
        *_check_providers(config),
        *_check_models(config),
        *_check_gateway(config),
        *_check_hooks(config),
        *_check_addresses(config),
        *_check_send_rules(config),
        *_check_exec(config),
        *_check_sandbox_networks(config),
        *_check_loop_detection(config),
        *check_servers(config.list_mcp_servers()),
        *check_acp(config),
        *check_channels(config),
    ]


def find_warnings(config: Config) -> Iterator[str]:
    """Warnings for settings that are accepted but that the owner should know about."""
    yield from find_unused_keys(config)
    if config.gateway.bind == "tailnet":
        yield f"{TAILNET_ERROR[0]} {TAILNET_ERROR[1]}"
    yield from _warn_unsupported_sections(config)
    yield from _warn_missing_packages(config)
    yield from _warn_weak_secrets(config)
    yield from _warn_unknown_agents(config)
    yield from find_tool_list_warnings(config)
    if not config.tools.fs.workspace_only:
        yield (
            "'tools.fs.workspaceOnly' is false, but file tools stay inside the workspace. Set 'workspace' of the agent"
            " to a directory that contains the files."
        )
    if (provider := config.tools.web.search.provider) in get_args(UnsupportedSearchProvider):
        yield (
            f"'tools.web.search.provider' is {provider!r}, which is not supported, so 'web_search' is not offered."
            " Use 'brave' or 'searxng'."
        )
    if _lacks_search_service(config):
        yield (
            "'tools.web.search.enabled' is true, but no search service is configured, so 'web_search' is not offered."
            " Set 'apiKey' (Brave Search) or 'searxng.baseUrl' there."
        )
    yield from _warn_short_loop_histories(config)
    yield from _warn_exec(config)
    yield from _warn_allowlists(config)
    yield from _warn_sandboxed_functions(config)
    yield from find_program_warnings(config)
    yield from _warn_container_settings(config)
    yield from _warn_agents_out_of_sight(config)
    yield from _warn_reach_without_effect(config)
    yield from _warn_never_idle(config)
    yield from find_channel_warnings(config)
    for name, provider in config.models.providers.items():
        if not provider.models:
            yield f"'models.providers.{name}.models' is empty, so none of its models can be used. List them there."


def _lacks_search_service(config: Config) -> bool:
    """Whether `web_search` was switched on without a service; by default it is on and needs no warning."""
    search = config.tools.web.search
    is_requested = search.enabled and "enabled" in search.model_fields_set and search.provider is None
    return is_requested and search.api_key is None and search.searxng.base_url is None


def _warn_unsupported_sections(config: Config) -> Iterator[str]:
    for name, block in config.channels.items():
        if not isinstance(block, Section):
            yield f"{format_path(('channels', name))!r} is accepted but has no effect in this release."
    if config.bus.url is not None and config.store.url is None:
        yield "'bus.url' has no effect without 'store.url': a SQLite file has one gateway. Set 'store.url' as well."


def _warn_missing_packages(config: Config) -> Iterator[str]:
    """Warnings for packages that `up`, or the first message to an agent, would not find."""
    if config.store.url is not None and not _is_importable("asyncpg"):
        yield f"'store.url' needs packages that are not installed. {format_install_hint('cluster')}"
    elif config.store.url is not None and config.bus.url is not None and not _is_importable("nats"):
        yield f"'bus.url' needs packages that are not installed. {format_install_hint('cluster')}"
    for name, provider in config.models.providers.items():
        apis = {model.api or provider.api or NATIVE_PROVIDER_APIS.get(name) for model in provider.models}
        if GOOGLE_API in apis and not _is_importable("google.genai"):
            hint = format_install_hint("google")
            yield f"'models.providers.{name}' needs the Google SDK, which is not installed. {hint}"
    for index, agent in enumerate(config.agents.list):
        package = (agent.runtime.target or "").partition(":")[0].partition(".")[0]
        if package and not _is_importable(package):
            yield (
                f"'agents.list[{index}].runtime.target' names the module {package!r}, which cannot be found."
                " Check the name and PYTHONPATH."
            )


def _is_importable(module: str) -> bool:
    """Whether a module could be imported. It is not imported, to avoid its side effects."""
    try:
        return find_spec(module) is not None
    except ImportError:  # raised for the parent package
        return False
    except ValueError:  # already imported, and not from a file
        return True


def _warn_weak_secrets(config: Config) -> Iterator[str]:
    gateway, mode = config.gateway, config.gateway.auth.mode
    secret = gateway.auth.password if mode == "password" else gateway.auth.token
    host = gateway.custom_bind_host or ""
    if gateway.bind in ("loopback", "auto") or (
        gateway.bind == "custom" and (host == LOCALHOST or is_loopback(host))
    ):
        return
    # References are not resolved here.
    if secret is not None and secret.kind == "text" and len(secret.reveal()) < MIN_SECRET_CHARACTERS:
        yield (
            f"'gateway.auth.{mode}' has fewer than {MIN_SECRET_CHARACTERS} characters, and could be guessed"
            f" from other machines, because 'gateway.bind' is {gateway.bind!r}. Set a longer one, for example with"
            " `openssl rand -hex 24`."
        )


def _warn_unknown_agents(config: Config) -> Iterator[str]:
    """Warnings for agents that may be spawned but do not exist."""
    ids = config.agent_ids
    lists = [("agents.defaults", config.agents.defaults.subagents.allow_agents)]
    lists += [
        (f"agents.list[{n}]", agent.subagents.allow_agents) for n, agent in enumerate(config.agents.list)
    ]
    for path, patterns in lists:
        for pattern in patterns or ():
            if not any(fnmatchcase(agent_id, pattern) for agent_id in ids):
                yield (
                    f"'{path}.subagents.allowAgents' names {pattern!r}, but no such agent is configured."
                    f" {suggest_options(pattern, ids, noun='agent ids')}"
                )


def _warn_reach_without_effect(config: Config) -> Iterator[str]:
    """A warning if `agentToAgent` is enabled but no agent's tools can see other agents' sessions."""
    if len(config.agent_ids) < 2 or not config.tools.agent_to_agent.enabled:
        return
    agents = [config.get_agent(agent_id) for agent_id in config.agent_ids]
    sandboxed = any(
        agent.sandbox.mode != "off" and agent.sandbox.session_tools_visibility == "all" for agent in agents
    )
    if not sandboxed and not any("all" in (agent.tools.visibility, agent.tools.send) for agent in agents):
        yield (
            "'tools.agentToAgent.enabled' is true, but agents still reach only their own sessions, because"
            f" 'tools.sessions.visibility' is {config.tools.sessions.visibility!r}. Set it to 'all'."
        )


def _warn_agents_out_of_sight(config: Config) -> Iterator[str]:
    if len(config.agent_ids) < 2 or config.tools.agent_to_agent.enabled:
        return
    own = [
        (f"agents.list[{n}].", agent.tools.sessions.visibility) for n, agent in enumerate(config.agents.list)
    ]
    for path, visibility in [("", config.tools.sessions.visibility), *own]:
        if visibility == "all":
            yield (
                f"'{path}tools.sessions.visibility' is 'all', but sessions of other agents stay invisible while"
                " 'tools.agentToAgent.enabled' is false. Set it to true if agents should reach each other."
            )


def _warn_never_idle(config: Config) -> Iterator[str]:
    session = config.session
    general = session.idle_minutes or (session.reset and session.reset.idle_minutes)
    types = {f"session.resetByType.{kind}": reset for kind, reset in session.reset_by_type}
    channels = {f"session.resetByChannel.{name}": reset for name, reset in session.reset_by_channel.items()}
    inheriting = {} if general else {"session.reset": session.reset, **types}
    for path, reset in {**inheriting, **channels}.items():
        if reset and reset.mode == "idle" and reset.idle_minutes is None:
            yield f"{path!r} has the mode 'idle' but no 'idleMinutes', so no session is reset. Set 'idleMinutes'."


def _check_agents(config: Config) -> Iterator[Problem]:
    seen: dict[str, int] = {}
    for index, entry in enumerate(config.agents.list):
        first = seen.setdefault(entry.id, index)
        path = f"agents.list[{index}]"
        if first != index:
            what = f"Agent id {entry.id!r} is used by both 'agents.list[{first}]' and {path!r}."
            yield Problem(f"{path}.id", what, "Give each agent a unique id.")
        if (entry.runtime.type == "function") != (entry.runtime.target is not None):
            what = f"{path + '.runtime'!r} must have a 'target' if, and only if, its 'type' is 'function'."
            yield Problem(f"{path}.runtime.target", what)
        yield from check_program(f"{path}.runtime", entry.runtime)
    marked = [index for index, entry in enumerate(config.agents.list) if entry.default]
    if len(marked) > 1:
        paths = " and ".join(f"'agents.list[{index}]'" for index in marked)
        what = f"More than one agent is marked as default: {paths}."
        yield Problem(f"agents.list[{marked[1]}].default", what, "Keep 'default: true' on one of them.")


def _check_providers(config: Config) -> Iterator[Problem]:
    for name, provider in config.models.providers.items():
        path = f"models.providers.{name}"
        if name == REHEARSAL_PROVIDER:
            yield Problem(
                path, f"The provider name {name!r} is reserved.", "Use another name for your provider."
            )
        if not name or "/" in name or name != name.strip():
            what = f"The provider name {name!r} is empty, contains '/' or has spaces around it."
            yield Problem(path, what, "Models are named 'provider/model', so choose a name without '/'.")
        if provider.base_url is None and name not in (*PUBLIC_PROVIDER_KEY_VARIABLES, REHEARSAL_PROVIDER):
            what = f"The provider {name!r} needs an address: {path + '.baseUrl'!r} is not set."
            known = ", ".join(map(repr, PUBLIC_PROVIDER_KEY_VARIABLES))
            yield Problem(f"{path}.baseUrl", what, f"Set it. Only {known} have a default address.")
        ids = [model.id for model in provider.models]
        for model_id in sorted({model_id for model_id in ids if ids.count(model_id) > 1}):
            yield Problem(f"{path}.models", f"Model {model_id!r} is listed twice in {path!r}.", "Remove one.")


def _check_models(config: Config) -> Iterator[Problem]:
    for path, choice in config.list_model_choices():
        ref = choice.primary
        try:
            config.find_model(ref)
        except UnknownModel as error:
            what = f"Value of {path!r} names the model {ref!r}, which 'models.providers' does not configure."
            yield Problem(path, what, error.hint)


def _check_gateway(config: Config) -> Iterator[Problem]:
    gateway = config.gateway
    if gateway.bind == "custom" and gateway.custom_bind_host is None:
        what = "'gateway.bind' is 'custom' but 'gateway.customBindHost' is not set."
        yield Problem("gateway.customBindHost", what, "Set the address to listen on.")
    host = gateway.custom_bind_host
    if gateway.bind == "custom" and host is not None and host != LOCALHOST and not is_ip(host):
        what = f"Value of 'gateway.customBindHost' must be an IP address or {LOCALHOST!r}; {host[:80]!r} was given."
        yield Problem(
            "gateway.customBindHost", what, "Set an address of this machine, such as '192.168.1.2'."
        )
    if gateway.auth.mode == "none" and gateway.bind != "loopback":
        what = "'gateway.auth.mode' may be 'none' only while 'gateway.bind' is 'loopback'."
        yield Problem("gateway.auth.mode", what, "Use 'token' or 'password'.")
    if gateway.auth.mode == "password" and gateway.auth.password is None:
        what = "'gateway.auth.mode' is 'password' but 'gateway.auth.password' is not set."
        yield Problem("gateway.auth.password", what, "Set it, or use the mode 'token'.")


def _check_hooks(config: Config) -> Iterator[Problem]:
    if config.hooks.enabled and config.hooks.token is None:
        what = "'hooks.enabled' is true but 'hooks.token' is not set."
        yield Problem("hooks.token", what, "Set a token that only the senders of hooks know.")


def _check_addresses(config: Config) -> Iterator[Problem]:
    """Checks the addresses written in the config; references are checked when they are resolved."""
    for secret, check in ((config.store.url, check_store_url), (config.bus.url, parse_bus_addresses)):
        if secret is not None and secret.kind == "text":
            try:
                check(secret.reveal())
            except ConfigError as error:
                yield Problem(error.data["path"], error.what, error.hint)


def _check_send_rules(config: Config) -> Iterator[Problem]:
    for index, rule in enumerate(config.session.send_policy.rules):
        if rule.match.channel and rule.match.surface and rule.match.channel != rule.match.surface:
            path = f"session.sendPolicy.rules[{index}].match"
            what = f"'channel' and 'surface' of {path!r} are two names for the same thing but differ."
            yield Problem(f"{path}.surface", what, "Keep 'channel'.")


def _check_exec(config: Config) -> Iterator[Problem]:
    """Commands on this machine must be enabled explicitly: 'security' has no default for them."""
    levels = [("tools.exec", config.tools.exec)]
    levels += [
        (f"agents.list[{n}].tools.exec", agent.tools.exec) for n, agent in enumerate(config.agents.list)
    ]
    for path, own in levels:
        host, security = own.host or config.tools.exec.host, own.security or config.tools.exec.security
        if host == "gateway" and security is None and (own.host is not None or path == "tools.exec"):
            yield Problem(
                f"{path}.security",
                f"{path + '.host'!r} is 'gateway', so commands run on this machine without protection, but"
                f" {path + '.security'!r} is not set.",
                "Set it to 'allowlist' or 'full', or use the host 'sandbox'.",
            )


def _check_sandbox_networks(config: Config) -> Iterator[Problem]:
    """Hosts that no command would reach, and networks that a backend cannot limit to them."""
    defaults = config.agents.defaults.sandbox
    levels = [("agents.defaults.sandbox", defaults, defaults)]
    levels += [
        (f"agents.list[{n}].sandbox", agent.sandbox, merge_sandbox(defaults, agent.sandbox))
        for n, agent in enumerate(config.agents.list)
    ]
    for path, own, merged in levels:
        if own.allow_hosts and merged.network != "proxy":
            yield Problem(
                f"{path}.allowHosts",
                f"{path + '.allowHosts'!r} lists hosts, but 'network' is 'none', so no command could reach them.",
                "Set 'network' there to 'proxy', or remove the hosts.",
            )
        weak = next((name for name in (merged.backend, merged.fallback) if name not in ("bwrap", None)), None)
        if merged.network == "proxy" and weak and {"network", "backend", "fallback"} & own.model_fields_set:
            yield Problem(
                f"{path}.network",
                f"'network' of {path!r} is 'proxy', which the backend {weak!r} cannot enforce.",
                "Use the backend 'bwrap' without a 'fallback', or the network 'none'.",
            )


def _check_loop_detection(config: Config) -> Iterator[Problem]:
    """Thresholds in the wrong order, of which one would never be reached."""
    for path, own in _list_loop_detections(config):
        limits = merge_loop_detection(own, config.tools.loop_detection)
        if limits is None:
            continue
        counts = (
            limits.warning_threshold,
            limits.critical_threshold,
            limits.global_circuit_breaker_threshold,
        )
        if list(counts) != sorted(set(counts)):
            yield Problem(
                path,
                f"The thresholds of {path!r} are not in order: warning {counts[0]}, critical {counts[1]}, circuit"
                f" breaker {counts[2]}.",
                "Use warningThreshold < criticalThreshold < globalCircuitBreakerThreshold.",
            )


def _warn_short_loop_histories(config: Config) -> Iterator[str]:
    """Warnings for histories that would be forgotten before the circuit breaker trips."""
    general = config.tools.loop_detection
    for path, own in _list_loop_detections(config):
        limits = merge_loop_detection(own, general)
        asked = own.history_size or general.history_size
        if limits is not None and asked is not None and asked < limits.history_size:
            yield (
                f"'{path}.historySize' is {asked}, but the circuit breaker needs the last {limits.history_size} calls,"
                f" so {limits.history_size} count. Raise it, or lower 'globalCircuitBreakerThreshold'."
            )


def _list_loop_detections(config: Config) -> Iterator[tuple[str, LoopDetectionConfig]]:
    """The section for all agents, and those of agents that change it."""
    yield "tools.loopDetection", config.tools.loop_detection
    for number, agent in enumerate(config.agents.list):
        if agent.tools.loop_detection.model_fields_set:
            yield f"agents.list[{number}].tools.loopDetection", agent.tools.loop_detection


def _warn_exec(config: Config) -> Iterator[str]:
    """Warnings for hosts that do not exist here, and for commands on this machine that run unasked."""
    for agent_id in config.agent_ids:
        settings = config.get_agent(agent_id).exec
        if settings.host == "node":
            yield (
                f"'tools.exec.host' of the agent {agent_id!r} is 'node', which does not exist here, so the agent has no"
                " commands. Use 'sandbox' or 'gateway'."
            )
        if settings.host == "gateway" and settings.security == "full" and settings.ask == "off":
            yield (
                f"The agent {agent_id!r} runs every command on this machine unasked ('tools.exec'). Set 'ask' to"
                " 'on-miss', or 'host' to 'sandbox'."
            )


def _warn_allowlists(config: Config) -> Iterator[str]:
    """Warnings for listed programs of which few commands are covered, since they can run others."""
    levels = [("tools.exec", config.tools.exec)]
    levels += [
        (f"agents.list[{n}].tools.exec", agent.tools.exec) for n, agent in enumerate(config.agents.list)
    ]
    for path, own in levels:
        for pattern in own.allowlist or ():
            program, *arguments = parse_pattern(pattern)
            if is_wrapper(program) and (not arguments or has_wildcards(pattern)):
                yield (
                    f"'{path}.allowlist' has {pattern!r}, but {program!r} runs what its arguments say, so this entry"
                    " covers nothing. List whole commands without '*' and '...'."
                )
            elif not arguments and runs_programs(program):
                yield (
                    f"'{path}.allowlist' has {pattern!r}, but arguments can make {program!r} run other programs, so"
                    f" this entry covers only {program!r} without any. List whole commands, such as"
                    f" '{program} --version'."
                )


def _warn_container_settings(config: Config) -> Iterator[str]:
    """Warnings for settings of containers where another backend was chosen."""
    defaults = config.agents.defaults.sandbox
    levels = [("agents.defaults", defaults, defaults)]
    levels += [
        (f"agents.list[{n}]", agent.sandbox, merge_sandbox(defaults, agent.sandbox))
        for n, agent in enumerate(config.agents.list)
    ]
    for path, own, merged in levels:
        if own.docker.model_fields_set and merged.backend not in (None, "docker"):
            yield (
                f"'{path}.sandbox.docker' has no effect, because 'backend' is {merged.backend!r}. Set it to 'docker',"
                " or remove the settings of containers."
            )


def _warn_sandboxed_functions(config: Config) -> Iterator[str]:
    """Warnings for functions that are to be sandboxed, although they run in the gateway's own process."""
    for index, agent_id in enumerate(config.agent_ids):
        agent = config.get_agent(agent_id)
        if agent.runtime.type == "function" and agent.sandbox.mode != "off":
            which = "sessions" if agent.sandbox.mode == "all" else "sessions other than its main session"
            yield (
                f"Agent {agent_id!r} is a Python function, which cannot be sandboxed, and its 'sandbox.mode' is"
                f" {agent.sandbox.mode!r}, so its {which} are refused."
                f" Set 'agents.list[{index}].sandbox.mode' to 'off', or let a model answer."
            )
