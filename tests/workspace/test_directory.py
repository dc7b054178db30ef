"""File access that stays inside a workspace, also while another process swaps links."""

from __future__ import annotations

import hashlib
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from antiphon.errors import AntiphonError, Forbidden, InvalidInput, NotFound, StaleFile, TooLarge, Unavailable
from antiphon.workspace import directory
from antiphon.workspace.directory import FileReplacement, WorkspaceDirectory

MAX_BYTES = 1 << 20
SECRET = b"outside"


def write(
    workspace: WorkspaceDirectory, path: str, data: bytes | None, expected_sha256: str | None = None
) -> str:
    workspace.replace_files([FileReplacement(path, expected_sha256, data)], MAX_BYTES)
    return hashlib.sha256(data or b"").hexdigest()


@pytest.fixture(params=["openat2", "walk"])
def workspace(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[WorkspaceDirectory]:
    if request.param == "walk":
        monkeypatch.setattr(directory, "_open_beneath", directory._walk_beneath)  # pyright: ignore[reportPrivateUsage]
    else:
        assert directory.has_openat2()
    root = tmp_path / "workspace"
    root.mkdir()
    (tmp_path / "secret").write_bytes(SECRET)
    with WorkspaceDirectory(root, aliases=("/workspace",)) as opened:
        yield opened


def test_what_is_written_is_read_and_hashed(workspace: WorkspaceDirectory) -> None:
    sha256 = write(workspace, "notes/today.md", b"one")
    assert sha256 == hashlib.sha256(b"one").hexdigest()
    for path in ("notes/today.md", "./notes/../notes/today.md", str(workspace.root / "notes/today.md")):
        content = workspace.read_file(path, MAX_BYTES)
        assert (content.data, content.sha256) == (b"one", sha256)
    assert workspace.read_file("/workspace/notes/today.md", MAX_BYTES).data == b"one"
    assert list((workspace.root / "notes").iterdir()) == [workspace.root / "notes/today.md"]


def test_a_version_that_was_not_read_is_stale(workspace: WorkspaceDirectory) -> None:
    first = write(workspace, "a", b"1")
    with pytest.raises(StaleFile, match="has not read"):
        write(workspace, "a", b"2")
    (workspace.root / "a").write_bytes(b"changed meanwhile")
    with pytest.raises(StaleFile, match="was changed"):
        write(workspace, "a", b"2", first)
    with pytest.raises(StaleFile, match="was changed"):
        write(workspace, "a", None, first)
    (workspace.root / "a").unlink()
    with pytest.raises(StaleFile, match="was deleted"):
        write(workspace, "a", b"2", first)


@pytest.mark.requirement("AT15")
def test_of_two_writers_one_is_stale(workspace: WorkspaceDirectory) -> None:
    first = write(workspace, "a", b"0")
    outcomes: list[str] = []

    def write_as_one_of_many(data: bytes) -> None:
        try:
            write(workspace, "a", data, first)
            outcomes.append("written")
        except StaleFile:
            outcomes.append("stale")

    writers = [threading.Thread(target=write_as_one_of_many, args=(str(n).encode(),)) for n in range(1, 9)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(10)
    assert sorted(outcomes) == ["stale"] * 7 + ["written"]


def test_permissions_of_a_replaced_file_stay(workspace: WorkspaceDirectory) -> None:
    first = write(workspace, "run.sh", b"1")
    (workspace.root / "run.sh").chmod(0o755)
    write(workspace, "run.sh", b"2", first)
    assert (workspace.root / "run.sh").stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize(
    "path",
    [
        "../secret",
        "a/../../secret",
        "/etc/passwd",
        "link",
        "absolute",
        "dir/secret",
        "/proc/self/root/etc/passwd",
        "magic/secret",
        "magic root/etc/passwd",
    ],
)
def test_paths_and_links_that_lead_outside_are_refused(workspace: WorkspaceDirectory, path: str) -> None:
    (workspace.root / "link").symlink_to("../secret")
    (workspace.root / "absolute").symlink_to(workspace.root.parent / "secret")
    (workspace.root / "dir").symlink_to("..")
    outside = os.open(workspace.root.parent, os.O_PATH)
    (workspace.root / "magic").symlink_to(f"/proc/self/fd/{outside}")
    (workspace.root / "magic root").symlink_to("/proc/self/root")
    try:
        with pytest.raises((Forbidden, InvalidInput)):
            workspace.read_file(path, MAX_BYTES)
        with pytest.raises((Forbidden, InvalidInput)):
            write(workspace, path, b"x")
    finally:
        os.close(outside)
    assert (workspace.root.parent / "secret").read_bytes() == SECRET


def test_a_file_with_another_name_outside_is_replaced_and_not_written(workspace: WorkspaceDirectory) -> None:
    """Only somebody who has both directories can give it that name; a sandbox cannot (`test_sandbox_isolation`)."""
    (workspace.root / "inside").hardlink_to(workspace.root.parent / "secret")
    sha256 = workspace.find_sha256("inside", MAX_BYTES)
    write(workspace, "inside", b"x", sha256)
    assert (workspace.root / "inside").read_bytes() == b"x"
    assert (workspace.root.parent / "secret").read_bytes() == SECRET


@pytest.mark.skipif(os.geteuid() != 0, reason="only root creates devices")
def test_a_device_is_not_read(workspace: WorkspaceDirectory) -> None:
    os.mknod(workspace.root / "zero", 0o666 | stat.S_IFCHR, os.makedev(1, 5))
    with pytest.raises(InvalidInput):
        workspace.read_file("zero", MAX_BYTES)
    with pytest.raises(AntiphonError):
        write(workspace, "zero", b"x")


def test_a_dangling_link_is_not_written_through(workspace: WorkspaceDirectory) -> None:
    for target in ("../new", "new"):
        link = workspace.root / "dangling"
        link.symlink_to(target)
        with pytest.raises(AntiphonError):
            write(workspace, "dangling", b"x")
        assert not (link.parent / target).exists()
        assert str(link.readlink()) == target
        link.unlink()


def test_only_regular_files_are_read(workspace: WorkspaceDirectory) -> None:
    (workspace.root / "folder").mkdir()
    os.mkfifo(workspace.root / "pipe")
    for name in ("folder", "pipe", "."):
        with pytest.raises(InvalidInput):
            workspace.read_file(name, MAX_BYTES)
    with pytest.raises(NotFound):
        workspace.read_file("nothing", MAX_BYTES)
    with pytest.raises(TooLarge):
        (workspace.root / "large").write_bytes(b"x" * 11)
        workspace.read_file("large", 10)


@pytest.mark.parametrize("path", ["", "a\0b", "x" * 5000, "y" * 300])
def test_names_that_no_file_can_have_are_refused(workspace: WorkspaceDirectory, path: str) -> None:
    with pytest.raises(InvalidInput):
        workspace.read_file(path, MAX_BYTES)


SWAPPER = """
import os, sys
root = sys.argv[1]
os.chdir(root)
while os.getppid() == int(sys.argv[2]):
    os.rename("inside", "aside"); os.symlink("..", "inside")
    os.unlink("inside"); os.rename("aside", "inside")
"""


def _read(workspace: WorkspaceDirectory) -> None:
    assert workspace.read_file("inside/secret", MAX_BYTES).data != SECRET


def _write(workspace: WorkspaceDirectory) -> None:
    sha256 = workspace.find_sha256("inside/secret", MAX_BYTES)
    write(workspace, "inside/secret", os.urandom(4), sha256)


@pytest.mark.requirement("AT11", "T4")
@pytest.mark.parametrize("access", [_read, _write])
def test_a_directory_swapped_for_a_link_leads_nowhere(
    workspace: WorkspaceDirectory, access: Callable[[WorkspaceDirectory], None]
) -> None:
    (workspace.root / "inside").mkdir()
    (workspace.root / "inside" / "secret").write_bytes(b"inside")
    swapper = subprocess.Popen([sys.executable, "-c", SWAPPER, str(workspace.root), str(os.getpid())])
    try:
        succeeded = 0
        for _ in range(2000):
            try:
                access(workspace)
                succeeded += 1
            except AntiphonError:  # refused while the link is there
                pass
        assert succeeded
    finally:
        swapper.kill()
        swapper.wait(10)
    assert (workspace.root.parent / "secret").read_bytes() == SECRET


def test_several_files_are_replaced_together_or_not_at_all(workspace: WorkspaceDirectory) -> None:
    first = write(workspace, "a", b"1")
    second = write(workspace, "b", b"2")
    (workspace.root / "alias").symlink_to(".")
    with pytest.raises((StaleFile, Forbidden, InvalidInput)):
        workspace.replace_files(
            [
                FileReplacement("a", first, b"changed"),
                FileReplacement("b", second, None),
                FileReplacement("new/file", None, b"created"),
                FileReplacement("alias/a", first, b"the same file again"),
            ],
            MAX_BYTES,
        )
    assert workspace.read_file("a", MAX_BYTES).data == b"1"
    assert workspace.read_file("b", MAX_BYTES).data == b"2"
    assert not (workspace.root / "new" / "file").exists()
    with pytest.raises(StaleFile):
        workspace.replace_files(
            [FileReplacement("a", first, b"changed"), FileReplacement("b", first, b"x")], MAX_BYTES
        )
    assert workspace.read_file("a", MAX_BYTES).data == b"1"
    workspace.replace_files(
        [FileReplacement("a", first, b"changed"), FileReplacement("b", second, None)], MAX_BYTES
    )
    assert [file.name for file in workspace.root.iterdir() if file.is_file()] == ["a"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root writes files for others")
def test_what_root_writes_belongs_to_the_owner_of_the_directory(workspace: WorkspaceDirectory) -> None:
    os.chown(workspace.root, 61_001, 61_002)
    write(workspace, "made/inside/file", b"x")
    for path in ("made", "made/inside", "made/inside/file"):
        status = (workspace.root / path).stat()
        assert (status.st_uid, status.st_gid) == (61_001, 61_002)


@pytest.mark.requirement("AT11", "T3")
@pytest.mark.parametrize("link", ["subagents", "subagents/1"])
def test_a_directory_below_is_no_link_that_leads_outside(workspace: WorkspaceDirectory, link: str) -> None:
    outside = workspace.root.parent / "outside"
    outside.mkdir()
    place = workspace.root / link
    place.parent.mkdir(exist_ok=True)
    place.symlink_to(outside)
    with pytest.raises((Forbidden, InvalidInput)):
        WorkspaceDirectory(workspace.root, below="subagents/1")
    assert [*outside.iterdir()] == []
    place.unlink()
    with WorkspaceDirectory(workspace.root, below="subagents/1") as below:
        write(below, "a", b"1")
    assert (workspace.root / "subagents" / "1" / "a").read_bytes() == b"1"


@pytest.mark.requirement("T4")
def test_a_program_that_keeps_the_directory_locked_delays_a_writer_only_for_a_time(
    workspace: WorkspaceDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory, "LOCK_TIMEOUT_SECONDS", 0.1)
    with subprocess.Popen(
        ["flock", str(workspace.root), "sh", "-c", "echo locked; cat"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as program:
        assert program.stdout is not None and program.stdout.readline() == b"locked\n"
        with pytest.raises(Unavailable, match="held the workspace locked"):
            write(workspace, "a", b"1")
        program.communicate(timeout=10)
    write(workspace, "a", b"1")


@pytest.mark.requirement("AT15", "T3")
def test_an_agent_and_its_sub_agent_exclude_each_other(
    workspace: WorkspaceDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory, "LOCK_TIMEOUT_SECONDS", 0.1)
    with WorkspaceDirectory(workspace.root, below="subagents/1") as below:
        with workspace._lock(), pytest.raises(Unavailable):  # pyright: ignore[reportPrivateUsage]
            write(below, "a", b"1")
        write(below, "a", b"1")


def test_one_file_under_two_names_is_not_changed_twice(workspace: WorkspaceDirectory) -> None:
    first = write(workspace, "real/a", b"0")
    (workspace.root / "alias").symlink_to("real")
    with pytest.raises((StaleFile, Forbidden, InvalidInput)):
        workspace.replace_files(
            [FileReplacement("real/a", first, b"one"), FileReplacement("alias/a", first, b"other")], MAX_BYTES
        )
    assert (workspace.root / "real" / "a").read_bytes() == b"0"


def test_the_files_of_one_change_are_limited_together(workspace: WorkspaceDirectory) -> None:
    versions = [write(workspace, name, name.encode() * 6) for name in ("a", "b")]
    changes = [FileReplacement(name, old, None) for name, old in zip("ab", versions, strict=True)]
    with pytest.raises(TooLarge):
        workspace.replace_files(changes, 11)
    assert (workspace.root / "a").exists()
    workspace.replace_files(changes, 12)
    assert not (workspace.root / "a").exists()


KILLED_WRITER = """
import os, signal, sys
from pathlib import Path
from antiphon.workspace.directory import FileReplacement, WorkspaceDirectory
os.rename = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
with WorkspaceDirectory(Path(sys.argv[1])) as workspace:
    workspace.replace_files([FileReplacement("folder/a", None, b"never there")], 1000)
"""


@pytest.mark.requirement("AT20", "T4")
def test_a_write_that_a_crash_interrupted_leaves_nothing_when_it_is_repeated(
    workspace: WorkspaceDirectory,
) -> None:
    folder = workspace.root / "folder"
    done = subprocess.run([sys.executable, "-c", KILLED_WRITER, str(workspace.root)], check=False, timeout=30)
    assert done.returncode == -signal.SIGKILL
    [left] = folder.iterdir()
    assert left.name.startswith(directory.TEMPORARY_FILE_PREFIX)
    write(workspace, "folder/a", b"whole")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {"a": b"whole"}
    left.mkdir()  # by a program of the agent
    write(workspace, "folder/a", b"again", hashlib.sha256(b"whole").hexdigest())
    assert (folder / "a").read_bytes() == b"again"
