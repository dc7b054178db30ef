"""Exact replacements and patches of text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.errors import InvalidInput
from antiphon.workspace.edits import FilePatch, Hunk, parse_patch, replace_text

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
