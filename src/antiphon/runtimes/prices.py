"""Computes the cost of an answer from its spec's price, else from the bundled price list.

It takes token counts under their common names; the reader translates the provider's own names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from genai_prices import calc_price
from genai_prices.data_snapshot import get_snapshot

from antiphon.messages import Cost, TokenUsage
from antiphon.runtimes.model import ModelPrice, ModelSpec
from antiphon.runtimes.text import clamp_usage


class Prices:
    """The prices of one spec, whose API is at `url`."""

    def __init__(self, spec: ModelSpec, url: str | None) -> None:
        self._own = spec.price
        self._listed = _find_price_list(spec, url)

    def price_usage(self, counted: Any, model: str, details: Mapping[str, Any] | None) -> TokenUsage:
        """The `counted` tokens with their cost; `details` has other facts of the answer that some prices depend on."""
        read, written = counted.cache_read_tokens or 0, counted.cache_write_tokens or 0
        input_, output = counted.input_tokens or 0, counted.output_tokens or 0
        reported = TokenUsage(
            input=max(input_ - read - written, 0),
            output=output,
            cache_read=read,
            cache_write=written,
            total_tokens=max(input_, read + written) + output,
        )
        usage = clamp_usage(reported)
        if usage != reported:
            return usage  # an impossible count has no price
        if self._own is not None:
            cost = _compute_own_cost(self._own, usage)
        else:
            cost = _compute_listed_cost(self._listed, counted, model, details)
        return msgspec.structs.replace(usage, cost=cost)


def _compute_own_cost(price: ModelPrice, usage: TokenUsage) -> Cost | None:
    """The cost by the spec's own price, or None if tokens without a price were used."""
    parts: dict[str, float] = {}
    for kind in ("input", "output", "cache_read", "cache_write"):
        count, each = getattr(usage, kind), getattr(price, kind)
        if count and each is None:
            return None
        parts[kind] = count * (each or 0.0) / 1e6
    return Cost(total=sum(parts.values()), **parts)


def _find_price_list(spec: ModelSpec, url: str | None) -> str | None:
    """The provider whose bundled prices apply: the owner of the address, else the one with exactly that name.

    A name that merely resembles a known one, or a model that merely has a known name, is not priced.
    """
    snapshot = get_snapshot()
    try:
        return snapshot.find_provider(None, None, url or "").id
    except LookupError:
        return next((provider.id for provider in snapshot.providers if provider.id == spec.provider), None)


def _compute_listed_cost(
    listed: str | None, usage: Any, model: str, details: Mapping[str, Any] | None
) -> Cost | None:
    if listed is None:
        return None
    context = {key: value for key, value in (details or {}).items() if isinstance(value, str) and value}
    try:
        price = calc_price(usage, model, provider_id=listed, price_context=context)
    except (LookupError, ValueError):
        return None
    return Cost(
        total=float(price.total_price), input=float(price.input_price), output=float(price.output_price)
    )
