"""Python functions as tools: `antiphon.tool` marks one, and `tools.python` in the configuration lists them.

A function's signature is its schema and its docstring is its description. A synchronous function runs in a thread
(`_function_threads`). A call that a crash interrupted is reported to the model and not repeated, unless the function
is marked `repeatable`. A call of a function marked `ask` waits until a person allows it.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import stat
import sys
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from hashlib import blake2s
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, TypeVar, cast, get_args, get_origin, get_type_hints, overload

import msgspec

from antiphon.engine.toolbox import ApprovalQuestion, Tool, ToolOutput, ToolRequest, ask_about_arguments
from antiphon.errors import AntiphonError, ConfigError, InvalidInput
from antiphon.runtimes import ToolSpec
from antiphon.runtimes.function import PROCESS_ENDING_ERRORS
from antiphon.tools._adapter import ToolArguments, build_schema, parse_arguments, render_refusal, render_view
from antiphon.tools._function_threads import FunctionThreads

__all__ = ["load_python_tools", "tool"]

MAX_NAME_CHARACTERS = 64
_NAME_PATTERN = re.compile(rf"[A-Za-z_][A-Za-z0-9_-]{{0,{MAX_NAME_CHARACTERS - 1}}}")
_ARGUMENTS_HEADING_PATTERN = re.compile(r"\n\s*(Args|Arguments|Parameters):\s*\n")
_ARGUMENT_LINE_PATTERN = re.compile(r"^(\s*)(\w+)(?:\s*\([^)]*\))?:\s*(.*)$")
_NAMED_KINDS = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_MARK_NAME = "__antiphon_tool__"

F = TypeVar("F", bound=Callable[..., Any])


class _Mark(msgspec.Struct, frozen=True):
    """The options of a function marked as a tool."""

    name: str
    repeatable: bool
    ask: bool


@overload
def tool(function: F) -> F: ...
@overload
def tool(*, name: str | None = None, repeatable: bool = False, ask: bool = False) -> Callable[[F], F]: ...
def tool(
    function: F | None = None, *, name: str | None = None, repeatable: bool = False, ask: bool = False
) -> F | Callable[[F], F]:
    """Mark a function as a tool; it stays an ordinary function.

    Args:
        function: A typed function, asynchronous or not. A parameter of type `ToolRequest` receives the request itself.
        name: The tool's name. Default: the function's.
        repeatable: Whether a call that a crash interrupted may be made again.
        ask: Whether a person must allow each call before it is made.
    """

    def mark(marked: F) -> F:
        setattr(marked, _MARK_NAME, _Mark(name or marked.__name__, repeatable, ask))
        return marked

    return mark if function is None else mark(function)


def load_python_tools(targets: Iterable[str], reserved_names: Collection[str] = ()) -> list[Tool]:
    """Import the functions that `tools.python` names, and return them as tools. Blocks while modules are imported.

    Raises:
        ConfigError: a module could not be imported, a name is not a marked function or a list of them, a signature
            cannot be turned into a schema, or a tool has a reserved name or that of another.
    """
    tools: dict[str, Tool] = {}
    threads = FunctionThreads()
    for number, target in enumerate(targets):
        path = f"tools.python[{number}]"
        module_name, _, attribute = target.rpartition(":")
        for function in _find_functions(_import_module(module_name, path), attribute, target, path):
            built = build_python_tool(function, path, threads)
            if built.spec.name in tools or built.spec.name in reserved_names:
                raise ConfigError(
                    f"{path!r} names a second tool {built.spec.name!r}.",
                    "Give each tool a name of its own with @antiphon.tool(name=…).",
                    path=path,
                )
            tools[built.spec.name] = built
    return list(tools.values())


def build_python_tool(
    function: Callable[..., Any], path: str = "tools.python", threads: FunctionThreads | None = None
) -> Tool:
    """Return a marked function as a tool, which runs in one of `threads` if it is not asynchronous.

    Raises:
        ConfigError: its name or signature cannot be used.
    """
    marked = cast("_Mark", getattr(function, _MARK_NAME))
    if not _NAME_PATTERN.fullmatch(marked.name):
        raise ConfigError(
            f"{path!r} names the tool {marked.name!r}, which is not a valid name.",
            f"Use 1 to {MAX_NAME_CHARACTERS} letters, digits, '_' and '-', and begin with a letter or '_'.",
            path=path,
        )
    description, argument_descriptions = _split_docstring(inspect.getdoc(function) or "")
    if not description:
        raise ConfigError(
            f"{path!r} names the function {marked.name!r}, which has no docstring.",
            "Say in a docstring what it does: the model reads it.",
            path=path,
        )
    arguments, request_name = _build_arguments(function, argument_descriptions, path)
    return Tool(
        spec=ToolSpec(name=marked.name, description=description, parameters=build_schema(arguments)),
        invoke=_build_invoke(function, arguments, request_name, threads or FunctionThreads()),
        after_crash="settle" if marked.repeatable else "report",
        ask=marked.ask,
        needs_approval=_build_question(arguments) if marked.ask else None,
    )


# --- modules ---


def _import_module(name: str, path: str) -> ModuleType:
    try:
        return _import_file(Path(name), path) if name.endswith(".py") else importlib.import_module(name)
    except ConfigError:
        raise
    except FileNotFoundError:
        raise ConfigError(
            f"{path!r} names {name!r}, but there is no such file.",
            "A path is relative to the configuration file.",
            path=path,
        ) from None
    except (Exception, *PROCESS_ENDING_ERRORS) as error:
        raise ConfigError(
            f"{path!r} names {name!r}, which could not be imported ({type(error).__name__}: {error}).",
            "Fix the module, or check its name and PYTHONPATH.",
            path=path,
        ) from error


def _import_file(file: Path, path: str) -> ModuleType:
    mode = file.stat().st_mode
    if mode & stat.S_IWOTH:
        raise ConfigError(
            f"{path!r} names {str(file)!r}, which every user can change (mode {stat.S_IMODE(mode):04o}).",
            f"Run: chmod go-w {str(file)!r}",
            path=path,
        )
    name = f"antiphon_python_tools_{blake2s(str(file).encode(), digest_size=8).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None, "a file that ends in .py has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _find_functions(
    module: ModuleType, attribute: str, target: str, path: str
) -> Sequence[Callable[..., Any]]:
    found: Any = getattr(module, attribute, None)
    functions = cast("Sequence[Any]", found if isinstance(found, list | tuple) else [found])
    if not functions or not all(hasattr(function, _MARK_NAME) for function in functions):
        raise ConfigError(
            f"{path!r} names {target!r}, which is not a function marked with @antiphon.tool, nor a list of them.",
            "Mark each function with @antiphon.tool, and check the name after the colon.",
            path=path,
        )
    return functions


# --- signatures ---


def _build_arguments(
    function: Callable[..., Any], descriptions: dict[str, str], path: str
) -> tuple[type[ToolArguments], str | None]:
    """Return the type of a function's arguments, and the parameter that takes the request itself."""

    def refuse(what: str, hint: str) -> ConfigError:
        return ConfigError(f"{path!r} names the function {function.__name__!r}, {what}.", hint, path=path)

    try:
        hints = get_type_hints(function, include_extras=True)
    except Exception as error:
        raise refuse(f"whose annotations cannot be read ({error})", "Fix its annotations.") from error
    fields: list[tuple[str, Any] | tuple[str, Any, Any]] = []
    request_name = None
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind not in _NAMED_KINDS:
            raise refuse(f"whose parameter {name!r} has no name for callers", "Use named parameters only.")
        if name not in hints:
            raise refuse(f"whose parameter {name!r} has no type", "Annotate it, for example with str.")
        if hints[name] is ToolRequest:
            request_name = name
            continue
        annotation = _describe_annotation(hints[name], descriptions.get(name))
        required = parameter.default is inspect.Parameter.empty
        fields.append((name, annotation) if required else (name, annotation, parameter.default))
    try:
        arguments = msgspec.defstruct(
            f"{function.__name__}_arguments",
            fields,
            bases=(ToolArguments,),
            frozen=True,
            kw_only=True,
            rename=str,
        )
        build_schema(cast("type[ToolArguments]", arguments))
    except (TypeError, ValueError) as error:
        raise refuse(
            f"whose parameters have no JSON form ({error})",
            "Use str, int, float, bool, list, dict or Literal.",
        ) from error
    return cast("type[ToolArguments]", arguments), request_name


def _describe_annotation(annotation: Any, description: str | None) -> Any:
    """Return the annotation with a description for the schema: text in `Annotated`, or the docstring's."""
    if get_origin(annotation) is Annotated:
        inner, *extras = get_args(annotation)
        description = next((extra for extra in extras if isinstance(extra, str)), description)
        kept = [extra for extra in extras if isinstance(extra, msgspec.Meta)]
        annotation = Annotated[inner, *kept] if kept else inner
    return Annotated[annotation, msgspec.Meta(description=description)] if description else annotation


def _split_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Return what a docstring says of the function, and of each argument in its `Args:` section."""
    parts = _ARGUMENTS_HEADING_PATTERN.split(f"\n{text}\n", maxsplit=1)
    descriptions: dict[str, str] = {}
    current, indentation = "", -1
    for line in parts[2].splitlines() if len(parts) > 1 else ():
        matched = _ARGUMENT_LINE_PATTERN.match(line)
        if matched and (indentation < 0 or len(matched[1]) <= indentation):
            indentation, current = len(matched[1]), matched[2]
            descriptions[current] = matched[3].strip()
        elif not line.strip():
            break
        elif current:
            descriptions[current] = f"{descriptions[current]} {line.strip()}".strip()
    return parts[0].strip(), descriptions


# --- calls ---


def _build_question(
    arguments: type[ToolArguments],
) -> Callable[[ToolRequest], Awaitable[ApprovalQuestion | None]]:
    async def find_question(request: ToolRequest) -> ApprovalQuestion | None:
        """Ask about every call that the function would accept; any other is refused unasked."""
        try:
            parse_arguments(arguments, request.arguments)
        except InvalidInput:
            return None
        return ask_about_arguments(request)

    return find_question


def _build_invoke(
    function: Callable[..., Any],
    arguments: type[ToolArguments],
    request_name: str | None,
    threads: FunctionThreads,
) -> Callable[[ToolRequest], Awaitable[ToolOutput]]:
    async def invoke(request: ToolRequest) -> ToolOutput:
        try:
            parsed = parse_arguments(arguments, request.arguments)
        except InvalidInput as error:
            return render_refusal(error)
        values: dict[str, Any] = {name: getattr(parsed, name) for name in arguments.__struct_fields__}
        if request_name is not None:
            values[request_name] = request
        try:
            if inspect.iscoroutinefunction(function):
                result = await function(**values)
            else:
                result = await threads.run(function, values)
        except AntiphonError as error:  # of an embedded use of Antiphon; never an error of this run
            return ToolOutput(text=str(error), is_error=True)
        return _render_result(result)

    return invoke


def _render_result(result: object) -> ToolOutput:
    match result:
        case ToolOutput():
            return result
        case None:
            return ToolOutput(text="Done.")
        case str():
            return ToolOutput(text=result)
        case _:
            return render_view(result)
