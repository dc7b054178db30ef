"""Images that come with a message: base64 in, image blocks out. Anything else is refused by name."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from typing import Any

import msgspec

from antiphon.errors import InvalidInput
from antiphon.messages import Image, Text

TYPES = ("image/png", "image/jpeg", "image/gif", "image/webp")
MOST = 20


class Attachment(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Open: clients add what they know of a file."""

    content: Any = None
    mime_type: str | None = None
    type: str | None = None
    file_name: str | None = None


def content(text: str, attachments: Sequence[Attachment]) -> str | list[Text | Image]:
    """The content of a message: its text alone, or blocks when images come with it."""
    if not attachments:
        return text
    if len(attachments) > MOST:
        raise InvalidInput(f"At most {MOST} attachments are taken.", "Send fewer.", field="attachments")
    images = [_image(number, attachment) for number, attachment in enumerate(attachments)]
    return [*([Text(text=text)] if text.strip() else []), *images]


def _image(number: int, attachment: Attachment) -> Image:
    data = attachment.content if isinstance(attachment.content, str) else ""
    kind = attachment.mime_type or ""
    if data.startswith("data:"):
        head, _, data = data.partition(",")
        kind = head[5:].partition(";")[0] or kind
    return image(data, kind, f"attachments/{number}")


def image(data: str, kind: str, field: str) -> Image:
    """An image as it was sent: of a type that models take, and in base64."""
    if kind not in TYPES:
        raise InvalidInput(
            f"An image is of type {kind[:80]!r}.", f"Send one of {', '.join(TYPES)}.", field=field
        )
    try:
        base64.b64decode(data, validate=True)
    except (ValueError, binascii.Error):
        data = ""
    if not data:
        raise InvalidInput("An image is not base64.", "Send the file itself in base64.", field=field)
    return Image(data=data, mime_type=kind)
