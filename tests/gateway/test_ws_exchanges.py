"""What goes on between sessions, as methods: an exchange, a sub-agent, and what is on its way to people."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from antiphon.access import Caller
from antiphon.engine.sessions.transcripts import HistoryFilter
from antiphon.errors import Forbidden
from antiphon.operations.types import SendRequest, SpawnRequest
from support.app_fixture import BOUND, MAIN, OPERATOR, wait_until
from support.gateway_ws import READ, open_gateway

pytestmark = [pytest.mark.anyio, pytest.mark.requirement("W2")]

HELPER = "agent:helper:main"
SETTINGS: dict[str, Any] = {
    "agents": {
        "list": [
            {"id": "main", "default": True, "subagents": {"allowAgents": ["helper"]}},
            {"id": "helper"},
        ]
    }
}


@pytest.mark.requirement("S1", "S2", "S3", "G4")
async def test_one_session_sends_to_another_for_an_operator(tmp_path: Path) -> None:
    async with open_gateway(tmp_path, None, settings=SETTINGS) as gateway, gateway.client() as client:
        for key in (MAIN, HELPER):
            await gateway.operations.sessions.open(OPERATOR, key)
        asked = {"key": HELPER, "message": "say say pong", "fromSessionKey": "main", "idempotencyKey": "k1"}
        sent = await client.call("sessions.send", **asked, timeoutSeconds=BOUND, replyBack=1, announce="none")
        assert (sent["runId"], sent["status"], sent["reply"]) == ("k1", "ok", "say pong")
        assert (sent["sessionKey"], sent["delivery"]["status"]) == (HELPER, "ended")
        again = await client.call("sessions.send", **asked, replyBack=1, announce="none")
        assert (again["runId"], again["reply"]) == ("k1", "say pong")
        assert (await client.call("agent.wait", runId="turn:k1:1"))["reply"] == "pong"
        main = (await client.call("sessions.history", key=MAIN))["messages"]
        assert [item["content"] for item in main if item["role"] == "user"] == ["say pong"]
        plain = await client.call("sessions.send", key=HELPER, message="say x", idempotencyKey="k2")
        assert plain["status"] == "started"
        assert (await client.call("agent.wait", runId="k2"))["reply"] == "x"


@pytest.mark.requirement("S5", "S9")
async def test_what_is_sent_in_a_sessions_name_is_in_its_transcript_before_the_reply(tmp_path: Path) -> None:
    settings = {
        **SETTINGS,
        "gateway": {"tools": {"allow": ["sessions_send"]}},
        "tools": {"sessions": {"visibility": "all"}, "agentToAgent": {"enabled": True}},
    }
    async with open_gateway(tmp_path, None, settings=settings) as gateway, gateway.client() as client:
        asked = {"key": HELPER, "message": "say say pong", "fromSessionKey": "main", "idempotencyKey": "k1"}
        for _ in range(2):  # asked again, it is not said again
            sent = await client.call("sessions.send", **asked, timeoutSeconds=BOUND, replyBack=1)
            assert sent["reply"] == "say pong"
        assert (await client.call("agent.wait", runId="turn:k1:1"))["reply"] == "pong"
        args = {"sessionKey": HELPER, "message": "say hello", "replyBack": 1, "announce": "none"}
        await client.call("tools.invoke", name="sessions_send", args=args, sessionKey=MAIN)

        async def settled() -> bool:
            found = (await client.call("exchanges.list"))["exchanges"]
            return all(each["phase"] == "settled" for each in found)

        await wait_until(settled)
        main = (await client.call("sessions.history", key=MAIN))["messages"]
        texts = [
            item["content"] if isinstance(item["content"], str) else item["content"][0]["text"]
            for item in main
        ]
        assert texts[:3] == [
            f"Message sent from this session to {HELPER}:\n\nsay say pong",
            "say pong",
            "pong",
        ]
        assert texts[3:5] == [f"Message sent from this session to {HELPER}:\n\nsay hello", "hello"]


@pytest.mark.requirement("S2", "003-send-timeout", "003-send-timeout-goes-on")
async def test_a_wait_for_a_reply_holds_up_nothing_else(tmp_path: Path) -> None:
    async with open_gateway(tmp_path, None, settings=SETTINGS) as gateway, gateway.client() as client:
        for key in (MAIN, HELPER):
            await gateway.operations.sessions.open(OPERATOR, key)
        asked = {"key": HELPER, "message": "slow 60 a b c d", "fromSessionKey": MAIN, "announce": "none"}
        waiting = await client.start("sessions.send", {**asked, "timeoutSeconds": 600})

        async def accepted() -> bool:
            return len(await gateway.operations.runs.list_unfinished(OPERATOR, HELPER)) == 1

        await wait_until(accepted)
        late = await client.call("sessions.send", **asked, timeoutSeconds=0.2, replyBack=0)
        assert (late["status"], late["delivery"]["status"]) == ("timeout", "queued")
        assert late["delivery"]["position"] == 1
        for run in await gateway.operations.runs.list_unfinished(OPERATOR, HELPER):
            await client.call("sessions.abort", key=HELPER, runId=run)
        over = await client.answer(waiting)
        assert (over.ok, over.payload["status"]) == (True, "error")


async def test_what_does_not_go_together_is_refused_by_name(tmp_path: Path) -> None:
    async with open_gateway(tmp_path, None, settings=SETTINGS) as gateway, gateway.client() as client:
        await gateway.operations.sessions.open(OPERATOR, HELPER)
        for field, value in {"timeoutSeconds": 1, "replyBack": 0, "announce": "none"}.items():
            error = await client.refused("sessions.send", key=HELPER, message="x", **{field: value})
            assert (error["details"]["field"], "fromSessionKey" in error["message"]) == (field, True)
        image = {"type": "image", "mimeType": "image/png", "content": "aGk="}
        for field, value in {"thinking": "low", "timeoutMs": 5, "attachments": [image]}.items():
            asked = {"key": HELPER, "message": "x", "fromSessionKey": "main", field: value}
            assert (await client.refused("sessions.send", **asked))["details"]["field"] == field
        more = {"key": HELPER, "message": "x", "fromSessionKey": "main", "timeoutSeconds": 3601}
        assert (await client.refused("sessions.send", **more))["code"] == "INVALID_REQUEST"
        page = await gateway.operations.transcripts.read(OPERATOR, HELPER, HistoryFilter())
        assert page.messages == []


@pytest.mark.requirement("P1", "P2", "P4", "P9", "A1")
async def test_a_sub_agent_for_a_session(tmp_path: Path) -> None:
    async with (
        open_gateway(tmp_path, None, settings=SETTINGS) as gateway,
        gateway.client() as client,
        gateway.client(gateway.issue(READ)) as reader,
    ):
        file = {"name": "notes.txt", "content": "hello"}
        asked = {"task": "say 42", "label": "calc", "attachments": [file], "idempotencyKey": "k1"}
        spawned = await client.call("sessions.spawn", **asked)
        assert (spawned["status"], spawned["runId"], spawned["mode"]) == ("accepted", "k1", "run")
        assert [kept["name"] for kept in spawned["attachments"]["files"]] == ["notes.txt"]
        again = await client.call("sessions.spawn", **asked)
        assert again["childSessionKey"] == spawned["childSessionKey"]

        async def settled() -> bool:
            [task] = (await reader.call("subagents.list", sessionKey="main"))["subagents"]
            return task["phase"] == "settled" and task["announced"] == "delivered"

        await wait_until(settled)
        [task] = (await reader.call("subagents.list", sessionKey="main", recentMinutes=1))["subagents"]
        assert (task["status"], task["result"], task["label"]) == ("ok", "42", "calc")
        assert "report" not in task
        said = await reader.call("subagents.report", runId="k1")
        assert said["runId"] == "k1"
        assert said["report"].startswith("Status: ok\nResult: 42")
        assert spawned["childSessionKey"] in said["report"]
        assert (await reader.refused("subagents.report", runId="k2"))["details"]["type"] == "not_found"
        refused = await client.refused("sessions.spawn", task="x", agentId="stranger")
        assert (refused["details"]["type"], refused["details"]["reason"]) == ("spawn_refused", "agent")
        unknown = await client.refused("sessions.spawn", task="x", nonsense=1)
        assert "unexpected property 'nonsense'" in unknown["message"]
        cards = (await reader.call("agents.spawnable"))["agents"]
        assert {card["id"]: card["maySpawn"] for card in cards} == {
            "main": ["main", "helper"],
            "helper": ["helper"],
        }


@pytest.mark.requirement("G3")
async def test_what_did_not_get_there_is_seen_and_sent_again(tmp_path: Path) -> None:
    group = "agent:main:telegram:group:7"
    async with open_gateway(tmp_path, None, settings=SETTINGS) as gateway, gateway.client() as client:
        await client.call("sessions.spawn", task="say 42", requesterSessionKey=group, idempotencyKey="k1")

        async def dead() -> bool:
            return bool((await client.call("deliveries.list", state="dead"))["deliveries"])

        await wait_until(dead)
        page = await client.call("deliveries.list")
        [delivery] = page["deliveries"]
        assert (delivery["key"], delivery["channel"], delivery["to"]) == ("task:k1", "telegram", "7")
        assert page["standing"] == {"dead": 1} == (await client.call("status"))["deliveries"]
        assert "telegram" in delivery["error"]
        again = await client.call("deliveries.retry", key="task:k1")
        assert again["state"] == "pending"
        await wait_until(dead)
        assert (await client.refused("deliveries.retry", key="nothing"))["details"]["type"] == "not_found"
        assert (await client.call("deliveries.list", state="delivered"))["deliveries"] == []
        for wrong in ({"state": "lost"}, {"limit": 0}, {"cursor": "x"}):
            assert (await client.refused("deliveries.list", **wrong))["code"] == "INVALID_REQUEST"


@pytest.mark.requirement("G43")
async def test_what_was_said_to_whom_is_listed(tmp_path: Path) -> None:
    async with (
        open_gateway(tmp_path, None, settings=SETTINGS) as gateway,
        gateway.client() as client,
        gateway.client(gateway.issue(READ)) as reader,
    ):
        for key in (MAIN, HELPER):
            await gateway.operations.sessions.open(OPERATOR, key)
        assert await reader.call("exchanges.list") == {"exchanges": []}
        for number in (1, 2):
            asked = {"key": HELPER, "message": f"say {number}", "fromSessionKey": "main", "announce": "none"}
            await client.call("sessions.send", **asked, replyBack=0, idempotencyKey=f"k{number}")

        async def settled() -> bool:
            return not (await reader.call("exchanges.list", unsettled=True))["exchanges"]

        await wait_until(settled)
        first = await reader.call("exchanges.list", sessionKey="main", limit=1)
        [exchange] = first["exchanges"]
        assert exchange.pop("settledAt") >= exchange.pop("createdAt")
        assert exchange == {
            "id": "k2", "requesterSessionKey": MAIN, "targetSessionKey": HELPER, "phase": "settled", "turn": 0,
            "turns": 0, "announced": "none", "chainId": "k2", "hop": 1, "message": "say 2", "latestReply": "2",
        }  # fmt: skip
        rest = await reader.call("exchanges.list", sessionKey=HELPER, cursor=first["nextCursor"])
        assert [found["id"] for found in rest["exchanges"]] == ["k1"]
        assert "nextCursor" not in rest
        for id in ("k2", "k1"):
            detail = await reader.call("exchanges.get", id=id)
            assert (detail["exchange"]["id"], detail["exchange"]["message"]) == (id, f"say {id[1]}")
            [step] = detail["steps"]
            assert (step["runId"], step["sessionKey"], step["turn"], step["reply"]) == (id, HELPER, 0, id[1])
        for reference, kind in (("k", "ambiguous"), ("k3", "not_found"), ("%", "not_found")):
            refused = await reader.refused("exchanges.get", id=reference)
            assert refused["details"]["type"] == kind
        for wrong in ({"limit": 0}, {"limit": 501}, {"cursor": "x"}, {"unsettled": "yes"}, {"state": "dead"}):
            assert (await reader.refused("exchanges.list", **wrong))["code"] == "INVALID_REQUEST"
        missing = await reader.refused("exchanges.list", sessionKey="agent:main:direct:nobody")
        assert missing["details"]["type"] == "not_found"


@pytest.mark.requirement("SEC4")
async def test_the_operations_look_at_the_scope_again(tmp_path: Path) -> None:
    reader, agent = Caller.operator([READ]), Caller.agent("main", MAIN)
    async with open_gateway(tmp_path, None, settings=SETTINGS) as gateway:
        operations = gateway.operations
        for refused in (
            operations.deliveries.retry(reader, "task:k1"),
            operations.deliveries.retry(agent, "task:k1"),
            operations.deliveries.list(agent),
            operations.exchanges.list(agent),
            operations.agents.list(agent),
            operations.sessions.act_as(reader, MAIN),
            operations.exchanges.send(reader, SendRequest(session=HELPER, message="x"), requester=MAIN),
            operations.subagents.spawn(reader, SpawnRequest(task="x")),
        ):
            with pytest.raises(Forbidden):
                await refused
        assert (await operations.sessions.get_summary(OPERATOR)).sessions == 0
