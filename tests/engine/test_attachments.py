"""Files for a sub-agent: hostile names, links and sizes are refused untouched, and the rest arrives whole."""

from __future__ import annotations

import base64
import hashlib
import os
import stat
import tempfile
import unicodedata
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.engine.collaboration import attachments as module
from antiphon.engine.collaboration.attachments import (
    AttachmentLimits,
    SpawnAttachment,
    collect_mime_types,
    remove,
    validate_attachments,
    write,
)
from antiphon.errors import AntiphonError, Conflict, InvalidInput, TooLarge, Unavailable

FOLDER = "6f1c2b54-8d0e-4a35-9a37-0f0c2f6f7e11"
FILES = [("notes.txt", b"hello"), ("über.bin", bytes(range(256))), ("empty", b"")]
HOSTILE = [
    "",
    " ",
    "\u3000",
    ".",
    "..",
    " .. ",
    "../x",
    "..\\x",
    "/etc/passwd",
    "C:\\x",
    "a/b",
    "a\0b",
    "a\nb",
    "a.txt\n",
    "\ta",
    "a\x7f",
    "a\x85",
    "a\u2028b",
    "a\ud800",
    ".manifest.json",
    " .Manifest.JSON",
    "a.",
    "a. ",
    "...",
    "CON",
    "nul.txt",
    "Aux .tar.gz",
    "COM1",
    "lpt¹.log",
    "conin$",
    "invoice\u202efdp.exe",
    "\u2066a\u2069",
    "a\u200f",
    "a\u061cb",
    "x" * 300,
    "é" * 128,
]
PLAIN = [
    "notes.txt",
    " trimmed ",
    ".hidden",
    "a..b",
    "~",
    "-rf",
    "con2",
    "console.txt",
    "COM10",
    "写真 1.png",
    "👩‍🚀",
    "x" * 255,
    "é" * 127,
    "%2e%2e%2f",
    ".part",
]


def file(name: str = "a", content: str = "", **more: Any) -> SpawnAttachment:
    return SpawnAttachment(name=name, content=content, **more)


def coded(content: bytes, name: str = "a") -> SpawnAttachment:
    return file(name, base64.b64encode(content).decode(), encoding="base64")


def folder_in(workspace: Path) -> Path:
    return workspace / ".antiphon" / "attachments" / FOLDER


def tree(root: Path) -> dict[str, object]:
    """Everything below a directory: where links lead, what files hold; links are not followed."""
    found: dict[str, object] = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        found[name] = str(path.readlink()) if path.is_symlink() else path.is_file() and path.read_bytes()
    return found


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def reason(error: pytest.ExceptionInfo[AntiphonError]) -> str:
    assert error.value.hint.endswith(".") and error.value.what.endswith(".")
    assert error.value.data["field"]
    return error.value.data["reason"]


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    (tmp_path / "workspace").mkdir()
    return tmp_path / "workspace"


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A directory that must stay untouched."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "precious").write_text("kept")
    return tmp_path / "outside"


# --- names ---


@pytest.mark.requirement("P9", "SEC7")
@pytest.mark.parametrize("name", HOSTILE, ids=ascii)
def test_a_hostile_name_is_refused_by_both_and_nothing_is_written(workspace: Path, name: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        validate_attachments([file("first"), file(name)], AttachmentLimits())
    assert reason(refused) == "attachments_invalid_name"
    assert refused.value.data["field"] == "attachments/1/name"
    assert len(str(refused.value)) < 400
    assert str(refused.value).isprintable()
    with pytest.raises(InvalidInput):
        write(workspace, FOLDER, [("first", b""), (name, b"")])
    assert tree(workspace) == {}


@pytest.mark.requirement("P9")
@pytest.mark.parametrize("name", PLAIN)
def test_an_unusual_name_is_taken_trimmed(workspace: Path, name: str) -> None:
    files = validate_attachments([file(name, "x")], AttachmentLimits())
    assert files == [(name.strip(), b"x")]
    write(workspace, FOLDER, files)
    assert (folder_in(workspace) / name.strip()).read_bytes() == b"x"


@pytest.mark.requirement("P9", "SEC7")
@pytest.mark.parametrize(
    ("one", "other"),
    [("a", "a"), ("a", " a "), ("A.txt", "a.TXT"), ("é", "e\u0301"), ("É", "e\u0301"), ("straße", "STRASSE")],
)
def test_names_that_a_file_system_may_take_for_one_are_refused(workspace: Path, one: str, other: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        validate_attachments([file(one), file("between"), file(other)], AttachmentLimits())
    assert reason(refused) == "attachments_duplicate_name"
    assert refused.value.data["field"] == "attachments/2/name"
    with pytest.raises(InvalidInput):
        write(workspace, FOLDER, [(one, b""), (other, b"")])
    assert tree(workspace) == {}


ODD = st.sampled_from([*HOSTILE, *PLAIN, "/", "\\", "\0", ".", " ", "\u202e", "e\u0301", "É", "nul", "\n"])
NAMES = st.one_of(
    ODD,
    st.text(max_size=20),
    st.lists(st.one_of(ODD, st.text(max_size=4)), max_size=4).map("".join),
    st.text(st.sampled_from("./\\ aA\u0301"), max_size=8),
)


@pytest.mark.requirement("P9", "SEC7")
@settings(max_examples=400, deadline=None)
@given(names=st.lists(NAMES, max_size=4))
def test_no_name_reaches_outside_its_folder(names: list[str]) -> None:
    with tempfile.TemporaryDirectory() as place:
        workspace = Path(place, "workspace")
        workspace.mkdir()
        try:
            files = validate_attachments(
                [file(name, str(number)) for number, name in enumerate(names)], AttachmentLimits()
            )
        except InvalidInput as refused:
            assert refused.data["reason"] in ("attachments_invalid_name", "attachments_duplicate_name")
            return
        receipt = write(workspace, FOLDER, files)
        inside = folder_in(workspace)
        assert {path.name for path in inside.iterdir()} == {*(name for name, _ in files), ".manifest.json"}
        assert [(inside / each.name).read_text() for each in receipt.files] == list(
            map(str, range(len(names)))
        )
        assert len({unicodedata.normalize("NFC", name).casefold() for name, _ in files}) == len(names)
        assert [path.name for path in Path(place).iterdir()] == ["workspace"]
        assert [path.name for path in inside.parent.iterdir()] == [FOLDER]


# --- sizes and encodings ---


@pytest.mark.requirement("P9", "SEC7")
def test_the_limits_are_those_of_the_contract() -> None:
    assert AttachmentLimits() == AttachmentLimits(50, 1024 * 1024, 5 * 1024 * 1024)
    full = AttachmentLimits().file_bytes * "x"
    assert len(validate_attachments([file(str(number)) for number in range(50)], AttachmentLimits())) == 50
    assert (
        len(validate_attachments([file(str(number), full) for number in range(5)], AttachmentLimits())) == 5
    )
    with pytest.raises(TooLarge) as refused:
        validate_attachments(
            [*(file(str(number), full) for number in range(5)), file("last", "x")], AttachmentLimits()
        )
    assert reason(refused) == "attachments_total_bytes_exceeded"


@pytest.mark.requirement("P9", "SEC7")
def test_the_number_of_files_is_capped_before_their_names_are_read() -> None:
    limits = AttachmentLimits(files=3)
    assert len(validate_attachments([file(str(number)) for number in range(3)], limits)) == 3
    with pytest.raises(TooLarge) as refused:
        validate_attachments([file("..")] * 4, limits)
    assert reason(refused) == "attachments_file_count_exceeded"
    assert refused.value.data["max"] == 3


@pytest.mark.requirement("P9", "SEC7")
@pytest.mark.parametrize("size", range(6))
def test_a_file_is_capped_by_its_decoded_bytes(size: int) -> None:
    limits = AttachmentLimits(file_bytes=size)
    content = bytes(size)
    assert validate_attachments([coded(content)], limits) == [("a", content)]
    assert validate_attachments([file("a", "x" * size)], limits) == [("a", b"x" * size)]
    for over in (coded(bytes(size + 1)), file("a", "x" * (size + 1)), file("a", "é" * (size // 2 + 1))):
        with pytest.raises(TooLarge) as refused:
            validate_attachments([over], limits)
        assert reason(refused) == "attachments_file_bytes_exceeded"
        assert refused.value.data["bytes"] > refused.value.data["max"] == size


@pytest.mark.requirement("P9", "SEC7")
def test_the_total_is_capped_over_both_encodings() -> None:
    files = [coded(bytes(7), "a"), file("b", "é" * 4)]
    assert len(validate_attachments(files, AttachmentLimits(total_bytes=15))) == 2
    with pytest.raises(TooLarge) as refused:
        validate_attachments(files, AttachmentLimits(total_bytes=14))
    assert reason(refused) == "attachments_total_bytes_exceeded"
    assert (refused.value.data["bytes"], refused.value.data["max"]) == (15, 14)


@pytest.mark.requirement("SEC7")
def test_nothing_is_decoded_when_a_size_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def decode(*_: object, **__: object) -> bytes:
        raise AssertionError("decoded")

    monkeypatch.setattr(module.base64, "b64decode", decode)
    for limits in (AttachmentLimits(file_bytes=8), AttachmentLimits(total_bytes=17)):
        with pytest.raises(TooLarge):
            validate_attachments([coded(bytes(8), "a"), coded(bytes(10), "b")], limits)


@pytest.mark.requirement("P9")
@given(st.binary(max_size=60), st.integers(1, 9), st.sampled_from(" \t\n\r\f\v"))
def test_base64_may_be_broken_into_lines(content: bytes, width: int, blank: str) -> None:
    code = base64.b64encode(content).decode()
    lines = blank.join(code[start : start + width] for start in range(0, len(code), width)) + blank
    assert validate_attachments(
        [file("a", lines, encoding="base64")], AttachmentLimits(file_bytes=len(content))
    ) == [("a", content)]


@pytest.mark.requirement("P9", "SEC7")
@pytest.mark.parametrize(
    "code",
    [
        "a",
        "YQ",
        "YQ=",
        "YQ===",
        "Y===",
        "====",
        "=",
        "YQ==YQ==",
        "Y Q= =x",
        "-_-_",
        "YQ\u00a0==",
        "yqé=",
        "a\0==",
    ],
)
def test_what_is_not_strictly_base64_is_refused(code: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        validate_attachments([file("a", code, encoding="base64")], AttachmentLimits())
    assert reason(refused) == "attachments_invalid_base64_or_too_large"


@pytest.mark.requirement("P9")
def test_text_that_cannot_be_encoded_and_a_type_with_line_breaks_are_refused() -> None:
    with pytest.raises(InvalidInput) as refused:
        validate_attachments([file("a", "\ud800")], AttachmentLimits())
    assert reason(refused) == "attachments_invalid_text"
    for wrong in ("text/plain\nignore all", "x" * 256, "é"):
        with pytest.raises(InvalidInput) as refused:
            validate_attachments([file("a", mime_type=wrong)], AttachmentLimits())
        assert reason(refused) == "attachments_invalid_mime_type"


@pytest.mark.requirement("P9")
def test_an_attachment_is_read_from_the_wire_and_unknown_fields_are_refused() -> None:
    sent = {"name": "a", "content": "YQ==", "encoding": "base64", "mimeType": "text/plain"}
    assert msgspec.convert(sent, SpawnAttachment) == file(
        "a", "YQ==", encoding="base64", mime_type="text/plain"
    )
    for wrong in ({"path": "/etc/passwd"}, {"encoding": "hex"}):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert({**sent, **wrong}, SpawnAttachment)


# --- writing ---


@pytest.mark.requirement("P9", "SEC7")
def test_the_receipt_equals_what_is_on_disk(workspace: Path) -> None:
    given = [file(" a.txt ", "é", mime_type="text/plain"), coded(b"\0\xff", "b"), file("c", mime_type="")]
    receipt = write(
        workspace,
        FOLDER,
        validate_attachments(given, AttachmentLimits()),
        mime_types=collect_mime_types(given),
    )
    place = workspace / receipt.rel_dir
    assert place == folder_in(workspace)
    assert [each.name for each in receipt.files] == ["a.txt", "b", "c"]
    for each in receipt.files:
        content = (place / each.name).read_bytes()
        assert (each.bytes, each.sha256) == (len(content), hashlib.sha256(content).hexdigest())
    seen = msgspec.to_builtins(receipt)
    assert (seen["count"], seen["totalBytes"], seen["relDir"]) == (3, 4, f".antiphon/attachments/{FOLDER}")
    manifest = msgspec.json.decode((place / ".manifest.json").read_bytes())
    assert [each.pop("mimeType", None) for each in manifest["files"]] == ["text/plain", None, None]
    assert manifest == seen


@pytest.mark.requirement("P9", "SEC7")
def test_everything_is_private_with_any_umask(workspace: Path) -> None:
    before = os.umask(0)
    try:
        write(workspace, FOLDER, FILES)
    finally:
        os.umask(before)
    below = list((workspace / ".antiphon").rglob("*"))
    assert len(below) == len(FILES) + 3
    for path in [workspace / ".antiphon", *below]:
        assert mode(path) == (0o700 if path.is_dir() else 0o600)


@pytest.mark.requirement("P9")
def test_the_workspace_itself_may_be_a_link(workspace: Path, tmp_path: Path) -> None:
    chosen = tmp_path / "chosen"
    chosen.symlink_to(workspace)
    write(chosen, FOLDER, FILES)
    assert (folder_in(workspace) / "notes.txt").read_bytes() == b"hello"
    remove(chosen, FOLDER)
    assert not folder_in(workspace).exists()


@pytest.mark.requirement("SEC7")
@pytest.mark.parametrize("level", [".antiphon", ".antiphon/attachments", f".antiphon/attachments/{FOLDER}"])
@pytest.mark.parametrize("kind", ["directory", "dangling", "itself", "file", "pipe"])
def test_what_is_no_directory_below_the_workspace_is_refused(
    workspace: Path, outside: Path, level: str, kind: str
) -> None:
    planted = workspace / level
    planted.parent.mkdir(parents=True, exist_ok=True)
    plant: dict[str, Callable[[], object]] = {
        "directory": lambda: planted.symlink_to(outside),
        "dangling": lambda: planted.symlink_to(outside / "missing"),
        "itself": lambda: planted.symlink_to(planted.name),
        "file": lambda: planted.write_text("mine"),
        "pipe": lambda: os.mkfifo(planted),
    }
    plant[kind]()
    before = tree(workspace.parent)
    with pytest.raises(InvalidInput) as refused:
        write(workspace, FOLDER, FILES)
    assert reason(refused) == "attachments_unsafe_directory"
    assert tree(workspace.parent) == before


@pytest.mark.requirement("SEC7")
@pytest.mark.parametrize(
    "folder", ["", ".", "..", "../x", "a/b", "/tmp", f"{FOLDER}.part", "A", "a\n", "x" * 65]
)
def test_a_folder_that_is_not_ours_is_refused(workspace: Path, outside: Path, folder: str) -> None:
    before = tree(workspace.parent)
    with pytest.raises(InvalidInput):
        write(workspace, folder, FILES)
    with pytest.raises(InvalidInput):
        remove(workspace, folder)
    assert tree(workspace.parent) == before


@pytest.mark.requirement("P9")
def test_a_workspace_that_is_missing_or_leads_in_a_circle_is_said_so(tmp_path: Path) -> None:
    circle = tmp_path / "circle"
    circle.symlink_to("circle")
    for workspace in (tmp_path / "missing", circle):
        with pytest.raises(Unavailable) as refused:
            write(workspace, FOLDER, FILES)
        assert reason(refused) == "attachments_io_failed"
    assert tree(tmp_path) == {"circle": "circle"}


# --- another process at the same time ---


@contextmanager
def between(
    monkeypatch: pytest.MonkeyPatch, call: str, argument: str, act: Callable[[], object]
) -> Generator[None]:
    """Do something just before this function of `os` is called with this first argument."""
    real = getattr(os, call)

    def called(first: object, *rest: Any, **named: Any) -> object:
        if first == argument:
            act()
        return real(first, *rest, **named)

    with monkeypatch.context() as patch:
        patch.setattr(module.os, call, called)
        yield


@pytest.mark.requirement("SEC7")
@pytest.mark.parametrize(
    ("call", "argument"), [("open", f"{FOLDER}.part"), ("open", "über.bin"), ("rename", f"{FOLDER}.part")]
)
@pytest.mark.parametrize("target", ["link", "directory"])
def test_an_exchanged_draft_redirects_nothing(
    workspace: Path, outside: Path, monkeypatch: pytest.MonkeyPatch, call: str, argument: str, target: str
) -> None:
    part = folder_in(workspace).with_name(f"{FOLDER}.part")
    before = tree(outside)

    def exchange() -> None:
        part.rename(workspace / "stolen")
        if target == "link":
            part.symlink_to(outside)
        else:
            part.mkdir()
            (part / "notes.txt").symlink_to(outside / "precious")

    with between(monkeypatch, call, argument, exchange), pytest.raises(AntiphonError):
        write(workspace, FOLDER, FILES)
    assert tree(outside) == before
    assert list(part.parent.iterdir()) == []
    write(workspace, FOLDER, FILES)
    assert (folder_in(workspace) / "notes.txt").read_bytes() == b"hello"


@pytest.mark.requirement("SEC7")
@pytest.mark.parametrize("level", [".antiphon", ".antiphon/attachments"])
def test_a_directory_exchanged_for_a_link_redirects_nothing(
    workspace: Path, outside: Path, monkeypatch: pytest.MonkeyPatch, level: str
) -> None:
    planted = workspace / level
    before = tree(outside)

    def exchange() -> None:
        planted.rmdir()
        planted.symlink_to(outside)

    with between(monkeypatch, "open", planted.name, exchange), pytest.raises(InvalidInput) as refused:
        write(workspace, FOLDER, FILES)
    assert reason(refused) == "attachments_unsafe_directory"
    assert tree(outside) == before


@pytest.mark.requirement("SEC7")
def test_a_link_planted_in_the_draft_is_not_written_through(
    workspace: Path, outside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted = folder_in(workspace).with_name(f"{FOLDER}.part") / "über.bin"
    before = tree(outside)
    with (
        between(monkeypatch, "open", "über.bin", lambda: planted.symlink_to(outside / "precious")),
        pytest.raises(Unavailable),
    ):
        write(workspace, FOLDER, FILES)
    assert tree(outside) == before
    assert list(folder_in(workspace).parent.iterdir()) == []


# --- crashes and replays ---


class Crash(BaseException):
    """The process is gone."""


CALLS = ("open", "mkdir", "stat", "scandir", "fdopen", "fsync", "rename", "unlink", "rmdir")


@contextmanager
def crashing(monkeypatch: pytest.MonkeyPatch, after: int) -> Generator[list[str]]:
    """After so many calls to the system there is no other one, not even to tidy up."""
    made: list[str] = []

    def limited(name: str, real: Callable[..., object]) -> Callable[..., object]:
        def call(*given: Any, **named: Any) -> object:
            if len(made) >= after:
                raise Crash
            made.append(name)
            return real(*given, **named)

        return call

    with monkeypatch.context() as patch:
        for name in CALLS:
            patch.setattr(module.os, name, limited(name, getattr(os, name)))
        yield made


def calls(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> int:
    with crashing(monkeypatch, 10_000) as made:
        act()
    return len(made)


@pytest.mark.requirement("P9")
def test_a_crash_anywhere_leaves_no_half_folder_and_can_be_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = tmp_path / "whole"
    whole.mkdir()
    steps = calls(monkeypatch, lambda: write(whole, FOLDER, FILES))
    expected = tree(whole)
    left: set[str] = set()
    for step in range(steps):
        workspace = tmp_path / str(step)
        workspace.mkdir()
        with crashing(monkeypatch, step), pytest.raises(Crash):
            write(workspace, FOLDER, FILES)
        if folder_in(workspace).exists():
            assert tree(folder_in(workspace)) == tree(folder_in(whole))
            left.add("whole")
        elif folder_in(workspace).with_name(f"{FOLDER}.part").exists():
            left.add("part")
        assert write(workspace, FOLDER, FILES) == write(whole, FOLDER, FILES)
        assert tree(workspace) == expected
    assert left == {"whole", "part"}


@pytest.mark.requirement("P9")
def test_a_removal_that_crashed_is_finished_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepared(name: str) -> Path:
        workspace = tmp_path / name
        workspace.mkdir()
        write(workspace, FOLDER, FILES)
        (folder_in(workspace) / "sub").mkdir()
        (folder_in(workspace) / "sub" / "more").write_text("x")
        return workspace

    first = prepared("first")
    whole = tree(folder_in(first))
    for step in range(calls(monkeypatch, lambda: remove(first, FOLDER))):
        workspace = prepared(str(step))
        with crashing(monkeypatch, step), pytest.raises(Crash):
            remove(workspace, FOLDER)
        assert not folder_in(workspace).exists() or tree(folder_in(workspace)) == whole
        remove(workspace, FOLDER)
        assert list(folder_in(workspace).parent.iterdir()) == []


@pytest.mark.requirement("P9")
def test_a_full_disk_leaves_nothing_behind(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> None:
        raise OSError(28, "No space left on device")

    with between(monkeypatch, "open", ".manifest.json", full), pytest.raises(Unavailable) as refused:
        write(workspace, FOLDER, FILES)
    assert "No space left" in refused.value.what
    assert list(folder_in(workspace).parent.iterdir()) == []


@pytest.mark.requirement("P9")
def test_a_draft_that_cannot_be_removed_is_told_of_and_hides_no_error(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*given: Any, **named: Any) -> None:
        raise OSError(5, "Input/output error")

    def full() -> None:
        monkeypatch.setattr(module.os, "rmdir", refuse)
        raise OSError(28, "No space left on device")

    with between(monkeypatch, "open", ".manifest.json", full), pytest.raises(Unavailable) as refused:
        write(workspace, FOLDER, FILES)
    assert "No space left" in refused.value.what
    [told] = caplog.records
    assert FOLDER in told.message and "Input/output error" in told.message
    monkeypatch.undo()
    write(workspace, FOLDER, FILES)
    assert [path.name for path in folder_in(workspace).parent.iterdir()] == [FOLDER]


@pytest.mark.requirement("P9")
def test_a_replay_writes_nothing_and_answers_the_same(workspace: Path) -> None:
    receipt = write(workspace, FOLDER, FILES)
    before = folder_in(workspace).stat()
    leftover = folder_in(workspace).with_name(f"{FOLDER}.part")
    leftover.mkdir()
    (leftover / "half").write_text("x")
    assert write(workspace, FOLDER, FILES) == receipt
    assert not leftover.exists()
    assert (folder_in(workspace).stat().st_ino, folder_in(workspace).stat().st_mtime_ns) == (
        before.st_ino,
        before.st_mtime_ns,
    )


@pytest.mark.requirement("SEC7")
def test_a_leftover_that_is_a_link_is_replaced_and_not_followed(workspace: Path, outside: Path) -> None:
    folder_in(workspace).parent.mkdir(parents=True)
    before = tree(outside)
    folder_in(workspace).with_name(f"{FOLDER}.part").symlink_to(outside)
    write(workspace, FOLDER, FILES)
    assert tree(outside) == before
    assert [path.name for path in folder_in(workspace).parent.iterdir()] == [FOLDER]


def _change(place: Path) -> None:
    (place / "notes.txt").write_text("HELLO")


def _add(place: Path) -> None:
    (place / "more").write_text("")


def _lose(place: Path) -> None:
    (place / "empty").unlink()


def _lose_manifest(place: Path) -> None:
    (place / ".manifest.json").unlink()


def _link(place: Path) -> None:
    (place / "notes.txt").rename(place.parent.parent / "notes.txt")
    (place / "notes.txt").symlink_to("../../notes.txt")


def _pipe(place: Path) -> None:
    (place / "empty").unlink()
    os.mkfifo(place / "empty")


@pytest.mark.requirement("P9", "SEC7")
@pytest.mark.parametrize("alter", [_change, _add, _lose, _lose_manifest, _link, _pipe])
def test_a_folder_with_other_contents_is_a_conflict(workspace: Path, alter: Callable[[Path], None]) -> None:
    write(workspace, FOLDER, FILES)
    alter(folder_in(workspace))
    before = {path: path.lstat() for path in workspace.rglob("*")}
    with pytest.raises(Conflict) as refused:
        write(workspace, FOLDER, FILES)
    assert reason(refused) == "attachments_folder_exists"
    after = {path: path.lstat() for path in workspace.rglob("*")}
    assert {path: status.st_mtime_ns for path, status in after.items()} == {
        path: status.st_mtime_ns for path, status in before.items()
    }


# --- removing ---


@pytest.mark.requirement("P9", "SEC7")
def test_removal_takes_links_and_leaves_what_they_name(workspace: Path, outside: Path) -> None:
    write(workspace, FOLDER, FILES)
    before = tree(outside)
    inside = folder_in(workspace) / "sub" / "deeper"
    inside.mkdir(parents=True)
    for place in (folder_in(workspace), inside):
        (place / "to-directory").symlink_to(outside)
        (place / "to-file").symlink_to(outside / "precious")
        (place / "up").symlink_to("..")
        os.mkfifo(place / "pipe")
    other = folder_in(workspace).with_name("other")
    other.mkdir()
    remove(workspace, FOLDER)
    assert tree(outside) == before
    assert list(other.parent.iterdir()) == [other]


@pytest.mark.requirement("SEC7")
def test_a_folder_that_became_a_link_is_only_unlinked(workspace: Path, outside: Path) -> None:
    folder_in(workspace).parent.mkdir(parents=True)
    folder_in(workspace).symlink_to(outside)
    before = tree(outside)
    remove(workspace, FOLDER)
    assert tree(outside) == before
    assert list(folder_in(workspace).parent.iterdir()) == []


@pytest.mark.requirement("SEC7")
@pytest.mark.parametrize("level", [".antiphon", ".antiphon/attachments"])
def test_removal_does_not_go_through_a_link(workspace: Path, outside: Path, level: str) -> None:
    planted = workspace / level
    planted.parent.mkdir(exist_ok=True)
    planted.symlink_to(outside)
    (outside / "attachments" / FOLDER).mkdir(parents=True)
    (outside / FOLDER).mkdir()
    before = tree(outside)
    with pytest.raises(InvalidInput) as refused:
        remove(workspace, FOLDER)
    assert reason(refused) == "attachments_unsafe_directory"
    assert tree(outside) == before


@pytest.mark.requirement("SEC7")
def test_a_directory_exchanged_during_removal_is_not_followed(
    workspace: Path, outside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(workspace, FOLDER, [])
    (folder_in(workspace) / "sub").mkdir()
    before = tree(outside)

    def exchange() -> None:
        planted = folder_in(workspace).with_name(f"{FOLDER}.part") / "sub"
        planted.rmdir()
        planted.symlink_to(outside)

    with between(monkeypatch, "open", "sub", exchange), pytest.raises(InvalidInput):
        remove(workspace, FOLDER)
    assert tree(outside) == before


@pytest.mark.requirement("SEC7")
def test_no_depth_keeps_a_folder_from_being_removed(workspace: Path) -> None:
    write(workspace, FOLDER, FILES)
    top = os.open(folder_in(workspace), os.O_RDONLY)
    for _ in range(3000):
        os.mkdir("d", dir_fd=top)
        below = os.open("d", os.O_RDONLY, dir_fd=top)
        os.close(top)
        top = below
    os.close(top)
    remove(workspace, FOLDER)
    assert list(folder_in(workspace).parent.iterdir()) == []


@pytest.mark.requirement("P9")
def test_removing_what_is_absent_is_no_error(workspace: Path) -> None:
    remove(workspace / "missing", FOLDER)
    remove(workspace, FOLDER)
    assert tree(workspace) == {}
    write(workspace, FOLDER, FILES)
    remove(workspace, FOLDER)
    remove(workspace, FOLDER)
    assert list(folder_in(workspace).parent.iterdir()) == []
