"""Markdown as messages of Telegram: what people see, what the service takes, and where texts are split."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.channels.telegram.format import measure, parse, render
from channels.telegram.fake import MAX_UNITS, read_visible

pytestmark = pytest.mark.requirement("CH21", "N4")

PIECES = st.sampled_from(
    ["**", "__", "*", "_", "~~", "`", "```", "\n", " ", "[", "](", ")", "https://a.b/c", "# ", "- ", "|", "--", "<b>",
     "&amp;", "é", "😀", "word", "a b", "\\", "> "]
)  # fmt: skip
TEXTS = st.lists(st.one_of(PIECES, st.text(max_size=8)), max_size=60).map("".join)


@pytest.mark.parametrize(
    ("markdown", "html"),
    [
        ("plain & <simple>", None),
        ("**bold** and *it*", "<b>bold</b> and <i>it</i>"),
        ("__bold__ _it_ ~~gone~~", "<b>bold</b> <i>it</i> <s>gone</s>"),
        ("**a *b* c**", "<b>a </b><b><i>b</i></b><b> c</b>"),
        ("`a < b`", "<code>a &lt; b</code>"),
        ("```py\nif a < b:\n    **no**\n```", "<pre>if a &lt; b:\n    **no**</pre>"),
        ("[site](https://a.b/?x=1&y=2)", '<a href="https://a.b/?x=1&amp;y=2">site</a>'),
        ("# Title\n- one\n- two", "<b>Title</b>\n• one\n• two"),
        ("snake_case_name and 2*3*4", None),
        ("a ** b ** c", None),
        ("```\nnever closed", None),
        ("| a | b |\n|---|---|\n| 1 | 2 |", "<pre>| a | b |\n|---|---|\n| 1 | 2 |</pre>"),
        ("[no](javascript:alert)", None),
    ],
)
def test_markdown_becomes_html_and_the_rest_stays_as_it_is(markdown: str, html: str | None) -> None:
    [part] = render(markdown, 4000)
    assert part.text == (markdown if html is None else html)
    assert (part.plain is None) is (html is None)


@given(TEXTS, st.integers(20, 300))
def test_each_part_is_taken_alone_and_together_they_are_the_whole_text(markdown: str, limit: int) -> None:
    whole = "".join(span.text for span in parse(markdown))
    parts = render(markdown, limit)
    shown = [part.text if part.plain is None else read_visible(part.text) for part in parts]
    assert [part.text if part.plain is None else part.plain for part in parts] == shown
    if whole.strip():
        assert all(text.strip() and measure(text) <= limit for text in shown)
        assert re.sub(r"\s", "", "".join(shown)) == re.sub(r"\s", "", whole)


@given(st.integers(1, 9))
def test_lengths_are_counted_in_utf_16(number: int) -> None:
    parts = render("😀" * 2048 * number, MAX_UNITS)
    assert [measure(part.text) for part in parts] == [MAX_UNITS] * number


def test_texts_are_split_at_paragraphs_then_lines_then_words() -> None:
    text = "first words\n\nsecond words here\nthird"
    assert [part.text for part in render(text, 20)] == ["first words\n\n", "second words here\n", "third"]
    assert [part.text for part in render("a" * 25 + " b", 10)] == ["a" * 10, "a" * 10, "aaaaa b"]


def test_styles_are_closed_and_opened_again_where_a_text_is_split() -> None:
    parts = render("**one two three four**", 10)
    assert [part.text for part in parts] == ["<b>one two </b>", "<b>three four</b>"]
