"""One Telegram bot: receives by long polling or a webhook, and sends."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Sequence
from typing import Any, Self, cast

import msgspec

from antiphon.channels.adapter import AccountHealth, InboundSink
from antiphon.channels.telegram import format as telegram_format
from antiphon.channels.telegram.bot_api import BotApi, PollConflict
from antiphon.channels.telegram.config import DEFAULT_TEXT_LIMIT, TelegramAccount, find_token
from antiphon.channels.telegram.manifest import MANIFEST
from antiphon.clock import Clock
from antiphon.engine.inbound.events import Inbound, InboundChat, InboundMedia, InboundSender
from antiphon.engine.outbox.delivery_channel import Pace, Part, Rate, Receipt, RenderedPart
from antiphon.engine.outbox.delivery_rows import Destination
from antiphon.errors import ConfigError, Refused, Unavailable

log = logging.getLogger(__name__)

POLL_SECONDS = 30.0
WEBHOOK_CHECK_SECONDS = 60.0
MIN_POLL_INTERVAL_SECONDS = 0.05  # between polls that return at once without a new update
UPDATE_KINDS = ["message", "edited_message"]
GENERAL_TOPIC = "1"
"""The topic of a forum that messages are sent to without naming it."""
DIRECT_PACE = Pace(account=Rate(1 / 30, burst=30), place=Rate(1.0, burst=3))
GROUP_PACE = Pace(account=Rate(1 / 30, burst=30), place=Rate(3.0, burst=3))  # 20 a minute
_TOPIC_ADDRESS_PATTERN = re.compile(r"(.+):topic:([0-9]+)")


class _User(msgspec.Struct):
    id: int
    is_bot: bool = False
    first_name: str = ""
    last_name: str = ""
    username: str | None = None


class _Chat(msgspec.Struct):
    id: int
    type: str
    title: str | None = None
    is_forum: bool = False


class _File(msgspec.Struct):
    file_id: str
    file_size: int | None = None
    mime_type: str | None = None
    file_name: str | None = None
    emoji: str | None = None


class _Entity(msgspec.Struct):
    type: str
    offset: int
    length: int
    user: _User | None = None


class _RepliedMessage(msgspec.Struct):
    sender: _User | None = msgspec.field(default=None, name="from")
    forum_topic_created: Any = None


class _Message(msgspec.Struct):
    message_id: int
    date: int
    chat: _Chat
    sender: _User | None = msgspec.field(default=None, name="from")
    sender_chat: _Chat | None = None
    text: str = ""
    caption: str = ""
    entities: list[_Entity] = []
    caption_entities: list[_Entity] = []
    message_thread_id: int | None = None
    is_topic_message: bool = False
    reply_to_message: _RepliedMessage | None = None
    photo: list[_File] = []
    document: _File | None = None
    voice: _File | None = None
    audio: _File | None = None
    video: _File | None = None
    video_note: _File | None = None
    animation: _File | None = None
    sticker: _File | None = None
    location: Any = None
    contact: Any = None
    poll: Any = None


class _Update(msgspec.Struct):
    update_id: int
    message: _Message | None = None
    edited_message: _Message | None = None


class _Identity(msgspec.Struct):
    id: int
    username: str = ""


_FILE_KINDS = {
    "document": "document",
    "voice": "voice message",
    "audio": "audio file",
    "video": "video",
    "video_note": "video message",
    "animation": "animation",
    "sticker": "sticker",
}
_OTHER_KINDS = ("location", "contact", "poll")


class TelegramAdapter:
    webhook_secret_header = "x-telegram-bot-api-secret-token"  # noqa: S105

    def __init__(
        self, account_id: str, settings: TelegramAccount, token: str, webhook_secret: str | None, clock: Clock
    ) -> None:
        self._account_id = account_id
        self._settings = settings
        self._api = BotApi(
            token, settings.api_root, timeout_seconds=settings.timeout_seconds, proxy=settings.proxy
        )
        self._webhook_secret = webhook_secret
        self._identity: _Identity | None = None
        self._next_update: int | None = None
        interval = WEBHOOK_CHECK_SECONDS if settings.webhook_url else POLL_SECONDS
        self.health = AccountHealth(clock, max_silence_seconds=2 * interval)

    @classmethod
    async def create(cls, account_id: str, settings: TelegramAccount, clock: Clock) -> Self:
        """Return the adapter of a bot. Its secrets are read in a thread.

        Raises:
            ConfigError: a secret is missing.
        """
        token = find_token(settings, account_id)
        if token is None:
            raise ConfigError(
                f"Account {account_id!r} of Telegram has no token.", "Set its 'botToken' or 'tokenFile'."
            )
        revealed = (await asyncio.to_thread(token.reveal)).strip()
        if not re.fullmatch(r"[\w:-]+", revealed, re.ASCII):
            raise ConfigError(
                f"The token of account {account_id!r} of Telegram is not one.", "Copy it from @BotFather."
            )
        secret = settings.webhook_secret if settings.webhook_url else None
        webhook_secret = None if secret is None else await asyncio.to_thread(secret.reveal)
        return cls(account_id, settings, revealed, webhook_secret, clock)

    @property
    def identity(self) -> str | None:
        return f"@{self._identity.username}" if self._identity else None

    @property
    def webhook_secret(self) -> str | None:
        return self._webhook_secret

    async def connect(self) -> None:
        self._identity = msgspec.convert(await self._api.call("getMe"), _Identity)
        self.health.prove()

    async def close(self) -> None:
        await self._api.close()

    # --- receiving ---

    async def receive(self, sink: InboundSink) -> None:
        if self._settings.webhook_url:
            await self._keep_webhook(self._settings.webhook_url)
            return
        info = await self._api.call("getWebhookInfo")
        if isinstance(info, dict) and info.get("url"):  # pyright: ignore[reportUnknownMemberType]
            await self._api.call("deleteWebhook", drop_pending_updates=False)
        while True:
            try:
                updates = await self._api.poll(self._next_update, POLL_SECONDS, UPDATE_KINDS)
            except PollConflict as error:
                self.health.report("degraded", f"another program receives for this bot: {error}")
                await asyncio.sleep(POLL_SECONDS)
                continue
            self.health.prove()
            taken = await self._take_updates(updates, sink)
            if updates and not taken:
                raise Unavailable("Messages could not be stored yet.", "They are asked for again.")
            if not updates:
                await asyncio.sleep(MIN_POLL_INTERVAL_SECONDS)

    async def _take_updates(self, updates: Sequence[dict[str, Any]], sink: InboundSink) -> bool:
        """Take updates, those of one chat in order. Returns whether the first one was taken.

        The next poll confirms all before the first that was not taken, and reports that one again.
        """
        by_chat: dict[object, list[tuple[int, dict[str, Any]]]] = {}
        for index, update in enumerate(updates):
            by_chat.setdefault(_find_chat_id(update), []).append((index, update))
        failed = await asyncio.gather(*(self._take_in_order(found, sink) for found in by_chat.values()))
        first_failed = min((index for index in failed if index is not None), default=len(updates))
        if first_failed:
            self._next_update = int(updates[first_failed - 1]["update_id"]) + 1
        return first_failed == len(updates)

    async def _take_in_order(
        self, updates: Sequence[tuple[int, dict[str, Any]]], sink: InboundSink
    ) -> int | None:
        """Take the updates of one chat. Returns the position of the first that was not taken."""
        for index, update in updates:
            if not await self._take_update(update, sink):
                return index
        return None

    async def _take_update(self, update: dict[str, Any], sink: InboundSink) -> bool:
        try:
            inbound = self._translate(msgspec.convert(update, _Update))
        except (msgspec.MsgspecError, ValueError) as error:
            return await sink.reject(str(update.get("update_id")), f"it could not be read: {error}")
        return inbound is None or await sink.take(inbound)

    async def _keep_webhook(self, url: str) -> None:
        """Register the webhook, then look after it until cancelled."""
        await self._api.call(
            "setWebhook",
            url=url,
            secret_token=self._webhook_secret,
            allowed_updates=UPDATE_KINDS,
            max_connections=1,  # so that messages arrive in their order
        )
        while True:
            info = await self._api.call("getWebhookInfo")
            registered = info.get("url") if isinstance(info, dict) else None  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
            if registered != url:
                self.health.report("degraded", "another program has changed the webhook")
                return
            self.health.prove()
            await asyncio.sleep(WEBHOOK_CHECK_SECONDS)

    async def take_webhook(self, body: bytes, sink: InboundSink) -> bool:
        try:
            update = msgspec.json.decode(body)
        except msgspec.DecodeError:
            return True  # it would be the same next time
        if not isinstance(update, dict) or not isinstance(update.get("update_id"), int):  # pyright: ignore[reportUnknownMemberType]
            return True
        self.health.prove()
        return await self._take_update(cast("dict[str, Any]", update), sink)

    def _translate(self, update: _Update) -> Inbound | None:
        message = update.message or update.edited_message
        if message is None or message.sender is None or message.chat.type == "channel":
            return None
        own_id = self._identity.id if self._identity else None
        text, is_mentioned = self._read_text(message)
        replied = message.reply_to_message
        # The first message of a topic is what all others there seem to reply to.
        is_reply = replied is not None and replied.forum_topic_created is None and replied.sender is not None
        sender = message.sender
        name = f"{sender.first_name} {sender.last_name}".strip() or sender.username or str(sender.id)
        return Inbound(
            account=self._account_id,
            event_id=str(update.update_id),
            message_id=str(message.message_id),
            chat=InboundChat(
                kind="direct" if message.chat.type == "private" else "group",
                id=str(message.chat.id),
                title=message.chat.title,
            ),
            sender=InboundSender(
                id=str(sender.id),
                name=name,
                is_bot=sender.is_bot or message.sender_chat is not None,
                is_self=sender.id == own_id,
            ),
            sent_at=message.date * 1000,
            text=text,
            thread_id=_find_thread(message),
            is_mentioned=is_mentioned,
            is_reply_to_self=is_reply
            and replied is not None
            and replied.sender is not None
            and replied.sender.id == own_id,
            media=tuple(_list_media(message)),
            is_edited=update.edited_message is not None,
        )

    def _read_text(self, message: _Message) -> tuple[str, bool]:
        """Return the text, without the bot's name behind a command, and whether it names the bot."""
        text = message.text or message.caption
        own_name = (self._identity.username if self._identity else "").lower()
        own_id = self._identity.id if self._identity else None
        units = text.encode("utf-16-le")
        is_mentioned = False
        for entity in message.entities or message.caption_entities:
            start, end = 2 * entity.offset, 2 * (entity.offset + entity.length)
            named = units[start:end].decode("utf-16-le", "replace").lower()
            if (entity.type == "mention" and named == f"@{own_name}") or (
                entity.type == "text_mention" and entity.user is not None and entity.user.id == own_id
            ):
                is_mentioned = True
            elif entity.type == "bot_command" and entity.offset == 0 and named.endswith(f"@{own_name}"):
                is_mentioned = True
                head = units[start:end].decode("utf-16-le", "replace").partition("@")[0]
                text = head + units[end:].decode("utf-16-le", "replace")
        return text, is_mentioned

    async def fetch(self, media: InboundMedia, limit: int) -> bytes:
        return await self._api.load_file(media.ref, min(limit, MANIFEST.limits.download_bytes))

    # --- sending ---

    def get_pace(self, destination: Destination) -> Pace:
        return GROUP_PACE if (destination.to or "").startswith("-") else DIRECT_PACE

    def render(self, text: str) -> list[RenderedPart]:
        limit = min(self._settings.text_chunk_limit or DEFAULT_TEXT_LIMIT, MANIFEST.limits.text_length)
        return telegram_format.render(text, limit)

    async def send(self, part: Part) -> Receipt:
        chat_id, thread_id = _parse_address(part.destination)
        result = await self._api.call(
            "sendMessage",
            chat_id=chat_id,
            message_thread_id=None if thread_id in (None, GENERAL_TOPIC) else int(thread_id),
            text=part.text,
            parse_mode="HTML" if part.has_markup else None,
            link_preview_options=None if self._settings.link_preview else {"is_disabled": True},
        )
        self.health.prove()
        message_id = result.get("message_id") if isinstance(result, dict) else None  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        return Receipt(None if message_id is None else str(message_id))  # pyright: ignore[reportUnknownArgumentType]

    async def show_typing(self, destination: Destination) -> None:
        chat_id, thread_id = _parse_address(destination)
        await self._api.call(
            "sendChatAction",
            chat_id=chat_id,
            action="typing",
            message_thread_id=None if thread_id is None else int(thread_id),
        )


def _parse_address(destination: Destination) -> tuple[int | str, str | None]:
    """Return the chat and the topic of a destination; also of `<chat>:topic:<id>` and `telegram:<chat>`."""
    address, thread_id = MANIFEST.strip_prefix(destination.to or ""), destination.thread_id
    if match := _TOPIC_ADDRESS_PATTERN.fullmatch(address):
        address, thread_id = match[1], thread_id or match[2]
    if re.fullmatch(r"-?[0-9]{1,19}", address):
        chat: int | str = int(address)
    elif re.fullmatch(r"@\w{4,64}", address):
        chat = address
    else:
        raise Refused(f"{address[:80]!r} is not a chat of Telegram.", "Use the id of the chat.", kind="gone")
    if thread_id is not None and not thread_id.isdecimal():
        raise Refused(f"{thread_id[:80]!r} is not a topic.", "Use the number of the topic.", kind="gone")
    return chat, thread_id


def _find_thread(message: _Message) -> str | None:
    """Return the topic. Messages of a forum without one are in General; threads of replies are no topics."""
    if message.is_topic_message and message.message_thread_id is not None:
        return str(message.message_thread_id)
    return GENERAL_TOPIC if message.chat.is_forum and message.chat.type != "private" else None


def _list_media(message: _Message) -> list[InboundMedia]:
    media: list[InboundMedia] = []
    if message.photo:
        largest = max(message.photo, key=lambda size: size.file_size or 0)
        media.append(InboundMedia(ref=largest.file_id, kind="image", size=largest.file_size))
    for field, kind in _FILE_KINDS.items():
        file: _File | None = getattr(message, field)
        if file is not None and not (field == "document" and message.animation is not None):
            media.append(
                InboundMedia(
                    ref=file.file_id,
                    kind=kind,
                    mime_type=file.mime_type if field == "document" else None,
                    name=file.file_name or file.emoji,
                    size=file.file_size,
                )
            )
    media += [InboundMedia(ref="", kind=kind) for kind in _OTHER_KINDS if getattr(message, kind) is not None]
    return media


def _find_chat_id(update: dict[str, Any]) -> object:
    message = update.get("message") or update.get("edited_message")
    chat = cast("dict[str, Any]", message).get("chat") if isinstance(message, dict) else None
    return cast("dict[str, Any]", chat).get("id") if isinstance(chat, dict) else None
