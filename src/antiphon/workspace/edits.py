"""Changes to text files, computed in memory: exact replacements, and patches of several files.

Nothing here reads or writes a file: `directory` does.
"""

from __future__ import annotations

import heapq
import itertools
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import msgspec

from antiphon.errors import InvalidInput, TooLarge

MAX_SIMILAR_LINES_SHOWN = 3  # of the passages most similar to a text that was not found
MAX_LINES_COMPARED = 5000
MAX_COMPARED_CHARACTERS = 200  # of a line
MIN_SIMILARITY = 0.6
MAX_PATCHED_FILES = 100
MAX_HUNKS_PER_FILE = 1000
PATCH_BEGIN, PATCH_END = "*** Begin Patch", "*** End Patch"

_FILE_HEADER_PATTERN = re.compile(r"\*\*\* (Add|Update|Delete) File: (.+)")
_MOVE_PATTERN = re.compile(r"\*\*\* Move to: (.+)")
_END_OF_FILE = "*** End of File"


def replace_text(content: str, old: str, new: str, *, max_characters: int, replace_all: bool = False) -> str:
    """Return the content with `old` replaced by `new`.

    Raises:
        InvalidInput: `old` does not occur, or occurs more than once without `replace_all`.
        TooLarge: the result would have more than `max_characters`, and is not built.
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
    if (size := len(content) + count * (len(new) - len(old))) > max_characters:
        raise TooLarge(
            f"The file would have {size} characters; at most {max_characters} can be written.",
            "Replace fewer occurrences, or use a shorter text.",
            field="newText",
            max=max_characters,
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
    first = next((line.strip() for line in old.split("\n") if line.strip()), "")
    wanted = _list_bigrams(first)
    lines = itertools.islice(re.finditer(r"[^\n]+", content), MAX_LINES_COMPARED)
    number, end = 1, 0
    scored: dict[str, tuple[float, int]] = {}
    for match in lines:
        number += content.count("\n", end, match.start())
        end = match.start()
        line = match[0][:MAX_COMPARED_CHARACTERS].strip()
        if line not in scored:
            scored[line] = _measure_similarity(wanted, _list_bigrams(line)), -number
    close = heapq.nlargest(MAX_SIMILAR_LINES_SHOWN, scored, key=scored.__getitem__)
    shown = [f"{-scored[line][1]}: {line[:120]!r}" for line in close if scored[line][0] >= MIN_SIMILARITY]
    return f" The most similar lines are {'; '.join(shown)}." if shown else ""


def _list_bigrams(line: str) -> set[str]:
    """Return the pairs of neighbouring characters: cheap to compare, unlike the order of all characters."""
    return {line[i : i + 2] for i in range(min(len(line), MAX_COMPARED_CHARACTERS))}


def _measure_similarity(one: set[str], other: set[str]) -> float:
    return 2 * len(one & other) / (len(one) + len(other)) if one and other else 0.0


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
        searches = [
            _LineSearch([normalize(line) for line in lines], normalize) for normalize in _LINE_NORMALIZERS
        ]
        changed: list[str] = []
        position = 0
        for number, hunk in enumerate(self.hunks, 1):
            start = _find_hunk(searches, lines, hunk, position)
            if start is None:
                wanted = next(iter(hunk.old), hunk.context or "")
                raise InvalidInput(
                    f"Hunk {number} of {self.path!r} does not match: {wanted[:120]!r} was not found.",
                    "Read the file again and copy its lines exactly.",
                    field="input",
                )
            changed += [*lines[position:start], *hunk.new]
            position = start + len(hunk.old)
        return "\n".join([*changed, *lines[position:]])


def parse_patch(text: str) -> list[FilePatch]:
    """Parse a patch of the form `*** Begin Patch` … `*** End Patch`.

    Raises:
        InvalidInput: it has another form, or names a file twice.
        TooLarge: it changes too many files, or one of them in too many places.
    """
    lines = re.split(r"\r?\n", text.strip())
    if len(lines) < 2 or lines[0].strip() != PATCH_BEGIN or lines[-1].strip() != PATCH_END:
        raise _build_syntax_error(f"A patch begins with {PATCH_BEGIN!r} and ends with {PATCH_END!r}.")
    patches = list(itertools.islice(_parse_files(lines[1:-1]), MAX_PATCHED_FILES + 1))
    if not patches:
        raise _build_syntax_error("The patch changes no file.")
    hunks = max(len(patch.hunks) for patch in patches)
    if len(patches) > MAX_PATCHED_FILES or hunks > MAX_HUNKS_PER_FILE:
        raise TooLarge(
            f"A patch changes at most {MAX_PATCHED_FILES} files, each in at most {MAX_HUNKS_PER_FILE} places.",
            "Split it.",
            field="input",
        )
    require_distinct_paths([path for patch in patches for path in (patch.path, patch.move_to) if path])
    return patches


def require_distinct_paths(paths: Sequence[str]) -> None:
    """Refuse a patch with two changes of one file, of which the second would undo the first."""
    for path, other in itertools.pairwise(sorted(paths)):
        if path == other:
            raise _build_syntax_error(f"The patch names {path!r} twice.")


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


_LINE_NORMALIZERS: tuple[Callable[[str], str], ...] = (str, str.rstrip, str.strip)
"""How lines are compared: exactly first, then without trailing, then without surrounding whitespace."""


class _LineSearch:
    """Finds consecutive lines in a text whose lines are compared in one way. The search runs in C."""

    def __init__(self, lines: Sequence[str], normalize: Callable[[str], str]) -> None:
        self._normalize = normalize
        self._text = "\n" + "".join(f"{line}\n" for line in lines)
        self._offsets = list(itertools.accumulate((len(line) + 1 for line in lines), initial=0))
        """The position of the newline before each line."""

    def find(self, wanted: Sequence[str], position: int) -> int | None:
        """Return the first line at or after `position` at which the wanted lines begin."""
        passage = "\n" + "".join(f"{self._normalize(line)}\n" for line in wanted)
        offset = self._text.find(passage, self._offsets[position])
        return bisect_left(self._offsets, offset) if offset >= 0 else None


def _find_hunk(
    searches: Sequence[_LineSearch], lines: Sequence[str], hunk: Hunk, position: int
) -> int | None:
    """Return the line at which a hunk begins, at or after `position`."""
    if hunk.context is not None:
        found = _find_lines(searches, [hunk.context], position)
        if found is None:
            return None
        position = found + 1
    end = len(lines) - (lines[-1] == "")  # without the empty line after a final newline
    if not hunk.old:  # only additions: at the end, or after the context line
        return position if hunk.context is not None else max(position, end)
    if hunk.at_end:
        position = max(position, end - len(hunk.old))
    return _find_lines(searches, hunk.old, position)


def _find_lines(searches: Sequence[_LineSearch], wanted: Sequence[str], position: int) -> int | None:
    found = (search.find(wanted, position) for search in searches)
    return next((line for line in found if line is not None), None)


def _build_syntax_error(what: str) -> InvalidInput:
    return InvalidInput(what, "Fix the patch; nothing was changed.", field="input")
