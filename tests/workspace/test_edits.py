"""Exact replacements and patches of text."""

from __future__ import annotations

import time
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.errors import InvalidInput, TooLarge
from antiphon.workspace import edits
from antiphon.workspace.edits import MAX_HUNKS_PER_FILE, FilePatch, Hunk, parse_patch

replace_text = partial(edits.replace_text, max_characters=100_000)
MAX_CPU_SECONDS = 20.0  # for work that took minutes when it was quadratic
TEXT = "one\ntwo\nthree\ntwo\n"


def test_a_text_that_occurs_once_is_replaced() -> None:
    assert replace_text(TEXT, "three", "3") == "one\ntwo\n3\ntwo\n"
    assert replace_text(TEXT, "two", "2", replace_all=True) == "one\n2\nthree\n2\n"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("two", "2", "occurs 2 times, in lines 2, 4"),
        ("thre  e", "3", "most similar lines are 3: 'three'"),
        ("nothing like it", "3", "does not occur in the file. Copy"),
        ("", "3", "'oldText' is empty"),
        ("one", "one", "the same"),
    ],
)
def test_a_text_that_cannot_be_replaced_is_refused_with_the_way_out(old: str, new: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        replace_text(TEXT, old, new)


def test_a_replacement_that_would_fill_the_memory_is_not_built() -> None:
    with pytest.raises(TooLarge, match="would have 100000000 characters"):
        replace_text("a" * 10_000, "a", "x" * 10_000, replace_all=True)


def test_similar_lines_of_a_repetitive_file_are_found_quickly() -> None:
    start = time.process_time()
    content = "".join(f"{'a b' * 60}{number}\n" for number in range(5000))
    with pytest.raises(InvalidInput, match="does not occur"):
        replace_text(content, "b a" * 66 + "z", "x")
    assert time.process_time() - start < MAX_CPU_SECONDS


PATCH = """*** Begin Patch
*** Add File: new/file.txt
+first
+
+third
*** Update File: a.py
*** Move to: b.py
@@ def second
-    return 1
+    return 2
*** Delete File: old.txt
*** End Patch
"""


def test_a_patch_is_parsed_into_files() -> None:
    assert parse_patch(PATCH) == [
        FilePatch("add", "new/file.txt", "first\n\nthird\n"),
        FilePatch(
            "update",
            "a.py",
            hunks=(Hunk(("    return 1",), ("    return 2",), "def second"),),
            move_to="b.py",
        ),
        FilePatch("delete", "old.txt"),
    ]


def test_a_hunk_is_applied_after_its_context() -> None:
    content = "def first\n    return 1\ndef second\n    return 1\n"
    assert parse_patch(PATCH)[1].apply(content) == "def first\n    return 1\ndef second\n    return 2\n"


@pytest.mark.parametrize(
    ("body", "content", "expected"),
    [
        ("@@\n one\n-two\n+2\n three", TEXT, "one\n2\nthree\ntwo\n"),
        ("@@\n-two\n+2\n*** End of File", TEXT, "one\ntwo\nthree\n2\n"),
        ("@@\n+four", TEXT, TEXT + "four\n"),
        ("@@ one\n+1.5", TEXT, "one\n1.5\ntwo\nthree\ntwo\n"),
        ("@@\n-two  \n+2", "one\ntwo\n", "one\n2\n"),
        ("@@\n-one\n+1\n@@\n-two\n+2", "one\ntwo", "1\n2"),
    ],
)
def test_hunks_change_the_lines_they_name(body: str, content: str, expected: str) -> None:
    patch = parse_patch(f"*** Begin Patch\n*** Update File: f\n{body}\n*** End Patch")[0]
    assert patch.apply(content) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "*** Begin Patch",
        "*** Begin Patch\n*** End Patch",
        "*** Begin Patch\nhello\n*** End Patch",
        "*** Begin Patch\n*** Add File: a\nno plus\n*** End Patch",
        "*** Begin Patch\n*** Delete File: a\n+x\n*** End Patch",
        "*** Begin Patch\n*** Update File: a\n*** End Patch",
        "*** Begin Patch\n*** Update File: a\n@@\n!x\n*** End Patch",
        "*** Begin Patch\n*** Delete File: a\n*** Delete File: a\n*** End Patch",
    ],
)
def test_what_is_not_a_patch_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput):
        parse_patch(text)


def build_update(hunks: int) -> str:
    body = "".join(f"@@\n-line {number}\n+changed\n" for number in range(hunks))
    return f"*** Begin Patch\n*** Update File: f\n{body}*** End Patch"


def test_many_hunks_in_a_long_file_are_applied_quickly() -> None:
    start = time.process_time()
    content = "".join(f" line {number}\n" for number in range(60_000))
    changed = parse_patch(build_update(MAX_HUNKS_PER_FILE))[0].apply(content).split("\n")
    assert changed[:MAX_HUNKS_PER_FILE] == ["changed"] * MAX_HUNKS_PER_FILE
    assert changed[MAX_HUNKS_PER_FILE] == f" line {MAX_HUNKS_PER_FILE}"
    assert time.process_time() - start < MAX_CPU_SECONDS


def test_the_number_of_changes_is_limited() -> None:
    files = "".join(f"*** Delete File: {number}\n" for number in range(50_000))
    start = time.process_time()
    for patch in (build_update(MAX_HUNKS_PER_FILE + 1), f"*** Begin Patch\n{files}*** End Patch"):
        with pytest.raises(TooLarge, match="at most 100 files, each in at most 1000 places"):
            parse_patch(patch)
    assert time.process_time() - start < MAX_CPU_SECONDS


def test_only_newlines_separate_lines() -> None:
    body = "*** Add File: f\n+a\x0cb\u2028c\x85d\n"
    [patch] = parse_patch(f"*** Begin Patch\r\n{body}*** End Patch\r\n")
    assert patch.content == "a\x0cb\u2028c\x85d\n"


def test_a_hunk_that_does_not_match_is_refused() -> None:
    patch = parse_patch("*** Begin Patch\n*** Update File: f\n@@\n-nowhere\n+x\n*** End Patch")[0]
    with pytest.raises(InvalidInput, match="'nowhere' was not found"):
        patch.apply(TEXT)


_lines = st.lists(st.text(alphabet="ab \t-+@*", max_size=6), min_size=1, max_size=8)


@given(before=_lines, after=_lines)
def test_a_patch_of_the_whole_file_gives_the_new_file(before: list[str], after: list[str]) -> None:
    body = [f"-{line}" for line in before] + [f"+{line}" for line in after]
    text = "\n".join(["*** Begin Patch", "*** Update File: f", "@@", *body, "*** End Patch"])
    assert parse_patch(text)[0].apply("\n".join(before)) == "\n".join(after)
