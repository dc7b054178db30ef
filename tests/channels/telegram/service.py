"""Telegram for the contract suite."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

from channels.service import Json, Service
from channels.telegram.fake import BOT_ID, BOT_NAME, TOKEN, FakeTelegram, Fault
from support.app_fixture import BOUND
from support.model_provider import serve_asgi


class TelegramService(Service):
    name = "telegram"
    webhook_secret = "a-secret-of-the-webhook"

    def __init__(self) -> None:
        self.fake = FakeTelegram()
        self._server = AsyncExitStack()

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[FakeTelegram]:
        async with self._server:
            await self._listen(0)
            try:
                yield self.fake
            finally:
                self.fake.close()

    async def _listen(self, port: int) -> None:
        self.fake.url = await self._server.enter_async_context(serve_asgi(self.fake, port))

    @asynccontextmanager
    async def unreachable(self) -> AsyncGenerator[None]:
        port = urlsplit(self.fake.url).port or 0
        await self._server.aclose()
        yield
        await self._listen(port)

    @property
    def credentials(self) -> Json:
        return {"botToken": TOKEN}

    @property
    def broken_credentials(self) -> Json:
        return {"botToken": "654321:" + "B" * 35}

    @property
    def webhook_settings(self) -> Json:
        return {"webhookUrl": "https://bots.example.org/x", "webhookSecret": self.webhook_secret}

    def build_block(self, settings: Json) -> Json:
        token = "654321:" + "B" * 35 if self.refuse_credentials else TOKEN
        written = {} if "accounts" in settings else {"botToken": token}
        return {"apiRoot": self.fake.url, **written, **settings}

    async def write(
        self,
        text: str,
        *,
        user: str,
        chat: str | None = None,
        thread: str | None = None,
        mention: bool = False,
        is_bot: bool = False,
        replies_to_bot: bool = False,
        image: str | None = None,
        size: int = 0,
    ) -> object:
        fields: Json = {}
        if thread is not None:
            fields |= {"message_thread_id": int(thread), "is_topic_message": True}
        if is_bot:
            fields["sender"] = {"is_bot": True}
        if replies_to_bot:
            fields["reply_to_message"] = {"message_id": 1, "from": {"id": BOT_ID, "is_bot": True}}
        if image is not None:
            fields |= {"photo": [{"file_id": image, "file_size": size}], "caption": text}
        shown = f"@{BOT_NAME} {text}" if mention else text
        return self.fake.write(
            "" if image else shown, user=int(user), chat=None if chat is None else int(chat), **fields
        )

    async def write_as_self(self, text: str) -> None:
        self.fake.write(text, user=BOT_ID, chat=7)

    async def write_unreadable(self) -> None:
        update = self.fake.build_update("no date", user=7)
        update["message"]["date"] = "yesterday"
        self.fake.report(update)

    async def repeat(self, event: Any) -> None:
        self.fake.report(event)

    async def post_webhook(self, url: str, text: str, secret: str | None) -> int:
        return await self.fake.post_webhook(self.fake.build_update(text, user=7), url=url, secret=secret)

    def add_group(self, chat: str, *threads: str) -> None:
        self.fake.add_group(int(chat), "Team", *map(int, threads))

    def delete_thread(self, chat: str, thread: str) -> None:
        self.fake.topics[int(chat)].discard(int(thread))

    def add_image(self, ref: str, content: bytes) -> None:
        self.fake.files[ref] = content

    def take_next_send_then_reset(self) -> None:
        self.fake.fail("sendMessage", Fault(kind="taken_then_reset"))

    def flood_next_send(self, seconds: int) -> None:
        self.fake.fail("sendMessage", Fault(kind="flood", seconds=seconds))

    def texts(self, chat: str, thread: str | None = "any") -> list[str]:
        topic = None if thread in (None, "any") else int(thread)
        shown = [it for it in self.fake.shown if it.chat == int(chat)]
        return [it.text for it in shown if thread == "any" or it.topic == topic]

    async def until_shown(self, number: int, chat: str | None = None, *, seconds: float = BOUND) -> list[str]:
        return await self.fake.until_shown(number, None if chat is None else int(chat), seconds)

    async def until(self, condition: Callable[[], Any]) -> None:
        await self.fake.until(condition)

    def typing_chats(self) -> set[str]:
        return {str(call["chat_id"]) for call in self.fake.typing}

    def count_typing(self) -> int:
        return len(self.fake.typing)
