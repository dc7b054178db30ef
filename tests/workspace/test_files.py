"""The files of a session: versions it knows, changes that happen once, pages that fit."""

from __future__ import annotations

import asyncio
import fcntl
import os
import threading
import tracemalloc
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon import keys
from antiphon.access import Caller
from antiphon.clock import SystemClock
from antiphon.engine.sessions import session_rows
from antiphon.engine.sessions.session_rows import NewSession
from antiphon.errors import InvalidInput, NotFound, StaleFile, TooLarge, Unavailable
from antiphon.store import Tx
from antiphon.workspace import directory as directory_module
from antiphon.workspace import files as files_module
from antiphon.workspace.directory import WorkspaceDirectory
from antiphon.workspace.files import FileChange, ImageFile, TextPage, WorkspaceFiles
from antiphon.workspace.locations import WORKSPACE_MOUNT, Mount, SessionWorkspace
from support.app_fixture import open_test_store

pytestmark = pytest.mark.anyio

MAIN = Caller.agent("main", "agent:main:main")
OTHER = Caller.agent("main", "agent:main:direct:other")
PNG = b"\x89PNG\r\n\x1a\n" + b"\0" * 100


@pytest.fixture
async def files(tmp_path: Path) -> AsyncIterator[WorkspaceFiles]:
    async def create(tx: Tx, key: str) -> None:
        await session_rows.create_session(tx, keys.parse(key), 1, NewSession())

    async with open_test_store(tmp_path) as store:
        for caller in (MAIN, OTHER):
            await store.tx(create, caller.session_key or "")
        workspace = SessionWorkspace((Mount(WORKSPACE_MOUNT, tmp_path / "workspace"),))
        yield WorkspaceFiles(store, SystemClock(), lambda caller: workspace)


async def read_text(files: WorkspaceFiles, path: str, caller: Caller = MAIN) -> str:
    page = await files.read(caller, path)
    assert isinstance(page, TextPage)
    return page.text


async def test_a_file_that_was_written_can_be_written_again(files: WorkspaceFiles) -> None:
    assert await files.write(MAIN, "1", "a.txt", "one\n") == FileChange("a.txt", 4)
    await files.write(MAIN, "2", "a.txt", "two\n")
    await files.edit(MAIN, "3", "a.txt", "two", "three")
    assert await read_text(files, "a.txt") == "three"


@pytest.mark.requirement("AT15", "T4")
async def test_a_file_that_was_not_read_is_stale(files: WorkspaceFiles, tmp_path: Path) -> None:
    await files.write(MAIN, "1", "a.txt", "one")
    with pytest.raises(StaleFile, match="was not read by this session"):
        await files.write(OTHER, "2", "a.txt", "mine")
    await files.read(OTHER, "a.txt")
    await files.write(OTHER, "3", "a.txt", "ours")
    for change in (
        lambda: files.write(MAIN, "4", "a.txt", "again"),
        lambda: files.edit(MAIN, "5", "a.txt", "ours", "mine"),
    ):
        with pytest.raises(StaleFile, match="was changed since"):
            await change()
    assert (tmp_path / "workspace" / "a.txt").read_text() == "ours"


PATCH = """*** Begin Patch
*** Add File: new.txt
+new
*** Update File: a.txt
@@
-one
+two
*** Update File: b.txt
*** Move to: moved.txt
@@
-b
+c
*** Delete File: old.txt
*** End Patch"""


async def prepare_patch(files: WorkspaceFiles) -> None:
    for name, text in (("a.txt", "one\n"), ("b.txt", "b\n"), ("old.txt", "old\n")):
        await files.write(MAIN, f"write-{name}", name, text)


async def test_a_patch_changes_all_its_files(files: WorkspaceFiles, tmp_path: Path) -> None:
    await prepare_patch(files)
    changes = await files.apply_patch(MAIN, "patch", PATCH)
    assert {change.path: change.bytes for change in changes} == {
        "new.txt": 4,
        "a.txt": 4,
        "moved.txt": 2,
        "b.txt": None,
        "old.txt": None,
    }
    found = {file.name: file.read_text() for file in (tmp_path / "workspace").iterdir()}
    assert found == {"new.txt": "new\n", "a.txt": "two\n", "moved.txt": "c\n"}


async def test_a_patch_that_does_not_fit_changes_nothing(files: WorkspaceFiles, tmp_path: Path) -> None:
    await prepare_patch(files)
    before = {file.name: file.read_text() for file in (tmp_path / "workspace").iterdir()}
    with pytest.raises(InvalidInput, match="does not match"):
        await files.apply_patch(MAIN, "patch", PATCH.replace("-b\n", "-other\n"))
    with pytest.raises(NotFound):
        await files.apply_patch(MAIN, "patch-2", PATCH.replace("old.txt", "missing.txt"))
    with pytest.raises(StaleFile):
        await files.apply_patch(OTHER, "patch-3", PATCH)
    assert {file.name: file.read_text() for file in (tmp_path / "workspace").iterdir()} == before


async def test_a_file_is_named_once_however_it_is_written(files: WorkspaceFiles, tmp_path: Path) -> None:
    await files.write(MAIN, "1", "a.txt", "one\n")
    sections = "".join(f"*** Update File: {path}\n@@\n+x\n" for path in ("a.txt", "./b/../a.txt"))
    with pytest.raises(InvalidInput, match=r"names 'a\.txt' twice"):
        await files.apply_patch(MAIN, "2", f"*** Begin Patch\n{sections}*** End Patch")
    assert (tmp_path / "workspace" / "a.txt").read_text() == "one\n"


async def test_a_locked_workspace_delays_nothing_else(
    files: WorkspaceFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory_module, "LOCK_TIMEOUT_SECONDS", 2.0)
    (tmp_path / "workspace").mkdir()
    lock = os.open(tmp_path / "workspace", os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        writes = [asyncio.create_task(files.write(MAIN, str(n), f"{n}.txt", "x")) for n in range(12)]
        await asyncio.sleep(0)
        for _ in range(8):
            assert await asyncio.to_thread(lambda: "done") == "done"
        assert not all(write.done() for write in writes)
        done, _ = await asyncio.wait(writes, timeout=60)
        assert all(isinstance(write.exception(), Unavailable) for write in done) and len(done) == 12
    finally:
        os.close(lock)


async def test_files_are_read_and_cut_outside_the_event_loop(
    files: WorkspaceFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []
    cut = files_module._cut_page  # pyright: ignore[reportPrivateUsage]

    def record(path: str, data: bytes, offset: int, limit: int) -> TextPage:
        threads.append(threading.current_thread())
        return cut(path, data, offset, limit)

    monkeypatch.setattr(files_module, "_cut_page", record)
    await files.write(MAIN, "1", "a.txt", "one\n")
    assert await read_text(files, "a.txt") == "one"
    assert threads and threading.current_thread() not in threads


class Killed(BaseException):
    """Stands for a kill at the moment it is raised."""


@pytest.mark.requirement("AT20")
@pytest.mark.parametrize("survived", range(6))
async def test_a_call_that_was_cut_off_is_completed_once(
    files: WorkspaceFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, survived: int
) -> None:
    """Kills the process after `survived` of the patch's files, without the clean-up of an error."""
    await prepare_patch(files)
    replace: Callable[[WorkspaceDirectory, str, bytes | None], None] = WorkspaceDirectory._replace  # pyright: ignore[reportPrivateUsage]
    done = 0

    def replace_or_die(self: WorkspaceDirectory, path: str, data: bytes | None) -> None:
        nonlocal done
        if done >= survived:
            raise Killed
        done += 1
        replace(self, path, data)

    monkeypatch.setattr(WorkspaceDirectory, "_replace", replace_or_die)
    if survived < 5:
        with pytest.raises(Killed):
            await files.apply_patch(MAIN, "patch", PATCH)
    else:
        await files.apply_patch(MAIN, "patch", PATCH)
    monkeypatch.undo()
    await files.apply_patch(MAIN, "patch", PATCH)
    found = {file.name: file.read_text() for file in (tmp_path / "workspace").iterdir()}
    assert found == {"new.txt": "new\n", "a.txt": "two\n", "moved.txt": "c\n"}


@pytest.mark.parametrize("is_done", [False, True])
async def test_an_edit_repeated_after_a_crash_happens_once(
    files: WorkspaceFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_done: bool
) -> None:
    await files.write(MAIN, "1", "a.txt", "x")
    if is_done:
        await files.edit(MAIN, "2", "a.txt", "x", "xx")
    else:

        def die(*_: object) -> None:
            raise Killed

        monkeypatch.setattr(WorkspaceDirectory, "replace_files", die)
        with pytest.raises(Killed):
            await files.edit(MAIN, "2", "a.txt", "x", "xx")
        monkeypatch.undo()
    assert await files.edit(MAIN, "2", "a.txt", "x", "xx") == FileChange("a.txt", 2)
    assert (tmp_path / "workspace" / "a.txt").read_text() == "xx"


async def test_a_call_repeated_after_the_file_changed_is_stale(files: WorkspaceFiles, tmp_path: Path) -> None:
    await files.write(MAIN, "1", "a.txt", "one")
    await files.write(MAIN, "2", "a.txt", "two")
    (tmp_path / "workspace" / "a.txt").write_text("changed meanwhile")
    with pytest.raises(StaleFile):
        await files.write(MAIN, "2", "a.txt", "two")


async def test_long_files_are_read_page_by_page(files: WorkspaceFiles, tmp_path: Path) -> None:
    text = "".join(f"line {n}\n" for n in range(1, 10_001))
    await files.write(MAIN, "1", "long.txt", text)
    read, offset = "", 1
    while offset is not None:
        page = await files.read(MAIN, "long.txt", offset)
        assert isinstance(page, TextPage)
        assert (page.first_line, page.total_lines) == (offset, 10_000)
        assert len(page.text) <= 50 * 1024
        read += page.text + "\n"
        offset = page.next_line
    assert read == text
    with pytest.raises(InvalidInput, match="has 10000 lines"):
        await files.read(MAIN, "long.txt", 10_001)
    (tmp_path / "workspace" / "wide.txt").write_text("é" * 100_000)
    wide = await files.read(MAIN, "wide.txt")
    assert isinstance(wide, TextPage)
    assert wide.text.endswith("é […]")
    (tmp_path / "workspace" / "empty.txt").write_text("")
    assert await read_text(files, "empty.txt") == ""


@given(
    lines=st.lists(st.text(alphabet="aé漢 \r", max_size=30), max_size=30),
    ends_with_newline=st.booleans(),
    limit=st.integers(1, 8),
    page_bytes=st.integers(4, 60),
    scanned_bytes=st.integers(1, 50),
)
def test_pages_together_are_the_file(
    lines: list[str], ends_with_newline: bool, limit: int, page_bytes: int, scanned_bytes: int
) -> None:
    data = "\n".join(lines).encode() + b"\n" * (ends_with_newline and bool(lines))
    expected = data.decode().removesuffix("\n").split("\n") if data else []
    shown: list[str] = []
    with (
        patch.object(files_module, "MAX_PAGE_BYTES", page_bytes),
        patch.object(files_module, "SCANNED_BYTES", scanned_bytes),
    ):
        while True:
            page = files_module._cut_page("f", data, len(shown) + 1, limit)  # pyright: ignore[reportPrivateUsage]
            count = (page.next_line or page.total_lines + 1) - page.first_line
            assert page.total_lines == len(expected) and count <= limit
            given_lines = expected[len(shown) : len(shown) + count]
            if page.text != "\n".join(given_lines):  # a line that is too long alone
                [line] = given_lines
                assert page.text.endswith(" […]") and line.startswith(page.text.removesuffix(" […]"))
                assert len(line.encode()) >= page_bytes
            else:
                assert len(page.text.encode()) < page_bytes or not expected
            shown += given_lines
            if page.next_line is None:
                break
    assert shown == expected


def test_a_page_of_a_file_of_many_lines_takes_little_memory() -> None:
    data = b"\n" * 8_000_000
    tracemalloc.start()
    try:
        page = files_module._cut_page("f", data, 7_999_999, 2000)  # pyright: ignore[reportPrivateUsage]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (page.text, page.next_line) == ("\n", None)
    assert peak < 3 * len(data)


async def test_images_are_shown_and_other_bytes_are_refused(files: WorkspaceFiles, tmp_path: Path) -> None:
    (tmp_path / "workspace").mkdir()
    (tmp_path / "workspace" / "picture.png").write_bytes(PNG)
    (tmp_path / "workspace" / "program").write_bytes(b"\x7fELF\0\0")
    (tmp_path / "workspace" / "huge.png").write_bytes(PNG + b"\0" * 6_000_000)
    assert await files.read(MAIN, "picture.png") == ImageFile(PNG, "image/png")
    with pytest.raises(InvalidInput, match="not a text file"):
        await files.read(MAIN, "program")
    with pytest.raises(TooLarge):
        await files.read(MAIN, "huge.png")
    with pytest.raises(TooLarge):
        await files.write(MAIN, "1", "large.txt", "x" * 1_100_000)
