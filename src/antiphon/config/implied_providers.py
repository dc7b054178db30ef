"""Adds well-known providers that a config uses without configuring them: choosing one of their models is enough."""

from __future__ import annotations

from collections.abc import Iterator

from antiphon.config.agents import ModelChoice
from antiphon.config.schema import Config
from antiphon.config.sections import ImpliedProvider

PUBLIC_PROVIDER_KEY_VARIABLES = {
    "openai": "OPENAI_API_KEY",
    "anthropic": "ANTHROPIC_API_KEY",
    "google": "GEMINI_API_KEY",
}
"""Providers whose address is known, and the environment variable that usually holds their key."""


def list_model_choices(config: Config) -> Iterator[tuple[str, ModelChoice]]:
    """Yields every model choice in the config with its path."""
    entries = [(f"agents.list[{index}]", entry) for index, entry in enumerate(config.agents.list)]
    for path, section in (("agents.defaults", config.agents.defaults), *entries):
        if section.model:
            yield f"{path}.model", section.model
        if section.subagents.model:
            yield f"{path}.subagents.model", section.subagents.model


def add_implied_providers(config: Config) -> Config:
    """The config with the implied providers added, each with the models chosen from it."""
    configured = config.models.providers
    chosen: dict[str, list[str]] = {}
    for _, choice in list_model_choices(config):
        name, _, model_id = choice.primary.partition("/")
        if (
            name in PUBLIC_PROVIDER_KEY_VARIABLES
            and name not in configured
            and model_id not in ("", *chosen.get(name, ()))
        ):
            chosen.setdefault(name, []).append(model_id)
    implied = {name: _build_implied_provider(name, ids) for name, ids in chosen.items()}
    models = config.models.model_copy(update={"providers": {**configured, **implied}})
    return config.model_copy(update={"models": models}) if implied else config


def _build_implied_provider(name: str, model_ids: list[str]) -> ImpliedProvider:
    said = {
        "apiKey": {"env": PUBLIC_PROVIDER_KEY_VARIABLES[name]},
        "models": [{"id": model_id} for model_id in model_ids],
    }
    return ImpliedProvider.model_validate(said)
