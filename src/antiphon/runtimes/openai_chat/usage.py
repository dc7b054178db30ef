"""The token counts of a chat completion under their common names, without their cost."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, cast

from genai_prices.data_snapshot import get_snapshot
from genai_prices.types import Provider

from antiphon.runtimes.model import ModelSpec

_Json = dict[str, Any]


class TokenCounters:
    """Reads the token usage reported by the provider of one spec, whose API is at `url`."""

    def __init__(self, spec: ModelSpec, url: str) -> None:
        self._counters = list(_find_counters(spec, url))

    def count_tokens(self, usage: _Json, model: str) -> Any:
        """The usage, or None if it is not readable: providers report cached tokens in different places."""
        known = _drop_nulls(usage)
        for counter in self._counters:
            try:
                _, counted = counter.extract_usage({"model": model, "usage": known}, api_flavor="chat")
            except (LookupError, ValueError, TypeError):
                continue
            details = known.get("prompt_tokens_details")
            written: object = (
                cast(_Json, details).get("cache_write_tokens") if isinstance(details, dict) else None
            )
            if isinstance(written, int):
                counted.cache_write_tokens = written
            return counted
        return None


def _find_counters(spec: ModelSpec, url: str) -> Generator[Provider]:
    """Parsers that may understand this provider's usage, most likely first; most providers follow OpenAI."""
    snapshot = get_snapshot()
    for name, address in ((None, url), (spec.provider, None), ("openai", None)):
        try:
            yield snapshot.find_provider(None, name, address)
        except LookupError:
            continue


def _drop_nulls(usage: _Json) -> _Json:
    return {
        key: _drop_nulls(cast(_Json, value)) if isinstance(value, dict) else value
        for key, value in usage.items()
        if value is not None
    }
