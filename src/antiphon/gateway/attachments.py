"""Decodes the images attached to a message into image blocks. Other attachments are rejected by name."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from typing import Any

import msgspec

from antiphon.errors import InvalidInput
from antiphon.messages import ImageBlock, TextBlock

IMAGE_MIME_TYPES = ("image/png", "image/jpeg", "image/gif", "image/webp")
MAX_ATTACHMENTS_PER_MESSAGE = 20


class ImageAttachment(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Open: clients add what they know of a file."""

    content: Any = None
    mime_type: str | None = None
    type: str | None = None
    file_name: str | None = None


def build_message_content(
    text: str, attachments: Sequence[ImageAttachment]
) -> str | list[TextBlock | ImageBlock]:
    """Return the content of a message: plain text, or blocks if images are attached."""
    if not attachments:
        return text
    if len(attachments) > MAX_ATTACHMENTS_PER_MESSAGE:
        raise InvalidInput(
            f"At most {MAX_ATTACHMENTS_PER_MESSAGE} attachments are taken.",
            "Send fewer.",
            field="attachments",
        )
    images = [_parse_attachment(number, attachment) for number, attachment in enumerate(attachments)]
    return [*([TextBlock(text=text)] if text.strip() else []), *images]


def _parse_attachment(number: int, attachment: ImageAttachment) -> ImageBlock:
    data = attachment.content if isinstance(attachment.content, str) else ""
    kind = attachment.mime_type or ""
    if data.startswith("data:"):
        head, _, data = data.partition(",")
        kind = head[5:].partition(";")[0] or kind
    return parse_image(data, kind, f"attachments/{number}")


def parse_image(data: str, kind: str, field: str) -> ImageBlock:
    """Return an image block. The image must be of a type that models accept, and in base64."""
    if kind not in IMAGE_MIME_TYPES:
        raise InvalidInput(
            f"An image is of type {kind[:80]!r}.", f"Send one of {', '.join(IMAGE_MIME_TYPES)}.", field=field
        )
    try:
        base64.b64decode(data, validate=True)
    except (ValueError, binascii.Error):
        data = ""
    if not data:
        raise InvalidInput("An image is not base64.", "Send the file itself in base64.", field=field)
    return ImageBlock(data=data, mime_type=kind)
