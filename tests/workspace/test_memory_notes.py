"""Notes of a workspace: what is found in them, how much is read, and that nothing outside is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from antiphon.access import Caller
from antiphon.engine.toolbox import ToolOutput, ToolRequest
from antiphon.errors import AntiphonError, InvalidInput
from antiphon.tools import create_memory_tools
from antiphon.workspace import memory
from antiphon.workspace.locations import WORKSPACE_MOUNT, Mount, SessionWorkspace
from antiphon.workspace.memory import WorkspaceMemory

pytestmark = [pytest.mark.anyio, pytest.mark.requirement("T1")]

ME = Caller.agent("main", "agent:main:main")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    (folder / "memory").mkdir(parents=True)
    return folder


def open_memory(root: Path) -> WorkspaceMemory:
    return WorkspaceMemory(lambda _caller: SessionWorkspace((Mount(WORKSPACE_MOUNT, root),)))


async def test_passages_are_found_best_and_newest_first(root: Path) -> None:
    (root / "MEMORY.md").write_text("# Me\n\nThe owner likes green tea.\n")
    (root / "memory" / "2026-01-01.md").write_text("Bought tea.\n\nÄpfel und Birnen\n")
    (root / "memory" / "2026-02-01.md").write_text("Sold tea.\nGreen, of course.\n")
    (root / "notes.md").write_text("green tea")
    found = await open_memory(root).search(ME, "GREEN tea?", 10)
    assert [(each.path, each.start_line, each.end_line, each.score) for each in found.results] == [
        ("MEMORY.md", 3, 3, 1.0),
        ("memory/2026-02-01.md", 1, 2, 1.0),
        ("memory/2026-01-01.md", 1, 1, 0.5),
    ]
    assert (found.searched_files, found.skipped_files) == (3, 0)
    assert found.results[0].snippet == "The owner likes green tea."
    assert len((await open_memory(root).search(ME, "tea", 1)).results) == 1
    assert (await open_memory(root).search(ME, "äpfel", 1)).results[0].path == "memory/2026-01-01.md"
    assert (await open_memory(root).search(ME, "coffee", 1)).results == []


async def test_a_workspace_without_notes_has_none(tmp_path: Path) -> None:
    found = await open_memory(tmp_path / "new").search(ME, "tea", 5)
    assert (found.results, found.searched_files) == ([], 0)


async def test_what_is_read_is_bounded(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "MAX_FILE_BYTES", 100)
    monkeypatch.setattr(memory, "MAX_SEARCHED_BYTES", 150)
    monkeypatch.setattr(memory, "MAX_MEMORY_FILES", 3)
    (root / "MEMORY.md").write_text("tea " * 50)
    for day in range(1, 6):
        (root / "memory" / f"2026-01-0{day}.md").write_text("tea " * 20)
    found = await open_memory(root).search(ME, "tea", 10)
    assert (found.searched_files, found.skipped_files) == (1, 3)
    assert [each.path for each in found.results] == ["memory/2026-01-05.md"]


async def test_a_long_paragraph_is_shown_in_parts(root: Path) -> None:
    (root / "MEMORY.md").write_text("".join(f"tea {number}\n" for number in range(30)))
    found = await open_memory(root).search(ME, "tea", 10)
    assert [(each.start_line, each.end_line) for each in found.results] == [(1, 12), (13, 24), (25, 30)]


async def test_lines_are_read_and_only_of_notes(root: Path) -> None:
    (root / "memory" / "a.md").write_text("one\ntwo\nthree\n")
    (root / "secret.md").write_text("secret")
    page = await open_memory(root).read(ME, "memory/a.md", 2, 1)
    assert (page.text, page.start_line, page.total_lines) == ("two", 2, 3)
    for path in ("secret.md", "memory/a.txt", "memory/../secret.md", "/etc/passwd", "memory"):
        with pytest.raises(AntiphonError):
            await open_memory(root).read(ME, path, 1, 10)


async def test_links_lead_nowhere(root: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "a.md").write_text("tea outside")
    (root / "MEMORY.md").symlink_to(outside / "a.md")
    (root / "memory" / "linked.md").symlink_to(outside / "a.md")
    found = await open_memory(root).search(ME, "tea", 10)
    assert found.results == []
    (root / "memory" / "linked.md").unlink()
    (root / "memory").rmdir()
    (root / "memory").symlink_to(outside)
    with pytest.raises(AntiphonError):
        await open_memory(root).search(ME, "tea", 10)
    with pytest.raises(AntiphonError):
        await open_memory(root).read(ME, "memory/a.md", 1, 10)


async def test_models_call_both_with_their_own_names(root: Path) -> None:
    (root / "MEMORY.md").write_text("one\ntwo\n")
    search, get = create_memory_tools(open_memory(root))

    async def call(tool: Any, **arguments: Any) -> ToolOutput:
        return await tool.invoke(ToolRequest(caller=ME, run_id="r", call_id="c", arguments=arguments))

    assert (await call(search, query="two", max_results="3")).details["results"][0]["startLine"] == 1
    assert (await call(get, path="MEMORY.md", **{"from": 2, "lines": 0})).details["text"] == "two"
    assert (await call(get, path="MEMORY.md", offset=1, limit=1)).details["text"] == "one"
    assert (await call(search, query="?!")).is_error
    with pytest.raises(InvalidInput):
        await open_memory(root).search(ME, "x" * 401, 1)
