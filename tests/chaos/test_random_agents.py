"""Fifty agents under random schedules and real kills: nothing is lost or repeated, and no agent is held up.

What is checked is read from the store, as in the rest of the crash suite. `ANTIPHON_SOCIETY_SECONDS=600` goes on
with further seeds for that long.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from itertools import count, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from antiphon.messages import AssistantMessage, ToolResult
from antiphon.runtimes import Prompt
from chaos import verify
from chaos.harness import KILLED, expire_leases, get_store_arguments
from support import random_agents
from support.agents_fixture import (
    HELPER,
    AgentsFixture,
    ScriptedAgent,
    get_phase,
    make_agents_config,
    open_agents_fixture,
)
from support.app_fixture import BOUND, MAIN, make_answer, make_tool_calls
from support.random_agents import AGENTS, CONFIG, get_main_key
from support.store_snapshot import Row, StoreSnapshot

KILLS = 6
MOMENTS = 30, 200  # calls around commits after which a life may end
HELD = (
    5_000  # milliseconds for which a lane with work may stand still: a restart on a busy machine, and no wait
)
SECONDS = float(os.environ.get("ANTIPHON_SOCIETY_SECONDS") or 0)
ENDS = {"delivered", "blocked", "ambiguous", "expired", "dead"}  # of a delivery


@contextmanager
def process(
    state_dir: Path, seed: int, script: str = random_agents.__file__
) -> Generator[Callable[[int | None], int]]:
    """Something that lives one life after the other; given when it is to be killed, how the life ended."""
    tests = Path(random_agents.__file__).parent.parent
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tests), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, script, str(state_dir), str(seed), *get_store_arguments(state_dir)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as server:
        assert server.stdin and server.stdout
        given, said = server.stdin, server.stdout

        def live(kill: int | None) -> int:
            given.write(f"{kill or ''}\n")
            given.flush()
            code = int(said.readline())
            if code == KILLED:
                expire_leases(state_dir)
            return code

        try:
            yield live
        finally:
            given.close()
            server.wait(BOUND)


def suffer(home: Path, seed: int) -> StoreSnapshot:
    """One society, killed again and again and then left to work everything off; what is in its book."""
    rng = random.Random(seed)
    state_dir = home / f"society-{seed}"
    died = 0
    with process(state_dir, seed) as live:
        while died < KILLS:
            code = live(rng.randint(*MOMENTS))
            assert code == KILLED, f"seed {seed}: a life ended with {code} after {died} kills"
            died += 1
        assert live(None) == 0, f"seed {seed}: the last life did not end well"
    sent = [planned.key for planned in random_agents.plan_messages(seed)]
    found = verify.always(state_dir, sent)
    snapshot = StoreSnapshot(state_dir)
    wrong = [
        *found,
        *lost(snapshot),
        *twice(snapshot),
        *order(snapshot),
        *held(snapshot),
        *verify.out_of_turn(snapshot, sent),
    ]
    assert not wrong, f"seed {seed}:\n" + "\n".join(wrong)
    return snapshot


@pytest.mark.requirement("G1", "G2", "G3", "G5", "G9", "G12", "G13", "S5", "S6", "S9", "P4", "P5")
@pytest.mark.timeout(120 + 2 * SECONDS)
def test_fifty_agents_talk_and_spawn_at_random_and_are_killed_in_between(tmp_path: Path) -> None:
    until_ = time.monotonic() + SECONDS
    for seed in count(1):
        snapshot = suffer(tmp_path, seed)
        # It was worth it: every kind of step happened, and waits were answered.
        assert {run["origin"] for run in snapshot.runs} >= {
            "chat",
            "sessions_send",
            "reply-back",
            "announce",
            "sessions_spawn",
            "note",
            "wake",
        }
        assert {call.told.get("status") for call in asked(snapshot)} >= {"ok", "accepted", "timeout"}
        if time.monotonic() >= until_:
            break


# --- what must be so ---


class Asked(NamedTuple):
    """A call for another session."""

    tool: str
    words: str
    told: dict[str, Any]
    """What it answered; nothing if its run was given up, and then it is unknown whether it had its effect."""


def asked(snapshot: StoreSnapshot) -> list[Asked]:
    words = {"sessions_send": "message", "sessions_spawn": "task"}
    return [
        Asked(
            call.name, call.arguments[words[call.name]], {} if call.interrupted else json.loads(call.answer)
        )
        for run in snapshot.runs
        for call in snapshot.calls(run)
        if call.name in words
    ]


def lost(snapshot: StoreSnapshot) -> list[str]:
    """All accepted work has ended with the expected text."""
    wrong = [f"{run['id']} is {run['state']}" for run in snapshot.runs if run["ended_at"] is None]
    wrong += [
        f"{s['key']} is {s['state']}" for s in snapshot.sessions if s["state"] != "idle" or s["yielded"]
    ]
    wrong += [f"owner {owner['id']} is still there" for owner in snapshot.owners]
    wrong += [f"{d['key']} is {d['state']}" for d in snapshot.deliveries if d["state"] not in ENDS]
    for row in (*snapshot.exchanges, *snapshot.tasks):
        if row["phase"] != "settled" or row["announced"] in (None, "pending"):
            wrong.append(f"{row['id']} is {row['phase']}, {row['announced']}")
    said = {row["id"]: words for row, words in begun(snapshot)}
    for call in asked(snapshot):
        if call.told and said.get(call.told.get("runId", "")) != (
            call.words if "runId" in call.told else None
        ):
            wrong.append(f"{call.tool} answered {call.told}")
    return wrong + [line for row in snapshot.exchanges for line in _announced(snapshot, row)]


def begun(snapshot: StoreSnapshot) -> list[tuple[Row, str]]:
    """Every exchange and every task, with the words that began it."""
    return [(row, row["message"]) for row in snapshot.exchanges] + [
        (row, row["task"]) for row in snapshot.tasks
    ]


def _announced(snapshot: StoreSnapshot, exchange: Row) -> list[str]:
    """An exchange that was answered is announced in the words of its last step, unless they are a token."""
    step = snapshot.run(f"announce:{exchange['id']}")
    answered = bool((snapshot.run(exchange["id"]) or {}).get("reply"))
    if (step is not None) != (answered and exchange["announce"] == "target"):
        return [f"exchange {exchange['id']} was {answered=}, and its announce step is {step is not None}"]
    posted = [d for d in snapshot.deliveries if d["exchange"] == exchange["n"]]
    wanted = [step["reply"].strip()] if step and step["reply"] != "ANNOUNCE_SKIP" else []
    bodies = [delivery["body"] for delivery in posted]
    return [] if bodies == wanted else [f"exchange {exchange['id']} posted {bodies}, not {wanted}"]


def twice(snapshot: StoreSnapshot) -> list[str]:
    """Every script has been heard by one session, once; every call has led to one thing, and nothing else has."""
    wrong = [f"{what} {times} times" for what, times in _counted(snapshot) if times > 1]
    heard = Counter(_script(message) for message in snapshot.messages)
    del heard[None]
    wrong += [f"{words!r} was heard {times} times" for words, times in heard.items() if times > 1]
    calls = Counter(call.words for call in asked(snapshot))
    for row, words in begun(snapshot):
        if (calls[words], heard[words]) != (1, 1):
            wrong.append(f"{row['id']} was asked for {calls[words]} times and heard {heard[words]} times")
    return wrong


def _script(message: Row) -> str | None:
    """What was said to a session for it to follow, if that is what it is."""
    if message["role"] != "user" or "\nnumber " not in message["json"]["content"]:
        return None
    origin: dict[str, str] = message["json"].get("provenance", {})
    return None if origin.get("kind") == "announce_step" else message["json"]["content"]


def _counted(snapshot: StoreSnapshot) -> Iterable[tuple[str, int]]:
    yield from Counter(f"run {run['id']}" for run in snapshot.runs).items()
    yield from Counter(f"delivery {row['key']}" for row in snapshot.deliveries).items()
    yield from Counter(f"entry {message['entry']}" for message in snapshot.messages).items()
    yield from Counter(f"words {words}" for _, words in begun(snapshot)).items()
    notes = [message["json"] for message in snapshot.messages if "provenance" in message["json"]]
    yield from Counter(
        f"report of {note['provenance']['sourceSessionKey']}"
        for note in notes
        if note["provenance"]["kind"] == "subagent_result"
    ).items()


def lanes(snapshot: StoreSnapshot) -> list[list[Row]]:
    """The runs of each session, one after the other."""
    return [snapshot.lane(session) for session in snapshot.sessions]


def order(snapshot: StoreSnapshot) -> list[str]:
    """First come, first served, and one at a time."""
    return [
        f"{later['id']} did not wait for {earlier['id']}"
        for lane in lanes(snapshot)
        for earlier, later in pairwise(lane)
        if later["first_seq"] != earlier["last_seq"] + 1 or later["started_at"] < earlier["ended_at"]
    ]


def held(snapshot: StoreSnapshot) -> list[str]:
    """No run waits longer than the work before it in its own lane takes, with any waits between other lanes."""
    wrong: list[str] = []
    for lane in lanes(snapshot):
        for place, run in enumerate(lane):
            work = sum(
                max(0, ahead["ended_at"] - max(ahead["started_at"], run["created_at"]))
                for ahead in lane[:place]
            )
            stood = run["started_at"] - run["created_at"] - work
            if stood > HELD:
                wrong.append(f"the lane of {run['id']} stood still for {stood} ms")
    return wrong


# --- waiting ---


@pytest.mark.requirement("G12", "S4")
@pytest.mark.anyio
async def test_forty_agents_that_wait_for_one_delay_no_other(tmp_path: Path) -> None:
    """More than there are slots for anything; the others talk, spawn and wait as if nothing were."""
    free = asyncio.Event()

    async def thinking(_: object) -> str:
        await asyncio.wait_for(free.wait(), 3 * BOUND)
        return "at last"

    last, waiters, others = AGENTS[-1], AGENTS[:40], AGENTS[40:49]
    async with open_agents_fixture(CONFIG, tmp_path, functions={last: ScriptedAgent(thinking)}) as agents:
        await agents.open_sessions(*map(get_main_key, AGENTS))
        runs = [
            await agents.say(_sending(last, "hello", wait=3 * BOUND), get_main_key(agent))
            for agent in waiters
        ]
        await agents.until(lambda: _waiting(agents, len(waiters)))
        for agent, other in pairwise(others):
            view = await agents.ask(_sending(other, "say hi", wait=BOUND), get_main_key(agent))
            assert json.loads(view.reply or "")["reply"] == "hi"
        spawned = await agents.call_tool(
            "sessions_spawn", get_main_key(others[0]), task="say here", announce="none"
        )
        assert (await agents.wait_for_end(spawned["runId"])).reply == "here"
        # Who waits is still written to, and is next when its wait is over.
        sent = await agents.call_tool(
            "sessions_send",
            get_main_key(others[0]),
            sessionKey=get_main_key(waiters[0]),
            message="say me",
            timeoutSeconds=0,
        )
        assert sent["status"] == "accepted"
        free.set()
        for run in runs:
            reply = json.loads((await agents.wait_for_end(run)).reply or "")
            assert (reply["status"], reply["reply"]) == ("ok", "at last")
        assert (await agents.wait_for_end(sent["runId"])).reply == "me"
        await agents.wait_until_idle()


@pytest.mark.requirement("G1", "S6", "A2")
@pytest.mark.anyio
async def test_who_yields_when_its_sub_agent_has_woken_it_already_answers_all_the_same(
    tmp_path: Path,
) -> None:
    """What the society found under kills: the exchange had nothing left that could move it."""
    opened: list[AgentsFixture] = []

    async def reported() -> bool:
        return bool(opened[0].rows("SELECT 1 FROM tasks WHERE phase = 'settled'"))

    async def speak(prompt: Prompt) -> AssistantMessage:
        if ":subagent:" in prompt.session_key or get_phase(prompt) != "request":
            return make_answer("in the end")
        if not isinstance(prompt.messages[-1], ToolResult):
            return make_tool_calls("sessions_spawn", task="go", announce="parent")
        await opened[0].until(reported)
        return make_tool_calls("sessions_yield")

    async with open_agents_fixture(
        make_agents_config("helper"), tmp_path, functions={"helper": ScriptedAgent(speak)}
    ) as agents:
        opened.append(agents)
        await agents.open_sessions(MAIN, HELPER)
        await agents.use(
            "sessions_send", MAIN, sessionKey=HELPER, message="go", replyBack=0, timeoutSeconds=0
        )
        await agents.wait_until_idle()
        (exchange,) = agents.rows("SELECT * FROM exchanges")
        assert (exchange["announced"], exchange["latest_reply"]) == ("delivered", "in the end")


def _sending(agent: str, message: str, wait: float) -> str:
    arguments = {
        "sessionKey": get_main_key(agent),
        "message": message,
        "timeoutSeconds": wait,
        "replyBack": 0,
        "announce": "none",
    }
    return f"call sessions_send {json.dumps(arguments)}"


async def _waiting(agents: AgentsFixture, number: int) -> bool:
    return agents.rows("SELECT count(*) AS n FROM waits")[0]["n"] == number
