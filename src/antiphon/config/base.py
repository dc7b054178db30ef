"""Shared basis of all config sections: strict validation, names on disk, and small value types.

Sections are closed (an unknown key is an error), frozen, and strict: `"5"` is not a number and `1` is not
true. Keys on disk are camelCase and belong to the format; attributes are snake_case.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, Strict
from pydantic.alias_generators import to_camel
from pydantic_core import PydanticCustomError

from antiphon.messages import ThinkingLevel

BYTES_PER_MIB = 1024 * 1024
MAX_NUMBER = 1_000_000_000
"""Upper bound of every count and duration: far beyond any use, and safe for any clock or file size."""


Location = Sequence[str | int]
"""Keys and list indexes from the top of the config to a value."""


def format_path(location: Location) -> str:
    """Formats a location as a path: `agents.list[0].id`."""
    path = ""
    for step in location:
        if isinstance(step, int):
            path += f"[{step}]"
        else:
            path += f".{step}" if path else step
    return path


def _format_title(name: str, _field: object) -> str:
    return name.replace("_", " ").capitalize()


class Section(BaseModel):
    """A closed part of the config."""

    # Deferred because building forty validators would be most of the cost of importing this package.
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        alias_generator=to_camel,
        field_title_generator=_format_title,
        serialize_by_alias=True,
        hide_input_in_errors=True,
        defer_build=True,
    )


def build_expected_error(text: str) -> PydanticCustomError:
    """Builds a validation error whose text completes "must be …"."""
    return PydanticCustomError("expected", "{text}", {"text": text})


WEB_ADDRESS_PATTERN = r"^https?://[^\s/]"
URL_PATH_PATTERN = r"^/\S*$"
PYTHON_TARGET_PATTERN = r"^([^:]+\.py|[^\W\d][\w.]*):[^\W\d]\w*$"
CALLABLE_TARGET_PATTERN = r"^[^\W\d][\w.]*:[^\W\d][\w.]*$"

_AGENT_ID_PATTERN = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")


def _normalize_agent_id(value: str) -> str:
    lowered = value.strip().lower()
    if not _AGENT_ID_PATTERN.fullmatch(lowered):
        raise build_expected_error(
            "an agent id: up to 64 of a-z, 0-9, '-' and '_', starting with a letter or digit"
        )
    return lowered


def _lower_pattern(value: str) -> str:
    return value.strip().lower()


Count = Annotated[int, Field(ge=1, le=MAX_NUMBER)]
Amount = Annotated[int, Field(ge=0, le=MAX_NUMBER)]
Quantity = Annotated[float, Field(ge=0, le=MAX_NUMBER)]
Days = Annotated[float, Field(gt=0, le=MAX_NUMBER)]
Text = Annotated[str, Field(min_length=1)]
Strings = Annotated[
    tuple[str, ...], Strict(False)
]  # JSON has only lists, which strict mode would reject for a tuple
AgentId = Annotated[str, AfterValidator(_normalize_agent_id)]
AgentPatterns = Annotated[tuple[Annotated[str, AfterValidator(_lower_pattern)], ...], Strict(False)]
"""Agent id patterns, lower-cased for comparison; `*` matches any text."""

ConfiguredThinkingLevel = Literal[ThinkingLevel, "adaptive", "max"]
"""Thinking levels that a config may name; the last two are for configs of related gateways."""
