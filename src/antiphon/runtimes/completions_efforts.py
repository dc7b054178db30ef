"""The reasoning efforts that a chat completions model takes.

Which model takes which is known to pydantic-ai, which is slow to import: it is imported by the call, not by this
module.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from antiphon.runtimes.model import ModelSpec


def reasoning_efforts(spec: ModelSpec) -> dict[str, str | None]:
    """What to send for each level of thinking: the nearest effort the model takes, or nothing if it takes none."""
    from pydantic_ai.profiles.openai import OPENAI_REASONING_EFFORT_MAP, OpenAIModelProfile  # noqa: PLC0415
    from pydantic_ai.providers.openai import OpenAIProvider  # noqa: PLC0415
    from pydantic_ai.providers.openai_compatible import OpenAICompatibleProvider  # noqa: PLC0415

    family = OpenAIProvider if spec.provider == "openai" else OpenAICompatibleProvider
    profile = cast(OpenAIModelProfile, family.model_profile(spec.model) or {})
    always = profile.get("thinking_always_enabled", False)
    if not (profile.get("supports_thinking", False) or always):
        return {}
    levels = {str(level): str(effort) for level, effort in OPENAI_REASONING_EFFORT_MAP.items() if level}
    taken = profile.get("openai_reasoning_efforts")
    if taken is None:
        least = "minimal" if profile.get("openai_supports_minimal_reasoning_effort", True) else "low"
        return {**levels, "minimal": least, "off": None if always else OPENAI_REASONING_EFFORT_MAP[False]}
    most = profile.get("openai_chat_supports_max_reasoning_effort", False)
    return _nearest(levels, [it for it in _EFFORTS if it in taken and (it != "max" or most)])


_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


def _nearest(levels: Mapping[str, str], accepted: list[str]) -> dict[str, str | None]:
    """For each level the least effort that is not below it, else the most there is; for none, the least."""
    active = [effort for effort in accepted if effort != "none"]
    nearest: dict[str, str | None] = {"off": next(iter(accepted), None)}
    for level, effort in levels.items():
        enough = (it for it in active if _EFFORTS.index(it) >= _EFFORTS.index(effort))
        nearest[level] = next(enough, active[-1] if active else None)
    return nearest
