"""Shared basis of all config sections: strict validation, names on disk, and small value types.

Sections are closed (an unknown key is an error), frozen, and strict: `"5"` is not a number and `1` is not
true. Keys on disk are camelCase and belong to the format; attributes are snake_case.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, Strict
from pydantic.alias_generators import to_camel
from pydantic_core import PydanticCustomError

MAX_NUMBER = 1_000_000_000
"""Upper bound of every count and duration: far beyond any use, and safe for any clock or file size."""

MAX_COMPARED_NAME_CHARACTERS = 64
"""Longest name that is compared with the valid ones; comparing megabytes would take seconds and match nothing."""

MAX_LISTED_OPTIONS = 12
"""Most valid names that an error lists in addition to a suggestion."""


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

Visibility = Literal["self", "tree", "agent", "all"]
Control = Literal["self", "tree"]
Action = Literal["allow", "deny"]
Thinking = Literal["off", "minimal", "low", "medium", "high", "xhigh", "adaptive", "max"]


def find_nearest(word: str, options: Iterable[str], *, alike: float = 0.6) -> str | None:
    """The option most similar to `word`, ignoring case, or None if no similarity reaches `alike` (0 to 1)."""
    if len(word) > MAX_COMPARED_NAME_CHARACTERS:
        return None
    by_lower = {option.lower(): option for option in options}
    found = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=alike)
    return by_lower[found[0]] if found else None


def suggest_options(word: str, options: Sequence[str], *, noun: str, prefix: str = "") -> str:
    """A hint with the nearest option if one is close, and with all options if they are few."""
    near = find_nearest(word, options)
    parts = [f"Did you mean {prefix + near!r}?"] if near else []
    if options and (len(options) <= MAX_LISTED_OPTIONS or not near):
        parts.append(f"Valid {noun}: {', '.join(repr(option) for option in options)}.")
    return " ".join(parts) or f"There are no {noun}."
