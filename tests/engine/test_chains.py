"""Chains of messages between sessions: none is endless, and no waits form a cycle."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from antiphon.clock import ManualClock
from antiphon.engine.collaboration import chains
from antiphon.engine.supervisor import EngineTimings
from antiphon.errors import WaitCycle
from antiphon.messages import AssistantMessage
from antiphon.runtimes import Prompt
from antiphon.store import Row
from support.agents_fixture import (
    HELPER,
    MAIN,
    ScriptedAgent,
    get_last_user_text,
    get_tool_result,
    list_changed_sessions,
    make_agents_config,
    open_agents_fixture,
)
from support.app_fixture import DATABASE, make_tool_calls, wait_for_event
from support.databases import dump_database, query_database
from support.model_provider import Answer, Provider

pytestmark = pytest.mark.anyio

CALM = {"replyBack": 0, "announce": "none"}


def main_of(agent: str) -> str:
    return f"agent:{agent}:main"


def asks(
    other: str, *, only: str | None = None, **options: Any
) -> Callable[[Prompt], AssistantMessage | str]:
    """Send to another agent, if this word was said, and reply with what the tool answered."""

    def answer(prompt: Prompt) -> AssistantMessage | str:
        if (result := get_tool_result(prompt)) is not None:
            return str({name: result.get(name) for name in ("status", "code", "path", "reply", "error")})
        if only is not None and only not in get_last_user_text(prompt):
            return "no"
        return make_tool_calls(
            "sessions_send", sessionKey=main_of(other), message="pass it on", **{**CALM, **options}
        )

    return answer


# --- oneself ---


@pytest.mark.requirement("S7", "G15")
async def test_a_session_cannot_send_to_itself_by_any_name(tmp_path: Path) -> None:
    async with open_agents_fixture(make_agents_config("helper"), tmp_path) as agents:
        await agents.open_sessions(MAIN)
        (row,) = agents.rows("SELECT session_id FROM sessions")
        for name in ("main", "current", MAIN, row["session_id"]):
            before = dump_database(tmp_path / DATABASE)
            said = await agents.use("sessions_send", sessionKey=name, message="hello me")
            assert (said["status"], said["code"]) == ("error", "self_send")
            assert dump_database(tmp_path / DATABASE) == before
        said = await agents.use("sessions_send", agentId="main", message="hello me")
        assert said["code"] == "self_send"


# --- circles of waits ---


@pytest.mark.requirement("S7", "G12")
async def test_a_wait_that_would_close_a_circle_is_refused_with_the_path(tmp_path: Path) -> None:
    functions = {"a": ScriptedAgent(asks("b")), "b": ScriptedAgent(asks("c")), "c": ScriptedAgent(asks("a"))}
    async with open_agents_fixture(
        make_agents_config("a", "b", "c"), tmp_path, functions=functions
    ) as agents:
        await agents.open_sessions(*map(main_of, "abc"))
        reply = (await agents.ask("go", main_of("a"))).reply or ""
        assert "'code': 'wait_cycle'" not in reply and "'status': 'ok'" in reply, (
            "only the last one is refused"
        )
        assert "wait_cycle" in reply
        (refused,) = [row for row in await agents.transcript(main_of("c")) if row["role"] == "toolResult"]
        assert refused["isError"] is True
        assert refused["details"]["code"] == "wait_cycle"
        path = refused["details"]["path"]
        assert path == [main_of("a"), main_of("b"), main_of("c")]
        assert f"{' waits for '.join(map(repr, path))}." in refused["details"]["error"]
        assert len(agents.rows("SELECT * FROM exchanges")) == 2, "what was refused has not begun"


@pytest.mark.requirement("S7", "G12", "V3")
async def test_the_path_names_no_session_that_the_caller_may_not_see(tmp_path: Path) -> None:
    hidden = "agent:b:discord:group:boardroom"
    config = make_agents_config(
        "a", "b", {"id": "c", "tools": {"sessions": {"visibility": "self", "send": "all"}}}
    )

    def boardroom(prompt: Prompt) -> AssistantMessage | str:
        if get_tool_result(prompt) is not None:
            return "done"
        return make_tool_calls("sessions_send", sessionKey=main_of("c"), message="pass it on", **CALM)

    def ask(prompt: Prompt) -> AssistantMessage | str:
        if get_tool_result(prompt) is not None:
            return "done"
        return make_tool_calls("sessions_send", sessionKey=hidden, message="pass it on", **CALM)

    functions = {"a": ScriptedAgent(ask), "b": ScriptedAgent(boardroom), "c": ScriptedAgent(asks("a"))}
    async with open_agents_fixture(config, tmp_path, functions=functions) as agents:
        await agents.open_sessions(main_of("a"), hidden, main_of("c"))
        await agents.ask("go", main_of("a"))
        (refused,) = [row for row in await agents.transcript(main_of("c")) if row["role"] == "toolResult"]
        assert refused["details"]["path"] == [main_of("a"), "(hidden session)", main_of("c")]
        assert "boardroom" not in str(refused)


@pytest.mark.requirement("S7", "G12", "V3")
async def test_who_asks_decides_what_is_shown_of_the_sessions_between(tmp_path: Path) -> None:
    shown: set[tuple[str, str, bool]] = set()  # a script may be run again
    paths: list[list[str]] = []

    def show(row: Row) -> str:
        shown.add((row["key"], row["agent_id"], bool(row["descendant"])))
        return "somebody"

    async def last(prompt: Prompt) -> str:
        ids = {row["key"]: row["id"] for row in agents.rows("SELECT key, id FROM sessions")}
        (run,) = agents.rows("SELECT n FROM runs WHERE id = ?", prompt.run_id)
        store = agents.operations.context.store
        own, first = ids[main_of("c")], ids[main_of("a")]
        with pytest.raises(WaitCycle) as caught:
            now = agents.app.clock.now()
            await store.tx(chains.record_wait, run["n"], own, "run", first, now + 1000, now, show)
        paths.append(caught.value.data["path"])
        return "done"

    functions = {"a": ScriptedAgent(asks("b")), "b": ScriptedAgent(asks("c")), "c": ScriptedAgent(last)}
    async with open_agents_fixture(
        make_agents_config("a", "b", "c"), tmp_path, functions=functions
    ) as agents:
        await agents.open_sessions(*map(main_of, "abc"))
        await agents.ask("go", main_of("a"))
        assert paths == [[main_of("a"), "somebody", main_of("c")]]
        assert shown == {(main_of("b"), "b", False)}
        assert agents.rows("SELECT 1 FROM waits WHERE awaited = 'run'") == []


@pytest.mark.requirement("S7", "G12")
async def test_two_who_wait_for_each_other(tmp_path: Path) -> None:
    functions = {"a": ScriptedAgent(asks("b")), "b": ScriptedAgent(asks("a"))}
    async with open_agents_fixture(make_agents_config("a", "b"), tmp_path, functions=functions) as agents:
        await agents.open_sessions(*map(main_of, "ab"))
        await agents.ask("go", main_of("a"))
        (refused,) = [row for row in await agents.transcript(main_of("b")) if row["role"] == "toolResult"]
        assert (refused["details"]["status"], refused["details"]["path"]) == (
            "error",
            [main_of("a"), main_of("b")],
        )
        assert "timeoutSeconds 0" in refused["details"]["error"]


@pytest.mark.requirement("S7", "G12")
async def test_who_does_not_wait_closes_no_circle(tmp_path: Path) -> None:
    functions = {
        "a": ScriptedAgent(asks("b")),
        "b": ScriptedAgent(asks("a", only="pass it on", timeoutSeconds=0)),
    }
    config = make_agents_config("a", "b", session={"agentToAgent": {"maxHops": 2}})
    async with open_agents_fixture(config, tmp_path, functions=functions) as agents:
        await agents.open_sessions(*map(main_of, "ab"))
        reply = (await agents.ask("go", main_of("a"))).reply or ""
        assert "accepted" in reply
        await agents.wait_until_idle()


@pytest.mark.requirement("S7", "G12")
async def test_a_wait_that_is_over_closes_no_circle(tmp_path: Path) -> None:
    """A has given up on B, though its run still goes on; B asks A and waits."""
    clock = ManualClock()
    gave_up = asyncio.Event()

    async def asked() -> bool:
        return len(query_database(tmp_path / DATABASE, "SELECT 1 FROM exchanges")) == 2

    async def a(prompt: Prompt) -> AssistantMessage | str:
        if get_last_user_text(prompt) != "go":
            return "yes?"
        if get_tool_result(prompt) is None:
            return make_tool_calls(
                "sessions_send", sessionKey=main_of("b"), message="x", timeoutSeconds=0.02, **CALM
            )
        clock.advance(seconds=1)
        gave_up.set()
        await agents.until(asked)
        return "I gave up"

    async def b(prompt: Prompt) -> AssistantMessage | str:
        if (result := get_tool_result(prompt)) is not None:
            return result["status"]
        await wait_for_event(gave_up)
        return make_tool_calls("sessions_send", sessionKey=main_of("a"), message="y", **CALM)

    functions = {"a": ScriptedAgent(a), "b": ScriptedAgent(b)}
    slow = EngineTimings(sweep_interval_seconds=60)  # the sweeper would take the wait away
    async with open_agents_fixture(
        make_agents_config("a", "b"), tmp_path, functions=functions, clock=clock, timings=slow
    ) as agents:
        await agents.open_sessions(*map(main_of, "ab"))
        await agents.ask("go", main_of("a"))
        await agents.wait_until_idle()
        (result,) = [row for row in await agents.transcript(main_of("b")) if row["role"] == "toolResult"]
        assert (result["details"]["status"], result["details"]["reply"]) == ("ok", "yes?")


@pytest.mark.requirement("S7", "G12", "S9")
async def test_waiting_again_for_what_was_sent_before_is_a_wait_too(tmp_path: Path) -> None:
    """A sends without waiting; B sends to A and waits; then A waits for the first message by its key."""
    waiting = asyncio.Event()
    said: list[dict[str, Any]] = []

    async def a(prompt: Prompt) -> AssistantMessage | str:
        if (result := get_tool_result(prompt)) is not None:
            said.append(result)
        sent = {"sessionKey": main_of("b"), "message": "x", "idempotencyKey": "k", **CALM}
        if not said:
            return make_tool_calls("sessions_send", **sent, timeoutSeconds=0)
        if len(said) == 1:
            await wait_for_event(waiting)
            return make_tool_calls("sessions_send", **sent, timeoutSeconds=1)
        return "done"

    async def b(prompt: Prompt) -> AssistantMessage | str:
        if get_tool_result(prompt) is not None:
            return "never mind"
        return make_tool_calls(
            "sessions_send", sessionKey=main_of("a"), message="y", timeoutSeconds=3, **CALM
        )

    async with open_agents_fixture(
        make_agents_config("a", "b"), tmp_path, functions={"a": ScriptedAgent(a), "b": ScriptedAgent(b)}
    ) as agents:
        await agents.open_sessions(*map(main_of, "ab"))
        run = await agents.say("go", main_of("a"))

        async def waited_for() -> bool:
            return bool(agents.rows("SELECT * FROM waits"))

        await agents.until(waited_for)
        waiting.set()
        await agents.wait_for_end(run)
        assert [result["status"] for result in said] == ["accepted", "error"]
        assert (said[1]["code"], said[1]["path"]) == ("wait_cycle", [main_of("b"), main_of("a")])
        await agents.wait_until_idle()


@pytest.mark.requirement("G12")
async def test_who_waits_holds_no_slot(tmp_path: Path) -> None:
    """Only one sub-agent may be in a model step, and each of them waits for one that waits for another."""
    config = make_agents_config(
        "helper",
        agents={"defaults": {"subagents": {"maxConcurrent": 1, "maxSpawnDepth": 2}}},
        tools={"subagents": {"tools": {"alsoAllow": ["sessions_send"]}}},
    )
    free = asyncio.Event()

    async def helper(prompt: Prompt) -> str:
        await wait_for_event(free)
        return "done"

    async with open_agents_fixture(config, tmp_path, functions={"helper": ScriptedAgent(helper)}) as agents:
        await agents.open_sessions(HELPER)
        waits = f'call sessions_send {{"sessionKey": "{HELPER}", "message": "?", "replyBack": 0, "announce": "none"}}'
        for _ in range(3):
            await agents.call_tool("sessions_spawn", task=waits)
        quick = await agents.call_tool("sessions_spawn", task="say quick")
        assert (await agents.wait_for_end(quick["runId"])).reply == "quick", "though three others wait"
        free.set()
        await agents.wait_until_idle()
        assert {row["outcome"] for row in agents.rows("SELECT outcome FROM tasks")} == {"ok"}


@pytest.mark.requirement("G12")
async def test_sub_agents_of_a_stuck_provider_delay_those_of_no_other(tmp_path: Path) -> None:
    async with Provider().running() as stuck, Provider().running() as quick:
        stuck.default = Answer(text=("late",), hold_after=0)
        servers = {"stuck": stuck.url, "quick": quick.url}
        providers = {name: {"baseUrl": f"{url}/v1", "models": [{"id": "m"}]} for name, url in servers.items()}
        defaults = {"model": "rehearsal/rehearsal", "subagents": {"maxConcurrent": 1}}
        config = make_agents_config(agents={"defaults": defaults}, models={"providers": providers})
        async with open_agents_fixture(config, tmp_path) as agents:
            late = [await agents.call_tool("sessions_spawn", task="wait", model="stuck/m") for _ in range(2)]
            await wait_for_event(stuck.arrived)
            prompt = await agents.call_tool("sessions_spawn", task="go", model="quick/m")
            assert (await agents.wait_for_end(prompt["runId"])).reply == "Hello there."
            assert len(stuck.received) == 1, "one of two may ask"
            stuck.release()
            assert [(await agents.wait_for_end(run["runId"])).reply for run in late] == ["late", "late"]
            await agents.wait_until_idle()


# --- chains that would not end ---


@pytest.mark.requirement("S7", "G14")
@pytest.mark.parametrize("count", range(2, 11))
async def test_a_ring_that_forwards_for_ever_stops_at_the_limit_by_name(tmp_path: Path, count: int) -> None:
    names = [f"a{number}" for number in range(count)]
    functions = {
        name: ScriptedAgent(asks(names[(number + 1) % count], timeoutSeconds=0))
        for number, name in enumerate(names)
    }
    async with open_agents_fixture(make_agents_config(*names), tmp_path, functions=functions) as agents:
        await agents.open_sessions(*map(main_of, names))
        warned = await list_changed_sessions(agents, "chain_limit", lambda: agents.ask("go", main_of("a0")))
        last = names[12 % count]
        assert warned == [main_of(last)]
        hops = agents.rows("SELECT hop, chain FROM exchanges ORDER BY n")
        assert [row["hop"] for row in hops] == list(range(1, 13))
        assert len({row["chain"] for row in hops}) == 1
        errors = [
            row["details"]
            for row in await agents.transcript(main_of(last))
            if row["role"] == "toolResult" and row.get("isError")
        ]
        assert [(error["status"], error["code"], error["max"]) for error in errors] == [
            ("forbidden", "chain_limit", 12)
        ]
        assert "limit of 12 hops" in errors[0]["error"]


@pytest.mark.requirement("S7", "G14")
async def test_a_chain_of_any_shape_ends_at_its_number_of_runs(tmp_path: Path) -> None:
    """All agents ask each other: the tree would have 3 + 9 + 27 … runs, and is cut at ten."""
    names = ["a", "b", "c", "d"]

    def ask_all(prompt: Prompt) -> AssistantMessage | str:
        if get_tool_result(prompt) is not None:
            return "asked"
        own = prompt.agent_id
        asked = [
            make_tool_calls(
                "sessions_send", sessionKey=main_of(name), message="all", timeoutSeconds=0, **CALM
            )
            for name in names
            if name != own
        ]
        blocks = [call.content[0] for call in asked]
        return AssistantMessage(content=blocks, timestamp=1)

    config = make_agents_config(*names, session={"agentToAgent": {"maxRuns": 10, "maxHops": 1000}})
    functions = {name: ScriptedAgent(ask_all) for name in names}
    async with open_agents_fixture(config, tmp_path, functions=functions) as agents:
        await agents.open_sessions(*map(main_of, names))
        warned = await list_changed_sessions(agents, "chain_limit", lambda: agents.ask("go", main_of("a")))
        assert warned
        counted = agents.rows("SELECT chain, count(*) AS n FROM runs WHERE chain IS NOT NULL GROUP BY chain")
        assert all(row["n"] <= 10 for row in counted)


@pytest.mark.requirement("G14", "S7")
async def test_a_chain_goes_through_spawns_too(tmp_path: Path) -> None:
    config = make_agents_config(
        session={"agentToAgent": {"maxHops": 2}}, agents={"defaults": {"subagents": {"maxSpawnDepth": 5}}}
    )

    def deeper(prompt: Prompt) -> AssistantMessage | str:
        if (result := get_tool_result(prompt)) is not None:
            return str(result.get("code") or result["status"])
        return (
            "."
            if prompt.run_id.startswith(("announce", "wake"))
            else make_tool_calls("sessions_spawn", task="deeper")
        )

    async with open_agents_fixture(config, tmp_path, functions={"main": ScriptedAgent(deeper)}) as agents:
        warned = await list_changed_sessions(agents, "chain_limit", lambda: agents.ask("go"))
        assert len(warned) == 1 and warned[0].startswith("agent:main:subagent:")
        rows = agents.rows("SELECT hop, chain FROM tasks ORDER BY n")
        assert [row["hop"] for row in rows] == [1, 2]
        assert len({row["chain"] for row in rows}) == 1


@pytest.mark.requirement("G14", "S3")
async def test_what_a_person_says_begins_a_chain_of_its_own(tmp_path: Path) -> None:
    async with open_agents_fixture(make_agents_config("helper"), tmp_path) as agents:
        await agents.open_sessions(HELPER)
        for _ in range(2):
            await agents.call_tool("sessions_send", sessionKey=HELPER, message="say yes", **CALM)
        rows = agents.rows("SELECT chain, hop FROM exchanges")
        assert [row["hop"] for row in rows] == [1, 1] and len({row["chain"] for row in rows}) == 2
