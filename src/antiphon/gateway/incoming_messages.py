"""Texts and images from clients as messages of a session, and slash commands instead of messages.

`/new`, `/reset` and `/stop` are commands. A command repeated with the same idempotency key has no further effect. It
needs the scope of its own method: `/new` from a caller who may not reset is rejected, not sent as text. `/send` is
handled by `operations`.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from antiphon.access import Caller
from antiphon.errors import InvalidInput
from antiphon.messages import ImageBlock, TextBlock
from antiphon.operations.operations import Operations
from antiphon.operations.types import IncomingMessage, MessageReceipt

IMAGE_MIME_TYPES = ("image/png", "image/jpeg", "image/gif", "image/webp")
MAX_ATTACHMENTS_PER_MESSAGE = 20
STOP_COMMANDS = frozenset({"/stop", "/abort", "stop", "abort"})
_RESET_PATTERN = re.compile(r"/(new|reset)", re.IGNORECASE)
CHANNELS_SHOWN_IN_SESSION = frozenset({"webchat", "last"})
"""Channels that show the session itself, so that answers need no separate delivery."""


class ImageAttachment(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """An image attached to a message. Other fields that clients add are ignored."""

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
            f"At most {MAX_ATTACHMENTS_PER_MESSAGE} attachments are accepted.",
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
            f"Images of type {kind[:80]!r} are not supported.",
            f"Send one of {', '.join(IMAGE_MIME_TYPES)}.",
            field=field,
        )
    try:
        base64.b64decode(data, validate=True)
    except (ValueError, binascii.Error):
        data = ""
    if not data:
        raise InvalidInput("An image is not valid base64.", "Send the file itself in base64.", field=field)
    return ImageBlock(data=data, mime_type=kind)


def check_channel(field: str, channel: str | None) -> None:
    """Reject a channel that this gateway does not have.

    Raises:
        InvalidInput: naming the field.
    """
    if channel and channel.lower() not in CHANNELS_SHOWN_IN_SESSION:
        raise InvalidInput(
            f"{field!r} is {channel[:80]!r}, a channel that this gateway does not have.",
            "Leave it out, or pass 'webchat': the answer is shown in the session.",
            field=field,
        )


class SubmitOutcome(msgspec.Struct, frozen=True):
    """The result of a message: an accepted run, or a completed command."""

    session_key: str
    accepted: MessageReceipt | None = None
    done: Literal["reset", "stopped"] | None = None
    run_ids: list[str] = []


async def submit_or_run_command(
    operations: Operations, caller: Caller, message: IncomingMessage
) -> SubmitOutcome:
    """Submit a message, or run the slash command that it is."""
    # A text with a provenance, from another session or program, is never a command.
    can_be_command = isinstance(message.content, str) and message.provenance is None and not message.literal
    text = message.content.strip() if can_be_command and isinstance(message.content, str) else ""
    if text.lower() in STOP_COMMANDS:
        stopped = await operations.runs.stop(caller, message.session, key=message.idempotency_key)
        return SubmitOutcome(message.session, done="stopped", run_ids=stopped.run_ids)
    if match := _RESET_PATTERN.fullmatch(text):
        reason = "new" if match[1].lower() == "new" else "reset"
        view = await operations.conversations.reset(
            caller, message.session, reason, key=message.idempotency_key
        )
        return SubmitOutcome(view.key, done="reset")
    accepted = await operations.messages.submit(caller, message)
    return SubmitOutcome(accepted.session_key, accepted=accepted)
