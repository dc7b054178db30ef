"""`session.scope: "global"`: in the shared main session every rule is about the agent that acts."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from antiphon import keys
from antiphon.engine.toolbox import ToolRequest
from antiphon.errors import SpawnRefused
from antiphon.messages import AssistantMessage
from antiphon.operations.types import SendRequest, SpawnRequest
from antiphon.runtimes import Prompt
from support.agents_fixture import (
    HELPER,
    MAIN,
    OPERATOR,
    ScriptedAgent,
    get_last_user_text,
    get_phase,
    get_tool_result,
    make_agents_config,
    open_agents_fixture,
)
from support.app_fixture import DATABASE, make_answer, make_tool_calls
from support.databases import query_database

pytestmark = pytest.mark.anyio

ONE_MAIN = {"session": {"scope": "global"}}
BOXED = {"id": "helper", "sandbox": {"mode": "all"}, "subagents": {"allowAgents": ["open"]}}
SIDE = "agent:main:dashboard:side"


def agent_of(key: str) -> str:
    return keys.parse(key).agent_id


@pytest.mark.requirement("P8", "SEC6", "K3", "003-spawn-guard", "003-spawn-sandbox")
@pytest.mark.parametrize("scope", ["per-sender", "global"])
async def test_a_sandboxed_agent_does_not_leave_its_sandbox_from_the_shared_session(
    tmp_path: Path, scope: str
) -> None:
    config = make_agents_config(BOXED, "open", session={"scope": scope})
    async with open_agents_fixture(config, tmp_path) as agents:
        await agents.open_sessions(MAIN)
        said = await agents.call_tool("sessions_spawn", HELPER, task="say .", agentId="open")
        assert (said["status"], said["code"], said["reason"]) == ("forbidden", "spawn_refused", "sandbox")
        with pytest.raises(SpawnRefused) as refused:
            await agents.operations.subagents.spawn(
                OPERATOR, SpawnRequest(task="say .", agent_id="open"), requester=HELPER
            )
        assert refused.value.data["reason"] == "sandbox"
        acting = await agents.operations.sessions.act_as(OPERATOR, HELPER)
        assert (acting.actor.caller.agent_id, acting.actor.caller.sandboxed) == ("helper", True)
        assert agents.rows("SELECT * FROM tasks") == []


@pytest.mark.requirement("K3", "P8")
async def test_an_agent_spawns_itself_with_its_own_settings_from_the_shared_session(tmp_path: Path) -> None:
    strict = {"id": "main", "default": True, "subagents": {"requireAgentId": True}}
    async with open_agents_fixture(make_agents_config(strict, "helper", **ONE_MAIN), tmp_path) as agents:
        await agents.open_sessions(MAIN)
        said = await agents.call_tool("sessions_spawn", HELPER, task="say .", announce="none")
        assert agent_of(said["childSessionKey"]) == "helper"
        assert (await agents.call_tool("sessions_spawn", MAIN, task="say ."))["field"] == "agentId"
        await agents.wait_until_idle()


@pytest.mark.requirement("K3", "V2")
@pytest.mark.parametrize("scope", ["per-sender", "global"])
async def test_an_agent_that_may_not_be_messaged_is_not_reached_through_the_shared_session(
    tmp_path: Path, scope: str
) -> None:
    alone: dict[str, Any] = {"sessions": {"visibility": "agent"}, "agentToAgent": {"enabled": False}}
    async with open_agents_fixture(
        make_agents_config("helper", tools=alone, session={"scope": scope}), tmp_path
    ) as agents:
        await agents.open_sessions(MAIN, HELPER, SIDE)
        for where in ({"sessionKey": HELPER}, {"agentId": "helper"}):
            said = await agents.call_tool("sessions_send", SIDE, message="say .", replyBack=0, **where)
            assert said["status"] == "error"
        said = await agents.call_tool("sessions_send", SIDE, sessionKey=MAIN, message="say yes", replyBack=0)
        assert said["reply"] == "yes"
        await agents.wait_until_idle()


# --- who answers later steps ---


class Delegating:
    """An agent that has a sub-agent do it, may wait for that, and says who it is. The sub-agent waits for `free`."""

    def __init__(self, name: str, free: asyncio.Event, *, waits: bool) -> None:
        self.name, self.free, self.waits = name, free, waits

    async def __call__(self, prompt: Prompt) -> AssistantMessage:
        if "subagent" in prompt.session_key:
            await self.free.wait()
        elif get_phase(prompt) == "request":
            if get_tool_result(prompt) is None:
                return make_tool_calls("sessions_spawn", task="compute", announce="parent")
            if self.waits:
                return make_tool_calls("sessions_yield")
        return make_answer(f"{self.name} says so")


@pytest.mark.requirement("K3")
@pytest.mark.parametrize("waits", [True, False])
async def test_each_agent_that_waits_in_the_shared_session_is_woken(tmp_path: Path, waits: bool) -> None:
    free = asyncio.Event()
    players = {name: ScriptedAgent(Delegating(name, free, waits=waits)) for name in ("main", "helper")}
    async with open_agents_fixture(
        make_agents_config("helper", **ONE_MAIN), tmp_path, functions=players
    ) as agents:
        await agents.open_sessions(MAIN)
        for number, session in enumerate((HELPER, MAIN, HELPER)):
            sent = SendRequest(
                session=session, message="go", timeout_seconds=0, announce="none", idempotency_key=f"{number}"
            )
            await agents.operations.exchanges.send(OPERATOR, sent)
            assert (await agents.wait_for_end(f"{number}")).yielded == waits
        free.set()
        await agents.wait_until_idle()
        wakes = agents.rows("SELECT agent_id, reply FROM runs WHERE origin = 'wake'")
        said = sorted((row["agent_id"] or "main", row["reply"]) for row in wakes)
        woken = ["helper", "main"] if waits else ["helper", "helper", "main"]
        assert said == [(name, f"{name} says so") for name in woken]
        answers = agents.rows("SELECT first_reply FROM exchanges ORDER BY n")
        names = ("helper", "main", "helper")
        assert [row["first_reply"] for row in answers] == [f"{name} says so" for name in names]


@pytest.mark.requirement("K3", "P1", "P4", "P5")
@pytest.mark.parametrize("requester", ["main", MAIN, HELPER])
@pytest.mark.parametrize("door", ["chat", "tool", "operator"])
async def test_a_report_for_the_parent_wakes_the_agent_that_asked_in_the_shared_session(
    tmp_path: Path, door: str, requester: str
) -> None:
    def answer(prompt: Prompt) -> str | AssistantMessage:
        if "subagent" in prompt.session_key:
            return "42"
        if get_phase(prompt) == "request" and get_tool_result(prompt) is None:
            return make_tool_calls("sessions_spawn", task="compute", announce="parent")
        return f"{prompt.agent_id} knows" if "Result: 42" in get_last_user_text(prompt) else "asked"

    players = {name: ScriptedAgent(answer) for name in ("main", "helper")}
    asking = "helper" if requester == HELPER else "main"
    async with open_agents_fixture(
        make_agents_config("helper", **ONE_MAIN), tmp_path, functions=players
    ) as agents:
        await agents.open_sessions(MAIN)
        if door == "chat":
            assert (await agents.ask("go", requester)).reply == "asked"
        elif door == "tool":
            acting = (await agents.operations.sessions.act_as(OPERATOR, requester)).actor
            arguments = {"task": "compute", "announce": "parent"}
            call = ToolRequest(caller=acting.caller, run_id="http:main", call_id="1", arguments=arguments)
            assert not (await acting.tools["sessions_spawn"].invoke(call)).is_error
        else:
            request = SpawnRequest(task="compute", announce="parent")
            await agents.operations.subagents.spawn(OPERATOR, request, requester=requester)
        await agents.wait_until_idle()
        [task] = agents.rows("SELECT agent_id, outcome, announced FROM tasks")
        assert task == {"agent_id": asking, "outcome": "ok", "announced": "parent"}
        assert agents.rows("SELECT * FROM deliveries") == []
        transcript = await agents.transcript("main")
        assert [message["role"] for message in transcript[-2:]] == ["user", "assistant"]
        assert transcript[-1]["content"][0]["text"] == f"{asking} knows"
        shown = [prompt for player in players.values() for prompt in player.prompts]
        assert "global" not in f"{transcript} {[(prompt.instructions, prompt.messages) for prompt in shown]}"


@pytest.mark.requirement("K3")
async def test_replies_to_the_shared_session_are_answered_by_the_agent_that_wrote(tmp_path: Path) -> None:
    there = "agent:main:dashboard:there"

    def answer(prompt: Prompt) -> str | AssistantMessage:
        if (
            get_phase(prompt) == "request"
            and get_tool_result(prompt) is None
            and prompt.session_key == "main"
        ):
            return make_tool_calls("sessions_send", sessionKey=there, message="hello", replyBack=1)
        return "helper says so"

    players = {"main": ScriptedAgent("main says so"), "helper": ScriptedAgent(answer)}
    async with open_agents_fixture(
        make_agents_config("helper", **ONE_MAIN), tmp_path, functions=players
    ) as agents:
        await agents.open_sessions(MAIN, there)
        await agents.ask("go", HELPER)
        await agents.operations.exchanges.send(
            OPERATOR, SendRequest(session=there, message="hello", reply_back=1), requester=HELPER
        )
        await agents.wait_until_idle()
        turns = agents.rows("SELECT reply FROM runs WHERE id LIKE 'turn:%'")
        assert [row["reply"] for row in turns] == ["helper says so"] * 2


# --- rolling upgrades ---


@pytest.mark.requirement("K3", "003-key-global-is-main")
@pytest.mark.sqlite_only
async def test_a_shared_session_that_an_older_replica_started_is_shown_as_main_and_answers(
    tmp_path: Path,
) -> None:
    async with open_agents_fixture(make_agents_config("helper", **ONE_MAIN), tmp_path) as agents:
        await agents.open_sessions(MAIN, SIDE)
        await agents.ask("say before", SIDE)
        (row,) = agents.rows("SELECT session_id FROM sessions WHERE key = ?", SIDE)
        old = row["session_id"]
    query_database(tmp_path / DATABASE, "UPDATE sessions SET key = 'global' WHERE session_id = ?", old)
    query_database(tmp_path / DATABASE, "UPDATE transcripts SET key = 'global' WHERE session_id = ?", old)
    async with open_agents_fixture(make_agents_config("helper", **ONE_MAIN), tmp_path) as agents:
        assert (await agents.ask("say after", old)).reply == "after"
        assert {"before", "after"} <= {
            entry["content"][0]["text"]
            for entry in await agents.transcript(old)
            if entry["role"] == "assistant"
        }
        listed = await agents.call_tool("sessions_list", MAIN)
        assert {row["key"] for row in listed["sessions"]} == {"main"}
        for tool in ("session_status", "sessions_history"):
            assert (await agents.call_tool(tool, MAIN, sessionKey=old))["sessionKey"] == "main"
