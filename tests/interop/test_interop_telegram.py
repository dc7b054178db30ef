"""python-telegram-bot against the stand-in of Telegram, so that the stand-in is not only what our client expects."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest

from channels.telegram.fake import BOT_NAME, TOKEN, FakeTelegram, Fault

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_a_foreign_client_works_with_the_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PTB_TIMEDELTA", "1")  # without it, the library warns
    telegram: Any = import_module("telegram")  # only in the group `interop`
    errors: Any = import_module("telegram.error")
    async with FakeTelegram().running() as fake:
        bot = telegram.Bot(TOKEN, base_url=f"{fake.url}/bot", base_file_url=f"{fake.url}/file/bot")
        async with bot:
            assert (await bot.get_me()).username == BOT_NAME
            fake.files["photo"] = b"\xff\xd8\xff"
            fake.add_group(-100, "Team", 5)
            fake.write(f"@{BOT_NAME} hello", user=7, chat=-100, message_thread_id=5, is_topic_message=True)
            fake.write(
                "", user=7, photo=[{"file_id": "photo", "file_unique_id": "p", "width": 1, "height": 1}]
            )
            group, photo = await bot.get_updates(timeout=1)
            assert group.message.parse_entities() == {group.message.entities[0]: f"@{BOT_NAME}"}
            assert (group.message.message_thread_id, group.message.chat.is_forum) == (5, True)
            assert await (await photo.message.photo[-1].get_file()).download_as_bytearray() == b"\xff\xd8\xff"
            assert await bot.get_updates(offset=photo.update_id + 1, timeout=0) == ()
            sent = await bot.send_message(7, "<b>bold</b> &amp; more", parse_mode="HTML")
            assert (sent.text, fake.texts(7)) == ("bold & more", ["bold & more"])
            assert await bot.send_chat_action(-100, "typing", message_thread_id=1)
            for text, parse_mode in (("<b>open", "HTML"), ("x" * 4097, None), (" ", None)):
                with pytest.raises(errors.BadRequest):
                    await bot.send_message(7, text, parse_mode=parse_mode)
            with pytest.raises(errors.BadRequest, match="thread not found"):
                await bot.send_message(-100, "hi", message_thread_id=6)
            fake.fail("sendMessage", Fault(kind="flood", seconds=490))
            with pytest.raises(errors.RetryAfter):
                await bot.send_message(7, "hi")
            fake.webhook = {"url": "https://a.example.org"}
            with pytest.raises(errors.Conflict):
                await bot.get_updates(timeout=0)
            assert (await bot.get_webhook_info()).url == "https://a.example.org"
            assert await bot.set_webhook("https://b.example.org", secret_token="abc")
            fake.add_group(-200)
            fake.chats[-200]["moved_to"] = -300
            with pytest.raises(errors.ChatMigrated):
                await bot.send_message(-200, "hi")
