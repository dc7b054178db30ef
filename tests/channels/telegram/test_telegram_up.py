"""The whole way: the real `antiphon up`, a model over HTTP, and a person who writes to the bot; also with kills."""

from __future__ import annotations

import asyncio
import random
import re
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from channels.telegram.fake import TOKEN, FakeTelegram
from cli.gateways import Gateway, up
from cli.terminal import Program
from support.app_fixture import DATABASE
from support.databases import query_database
from support.model_provider import Answer, Provider

pytestmark = [pytest.mark.anyio, pytest.mark.sqlite_only]
Json = dict[str, Any]
OWNER = 7
KILLS = 6


def configure(program: Program, provider: Provider, fake: FakeTelegram, **telegram: Any) -> None:
    """A configuration as people write it."""
    program.configure(
        {
            "agents": {"defaults": {"model": {"primary": "local/helper"}}},
            "models": {
                "providers": {
                    "local": {
                        "baseUrl": f"{provider.url}/v1",
                        "api": "openai-completions",
                        "apiKey": "k",
                        "models": [{"id": "helper"}],
                    }
                }
            },
            "channels": {"telegram": {"enabled": True, "botToken": TOKEN, "apiRoot": fake.url, **telegram}},
        }
    )


@pytest.fixture
def program(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Program:
    return Program(tmp_path, tmp_path_factory.getbasetemp().parent / "antiphon-bytecode")


@pytest.mark.requirement("N3", "N4", "N7", "CH18", "S6")
async def test_a_person_is_paired_and_answered_where_they_look(program: Program) -> None:
    reply = Answer(text=("Good ", "**morning**."))
    async with Provider(default=reply).running() as provider, FakeTelegram().running() as fake:
        configure(program, provider, fake, dmPolicy="pairing")
        tested = await asyncio.to_thread(program.run, "channels", "test", "telegram")
        assert (tested.code, tested.out) == (0, "Connected as @HelperBot.\n"), tested.err
        with await asyncio.to_thread(enter, program) as gateway:
            fake.write("good morning", user=OWNER, sender={"first_name": "Ann"})
            [challenge] = await fake.until_shown(1, OWNER)
            code = re.findall(r"\b[A-HJ-NP-Z2-9]{8}\b", challenge)[0]
            listed = await asyncio.to_thread(program.run, "pairing", "list", "--json")
            assert [row["code"] for row in listed.json["pairings"]] == [code]
            approved = await asyncio.to_thread(program.run, "pairing", "approve", "telegram", code)
            assert approved.out == "Ann (7) may write to the agents on telegram now, as its owner.\n"
            fake.write("good morning", user=OWNER)
            assert (await fake.until_shown(2, OWNER))[1] == "Good morning."
            assert fake.shown[1].body["text"] == "Good <b>morning</b>."
            shown = await asyncio.to_thread(program.run, "channels", "status", "--json")
            [account] = shown.json["accounts"]
            assert (account["state"], account["identity"]) == ("ready", "@HelperBot")
            findings = (await asyncio.to_thread(program.run, "doctor", "--json")).json["findings"]
            [channel] = [found for found in findings if found["check"] == "channels"]
            assert channel["level"] == "ok" and "connected as @HelperBot" in channel["what"]
            sent = await asyncio.to_thread(
                program.run, "send", "--channel", "telegram", "--to", str(OWNER), "Dinner is ready."
            )
            assert sent.code == 0, sent.err
            assert (await fake.until_shown(3, OWNER))[2] == "Dinner is ready."
            added = await asyncio.to_thread(
                program.run, "cron", "add", "--name", "news", "--every", "1h", "--message", "the news",
                "--announce", "--channel", "telegram", "--to", str(OWNER),
            )  # fmt: skip
            assert added.code == 0, added.err
            assert await asyncio.to_thread(gateway.stop) == 0
        assert TOKEN not in shown.out
        assert not (program.state / "antiphon.log").exists(), "nothing to warn of"


def enter(program: Program) -> Any:
    """A gateway that is entered in a thread, since its start blocks."""
    opened = up(program)
    gateway = opened.__enter__()

    class _Entered:
        def __enter__(self) -> Gateway:
            return gateway

        def __exit__(self, *details: object) -> None:
            opened.__exit__(None, None, None)

    return _Entered()


@pytest.mark.requirement("CH1", "CH3", "CH7", "N3", "N4")
async def test_killed_between_taking_and_answering_each_message_is_answered_once_or_visibly_in_doubt(
    program: Program,
) -> None:
    moments = random.Random(16)
    expected: list[str] = []
    async with Provider(choose=repeat_question).running() as provider, FakeTelegram().running() as fake:
        configure(program, provider, fake, dmPolicy="allowlist", allowFrom=[OWNER])
        for number in range(KILLS):
            with await asyncio.to_thread(enter, program) as gateway:
                expected += [f"question-{number}-{n}" for n in range(3)]
                for text in expected[-3:]:
                    fake.write(text, user=OWNER)
                seen = fake.count("getUpdates") + fake.count("sendMessage")
                moment = seen + moments.randint(1, 3)
                await fake.until(
                    lambda until=moment: fake.count("getUpdates") + fake.count("sendMessage") >= until
                )
                await asyncio.to_thread(gateway.stop, signal.SIGKILL)
        with await asyncio.to_thread(enter, program) as gateway:
            fake.write("the last", user=OWNER)
            expected.append("the last")
            await fake.until(lambda: any("the last" in it.text for it in fake.shown), 60)
            assert await asyncio.to_thread(gateway.stop) == 0
    rows = query_database(program.state / DATABASE, "SELECT body, state FROM deliveries ORDER BY n")
    assert {row["state"] for row in rows} <= {"delivered", "ambiguous"}
    texts = [row["body"] for row in rows]
    assert sorted(texts) == sorted(f"answer to {text}" for text in expected), "one answer to each"
    shown = Counter(it.text for it in fake.shown)
    assert set(shown.values()) == {1}, "none is shown twice"
    delivered = {row["body"] for row in rows if row["state"] == "delivered"}
    assert delivered <= shown.keys()
    assert [text for text in texts if text in delivered] == [
        it.text for it in fake.shown if it.text in delivered
    ]
    runs = query_database(program.state / DATABASE, "SELECT state FROM runs WHERE origin = 'channel'")
    assert [row["state"] for row in runs] == ["ok"] * len(expected)


def repeat_question(body: Json) -> Answer:
    content = body["messages"][-1]["content"]
    text = content if isinstance(content, str) else content[-1]["text"]
    return Answer(text=(f"answer to {text}",))
