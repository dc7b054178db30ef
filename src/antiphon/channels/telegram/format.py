"""Markdown of agents as messages of Telegram: its HTML, split after rendering, in UTF-16 units.

A text becomes spans, each a piece of visible text with its styles. Spans are cut into messages, and each message is
written with all its tags opened and closed, so that each is valid alone. What is no Markdown stays as it is written.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from antiphon.engine.outbox.delivery_channel import RenderedPart

_FENCE_PATTERN = re.compile(r"^[ ]{0,3}(`{3,}|~{3,})[ \t]*([\w+#.-]{0,40})[^\n]*$")
_HEADING_PATTERN = re.compile(r"^#{1,6}[ \t]+(.+?)[ \t]*#*$")
_BULLET_PATTERN = re.compile(r"^([ \t]*)[-*+][ \t]+")
_TABLE_RULE_PATTERN = re.compile(r"^\s*\|?\s*:?-{2,}:?\s*(?:\|\s*:?-{2,}:?\s*)+\|?\s*$")
_INLINE_PATTERN = re.compile(
    r"(?P<code>(?<!`)(?P<ticks>`{1,3})(?!`)(?P<code_text>[^`\n]+)(?P=ticks)(?!`))"
    r"|\[(?P<link_text>[^\[\]\n]{1,500})\]\((?P<url>(?:https?|tg|mailto):[^\s()<>]{1,1000})\)"
    r"|(?<![\w*])\*\*(?=[^\s*])(?P<bold>(?:[^*\n]|\*(?!\*))+?)(?<=\S)\*\*(?![\w*])"
    r"|(?<![\w_])__(?P<bold2>[^\s_](?:[^\n_]*[^\s_])?)__(?![\w_])"
    r"|(?<![\w~])~~(?P<strike>[^\s~](?:[^\n~]*[^\s~])?)~~(?![\w~])"
    r"|(?<![\w*])\*(?P<italic>[^\s*](?:[^\n*]*[^\s*])?)\*(?![\w*])"
    r"|(?<![\w_])_(?P<italic2>[^\s_](?:[^\n_]*[^\s_])?)_(?![\w_])"
)
_STYLE_GROUPS = (("bold", "b"), ("bold2", "b"), ("strike", "s"), ("italic", "i"), ("italic2", "i"))
MAX_NESTED_STYLES = 4


class Span(NamedTuple):
    """A piece of visible text. `tags` are its tags from the outermost on, `link` its address."""

    text: str
    tags: tuple[str, ...] = ()
    link: str | None = None


def measure(text: str) -> int:
    """Return the length of a text as Telegram counts it."""
    return len(text) + sum(char > "\uffff" for char in text)


def render(markdown: str, limit: int) -> list[RenderedPart]:
    """Return the messages of a text; the visible texts, joined, are the whole visible text."""
    parts = [_write_part(spans) for spans in _split(parse(markdown), limit)]
    return parts or [RenderedPart(markdown)]


def parse(markdown: str) -> list[Span]:
    """Return the spans of a text."""
    spans: list[Span] = []
    lines = markdown.split("\n")
    index = 0
    while index < len(lines):
        if spans:
            spans.append(Span("\n"))
        fence = _FENCE_PATTERN.match(lines[index])
        end = _find_fence_end(lines, index, fence[1]) if fence else None
        if fence and end is not None:
            spans.append(Span("\n".join(lines[index + 1 : end]), ("pre",)))
            index = end + 1
        elif table_end := _find_table_end(lines, index):
            spans.append(Span("\n".join(lines[index:table_end]), ("pre",)))
            index = table_end
        else:
            spans += _parse_line(lines[index])
            index += 1
    return [span for span in spans if span.text]


def _find_fence_end(lines: Sequence[str], start: int, fence: str) -> int | None:
    """Return the line that closes a block of code; None if there is none, so that it is ordinary text."""
    for index in range(start + 1, len(lines)):
        line = lines[index].strip()
        if len(line) >= len(fence) and not line.strip(fence[0]):
            return index
    return None


def _find_table_end(lines: Sequence[str], start: int) -> int | None:
    if "|" not in lines[start] or start + 1 >= len(lines) or not _TABLE_RULE_PATTERN.match(lines[start + 1]):
        return None
    end = start + 2
    while end < len(lines) and "|" in lines[end]:
        end += 1
    return end


def _parse_line(line: str) -> Iterator[Span]:
    if heading := _HEADING_PATTERN.match(line):
        yield from _parse_inline(heading[1], ("b",))
        return
    yield from _parse_inline(_BULLET_PATTERN.sub(r"\1• ", line, count=1), ())


def _parse_inline(text: str, tags: tuple[str, ...], link: str | None = None) -> Iterator[Span]:
    position = 0
    for match in _INLINE_PATTERN.finditer(text):
        if match.start() > position:
            yield Span(text[position : match.start()], tags, link)
        position = match.end()
        if match["code"]:
            yield Span(match["code_text"], (*tags, "code") if link is None else tags, link)
        elif match["url"]:
            yield from _parse_nested(match["link_text"], tags, match["url"])
        else:
            group, tag = next((group, tag) for group, tag in _STYLE_GROUPS if match[group])
            yield from _parse_nested(match[group], tags if tag in tags else (*tags, tag), link)
    if position < len(text):
        yield Span(text[position:], tags, link)


def _parse_nested(text: str, tags: tuple[str, ...], link: str | None) -> Iterator[Span]:
    if len(tags) >= MAX_NESTED_STYLES:
        yield Span(text, tags, link)
    else:
        yield from _parse_inline(text, tags, link)


def _split(spans: Sequence[Span], limit: int) -> Iterator[list[Span]]:
    """Yield the spans of each message; blank messages, which Telegram refuses, are left out."""
    text = "".join(span.text for span in spans)
    start = 0
    while start < len(text):
        end = start + _choose_cut(text[start : start + limit + 1], limit)
        if text[start:end].strip():
            yield list(_slice(spans, start, end))
        start = end


def _choose_cut(text: str, limit: int) -> int:
    """Return how many characters of a text make a message: up to a paragraph, a line or a word, or as many as fit."""
    most = _count_fitting(text, limit)
    if most == len(text):
        return most
    for mark in ("\n\n", "\n", " "):
        at = text.rfind(mark, most // 2, most)
        if at >= 0:
            return at + len(mark)
    return most


def _count_fitting(text: str, limit: int) -> int:
    """Return how many characters fit into so many units."""
    units = 0
    for index, char in enumerate(text):
        units += measure(char)
        if units > limit:
            return index
    return len(text)


def _slice(spans: Sequence[Span], start: int, end: int) -> Iterator[Span]:
    """Yield the spans of a range of the visible text."""
    position = 0
    for span in spans:
        first, last = max(start - position, 0), min(end - position, len(span.text))
        if first < last:
            yield span._replace(text=span.text[first:last])
        position += len(span.text)


def _write_part(spans: Sequence[Span]) -> RenderedPart:
    plain = "".join(span.text for span in spans)
    has_markup = any(span.tags or span.link for span in spans)
    if not has_markup:
        return RenderedPart(plain)
    return RenderedPart("".join(_write_span(span) for span in spans), plain)


def _write_span(span: Span) -> str:
    text = html.escape(span.text, quote=False)
    for tag in reversed(span.tags):
        text = f"<{tag}>{text}</{tag}>"
    if span.link is not None:
        text = f'<a href="{html.escape(span.link)}">{text}</a>'
    return text
