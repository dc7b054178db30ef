"""The notes of an agent: `MEMORY.md` and `memory/*.md` of its workspace.

The files are searched as they are, without an index, which is fast enough for what an agent writes. What is read is
bounded; the newest notes come first, since the names of daily notes are dates.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import msgspec

from antiphon.access import Caller
from antiphon.errors import AntiphonError, InvalidInput, NotFound
from antiphon.workspace.directory import WorkspaceDirectory
from antiphon.workspace.locations import SessionWorkspace

MEMORY_FILE_NAME, MEMORY_DIRECTORY_NAME, MEMORY_SUFFIX = "MEMORY.md", "memory", ".md"
MAX_MEMORY_FILES = 500
MAX_FILE_BYTES = 1024 * 1024
MAX_SEARCHED_BYTES = 8 * 1024 * 1024
MAX_QUERY_CHARACTERS = 400
MAX_RESULTS = 20
MAX_PASSAGE_LINES = 12
MAX_SNIPPET_CHARACTERS = 700
MAX_LINES = 500
MAX_PAGE_CHARACTERS = 30_000
_WORD_PATTERN = re.compile(r"\w+")

T = TypeVar("T")


class MemoryPassage(msgspec.Struct, frozen=True, rename="camel"):
    """Lines of a file that match a query; `score` is the share of the query's words that occur in them."""

    path: str
    start_line: int
    end_line: int
    score: float
    snippet: str


class MemorySearchResult(msgspec.Struct, frozen=True, rename="camel"):
    results: Sequence[MemoryPassage]
    searched_files: int
    skipped_files: int
    """Files that were not searched, because they are too large or too many."""


class MemoryPage(msgspec.Struct, frozen=True, rename="camel"):
    path: str
    start_line: int
    total_lines: int
    text: str


class WorkspaceMemory:
    """The memory of the caller's workspace."""

    def __init__(self, locate: Callable[[Caller], SessionWorkspace]) -> None:
        self._locate = locate

    async def search(self, caller: Caller, query: str, max_results: int) -> MemorySearchResult:
        """Return the passages that contain most of the query's words, best first."""
        words = frozenset(_WORD_PATTERN.findall(query.casefold()))
        if not words or len(query) > MAX_QUERY_CHARACTERS:
            raise InvalidInput(
                f"A query has 1 to {MAX_QUERY_CHARACTERS} characters, with at least one word.",
                "Use a few words.",
                field="query",
            )
        return await self._work(caller, lambda directory: _search(directory, words, max_results))

    async def read(self, caller: Caller, path: str, first_line: int, lines: int) -> MemoryPage:
        """Return lines of one of the files."""
        return await self._work(caller, lambda directory: _read_page(directory, path, first_line, lines))

    async def _work(self, caller: Caller, work: Callable[[WorkspaceDirectory], T]) -> T:
        mount = self._locate(caller).workspace

        def run() -> T:
            mount.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            with WorkspaceDirectory(mount.root, below=mount.below, aliases=(mount.target,)) as directory:
                return work(directory)

        return await asyncio.to_thread(run)


def _search(directory: WorkspaceDirectory, words: frozenset[str], max_results: int) -> MemorySearchResult:
    found: list[MemoryPassage] = []
    searched = skipped = 0
    bytes_left = MAX_SEARCHED_BYTES
    for path in _list_paths(directory):
        try:
            data = directory.read_file(path, min(MAX_FILE_BYTES, bytes_left)) if bytes_left else None
        except NotFound:
            continue
        except AntiphonError:
            data = None
        if data is None:
            skipped += 1
            continue
        searched += 1
        bytes_left -= len(data.data)
        found += _find_passages(path, data.data.decode(errors="replace").splitlines(), words)
        # Stable, so that newer notes stay before older ones.
        found = sorted(found, key=lambda passage: -passage.score)[:max_results]
    return MemorySearchResult(found, searched, skipped)


def _list_paths(directory: WorkspaceDirectory) -> list[str]:
    notes = directory.list_files(MEMORY_DIRECTORY_NAME, MEMORY_SUFFIX, MAX_MEMORY_FILES)
    return [MEMORY_FILE_NAME, *(f"{MEMORY_DIRECTORY_NAME}/{name}" for name in reversed(notes))]


def _find_passages(path: str, lines: Sequence[str], words: frozenset[str]) -> Iterator[MemoryPassage]:
    for first, passage in _split_passages(lines):
        text = "\n".join(passage)
        matched = words.intersection(_WORD_PATTERN.findall(text.casefold()))
        if matched:
            yield MemoryPassage(
                path=path,
                start_line=first,
                end_line=first + len(passage) - 1,
                score=round(len(matched) / len(words), 3),
                snippet=text[:MAX_SNIPPET_CHARACTERS],
            )


def _split_passages(lines: Sequence[str]) -> Iterator[tuple[int, Sequence[str]]]:
    """Yield paragraphs with the number of their first line; long ones in several parts."""
    first = 0
    for number in range(len(lines) + 1):
        is_end = number == len(lines) or not lines[number].strip()
        if number > first and (is_end or number - first == MAX_PASSAGE_LINES):
            yield first + 1, lines[first:number]
            first = number
        if is_end:
            first = number + 1


def _read_page(directory: WorkspaceDirectory, path: str, first_line: int, lines: int) -> MemoryPage:
    name = directory.normalize(path)
    is_note = name.startswith(f"{MEMORY_DIRECTORY_NAME}/") and name.endswith(MEMORY_SUFFIX)
    if name != MEMORY_FILE_NAME and not is_note:
        raise InvalidInput(
            f"{path[:200]!r} is not part of the memory.",
            f"Use {MEMORY_FILE_NAME} or a file in {MEMORY_DIRECTORY_NAME}/ that memory_search shows.",
            field="path",
        )
    content = directory.read_file(name, MAX_FILE_BYTES).data.decode(errors="replace").splitlines()
    shown = content[first_line - 1 : first_line - 1 + lines]
    return MemoryPage(name, first_line, len(content), "\n".join(shown)[:MAX_PAGE_CHARACTERS])
