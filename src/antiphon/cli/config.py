"""`antiphon config`: whether the configuration can be used, and what may stand in it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from antiphon.cli import output
from antiphon.cli.agents import NO_REACH
from antiphon.cli.settings import Settings, common

if TYPE_CHECKING:
    from antiphon.config import Config, Loaded


@click.group(help="Check the configuration, or print its schema.")
@common
def command() -> None: ...


@command.command()
@common
@click.pass_obj
def check(settings: Settings) -> None:
    """Check the configuration, build what runs need, and print a summary. Exit code 6 if it is not valid."""
    loaded = settings.load()
    _build(loaded)
    lacking = [*missing_secrets(loaded.config)]
    facts = _facts(settings, loaded, lacking)
    if settings.json:
        output.emit(facts)
        return
    for name, fact in _told(settings, facts):
        click.echo(f"{name:<10} {output.clean(fact)}")
    click.echo(
        "Valid, but a required secret is missing (see above)."
        if lacking
        else "The configuration can be used."
    )


def _build(loaded: Loaded) -> None:
    """Refuses a configuration whose runs would all fail."""
    import asyncio

    from antiphon.config.problems import combined
    from antiphon.preflight import find_problems

    if problems := asyncio.run(find_problems(loaded.config)):
        raise combined(problems, str(loaded.path) if loaded.path else None)


def _told(settings: Settings, facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "config", facts["path"] or f"none at {str(settings.paths.config)!r}: the defaults are used"
    yield "state", facts["stateDir"]
    for agent in facts["agents"]:
        marked = " (default)" if agent["default"] else ""
        yield "agent", f"{agent['id']}{marked}, answered by {agent['model']}"
        if len(facts["agents"]) > 1:
            others = [name for name in agent["maySpawn"] if name != agent["id"]]
            yield (
                "",
                f"  may spawn {', '.join(['itself', *others])}; may message {_listed(agent['mayMessage'])}",
            )
    if len(facts["agents"]) > 1 and not any(agent["mayMessage"] for agent in facts["agents"]):
        yield "hint", NO_REACH
    yield "providers", ", ".join(facts["providers"]) or "none: the built-in rehearsal model answers"
    for warning in facts["warnings"]:
        yield "warning", warning


def _listed(names: list[str]) -> str:
    return ", ".join(names) or "no other agent"


def _facts(settings: Settings, loaded: Loaded, lacking: list[str]) -> dict[str, Any]:
    from antiphon.engine.door import Door
    from antiphon.operations.agents import Roster

    config = loaded.config
    cards = Roster(config, Door(config)).cards()
    return {
        "path": str(loaded.path) if loaded.path else None,
        "stateDir": str(settings.paths.state_dir),
        "agents": [
            {
                "id": card.id,
                "default": card.default,
                "model": answerer(loaded, card.id),
                "maySpawn": card.may_spawn,
                "mayMessage": card.may_message,
            }
            for card in cards
        ],
        "providers": list(config.models.providers),
        "warnings": [*loaded.warnings, *lacking],
    }


def missing_secrets(config: Config) -> Iterator[str]:
    """Warnings for secrets that this process lacks; another process may have them, so the configuration is valid."""
    from antiphon.config import secrets_in

    for path, secret in secrets_in(config):
        if trouble := secret.lacks:
            yield f"{path!r} is missing: {trouble}"


def answerer(loaded: Loaded, agent_id: str) -> str:
    """What answers for an agent, in a word."""
    runtime = loaded.config.agent(agent_id).runtime
    if runtime.type == "function":
        return f"function {runtime.target}"
    return loaded.config.model_ref(agent_id)


@command.command()
@common
def schema() -> None:
    """Print the JSON Schema of the configuration, for editors."""
    from antiphon.config import json_schema

    output.emit(json_schema())
