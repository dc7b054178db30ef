"""Turns an operation into a tool: parses arguments, renders the view, and turns errors into answers.

One closed struct is both the schema shown to the model and the validation of its input. Models write numbers as text,
integers with a decimal point, and null for omitted values. All of that is accepted; an unknown name is refused, because
silently ignoring it would most often ignore what the model wanted.

A result is the same data as text for the model and as a structure for programs. The text is compact JSON: a model reads
the documented names and can pass on a key or a cursor unchanged, and a program behind `/tools/invoke` can parse it.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar, cast

import msgspec

from antiphon import validation_errors
from antiphon.engine.toolbox import Tool, ToolOutput, ToolRequest
from antiphon.errors import AntiphonError, Forbidden, InvalidInput, SendBlocked
from antiphon.runtimes import ToolSpec

MAX_SAFE_INTEGER = 2**53 - 1  # the largest integer that every JSON reader keeps exactly

_PLAIN_TYPE_NAMES = {
    "integer": "a whole number",
    "number": "a number",
    "string": "text",
    "boolean": "true or false",
    "object": "an object",
}
SHOWN_ERROR_DATA = frozenset({"path", "candidates", "reason", "field", "max", "retry_after_ms"})
"""The fields of an error's data that help the model to correct its call."""


class ToolArguments(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """The base of what a tool takes. Constraints in `Meta` refuse; what is clamped is only stated in the schema."""


A = TypeVar("A", bound=ToolArguments)


def build_tool(
    name: str,
    description: str,
    argument_type: type[A],
    run: Callable[[ToolRequest, A], Awaitable[Any]],
    *,
    aliases: Mapping[str, str] | None = None,
    ignored: Collection[str] = (),
    has_side_effects: bool = False,
    is_destructive: bool = False,
    reaches_sessions: bool = True,
    ends_turn: bool = False,
    agents: Callable[[str], Sequence[str]] | None = None,
    unavailable: Callable[[str, bool], str | None] | None = None,
) -> Tool:
    """Build a built-in tool. Calls may be repeated after a crash: reads are harmless, actions are idempotent.

    `aliases` are further names of arguments, as models know them from other programs. They are not in the schema, and
    neither are `ignored` ones, which other programs have and which mean nothing here.
    """
    spec = ToolSpec(name=name, description=description, parameters=build_schema(argument_type))
    return Tool(
        spec=spec,
        invoke=_build_invoke(argument_type, run, aliases or {}, ignored),
        after_crash="settle",
        has_side_effects=has_side_effects,
        is_destructive=is_destructive,
        reaches_sessions=reaches_sessions,
        runs_in_gateway=False,
        ends_turn=ends_turn,
        fit=_build_fit(spec, agents) if agents else None,
        unavailable=unavailable,
    )


def _build_invoke(
    argument_type: type[A],
    run: Callable[[ToolRequest, A], Awaitable[Any]],
    aliases: Mapping[str, str],
    ignored: Collection[str],
) -> Callable[[ToolRequest], Awaitable[ToolOutput]]:
    async def invoke(call: ToolRequest) -> ToolOutput:
        try:
            given = {
                aliases.get(name, name): value
                for name, value in call.arguments.items()
                if name not in ignored
            }
            view = await run(call, parse_arguments(argument_type, given))
            return view if isinstance(view, ToolOutput) else render_view(view)
        except AntiphonError as error:
            if error.who != "caller":  # internal errors are handled by the engine, not shown to the model
                raise
            return render_refusal(error)

    return invoke


def _build_fit(spec: ToolSpec, agents: Callable[[str], Sequence[str]]) -> Callable[[str], ToolSpec]:
    """Return a function that narrows `agentId` to the agents that the calling agent may name."""

    def fit(agent_id: str) -> ToolSpec:
        narrowed = copy.deepcopy(dict(spec.parameters))
        narrowed["properties"]["agentId"]["enum"] = list(agents(agent_id))
        return msgspec.structs.replace(spec, parameters=narrowed)

    return fit


# --- arguments ---


def parse_arguments(shape: type[A], given: Mapping[str, Any]) -> A:
    """Parse the arguments of a call.

    Raises:
        InvalidInput: an argument is unknown, missing, or has a value that is not allowed.
    """
    known = shape.__struct_encode_fields__
    for name in given:
        if name not in known:
            listed = f"The arguments are {', '.join(known)}." if known else "It takes no arguments."
            raise InvalidInput(f"There is no argument {name[:80]!r}.", listed, field=name[:80])
    present = {name: value for name, value in given.items() if value is not None}
    try:
        msgspec.json.encode(present)  # an unpaired surrogate would otherwise only fail in the store
        return msgspec.convert(present, shape, strict=False)
    except msgspec.ValidationError as error:
        raise _build_refusal(shape, error) from None
    except UnicodeEncodeError:
        raise InvalidInput("An argument is not valid Unicode.", "Write it without lone surrogates.") from None


def build_schema(shape: type[ToolArguments]) -> dict[str, Any]:
    """Return the JSON Schema of the arguments without references, which not every provider supports."""
    _, components = msgspec.json.schema_components([shape], ref_template="{name}")
    schema = cast("dict[str, Any]", _inline_references(components[shape.__name__], components))
    # Defaults are still Python values, such as tuples.
    schema = msgspec.json.decode(msgspec.json.encode(schema))
    return {name: value for name, value in schema.items() if name != "description"}


def clamp_value(value: int, minimum: int, maximum: int) -> int:
    return max(minimum, min(value, maximum))


def describe_clamped_range(description: str, minimum: int, maximum: int) -> msgspec.Meta:
    """Describe a number that is clamped: the schema states its range, and exceeding it is no error."""
    return msgspec.Meta(description=description, extra_json_schema={"minimum": minimum, "maximum": maximum})


def _inline_references(node: Any, components: Mapping[str, Any]) -> Any:
    if isinstance(node, list):
        return [_inline_references(item, components) for item in cast("list[Any]", node)]
    if not isinstance(node, dict):
        return node
    found = cast("dict[str, Any]", node)
    if "$ref" in found:
        return _inline_references(components[found["$ref"]], components)
    schema = {
        name: _inline_references(value, components)
        for name, value in found.items()
        if not _is_noise(name, value)
    }
    choices = [choice for choice in schema.pop("anyOf", []) if choice != {"type": "null"}]
    if len(choices) == 1:
        schema = {**choices[0], **schema}
    elif choices:
        schema["anyOf"] = choices
    if "enum" in schema:
        schema.setdefault("type", "string")
    return schema


def _is_noise(name: str, value: Any) -> bool:
    """Whether a schema field is useless to a model: an internal title, a null default, or an empty `required`."""
    return (
        (name == "title" and isinstance(value, str))
        or (name == "default" and value is None)
        or (name == "required" and value == [])
    )


def _build_refusal(shape: type[ToolArguments], error: msgspec.ValidationError) -> InvalidInput:
    issue = validation_errors.parse_validation_error(error)
    if issue.missing and issue.name:
        return InvalidInput(
            f"The argument {issue.name!r} is missing.",
            _describe_allowed_for(shape, issue.name),
            field=issue.name,
        )
    path, reason = validation_errors.split_error(error)
    return InvalidInput(
        f"{path!r} cannot be accepted: {reason}.", _describe_allowed_for(shape, path), field=path
    )


def _describe_allowed_for(shape: type[ToolArguments], path: str) -> str:
    name = re.split(r"[.\[]", path, maxsplit=1)[0]
    known = build_schema(shape).get("properties", {})
    return f"{name!r} takes {_describe_allowed(known[name])}." if name in known else "Fix that argument."


def _describe_allowed(node: Mapping[str, Any]) -> str:
    if "enum" in node:
        return f"one of {', '.join(map(str, node['enum']))}"
    if node.get("type") == "array":
        return f"a list; each item is {_describe_allowed(node['items'])}"
    minimum, maximum = node.get("minimum"), node.get("maximum")
    bounds = f" from {minimum} to {maximum}" if minimum is not None and maximum is not None else ""
    return f"{_PLAIN_TYPE_NAMES.get(str(node.get('type')), 'something else')}{bounds}"


# --- results ---


def render_view(view: Any) -> ToolOutput:
    """Render a view, or plain data that contains views."""
    plain = msgspec.to_builtins(view)
    return ToolOutput(text=msgspec.json.encode(plain).decode(), details=plain)


def render_refusal(error: AntiphonError) -> ToolOutput:
    """Render an error: `forbidden` for a visible target that the caller may not use, otherwise `error`.

    A message blocked by the send policy is an `error` too: the policy is about the target, not about the caller.
    """
    forbidden = isinstance(error, Forbidden) and not isinstance(error, SendBlocked)
    details = {"status": "forbidden" if forbidden else "error", "error": str(error), "code": error.code}
    details |= {name: value for name, value in error.data.items() if name in SHOWN_ERROR_DATA}
    return ToolOutput(text=msgspec.json.encode(details).decode(), details=details, is_error=True)
