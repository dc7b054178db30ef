"""Single sentences of the documents that a test of a whole contract line misses easily, through the real tools."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx2
import pytest
from pydantic import ValidationError

from antiphon.client.connection import GatewayConnection, Site
from antiphon.clock import ManualClock
from antiphon.config import Config
from antiphon.engine.toolbox import ToolRequest
from antiphon.errors import AntiphonError
from antiphon.gateway.server import ListeningGateway, serve_gateway
from antiphon.gateway.tokens import TokenRegistry
from antiphon.operations.types import SessionPatch
from antiphon.transfers.import_source import scan_source
from antiphon.transfers.imports import import_source
from support.agents_fixture import (
    HELPER,
    OPEN_ACCESS,
    AgentsFixture,
    ScriptedAgent,
    get_phase,
    make_agents_config,
    merge_settings,
    open_agents_fixture,
)
from support.app_fixture import BOUND, MAIN, OPERATOR, AppFixture, make_config, open_app_fixture
from support.commit_watcher import CommitWatcher
from support.tool_calls import (
    answer_briefly,
    append_messages,
    call_tool,
    make_assistant_message,
    make_user_message,
)

pytestmark = pytest.mark.anyio

WHOLE_AGENT = {"tools": {"sessions": {"visibility": "agent"}}}
CALM = {"replyBack": 0, "announce": "none"}
NOWHERE = "00000000-0000-4000-8000-000000000000"
HOOK = {"enabled": True, "token": "a-hook-token", "allowRequestSessionKey": True}


def rows_of(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["key"]: row for row in result["sessions"]}


# --- over the wire ---


class Wire:
    """A gateway on a real socket, with the rehearsal model for every agent."""

    def __init__(
        self, served: ListeningGateway, path: Path, link: GatewayConnection, commits: CommitWatcher
    ) -> None:
        self.link = link
        self.agents = AgentsFixture(served.gateway.app, path, commits)
        self._served, self._path = served, path

    async def call(self, method: str, **params: Any) -> Any:
        return await self.link.request(method, params, BOUND)

    async def say(self, words: str, session: str = "main") -> Any:
        """Say it and wait until it is answered."""
        sent = await self.call("chat.send", sessionKey=session, message=words, idempotencyKey=str(uuid4()))
        await self.call("agent.wait", runId=sent["runId"])
        return sent

    @asynccontextmanager
    async def linked(self, *scopes: str) -> AsyncGenerator[GatewayConnection]:
        """Another connection, of a client with these scopes."""
        token = TokenRegistry.open(self._path).issue_token("somebody", scopes)
        link = await GatewayConnection.open(Site(self._served.url, token))
        try:
            yield link
        finally:
            await link.close()

    def http(self) -> httpx2.AsyncClient:
        return httpx2.AsyncClient(base_url=self._served.url.replace("ws://", "http://"), timeout=BOUND)


@asynccontextmanager
async def wired(path: Path, **sections: Any) -> AsyncGenerator[Wire]:
    config = Config.model_validate(merge_settings(OPEN_ACCESS, sections))
    commits = CommitWatcher()
    async with serve_gateway(config, path, port=0, on_commit=commits) as served:
        link = await GatewayConnection.open(Site(served.url, TokenRegistry.open(path).owner_token))
        try:
            yield Wire(served, path, link, commits)
        finally:
            await link.close()


# --- keys ---


@pytest.mark.requirement("K2", "003-key-main-is-own")
async def test_main_is_the_main_session_of_the_caller(tmp_path: Path) -> None:
    async with open_agents_fixture(make_agents_config("helper"), tmp_path) as agents:
        await agents.ask("say of main", MAIN)
        await agents.ask("say of helper", HELPER)
        for session, other in ((MAIN, HELPER), (HELPER, MAIN)):
            listed = rows_of(await agents.use("sessions_list", session))
            assert listed.keys() == {"main", other}
            page = await agents.use("sessions_history", session, sessionKey="main")
            assert page["sessionId"] == listed["main"]["sessionId"]
            assert page["messages"][0]["content"] == f"say of {session.split(':')[1]}"
            status = await agents.use("session_status", session, sessionKey="main")
            assert status["session"]["agentId"] == session.split(":")[1]
        job = "agent:helper:cron:1"
        await agents.open_sessions(job)
        sent = await agents.use("sessions_send", job, sessionKey="main", message="say here", **CALM)
        assert (sent["status"], sent["sessionKey"]) == ("ok", "main")
        assert (await agents.transcript(HELPER))[-2]["content"] == "say here"


@pytest.mark.requirement("K4", "001-key-surface")
@pytest.mark.parametrize("short", ["telegram:group:-100", "discord:channel:General"])
async def test_the_older_form_of_a_group_is_taken_and_the_full_one_kept_and_shown(
    tmp_path: Path, short: str
) -> None:
    full = f"agent:main:{short}"
    async with open_agents_fixture(make_agents_config(), tmp_path) as agents:
        await agents.open_sessions(MAIN)
        await agents.ask("say hello", short)
        assert {row["key"] for row in agents.rows("SELECT key FROM sessions")} == {MAIN, full}
        assert rows_of(await agents.use("sessions_list", kinds=["group"])).keys() == {full}
        for spelling in (short, full):
            assert (await agents.use("sessions_history", sessionKey=spelling))["sessionKey"] == full
            assert (await agents.use("session_status", sessionKey=spelling))["sessionKey"] == full
            sent = await agents.use("sessions_send", sessionKey=spelling, message="say yes", **CALM)
            assert (sent["status"], sent["sessionKey"]) == ("ok", full)


async def goes_by(agents: AgentsFixture, kind: str, short: str) -> None:
    """Its own agent sees it under the short form and may use both; another agent sees the full one."""
    full = f"agent:main:{short}"
    await agents.open_sessions(MAIN, HELPER)
    row = rows_of(await agents.use("sessions_list", kinds=[kind]))[short]
    assert (row["kind"], row["channel"], row["agentId"]) == (kind, "internal", "main")
    for spelling in (short, full):
        page = await agents.use("sessions_history", sessionKey=spelling)
        assert (page["sessionKey"], page["sessionId"]) == (short, row["sessionId"])
        sent = await agents.use("sessions_send", sessionKey=spelling, message="say yes", **CALM)
        assert (sent["status"], sent["sessionKey"], sent["reply"]) == ("ok", short, "yes")
    assert full in rows_of(await agents.use("sessions_list", HELPER, kinds=[kind]))
    assert "error" in await agents.use("sessions_history", HELPER, sessionKey=short)


TWO = {"list": [{"id": "main", "default": True}, {"id": "helper"}]}


@pytest.mark.requirement("K1", "K2", "003-key-cron")
async def test_a_scheduled_job_has_the_session_of_its_id(tmp_path: Path) -> None:
    async with wired(tmp_path, agents=TWO) as wire:
        job = await wire.call(
            "cron.add",
            name="nightly",
            schedule={"kind": "every", "everyMs": 3_600_000},
            payload={"kind": "agentTurn", "message": "say good night"},
            sessionTarget="isolated",
        )
        ran = await wire.call("cron.run", id=job["id"], mode="force")
        await wire.call("agent.wait", runId=ran["runId"])
        await goes_by(wire.agents, "cron", f"cron:{job['id']}")


@pytest.mark.requirement("K1", "K2", "003-key-hook")
@pytest.mark.parametrize("chosen", [None, "hook:deploys"])
async def test_a_hook_has_a_session_of_its_own_or_the_one_that_was_chosen(
    tmp_path: Path, chosen: str | None
) -> None:
    async with wired(tmp_path, agents=TWO, hooks=HOOK) as wire, wire.http() as http:
        body = {"message": "say deployed", **({"sessionKey": chosen} if chosen else {})}
        reply = await http.post(
            "/hooks/agent", json=body, headers={"Authorization": f"Bearer {HOOK['token']}"}
        )
        told = reply.json()
        await wire.call("agent.wait", runId=told["runId"])
        short = told["sessionKey"].removeprefix("agent:main:")
        word, _, name = short.partition(":")
        assert word == "hook"
        assert short == chosen or (chosen is None and len(name) == len(NOWHERE) and name.count("-") == 4)
        await goes_by(wire.agents, "hook", short)


@pytest.mark.requirement("K1", "K2", "003-key-node")
async def test_a_node_has_the_session_of_its_id_or_the_one_that_was_chosen(tmp_path: Path) -> None:
    async with wired(tmp_path, agents=TWO) as wire:
        await wire.say("say hello", "node-kitchen-mac")
        await goes_by(wire.agents, "node", "node-kitchen-mac")
        await wire.say("say to you, too", "agent:main:my-node")
        assert "agent:main:my-node" in rows_of(await wire.agents.use("sessions_list"))


ONE_MAIN = {"session": {"scope": "global"}}
JOB = "agent:main:cron:1"


@pytest.mark.requirement("K3", "003-key-reserved")
@pytest.mark.parametrize("scope", ["per-sender", "global"])
async def test_global_and_unknown_are_in_no_list_and_cannot_be_named(tmp_path: Path, scope: str) -> None:
    async with open_agents_fixture(make_agents_config(session={"scope": scope}), tmp_path) as agents:
        await agents.open_sessions("main", JOB)
        (own,) = agents.rows("SELECT key FROM sessions WHERE kind = 'main'")
        shown = "main" if scope == "global" else MAIN
        assert own["key"] == shown
        assert [row["key"] for row in (await agents.call_tool("sessions_list", JOB))["sessions"]] == [
            "cron:1",
            "main",
        ]
        operators = (await ask_operator(agents, "sessions_list"))["sessions"]
        assert {row["key"] for row in operators} == {shown, JOB}
        for name in ("global", "unknown", "agent:main:global", "agent:main:unknown"):
            for tool in ("sessions_history", "session_status", "sessions_send", "sessions_search"):
                given = {"sessions_send": {"message": "x"}, "sessions_search": {"query": "x"}}.get(tool, {})
                told = await agents.use(tool, JOB, sessionKey=name, **given)
                assert told["status"] == "error", (tool, name)
            assert (await agents.use("sessions_list", JOB, spawnedBy=name))["status"] == "error"
            with pytest.raises(AntiphonError):
                await agents.open_sessions(name)
        assert len(agents.rows("SELECT key FROM sessions")) == 2


async def ask_operator(agents: AgentsFixture, name: str, **arguments: Any) -> dict[str, Any]:
    tool = agents.app.toolbox.tools[name]
    return (
        await tool.invoke(ToolRequest(caller=OPERATOR, run_id="r", call_id="c", arguments=arguments))
    ).details


@pytest.mark.requirement("K3", "003-key-global-is-main")
async def test_where_all_share_one_main_session_every_tool_says_and_takes_main(tmp_path: Path) -> None:
    async with open_agents_fixture(make_agents_config("helper", **ONE_MAIN), tmp_path) as agents:
        await agents.open_sessions("main", JOB, HELPER)
        assert [row["key"] for row in agents.rows("SELECT key FROM sessions ORDER BY id")] == ["main", JOB]
        told: list[dict[str, Any]] = []

        async def does(tool: str, session: str = "main", /, **arguments: Any) -> dict[str, Any]:
            told.append(await agents.call_tool(tool, session, **arguments))
            return told[-1]

        spawned = await does("sessions_spawn", task="say done", label="errand")
        await agents.wait_until_idle()
        child = spawned["childSessionKey"]
        assert rows_of(await does("sessions_list", messageLimit=20))[child]["parentKey"] == "main"
        assert (await does("subagents", action="list"))["recent"][0]["childSessionKey"] == child
        assert (await does("sessions_send", sessionKey="cron:1", message="say yes", **CALM))["reply"] == "yes"
        sent = await does("sessions_send", JOB, sessionKey="main", message="say well", **CALM)
        assert (sent["status"], sent["sessionKey"], sent["reply"]) == ("ok", "main", "well")
        assert "main" in rows_of(await does("sessions_list", JOB, messageLimit=20))
        for reference in ("main", MAIN, HELPER):
            page = await does("sessions_history", JOB, sessionKey=reference, includeTools=True)
            assert page["sessionKey"] == "main"
            assert (await does("session_status", JOB, sessionKey=reference))["sessionKey"] == "main"
            found = await does("sessions_search", JOB, sessionKey=reference, query="errand")
            assert {hit["sessionKey"] for hit in found["results"]} == {"main"}
        assert (await does("session_status"))["sessionKey"] == "main"
        assert (await does("sessions_history", sessionKey="cron:1", includeTools=True))["messages"]
        await does("sessions_history", sessionKey=child, includeTools=True)
        assert "global" not in json.dumps(told)
        for session in ("main", JOB, child):
            assert "global" not in json.dumps(await agents.transcript(session))


@pytest.mark.requirement("K3", "S3", "P3", "003-key-global-is-main")
async def test_where_all_share_one_main_session_models_are_told_of_it_as_main(tmp_path: Path) -> None:
    helper, there = ScriptedAgent("done"), "agent:helper:cron:1"
    spawning = {"id": "main", "default": True, "subagents": {"allowAgents": ["*"]}}
    config = make_agents_config(spawning, "helper", **ONE_MAIN)
    async with open_agents_fixture(config, tmp_path, functions={"helper": helper}) as agents:
        await agents.open_sessions("main", there)
        sent = await agents.call_tool("sessions_send", "main", sessionKey=there, message="hello", replyBack=0)
        assert sent["status"] == "ok"
        await agents.call_tool("sessions_spawn", "main", task="an errand", agentId="helper")
        await agents.wait_until_idle()
        assert [get_phase(prompt) for prompt in helper.prompts].count("request") == 2
        for prompt in helper.prompts:
            assert "'main'" in f"{prompt.instructions} {prompt.messages}"
            assert "global" not in f"{prompt.instructions} {prompt.messages}"
    main = ScriptedAgent("done")
    async with open_agents_fixture(config, tmp_path, functions={"main": main}) as agents:
        await agents.ask("hello", "main")
        assert "'main'" in main.prompts[-1].instructions
        assert "global" not in main.prompts[-1].instructions


# --- session ids ---


@pytest.mark.requirement("H1", "H5", "K2", "003-history-session-id", "003-history-id-resolves")
async def test_a_session_id_of_a_list_stands_for_its_key_wherever_a_session_is_named(tmp_path: Path) -> None:
    async with open_agents_fixture(make_agents_config("helper"), tmp_path) as agents:
        await agents.open_sessions(MAIN)
        for session in (JOB, HELPER):
            await agents.ask("say needle", session)
        rows = rows_of(await agents.use("sessions_list"))
        for key in ("cron:1", HELPER):
            by_id = rows[key]["sessionId"]
            for tool in ("sessions_history", "session_status"):
                assert (await agents.use(tool, sessionKey=by_id))["sessionKey"] == key
                assert await _same(agents, tool, by_id, key)
            found = (await agents.use("sessions_search", sessionKey=by_id, query="needle"))["results"]
            assert {hit["sessionKey"] for hit in found} == {key}
            sent = await agents.use("sessions_send", sessionKey=by_id, message="say yes", **CALM)
            assert (sent["status"], sent["sessionKey"], sent["reply"]) == ("ok", key, "yes")
        given: dict[str, dict[str, str]] = {
            "sessions_send": {"message": "x"},
            "sessions_search": {"query": "x"},
        }
        for tool in ("sessions_history", "session_status", "sessions_send", "sessions_search"):
            told = await agents.use(tool, sessionKey=NOWHERE, **given.get(tool, {}))
            assert (told["status"], told["code"]) == ("error", "not_found"), tool
            assert NOWHERE in told["error"]


async def _same(agents: AgentsFixture, tool: str, one: str, other: str) -> bool:
    return await agents.use(tool, sessionKey=one) == await agents.use(tool, sessionKey=other)


# --- lists ---


@pytest.mark.requirement("L1", "003-list-limit")
async def test_a_list_has_fifty_rows_unless_told_and_two_hundred_at_most(tmp_path: Path) -> None:
    async with open_app_fixture(tmp_path, answer_briefly, config=make_config(WHOLE_AGENT)) as app:
        for number in range(205):
            await app.create(f"agent:main:cron:{number}")
        counts = {
            limit: (await call_tool(app, "sessions_list", **({} if limit is None else {"limit": limit})))[
                "count"
            ]
            for limit in (None, 1, 60, 200, 201, 100_000)
        }
        assert counts == {None: 50, 1: 1, 60: 60, 200: 200, 201: 200, 100_000: 200}


@pytest.mark.requirement("L1", "L2", "003-list-message-limit")
async def test_a_row_has_no_messages_unless_asked_for_and_twenty_at_most(tmp_path: Path) -> None:
    async with open_app_fixture(tmp_path, answer_briefly) as app:
        await append_messages(
            app, await app.create(MAIN), *(make_user_message(str(number)) for number in range(1, 31))
        )
        for none in ({}, {"messageLimit": 0}):
            assert "messages" not in rows_of(await call_tool(app, "sessions_list", **none))["main"]
        for limit, first in ((1, 30), (3, 28), (20, 11), (21, 11), (500, 11)):
            listed = rows_of(await call_tool(app, "sessions_list", messageLimit=limit))
            contents = [message["content"] for message in listed["main"]["messages"]]
            assert contents == [str(number) for number in range(first, 31)]


@pytest.mark.requirement("L1", "L2", "003-list-filters-together")
async def test_kinds_limit_active_minutes_and_message_limit_work_in_one_call(tmp_path: Path) -> None:
    clock = ManualClock()
    async with open_app_fixture(
        tmp_path, answer_briefly, config=make_config(WHOLE_AGENT), clock=clock
    ) as app:
        await append_messages(app, await app.create("agent:main:cron:old"), make_user_message("long ago"))
        clock.advance(seconds=3600)
        for number in range(4):
            row = await app.create(f"agent:main:cron:{number}")
            await append_messages(
                app, row, make_user_message(f"one {number}"), make_assistant_message(f"two {number}")
            )
            clock.advance(seconds=60)
        for key in (MAIN, "agent:main:hook:1", "agent:main:telegram:group:1"):
            await append_messages(app, await app.create(key), make_user_message("of another kind"))
        wanted = {"kinds": ["cron", "hook"], "activeMinutes": 30, "limit": 3, "messageLimit": 1}
        result = await call_tool(app, "sessions_list", **wanted)
        last = {key: [entry["content"] for entry in row["messages"]] for key, row in rows_of(result).items()}
        assert list(last) == ["hook:1", "cron:3", "cron:2"]
        assert last["hook:1"] == ["of another kind"]
        assert last["cron:3"] == [[{"type": "text", "text": "two 3"}]]
        rest = await call_tool(app, "sessions_list", **wanted, cursor=result["nextCursor"])
        assert list(rows_of(rest)) == ["cron:1", "cron:0"]
        assert "nextCursor" not in rest


def _bare(message: dict[str, Any]) -> dict[str, Any]:
    """An entry of `chat.history` without what is added there for clients."""
    return {name: value for name, value in message.items() if name not in {"__openclaw", "idempotencyKey"}}


@pytest.mark.requirement("L2", "H2", "003-list-messages-are-history", "003-list-no-tool-results")
async def test_the_messages_of_a_row_are_the_newest_of_its_history_without_tool_results(
    tmp_path: Path,
) -> None:
    async with wired(tmp_path) as wire:
        for number in range(3):
            await wire.say(f"call agents_list {{}}\nsay {number}")
        history = (await wire.call("chat.history", sessionKey="main"))["messages"]
        assert [message["role"] for message in history].count("toolResult") == 3
        spoken = [_bare(message) for message in history if message["role"] != "toolResult"]
        for limit in (1, 4, 20):
            rows = rows_of(await wire.agents.use("sessions_list", messageLimit=limit))
            assert rows["main"]["messages"] == spoken[-limit:]
        page = await wire.agents.use("sessions_history", sessionKey="main", includeTools=True)
        assert [item["role"] for item in page["messages"]] == [message["role"] for message in history]


# --- rows ---

CHANNELS = ("whatsapp", "telegram", "discord", "signal", "imessage", "webchat")


async def furnish(app: AppFixture) -> dict[str, str]:
    """Sessions of every kind of origin, and the channel that each has."""
    expected = {"main": "unknown", "cron:1": "internal", "hook:1": "internal", "node-1": "internal"}
    for key in expected:
        await app.create(f"agent:main:{key}")
    for channel in (*CHANNELS, "matrix"):
        group, direct = f"agent:main:{channel}:group:1", f"agent:main:{channel}:direct:bob"
        for key in (group, direct):
            await app.create(key)
            expected[key] = channel
        app.rows("UPDATE sessions SET last_channel = ? WHERE key = ?", channel, direct)
        app.rows("UPDATE sessions SET last_channel = 'elsewhere' WHERE key = ?", group)
    app.rows("UPDATE sessions SET last_channel = 'telegram' WHERE kind IN ('cron', 'hook', 'node')")
    return expected


@pytest.mark.requirement("L3", "K6", "003-row-channel")
async def test_a_row_has_its_channel_by_one_of_the_known_names_or_its_own(tmp_path: Path) -> None:
    async with open_app_fixture(tmp_path, answer_briefly, config=make_config(WHOLE_AGENT)) as app:
        expected = await furnish(app)
        rows = rows_of(await call_tool(app, "sessions_list"))
        assert {key: row["channel"] for key, row in rows.items()} == expected
        assert set(expected.values()) == {*CHANNELS, "internal", "unknown", "matrix"}
        assert all(row["provider"] == row["channel"] for row in rows.values())


@pytest.mark.requirement("L3", "K6", "001-row-provider", "001-provider-as-channel")
async def test_a_row_has_its_provider_by_the_same_rules(tmp_path: Path) -> None:
    config = make_config(WHOLE_AGENT)
    async with open_app_fixture(tmp_path, answer_briefly, config=config) as app:
        expected = await furnish(app)
        await app.ask("hello", "slack:group:7")
        rows = rows_of(await call_tool(app, "sessions_list"))
        assert {key: row["provider"] for key, row in rows.items()} == {
            **expected,
            "agent:main:slack:group:7": "slack",
        }
        assert all(row["channel"] == row["provider"] for row in rows.values())


ROUTES: dict[str, dict[str, Any]] = {
    "agent:main:telegram:direct:old": {"lastChannel": "telegram", "lastTo": 7, "lastAccountId": "work"},
    "agent:main:telegram:direct:new": {
        "deliveryContext": {"channel": "telegram", "to": "7", "accountId": "work", "guess": 1}
    },
    "agent:main:telegram:direct:part": {"lastChannel": "telegram"},
    "agent:main:telegram:direct:none": {"deliveryContext": {"to": "7"}},
}


@pytest.mark.requirement("L3", "003-row-delivery-context")
async def test_a_row_has_its_route_in_one_form_however_it_was_recorded(tmp_path: Path) -> None:
    source = tmp_path / "old" / "agents" / "main" / "sessions"
    source.mkdir(parents=True)
    index = {key: {"sessionId": key.split(":")[-1], "updatedAt": 1, **route} for key, route in ROUTES.items()}
    source.joinpath("sessions.json").write_text(json.dumps(index))
    async with open_app_fixture(tmp_path, answer_briefly, config=make_config(WHOLE_AGENT)) as app:
        config = app.operations.context.config
        await import_source(app.store, config, scan_source(tmp_path / "old", config), 1)
        rows = rows_of(await call_tool(app, "sessions_list"))
        old, new, part, none = (rows[key] for key in ROUTES)
        for row in (old, new):
            assert row["deliveryContext"] == {"channel": "telegram", "to": "7", "accountId": "work"}
            assert (row["lastChannel"], row["lastTo"], row["lastAccountId"]) == ("telegram", "7", "work")
        assert part["deliveryContext"] == {"channel": "telegram"}
        assert "deliveryContext" not in none


@pytest.mark.requirement("L3", "D2", "003-row-send-policy")
async def test_a_row_has_its_send_policy_while_it_has_one_of_its_own(tmp_path: Path) -> None:
    config = make_config({"session": {"sendPolicy": {"default": "deny"}}})
    async with open_app_fixture(tmp_path, answer_briefly, config=config) as app:
        await app.create(MAIN)
        assert "sendPolicy" not in rows_of(await call_tool(app, "sessions_list"))["main"]
        for policy in ("allow", "deny"):
            await app.operations.sessions.patch(OPERATOR, MAIN, SessionPatch(send_policy=policy))
            assert rows_of(await call_tool(app, "sessions_list"))["main"]["sendPolicy"] == policy
        await app.operations.sessions.patch(OPERATOR, MAIN, SessionPatch(send_policy=None))
        assert "sendPolicy" not in rows_of(await call_tool(app, "sessions_list"))["main"]


# --- live transcripts ---


async def heard(events: asyncio.Queue[Any], count: int) -> list[dict[str, Any]]:
    """The next messages, of any session."""
    found: list[dict[str, Any]] = []
    async with asyncio.timeout(BOUND):
        while len(found) < count:
            name, told = await events.get()
            if name == "session.message":
                found.append(told)
    return found


@pytest.mark.requirement("W2", "W3", "003-subscribe-messages", "003-unsubscribe-messages")
async def test_unsubscribing_ends_the_messages_of_that_session_and_no_others(tmp_path: Path) -> None:
    other = "agent:main:dashboard:other"
    async with wired(tmp_path) as wire:
        await wire.call("sessions.create", key=other)
        with wire.link.listen() as events:
            for key in (MAIN, other):
                await wire.call("sessions.messages.subscribe", key=key)
            assert await wire.call("sessions.messages.unsubscribe", key=MAIN) == {
                "subscribed": False,
                "key": MAIN,
            }
            await wire.say("say not this")
            await wire.say("say this", other)
            told = await heard(events, 2)
            assert [(one["sessionKey"], one["messageSeq"]) for one in told] == [(other, 1), (other, 2)]
            await wire.call("sessions.messages.subscribe", key=MAIN)
            await wire.say("say this again")
            told = await heard(events, 2)
            assert [(one["sessionKey"], one["messageSeq"]) for one in told] == [(MAIN, 3), (MAIN, 4)]


@pytest.mark.requirement("W3", "003-event-session-message")
@pytest.mark.parametrize("method", ["sessions.subscribe", "sessions.messages.subscribe"])
async def test_a_message_is_told_as_the_entry_it_is_with_its_usage_where_that_is_known(
    tmp_path: Path, method: str
) -> None:
    async with wired(tmp_path) as wire:
        with wire.link.listen() as events:
            await wire.call(method, **({"key": MAIN} if "messages" in method else {}))
            await wire.say("say one two three")
            question, answer = await heard(events, 2)
        stored = await wire.agents.transcript()
        assert [_bare(told["message"]) for told in (question, answer)] == stored
        assert [told["messageId"] for told in (question, answer)] == [entry["id"] for entry in stored]
        assert "usage" not in question["message"]
        total = await wire.call("sessions.usage", key=MAIN)
        assert answer["message"]["usage"]["output"] == total["totals"]["output"] > 0


# --- send policy ---


@pytest.mark.requirement("D1", "001-policy-surface")
async def test_a_rule_matches_by_surface_and_chat_type_and_never_by_session_id(tmp_path: Path) -> None:
    rule = {"action": "deny", "match": {"surface": "discord", "chatType": "group"}}
    config = make_agents_config(session={"sendPolicy": {"rules": [rule], "default": "allow"}})
    group = "agent:main:discord:group:1"
    async with open_agents_fixture(config, tmp_path) as agents:
        await agents.open_sessions(MAIN, group, "discord:channel:1", "telegram:group:1")
        for _ in range(2):
            told = await agents.use("sessions_send", sessionKey=group, message="say yes", **CALM)
            assert told["status"] == "error"
            assert "send blocked by session policy" in told["error"]
            await agents.operations.conversations.renew(OPERATOR, group)
        for free in ("discord:channel:1", "telegram:group:1"):
            told = await agents.use("sessions_send", sessionKey=free, message="say yes", **CALM)
            assert told["status"] == "ok"
    by_id = {"action": "deny", "match": {"sessionId": NOWHERE}}
    with pytest.raises(ValidationError, match="sessionId"):
        make_agents_config(session={"sendPolicy": {"rules": [by_id]}})


async def policy_of(wire: Wire) -> str | None:
    return rows_of(await wire.agents.use("sessions_list"))["main"].get("sendPolicy")


@pytest.mark.requirement("D2", "003-policy-command")
async def test_only_the_owner_sets_the_policy_by_a_command(tmp_path: Path) -> None:
    async with wired(tmp_path) as wire, wire.linked("operator.write") as writer:
        await wire.say("say hello")
        assert await policy_of(wire) is None
        for word, policy in (("on", "allow"), ("off", "deny"), ("inherit", None)):
            given = {"sessionKey": "main", "message": f"/send {word}", "idempotencyKey": f"not {word}"}
            before = await policy_of(wire)
            await writer.request("chat.send", given)  # ignored
            assert await policy_of(wire) == before
            await wire.call("chat.send", **{**given, "idempotencyKey": word})
            assert await policy_of(wire) == policy
        assert len(await wire.agents.transcript()) == 2


@pytest.mark.requirement("D2", "003-policy-command-alone")
@pytest.mark.parametrize("words", ["please /send off", "/send off please", "/send off\nthanks", "/send"])
async def test_a_command_among_other_words_is_a_message_like_any_other(tmp_path: Path, words: str) -> None:
    async with wired(tmp_path) as wire:
        await wire.say(words)
        assert (await wire.agents.transcript())[0]["content"] == words
        assert await policy_of(wire) is None
        await wire.call("chat.send", sessionKey="main", message=" /send off ", idempotencyKey="alone")
        assert await policy_of(wire) == "deny"
        assert len(await wire.agents.transcript()) == 2
