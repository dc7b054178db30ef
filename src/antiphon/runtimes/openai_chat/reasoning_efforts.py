"""The reasoning efforts that a chat completions model supports.

pydantic-ai knows them too, but takes seconds to import while a request waits. So those of OpenAI's models are
listed here, and a test compares them with the library, which is consulted only for vendors with their own rules.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import cast

import msgspec

from antiphon.runtimes.model import ModelSpec

EFFORTS_BY_LEVEL = {
    "minimal": "minimal",
    "low": "low",
    "medium": "medium",
    "high": "high",
    "xhigh": "xhigh",
    "max": "xhigh",
}
"""The effort for each thinking level except `off`."""

LIBRARY_VENDORS = ("cohere", "google", "groq", "meta", "meta-llama", "mistral", "mistralai", "x-ai")

_EFFORTS_IN_ORDER = ("none", "minimal", "low", "medium", "high", "xhigh")


class _EffortSupport(msgspec.Struct, frozen=True):
    """The efforts that a family of models supports, lowest first."""

    efforts: tuple[str, ...]
    off: str | None
    """Sent for `off`; None sends nothing."""


def _build_support(*efforts: str) -> _EffortSupport:
    return _EffortSupport(efforts, efforts[0])


_FROM_NONE = _build_support("none", "minimal", "low", "medium", "high", "xhigh")
_WITHOUT_MINIMAL = _build_support("none", "low", "medium", "high", "xhigh")
_FROM_LOW = _build_support("low", "medium", "high", "xhigh")
_FROM_MEDIUM = _build_support("medium", "high", "xhigh")
_MEDIUM_ONLY = _build_support("medium")
_UNTIL_HIGH = _build_support("low", "medium", "high")
_CODEX_SUPPORT = _EffortSupport(("minimal", "low", "medium", "high", "xhigh"), off=None)

_SUPPORT_BY_PREFIX: dict[str, _EffortSupport | None] = {
    "gpt-6-astra": _FROM_LOW,
    "gpt-6.1-sol": _FROM_LOW,
    "gpt-6.1-terra": _WITHOUT_MINIMAL,
    "gpt-6-sol": _WITHOUT_MINIMAL,
    "gpt-6-luna": _WITHOUT_MINIMAL,
    "gpt-5.6": _WITHOUT_MINIMAL,
    "gpt-5.5-pro": _FROM_MEDIUM,
    "gpt-5.5": _FROM_NONE,
    "gpt-5.4-pro": _FROM_MEDIUM,
    "gpt-5.4": _FROM_NONE,
    "gpt-5.3-chat": _MEDIUM_ONLY,
    "gpt-5.3": _FROM_NONE,
    "gpt-5.2-pro": _FROM_MEDIUM,
    "gpt-5.2-chat": _MEDIUM_ONLY,
    "gpt-5.2": _FROM_NONE,
    "gpt-5.1-codex": _CODEX_SUPPORT,
    "gpt-5.1-chat": _MEDIUM_ONLY,
    "gpt-5.1": _FROM_NONE,
    "gpt-5-chat": None,
    "gpt-5-pro": _build_support("high"),
    "gpt-5-codex": _CODEX_SUPPORT,
    "gpt-5": _build_support("minimal", "low", "medium", "high"),
    "o1": _UNTIL_HIGH,
    "o3": _UNTIL_HIGH,
    "o4": _UNTIL_HIGH,
}
"""Efforts by model prefix; the first match counts, so longer prefixes come first. Without a match none is sent."""


async def load_reasoning_efforts(spec: ModelSpec) -> Mapping[str, str | None]:
    """What to send for each thinking level: the nearest supported effort, or nothing if the model supports none."""
    if spec.provider == "openai":
        return get_listed_efforts(spec.model)
    vendor, _, model = spec.model.partition("/")
    if model and vendor in LIBRARY_VENDORS:
        return await asyncio.to_thread(load_library_efforts, spec)
    return get_listed_efforts(model if vendor == "openai" and model else spec.model)


def get_listed_efforts(model: str) -> dict[str, str | None]:
    """The efforts of an OpenAI model, or of an unknown one."""
    fitting = (support for prefix, support in _SUPPORT_BY_PREFIX.items() if model.startswith(prefix))
    support = next(fitting, None)
    return _map_nearest_efforts(support) if support else {}


def load_library_efforts(spec: ModelSpec) -> dict[str, str | None]:
    """The efforts according to pydantic-ai. Importing it is slow, so call this off the event loop."""
    from pydantic_ai.profiles.openai import OpenAIModelProfile  # noqa: PLC0415
    from pydantic_ai.providers.openai import OpenAIProvider  # noqa: PLC0415
    from pydantic_ai.providers.openai_compatible import OpenAICompatibleProvider  # noqa: PLC0415

    family = OpenAIProvider if spec.provider == "openai" else OpenAICompatibleProvider
    profile = cast(OpenAIModelProfile, family.model_profile(spec.model) or {})
    always = profile.get("thinking_always_enabled", False)
    if not (profile.get("supports_thinking", False) or always):
        return {}
    taken = profile.get("openai_reasoning_efforts")
    if taken is None:
        least = "minimal" if profile.get("openai_supports_minimal_reasoning_effort", True) else "low"
        return {**EFFORTS_BY_LEVEL, "minimal": least, "off": None if always else "none"}
    accepted = tuple(effort for effort in _EFFORTS_IN_ORDER if effort in taken)
    return _map_nearest_efforts(_build_support(*accepted)) if accepted else {}


def _map_nearest_efforts(support: _EffortSupport) -> dict[str, str | None]:
    """For each level the lowest effort that is not below it, else the highest one."""
    active = [effort for effort in support.efforts if effort != "none"]
    nearest: dict[str, str | None] = {"off": support.off}
    for level, effort in EFFORTS_BY_LEVEL.items():
        enough = (it for it in active if _EFFORTS_IN_ORDER.index(it) >= _EFFORTS_IN_ORDER.index(effort))
        nearest[level] = next(enough, active[-1] if active else None)
    return nearest
