"""Reports failures: one sentence and a next step on standard error, and an exit code.

With `--json` the same is one JSON object. Tracebacks are shown only with `--debug`, and written to the log.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import click

from antiphon.cli._output import (
    PROGRAM_NAME,
    clean_text,
    escape_control_characters,
    name_program,
    print_wrapped,
)
from antiphon.errors import AntiphonError, Forbidden, ProviderError, TooManyFailures, Unauthorized

if TYPE_CHECKING:
    from antiphon.operations.types import RunView

INTERRUPTED_EXIT_CODE = 130
MAX_PROBLEMS_SHOWN = 20
ACCESS_HINT = (
    "Pass a valid token with --token-file FILE or in ANTIPHON_TOKEN. "
    "The owner's token is in tokens.json of the gateway's state directory; `antiphon tokens issue` creates others."
)


def report_error(error: Exception, arguments: Sequence[str]) -> int:
    """Print an error and return the exit code.

    The output format is read from `arguments`, because options are not parsed yet when parsing them is what failed.
    """
    if isinstance(error, click.exceptions.Abort):
        return INTERRUPTED_EXIT_CODE
    machine = "--json" in arguments
    if "--debug" in arguments:
        click.echo(clean_text("".join(traceback.format_exception(error))), err=True, nl=False)
    if isinstance(error, AntiphonError):
        _print_error(machine, error.code, error.what, _choose_hint(error), error.data)
        return error.exit_code
    if isinstance(error, click.exceptions.NoArgsIsHelpError) and not machine:
        click.echo(error.format_message())  # a group without a command prints its help
        return 0
    if isinstance(error, click.ClickException):
        _print_error(machine, "usage", error.format_message(), _format_usage_hint(error, arguments), {})
        return error.exit_code
    what = f"Unexpected error ({type(error).__name__}: {error})."
    _print_error(machine, "internal", what, "Run the command again with --debug for details.", {})
    return 1


def _choose_hint(error: AntiphonError) -> str:
    """Return the hint of an error; for a refused token, how to pass one on the command line."""
    if isinstance(error, TooManyFailures):
        return error.hint
    if isinstance(error, Unauthorized) and "code" in error.data:  # from a gateway
        return ACCESS_HINT
    if isinstance(error, Forbidden) and "scope" in error.data:
        return f"{error.hint} Pass it with --token-file FILE or in ANTIPHON_TOKEN."
    return error.hint


def get_run_exit_code(view: RunView) -> int:
    """Return the exit code of a command from the end of its run."""
    if view.state == "ok":
        return 0
    return ProviderError.exit_code if view.error_code == ProviderError.code else 1


def _format_usage_hint(error: click.ClickException, arguments: Sequence[str]) -> str:
    context = error.ctx if isinstance(error, click.UsageError) else None
    return f"Try `{context.command_path if context else _find_command_path(arguments)} --help`."


def _find_command_path(arguments: Sequence[str]) -> str:
    """Return the command that a command line names, for errors that do not know it, such as a missing option value."""
    from antiphon.cli import root

    path, command = [PROGRAM_NAME], cast("click.Command", root)
    for word in arguments:
        found = (
            command.get_command(click.Context(command), word) if isinstance(command, click.Group) else None
        )
        if found is not None:
            path.append(word)
            command = found
    return " ".join(path)


def _print_error(machine: bool, code: str, what: str, hint: str, data: dict[str, Any]) -> None:
    what, hint = name_program(what), name_program(hint)
    if machine:
        error = {"code": code, "message": what, "hint": hint, "data": data}
        click.echo(
            escape_control_characters(json.dumps({"error": error}, ensure_ascii=False, default=str).encode()),
            err=True,
        )
        return
    start = "\033[31mError:\033[0m " if _is_stderr_coloured() else "Error: "
    print_wrapped(start, clean_text(what), width=len("Error: "), err=True)
    if hint:
        print_wrapped("", clean_text(hint), err=True)
    problems = data.get("problems")
    for problem in problems[:MAX_PROBLEMS_SHOWN] if isinstance(problems, list) else []:  # pyright: ignore[reportUnknownVariableType]
        print_wrapped("- ", clean_text(str(problem)), err=True)  # pyright: ignore[reportUnknownArgumentType]


def _is_stderr_coloured() -> bool:
    return sys.stderr.isatty() and "NO_COLOR" not in os.environ
