"""What a channel hands to the gateway: one message of a person, in the terms that all chat services share.

The chat and the sender are different types, so that an answer to a group cannot go to a person by mistake.
"""

from __future__ import annotations

from typing import Literal

import msgspec

ChatKind = Literal["direct", "group", "channel"]


class InboundChat(msgspec.Struct, frozen=True, kw_only=True):
    """The chat that a message was written in."""

    kind: ChatKind
    id: str
    title: str | None = None


class InboundSender(msgspec.Struct, frozen=True, kw_only=True):
    """Who wrote a message, as the service says; `id` cannot be chosen by the person."""

    id: str
    name: str = ""
    is_bot: bool = False
    is_self: bool = False


class InboundMedia(msgspec.Struct, frozen=True, kw_only=True):
    """A file of a message, which `fetch` of the channel can load."""

    ref: str
    kind: str
    """What it is, as people call it: image, voice message, document."""
    mime_type: str | None = None
    name: str | None = None
    size: int | None = None


class Inbound(msgspec.Struct, frozen=True, kw_only=True):
    """A message that a service reports. `event_id` is the same whenever it is reported again."""

    account: str
    event_id: str
    message_id: str
    chat: InboundChat
    sender: InboundSender
    sent_at: int
    text: str = ""
    thread_id: str | None = None
    is_mentioned: bool = False
    """Whether the service marks that the message addresses this account."""
    is_reply_to_self: bool = False
    media: tuple[InboundMedia, ...] = ()
    is_edited: bool = False
