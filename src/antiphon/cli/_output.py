"""Prints JSON, tables, and text from conversations that is made safe for a terminal."""

from __future__ import annotations

import os
import re
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import compress
from typing import Any, cast

import click

# How the user calls the program: the launcher of a clone sets it to what was typed, such as ./antiphon.
PROGRAM_NAME = os.environ.get("ANTIPHON_COMMAND") or "antiphon"
MAX_MESSAGE_CHARS = 4000  # of one message in a listing on a terminal; --json prints the whole message
MIN_WRAPPED_CHARS = 32  # narrower texts are stacked
MAX_PADDED_CHARS = 120  # column width in a pipe, enough for any key; longer cells are printed in full
MIN_TEXT_COLUMNS = 24  # beside a speaker's name; with less room, the text begins on the next line
MAX_CALL_CHARS, MAX_BRIEF_CALL_CHARS = 200, 60  # of a tool call's text: in a history, and in a chat
# Arguments of a tool call that name a session or an agent.
TARGET_ARGUMENTS = (
    "label",
    "sessionKey",
    "agentId",
    "target",
    "key",
)
TEXT_ARGUMENTS = ("message", "task", "text", "query")
NEXT_SMALLER_UNIT = {"d": "h", "h": "min", "min": "s"}
_CONTROL_CHARACTERS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_C1_CONTROL_BYTES = re.compile(rb"\xc2([\x80-\x9f])")  # U+0080 to U+009F in UTF-8


_global_options: dict[str, str] = {}
"""The options `--state-dir` and `--config` of this command line; commands in hints need them too."""


def set_global_option(name: str, value: str) -> None:
    """Add an option of the command line to the commands in hints."""
    _global_options[name] = value


def clear_global_options() -> None:
    _global_options.clear()


def format_program() -> str:
    """Return how the user calls the program, with the options that select the state directory and configuration."""
    options = (f"{name} {shlex.quote(value)}" for name, value in sorted(_global_options.items()))
    return " ".join([PROGRAM_NAME, *options])


def is_coloured() -> bool:
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"


def dim(text: str) -> str:
    return f"\033[2m{text}\033[0m" if is_coloured() else text


def bold(text: str) -> str:
    return f"\033[1m{text}\033[0m" if is_coloured() else text


def red(text: str) -> str:
    return f"\033[31m{text}\033[0m" if is_coloured() else text


def clean_text(text: str) -> str:
    """Remove control characters, so that a model's output cannot control the terminal."""
    return _CONTROL_CHARACTERS.sub("\ufffd", text.replace("\r\n", "\n"))


def clean_line(text: str) -> str:
    """Return a name or another short text, cleaned and on one line."""
    return clean_text(text).replace("\n", " ")


def clip_text(text: str, maximum: int = MAX_MESSAGE_CHARS, *, whole: str = "--json") -> str:
    """Return the beginning of a long text, and the option or command that shows the whole."""
    return (
        text
        if len(text) <= maximum
        else f"{text[:maximum]}… ({len(text) - maximum} more characters; see {whole})"
    )


def name_program(text: str) -> str:
    """Return a text in which commands such as `antiphon up` begin as the user calls the program."""
    program = format_program()
    if program == "antiphon":
        return text
    from antiphon.cli import COMMAND_MODULES

    commands = "|".join(COMMAND_MODULES)
    named = re.escape(program.removeprefix("antiphon"))  # some commands in the text are complete already
    return re.sub(
        rf"(?<![\w/.-])antiphon(?!{named})(?= (?:{commands}|COMMAND|--[a-z-]+)\b)", lambda _: program, text
    )


def print_json(value: object, *, compact: bool = False) -> None:
    """Print one JSON value."""
    import msgspec

    encoded = escape_control_characters(msgspec.json.encode(value))
    click.echo(encoded if compact else msgspec.json.format(encoded, indent=2))


def escape_control_characters(encoded: bytes) -> bytes:
    """Escape control characters that JSON allows unescaped but a terminal would interpret."""
    return _C1_CONTROL_BYTES.sub(lambda found: b"\\u00%02x" % found[1][0], encoded)


def format_count(count: int, noun: str, plural: str | None = None) -> str:
    """Format a number with its noun, such as `1 run` and `2 runs`."""
    return f"{count} {noun}" if count == 1 else f"{count} {plural or f'{noun}s'}"


def format_duration(ms: int) -> str:
    """Format a duration in its two largest units."""
    for size, unit in ((86_400_000, "d"), (3_600_000, "h"), (60_000, "min")):
        if ms >= size:
            rest = ms % size * 24 // size if unit == "d" else ms % size * 60 // size
            return f"{ms // size} {unit}" + (f" {rest} {NEXT_SMALLER_UNIT[unit]}" if rest else "")
    return f"{ms // 1000} s"


def format_age(ms: int) -> str:
    """Format how long ago a time is, in its largest unit."""
    seconds = max(0, time.time() - ms / 1000)
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{int(seconds // size)} {unit} ago"
    return "just now"


def format_time(ms: int) -> str:
    """Format a time in the local time zone, to the minute."""
    from datetime import datetime

    return datetime.fromtimestamp(ms / 1000).astimezone().strftime("%Y-%m-%d %H:%M")


def shorten_text(text: str, maximum: int) -> str:
    """Return a text on one line, shortened for a terminal and in full for a pipe."""
    words = " ".join(text.split())
    return words if len(words) <= maximum or not sys.stdout.isatty() else f"{words[: maximum - 1]}…"


def get_terminal_columns() -> int:
    import shutil  # and with it the compression libraries

    return shutil.get_terminal_size().columns


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows in columns, or stacked if the terminal is too narrow for the columns. Cells are never cut.

    If only the last column is too wide for the terminal, its texts are wrapped.
    """
    edge = get_terminal_columns() if sys.stdout.isatty() else None
    cells = [[clean_line(cell) for cell in row] for row in rows]
    if edge is not None:  # a terminal omits empty columns; a pipe keeps them, since scripts read by column
        used = [not cells or any(row[i] for row in cells) for i in range(len(headings))]
        headings, *cells = ([*compress(row, used)] for row in (headings, *cells))
    widths = [max(map(len, column)) for column in zip(headings, *cells, strict=True)]
    if edge is None:  # one long text must not widen every line
        widths = [min(width, MAX_PADDED_CHARS) for width in widths]
    lines = [_align_cells(row, widths) for row in (headings, *cells)]
    if edge is None or max(map(len, lines)) <= edge:
        click.echo("\n".join([bold(lines[0]), *lines[1:]]))
        return
    left = edge - sum(width + 2 for width in widths[:-1])
    if left >= MIN_WRAPPED_CHARS and not any(len(word) > left for row in cells for word in row[-1].split()):
        click.echo(bold(lines[0]))
        for row in cells:
            print_wrapped(_align_cells([*row[:-1], "."], widths)[:-1], row[-1])
        return
    for row in cells:
        click.echo("\n".join(_stack_cells(headings, row, edge)))


def _align_cells(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()


def _stack_cells(headings: Sequence[str], cells: Sequence[str], edge: int) -> list[str]:
    """Return one row on several lines: its first cell, then the others with their headings, as many as fit on a line.

    A word wider than the terminal is not broken, so that a key can be copied.
    """
    import textwrap

    lines = [cells[0] or "-"]
    for heading, cell in list(zip(headings, cells, strict=True))[1:]:
        if not cell:
            continue
        item = f"{heading.lower()} {cell}"
        if len(lines[-1]) + len(item) + 3 <= edge:
            lines[-1] += f" · {item}"
            continue
        lines += textwrap.wrap(
            item,
            edge,
            initial_indent="  ",
            subsequent_indent="    ",
            break_long_words=False,
            break_on_hyphens=False,
        )
    title = cells[0] or "-"
    return [bold(title) + lines[0][len(title) :], *lines[1:]]


def print_wrapped(start: str, text: str, *, width: int | None = None, err: bool = False) -> None:
    """Print a text after its start, on a terminal wrapped between words and indented below itself.

    `width` is that of the start where it contains colours.
    """
    indent = len(start) if width is None else width
    first, *more = _wrap_lines(text, indent, 0, err=err)
    lines = [f"{start}{first}".rstrip(), *(f"{' ' * indent}{rest}".rstrip() for rest in more)]
    click.echo("\n".join(lines), err=err)


def print_fact(name: str, text: str) -> None:
    """Print a name and its text under a heading, with continuation lines indented."""
    print_wrapped(f"  {name:<6} ", clean_text(text))


def print_entry(ms: int | None, speaker: str, text: str, number: int | None = None) -> None:
    """Print an entry of a conversation with its time and speaker, and with continuation lines indented."""
    from datetime import datetime

    at = " " * 8 if ms is None else datetime.fromtimestamp(ms / 1000).astimezone().strftime("%H:%M:%S")
    start = f"{at} " if number is None else f"{number:>5} {at} "
    name = clean_line(speaker)
    first, *more = _wrap_lines(clean_text(text), len(start), len(name) + 1)
    if more and len(start) + len(name) + MIN_TEXT_COLUMNS > get_terminal_columns() and sys.stdout.isatty():
        first, more = "", _wrap_lines(clean_text(text), len(start), 0)
    click.echo(f"{dim(start)}{bold(name)} {first}".rstrip())
    for rest in more:
        click.echo(f"{' ' * len(start)}{rest}".rstrip())


def _wrap_lines(text: str, indent: int, taken: int, *, err: bool = False) -> list[str]:
    """Return the lines of a text, wrapped between words on a terminal."""
    lines = text.split("\n")
    if not (sys.stderr if err else sys.stdout).isatty():
        return lines
    import textwrap

    width = max(20, get_terminal_columns() - indent)
    folded: list[str] = []
    for number, whole in enumerate(lines):
        used = " " * taken if number == 0 else ""  # room for the speaker's name
        if len(used) + len(whole) <= width:
            folded.append(whole)
            continue
        parts = textwrap.wrap(
            whole, width, initial_indent=used, break_long_words=False, break_on_hyphens=False
        ) or [""]
        folded += [parts[0][len(used) :], *parts[1:]]
    return folded


def format_entry_text(item: Mapping[str, Any], *, whole: str = "--json") -> str:
    """Return the text of a history entry as shown to people; `whole` is what shows all of a long one."""
    if item.get("role") == "compaction":
        return clean_text(clip_text(f"(summary of earlier messages) {item.get('summary', '')}", whole=whole))
    content = item.get("content")
    blocks = cast("list[Any]", content) if isinstance(content, list) else [{"type": "text", "text": content}]
    failure = item.get("errorMessage")
    ending = f"({failure})" if item.get("stopReason") == "aborted" else f"Error: {failure}"
    parts = [*map(_format_block, blocks), ending if failure else ""]
    return clean_text(clip_text("\n".join(filter(None, parts)), whole=whole))


def _format_block(block: Any) -> str:
    if not isinstance(block, dict):
        return str(block)
    fields = cast("dict[str, Any]", block)
    match fields.get("type"):
        case "text":
            return str(fields.get("text") or "")
        case "toolCall":
            return f"· {_format_tool_call(fields, MAX_CALL_CHARS, whole=True)}"
        case "thinking":
            return ""
        case other:
            return f"[{other}]"


def format_tool_calls(body: Mapping[str, Any]) -> list[str]:
    """Return the tool calls of a message on one line each: the tool, its target and the text sent to it."""
    content: Any = body.get("content")
    blocks = cast("list[Any]", content) if isinstance(content, list) else []
    found = [cast("dict[str, Any]", block) for block in blocks if isinstance(block, dict)]
    return [
        clean_line(_format_tool_call(block, MAX_BRIEF_CALL_CHARS))
        for block in found
        if block.get("type") == "toolCall"
    ]


def _format_tool_call(block: Mapping[str, Any], maximum: int, *, whole: bool = False) -> str:
    """Format a tool call as `sessions_send → helper: "When does…"`; with `whole`, also its other arguments."""
    raw_arguments: object = block.get("arguments") or {}
    name = str(block.get("name"))
    arguments = cast("dict[str, Any]", raw_arguments) if isinstance(raw_arguments, dict) else {}
    target = next((field for field in TARGET_ARGUMENTS if isinstance(arguments.get(field), str)), None)
    words = next((field for field in TEXT_ARGUMENTS if isinstance(arguments.get(field), str)), None)
    if target is None and words is None:
        return (
            f"{name} {clip_text(_encode_json(cast('Any', raw_arguments)), maximum)}"
            if raw_arguments
            else name
        )
    call = f"{name} → {shorten_session_key(arguments[target])}" if target else name
    if words:
        text = " ".join(arguments[words].split())
        call += f'{":" if target else ""} "{text if len(text) <= maximum else f"{text[: maximum - 1]}…"}"'
    rest = {field: it for field, it in arguments.items() if field not in (target, words)}
    return f"{call} {clip_text(_encode_json(rest), maximum)}" if whole and rest else call


def shorten_session_key(key: str) -> str:
    """Return the agent's id for its main session, else the session key."""
    parts = key.split(":")
    return parts[1] if len(parts) == 3 and parts[0] == "agent" and parts[2] == "main" else key


def format_day(ms: int) -> str:
    return format_time(ms)[:10]


def _encode_json(value: object) -> str:
    import msgspec

    return msgspec.json.encode(value).decode()
