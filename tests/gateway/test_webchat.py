"""A person who writes over the gateway writes on the channel `webchat`: rows and the send policy see it."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import pytest

from support.app_fixture import BOUND, MAIN, OPERATOR
from support.gateway_http import ALL_ENDPOINTS, HOOK_TOKEN
from support.gateway_ws import Client, GatewayFixture, open_gateway

pytestmark = pytest.mark.anyio

SIDE = "agent:main:dashboard:side"
GROUP = "agent:main:telegram:group:7"
HELPER = "agent:helper:main"
TWO = {"agents": {"list": [{"id": "main", "default": True}, {"id": "helper"}]}}


async def say(client: Client, session: str, text: str = "hello") -> None:
    key = uuid.uuid4().hex
    sent = await client.call("chat.send", sessionKey=session, message=text, idempotencyKey=key)
    await client.call("agent.wait", runId=sent["runId"])


async def row(client: Client, session: str) -> dict[str, Any]:
    return (await client.call("sessions.describe", key=session))["session"]


async def complete(gateway: GatewayFixture, session: str) -> None:
    body = {"model": "antiphon/default", "messages": [{"role": "user", "content": "hi"}]}
    async with gateway.http() as http:
        answer = await http.post(
            "/v1/chat/completions", json=body, headers={"x-antiphon-session-key": session}
        )
        assert answer.status_code == 200, answer.text


@pytest.mark.requirement("K6", "L3")
async def test_where_a_person_was_heard_from_is_on_record(tmp_path: Path) -> None:
    async with open_gateway(tmp_path) as gateway, gateway.client() as client:
        await say(client, "main")
        await client.call("sessions.create", key=SIDE)
        assert (await row(client, SIDE))["channel"] == "unknown"
        await complete(gateway, SIDE)
        key = uuid.uuid4().hex
        await client.call("agent", message="hi", sessionKey="agent:main:dashboard:third", idempotencyKey=key)
        for session in (MAIN, SIDE, "agent:main:dashboard:third"):
            found = await row(client, session)
            assert (found["channel"], found["lastChannel"], found["lastTo"]) == (
                "webchat",
                "webchat",
                session,
            )
            assert found["deliveryContext"] == {"channel": "webchat", "to": session}
        listed = {one["key"]: one["channel"] for one in (await client.call("sessions.list"))["sessions"]}
        assert set(listed.values()) == {"webchat"}


@pytest.mark.requirement("K6", "G6")
async def test_webchat_replaces_no_channel_and_only_people_are_on_it(tmp_path: Path) -> None:
    async with (
        open_gateway(tmp_path, settings=ALL_ENDPOINTS) as gateway,
        gateway.client() as client,
        gateway.http() as http,
    ):
        await say(client, GROUP)
        found = await row(client, GROUP)
        assert (found["channel"], found.get("lastChannel"), found.get("lastTo")) == ("telegram", None, None)
        headers = {"Authorization": f"Bearer {HOOK_TOKEN}"}
        hooked = (await http.post("/hooks/wake", json={"text": "hi"}, headers=headers)).json()
        await gateway.operations.runs.wait(OPERATOR, hooked["runId"], BOUND)
        assert "lastChannel" not in await row(client, MAIN)


DENIED: list[dict[str, str]] = [
    {"channel": "webchat"},
    {"surface": "webchat"},
    {"chatType": "direct"},
    {"channel": "webchat", "chatType": "direct"},
]


@pytest.mark.requirement("D1", "D2", "D3", "K6")
@pytest.mark.parametrize("match", DENIED)
async def test_rules_about_webchat_and_direct_chats_hold_for_a_main_session(
    tmp_path: Path, match: dict[str, str]
) -> None:
    policy = {"rules": [{"action": "deny", "match": match}]}
    async with open_gateway(tmp_path, settings={**TWO, "session": {"sendPolicy": policy}}) as gateway:
        async with gateway.client() as client:
            for method, params in (
                ("chat.send", {"sessionKey": "main"}),
                ("agent", {"agentId": "helper"}),
                ("chat.send", {"sessionKey": "main"}),
            ):
                given = {"message": "hi", "idempotencyKey": uuid.uuid4().hex, **params}
                refused = await client.refused(method, **given)
                assert refused["message"].startswith("send blocked by session policy"), method
        if "chatType" not in match:
            async with gateway.client() as client:
                given = {"sessionKey": SIDE, "message": "hi", "idempotencyKey": "k"}
                refused = await client.refused("chat.send", **given)
                assert refused["message"].startswith("send blocked by session policy")
        async with gateway.client() as client:  # a group is neither
            await say(client, GROUP)


@pytest.mark.requirement("D1", "K6")
async def test_an_allow_for_webchat_lets_people_write_where_all_else_is_denied(tmp_path: Path) -> None:
    policy = {"rules": [{"action": "allow", "match": {"channel": "webchat"}}], "default": "deny"}
    async with (
        open_gateway(tmp_path, settings={"session": {"sendPolicy": policy}}) as gateway,
        gateway.client() as client,
    ):
        await say(client, "main")
        await say(client, SIDE)
        given = {"sessionKey": GROUP, "message": "hi", "idempotencyKey": "k"}
        assert (await client.refused("chat.send", **given))["details"]["type"] == "send_blocked"


@pytest.mark.requirement("W2", "K6")
@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"channel": "telegram", "to": "7"}, "channel"),
        ({"replyChannel": "discord"}, "replyChannel"),
        ({"channel": "webchat", "to": "+1555"}, "to"),
        ({"to": "+1555"}, "to"),
    ],
)
async def test_what_cannot_be_delivered_is_refused_by_name(
    tmp_path: Path, asked: dict[str, str], field: str
) -> None:
    async with open_gateway(tmp_path) as gateway, gateway.client() as client:
        given = {"message": "hi", "idempotencyKey": "k", **asked}
        refused = await client.refused("agent", **given, deliver=True)
        assert (refused["code"], refused["details"]["field"]) == ("INVALID_REQUEST", field)
        assert (await client.call("sessions.list"))["sessions"] == []
        await client.call("agent", **given, deliver=False)
        await client.call("agent.wait", runId="k")
        for number, fine in enumerate(({}, {"channel": "webchat"}, {"channel": "last"})):
            key = f"fine{number}"
            await client.call("agent", message="hi", idempotencyKey=key, deliver=True, **fine)
            assert (await client.call("agent.wait", runId=key))["reply"] == "heard hi"
