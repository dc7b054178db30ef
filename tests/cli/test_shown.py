"""What people are shown of an exchange, and what the raw history has of it; with a real gateway."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from antiphon.client import Client, Site
from cli.gateways import token, up
from cli.terminal import BOUND, Program

pytestmark = [pytest.mark.anyio, pytest.mark.requirement("H6")]

MAIN, HELPER = "agent:main:main", "agent:helper:main"
CONFIG: dict[str, Any] = {
    "agents": {"list": [{"id": "main", "default": True}, {"id": "helper"}]},
    "tools": {"sessions": {"visibility": "all"}, "agentToAgent": {"enabled": True}},
}


def words(item: dict[str, Any]) -> str:
    content = item["content"]
    return content if isinstance(content, str) else "".join(block.get("text", "") for block in content)


def is_hidden(text: str) -> bool:
    return text.strip("`") in {"REPLY_SKIP", "ANNOUNCE_SKIP"} or "announce step." in text


async def settled(client: Client) -> None:
    async with asyncio.timeout(BOUND):
        while any(
            each["phase"] != "settled" or each.get("announced") == "pending"
            for each in (await client.call("exchanges.list", {}))["exchanges"]
        ):
            pass


async def test_tokens_and_step_prompts_are_in_the_raw_history_and_nowhere_else(program: Program) -> None:
    program.configure(CONFIG)
    with up(program) as gateway:

        async def find() -> Site:
            return Site(gateway.url, token(program))

        async with asyncio.timeout(4 * BOUND), Client(find) as client:
            for key, message in (
                (HELPER, "say say pong\nannounce `ANNOUNCE_SKIP`"),
                (MAIN, "say x\nannounce good NO_REPLY news"),
            ):
                other = MAIN if key == HELPER else HELPER
                asked = {"key": key, "message": message, "fromSessionKey": other, "timeoutSeconds": 30}
                assert (await client.call("sessions.send", asked))["status"] == "ok"
                await settled(client)
            raw = {key: await everything(client, key) for key in (MAIN, HELPER)}
            for key, items in raw.items():
                assert [item["seq"] for item in items] == [*range(1, len(items) + 1)]
                assert any("announce step" in words(item) and item["internal"] for item in items)
                shown = (await client.call("chat.history", {"sessionKey": key}))["messages"]
                left = [item["id"] for item in items if "internal" not in item]
                assert [item["id"] for item in shown] == left and 0 < len(left) < len(items)
                assert not any(is_hidden(words(item)) for item in shown)
                paged = [item["id"] for item in await pages(client, key)]
                assert paged == left
                preview = await client.call("sessions.preview", {"keys": [key]})
                [previewed] = preview["previews"]
                assert previewed["items"] and not any(is_hidden(item["text"]) for item in previewed["items"])
            assert {"REPLY_SKIP", "`ANNOUNCE_SKIP`"} <= {words(item) for item in [*raw[MAIN], *raw[HELPER]]}
            [posted] = [item for item in raw[MAIN] if words(item) == "good NO_REPLY news"]
            assert "internal" not in posted  # it was delivered
            shown = (await client.call("chat.history", {"sessionKey": MAIN}))["messages"]
            assert [words(item) for item in shown if item["id"] == posted["id"]] == ["good news"]
            [previewed] = (await client.call("sessions.preview", {"keys": [MAIN], "limit": 1}))["previews"]
            assert [item["text"] for item in previewed["items"]] == ["good news"]
        plain = program.run("sessions", "history", HELPER).out
        assert "helper> `ANNOUNCE_SKIP`" not in plain and "announce step>" not in plain
        assert "main> good news" in program.run("sessions", "history", MAIN).out
        complete = program.run("sessions", "history", HELPER, "--all").out
        assert "helper> `ANNOUNCE_SKIP`" in complete and "announce step>" in complete


async def everything(client: Client, key: str) -> list[dict[str, Any]]:
    page = await client.call("sessions.history", {"key": key, "includeTools": True, "limit": 1000})
    return page["messages"]


async def pages(client: Client, key: str) -> list[dict[str, Any]]:
    """The same, an entry at a time."""
    found: list[dict[str, Any]] = []
    more: dict[str, Any] = {}
    while True:
        page = await client.call("chat.history", {"sessionKey": key, "limit": 1, **more})
        found = [*page["messages"], *found]
        if not page["hasMore"]:
            return found
        more = {"cursor": page["nextCursor"]}
