"""subagents and sessions_yield: seeing, stopping and redirecting what was spawned, and waiting for all of it."""

from __future__ import annotations

import asyncio
import random
import re
import threading
import uuid
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from antiphon.access import Caller
from antiphon.bus import Event, RunChanged, StopRequested
from antiphon.bus.local import LocalBus
from antiphon.clock import ManualClock, SystemClock
from antiphon.engine.collaboration.task_rows import SQL as tasks_sql
from antiphon.engine.outbox import sanitize
from antiphon.engine.supervisor import EngineTimings
from antiphon.engine.toolbox import ToolRequest
from antiphon.engine.validation import RESERVED_KEY_PREFIXES
from antiphon.errors import NotFound
from antiphon.messages import AssistantMessage
from antiphon.runtimes import Prompt
from antiphon.tools._bounds import MAX_LIST_RESULT_BYTES
from support.agents_fixture import (
    HELPER,
    MAIN,
    OPERATOR,
    AgentsFixture,
    ScriptedAgent,
    get_last_user_text,
    get_phase,
    get_tool_result,
    make_agents_config,
    open_agents_fixture,
)
from support.app_fixture import DATABASE, make_answer, make_tool_calls, strip_frame, wait_for_event
from support.databases import query_database

pytestmark = pytest.mark.anyio

LASTING = EngineTimings(lease_seconds=3600, sweep_interval_seconds=0.02)
NESTED = {"defaults": {"subagents": {"maxSpawnDepth": 2}}}


class Nursery:
    """An agent whose children each work until they are told how to end, by the words of their task."""

    def __init__(self, *jobs: str, how: str = "all") -> None:
        self.jobs, self.how = jobs, how
        self.free: dict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self.begun: dict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self.awake: list[Prompt] = []
        self.framed: list[str] = []

    async def __call__(self, prompt: Prompt) -> AssistantMessage:
        if prompt.session_key == MAIN:
            return self._parent(prompt)
        job = strip_frame(get_last_user_text(prompt))
        if job != get_last_user_text(prompt):
            self.framed.append(job)
        if get_phase(prompt) == "announce":
            return make_answer(
                "ANNOUNCE_SKIP" if "skip" in job else "" if "mute" in job else f"told of {job[-4:]}"
            )
        self.begun[job].set()
        await wait_for_event(self.free[job])
        if "fail" in job:
            raise RuntimeError(job)
        return make_answer("" if "empty" in job else f"did {job}")

    def _parent(self, prompt: Prompt) -> AssistantMessage:
        if get_phase(prompt) == "wake":
            self.awake.append(prompt)
            return make_answer("all in")
        result = get_tool_result(prompt)
        if result is None:
            spawns = [make_tool_calls("sessions_spawn", task=job, label=job).content[0] for job in self.jobs]
            return AssistantMessage(content=spawns, timestamp=1)
        return (
            make_tool_calls("sessions_yield", waitFor=self.how, message="waiting")
            if "waitFor" not in result
            else make_answer(".")
        )


def marks(transcript: list[dict[str, Any]]) -> list[str]:
    """What a transcript has of reports and wakes, in order."""
    kinds = [row.get("provenance", {}).get("kind") for row in transcript]
    return [kind for kind in kinds if kind in {"subagent_result", "wake"}]


def tasks(agents: AgentsFixture) -> dict[str, dict[str, Any]]:
    return {row["task"]: row for row in agents.rows("SELECT * FROM tasks ORDER BY n")}


# --- waiting for all of them ---


@pytest.mark.requirement("A2", "P5", "G9", "G18")
@pytest.mark.parametrize("seed", range(6))
async def test_however_the_children_end_there_is_one_wake_behind_all_their_reports(
    tmp_path: Path, seed: int
) -> None:
    chance = random.Random(seed)
    kinds = ["ok", "fail", "empty", "mute", "kill", "late"]
    jobs = [f"{chance.choice(kinds)} {number}" for number in range(chance.randint(1, 7))]
    nursery = Nursery(*jobs)
    async with open_agents_fixture(make_agents_config(), tmp_path, functions={"main": nursery}) as agents:
        view = await agents.ask("go")
        assert (view.state, view.reply) == ("ok", "waiting")
        for job in chance.sample(jobs, len(jobs)):
            await wait_for_event(nursery.begun[job])
            if "kill" in job:
                await agents.use("subagents", action="kill", target=job)
            else:
                nursery.free[job].set()
            if chance.random() < 0.5:
                await asyncio.sleep(0)
        await agents.wait_until_idle()
        assert marks(await agents.transcript()) == ["subagent_result"] * len(jobs) + ["wake"]
        (woken,) = nursery.awake
        assert get_last_user_text(woken).startswith("The sub-agents you were waiting for have finished.")
        for job in jobs:
            outcome = {"fail": "error", "empty": "incomplete", "kill": "cancelled"}.get(job.split()[0], "ok")
            assert tasks(agents)[job]["outcome"] == outcome
        shown = [str(message) for message in woken.messages if "Status: " in str(message)]
        assert len(shown) == len(jobs), "the model sees every report when it is woken"


@pytest.mark.requirement("A2")
async def test_waiting_for_any_of_them_is_one_wake_after_the_first(tmp_path: Path) -> None:
    nursery = Nursery("first", "second", how="any")
    async with open_agents_fixture(make_agents_config(), tmp_path, functions={"main": nursery}) as agents:
        await agents.ask("go")
        nursery.free["second"].set()

        async def woken() -> bool:
            return bool(nursery.awake)

        await agents.until(woken)
        nursery.free["first"].set()
        await agents.wait_until_idle()
        assert marks(await agents.transcript()) == ["subagent_result", "wake", "subagent_result"]


@pytest.mark.requirement("A2", "G40")
async def test_children_that_stay_silent_wake_too(tmp_path: Path) -> None:
    nursery = Nursery("skip it", "skip that")
    async with open_agents_fixture(make_agents_config(), tmp_path, functions={"main": nursery}) as agents:
        await agents.ask("go")
        for job in nursery.jobs:
            nursery.free[job].set()
        await agents.wait_until_idle()
        assert marks(await agents.transcript()) == ["wake"]
        assert {row["announced"] for row in tasks(agents).values()} == {"skipped"}


@pytest.mark.requirement("A2")
async def test_without_a_child_to_wait_for_the_turn_goes_on(tmp_path: Path) -> None:
    async with open_agents_fixture(make_agents_config(), tmp_path) as agents:
        view = await agents.ask("call sessions_yield {}\nsay going on")
        assert view.reply == "going on"
        (result,) = [row for row in await agents.transcript() if row["role"] == "toolResult"]
        assert (result["details"]["status"], result["details"]["code"]) == ("error", "conflict")
        assert agents.rows("SELECT yielded FROM sessions") == [{"yielded": None}]


@pytest.mark.requirement("A2", "G2", "G9")
async def test_a_wait_for_children_outlives_the_house(tmp_path: Path) -> None:
    nursery = Nursery("one 1", "two 2")
    async with open_agents_fixture(make_agents_config(), tmp_path, functions={"main": nursery}) as agents:
        await agents.ask("go")
        await wait_for_event(nursery.begun["two 2"])
    for job in nursery.jobs:
        nursery.free[job].set()
    async with open_agents_fixture(make_agents_config(), tmp_path, functions={"main": nursery}) as agents:
        await agents.wait_until_idle()
        assert marks(await agents.transcript()) == ["subagent_result", "subagent_result", "wake"]
        assert len(nursery.awake) == 1


@pytest.mark.requirement("G16", "P5")
async def test_stopping_the_parent_stops_its_children_and_wakes_no_session(tmp_path: Path) -> None:
    nursery = Nursery("one 1", "two 2")
    async with open_agents_fixture(make_agents_config(), tmp_path, functions={"main": nursery}) as agents:
        await agents.ask("go")
        for job in nursery.jobs:
            await wait_for_event(nursery.begun[job])
        await agents.operations.runs.stop(OPERATOR, MAIN)
        await agents.wait_until_idle()
        assert marks(await agents.transcript()) == ["subagent_result", "subagent_result"]
        assert {row["outcome"] for row in tasks(agents).values()} == {"cancelled"}
        assert nursery.awake == []


# --- the tool ---


@pytest.mark.requirement("A2", "G39")
async def test_the_list_shows_who_is_at_work_and_who_has_reported(tmp_path: Path) -> None:
    nursery = Nursery("work 1", "work 2")
    async with open_agents_fixture(
        make_agents_config("helper"), tmp_path, functions={"main": nursery}
    ) as agents:
        await agents.ask("go")
        await wait_for_event(nursery.begun["work 2"])
        nursery.free["work 1"].set()

        async def reported() -> bool:
            return tasks(agents)["work 1"]["phase"] == "settled"

        await agents.until(reported)
        said = await agents.use("subagents")
        assert (said["status"], said["total"]) == ("ok", 2)
        (active,), (recent,) = said["active"], said["recent"]
        made = tasks(
            agents
        )  # by two calls at the same time, in any order; the last one is the first in the list
        number = 1 if made["work 2"]["n"] > made["work 1"]["n"] else 2
        assert (active["label"], active["phase"], active["number"]) == ("work 2", "running", number)
        assert "outcome" not in active and active["lastActivityAt"] >= active["createdAt"]
        assert (recent["label"], recent["outcome"], recent["result"]) == ("work 1", "ok", "did work 1")
        assert recent["endedAt"] >= recent["createdAt"]
        await agents.open_sessions(HELPER)
        assert (await agents.use("subagents", HELPER))["total"] == 0, "only one's own"
        nursery.free["work 2"].set()
        await agents.wait_until_idle()


@pytest.mark.requirement("A2", "P4", "G16")
@pytest.mark.parametrize("name", ["label", "childSessionKey", "runId", "number", "last", "beginning", "all"])
async def test_a_child_is_stopped_by_any_of_its_names_and_reported_as_cancelled(
    tmp_path: Path, name: str
) -> None:
    nursery = Nursery("dig deep")
    async with open_agents_fixture(make_agents_config(), tmp_path, functions={"main": nursery}) as agents:
        await agents.ask("go")
        await wait_for_event(nursery.begun["dig deep"])
        (child,) = (await agents.use("subagents"))["active"]
        target = {"last": "last", "all": "all", "beginning": "DIG"}.get(name) or str(child[name])
        said = await agents.use("subagents", action="kill", target=target)
        assert (said["status"], said["killed"], said["labels"]) == ("ok", 1, ["dig deep"])
        await agents.wait_until_idle()
        (body,) = [row["body"] for row in agents.rows("SELECT body FROM deliveries")]
        assert body == "Status: cancelled\nResult: none\nNotes: The run was stopped."
        again = await agents.use("subagents", action="kill", target="dig deep")
        assert again["status"] == "done" and "already finished" in again["message"]


@pytest.mark.requirement("A2", "SEC5")
@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ({"action": "kill"}, "invalid_input"),
        ({"action": "kill", "target": "nobody"}, "not_found"),
        ({"action": "kill", "target": "twin"}, "ambiguous"),
        ({"action": "steer", "target": "twin 1"}, "invalid_input"),
        ({"action": "kill", "target": MAIN}, "not_found"),
        ({"action": "dance"}, "invalid_input"),
    ],
)
async def test_who_is_meant_must_be_one_of_ones_own(
    tmp_path: Path, arguments: dict[str, Any], code: str
) -> None:
    nursery = Nursery("twin 1", "twin 2")
    async with open_agents_fixture(make_agents_config(), tmp_path, functions={"main": nursery}) as agents:
        await agents.ask("go")
        said = await agents.use("subagents", **arguments)
        assert (said["status"], said["code"]) == ("error", code)
        for job in nursery.jobs:
            nursery.free[job].set()
        await agents.wait_until_idle()
        assert {row["outcome"] for row in tasks(agents).values()} == {"ok"}


@pytest.mark.requirement("A2", "SEC5", "SEC6")
async def test_a_child_cannot_stop_or_steer_its_siblings(tmp_path: Path) -> None:
    tools = {"subagents": {"tools": {"alsoAllow": ["subagents"]}}}
    nursery = Nursery("one 1", "two 2")
    async with open_agents_fixture(
        make_agents_config(tools=tools), tmp_path, functions={"main": nursery}
    ) as agents:
        await agents.ask("go")
        one, two = (tasks(agents)[job]["child_key"] for job in nursery.jobs)
        for action in ("kill", "steer"):
            said = await agents.use("subagents", one, action=action, target=two, message="say x")
            assert (said["status"], said["code"]) == ("error", "not_found")
        for job in nursery.jobs:
            nursery.free[job].set()
        await agents.wait_until_idle()
        assert tasks(agents)["two 2"]["outcome"] == "ok"


@pytest.mark.requirement("A2", "P5")
async def test_a_child_that_is_steered_has_a_new_task_and_reports_once(tmp_path: Path) -> None:
    nursery = Nursery("dig deep")
    async with open_agents_fixture(make_agents_config(), tmp_path, functions={"main": nursery}) as agents:
        await agents.ask("go")
        await wait_for_event(nursery.begun["dig deep"])
        before = tasks(agents)["dig deep"]
        nursery.free["look up"].set()
        said = await agents.use("subagents", action="steer", target="dig deep", message="look up")
        assert (said["status"], said["label"]) == ("accepted", "dig deep")
        await agents.wait_until_idle()
        after = tasks(agents)["look up"]
        assert (after["id"], after["child_key"]) == (before["id"], before["child_key"])
        assert (after["outcome"], after["result"]) == ("ok", "did look up")
        assert (await agents.operations.runs.get(OPERATOR, before["id"])).state == "cancelled"
        assert marks(await agents.transcript()) == ["subagent_result", "wake"]
        assert len(agents.rows("SELECT * FROM deliveries")) == 1
        (steered,) = [
            row for row in await agents.transcript(after["child_key"]) if row["content"] == "look up"
        ]
        assert steered["provenance"] == {
            "kind": "steer",
            "sourceSessionKey": MAIN,
            "sourceTool": "subagents",
        }
        assert nursery.framed == ["look up"], "the parent model's words are no bare message of the user"


# --- children of children ---


class Tree:
    """`main` spawns a manager, the manager a worker; the worker works until it is let go."""

    announce = "channel"

    def __init__(self) -> None:
        self.free, self.begun = asyncio.Event(), asyncio.Event()
        self.prompts: list[Prompt] = []

    async def __call__(self, prompt: Prompt) -> AssistantMessage:
        self.prompts.append(prompt)
        if prompt.session_key == MAIN:
            return make_answer("thanks")
        if get_phase(prompt) in {"announce", "wake"}:
            return make_answer("the whole of it" if get_phase(prompt) == "wake" else "in a word")
        if get_last_user_text(prompt) == "work":
            self.begun.set()
            await wait_for_event(self.free)
            return make_answer("worked")
        asked = {"task": "work", "announce": self.announce}
        return (
            make_answer("I have asked somebody")
            if get_tool_result(prompt)
            else make_tool_calls("sessions_spawn", **asked)
        )


async def under_way(tree: Tree, agents: AgentsFixture, **options: Any) -> str:
    """A manager that has ended its turn and waits for its worker."""
    await agents.open_sessions(MAIN)
    manager = (await agents.use("sessions_spawn", task="manage", **options))["childSessionKey"]
    await wait_for_event(tree.begun)

    async def waiting() -> bool:
        return tasks(agents)["manage"]["phase"] == "waiting"

    await agents.until(waiting)
    return manager


@pytest.mark.requirement("G18", "G19", "P5")
async def test_a_manager_reports_after_its_workers_and_they_report_to_it(tmp_path: Path) -> None:
    tree = Tree()
    async with open_agents_fixture(
        make_agents_config(agents=NESTED), tmp_path, functions={"main": tree}
    ) as agents:
        manager = await under_way(tree, agents)
        assert (await agents.use("subagents"))["active"][0]["phase"] == "waiting"
        tree.free.set()
        await agents.wait_until_idle()
        assert marks(await agents.transcript(manager)) == ["subagent_result", "wake"]
        assert marks(await agents.transcript()) == ["subagent_result"]
        assert tasks(agents)["manage"]["result"] == "the whole of it"
        assert tasks(agents)["work"]["requester_key"] == manager


@pytest.mark.requirement("A2", "G16", "P4")
async def test_a_manager_that_is_stopped_while_it_waits_is_cancelled_with_its_workers(tmp_path: Path) -> None:
    tree = Tree()
    async with open_agents_fixture(
        make_agents_config(agents=NESTED), tmp_path, functions={"main": tree}
    ) as agents:
        await under_way(tree, agents)
        said = await agents.use("subagents", action="kill", target="last")
        assert said["killed"] == 1
        await agents.wait_until_idle()
        assert {row["outcome"] for row in tasks(agents).values()} == {"cancelled"}
        assert marks(await agents.transcript()) == ["subagent_result"]
        bodies = [
            row["body"] for row in agents.rows("SELECT body FROM deliveries WHERE session_key = ?", MAIN)
        ]
        assert bodies == ["Status: cancelled\nResult: I have asked somebody\nNotes: The run was stopped."]


@pytest.mark.requirement("G18", "G19")
async def test_the_report_of_a_worker_whose_manager_is_deleted_goes_further_up_and_says_so(
    tmp_path: Path,
) -> None:
    tree = Tree()
    async with open_agents_fixture(
        make_agents_config(agents=NESTED), tmp_path, functions={"main": tree}
    ) as agents:
        manager = await under_way(tree, agents)
        worker = tasks(agents)["work"]["child_key"]
        assert await agents.operations.sessions.delete(OPERATOR, manager)
        await agents.wait_until_idle()
        reports = {
            row["provenance"]["sourceSessionKey"]: row["content"][0]["text"]
            for row in await agents.transcript()
            if row.get("provenance")
        }
        assert set(reports) == {manager, worker}
        assert reports[worker].startswith("Status: cancelled\n")
        assert f"'{manager}' requested this and no longer exists" in reports[worker]
        assert "is gone" not in reports[manager]


@pytest.mark.requirement("P6", "G17")
async def test_the_time_of_a_manager_runs_while_it_waits(tmp_path: Path) -> None:
    clock = ManualClock()
    tree = Tree()
    async with open_agents_fixture(
        make_agents_config(agents=NESTED), tmp_path, functions={"main": tree}, clock=clock
    ) as agents:
        await under_way(tree, agents, runTimeoutSeconds=60)
        clock.advance(seconds=61)
        tree.free.set()
        await agents.wait_until_idle()
        assert tasks(agents)["manage"]["outcome"] == "timeout"
        assert [prompt for prompt in tree.prompts if get_phase(prompt) == "wake"] == []


class Busy(Tree):
    """A manager that goes on working after it has spawned its worker, whose report would wake it."""

    announce = "parent"

    async def __call__(self, prompt: Prompt) -> AssistantMessage:
        if prompt.session_key != MAIN and get_phase(prompt) == "request" and get_tool_result(prompt):
            await asyncio.Event().wait()
        return await super().__call__(prompt)


@pytest.mark.requirement("P6", "G1", "G16", "G17")
@pytest.mark.parametrize("noticed", ["while it works", "by the sweeper", "after a restart"])
async def test_the_time_of_a_manager_is_that_of_its_workers_however_its_end_is_noticed(
    tmp_path: Path, noticed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its end and their stop are one commit: there is no moment for a crash between the two."""
    stops: list[list[dict[str, Any]]] = []
    asked: list[str] = []
    publish = LocalBus.publish

    def watched(bus: LocalBus, topic: str, event: Event) -> None:
        if isinstance(event, RunChanged) and event.state == "timeout":
            sql = "SELECT cancel_at FROM runs r JOIN tasks t ON t.id = r.id WHERE t.task = 'work'"
            stops.append(query_database(tmp_path / DATABASE, sql))
        if isinstance(event, StopRequested):
            asked.append(event.run_id)
        publish(bus, topic, event)

    monkeypatch.setattr(LocalBus, "publish", watched)
    played = noticed == "while it works"
    clock = SystemClock() if played else ManualClock()
    busy = Busy()
    functions = {"main": busy}
    async with open_agents_fixture(
        make_agents_config(agents=NESTED), tmp_path, functions=functions, clock=clock, timings=LASTING
    ) as agents:
        await agents.open_sessions(MAIN)
        seconds = 1 if played else 60
        said = await agents.use("sessions_spawn", task="manage", announce="parent", runTimeoutSeconds=seconds)
        await wait_for_event(busy.begun)
        if isinstance(clock, ManualClock):
            clock.advance(seconds=90 if noticed == "by the sweeper" else 0)
        if noticed != "after a restart":
            assert (await agents.wait_for_end(said["runId"])).state == "timeout"
            await agents.wait_until_idle()
    if isinstance(clock, ManualClock):
        clock.advance(seconds=90)
    async with open_agents_fixture(
        make_agents_config(agents=NESTED), tmp_path, functions=functions, clock=clock, timings=LASTING
    ) as agents:
        assert (await agents.wait_for_end(said["runId"])).state == "timeout"
        await agents.wait_until_idle()
        outcomes = {task: row["outcome"] for task, row in tasks(agents).items()}
        assert outcomes == {"manage": "timeout", "work": "cancelled"}
        assert all(row["cancel_at"] for rows in stops for row in rows)
        assert asked == [tasks(agents)["work"]["id"]]
        manager = said["childSessionKey"]
        assert marks(await agents.transcript(manager)) == ["subagent_result"]
        woken = [prompt for prompt in busy.prompts if prompt.run_id.startswith(("wake:", "note:"))]
        assert [prompt for prompt in woken if prompt.session_key == manager] == []


@pytest.mark.requirement("P4", "P5", "G16")
async def test_an_announcement_whose_time_is_over_stops_nothing(tmp_path: Path) -> None:
    """It may have waited behind other work of the sub-agent, which has nothing to do with it."""
    clock = ManualClock()
    managed, begun, working, free = (asyncio.Event() for _ in range(4))

    async def agent(prompt: Prompt) -> AssistantMessage:
        match get_last_user_text(prompt):
            case "manage":
                begun.set()
                await wait_for_event(managed)
            case "a second job" if get_tool_result(prompt) is None:
                return make_tool_calls("sessions_spawn", task="work", announce="parent")
            case "a second job" | "work":
                working.set()
                await wait_for_event(free)
            case _:
                pass
        return make_answer("done")

    functions = {"main": agent}
    async with open_agents_fixture(
        make_agents_config(agents=NESTED), tmp_path, functions=functions, clock=clock, timings=LASTING
    ) as agents:
        await agents.open_sessions(MAIN)
        manager = (await agents.use("sessions_spawn", task="manage"))["childSessionKey"]
        await wait_for_event(begun)
        await agents.say("a second job", manager)
        managed.set()
        await wait_for_event(working)
        clock.advance(seconds=91)

        async def over() -> bool:
            return bool(agents.rows("SELECT 1 FROM runs WHERE origin = 'announce' AND state = 'timeout'"))

        await agents.until(over)
        assert agents.rows("SELECT 1 FROM runs WHERE cancel_at IS NOT NULL") == []
        free.set()
        await agents.wait_until_idle()
        assert tasks(agents)["work"]["outcome"] == "ok"


@pytest.mark.requirement("G16", "P2")
async def test_a_run_that_was_stopped_spawns_nothing_more(tmp_path: Path) -> None:
    """Its call may be on the way when the stop has already taken what it had spawned before."""
    async with open_agents_fixture(make_agents_config(), tmp_path) as agents:
        run_id = (await agents.ask("say hello")).run_id
        caller = Caller.agent("main", MAIN)
        call = ToolRequest(caller=caller, run_id=run_id, call_id="late", arguments={"task": "work"})
        result = await agents.app.toolbox.tools["sessions_spawn"].invoke(call)
        assert "has ended or was stopped" in result.text
        assert agents.rows("SELECT 1 FROM tasks") == []


@pytest.mark.requirement("P6", "A2")
async def test_a_child_that_is_steered_has_no_more_time_than_before(tmp_path: Path) -> None:
    clock = ManualClock()
    nursery = Nursery()
    async with open_agents_fixture(
        make_agents_config(), tmp_path, functions={"main": nursery}, clock=clock
    ) as agents:
        await agents.open_sessions(MAIN)
        said = await agents.use("sessions_spawn", task="dig deep", runTimeoutSeconds=60)
        await wait_for_event(nursery.begun["dig deep"])
        (first,) = agents.rows("SELECT deadline_at FROM runs WHERE id = ?", said["runId"])
        await agents.use("subagents", action="steer", target="last", message="look up")
        (run,) = agents.rows("SELECT deadline_at FROM runs WHERE origin = 'steer'")
        assert run["deadline_at"] == first["deadline_at"]
        nursery.free["look up"].set()
        await agents.wait_until_idle()


@pytest.mark.requirement("G19", "P5")
async def test_a_requester_that_is_deleted_is_not_brought_back(tmp_path: Path) -> None:
    """It has no parent: the result of the task is on record, and nothing is posted to the chat."""
    helper = ScriptedAgent("done")
    config = make_agents_config(
        {"id": "main", "default": True, "subagents": {"allowAgents": ["helper"]}}, "helper"
    )
    group = "agent:main:discord:group:g1"
    async with open_agents_fixture(config, tmp_path, functions={"helper": helper}) as agents:
        await agents.open_sessions(group)
        await agents.use("sessions_spawn", group, task="work", agentId="helper")
        assert await agents.operations.sessions.delete(OPERATOR, group)
        await agents.wait_until_idle()
        assert agents.rows("SELECT * FROM sessions WHERE key = ?", group) == []
        assert tasks(agents)["work"]["outcome"] in {"ok", "cancelled"}
        assert tasks(agents)["work"]["phase"] == "settled"


@pytest.mark.requirement("P5", "G1")
async def test_a_report_that_waits_for_its_turn_is_not_lost_when_the_requester_is_stopped(
    tmp_path: Path,
) -> None:
    helper = Nursery()
    busy = asyncio.Event()

    async def main(prompt: Prompt) -> str:
        busy.set()
        await asyncio.Event().wait()
        return "never"

    config = make_agents_config(
        {"id": "main", "default": True, "subagents": {"allowAgents": ["helper"]}}, "helper"
    )
    async with open_agents_fixture(
        config, tmp_path, functions={"main": ScriptedAgent(main), "helper": helper}
    ) as agents:
        await agents.open_sessions(MAIN)
        said = await agents.use("sessions_spawn", task="dig deep", agentId="helper")
        await agents.say("hello")
        await wait_for_event(busy)
        helper.free["dig deep"].set()
        await agents.wait_for_end(said["runId"])

        async def reported() -> bool:
            return tasks(agents)["dig deep"]["phase"] == "settled"

        await agents.until(reported)
        await agents.operations.runs.stop(OPERATOR, MAIN)
        await agents.wait_until_idle()
        assert marks(await agents.transcript()) == ["subagent_result"]


# --- asked again ---


async def repeatable(
    agents: AgentsFixture, call_id: str, run_id: str = "run", **arguments: Any
) -> dict[str, Any]:
    """A call that is made again after a crash: the same one, although other things have changed since."""
    caller = Caller.agent("main", MAIN)
    call = ToolRequest(caller=caller, run_id=run_id, call_id=call_id, arguments=arguments)
    return (await agents.app.toolbox.tools["subagents"].invoke(call)).details


async def spawned(agents: AgentsFixture, nursery: Nursery, *jobs: str) -> None:
    for job in jobs:
        await agents.use("sessions_spawn", task=job, label=job)
        await wait_for_event(nursery.begun[job])


@pytest.mark.requirement("A2", "G3", "G16")
@pytest.mark.parametrize("target", ["last", "1", "all", "dig"])
async def test_a_repeated_kill_stops_no_other_child(tmp_path: Path, target: str) -> None:
    nursery = Nursery()
    async with open_agents_fixture(make_agents_config(), tmp_path, functions={"main": nursery}) as agents:
        await agents.open_sessions(MAIN)
        await spawned(agents, nursery, "dig 1")
        first = await repeatable(agents, "c", action="kill", target=target)
        assert first == {"status": "ok", "action": "kill", "killed": 1, "labels": ["dig 1"]}
        await spawned(agents, nursery, "dig 2")
        assert await repeatable(agents, "c", action="kill", target=target) == first
        nursery.free["dig 2"].set()
        await agents.wait_until_idle()
        assert {job: row["outcome"] for job, row in tasks(agents).items()} == {
            "dig 1": "cancelled",
            "dig 2": "ok",
        }
        over = await repeatable(agents, "d", action="kill", target="last")
        assert (over["status"], over["message"]) == ("done", "dig 2 has already finished.")
        await spawned(agents, nursery, "dig 3")
        assert await repeatable(agents, "d", action="kill", target="last") == over
        nursery.free["dig 3"].set()
        await agents.wait_until_idle()
        assert tasks(agents)["dig 3"]["outcome"] == "ok"


@pytest.mark.requirement("A2", "P5", "G3")
async def test_a_steer_that_is_repeated_is_the_same_run_of_the_same_child(tmp_path: Path) -> None:
    nursery = Nursery()
    async with open_agents_fixture(make_agents_config(), tmp_path, functions={"main": nursery}) as agents:
        await agents.open_sessions(MAIN)
        await spawned(agents, nursery, "dig 1")
        asked = {"action": "steer", "target": "last", "message": "look up"}
        first = await repeatable(agents, "c", **asked)
        assert (first["status"], first["label"]) == ("accepted", "dig 1")
        await wait_for_event(nursery.begun["look up"])
        await spawned(agents, nursery, "dig 2")
        assert await repeatable(agents, "c", **asked) == first
        for job in ("look up", "dig 2"):
            nursery.free[job].set()
        await agents.wait_until_idle()
        assert await repeatable(agents, "c", **asked) == first, "also when it has finished since"
        assert tasks(agents)["dig 2"]["result"] == "did dig 2"
        assert len(agents.rows("SELECT * FROM runs WHERE origin = 'steer'")) == 1


@pytest.mark.requirement("A2", "G3")
@pytest.mark.parametrize("run_id", [*(f"{prefix}x" for prefix in RESERVED_KEY_PREFIXES), "r" * 300])
async def test_a_child_is_steered_from_any_run_and_each_call_is_one_of_its_own(
    tmp_path: Path, run_id: str
) -> None:
    nursery = Nursery()
    async with open_agents_fixture(make_agents_config(), tmp_path, functions={"main": nursery}) as agents:
        await agents.open_sessions(MAIN)
        await spawned(agents, nursery, "dig 1")
        said: list[dict[str, Any]] = []
        for number, words in enumerate(("look up", "look down")):
            asked = {"action": "steer", "target": "dig 1", "message": words}
            said.append(await repeatable(agents, f"c{number}", run_id, **asked))
            await wait_for_event(nursery.begun[words])
        assert [answer["status"] for answer in said] == ["accepted"] * 2
        assert said[0]["runId"] != said[1]["runId"]
        nursery.free["look down"].set()
        await agents.wait_until_idle()
        assert tasks(agents)["look down"]["result"] == "did look down"


# --- many of them, and long ones ---

SECRET = "sk-abcdefghijklmnopqrstuvwxyz"


def multiplied(agents: AgentsFixture, count: int, **changes: object) -> None:
    """So many copies of the one task there is, with columns changed."""
    (row,) = agents.rows("SELECT * FROM tasks WHERE n = 1")
    columns = [name for name in row if name not in {"n", "id"}]
    kinds = {name: "BIGINT" if isinstance(value, int) else "TEXT" for name, value in changes.items()}
    values = [f"CAST(? AS {kinds[name]})" if name in changes else f"t.{name}" for name in columns]
    sql = (
        f"INSERT INTO tasks (id, {', '.join(columns)}) "  # noqa: S608 - names of columns
        "WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < CAST(? AS INTEGER)) "
        f"SELECT CAST(? AS TEXT) || n.i, {', '.join(values)} FROM tasks t, n WHERE t.n = 1"
    )
    agents.rows(sql, count, uuid.uuid4().hex, *(changes[name] for name in columns if name in changes))


@pytest.mark.requirement("A2", "G36", "G22")
async def test_a_list_has_the_beginning_of_long_texts_and_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = "word " * 50_000
    nursery = Nursery()
    async with open_agents_fixture(make_agents_config(), tmp_path, functions={"main": nursery}) as agents:
        await agents.open_sessions(MAIN)
        await spawned(agents, nursery, f"dig {SECRET}")
        nursery.free[f"dig {SECRET}"].set()
        await agents.wait_until_idle()
        # In the last one a mask is so short that the end of what is looked at is shown, which cuts a secret apart.
        cut = f"sk-{'a' * 400} {'x ' * 88}Bearer {SECRET[3:]}"
        for result in (f"key {SECRET} {long}", f"{'-' * 290} {SECRET} {long}", cut):
            agents.rows("UPDATE tasks SET result = ?, error = ?", result, result)
            (task,) = (await agents.use("subagents"))["recent"]
            for shown in (task["task"], task["result"], task["error"]):
                assert len(shown) <= 301
                assert SECRET[3:12] not in shown, shown
            assert task["result"].endswith("…")
        threads: set[int] = set()
        clear = sanitize.sanitize_for_people

        def cleared(text: str) -> str:
            threads.add(threading.get_ident())
            return clear(text)

        monkeypatch.setattr(sanitize, "sanitize_for_people", cleared)
        found = await agents.operations.subagents.list(OPERATOR, MAIN)
        assert threads == set(), "a list needs no report"
        report = await agents.operations.subagents.get_report(OPERATOR, found[0].run_id)
        assert report is not None and report.startswith("Status: ok\nResult: ")
        assert threads and threading.get_ident() not in threads


@pytest.mark.requirement("A2", "SEC5")
async def test_a_report_is_readable_with_access_to_the_requesting_session(tmp_path: Path) -> None:
    nursery = Nursery()
    long = "dig " + "deep " * 2000
    sections = {"tools": {"sessions": {"visibility": "tree"}, "agentToAgent": {"enabled": False}}}
    async with open_agents_fixture(
        make_agents_config("helper", **sections), tmp_path, functions={"main": nursery}
    ) as agents:
        await agents.open_sessions(MAIN, HELPER)
        said = await agents.use("sessions_spawn", task=long, announce="none")
        await wait_for_event(nursery.begun[long])
        me, other = Caller.agent("main", MAIN), Caller.agent("helper", HELPER)
        assert await agents.operations.subagents.get_report(me, said["runId"]) is None
        nursery.free[long].set()
        await agents.wait_until_idle()
        whole = await agents.operations.subagents.get_report(me, said["runId"])
        assert whole == f"Status: ok\nResult: did {long}", "it was not reported, and it is all there"
        for caller, run_id in ((other, said["runId"]), (me, "nothing")):
            with pytest.raises(NotFound, match="no sub-agent"):
                await agents.operations.subagents.get_report(caller, run_id)


@pytest.mark.requirement("A2", "G22")
async def test_a_list_of_many_is_bounded_and_says_what_was_cut(tmp_path: Path) -> None:
    nursery = Nursery()
    async with open_agents_fixture(make_agents_config(), tmp_path, functions={"main": nursery}) as agents:
        await agents.open_sessions(MAIN)
        await spawned(agents, nursery, "first")
        # Beyond the last two hundred: one at work is seen, one that has ended is not looked for.
        ended = {"phase": "settled", "settled_at": tasks(agents)["first"]["created_at"], "outcome": "ok"}
        multiplied(agents, 300, **ended, result="“" * 5000)
        found = await agents.invoke_tool("subagents")
        assert len(found.text.encode()) <= MAX_LIST_RESULT_BYTES
        said = found.details
        (active,) = said["active"]
        assert (active["label"], active["number"], said["total"]) == ("first", 201, 201)
        assert [task["number"] for task in said["recent"]] == list(range(1, len(said["recent"]) + 1))
        assert said["truncated"] and said["cut"] == {"active": 0, "recent": 200 - len(said["recent"])}
        assert said["cut"]["recent"] > 0
        killed = await agents.use("subagents", action="kill", target="9" * 5000)
        assert killed["code"] == "not_found"
        multiplied(agents, 150, task="“" * 5000, error="“" * 5000)
        found = await agents.invoke_tool("subagents")
        assert len(found.text.encode()) <= MAX_LIST_RESULT_BYTES
        assert found.details["recent"] == [] and found.details["cut"]["active"] > 0
        agents.rows("UPDATE tasks SET phase = 'settled' WHERE task <> 'first'")
        nursery.free["first"].set()
        await agents.wait_until_idle()


@pytest.mark.sqlite_only  # what its planner says
@pytest.mark.requirement("A2", "G22")
@pytest.mark.parametrize(
    ("name", "indexes"),
    [("of_requester", {"tasks_under_way", "tasks_of"}), ("last_report_during_run", {"tasks_of"})],
)
async def test_what_a_session_has_spawned_is_read_by_index_and_not_as_a_whole(
    tmp_path: Path, name: str, indexes: set[str]
) -> None:
    async with open_agents_fixture(make_agents_config(), tmp_path) as agents:
        bare = re.sub(r":\w+", "1", getattr(tasks_sql, name).text)
        plan = [row["detail"] for row in agents.rows(f"EXPLAIN QUERY PLAN {bare}")]
        used = {step.split("USING INDEX ")[1].split()[0] for step in plan if step.startswith("SEARCH tasks")}
        assert used == indexes, plan
        inner = re.findall(r"\(SELECT [^()]* FROM tasks [^()]*\)", bare)
        assert len(inner) == len(indexes)
        for piece in inner:
            steps = [row["detail"] for row in agents.rows(f"EXPLAIN QUERY PLAN {piece[1:-1]}")]
            assert "LIMIT" in piece and len(steps) == 1, "sorted by the index, and no further than the limit"
        assert not [step for step in plan if re.match(r"SCAN (tasks|s|r)\b", step)], plan


@pytest.mark.requirement("A2")
async def test_what_has_reported_while_a_turn_went_on_counts_for_its_wait(tmp_path: Path) -> None:
    """The child has settled before the yield: there is one wake, behind its report."""
    nursery = Nursery()
    woken: list[str] = []

    async def main(prompt: Prompt) -> AssistantMessage:
        if get_phase(prompt) == "wake":
            woken.append(prompt.run_id)
            return make_answer("woken")
        result = get_tool_result(prompt)
        if result is None:
            return make_tool_calls("sessions_spawn", task="dig", agentId="helper")
        if "waitFor" in result:
            return make_answer(".")
        await agents.until(settled)
        return make_tool_calls("sessions_yield")

    async def settled() -> bool:
        return [row["phase"] for row in tasks(agents).values()] == ["settled"]

    nursery.free["dig"].set()
    config = make_agents_config(
        {"id": "main", "default": True, "subagents": {"allowAgents": ["helper"]}}, "helper"
    )
    async with open_agents_fixture(config, tmp_path, functions={"main": main, "helper": nursery}) as agents:
        await agents.ask("go")
        await agents.wait_until_idle()
        assert len(woken) == 1
        assert marks(await agents.transcript()) == ["subagent_result", "wake"]


@pytest.mark.requirement("G25", "G18")
async def test_who_waits_for_what_it_has_spawned_does_not_begin_anew(tmp_path: Path) -> None:
    """The report would come to a conversation that never asked for it."""
    clock = ManualClock()
    nursery = Nursery("dig deep")
    config = make_agents_config(session={"idleMinutes": 30})
    async with open_agents_fixture(
        config, tmp_path, functions={"main": nursery}, clock=clock, timings=LASTING
    ) as agents:
        await agents.ask("find out for me")
        await wait_for_event(nursery.begun["dig deep"])
        clock.advance(seconds=31 * 60)
        nursery.jobs = ()
        await agents.ask("are you still at it?")
        nursery.free["dig deep"].set()
        await agents.wait_until_idle()
        assert "find out for me" in [entry.get("content") for entry in await agents.transcript()]
