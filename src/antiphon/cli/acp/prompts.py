"""Turns the blocks of an editor's prompt into a message.

Text stays as it is, with a blank line between two blocks of it. A resource becomes a link where it stands, and its
text follows the message as data, in a fence that the text cannot close. Images become attachments. What an agent
cannot read is refused, never left out.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, TypeAlias
from urllib.parse import quote

import msgspec

from antiphon.errors import InvalidInput

Json: TypeAlias = dict[str, Any]

MAX_RESOURCE_NAME_CHARACTERS = 200
_BACKTICKS_PATTERN = re.compile(r"`+")
_UNSAFE_IN_LINK_PATTERN = re.compile(r"[\s\x00-\x1f\x7f\[\]()<>\\`]+")


class EditorPrompt(msgspec.Struct, frozen=True):
    text: str
    attachments: list[Json]
    """As `chat.send` takes them."""
    is_plain_text: bool
    """Whether the editor sent one block of text, which may be a slash command."""


class _MessageBody:
    """The texts and links of a prompt, in their order."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._ends_with_text = False

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def add_text(self, text: str) -> None:
        """Add a text, after a blank line if a text is before it."""
        if not text:
            return
        if self._ends_with_text and not self._pieces[-1].endswith("\n\n"):
            self._pieces.append("\n\n")
        self._pieces.append(text)
        self._ends_with_text = True

    def add_link(self, link: str) -> None:
        """Add a link where it stands: it may be within a sentence."""
        self._pieces.append(link)
        self._ends_with_text = False


def translate_prompt(blocks: Sequence[object]) -> EditorPrompt:
    """Return the message for a prompt.

    Raises:
        InvalidInput: it has nothing to send, or a block that an agent cannot read.
    """
    body = _MessageBody()
    resources: list[str] = []
    attachments: list[Json] = []
    for block in blocks:
        match block:
            case {"type": "text", "text": str(text)}:
                body.add_text(text)
            case {"type": "image", "data": str(data), "mimeType": str(mime_type)}:
                attachments.append(_build_attachment(data, mime_type))
            case {"type": "resource_link", "uri": str(uri), "title": str(name)} | {
                "type": "resource_link",
                "uri": str(uri),
                "name": str(name),
            }:
                body.add_link(_format_link(uri, name))
            case {"type": "resource_link", "uri": str(uri)}:
                body.add_link(_format_link(uri, ""))
            case {"type": "resource", "resource": {"uri": str(uri), "text": str(text)}}:
                body.add_link(_format_link(uri, ""))
                resources.append(_format_resource(uri, text))
            case {
                "type": "resource",
                "resource": {"uri": str(uri), "blob": str(blob), "mimeType": str(kind)},
            } if kind.startswith("image/"):
                body.add_link(_format_link(uri, ""))
                attachments.append(_build_attachment(blob, kind))
            case _:
                raise _build_refusal(block)
    text = "\n\n".join(filter(str.strip, [body.text, *resources]))
    if not text and not attachments:
        raise InvalidInput("The prompt is empty.", "Send text or an image.", field="prompt")
    is_plain_text = len(blocks) == 1 and not attachments and not resources
    return EditorPrompt(text, attachments, is_plain_text)


def _build_refusal(block: object) -> InvalidInput:
    match block:
        case {"type": "resource", "resource": {"uri": str(uri)}}:
            what = f"The content of {uri[:MAX_RESOURCE_NAME_CHARACTERS]!r} is neither text nor an image."
        case {"type": str(kind)}:
            what = f"A prompt cannot contain this block of type {kind!r}."
        case _:
            what = "A block of the prompt has no type."
    return InvalidInput(what, "Send text, images, text files or links.", field="prompt")


def _build_attachment(data: str, mime_type: str) -> Json:
    return {"type": "image", "mimeType": mime_type, "content": data}


def _format_link(uri: str, name: str) -> str:
    """Return a link in Markdown; without a name, with the last part of the address."""
    given = name.strip() or uri.rstrip("/").rpartition("/")[2] or uri
    label = _UNSAFE_IN_LINK_PATTERN.sub(" ", given)[:MAX_RESOURCE_NAME_CHARACTERS].strip() or "resource"
    return f"[@{label}]({_UNSAFE_IN_LINK_PATTERN.sub(_percent_encode, uri)})"


def _percent_encode(match: re.Match[str]) -> str:
    return quote(match[0], safe="")


def _format_resource(uri: str, text: str) -> str:
    longest = max((len(found) for found in _BACKTICKS_PATTERN.findall(text)), default=0)
    fence = "`" * max(3, longest + 1)
    name = _UNSAFE_IN_LINK_PATTERN.sub(_percent_encode, uri)
    end = "" if text.endswith("\n") else "\n"
    return f"Content of {name}, attached as data:\n{fence}\n{text}{end}{fence}"
