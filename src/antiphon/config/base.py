"""What every config section shares: strictness, names on disk, and the small value types.

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

LARGEST = 1_000_000_000
"""Upper bound of every count and duration: far beyond use, and small enough for any clock or file size."""

LONGEST_NAME = 64
"""Characters of a name that others are compared with: megabytes would take seconds, and be like nothing."""

FEW = 12
"""As many valid names as an error lists although it already suggests one."""


def _title(name: str, _field: object) -> str:
    return name.replace("_", " ").capitalize()


class Section(BaseModel):
    """A closed part of the config."""

    # Deferred, because building forty validators would be most of the cost of importing this package.
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        alias_generator=to_camel,
        field_title_generator=_title,
        serialize_by_alias=True,
        hide_input_in_errors=True,
        defer_build=True,
    )


def expected(text: str) -> PydanticCustomError:
    """A validation error whose text completes "must be …"."""
    return PydanticCustomError("expected", "{text}", {"text": text})


WEB_ADDRESS = r"^https?://[^\s/]"
URL_PATH = r"^/\S*$"
TARGET = r"^[^\W\d][\w.]*:[^\W\d][\w.]*$"

_AGENT_ID = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")


def _agent_id(value: str) -> str:
    lowered = value.strip().lower()
    if not _AGENT_ID.fullmatch(lowered):
        raise expected("an agent id: up to 64 of a-z, 0-9, '-' and '_', starting with a letter or digit")
    return lowered


def _lowered(value: str) -> str:
    return value.strip().lower()


Count = Annotated[int, Field(ge=1, le=LARGEST)]
Amount = Annotated[int, Field(ge=0, le=LARGEST)]
Quantity = Annotated[float, Field(ge=0, le=LARGEST)]
Days = Annotated[float, Field(gt=0, le=LARGEST)]
Text = Annotated[str, Field(min_length=1)]
Strings = Annotated[tuple[str, ...], Strict(False)]  # JSON has lists only, and strictness would refuse them
AgentId = Annotated[str, AfterValidator(_agent_id)]
AgentPatterns = Annotated[tuple[Annotated[str, AfterValidator(_lowered)], ...], Strict(False)]
"""Agent ids as compared: lower-cased, `*` for any."""

Visibility = Literal["self", "tree", "agent", "all"]
Control = Literal["self", "tree"]
Action = Literal["allow", "deny"]
Thinking = Literal["off", "minimal", "low", "medium", "high", "xhigh", "adaptive", "max"]


def nearest(word: str, options: Iterable[str], *, alike: float = 0.6) -> str | None:
    """The option most like `word`, ignoring case; None when nothing is close. `alike` is how close, of 1."""
    if len(word) > LONGEST_NAME:
        return None
    by_lower = {option.lower(): option for option in options}
    found = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=alike)
    return by_lower[found[0]] if found else None


def suggestion(word: str, options: Sequence[str], *, noun: str, prefix: str = "") -> str:
    """What to try instead: the nearest option when one is close, and all of them when they are few."""
    near = nearest(word, options)
    parts = [f"Did you mean {prefix + near!r}?"] if near else []
    if options and (len(options) <= FEW or not near):
        parts.append(f"Valid {noun}: {', '.join(repr(option) for option in options)}.")
    return " ".join(parts) or f"There are no {noun}."
