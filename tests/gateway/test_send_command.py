"""The owner's `/send on|off|inherit` at every door: done, answered in one line, and read by no model."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from antiphon.engine.sessions.transcripts import HistoryFilter
from antiphon.operations.types import IncomingMessage
from antiphon.runtimes import Prompt
from support.app_fixture import BOUND, MAIN, OPERATOR
from support.gateway_http import ALL_ENDPOINTS
from support.gateway_ws import WRITE, Client, GatewayFixture, open_gateway

pytestmark = [pytest.mark.anyio, pytest.mark.requirement("D2")]

DENYING = {**ALL_ENDPOINTS, "session": {"sendPolicy": {"default": "deny"}}}


class Model:
    """What answers, and what it was asked."""

    def __init__(self) -> None:
        self.asked: list[object] = []

    async def __call__(self, prompt: Prompt) -> str:
        self.asked.append(prompt.messages[-1])
        return "the model answered"


Say = Callable[[GatewayFixture, Client, str], Awaitable[str]]


async def by_chat(gateway: GatewayFixture, client: Client, text: str) -> str:
    key = uuid.uuid4().hex
    await client.call("chat.send", sessionKey="main", message=text, idempotencyKey=key)
    final = await client.event("chat", runId=key, state="final")
    return final["message"]["content"][0]["text"] if "message" in final else ""


async def by_session(gateway: GatewayFixture, client: Client, text: str) -> str:
    key = uuid.uuid4().hex
    await client.call("sessions.send", key=MAIN, message=text, idempotencyKey=key)
    final = await client.event("chat", runId=key, state="final")
    return final["message"]["content"][0]["text"] if "message" in final else ""


async def by_agent(gateway: GatewayFixture, client: Client, text: str) -> str:
    key = uuid.uuid4().hex
    await client.call("agent", message=text, idempotencyKey=key)
    assert (await client.event("chat", runId=key, state="final"))["sessionKey"] == MAIN
    return (await client.call("agent.wait", runId=key))["reply"] or ""


async def by_http(gateway: GatewayFixture, client: Client, text: str) -> str:
    body = {"model": "antiphon/default", "messages": [{"role": "user", "content": text}]}
    async with gateway.http() as http:
        answer = await http.post(
            "/v1/chat/completions", json=body, headers={"x-antiphon-session-key": "main"}
        )
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"]


async def in_process(gateway: GatewayFixture, client: Client, text: str) -> str:
    accepted = await gateway.operations.messages.submit(
        OPERATOR, IncomingMessage(session="main", content=text)
    )
    return (await gateway.operations.runs.wait(OPERATOR, accepted.run_id, BOUND)).reply or ""


async def policy_of(client: Client) -> str | None:
    return (await client.call("sessions.describe", key=MAIN))["session"].get("sendPolicy")


@pytest.mark.parametrize("say", [by_chat, by_session, by_agent, by_http, in_process])
async def test_the_owner_switches_a_session_at_every_door_and_is_told(tmp_path: Path, say: Say) -> None:
    model = Model()
    async with open_gateway(tmp_path, model, settings=DENYING) as gateway, gateway.client() as client:
        await client.call("sessions.create", key=MAIN)
        for text, told, policy in (
            ("/send on", "Send policy set to on.", "allow"),
            ("/send off", "Send policy set to off.", "deny"),
            (" /SEND  inherit ", "Send policy set to inherit.", None),
            ("/send on", "Send policy set to on.", "allow"),
        ):
            assert await say(gateway, client, text) == told
            assert await policy_of(client) == policy
        assert model.asked == []
        history = await gateway.operations.transcripts.read(
            OPERATOR, "main", HistoryFilter(include_tools=True)
        )
        assert history.messages == []
        assert await say(gateway, client, "please /send off") == "the model answered"
        assert await policy_of(client) == "allow"
        [asked] = model.asked
        assert getattr(asked, "content", None) == "please /send off"


async def test_it_is_done_once_under_its_key(tmp_path: Path) -> None:
    async with open_gateway(tmp_path, Model()) as gateway, gateway.client() as client:
        given: dict[str, Any] = {"sessionKey": "main", "message": "/send off", "idempotencyKey": "k"}
        first = await client.call("chat.send", **given)
        await client.call("sessions.patch", key=MAIN, sendPolicy=None)
        again = await client.call("chat.send", **given)
        assert (first["runId"], again["runId"], again["status"]) == ("k", "k", "ok")
        assert await policy_of(client) is None
        refused = await client.refused("chat.send", **{**given, "message": "/send on"})
        assert refused["details"]["type"] == "conflict"


async def test_a_send_command_of_anyone_but_the_owner_is_ignored(tmp_path: Path) -> None:
    model = Model()
    async with (
        open_gateway(tmp_path, model) as gateway,
        gateway.client() as owner,
        gateway.client(gateway.issue(WRITE)) as writer,
    ):
        await owner.call("sessions.create", key=MAIN)
        for say in (by_chat, by_agent):
            assert await say(gateway, writer, "/send off") == ""
        assert await policy_of(owner) is None
        assert model.asked == []


async def test_who_wants_the_words_themselves_said_has_them_said(tmp_path: Path) -> None:
    model = Model()
    async with open_gateway(tmp_path, model) as gateway, gateway.client() as client:
        given = {"sessionKey": "main", "message": "/send off", "idempotencyKey": "k"}
        await client.call("chat.send", **given, suppressCommandInterpretation=True)
        assert (await client.call("agent.wait", runId="k"))["reply"] == "the model answered"
        assert await policy_of(client) is None
