"""Readable errors for an invalid config: the key, what is allowed, and what was given.

The given value is shown only where it cannot be a secret: not for secret keys, not next to them (except a plain
word where an enumeration was expected), and not where an object was expected.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, get_args, get_origin

import msgspec
from pydantic import BaseModel
from pydantic_core import ErrorDetails

from antiphon.config.base import (
    CALLABLE_TARGET_PATTERN,
    PYTHON_TARGET_PATTERN,
    URL_PATH_PATTERN,
    WEB_ADDRESS_PATTERN,
    Location,
    format_path,
)
from antiphon.config.channels import load_channel_model
from antiphon.config.schema import Config
from antiphon.config.secrets import Secret
from antiphon.errors import ConfigError
from antiphon.validation_errors import suggest_options


class Problem(msgspec.Struct, frozen=True):
    """One problem to fix. `hint` is empty if `what` already says what is allowed."""

    path: str
    what: str
    hint: str = ""

    def __str__(self) -> str:
        return f"{self.what} {self.hint}".rstrip()


def combine_problems(problems: Sequence[Problem], file: str | None) -> ConfigError:
    """Combines all problems into one error: the first in the message, the others in `data['problems']`."""
    first, *rest = problems
    more = f" ({len(rest)} more in the same config.)" if rest else ""
    return ConfigError(
        first.what + more,
        first.hint or f"Fix it{f' in {file!r}' if file else ''} and try again.",
        path=first.path,
        file=file,
        problems=[str(problem) for problem in rest],
    )


def build_problems(errors: Iterable[ErrorDetails]) -> list[Problem]:
    """Converts pydantic's validation errors to problems."""
    return [_build_problem(error) for error in errors]


def _build_problem(error: ErrorDetails) -> Problem:
    location = error["loc"]
    path = format_path(location)
    holder = _find_section(location[:-1])
    if error["type"] == "extra_forbidden":
        return _build_unknown_key_problem(path, location, holder)
    if error["type"] == "missing":
        return Problem(path, f"Key {path!r} is missing.", "Set it.")
    given = _format_input(error["input"], shown=_can_show_input(error, location, holder))
    return Problem(path, f"Value of {path!r} must {_format_demand(error)}; {given} was given.")


def _build_unknown_key_problem(path: str, location: Location, holder: type[BaseModel] | None) -> Problem:
    keys = [field.alias or name for name, field in holder.model_fields.items()] if holder else []
    key = str(location[-1])
    hint = suggest_options(key, keys, noun="keys here", prefix=path.removesuffix(key))
    return Problem(path, f"Key {path!r} is not known.", hint)


_ALLOWED_BY_ERROR_TYPE = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text",
    "string_unicode": "valid Unicode text",
    "string_too_short": "text that is not empty",
    "dict_type": "an object",
    "model_type": "an object",
    "tuple_type": "a list",
    "literal_error": "{expected}",
    "greater_than_equal": "at least {ge:g}",
    "greater_than": "more than {gt:g}",
    "less_than_equal": "at most {le:,}",
    "expected": "{text}",
    "secret": "a secret: {text}",
}

_FORMS_BY_PATTERN = {
    WEB_ADDRESS_PATTERN: "begin with http:// or https://",
    URL_PATH_PATTERN: "begin with '/' and have no spaces",
    PYTHON_TARGET_PATTERN: "have the form './file.py:name' or 'package.module:name'",
    CALLABLE_TARGET_PATTERN: "have the form 'package.module:callable'",
}
"""Descriptions of the patterns, so that errors do not show regular expressions."""

_WORD_PATTERN = re.compile(r"[A-Za-z]{1,16}(-[A-Za-z]{1,16}){0,3}")
"""Matches a plain word such as an enumeration value; keys and passwords hardly ever match."""

_HIDDEN_ERROR_TYPES = {"secret", "dict_type", "model_type", "tuple_type"}

_TYPE_NAMES: dict[type, str] = {
    type(None): "null",
    bool: "true or false",
    int: "a number",
    float: "a number",
    str: "text",
    list: "a list",
}


def _format_demand(error: ErrorDetails) -> str:
    """The requirement that was violated, as text that completes "must …"."""
    context = error.get("ctx", {})
    if error["type"] == "string_pattern_mismatch":
        return _FORMS_BY_PATTERN[context["pattern"]]
    form = _ALLOWED_BY_ERROR_TYPE.get(error["type"])
    return f"be {form.format(**context)}" if form else f"be valid ({error['msg']})"


def _can_show_input(error: ErrorDetails, location: Location, holder: type[BaseModel] | None) -> bool:
    if error["type"] in _HIDDEN_ERROR_TYPES or location[:1] == ("channels",):
        return False
    given: object = error["input"]
    if error["type"] == "literal_error" and isinstance(given, str) and _WORD_PATTERN.fullmatch(given):
        return True
    return not (holder and any(_has_secret(field.annotation) for field in holder.model_fields.values()))


def _format_input(value: object, *, shown: bool) -> str:
    if isinstance(value, bool):
        return str(value).lower() if shown else _TYPE_NAMES[bool]
    # Python refuses to print very long integers, and a long string would bury the message.
    short = isinstance(value, float | str) or (isinstance(value, int) and abs(value) < 10**30)
    if shown and short and len(text := repr(value)) <= 80:
        return text
    return _TYPE_NAMES.get(type(value), "an object")


def _find_section(location: Location) -> type[BaseModel] | None:
    """The section class at a location; lists and objects of sections take one more step."""
    section: type[BaseModel] | None = Config
    collection = False
    if location[:1] == ("channels",) and len(location) > 1:
        section, location = load_channel_model(str(location[1])), location[2:]
    for step in location:
        if collection or section is None:
            collection = False
            continue
        fields = section.model_fields.items()
        annotation = next((field.annotation for name, field in fields if step == (field.alias or name)), None)
        section, collection = _find_section_in_annotation(annotation), get_origin(annotation) in (dict, tuple)
    return section


def _find_section_in_annotation(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(
        (found for argument in get_args(annotation) if (found := _find_section_in_annotation(argument))), None
    )


def _has_secret(annotation: Any) -> bool:
    return annotation is Secret or any(_has_secret(argument) for argument in get_args(annotation))
