"""Every method of the WebSocket: what it answers, and its main errors."""

from __future__ import annotations

import ast
import asyncio
import base64
import logging
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from antiphon.engine.toolbox import ToolOutput, ToolRequest
from antiphon.gateway.methods import METHODS_BY_NAME
from antiphon.messages import AssistantMessage, UserMessage
from antiphon.paths import LOG_FILE_NAME
from antiphon.runtimes import Prompt
from support.app_fixture import MAIN, OPERATOR, make_answer, make_tool, make_tool_calls, wait_for_event
from support.gateway_ws import ADMIN, READ, WRITE, Client, GatewayFixture, open_gateway

pytestmark = [pytest.mark.anyio, pytest.mark.requirement("W2")]

OTHER = "agent:main:dashboard:other"
CONTRACT = """health status system-presence sessions.list sessions.resolve sessions.preview sessions.describe
    sessions.get sessions.create sessions.patch sessions.reset sessions.delete sessions.compact sessions.send
    sessions.steer sessions.abort sessions.usage sessions.subscribe sessions.unsubscribe sessions.search
    sessions.messages.subscribe sessions.messages.unsubscribe chat.history chat.send chat.abort chat.inject
    chat.startup agent agent.wait agent.identity.get agents.list send models.list config.get channels.status
    cron.list cron.add cron.update cron.remove cron.run tools.catalog tools.invoke logs.tail"""


def test_the_methods_of_the_contract_are_there() -> None:
    assert set(CONTRACT.split()) - set(METHODS_BY_NAME) == set()


def test_every_method_is_called_by_a_test_that_sees_it_succeed_or_say_why_not() -> None:
    called = {
        node.args[0].value
        for path in Path(__file__).parent.glob("test_ws_*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in {"call", "refused"}
        and node.args
        and isinstance(node.args[0], ast.Constant)
    }
    assert set(METHODS_BY_NAME) - called == set()


async def say(client: Client, words: str = "hello", session: str = MAIN, key: str | None = None) -> str:
    """Say it and wait for the end; the run's id."""
    sent = await client.call(
        "chat.send", sessionKey=session, message=words, idempotencyKey=key or f"{session} {words}"
    )
    waited = await client.call("agent.wait", runId=sent["runId"])
    assert waited["status"] == "ok", waited
    return sent["runId"]


async def contents(client: Client, session: str = MAIN) -> list[Any]:
    """What was said, without what was stopped before it said anything."""
    messages = (await client.call("chat.history", sessionKey=session))["messages"]
    said = [item["content"] for item in messages if item["content"]]
    return [content if isinstance(content, str) else content[0]["text"] for content in said]


def stands(answer: dict[str, Any]) -> dict[str, Any]:
    """Which run it is, and where it stands."""
    return {name: answer[name] for name in ("runId", "status")}


class Held:
    """An agent that begins and does not end before it may."""

    def __init__(self) -> None:
        self.going, self.go = asyncio.Event(), asyncio.Event()

    async def __call__(self, prompt: Prompt) -> str:
        self.going.set()
        await self.go.wait()
        return "at last"


# --- the gateway itself ---


async def test_health_status_and_presence(gateway: GatewayFixture) -> None:
    async with gateway.client() as client:
        health = await client.call("health", probe=True)
        assert health["ok"] is True
        assert [agent["agentId"] for agent in health["agents"]] == ["main"]
        await say(client)
        status = await client.call("status")
        assert status["sessions"]["count"] == 1
        assert status["runs"] == {"queued": 0, "running": 0}
        assert (status["connections"], status["defaultAgentId"]) == (1, "main")
        assert status["cron"]["jobs"] == 0
        (entry,) = await client.call("system-presence")
        assert (entry["mode"], entry["scopes"]) == ("test", [ADMIN])


async def test_the_configuration_is_shown_without_its_secrets(tmp_path: Path) -> None:
    secrets = ["tok-very-secret", "hook-very-secret", "key-very-secret", "url-very-secret"]
    provider = {
        "baseUrl": f"http://ann:{secrets[3]}@127.0.0.1:9/v1?key={secrets[3]}",
        "apiKey": secrets[2],
        "models": [{"id": "m1"}],
    }
    settings = {
        "gateway": {"auth": {"token": secrets[0]}},
        "hooks": {"enabled": True, "token": secrets[1]},
        "models": {"providers": {"local": provider}},
    }
    async with open_gateway(tmp_path, settings=settings) as gateway, gateway.client(secrets[0]) as client:
        shown = await client.call("config.get")
        assert shown["valid"] is True
        assert shown["config"]["models"]["providers"]["local"]["baseUrl"] == "http://127.0.0.1:9/v1"
        assert not [secret for secret in secrets if secret in str(shown)]
        assert gateway.owner not in str(shown)


async def test_agents_models_commands_and_channels(tmp_path: Path) -> None:
    settings = {"agents": {"list": [{"id": "main", "default": True, "name": "Ann"}, {"id": "helper"}]}}
    async with open_gateway(tmp_path, settings=settings) as gateway, gateway.client() as client:
        agents = await client.call("agents.list")
        assert (agents["defaultId"], agents["mainKey"], agents["scope"]) == ("main", "main", "per-sender")
        assert [(agent["id"], agent["name"]) for agent in agents["agents"]] == [
            ("main", "Ann"),
            ("helper", "helper"),
        ]
        assert all(
            agent["model"]["primary"] for agent in agents["agents"]
        )  # clients want one to be configured
        models = (await client.call("models.list"))["models"]
        assert models
        assert all(model["available"] and model["id"] and model["provider"] for model in models)
        assert (await client.call("chat.metadata"))["models"] == models
        named = {command["name"] for command in (await client.call("commands.list"))["commands"]}
        assert named == {"stop", "new", "reset", "send", "approve"}
        assert (await client.call("channels.status"))["channels"] == {}
        assert (await client.call("question.list"))["questions"] == []
        assert (await client.call("agent.identity.get"))["name"] == "Ann"
        assert (await client.call("agent.identity.get", agentId="helper"))["agentId"] == "helper"
        await client.call("sessions.create", key="agent:helper:main")
        by_session = await client.call("agent.identity.get", sessionKey="agent:helper:main")
        assert by_session["agentId"] == "helper"
        for params in ({"agentId": "nobody"}, {"sessionKey": "agent:main:dashboard:none"}):
            assert (await client.refused("agent.identity.get", **params))["code"] == "INVALID_REQUEST"


@pytest.mark.requirement("C")
async def test_an_agent_looks_as_its_identity_says(tmp_path: Path) -> None:
    identity = {"name": "Owl", "emoji": "🦉", "theme": "night"}
    settings = {"agents": {"list": [{"id": "main", "identity": identity}, {"id": "plain"}]}}
    async with open_gateway(tmp_path, settings=settings) as gateway, gateway.client() as client:
        owl, plain = (await client.call("agents.list"))["agents"]
        assert (owl["name"], owl["identity"]) == ("Owl", identity)
        assert (plain["name"], plain["identity"]) == ("plain", {"name": "plain"})
        shown = await client.call("agent.identity.get")
        assert (shown["name"], shown["emoji"]) == ("Owl", "🦉")
        assert "emoji" not in await client.call("agent.identity.get", agentId="plain")


async def test_there_is_no_channel_to_send_to(gateway: GatewayFixture) -> None:
    async with gateway.client() as client:
        error = await client.refused("send", to="+1", message="x", channel="pigeon", idempotencyKey="k")
        assert error["message"].startswith("unknown channel: pigeon")


async def test_the_tools_of_an_agent_are_listed(tmp_path: Path) -> None:
    async def look(call: ToolRequest) -> ToolOutput:
        raise AssertionError

    async with (
        open_gateway(tmp_path, tools=lambda _: [make_tool("look", look, has_side_effects=False)]) as gateway,
        gateway.client() as client,
    ):
        (group,) = (await client.call("tools.catalog"))["groups"]
        listed = [entry["id"] for entry in group["tools"]]
        assert {"sessions_list", "sessions_send", "sessions_spawn", "look"} <= set(listed)
        assert all(entry["description"] for entry in group["tools"])
        assert (await client.refused("tools.effective", sessionKey=MAIN))["details"]["type"] == "not_found"
        await say(client)
        (effective,) = (await client.call("tools.effective", sessionKey="main"))["groups"]
        assert [entry["id"] for entry in effective["tools"]] == listed
        # What published clients require of each.
        assert all(entry["defaultProfiles"] == [] for entry in group["tools"])
        assert all(entry["rawDescription"] == entry["description"] for entry in effective["tools"])
        assert (await client.refused("tools.catalog", agentId="nobody"))["code"] == "INVALID_REQUEST"


async def test_mcp_servers_are_listed_also_if_they_are_off(tmp_path: Path) -> None:
    settings = {"mcp": {"servers": {"files": {"command": "prog", "enabled": False}}}}
    async with open_gateway(tmp_path, settings=settings) as gateway, gateway.client() as client:
        (server,) = (await client.call("mcp.status"))["servers"]
        assert (server["name"], server["state"]) == ("files", "disabled")


async def test_a_tool_is_invoked_as_a_session_would(tmp_path: Path) -> None:
    async def look(call: ToolRequest) -> ToolOutput:
        if call.arguments.get("fail"):
            return ToolOutput(text="it is dark", is_error=True)
        return ToolOutput(text=f"{call.caller.session_key} sees {call.arguments['what']}")

    async with (
        open_gateway(tmp_path, tools=lambda _: [make_tool("look", look, has_side_effects=False)]) as gateway,
        gateway.client() as client,
    ):
        done = await client.call("tools.invoke", name="look", args={"what": "a bird"}, sessionKey=OTHER)
        assert (done["ok"], done["toolName"]) == (True, "look")
        assert done["output"]["content"] == [{"type": "text", "text": f"{OTHER} sees a bird"}]
        failed = await client.call("tools.invoke", name="look", args={"fail": True})
        assert (failed["ok"], failed["error"]["message"]) == (False, "it is dark")
        for name in ("no-such-tool", "sessions_send"):
            missing = await client.call("tools.invoke", name=name)
            assert (missing["ok"], missing["error"]["code"]) == (False, "not_found")
            assert missing["error"]["message"].startswith(f"Tool not available: {name}")


@pytest.fixture
def logged(tmp_path: Path) -> Generator[Path]:
    """Everything that is logged, in the file that `logs.tail` reads."""
    path = tmp_path / LOG_FILE_NAME
    handler = logging.FileHandler(path)
    root = logging.getLogger()
    before = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    try:
        yield path
    finally:
        root.setLevel(before)
        root.removeHandler(handler)
        handler.close()


@pytest.mark.requirement("W7")
async def test_the_log_can_be_followed_and_has_no_token_in_it(tmp_path: Path, logged: Path) -> None:
    async with open_gateway(tmp_path) as gateway:
        token = gateway.issue(READ)
        async with (
            gateway.client() as client,
            gateway.client(token),
            gateway.connect_unauthenticated() as guesser,
        ):
            await guesser.ask("connect", {"auth": {"token": "a wrong guess"}, "minProtocol": 3})
            async with gateway.http() as http, gateway.http("another wrong guess") as stranger:
                await http.get("/v1/models")
                await stranger.get("/v1/models")
            logging.getLogger("test").warning("a line to find")
            tail = await client.call("logs.tail", limit=5000)
            assert "a line to find" in tail["lines"]
            assert tail["cursor"] == tail["size"] > 0
            everything = await asyncio.to_thread(logged.read_text)
            assert [secret for secret in (gateway.owner, token, "wrong guess") if secret in everything] == []
            logging.getLogger("test").warning("one more")
            more = await client.call("logs.tail", cursor=tail["cursor"])
            assert "one more" in more["lines"]
            assert "a line to find" not in more["lines"]
            assert (await client.call("logs.tail", limit=1))["truncated"] is True
            assert (await client.call("logs.tail", cursor=10**9))["reset"] is True


# --- saying something ---


@pytest.mark.requirement("S9", "G5")
async def test_the_same_key_is_the_same_run_and_other_words_under_it_are_a_conflict(tmp_path: Path) -> None:
    held = Held()
    said = {"sessionKey": "main", "message": "once", "idempotencyKey": "k1"}
    async with open_gateway(tmp_path, held) as gateway, gateway.client() as client:
        sent = await client.call("chat.send", **said)
        assert (sent["runId"], sent["status"], sent["sessionKey"]) == ("k1", "started", MAIN)
        await wait_for_event(held.going)
        assert stands(await client.call("chat.send", **said)) == {"runId": "k1", "status": "in_flight"}
        held.go.set()
        assert (await client.call("agent.wait", runId="k1"))["reply"] == "at last"
        assert stands(await client.call("chat.send", **said)) == {"runId": "k1", "status": "ok"}
        for change in ({"message": "twice"}, {"sessionKey": OTHER}):
            error = await client.refused("chat.send", **{**said, **change})
            assert (error["code"], error["details"]["reason"]) == ("INVALID_REQUEST", "chat-request-conflict")
        assert await contents(client) == ["once", "at last"]
    async with open_gateway(tmp_path) as gateway, gateway.client() as client:  # and after a restart
        assert stands(await client.call("chat.send", **said)) == {"runId": "k1", "status": "ok"}
        error = await client.refused("chat.send", **{**said, "message": "twice"})
        assert error["details"]["reason"] == "chat-request-conflict"
        assert await contents(client) == ["once", "at last"]


async def test_a_run_that_failed_is_remembered_as_such(tmp_path: Path) -> None:
    async with open_gateway(tmp_path, None) as gateway, gateway.client() as client:
        said = {"sessionKey": "main", "message": "fail no luck", "idempotencyKey": "k1"}
        await client.call("chat.send", **said)
        waited = await client.call("agent.wait", runId="k1")
        assert waited["status"] == "error"
        assert "no luck" in waited["error"]
        assert (await client.call("chat.send", **said))["status"] == "error"


async def test_an_answer_that_was_cut_short_is_an_answer(tmp_path: Path) -> None:
    async def agent(prompt: Prompt) -> AssistantMessage:
        return make_answer("as far as it", stop_reason="length")

    async with open_gateway(tmp_path, agent) as gateway, gateway.client() as client:
        said = {"sessionKey": "main", "message": "go", "idempotencyKey": "k1"}
        await client.call("chat.send", **said)
        assert (await client.event("chat", state="final"))["stopReason"] == "length"
        assert (await client.call("agent.wait", runId="k1"))["status"] == "ok"
        assert (await client.call("chat.send", **said))["status"] == "ok"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"message": "  "}, "empty"),
        ({"message": "x" * 3000}, "the maximum is 2000"),
        ({"sessionKey": "global"}, "global"),
        ({"sessionKey": "agent:nobody:main"}, "nobody"),
        ({"agentId": "helper", "sessionKey": MAIN}, "does not belong to agent 'helper'"),
        ({"thinking": "deeply"}, "deeply"),
        ({"timeoutMs": 10**15}, "timeout"),
        ({"idempotencyKey": "\n"}, "idempotency key"),
    ],
)
async def test_what_cannot_be_sent_is_refused_in_words(
    tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    settings = {"store": {"messageMaxBytes": 2000}, "agents": {"list": [{"id": "main"}, {"id": "helper"}]}}
    async with open_gateway(tmp_path, settings=settings) as gateway, gateway.client() as client:
        said = {"sessionKey": "main", "message": "x", "idempotencyKey": "k", **changes}
        error = await client.refused("chat.send", **said)
        assert error["code"] == "INVALID_REQUEST"
        assert says in error["message"]


async def test_images_come_along_and_nothing_else_does(gateway: GatewayFixture) -> None:
    data = base64.b64encode(b"\x89PNG not really").decode()
    image = {"type": "image", "mimeType": "image/png", "fileName": "a.png", "content": data}
    async with gateway.client() as client:
        said = {"sessionKey": "main", "message": "look", "idempotencyKey": "k1", "attachments": [image]}
        await client.call("chat.send", **said)
        first = (await _messages(client, 2))[0]
        assert first["content"] == [
            {"type": "text", "text": "look"},
            {"type": "image", "data": data, "mimeType": "image/png"},
        ]
        url = {"content": f"data:image/gif;base64,{data}"}
        await client.call(
            "chat.send", **{**said, "idempotencyKey": "k2", "message": "", "attachments": [url]}
        )
        third = (await _messages(client, 4))[2]
        assert [block["mimeType"] for block in third["content"]] == ["image/gif"]
        for bad in (
            {**image, "mimeType": "text/html"},
            {**image, "content": "not base64!"},
            {**image, "content": 5},
        ):
            error = await client.refused(
                "chat.send", **{**said, "idempotencyKey": "k3", "attachments": [image, bad]}
            )
            assert error["details"]["field"] == "attachments/1"
        error = await client.refused(
            "chat.send", **{**said, "idempotencyKey": "k3", "attachments": [image] * 21}
        )
        assert error["details"]["field"] == "attachments"


async def _messages(client: Client, number: int) -> list[Any]:
    await client.take("session.message", 0)
    runs = ["k1", "k2"][: number // 2]
    for run in runs:
        await client.call("agent.wait", runId=run)
    messages = (await client.call("chat.history", sessionKey="main"))["messages"]
    assert len(messages) == number
    return messages


async def test_stop_words_stop_and_are_not_said(tmp_path: Path) -> None:
    held = Held()
    async with open_gateway(tmp_path, held) as gateway, gateway.client() as client:
        for number, word in enumerate(("/stop", "stop", "ABORT")):
            held.going.clear()
            await client.call("chat.send", sessionKey="main", message="x", idempotencyKey=f"k{number}")
            await wait_for_event(held.going)
            stopped = await client.call(
                "chat.send", sessionKey="main", message=word, idempotencyKey=f"s{number}"
            )
            assert stopped == {"ok": True, "aborted": True, "runIds": [f"k{number}"]}
            waited = await client.call("agent.wait", runId=f"k{number}")
            assert (waited["status"], waited["error"]) == ("error", "aborted")
        again = await client.call("chat.send", sessionKey="main", message="/stop", idempotencyKey="s9")
        assert again == {"ok": True, "aborted": False, "runIds": []}
        assert await contents(client) == ["x"] * 3


async def test_a_stop_word_that_is_meant_literally_is_said(gateway: GatewayFixture) -> None:
    async with gateway.client() as client:
        said = {
            "sessionKey": "main",
            "message": "/new",
            "idempotencyKey": "k",
            "suppressCommandInterpretation": True,
        }
        assert (await client.call("chat.send", **said))["status"] == "started"
        await client.call("agent.wait", runId="k")
        assert await contents(client) == ["/new", "heard /new"]


@pytest.mark.requirement("W7", "G25")
async def test_a_command_in_a_text_needs_what_its_method_needs(gateway: GatewayFixture) -> None:
    async with gateway.client() as admin, gateway.client(gateway.issue(WRITE)) as writer:
        await say(writer, "before")
        first = (await admin.call("sessions.describe", key=MAIN))["session"]
        for word in ("/new", "/RESET"):
            for method, key in (
                ("chat.send", "sessionKey"),
                ("sessions.send", "key"),
                ("agent", "sessionKey"),
            ):
                error = await writer.refused(
                    method, **{key: MAIN, "message": word, "idempotencyKey": f"{word}{method}"}
                )
                assert error["message"] == "missing scope: operator.admin"
        assert (await admin.call("sessions.describe", key=MAIN))["session"] == first
        assert await contents(admin) == ["before", "heard before"]

        done = await admin.call("chat.send", sessionKey="main", message="/new", idempotencyKey="n")
        assert (done["status"], done["sessionKey"]) == ("ok", MAIN)
        assert (await admin.call("sessions.describe", key=MAIN))["session"]["sessionId"] != first["sessionId"]
        assert await contents(admin) == []
        assert await contents(admin, first["sessionId"]) == ["before", "heard before"]


@pytest.mark.requirement("D2", "S8")
async def test_the_send_policy_is_switched_by_a_text_and_holds_for_all_senders(
    gateway: GatewayFixture,
) -> None:
    async with gateway.client() as client:
        await say(client)
        await client.call("chat.send", sessionKey="main", message="/send off", idempotencyKey="p1")
        for method, key in (("chat.send", "sessionKey"), ("sessions.send", "key"), ("agent", "sessionKey")):
            error = await client.refused(
                method, **{key: MAIN, "message": "x", "idempotencyKey": f"x{method}"}
            )
            assert error["code"] == "INVALID_REQUEST"
            assert error["message"].startswith("send blocked by session policy")
        assert (await client.call("sessions.describe", key=MAIN))["session"]["sendPolicy"] == "deny"
        await client.call("chat.send", sessionKey="main", message="/send inherit", idempotencyKey="p2")
        await say(client, "again")


async def test_words_of_another_program_are_never_commands(tmp_path: Path) -> None:
    async def repeat(prompt: Prompt) -> str:
        last = prompt.messages[-1]
        assert isinstance(last, UserMessage) and isinstance(last.content, str)
        return last.content

    async with open_gateway(tmp_path, repeat) as gateway, gateway.client() as client:
        await say(client)
        before = (await client.call("sessions.describe", key=MAIN))["session"]["sessionId"]
        provenance = {"kind": "inter_session", "sourceSessionKey": OTHER}
        for word in ("/reset", "/send off", "/stop"):
            said = {"message": word, "idempotencyKey": word, "inputProvenance": provenance}
            assert (await client.call("agent", **said))["status"] == "accepted"
            assert f"\n{word}\n" in (await client.call("agent.wait", runId=word))["reply"], (
                "as data in a frame"
            )
        assert (await client.call("sessions.describe", key=MAIN))["session"]["sessionId"] == before
        first = (await client.call("chat.history", sessionKey=MAIN))["messages"][2]
        assert first["content"] == "/reset"
        assert first["provenance"] == {"kind": "external"}, "only we can say that another session said it"


async def test_chat_abort_stops_the_run_it_names_in_its_session(tmp_path: Path) -> None:
    held = Held()
    async with open_gateway(tmp_path, held) as gateway, gateway.client() as client:
        await client.call("sessions.create", key=OTHER)
        await client.call("chat.send", sessionKey="main", message="x", idempotencyKey="k1")
        await wait_for_event(held.going)
        error = await client.refused("chat.abort", sessionKey=OTHER, runId="k1")
        assert error["message"].startswith("runId does not match sessionKey")
        assert (await client.refused("chat.abort", sessionKey=MAIN, runId="none"))["details"][
            "type"
        ] == "not_found"
        stopped = await client.call("chat.abort", sessionKey="main", runId="k1")
        assert stopped == {"ok": True, "aborted": True, "runIds": ["k1"]}
        await client.call("agent.wait", runId="k1")
        assert (await client.call("chat.abort", sessionKey="main"))["aborted"] is False


async def test_injected_words_are_the_agents_and_are_told_as_its_answer(gateway: GatewayFixture) -> None:
    async with gateway.client() as client:
        error = await client.refused("chat.inject", sessionKey=OTHER, message="x")
        assert error["details"]["type"] == "not_found"
        await say(client)
        injected = await client.call("chat.inject", sessionKey="main", message="a notice", label="ops")
        assert (injected["ok"], injected["messageSeq"]) == (True, 3)
        final = await client.event("chat", runId=f"inject-{injected['messageId']}")
        assert (final["state"], final["seq"], final["sessionKey"]) == ("final", 0, MAIN)
        last = (await client.call("chat.history", sessionKey="main"))["messages"][-1]
        assert (last["role"], last["model"], last["id"]) == (
            "assistant",
            "gateway-injected",
            injected["messageId"],
        )
        assert last["content"][0]["text"] == "[ops]\n\na notice"
        assert (
            "label"
            in (await client.refused("chat.inject", sessionKey="main", message="x", label="l" * 101))[
                "message"
            ]
        )


# --- history ---


@pytest.mark.requirement("H1")
async def test_the_history_of_a_session_that_is_not_there_is_empty(gateway: GatewayFixture) -> None:
    async with gateway.client() as client:
        for session in ("main", OTHER, "never-heard-of"):
            empty = await client.call("chat.history", sessionKey=session)
            assert (empty["sessionKey"], empty["messages"], empty["hasMore"]) == (session, [], False)
            assert (empty["totalMessages"], empty["thinkingLevel"]) == (0, "off")
        assert (await client.refused("chat.history", sessionKey="agent::x"))["code"] == "INVALID_REQUEST"


@pytest.mark.requirement("C")
async def test_the_history_tells_how_much_is_thought_unless_a_message_says_otherwise(tmp_path: Path) -> None:
    settings = {"agents": {"list": [{"id": "main", "thinkingDefault": "high"}]}}
    async with open_gateway(tmp_path, settings=settings) as gateway, gateway.client() as client:
        await gateway.operations.sessions.open(OPERATOR, MAIN)
        assert (await client.call("chat.history", sessionKey=MAIN))["thinkingLevel"] == "high"
        await client.call("sessions.patch", key=MAIN, thinkingLevel="off")
        assert (await client.call("chat.history", sessionKey=MAIN))["thinkingLevel"] == "off"


@pytest.mark.requirement("H4", "G23")
@pytest.mark.parametrize("way", ["cursor", "offset"])
async def test_walking_back_gives_every_message_once(gateway: GatewayFixture, way: str) -> None:
    await gateway.operations.sessions.open(OPERATOR, MAIN)
    for n in range(23):
        await gateway.operations.transcripts.inject(OPERATOR, MAIN, f"{n}")
    async with gateway.client() as client:
        seen: list[int] = []
        step: dict[str, Any] = {}
        while True:
            page = await client.call("chat.history", sessionKey="main", limit=5, **step)
            seen = [item["seq"] for item in page["messages"]] + seen
            assert page["totalMessages"] == 23
            if not page["hasMore"]:
                break
            step = {"cursor": page["nextCursor"]} if way == "cursor" else {"offset": page["nextOffset"]}
        assert seen == list(range(1, 24))
        assert "nextCursor" not in page
        for cursor in ("x", "seq:", "-1"):
            assert (await client.refused("chat.history", sessionKey="main", cursor=cursor))["details"][
                "field"
            ] == "cursor"
        assert (await client.call("chat.history", sessionKey="main", offset=10**6))["messages"] == []


async def test_a_history_is_bounded_in_bytes_and_says_what_it_left_out(tmp_path: Path) -> None:
    async with (
        open_gateway(tmp_path, settings={"store": {"messageMaxBytes": 300_000}}) as gateway,
        gateway.client() as client,
    ):
        await gateway.operations.sessions.open(OPERATOR, MAIN)
        await gateway.operations.transcripts.inject(OPERATOR, MAIN, "x" * 200_000)
        for n in range(70):
            await gateway.operations.transcripts.inject(OPERATOR, MAIN, f"{n}" + "x" * 100_000)
        page = await client.call("chat.history", sessionKey=MAIN, limit=1000)
        assert page["hasMore"] is True
        assert 40 < len(page["messages"]) < 70
        rest = await client.call("chat.history", sessionKey=MAIN, limit=1000, cursor=page["nextCursor"])
        found = [item["seq"] for item in rest["messages"] + page["messages"]]
        assert found == list(range(1, 72))
        first = rest["messages"][0]
        assert (first["__openclaw"]["truncated"], first["__openclaw"]["reason"]) == (True, "oversized")
        assert len(str(first)) < 2000


async def test_startup_is_history_with_what_a_page_needs(gateway: GatewayFixture) -> None:
    async with gateway.client() as client:
        await say(client)
        startup = await client.call("chat.startup", sessionKey="main")
        assert startup == await client.call("chat.history", sessionKey="main")
        assert (startup["sessionInfo"]["hasActiveRun"], startup["sessionInfo"]["activeRunIds"]) == (False, [])
        assert set(startup["defaults"]) == {"modelProvider", "model", "contextTokens"}
        user = startup["messages"][0]
        assert user["__openclaw"] == {"id": user["id"], "seq": 1, "runId": f"{MAIN} hello"}
        got = await client.call("sessions.get", key="main", limit=1)
        assert (got["messages"], got["hasMore"]) == ([startup["messages"][1]], True)
        assert (await client.refused("sessions.get", key=OTHER))["details"]["type"] == "not_found"


@pytest.mark.requirement("H1", "G23")
async def test_a_history_is_narrowed_by_role_time_tool_and_failure(gateway: GatewayFixture) -> None:
    async with gateway.client() as client:
        for words in ("one", "two"):
            await say(client, words)

        async def seqs(**asked: Any) -> list[int]:
            page = await client.call("sessions.history", key=MAIN, **asked)
            return [item["seq"] for item in page["messages"]]

        assert await seqs(roles=["user"]) == [1, 3]
        assert await seqs(roles=["assistant", "compaction"], since=0) == [2, 4]
        assert await seqs(since=2**53) == await seqs(errors=True) == await seqs(tool="agents_list") == []
        for name, wrong in (
            ("tool", ""),
            ("roles", []),
            ("roles", ["nobody"]),
            ("since", -1),
            ("errors", "yes"),
        ):
            refused = await client.refused("sessions.history", key=MAIN, **{name: wrong})
            assert refused["code"] == "INVALID_REQUEST"


@pytest.mark.requirement("G25")
async def test_a_past_conversation_is_read_by_its_id(gateway: GatewayFixture) -> None:
    async with gateway.client() as client:
        await say(client, "one")
        past = (await client.call("sessions.describe", key=MAIN))["session"]["sessionId"]
        await client.call("sessions.reset", key=MAIN)
        await say(client, "two")
        page = await client.call("chat.history", sessionKey=MAIN, sessionId=past)
        assert page["sessionId"] == past
        assert [item["seq"] for item in page["messages"]] == [1, 2]
        assert page["messages"][0]["content"] == "one"
        raw = await client.call("sessions.history", key=past, limit=1, after=0)
        assert ([item["seq"] for item in raw["messages"]], raw["sessionId"], raw["hasMore"]) == (
            [1],
            past,
            True,
        )
        had = (await client.call("sessions.conversations", key=MAIN))["conversations"]
        assert [one["sessionId"] for one in had][1:] == [past]
        restored = await client.call("sessions.restore", sessionId=past)
        assert (restored["key"], restored["entry"]["sessionId"]) == (MAIN, past)
        assert (await client.refused("sessions.restore", sessionId="none"))["details"]["type"] == "not_found"


# --- runs ---


async def test_agent_answers_twice_with_the_same_id(gateway: GatewayFixture) -> None:
    async with gateway.client() as client:
        request = await client.start("agent", {"message": "hello", "idempotencyKey": "a1"})
        receipt = (await client.answer(request)).payload
        assert (receipt["runId"], receipt["status"], receipt["sessionKey"]) == ("a1", "accepted", MAIN)
        assert receipt["acceptedAt"] > 0
        end = (await client.answer(request)).payload
        assert (end["runId"], end["status"], end["summary"]) == ("a1", "ok", "completed")
        assert end["result"]["payloads"] == [{"text": "heard hello", "mediaUrl": None}]
        assert end["result"]["meta"]["agentMeta"]["sessionId"] == receipt["sessionId"]
        assert end["result"]["meta"]["aborted"] is False
        again = await client.start("agent", {"message": "hello", "idempotencyKey": "a1"})
        assert (await client.answer(again)).payload["runId"] == "a1"
        assert (await client.answer(again)).payload["result"]["payloads"] == end["result"]["payloads"]
        assert await contents(client) == ["hello", "heard hello"]
        error = await client.refused("agent", message="other", idempotencyKey="a1")
        assert error["code"] == "INVALID_REQUEST"


async def test_agent_says_what_went_wrong(tmp_path: Path) -> None:
    settings = {"agents": {"list": [{"id": "main"}, {"id": "helper"}]}}
    async with open_gateway(tmp_path, None, settings=settings) as gateway, gateway.client() as client:
        request = await client.start("agent", {"message": "fail no luck", "idempotencyKey": "a1"})
        assert (await client.answer(request)).payload["status"] == "accepted"
        end = await client.answer(request)
        assert not end.ok
        assert end.error["code"] == "UNAVAILABLE"
        assert "no luck" in end.error["message"]
        assert (end.payload["runId"], end.payload["status"]) == ("a1", "error")
        error = await client.refused("agent", message="x", agentId="nobody", idempotencyKey="a2")
        assert error["message"].startswith('invalid agent params: unknown agent id "nobody"')
        error = await client.refused(
            "agent", message="x", agentId="helper", sessionKey=MAIN, idempotencyKey="a2"
        )
        assert error["details"]["field"] == "agentId"
        error = await client.refused("agent", message="x", model="no/such", idempotencyKey="a2")
        assert error["details"]["type"] == "unknown_model"
        request = await client.start(
            "agent", {"message": "say hi", "agentId": "helper", "idempotencyKey": "a3"}
        )
        assert (await client.answer(request)).payload["sessionKey"] == "agent:helper:main"


@pytest.mark.requirement("S4", "G12")
async def test_a_run_can_be_waited_for_from_anywhere_and_anytime(tmp_path: Path) -> None:
    held = Held()
    async with open_gateway(tmp_path, held) as gateway, gateway.client() as client:
        async with gateway.client(gateway.issue(READ)) as other:
            early = await other.start("agent.wait", {"runId": "r1"})  # before there is such a run
            unknown = await client.call("agent.wait", runId="never", timeoutMs=0)
            assert unknown == {"runId": "never", "status": "timeout"}
            await client.call("chat.send", sessionKey="main", message="x", idempotencyKey="r1")
            await wait_for_event(held.going)
            short = await client.call("agent.wait", runId="r1", timeoutMs=1)
            assert (short["runId"], short["status"], short["run"]["state"]) == ("r1", "timeout", "running")
            during = await client.start("agent.wait", {"runId": "r1"})
            held.go.set()
            answers = [(await other.answer(early)).payload, (await client.answer(during)).payload]
            after = await client.call("agent.wait", runId="r1")
        for answer in (*answers, after):
            assert (answer["runId"], answer["status"], answer["reply"]) == ("r1", "ok", "at last")
            assert answer["startedAt"] <= answer["endedAt"]


@pytest.mark.requirement("S4", "G2")
async def test_a_run_is_waited_for_across_a_restart(tmp_path: Path) -> None:
    held = Held()
    async with open_gateway(tmp_path, held) as gateway, gateway.client() as client:
        await client.call("chat.send", sessionKey="main", message="x", idempotencyKey="r1")
        await wait_for_event(held.going)
    async with open_gateway(tmp_path) as gateway, gateway.client() as client:
        waited = await client.call("agent.wait", runId="r1")
        assert (waited["status"], waited["reply"]) == ("ok", "heard x")
        assert await contents(client) == ["x", "heard x"]
    async with open_gateway(tmp_path) as gateway, gateway.client() as client:
        assert (await client.call("agent.wait", runId="r1", timeoutMs=0))["reply"] == "heard x"


@pytest.mark.requirement("G17")
async def test_a_run_that_takes_too_long_is_reported_as_that(tmp_path: Path) -> None:
    held = Held()
    async with open_gateway(tmp_path, held) as gateway, gateway.client() as client:
        await client.call("chat.send", sessionKey="main", message="x", idempotencyKey="r1", timeoutMs=50)
        waited = await client.call("agent.wait", runId="r1")
        assert waited["status"] == "timeout"
        assert waited["endedAt"]
        assert (await client.event("chat", state="error"))["errorKind"] == "timeout"


# --- sessions ---


@pytest.mark.requirement("L1", "L2")
async def test_sessions_are_listed_newest_first_filtered_and_in_pages(gateway: GatewayFixture) -> None:
    async with gateway.client() as client:
        for n in range(7):
            await client.call("sessions.create", key=f"{OTHER}{n}", label=f"label {n}")
        await say(client)
        everything = await client.call("sessions.list")
        keys = [row["key"] for row in everything["sessions"]]
        assert (everything["count"], keys[0], everything["hasMore"]) == (8, MAIN, False)
        first = everything["sessions"][0]
        assert (first["kind"], first["sessionKind"], first["isMain"]) == ("direct", "main", True)
        assert (first["hasActiveRun"], first["activeRunIds"], first["status"]) == (False, [], "done")

        for way in ("cursor", "offset"):
            seen: list[str] = []
            step: dict[str, Any] = {}
            while True:
                page = await client.call("sessions.list", limit=3, **step)
                seen += [row["key"] for row in page["sessions"]]
                if not page["hasMore"]:
                    break
                step = {"cursor": page["nextCursor"]} if way == "cursor" else {"offset": page["nextOffset"]}
            assert seen == keys
        assert (await client.call("sessions.list", offset=100))["sessions"] == []

        async def found(**wanted: Any) -> list[str]:
            return [row["key"] for row in (await client.call("sessions.list", **wanted))["sessions"]]

        assert await found(kinds=["main"]) == [MAIN]
        assert await found(label="label 3") == [f"{OTHER}3"]
        assert await found(search="other5") == [f"{OTHER}5"]
        assert await found(agentId="nobody") == []
        assert len(await found(activeMinutes=60)) == 8
        assert await found(archived=True, label="none") == []
        (last,) = (await client.call("sessions.list", limit=1, includeLastMessage=True))["sessions"]
        assert last["lastMessagePreview"] == "heard hello"
        for params, field in (
            ({"kinds": ["x"]}, "kinds"),
            ({"offset": 1001}, "offset"),
            ({"cursor": "x"}, "cursor"),
        ):
            assert (await client.refused("sessions.list", **params))["details"]["field"] == field


async def test_a_session_is_resolved_by_key_id_or_label(gateway: GatewayFixture) -> None:
    async with gateway.client() as client:
        made = await client.call("sessions.create", key=OTHER, label="dup")
        for reference in ({"key": OTHER}, {"sessionId": made["sessionId"]}, {"label": "dup"}):
            found = await client.call("sessions.resolve", **reference)
            assert (found["ok"], found["key"], found["sessionId"]) == (True, OTHER, made["sessionId"])
        for params, says in (
            ({}, "Either key, sessionId, or label is required"),
            ({"key": "a", "label": "b"}, "Provide either key, sessionId, or label (not multiple)"),
            ({"key": "agent:main:dashboard:x"}, "No session found: agent:main:dashboard:x"),
            ({"label": "none"}, "No session found with label: none"),
        ):
            assert (await client.refused("sessions.resolve", **params))["message"].startswith(says)
        assert (await client.call("sessions.resolve", key="x", allowMissing=True))["ok"] is False
        await client.call("sessions.create", key=f"{OTHER}2", label="dup2")
        await say(client)
        assert (await client.refused("sessions.resolve", label="main"))["message"].startswith(
            "No session found"
        )


async def test_leaving_out_rows_leaves_the_pages_complete(gateway: GatewayFixture) -> None:
    async with gateway.client() as client:
        for n in range(4):
            await client.call("sessions.create", key=f"{OTHER}{n}")
            await gateway.operations.sessions.open(OPERATOR, f"agent:main:subagent:{n}")
        seen: list[str] = []
        offset = 0
        while offset is not None:
            page = await client.call("sessions.list", limit=3, offset=offset, excludeSubagents=True)
            seen += [row["key"] for row in page["sessions"]]
            offset = page["nextOffset"]
        assert sorted(seen) == [f"{OTHER}{n}" for n in range(4)]
        assert (await client.call("sessions.list", activeOnly=True))["sessions"] == []


async def test_what_was_said_is_found_with_its_place(gateway: GatewayFixture) -> None:
    async with gateway.client() as client:
        await say(client, "a needle in the hay")
        await say(client, "only hay", OTHER)
        found = await client.call("sessions.search", query="needle")
        assert {hit["messageSeq"] for hit in found["results"]} == {1, 2}
        elsewhere = await client.call("sessions.search", query="needle", sessionKeys=[OTHER])
        assert elsewhere["results"] == []
        assert (await client.refused("sessions.search", query=""))["code"] == "INVALID_REQUEST"


async def test_previews_are_the_last_words_and_missing_looks_missing(gateway: GatewayFixture) -> None:
    async with gateway.client() as client:
        await say(client, "a long text " * 10)
        await client.call("sessions.create", key=OTHER)
        result = await client.call(
            "sessions.preview", keys=["main", OTHER, "nowhere", "agent::"], limit=1, maxChars=20
        )
        assert [entry["status"] for entry in result["previews"]] == ["ok", "empty", "missing", "missing"]
        (item,) = result["previews"][0]["items"]
        assert item["role"] == "assistant"
        assert len(item["text"]) <= 20


async def test_describing_what_is_not_there_is_null(gateway: GatewayFixture) -> None:
    async with gateway.client() as client:
        assert await client.call("sessions.describe", key=OTHER) == {"session": None}
        await client.call("sessions.create", key=OTHER, displayName="Shown")
        row = (await client.call("sessions.describe", key=OTHER, includeDerivedTitles=True))["session"]
        assert (row["key"], row["displayName"], row["derivedTitle"]) == (OTHER, "Shown", "Shown")


async def test_creating_a_session_with_and_without_words(gateway: GatewayFixture) -> None:
    async with gateway.client() as client:
        bare = await client.call("sessions.create")
        assert bare["key"].startswith("agent:main:dashboard:")
        assert (bare["runStarted"], bare["entry"]["key"]) == (False, bare["key"])
        spoken = await client.call("sessions.create", message="hello", idempotencyKey="c1")
        assert (spoken["runStarted"], spoken["runId"]) == (True, "c1")
        again = await client.call("sessions.create", message="hello", idempotencyKey="c1")
        assert (again["key"], again["runId"]) == (spoken["key"], "c1")  # said again it is the same session
        child = await client.call("sessions.create", parentSessionKey=bare["key"])
        assert child["entry"]["parentSessionKey"] == bare["key"]
        blank = await client.call("sessions.create", key=OTHER, message=" ")
        assert (blank["runStarted"], blank["runError"]["code"]) == (False, "INVALID_REQUEST")
        for params in (
            {"parentSessionKey": "agent:main:dashboard:none"},
            {"agentId": "nobody"},
            {"model": "no/such"},
            {"key": MAIN, "agentId": "helper"},
        ):
            assert (await client.refused("sessions.create", **params))["code"] == "INVALID_REQUEST"
        assert (await client.call("sessions.list"))["count"] == 4


async def test_patching_sets_clears_and_refuses(gateway: GatewayFixture) -> None:
    async with gateway.client() as client:
        patched = await client.call(
            "sessions.patch", key=OTHER, label="one", thinkingLevel="low", sendPolicy="deny"
        )
        entry = patched["entry"]
        assert (patched["ok"], patched["key"]) == (True, OTHER)
        assert (entry["label"], entry["thinkingLevel"], entry["sendPolicy"]) == ("one", "low", "deny")
        assert set(patched["resolved"]) == {"modelProvider", "model"}
        cleared = (await client.call("sessions.patch", key=OTHER, label=None, sendPolicy=None))["entry"]
        assert "label" not in cleared
        assert "sendPolicy" not in cleared
        assert cleared["thinkingLevel"] == "low"
        for params, says in (
            ({"sendPolicy": "maybe"}, 'invalid sendPolicy (use "allow"|"deny")'),
            ({"thinkingLevel": "deep"}, "invalid thinkingLevel"),
            ({"verboseLevel": "loud"}, "invalid verboseLevel"),
            ({"label": "x" * 65}, "invalid label"),
        ):
            assert (await client.refused("sessions.patch", key=OTHER, **params))["message"].startswith(says)
        assert (await client.refused("sessions.patch", key=OTHER, model="no/such"))["details"][
            "type"
        ] == "unknown_model"


@pytest.mark.requirement("G25", "G16")
async def test_resetting_stops_what_runs_and_begins_anew(tmp_path: Path) -> None:
    held = Held()
    async with open_gateway(tmp_path, held) as gateway, gateway.client() as client:
        await client.call("chat.send", sessionKey=OTHER, message="x", idempotencyKey="k1")
        await wait_for_event(held.going)
        before = (await client.call("sessions.describe", key=OTHER))["session"]["sessionId"]
        reset = await client.call("sessions.reset", key=OTHER, reason="new")
        assert (reset["ok"], reset["key"]) == (True, OTHER)
        assert reset["entry"]["sessionId"] != before
        assert reset["entry"]["hasActiveRun"] is False
        assert (await client.call("agent.wait", runId="k1"))["error"] == "aborted"
        assert await contents(client, OTHER) == []
        assert (await client.refused("sessions.reset", key="agent:main:dashboard:none"))["details"][
            "type"
        ] == "not_found"


@pytest.mark.requirement("G16")
async def test_what_is_reset_only_if_idle_stops_nothing(tmp_path: Path) -> None:
    held = Held()
    async with open_gateway(tmp_path, held) as gateway, gateway.client() as client:
        for key in ("k1", "k2"):
            await client.call("chat.send", sessionKey=OTHER, message="x", idempotencyKey=key)
        await wait_for_event(held.going)
        asked = {"key": OTHER, "ifIdle": True, "idempotencyKey": "k3"}
        error = await client.refused("sessions.reset", **asked)
        assert error["message"].startswith(
            f"Session '{OTHER}' is still answering. Wait for the answer, or stop it"
        )
        assert error["details"]["type"] == "conflict"
        held.go.set()
        for key in ("k1", "k2"):
            assert (await client.call("agent.wait", runId=key, timeoutMs=10_000))["status"] == "ok"
        before = (await client.call("sessions.describe", key=OTHER))["session"]["sessionId"]
        reset = await client.call("sessions.reset", **asked)
        assert reset["entry"]["sessionId"] != before
        assert (await client.call("sessions.reset", **asked))["entry"]["sessionId"] == reset["entry"][
            "sessionId"
        ]


async def test_deleting_is_final_and_the_main_session_stays(tmp_path: Path) -> None:
    held = Held()
    async with open_gateway(tmp_path, held) as gateway, gateway.client() as client:
        await client.call("chat.send", sessionKey=OTHER, message="x", idempotencyKey="k1")
        await wait_for_event(held.going)
        deleted = await client.call("sessions.delete", key=OTHER)
        assert deleted == {"ok": True, "key": OTHER, "deleted": True, "archived": []}
        assert (await client.call("sessions.delete", key=OTHER))["deleted"] is False
        assert (await client.call("sessions.list"))["count"] == 0
        await client.call("sessions.create", key=MAIN)
        error = await client.refused("sessions.delete", key="main")
        assert error["message"].startswith(f"Cannot delete the main session ({MAIN}).")
        await client.call("sessions.create", key=OTHER)
        kept = await client.call("sessions.delete", key=OTHER, deleteTranscript=False)
        assert kept["deleted"] is False
        assert [row["key"] for row in (await client.call("sessions.list"))["sessions"]] == [MAIN]
        archived = (await client.call("sessions.list", archived=True))["sessions"]
        assert OTHER in [row["key"] for row in archived]


async def test_compacting_shortens_prompts_and_keeps_the_transcript(gateway: GatewayFixture) -> None:
    async with gateway.client() as client:
        await client.call("sessions.create", key=OTHER)
        nothing = await client.call("sessions.compact", key=OTHER)
        assert (nothing["compacted"], nothing["reason"]) == (False, "no transcript")
        for n in range(4):
            await say(client, f"word {n}", OTHER)
        assert (await client.call("sessions.compact", key=OTHER))["compacted"] is False
        done = await client.call("sessions.compact", key=OTHER, maxLines=2)
        assert (done["compacted"], done["kept"]) == (True, 2)
        assert (await client.call("chat.history", sessionKey=OTHER))["totalMessages"] >= 8
        assert (await client.refused("sessions.compact", key="agent:main:dashboard:none"))["details"][
            "type"
        ] == "not_found"


async def test_sending_steering_and_aborting_by_key(tmp_path: Path) -> None:
    held = Held()
    async with open_gateway(tmp_path, held) as gateway, gateway.client() as client:
        for method in ("sessions.send", "sessions.steer"):
            error = await client.refused(method, key=OTHER, message="x")
            assert error["details"]["type"] == "not_found"
        await client.call("sessions.create", key=OTHER)
        assert (await client.call("sessions.abort", key=OTHER)) == {
            "ok": True,
            "abortedRunId": None,
            "status": "no-active-run",
        }
        sent = await client.call("sessions.send", key=OTHER, message="one", idempotencyKey="k1")
        assert (sent["runId"], sent["status"], sent["sessionKey"]) == ("k1", "started", OTHER)
        await wait_for_event(held.going)
        held.going.clear()
        steered = await client.call("sessions.steer", key=OTHER, message="two", idempotencyKey="k2")
        assert (steered["runId"], steered["interruptedActiveRun"]) == ("k2", True)
        assert (await client.call("agent.wait", runId="k1"))["error"] == "aborted"
        await wait_for_event(held.going)
        stopped = await client.call("sessions.abort", runId="k2")
        assert (stopped["abortedRunId"], stopped["status"]) == ("k2", "aborted")
        assert await contents(client, OTHER) == ["one", "two"]
        error = await client.refused("sessions.abort")
        assert error["message"].startswith("Either key or runId is required")
        idle = await client.call("sessions.steer", key=OTHER, message="three")
        assert idle["interruptedActiveRun"] is False


@pytest.mark.requirement("G28")
async def test_usage_adds_up_and_an_unknown_price_is_null(tmp_path: Path) -> None:
    async with open_gateway(tmp_path, None) as gateway, gateway.client() as client:
        await say(client, "say one two three")
        usage = await client.call("sessions.usage", key="main")
        (line,) = usage["models"]
        assert (line["model"], line["calls"]) == ("rehearsal", 1)
        assert usage["totals"]["output"] == line["output"] > 0
        assert (await client.refused("sessions.usage", key=OTHER))["details"]["type"] == "not_found"


async def test_subscribing_answers_with_what_is_so(gateway: GatewayFixture) -> None:
    async with gateway.client() as client:
        assert await client.call("sessions.subscribe") == {"subscribed": True}
        assert await client.call("sessions.unsubscribe") == {"subscribed": False}
        subscribed = await client.call("sessions.messages.subscribe", key="main")
        assert (subscribed["key"], subscribed["lastSeq"]) == (MAIN, 0)
        assert (await client.call("sessions.messages.unsubscribe", key="main"))["key"] == MAIN


# --- jobs ---

JOB: dict[str, Any] = {
    "name": "nightly",
    "schedule": {"kind": "cron", "expr": "0 3 * * *", "tz": "UTC"},
    "sessionTarget": "isolated",
    "payload": {"kind": "agentTurn", "message": "tidy up"},
    "delivery": {"mode": "none"},
}


async def test_jobs_are_added_changed_run_and_removed(gateway: GatewayFixture) -> None:
    async with gateway.client() as client:
        job = await client.call("cron.add", **JOB, wakeMode="now", description="of the night")
        assert (job["name"], job["enabled"], job["sessionTarget"]) == ("nightly", True, "isolated")
        assert job["state"]["nextRunAtMs"] > 0
        listed = await client.call("cron.list")
        assert ([one["id"] for one in listed["jobs"]], listed["total"], listed["hasMore"]) == (
            [job["id"]],
            1,
            False,
        )
        status = await client.call("cron.status")
        assert (status["enabled"], status["jobs"], status["nextWakeAtMs"]) == (
            True,
            1,
            job["state"]["nextRunAtMs"],
        )

        not_due = await client.call("cron.run", id=job["id"], mode="due")
        assert (not_due["ran"], not_due["reason"]) == (False, "not-due")
        fired = await client.call("cron.run", jobId=job["id"], mode="force")
        assert fired["ran"] is True
        assert (await client.call("agent.wait", runId=fired["runId"]))["reply"] == "heard tidy up"
        entries = (await client.call("cron.runs", id=job["id"]))["entries"]
        assert [entry["runId"] for entry in entries] == [fired["runId"]]

        off = await client.call("cron.update", id=job["id"], patch={"enabled": False, "name": "never"})
        assert (off["enabled"], off["name"]) == (False, "never")
        assert (await client.call("cron.list"))["jobs"] == []
        assert (await client.call("cron.list", includeDisabled=True))["total"] == 1
        assert (await client.call("cron.list", enabled="disabled", query="NEV"))["total"] == 1
        assert (await client.call("cron.remove", id=job["id"])) == {"ok": True, "removed": True}
        assert (await client.call("cron.remove", id=job["id"]))["removed"] is False


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"schedule": {"kind": "cron", "expr": "never"}}, "schedule"),
        ({"schedule": {"kind": "sometimes"}}, "schedule.kind"),
        ({"payload": {"kind": "agentTurn"}}, "payload.message"),
        ({"delivery": {"mode": "announce", "channel": "no channel"}}, "delivery"),
        ({"delivery": {"mode": "announce", "channel": "telegram"}}, "delivery.channel"),
        ({"sessionTarget": "nowhere"}, "sessionTarget"),
        ({"name": ""}, "name"),
    ],
)
async def test_a_job_that_means_nothing_is_refused_by_its_field(
    gateway: GatewayFixture, changes: dict[str, Any], field: str
) -> None:
    async with gateway.client() as client:
        error = await client.refused("cron.add", **{**JOB, **changes})
        assert error["code"] == "INVALID_REQUEST"
        assert error["details"]["field"].startswith(field)
        assert (await client.call("cron.list", includeDisabled=True))["total"] == 0


async def test_a_job_that_is_not_there_is_said_to_be_missing(gateway: GatewayFixture) -> None:
    async with gateway.client() as client:
        for method, more in (
            ("cron.update", {"patch": {"enabled": False}}),
            ("cron.run", {}),
            ("cron.runs", {}),
        ):
            for names in ({}, {"id": "a", "jobId": "b"}):
                error = await client.refused(method, **names, **more)
                assert error["message"].startswith("Either id or jobId is required")
        for method, more in (("cron.update", {"patch": {"enabled": False}}), ("cron.run", {})):
            assert (await client.refused(method, id="none", **more))["details"]["type"] == "not_found"


async def test_tool_results_are_part_of_a_history(tmp_path: Path) -> None:
    async def agent(prompt: Prompt) -> AssistantMessage:
        return make_tool_calls("look") if len(prompt.messages) == 1 else make_answer("seen")

    async def look(call: ToolRequest) -> ToolOutput:
        return ToolOutput(text="a view")

    async with (
        open_gateway(
            tmp_path, agent, tools=lambda _: [make_tool("look", look, has_side_effects=False)]
        ) as gateway,
        gateway.client() as client,
    ):
        await say(client)
        messages = (await client.call("chat.history", sessionKey=MAIN))["messages"]
        assert [item["role"] for item in messages] == ["user", "assistant", "toolResult", "assistant"]


async def test_earlier_conversations_are_read_by_number_and_come_back(tmp_path: Path) -> None:
    async with open_gateway(tmp_path) as gateway, gateway.client() as client:
        await say(client, "say one")
        await client.call("sessions.reset", key="main", reason="new")
        now, before = (await client.call("sessions.conversations", key="main"))["conversations"]
        assert (now["reason"], before["reason"], "endedAt" in now) == ("new", "created", False)
        page = await client.call("sessions.history", key=before["sessionId"], after=1)
        assert [(item["seq"], item["role"]) for item in page["messages"]] == [(2, "assistant")]
        assert (page["total"], page["hasMore"]) == (2, False)
        restored = await client.call("sessions.restore", sessionId=before["sessionId"])
        assert (restored["key"], restored["entry"]["sessionId"]) == (MAIN, before["sessionId"])
        assert (await client.call("sessions.history", key="main"))["sessionId"] == before["sessionId"]
        assert (await client.refused("sessions.restore", sessionId="nobody"))["details"][
            "type"
        ] == "not_found"


@pytest.mark.requirement("S9")
async def test_steering_again_with_the_same_key_stops_nothing_and_a_refused_one_neither(
    tmp_path: Path,
) -> None:
    held = Held()
    async with open_gateway(tmp_path, held) as gateway, gateway.client() as client:
        await client.call("sessions.create", key=OTHER)
        said = {"key": OTHER, "message": "instead", "idempotencyKey": "k1"}
        first = await client.call("sessions.steer", **said)
        assert (first["status"], first["interruptedActiveRun"]) == ("started", False)
        await wait_for_event(held.going)
        again = await client.call("sessions.steer", **said)
        assert (again["status"], again["interruptedActiveRun"]) == ("in_flight", False)
        await client.refused("sessions.steer", key=OTHER, message="", idempotencyKey="k2")
        held.go.set()
        assert (await client.call("agent.wait", runId="k1"))["status"] == "ok"


@pytest.mark.requirement("S9")
async def test_a_command_said_again_with_the_same_key_is_not_done_again(gateway: GatewayFixture) -> None:
    async with gateway.client() as client:
        await say(client)
        command = {"sessionKey": MAIN, "message": "/new", "idempotencyKey": "k1"}
        assert (await client.call("chat.send", **command))["status"] == "ok"
        begun = (await client.call("sessions.describe", key=MAIN))["session"]["sessionId"]
        await say(client, "again")
        assert (await client.call("chat.send", **command))["status"] == "ok"
        assert (await client.call("sessions.describe", key=MAIN))["session"]["sessionId"] == begun
        error = await client.refused("chat.send", sessionKey=MAIN, message="words", idempotencyKey="k1")
        assert error["details"]["reason"] == "chat-request-conflict"


async def test_keys_of_runs_that_only_the_engine_starts_are_refused(gateway: GatewayFixture) -> None:
    async with gateway.client() as client:
        for key in ("cron:job:1700000000000", "http:x"):
            error = await client.refused("chat.send", sessionKey=MAIN, message="x", idempotencyKey=key)
            assert (error["code"], error["details"]["field"]) == ("INVALID_REQUEST", "idempotencyKey")


async def test_a_reset_of_a_conversation_that_has_ended_is_refused(gateway: GatewayFixture) -> None:
    async with gateway.client() as client:
        await say(client)
        seen = (await client.call("sessions.describe", key=MAIN))["session"]["sessionId"]
        await client.call("sessions.reset", key=MAIN, expectedSessionId=seen)
        for method in ("sessions.reset", "sessions.delete", "sessions.patch"):
            error = await client.refused(method, key=MAIN, expectedSessionId=seen)
            assert error["details"]["type"] == "conflict", method
