"""What becomes of calls that fail, of updates in odd forms, and of a bot that others use as well."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from antiphon.channels.adapter import AccountHealth
from antiphon.channels.telegram import adapter as telegram_adapter
from antiphon.channels.telegram.bot_api import BotApi
from antiphon.clock import ManualClock
from antiphon.config.load import parse
from antiphon.errors import ConfigError, NotSent, Refused, StoreError, Unsure
from antiphon.operations.command_runner import ChatCommandRunner
from channels.service import open_chats
from channels.telegram.fake import TOKEN, Fault
from channels.telegram.service import TelegramService
from channels.test_channel_contract import ADMIT, ADMIT_GROUPS, OWNER, heard
from support.app_fixture import wait_until

pytestmark = pytest.mark.anyio
GROUP = "-1001"


@pytest.fixture
async def service() -> AsyncGenerator[TelegramService]:
    made = TelegramService()
    async with made.running():
        yield made


@pytest.fixture
async def api(service: TelegramService) -> AsyncGenerator[BotApi]:
    made = BotApi(TOKEN, service.fake.url, timeout_seconds=1)
    yield made
    await made.close()


REFUSALS: list[tuple[int, str, dict[str, Any], str]] = [
    (400, "Bad Request: can't parse entities: x", {}, "bad_format"),
    (400, "Bad Request: message is too long", {}, "too_long"),
    (400, "Bad Request: chat not found", {}, "gone"),
    (400, "Bad Request: message thread not found", {}, "gone"),
    (400, "Bad Request: something new", {}, "forbidden"),
    (400, "Bad Request: group chat was upgraded", {"migrate_to_chat_id": -100777}, "moved"),
    (401, "Unauthorized", {}, "auth"),
    (403, "Forbidden: bot was blocked by the user", {}, "forbidden"),
]


@pytest.mark.requirement("CH3", "CH21")
@pytest.mark.parametrize(("code", "description", "parameters", "kind"), REFUSALS)
async def test_refusals_say_what_is_wrong(
    service: TelegramService, api: BotApi, code: int, description: str, parameters: dict[str, Any], kind: str
) -> None:
    fault = Fault(kind="refuse", code=code, description=description, parameters=parameters)
    service.fake.fail("sendMessage", fault)
    with pytest.raises(Refused) as refused:
        await api.call("sendMessage", chat_id=7, text="hi")
    assert refused.value.kind == kind
    assert refused.value.to == (str(parameters["migrate_to_chat_id"]) if parameters else None)
    assert TOKEN not in str(refused.value)


@pytest.mark.requirement("CH3", "CH4", "CH23")
async def test_every_failure_of_the_transport_is_either_not_sent_or_unsure(
    service: TelegramService, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    api = BotApi(TOKEN, service.fake.url, timeout_seconds=0.3)
    for kind in ("error", "nonsense", "reset", "taken_then_reset", "hold"):
        service.fake.fail("sendMessage", Fault(kind=kind))
        with pytest.raises(Unsure):
            await api.call("sendMessage", chat_id=7, text="hi")
    service.fake.fail("sendMessage", Fault(kind="flood", seconds=490))
    with pytest.raises(NotSent) as flooded:
        await api.call("sendMessage", chat_id=7, text="hi")
    assert flooded.value.retry_after == 490
    service.fake.released.set()
    await api.close()
    for unreachable in (
        "http://127.0.0.1:9",
        "http://no-such-host.invalid",
        service.fake.url.replace("http", "https"),
    ):
        api = BotApi(TOKEN, unreachable, timeout_seconds=2)
        with pytest.raises(NotSent):
            await api.call("sendMessage", chat_id=7, text="hi")
        await api.close()
    assert TOKEN not in caplog.text


@pytest.mark.requirement("CH21")
async def test_refused_markup_is_sent_once_as_plain_text(service: TelegramService, tmp_path: Path) -> None:
    refusal = Fault(kind="refuse", description="Bad Request: can't parse entities: x")
    service.fake.fail("sendMessage", refusal)
    async with open_chats(tmp_path, service, ADMIT, heard) as chats:
        await service.write("**bold**", user=OWNER)
        await chats.until_delivery("delivered")
        assert service.texts(OWNER) == ["heard bold"]
        assert [body.get("parse_mode") for name, body in service.fake.calls if name == "sendMessage"] == [
            "HTML",
            None,
        ]


@pytest.mark.requirement("N4")
async def test_a_group_that_moved_gets_its_answer_under_the_new_id(
    service: TelegramService, tmp_path: Path
) -> None:
    service.add_group(GROUP)
    service.add_group("-1009")
    service.fake.chats[int(GROUP)]["moved_to"] = -1009
    async with open_chats(tmp_path, service, ADMIT_GROUPS, heard) as chats:
        await service.write("hello", user=OWNER, chat=GROUP, mention=True)
        await chats.until_delivery("delivered")
        assert len(service.texts("-1009")) == 1


@pytest.mark.requirement("CH11", "CH9")
async def test_another_program_that_polls_is_named_and_polling_goes_on(
    service: TelegramService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(telegram_adapter, "POLL_SECONDS", 1.0)
    conflict = Fault(kind="refuse", code=409, description="Conflict: terminated by other getUpdates request")
    service.fake.fail("getUpdates", conflict)
    async with open_chats(tmp_path, service, ADMIT, heard) as chats:

        async def is_named() -> bool:
            [account] = await chats.list_accounts()
            return account.state == "degraded" and "another program" in (account.reason or "")

        await wait_until(is_named)
        await service.write("hello", user=OWNER)
        assert await service.until_shown(1, OWNER) == ["heard hello"]
        await chats.until_state("ready")


@pytest.mark.requirement("CH9")
def test_an_account_without_a_recent_proof_of_life_is_degraded() -> None:
    clock = ManualClock()
    health = AccountHealth(clock, max_silence_seconds=60)
    assert health.current == ("starting", None)
    health.prove()
    clock.advance(seconds=60)
    assert health.current == ("ready", None)
    clock.advance(seconds=1)
    assert health.current == ("degraded", "the service has not answered for 61 s")
    health.prove()
    assert health.current[0] == "ready"


@pytest.mark.requirement("CH7", "CH11")
async def test_a_webhook_of_another_program_is_replaced_without_losing_what_waits(
    service: TelegramService, tmp_path: Path
) -> None:
    service.fake.webhook = {"url": "https://elsewhere.example.org"}
    await service.write("hello", user=OWNER)
    async with open_chats(tmp_path, service, ADMIT, heard):
        assert await service.until_shown(1, OWNER) == ["heard hello"]
    assert service.fake.count("deleteWebhook") == 1


@pytest.mark.requirement("CH9")
async def test_messages_full_of_long_links_do_not_stop_the_polls(
    service: TelegramService, tmp_path: Path
) -> None:
    links = [{"type": "text_link", "offset": 0, "length": 1, "url": "https://x/" + "a" * 2000}] * 100
    for _ in range(60):  # 12 MB
        service.fake.write("spam", user=99, entities=links)
    await service.write("hello", user=OWNER)
    async with open_chats(tmp_path, service, ADMIT, heard):
        assert await service.until_shown(1, OWNER) == ["heard hello"]


@pytest.mark.requirement("CH17")
async def test_strangers_in_an_open_group_enter_no_commands_and_its_own_list_holds(
    service: TelegramService, tmp_path: Path
) -> None:
    service.add_group(GROUP)
    service.add_group("-1002")
    groups = {"*": {}, "-1002": {"allowFrom": [OWNER]}}
    async with open_chats(
        tmp_path, service, {**ADMIT, "groupPolicy": "open", "groups": groups}, heard
    ) as chats:
        for text in ("/new@HelperBot", "/stop", "@HelperBot hello"):
            service.fake.write(text, user=99, chat=int(GROUP))
        service.fake.write("@HelperBot hello", user=99, chat=-1002)
        service.fake.write("/whoami", user=int(OWNER), chat=-1002)
        [answer] = await service.until_shown(1, "-1002")
        assert "you are the owner" in answer
        assert await service.until_shown(1, GROUP) == ["heard [Person99] @HelperBot hello"]
        assert sorted(chats.outcomes()) == ["command", "run"]


@pytest.mark.requirement("CH1", "N6")
async def test_a_command_that_the_store_could_not_take_is_taken_later(
    service: TelegramService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, failures = ChatCommandRunner.run, [StoreError("The database of the operator is locked.", "Wait.")]

    async def run_later(self: ChatCommandRunner, *command: Any) -> str:
        if failures:
            raise failures.pop()
        return await run(self, *command)

    monkeypatch.setattr(ChatCommandRunner, "run", run_later)
    async with open_chats(tmp_path, service, ADMIT, heard):
        await service.write("/whoami", user=OWNER)
        [answer] = await service.until_shown(1, OWNER)
        assert "you are the owner" in answer


@pytest.mark.requirement("CH14", "K1")
async def test_general_is_a_topic_that_messages_are_sent_to_without_its_number(
    service: TelegramService, tmp_path: Path
) -> None:
    service.add_group(GROUP, "5")
    async with open_chats(tmp_path, service, ADMIT_GROUPS, heard) as chats:
        await service.write("hello", user=OWNER, chat=GROUP, mention=True)
        await service.until_shown(1, GROUP)
        assert len(service.texts(GROUP, None)) == 1
        assert {"message_thread_id": 1, "chat_id": int(GROUP), "action": "typing"} in service.fake.typing
        [session] = chats.rows("SELECT key, last_channel, last_to, last_thread FROM sessions")
        assert session == {
            "key": f"agent:main:telegram:group:{GROUP}:topic:1",
            "last_channel": "telegram",
            "last_to": GROUP,
            "last_thread": "1",
        }


@pytest.mark.requirement("CH17")
async def test_threads_of_replies_are_no_topics_and_other_bots_commands_are_not_ours(
    service: TelegramService, tmp_path: Path
) -> None:
    service.add_group(GROUP)
    async with open_chats(tmp_path, service, ADMIT_GROUPS, heard) as chats:
        service.fake.write("/new@OtherBot", user=7, chat=int(GROUP))
        service.fake.write("@HelperBot hello", user=7, chat=int(GROUP), message_thread_id=33)
        service.fake.write("/whoami@HelperBot", user=7, chat=int(GROUP))
        whoami, _ = sorted(await service.until_shown(2, GROUP))
        assert f"agent:main:telegram:group:{GROUP}" in whoami and "topic" not in whoami
        assert chats.outcomes() == ["context", "run", "command"]


@pytest.mark.requirement("CH19", "N1")
@pytest.mark.parametrize(
    ("settings", "path"),
    [
        ({"webhookUrl": "https://a.example.org"}, "channels.telegram.webhookSecret"),
        ({"dmPolicy": "open"}, "channels.telegram.dmPolicy"),
        ({"dmPolicy": "allowlist"}, "channels.telegram.allowFrom"),
        ({"botToken": "a", "tokenFile": "b"}, "channels.telegram.tokenFile"),
        ({"botTokn": "a"}, "channels.telegram.botTokn"),
        ({"groups": {"-1": {"requireMentions": True}}}, "channels.telegram.groups.-1.requireMentions"),
        ({"accounts": {"a:b": {"botToken": "a"}}}, "channels.telegram.accounts"),
        ({"accounts": {"a": {"botToken": "a"}, "b": {"botToken": "a"}}}, "channels.telegram.accounts.b"),
        ({"defaultAccount": "none"}, "channels.telegram.defaultAccount"),
    ],
)
def test_contradictions_in_the_configuration_are_errors(settings: dict[str, Any], path: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse({"channels": {"telegram": settings}})
    assert refused.value.data["path"] == path


@pytest.mark.requirement("N1", "CH17")
def test_patterns_that_could_stop_the_gateway_have_no_effect() -> None:
    safe = [r"\bclaw\b", r"(?:hey\s+)?@?claw", "a+b*", r"(?:\d{3}-){2}", "(?:claw|crab)!?"]
    unsafe = ["(a+)+$", r"(?:\w+\s*)*x", "(?:(a|b+)c){2,}", "(?=(a*)*b)", "(?:a|ab)+$"]
    _, warnings = parse({"messages": {"groupChat": {"mentionPatterns": [*safe, *unsafe]}}})
    assert [text for text in warnings if "repeats a repetition" in text] == [
        f"'messages.groupChat.mentionPatterns' has {pattern!r}, which repeats a repetition or a choice, so it"
        " could stop the gateway and has no effect. Write it without."
        for pattern in unsafe
    ]


@pytest.mark.requirement("N1")
def test_keys_of_the_family_without_effect_say_why_and_others_take_effect() -> None:
    written = {
        "botToken": "t",
        "streaming": "partial",
        "replyToMode": "off",
        "groups": {"*": {"skills": ["a"], "errorPolicy": "once", "requireMention": False}},
        "accounts": {"work": {"botToken": "u", "actions": {"poll": True}}},
    }
    config, warnings = parse({"channels": {"telegram": written, "defaults": {"heartbeat": {"showOk": True}}}})
    told = [text.split(" has no effect")[0] for text in warnings if " has no effect: " in text]
    assert told == [
        "'channels.defaults.heartbeat'",
        "'channels.telegram.streaming'",
        "'channels.telegram.groups.*.errorPolicy'",
        "'channels.telegram.groups.*.skills'",
        "'channels.telegram.accounts.work.actions'",
    ]
    accounts = config.channel_sections["telegram"].list_accounts()
    assert set(accounts) == {"default", "work"}
    assert accounts["work"].group_rules and accounts["work"].group_rules["*"].require_mention is False


@pytest.mark.requirement("CH23")
async def test_nothing_is_written_to_the_service_at_a_start_that_is_unchanged(
    service: TelegramService, tmp_path: Path
) -> None:
    for _ in range(2):
        async with open_chats(tmp_path, service, ADMIT, heard) as chats:
            await chats.until_state("ready")
            await service.until(lambda: service.fake.count("getUpdates"))
    assert {name for name, _ in service.fake.calls} == {"getMe", "getWebhookInfo", "getUpdates"}
