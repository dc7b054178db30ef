"""`antiphon config`: validates the configuration and prints its schema."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from antiphon.cli import _output
from antiphon.cli._options import Settings, common_options
from antiphon.cli.agents import NO_MESSAGING_HINT

if TYPE_CHECKING:
    from antiphon.config import Config, LoadedConfig


@click.group(help="Check the configuration, or print its schema.")
@common_options
def command() -> None: ...


@command.command()
@common_options
@click.pass_obj
def check(settings: Settings) -> None:
    """Check the configuration, build what runs need, and print a summary. Exit code 6 if it is not valid."""
    loaded = settings.load()
    _raise_preflight_problems(loaded)
    lacking = [*find_missing_secrets(loaded.config)]
    facts = _collect_facts(settings, loaded, lacking)
    if settings.json:
        _output.print_json(facts)
        return
    for name, fact in _format_facts(settings, facts):
        _output.print_wrapped(f"{name:<10} ", _output.clean_text(fact))
    click.echo(
        "Valid, but a required secret is missing (see above)."
        if lacking
        else "The configuration can be used."
    )


def _raise_preflight_problems(loaded: LoadedConfig) -> None:
    """Raise an error for a configuration with which every run would fail."""
    import asyncio

    from antiphon.config.errors import combine_problems
    from antiphon.preflight import find_problems

    if problems := asyncio.run(find_problems(loaded.config)):
        raise combine_problems(problems, str(loaded.path) if loaded.path else None)


def _format_facts(settings: Settings, facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "config", facts["path"] or f"none at {str(settings.paths.config)!r}: the defaults are used"
    yield "state", facts["stateDir"]
    for agent in facts["agents"]:
        marked = " (default)" if agent["default"] else ""
        yield "agent", f"{agent['id']}{marked}, answered by {agent['model']}"
        if len(facts["agents"]) > 1:
            others = [name for name in agent["maySpawn"] if name != agent["id"]]
            yield (
                "",
                f"  may spawn {', '.join(['itself', *others])}; may message {_join_agent_names(agent['mayMessage'])}",
            )
    if len(facts["agents"]) > 1 and not any(agent["mayMessage"] for agent in facts["agents"]):
        yield "hint", NO_MESSAGING_HINT
    yield "providers", ", ".join(facts["providers"]) or "none: the built-in rehearsal model answers"
    for warning in facts["warnings"]:
        yield "warning", warning


def _join_agent_names(names: list[str]) -> str:
    return ", ".join(names) or "no other agent"


def _collect_facts(settings: Settings, loaded: LoadedConfig, lacking: list[str]) -> dict[str, Any]:
    from antiphon.engine.sessions.resolver import SessionResolver
    from antiphon.operations.agents import AgentDirectory

    config = loaded.config
    agents = AgentDirectory(config, SessionResolver(config)).list_summaries()
    return {
        "path": str(loaded.path) if loaded.path else None,
        "stateDir": str(settings.paths.state_dir),
        "agents": [
            {
                "id": agent.id,
                "default": agent.default,
                "model": describe_answering_model(loaded, agent.id),
                "maySpawn": agent.may_spawn,
                "mayMessage": agent.may_message,
            }
            for agent in agents
        ],
        "providers": list(config.models.providers),
        "warnings": [*loaded.warnings, *lacking],
    }


def find_missing_secrets(config: Config) -> Iterator[str]:
    """Yield warnings for missing secrets. Another process may have them, so the configuration is valid."""
    from antiphon.config import Secret, list_secrets

    for path, secret in list_secrets(config):
        if error := secret.availability_error:
            yield f"{path!r} is missing: {error}"
    for name, section in config.enabled_channels.items():
        for account_id, account in section.list_enabled_accounts().items():
            path = section.get_account_path(name, account_id)
            # A token that is written somewhere is one of the secrets above.
            if not any(isinstance(value, Secret) for _, value in account) and (
                missing := account.find_missing_credentials(account_id)
            ):
                yield f"{path!r} cannot connect. {missing}"


def describe_answering_model(loaded: LoadedConfig, agent_id: str) -> str:
    """Return a short description of the model that answers for an agent."""
    runtime = loaded.config.get_agent(agent_id).runtime
    if runtime.type == "function":
        return f"function {runtime.target}"
    if runtime.acp is not None:
        return f"ACP program {runtime.acp.name}"
    return loaded.config.get_model_ref(agent_id)


@command.command()
@common_options
def schema() -> None:
    """Print the JSON Schema of the configuration, for editors."""
    from antiphon.config import build_json_schema

    _output.print_json(build_json_schema())


def format_rehearsal_notice(settings: Settings, loaded: LoadedConfig | None = None) -> str:
    """Return the notice for people whose agent has no model of a provider yet."""
    if loaded is not None and (providers := ", ".join(loaded.config.models.providers)):
        return (
            f"The default agent uses the built-in rehearsal model, not a provider ({providers}): it\n"
            "follows instructions such as `say hello`. To use a real model, name it under\n"
            f"`agents.defaults.model` in {str(settings.paths.config)!r}, as PROVIDER/MODEL,\n"
            f"then run `{_output.format_program()} config check`."
        )
    return (
        "No model provider is configured, so the built-in rehearsal model answers: it\n"
        "follows instructions such as `say hello`. To use a real model, add it under\n"
        f"`models.providers` in {str(settings.paths.config)!r},\n"
        f"then run `{_output.format_program()} config check`."
    )
