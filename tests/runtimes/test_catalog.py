"""Which runtime a configuration means."""

from __future__ import annotations

import pytest

from antiphon.config import parse
from antiphon.runtimes.catalog import Catalog
from antiphon.runtimes.model import ModelRuntime

pytestmark = pytest.mark.anyio


@pytest.mark.requirement("G29")
@pytest.mark.parametrize(
    ("provider", "settings", "api"),
    [
        ("openai", {}, "openai-completions"),
        ("anthropic", {}, "anthropic-messages"),
        ("google", {}, "google-generative-ai"),
        ("anthropic", {"api": "openai-completions"}, "openai-completions"),
        ("local", {"baseUrl": "http://127.0.0.1:9/v1"}, "openai-completions"),
    ],
)
async def test_a_provider_is_spoken_to_in_its_own_language(
    provider: str, settings: dict[str, str], api: str
) -> None:
    """A key sent to the wrong company is a key given away."""
    providers = {provider: {"apiKey": "k", "models": [{"id": "m"}], **settings}}
    config, _ = parse({"models": {"providers": providers}})
    catalog = Catalog(config)
    runtime = await catalog.runtime("main", None)
    assert isinstance(runtime, ModelRuntime)
    assert (runtime.spec.provider, runtime.spec.model, runtime.spec.api) == (provider, "m", api)
    await catalog.aclose()
