"""subagents and sessions_yield: seeing, stopping and redirecting what was spawned, and waiting for all of it."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from troupe import HELPER, MAIN, OPERATOR, Player, Troupe, cast_of, heard, house, phase_of, result_in, until

from antiphon.clock import ManualClock
from antiphon.messages import Assistant
from antiphon.runtimes import Prompt
from stage import calls, soon, text

pytestmark = pytest.mark.anyio

NESTED = {"defaults": {"subagents": {"maxSpawnDepth": 2}}}


class Nursery:
    """An agent whose children each work until they are told how to end, by the words of their task."""

    def __init__(self, *jobs: str, how: str = "all") -> None:
        self.jobs, self.how = jobs, how
        self.free: dict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self.begun: dict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self.awake: list[Prompt] = []

    async def __call__(self, prompt: Prompt) -> Assistant:
        if prompt.session_key == MAIN:
            return self._parent(prompt)
        job = heard(prompt)
        if phase_of(prompt) == "announce":
            return text("ANNOUNCE_SKIP" if "skip" in job else "" if "mute" in job else f"told of {job[-4:]}")
        self.begun[job].set()
        await soon(self.free[job])
        if "fail" in job:
            raise RuntimeError(job)
        return text("" if "empty" in job else f"did {job}")

    def _parent(self, prompt: Prompt) -> Assistant:
        if phase_of(prompt) == "wake":
            self.awake.append(prompt)
            return text("all in")
        result = result_in(prompt)
        if result is None:
            spawns = [calls("sessions_spawn", task=job, label=job).content[0] for job in self.jobs]
            return Assistant(content=spawns, timestamp=1)
        return (
            calls("sessions_yield", waitFor=self.how, message="waiting")
            if "waitFor" not in result
            else text(".")
        )


def marks(transcript: list[dict[str, Any]]) -> list[str]:
    """What a transcript has of reports and wakes, in order."""
    kinds = [row.get("provenance", {}).get("kind") for row in transcript]
    return [kind for kind in kinds if kind in {"subagent_result", "wake"}]


def tasks(troupe: Troupe) -> dict[str, dict[str, Any]]:
    return {row["task"]: row for row in troupe.rows("SELECT * FROM tasks ORDER BY n")}


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
    async with house(cast_of(), tmp_path, functions={"main": nursery}) as troupe:
        view = await troupe.ask("go")
        assert (view.state, view.reply) == ("ok", "waiting")
        for job in chance.sample(jobs, len(jobs)):
            await soon(nursery.begun[job])
            if "kill" in job:
                await troupe.use("subagents", action="kill", target=job)
            else:
                nursery.free[job].set()
            if chance.random() < 0.5:
                await asyncio.sleep(0)
        await troupe.quiet()
        assert marks(await troupe.transcript()) == ["subagent_result"] * len(jobs) + ["wake"]
        (woken,) = nursery.awake
        assert heard(woken).startswith("The sub-agents you were waiting for have reported.")
        for job in jobs:
            outcome = {"fail": "error", "empty": "incomplete", "kill": "cancelled"}.get(job.split()[0], "ok")
            assert tasks(troupe)[job]["outcome"] == outcome
        shown = [str(message) for message in woken.messages if "Status: " in str(message)]
        assert len(shown) == len(jobs), "the model sees every report when it is woken"


@pytest.mark.requirement("A2")
async def test_waiting_for_any_of_them_is_one_wake_after_the_first(tmp_path: Path) -> None:
    nursery = Nursery("first", "second", how="any")
    async with house(cast_of(), tmp_path, functions={"main": nursery}) as troupe:
        await troupe.ask("go")
        nursery.free["second"].set()

        async def woken() -> bool:
            return bool(nursery.awake)

        await until(woken)
        nursery.free["first"].set()
        await troupe.quiet()
        assert marks(await troupe.transcript()) == ["subagent_result", "wake", "subagent_result"]


@pytest.mark.requirement("A2", "G40")
async def test_children_that_stay_silent_wake_too(tmp_path: Path) -> None:
    nursery = Nursery("skip it", "skip that")
    async with house(cast_of(), tmp_path, functions={"main": nursery}) as troupe:
        await troupe.ask("go")
        for job in nursery.jobs:
            nursery.free[job].set()
        await troupe.quiet()
        assert marks(await troupe.transcript()) == ["wake"]
        assert {row["announced"] for row in tasks(troupe).values()} == {"skipped"}


@pytest.mark.requirement("A2")
async def test_with_nobody_to_wait_for_the_turn_goes_on(tmp_path: Path) -> None:
    async with house(cast_of(), tmp_path) as troupe:
        view = await troupe.ask("call sessions_yield {}\nsay going on")
        assert view.reply == "going on"
        (result,) = [row for row in await troupe.transcript() if row["role"] == "toolResult"]
        assert (result["details"]["status"], result["details"]["code"]) == ("error", "conflict")
        assert troupe.rows("SELECT yielded FROM sessions") == [{"yielded": None}]


@pytest.mark.requirement("A2", "G2", "G9")
async def test_a_wait_for_children_outlives_the_house(tmp_path: Path) -> None:
    nursery = Nursery("one 1", "two 2")
    async with house(cast_of(), tmp_path, functions={"main": nursery}) as troupe:
        await troupe.ask("go")
        await soon(nursery.begun["two 2"])
    for job in nursery.jobs:
        nursery.free[job].set()
    async with house(cast_of(), tmp_path, functions={"main": nursery}) as troupe:
        await troupe.quiet()
        assert marks(await troupe.transcript()) == ["subagent_result", "subagent_result", "wake"]
        assert len(nursery.awake) == 1


@pytest.mark.requirement("G16", "P5")
async def test_stopping_the_parent_stops_its_children_and_wakes_nobody(tmp_path: Path) -> None:
    nursery = Nursery("one 1", "two 2")
    async with house(cast_of(), tmp_path, functions={"main": nursery}) as troupe:
        await troupe.ask("go")
        for job in nursery.jobs:
            await soon(nursery.begun[job])
        await troupe.operations.stop(OPERATOR, MAIN)
        await troupe.quiet()
        assert marks(await troupe.transcript()) == ["subagent_result", "subagent_result"]
        assert {row["outcome"] for row in tasks(troupe).values()} == {"cancelled"}
        assert nursery.awake == []


# --- the tool ---


@pytest.mark.requirement("A2", "G39")
async def test_the_list_shows_who_is_at_work_and_who_has_reported(tmp_path: Path) -> None:
    nursery = Nursery("work 1", "work 2")
    async with house(cast_of("helper"), tmp_path, functions={"main": nursery}) as troupe:
        await troupe.ask("go")
        await soon(nursery.begun["work 2"])
        nursery.free["work 1"].set()

        async def reported() -> bool:
            return tasks(troupe)["work 1"]["phase"] == "settled"

        await until(reported)
        said = await troupe.use("subagents")
        assert (said["status"], said["total"]) == ("ok", 2)
        (active,), (recent,) = said["active"], said["recent"]
        assert (active["label"], active["phase"], active["number"]) == ("work 2", "running", 1)
        assert "outcome" not in active and active["lastActivityAt"] >= active["createdAt"]
        assert (recent["label"], recent["outcome"], recent["result"]) == ("work 1", "ok", "did work 1")
        assert recent["endedAt"] >= recent["createdAt"]
        await troupe.found(HELPER)
        assert (await troupe.use("subagents", HELPER))["total"] == 0, "only one's own"
        nursery.free["work 2"].set()
        await troupe.quiet()


@pytest.mark.requirement("A2", "P4", "G16")
@pytest.mark.parametrize("name", ["label", "childSessionKey", "runId", "number", "last", "beginning", "all"])
async def test_a_child_is_stopped_by_any_of_its_names_and_reported_as_cancelled(
    tmp_path: Path, name: str
) -> None:
    nursery = Nursery("dig deep")
    async with house(cast_of(), tmp_path, functions={"main": nursery}) as troupe:
        await troupe.ask("go")
        await soon(nursery.begun["dig deep"])
        (child,) = (await troupe.use("subagents"))["active"]
        target = {"last": "last", "all": "all", "beginning": "DIG"}.get(name) or str(child[name])
        said = await troupe.use("subagents", action="kill", target=target)
        assert (said["status"], said["killed"], said["labels"]) == ("ok", 1, ["dig deep"])
        await troupe.quiet()
        (body,) = [row["body"] for row in troupe.rows("SELECT body FROM deliveries")]
        assert body == "Status: cancelled\nResult: none\nNotes: The run was stopped."
        again = await troupe.use("subagents", action="kill", target="dig deep")
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
    async with house(cast_of(), tmp_path, functions={"main": nursery}) as troupe:
        await troupe.ask("go")
        said = await troupe.use("subagents", **arguments)
        assert (said["status"], said["code"]) == ("error", code)
        for job in nursery.jobs:
            nursery.free[job].set()
        await troupe.quiet()
        assert {row["outcome"] for row in tasks(troupe).values()} == {"ok"}


@pytest.mark.requirement("A2", "SEC5", "SEC6")
async def test_a_child_cannot_stop_or_steer_its_siblings(tmp_path: Path) -> None:
    tools = {"subagents": {"tools": {"alsoAllow": ["subagents"]}}}
    nursery = Nursery("one 1", "two 2")
    async with house(cast_of(tools=tools), tmp_path, functions={"main": nursery}) as troupe:
        await troupe.ask("go")
        one, two = (tasks(troupe)[job]["child_key"] for job in nursery.jobs)
        for action in ("kill", "steer"):
            said = await troupe.use("subagents", one, action=action, target=two, message="say x")
            assert (said["status"], said["code"]) == ("error", "not_found")
        for job in nursery.jobs:
            nursery.free[job].set()
        await troupe.quiet()
        assert tasks(troupe)["two 2"]["outcome"] == "ok"


@pytest.mark.requirement("A2", "P5")
async def test_a_child_that_is_steered_keeps_its_task_and_reports_once(tmp_path: Path) -> None:
    nursery = Nursery("dig deep")
    async with house(cast_of(), tmp_path, functions={"main": nursery}) as troupe:
        await troupe.ask("go")
        await soon(nursery.begun["dig deep"])
        before = tasks(troupe)["dig deep"]
        nursery.free["look up"].set()
        said = await troupe.use("subagents", action="steer", target="dig deep", message="look up")
        assert (said["status"], said["label"]) == ("accepted", "dig deep")
        await troupe.quiet()
        after = tasks(troupe)["dig deep"]
        assert (after["id"], after["child_key"]) == (before["id"], before["child_key"])
        assert (after["outcome"], after["result"]) == ("ok", "did look up")
        assert (await troupe.operations.run(OPERATOR, before["id"])).state == "cancelled"
        assert marks(await troupe.transcript()) == ["subagent_result", "wake"]
        assert len(troupe.rows("SELECT * FROM deliveries")) == 1


# --- children of children ---


class Tree:
    """`main` spawns a manager, the manager a worker; the worker works until it is let go."""

    def __init__(self) -> None:
        self.free, self.begun = asyncio.Event(), asyncio.Event()
        self.prompts: list[Prompt] = []

    async def __call__(self, prompt: Prompt) -> Assistant:
        self.prompts.append(prompt)
        if prompt.session_key == MAIN:
            return text("thanks")
        if phase_of(prompt) in {"announce", "wake"}:
            return text("the whole of it" if phase_of(prompt) == "wake" else "in a word")
        if heard(prompt) == "work":
            self.begun.set()
            await soon(self.free)
            return text("worked")
        return text("I have asked somebody") if result_in(prompt) else calls("sessions_spawn", task="work")


@pytest.mark.requirement("G18", "G19", "P5")
async def test_a_manager_reports_after_its_workers_and_they_report_to_it(tmp_path: Path) -> None:
    tree = Tree()
    async with house(cast_of(agents=NESTED), tmp_path, functions={"main": tree}) as troupe:
        await troupe.found(MAIN)
        manager = (await troupe.use("sessions_spawn", task="manage"))["childSessionKey"]
        await soon(tree.begun)

        async def waiting() -> bool:
            return tasks(troupe)["manage"]["phase"] == "waiting"

        await until(waiting)
        assert (await troupe.use("subagents"))["active"][0]["phase"] == "waiting"
        tree.free.set()
        await troupe.quiet()
        assert marks(await troupe.transcript(manager)) == ["subagent_result", "wake"]
        assert marks(await troupe.transcript()) == ["subagent_result"]
        assert tasks(troupe)["manage"]["result"] == "the whole of it"
        assert tasks(troupe)["work"]["requester_key"] == manager


async def under_way(tree: Tree, troupe: Troupe) -> str:
    """A manager that has ended its turn and waits for its worker."""
    await troupe.found(MAIN)
    manager = (await troupe.use("sessions_spawn", task="manage"))["childSessionKey"]
    await soon(tree.begun)

    async def waiting() -> bool:
        return tasks(troupe)["manage"]["phase"] == "waiting"

    await until(waiting)
    return manager


@pytest.mark.requirement("A2", "G16", "P4")
async def test_a_manager_that_is_stopped_while_it_waits_is_cancelled_with_its_workers(tmp_path: Path) -> None:
    tree = Tree()
    async with house(cast_of(agents=NESTED), tmp_path, functions={"main": tree}) as troupe:
        await under_way(tree, troupe)
        said = await troupe.use("subagents", action="kill", target="last")
        assert said["killed"] == 1
        await troupe.quiet()
        assert {row["outcome"] for row in tasks(troupe).values()} == {"cancelled"}
        assert marks(await troupe.transcript()) == ["subagent_result"]
        bodies = [
            row["body"] for row in troupe.rows("SELECT body FROM deliveries WHERE session_key = ?", MAIN)
        ]
        assert bodies == ["Status: cancelled\nResult: I have asked somebody\nNotes: The run was stopped."]


@pytest.mark.requirement("G18", "G19")
async def test_the_report_of_a_worker_whose_manager_is_deleted_goes_further_up_and_says_so(
    tmp_path: Path,
) -> None:
    tree = Tree()
    async with house(cast_of(agents=NESTED), tmp_path, functions={"main": tree}) as troupe:
        manager = await under_way(tree, troupe)
        worker = tasks(troupe)["work"]["child_key"]
        assert await troupe.operations.delete(OPERATOR, manager)
        await troupe.quiet()
        reports = {
            row["provenance"]["sourceSessionKey"]: row["content"][0]["text"]
            for row in await troupe.transcript()
            if row.get("provenance")
        }
        assert set(reports) == {manager, worker}
        assert reports[worker].startswith("Status: cancelled\n")
        assert f"'{manager}' asked for this and is gone" in reports[worker]
        assert "is gone" not in reports[manager]


@pytest.mark.requirement("P6", "G17")
async def test_the_time_of_a_manager_runs_while_it_waits(tmp_path: Path) -> None:
    clock = ManualClock()
    tree = Tree()
    async with house(cast_of(agents=NESTED), tmp_path, functions={"main": tree}, clock=clock) as troupe:
        await troupe.found(MAIN)
        await troupe.use("sessions_spawn", task="manage", runTimeoutSeconds=60)
        await soon(tree.begun)

        async def waiting() -> bool:
            return tasks(troupe)["manage"]["phase"] == "waiting"

        await until(waiting)
        clock.advance(seconds=61)
        tree.free.set()
        await troupe.quiet()
        assert tasks(troupe)["manage"]["outcome"] == "timeout"
        assert [prompt for prompt in tree.prompts if phase_of(prompt) == "wake"] == []


@pytest.mark.requirement("P6", "A2")
async def test_a_child_that_is_steered_has_no_more_time_than_before(tmp_path: Path) -> None:
    clock = ManualClock()
    nursery = Nursery()
    async with house(cast_of(), tmp_path, functions={"main": nursery}, clock=clock) as troupe:
        await troupe.found(MAIN)
        said = await troupe.use("sessions_spawn", task="dig deep", runTimeoutSeconds=60)
        await soon(nursery.begun["dig deep"])
        (first,) = troupe.rows("SELECT deadline_at FROM runs WHERE id = ?", said["runId"])
        await troupe.use("subagents", action="steer", target="last", message="look up")
        (run,) = troupe.rows("SELECT deadline_at FROM runs WHERE origin = 'steer'")
        assert run["deadline_at"] == first["deadline_at"]
        nursery.free["look up"].set()
        await troupe.quiet()


@pytest.mark.requirement("G19", "P5")
async def test_a_requester_that_is_deleted_is_not_brought_back(tmp_path: Path) -> None:
    """Nobody is above it: what came of the task is on record, and the chat hears nothing."""
    helper = Player("done")
    config = cast_of({"id": "main", "default": True, "subagents": {"allowAgents": ["helper"]}}, "helper")
    group = "agent:main:discord:group:g1"
    async with house(config, tmp_path, functions={"helper": helper}) as troupe:
        await troupe.found(group)
        await troupe.use("sessions_spawn", group, task="work", agentId="helper")
        assert await troupe.operations.delete(OPERATOR, group)
        await troupe.quiet()
        assert troupe.rows("SELECT * FROM sessions WHERE key = ?", group) == []
        assert tasks(troupe)["work"]["outcome"] in {"ok", "cancelled"}
        assert tasks(troupe)["work"]["phase"] == "settled"


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

    config = cast_of({"id": "main", "default": True, "subagents": {"allowAgents": ["helper"]}}, "helper")
    async with house(config, tmp_path, functions={"main": Player(main), "helper": helper}) as troupe:
        await troupe.found(MAIN)
        said = await troupe.use("sessions_spawn", task="dig deep", agentId="helper")
        await troupe.say("hello")
        await soon(busy)
        helper.free["dig deep"].set()
        await troupe.ended(said["runId"])

        async def reported() -> bool:
            return tasks(troupe)["dig deep"]["phase"] == "settled"

        await until(reported)
        await troupe.operations.stop(OPERATOR, MAIN)
        await troupe.quiet()
        assert marks(await troupe.transcript()) == ["subagent_result"]
