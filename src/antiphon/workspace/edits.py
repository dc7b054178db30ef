"""Changes to text files, computed in memory: exact replacements, and patches of several files.

Nothing here reads or writes a file: `directory` does.
"""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import msgspec

from antiphon.errors import InvalidInput

MAX_LINES_SHOWN = 3  # of the passages most similar to a text that was not found
PATCH_BEGIN, PATCH_END = "*** Begin Patch", "*** End Patch"

_FILE_HEADER_PATTERN = re.compile(r"\*\*\* (Add|Update|Delete) File: (.+)")
_MOVE_PATTERN = re.compile(r"\*\*\* Move to: (.+)")
_END_OF_FILE = "*** End of File"


def replace_text(content: str, old: str, new: str, *, replace_all: bool = False) -> str:
    """Return the content with `old` replaced by `new`.

    Raises:
        InvalidInput: `old` does not occur, or occurs more than once without `replace_all`.
    """
    if not old:
        raise InvalidInput("'oldText' is empty.", "Give the text to replace.", field="oldText")
    if old == new:
        raise InvalidInput("'oldText' and 'newText' are the same.", "Give a different text.", field="newText")
    count = content.count(old)
    if count == 0:
        raise InvalidInput(
            f"'oldText' does not occur in the file.{_describe_similar_lines(content, old)}",
            "Copy the text exactly, with its whitespace.",
            field="oldText",
        )
    if count > 1 and not replace_all:
        raise InvalidInput(
            f"'oldText' occurs {count} times, in lines {_list_line_numbers(content, old)}.",
            "Add surrounding lines to make it unique, or set replaceAll.",
            field="oldText",
        )
    return content.replace(old, new)


def _list_line_numbers(content: str, old: str) -> str:
    numbers: list[str] = []
    position = content.find(old)
    while position >= 0 and len(numbers) < 10:
        numbers.append(str(content.count("\n", 0, position) + 1))
        position = content.find(old, position + len(old))
    return ", ".join(numbers) + ("" if position < 0 else ", …")


def _describe_similar_lines(content: str, old: str) -> str:
    first = next((line.strip() for line in old.splitlines() if line.strip()), "")
    numbered = {line.strip(): n for n, line in reversed(list(enumerate(content.splitlines(), 1)))}
    close = difflib.get_close_matches(first[:200], list(numbered)[:5000], n=MAX_LINES_SHOWN, cutoff=0.6)
    if not close:
        return ""
    shown = "; ".join(f"{numbered[line]}: {line[:120]!r}" for line in close)
    return f" The most similar lines are {shown}."


class Hunk(msgspec.Struct, frozen=True):
    """Consecutive lines to replace; `context` is a line that comes before them."""

    old: tuple[str, ...]
    new: tuple[str, ...]
    context: str | None = None
    at_end: bool = False


class FilePatch(msgspec.Struct, frozen=True):
    """The changes of a patch to one file."""

    action: Literal["add", "update", "delete"]
    path: str
    content: str = ""
    """The content of an added file."""
    hunks: tuple[Hunk, ...] = ()
    move_to: str | None = None

    def apply(self, content: str) -> str:
        """Return the updated content.

        Raises:
            InvalidInput: the lines of a hunk do not occur in the file.
        """
        lines = content.split("\n")
        position = 0
        for number, hunk in enumerate(self.hunks, 1):
            start = _find_hunk(lines, hunk, position)
            if start is None:
                wanted = next(iter(hunk.old), hunk.context or "")
                raise InvalidInput(
                    f"Hunk {number} of {self.path!r} does not match: {wanted[:120]!r} was not found.",
                    "Read the file again and copy its lines exactly.",
                    field="input",
                )
            lines[start : start + len(hunk.old)] = hunk.new
            position = start + len(hunk.new)
        return "\n".join(lines)


def parse_patch(text: str) -> list[FilePatch]:
    """Parse a patch of the form `*** Begin Patch` … `*** End Patch`.

    Raises:
        InvalidInput: it has another form, or names a file twice.
    """
    lines = text.strip().splitlines()
    if len(lines) < 2 or lines[0].strip() != PATCH_BEGIN or lines[-1].strip() != PATCH_END:
        raise _build_syntax_error(f"A patch begins with {PATCH_BEGIN!r} and ends with {PATCH_END!r}.")
    patches = list(_parse_files(lines[1:-1]))
    if not patches:
        raise _build_syntax_error("The patch changes no file.")
    paths = [path for patch in patches for path in (patch.path, patch.move_to) if path]
    if twice := next((path for path in paths if paths.count(path) > 1), None):
        raise _build_syntax_error(f"The patch names {twice!r} twice.")
    return patches


def _parse_files(lines: Sequence[str]) -> Iterator[FilePatch]:
    starts = [n for n, line in enumerate(lines) if _FILE_HEADER_PATTERN.fullmatch(line)]
    if lines and starts[:1] != [0]:
        raise _build_syntax_error(f"{lines[0][:80]!r} is not the header of a file.")
    for start, end in itertools.pairwise([*starts, len(lines)]):
        header = _FILE_HEADER_PATTERN.fullmatch(lines[start])
        assert header is not None
        action, path, body = header[1], header[2].strip(), lines[start + 1 : end]
        match action:
            case "Add":
                if wrong := next((line for line in body if not line.startswith("+")), None):
                    raise _build_syntax_error(
                        f"Lines of an added file begin with '+'; {wrong[:80]!r} does not."
                    )
                yield FilePatch("add", path, "".join(f"{line[1:]}\n" for line in body))
            case "Delete":
                if body:
                    raise _build_syntax_error(
                        f"A deleted file has no lines; {body[0][:80]!r} follows {path!r}."
                    )
                yield FilePatch("delete", path)
            case _:
                move = _MOVE_PATTERN.fullmatch(body[0]) if body else None
                hunks = tuple(_parse_hunks(body[1:] if move else body))
                if not hunks and not move:
                    raise _build_syntax_error(f"The update of {path!r} has no hunk.")
                yield FilePatch("update", path, hunks=hunks, move_to=move[1].strip() if move else None)


def _parse_hunks(lines: Sequence[str]) -> Iterator[Hunk]:
    context: str | None = None
    old: list[str] = []
    new: list[str] = []
    for line in lines:
        if line.startswith("@@"):
            if old or new:
                yield Hunk(tuple(old), tuple(new), context)
                old, new = [], []
            context = line[2:].strip() or None
        elif line == _END_OF_FILE:
            yield Hunk(tuple(old), tuple(new), context, at_end=True)
            context, old, new = None, [], []
        elif line[:1] in (" ", "-", "+", ""):
            if line[:1] != "+":
                old.append(line[1:])
            if line[:1] != "-":
                new.append(line[1:])
        else:
            raise _build_syntax_error(f"Lines of a hunk begin with ' ', '-' or '+'; {line[:80]!r} does not.")
    if old or new:
        yield Hunk(tuple(old), tuple(new), context)


_COMPARISONS: tuple[Callable[[str], str], ...] = (str, str.rstrip, str.strip)
"""How lines are compared: exactly first, then without trailing, then without surrounding whitespace."""


def _find_hunk(lines: Sequence[str], hunk: Hunk, position: int) -> int | None:
    """Return the line at which a hunk begins, at or after `position`."""
    if hunk.context is not None:
        found = _find_lines(lines, [hunk.context], position, at_end=False)
        if found is None:
            return None
        position = found + 1
    if not hunk.old:  # only additions: at the end, or after the context line
        has_final_newline = lines[-1:] == [""]
        return position if hunk.context is not None else len(lines) - has_final_newline
    return _find_lines(lines, hunk.old, position, at_end=hunk.at_end)


def _find_lines(lines: Sequence[str], wanted: Sequence[str], position: int, *, at_end: bool) -> int | None:
    end = len(lines) - (lines[-1:] == [""])
    for normalize in _COMPARISONS:
        expected = [normalize(line) for line in wanted]
        compared = [normalize(line) for line in lines]
        starts = range(position, len(lines) - len(wanted) + 1)
        matches = (start for start in starts if compared[start : start + len(wanted)] == expected)
        found = next((start for start in matches if not at_end or start + len(wanted) >= end), None)
        if found is not None:
            return found
    return None


def _build_syntax_error(what: str) -> InvalidInput:
    return InvalidInput(what, "Fix the patch; nothing was changed.", field="input")
