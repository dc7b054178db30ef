"""Whatever ends a command, no process of its tree is left within 2 s, on this machine and in the sandbox.

The tree ignores signals, leaves its session, has ended parents and a cleared environment, and computes. A gateway that
stops is no end: its keeper and the commands go on (`test_commands`). The end of a keeper is one.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil
import pytest

from antiphon.config import Config
from antiphon.operations.types import SessionPatch
from antiphon.workspace import sandbox_backend
from support.agents_fixture import OPERATOR, AgentsFixture, make_agents_config
from support.keepers import find_keeper, find_marked, wait_until_true
from tools.test_commands import configure, find_rows, find_wakes, opened

pytestmark = [pytest.mark.anyio, pytest.mark.requirement("AT2", "AT4")]

GONE_WITHIN_SECONDS = 2.0
"""After a stop was asked for, or the time of a timeout was over."""
SESSION = "agent:main:dashboard:work"
TREE_SIZE = 5  # processes that sleep
RUN_TIMEOUT_SECONDS = 8  # long enough to start the tree on a busy machine
EXEC_TIMEOUT_SECONDS = 6
PLACES = [
    "here",
    pytest.param(
        "sandbox",
        marks=pytest.mark.skipif(
            sandbox_backend.find_program("bwrap", []) is None,
            reason="bwrap is not installed (apt-get install bubblewrap)",
        ),
    ),
]
_numbers = itertools.count(1)


def make_tree() -> tuple[str, str]:
    """Return a command that starts a tree, and the mark of its processes."""
    mark = f"{os.getpid()}{next(_numbers):03}"
    sleep = f"sleep 70{mark}"
    lines = [
        "trap '' TERM HUP INT",
        f"{sleep} &",
        f"setsid {sleep} &",
        f"(setsid sh -c '{sleep} & {sleep}' &)",
        f"(env -i /usr/bin/setsid /bin/sh -c '/usr/bin/{sleep} & exit' &)",
        "while :; do :; done",
    ]
    return "\n".join(lines), sleep


def list_tree(mark: str) -> list[int]:
    """Return the processes that sleep, without programs that have yet to become one or only name them."""
    found: list[int] = []
    for pid in find_marked(mark):
        try:
            if psutil.Process(pid).name() == "sleep":
                found.append(pid)
        except psutil.NoSuchProcess:
            pass
    return found


async def start_tree(agents: AgentsFixture, *, background: bool, exec_timeout: float = 60) -> str:
    """Start a tree by a run that waits for it, or goes on; return its mark when all of it runs."""
    command, mark = make_tree()
    given = {"command": command, "background": background, "yieldMs": 60_000, "timeout": exec_timeout}
    run_id = await agents.say(f"call exec {json.dumps(given)}", SESSION)

    async def is_complete() -> bool:
        return len(await asyncio.to_thread(list_tree, mark)) == TREE_SIZE

    await wait_until_true(is_complete)
    if background:
        await agents.wait_for_end(run_id)
    return mark


async def measure_end(mark: str, since: float) -> float:
    """Wait until no process of a tree is left; return the seconds since then."""

    async def is_gone() -> bool:
        return not await asyncio.to_thread(find_marked, mark)

    await wait_until_true(is_gone)
    return time.monotonic() - since


def configure_place(place: str) -> Config:
    return configure() if place == "here" else make_agents_config()


async def stop(agents: AgentsFixture) -> object:
    return await agents.operations.runs.stop(OPERATOR, SESSION)


async def kill(agents: AgentsFixture) -> object:
    [row] = find_rows(agents)
    return await agents.use("process", SESSION, action="kill", sessionId=row["id"])


async def reset(agents: AgentsFixture) -> object:
    return await agents.operations.conversations.reset(OPERATOR, SESSION)


async def delete(agents: AgentsFixture) -> object:
    return await agents.operations.sessions.delete(OPERATOR, SESSION)


async def archive(agents: AgentsFixture) -> object:
    return await agents.operations.sessions.patch(OPERATOR, SESSION, SessionPatch(archived=True))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("end", "background"),
    [
        (stop, False),
        (stop, True),
        (kill, True),
        (reset, True),
        (delete, False),
        (delete, True),
        (archive, True),
    ],
)
async def test_who_ends_a_command_ends_its_tree(
    tmp_path: Path,
    place: str,
    end: Callable[[AgentsFixture], Awaitable[object]],
    background: bool,
    record_property: Callable[[str, object], None],
) -> None:
    async with opened(tmp_path, configure_place(place)) as agents:
        await agents.open_sessions(SESSION)
        mark = await start_tree(agents, background=background)
        began = time.monotonic()
        await end(agents)
        taken = await measure_end(mark, began)
        record_property("seconds", taken)
        assert taken < GONE_WITHIN_SECONDS

        async def is_over() -> bool:
            return all(row["ended_at"] for row in find_rows(agents))

        await agents.until(is_over)
        await agents.wait_until_idle()
        assert find_wakes(agents) == []
        if end is delete:
            assert find_rows(agents) == []


@pytest.mark.sqlite_only
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("background", [False, True])
async def test_the_timeout_of_a_command_ends_its_tree(
    tmp_path: Path, place: str, background: bool, record_property: Callable[[str, object], None]
) -> None:
    async with opened(tmp_path, configure_place(place)) as agents:
        await agents.open_sessions(SESSION)
        mark = await start_tree(agents, background=background, exec_timeout=EXEC_TIMEOUT_SECONDS)
        [row] = find_rows(agents)
        waited = (
            time.time() - row["created_at"] / 1000
        )  # it was started after that, so more is measured than promised
        taken = await measure_end(mark, time.monotonic() - waited + EXEC_TIMEOUT_SECONDS)
        record_property("seconds", taken)
        assert 0 < taken < GONE_WITHIN_SECONDS

        async def is_over() -> bool:
            return all(row["ended_at"] for row in find_rows(agents))

        await agents.until(is_over)
        assert [row["timed_out"] for row in find_rows(agents)] == [1]


@pytest.mark.sqlite_only
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("background", [False, True])
async def test_the_timeout_of_a_run_ends_the_trees_of_its_commands(
    tmp_path: Path, place: str, background: bool, record_property: Callable[[str, object], None]
) -> None:
    command, mark = make_tree()
    words = f"call exec {json.dumps({'command': command, 'background': background, 'yieldMs': 60_000})}"
    if background:  # the run goes on without it
        words += f"\ncall exec {json.dumps({'command': 'sleep 60', 'yieldMs': 60_000})}"
    async with opened(tmp_path, configure_place(place)) as agents:
        await agents.open_sessions(SESSION)

        async def is_complete() -> bool:
            return len(await asyncio.to_thread(list_tree, mark)) == TREE_SIZE

        run_id = await agents.say(words, SESSION, timeout_seconds=RUN_TIMEOUT_SECONDS)
        await wait_until_true(is_complete)
        view = await agents.wait_for_end(run_id)
        began = time.monotonic()
        assert view.state == "timeout"
        taken = await measure_end(mark, began)
        record_property("seconds", taken)
        assert taken < GONE_WITHIN_SECONDS
        assert find_wakes(agents) == []


@pytest.mark.sqlite_only
@pytest.mark.parametrize("place", PLACES)
async def test_a_keeper_that_is_stopped_ends_the_trees_of_its_commands(
    tmp_path: Path, place: str, record_property: Callable[[str, object], None]
) -> None:
    async with opened(tmp_path, configure_place(place)) as agents:
        await agents.open_sessions(SESSION)
        mark = await start_tree(agents, background=True)
        keeper = find_keeper(tmp_path)
        assert keeper is not None
        began = time.monotonic()
        keeper.terminate()
        taken = await measure_end(mark, began)
        record_property("seconds", taken)
        assert taken < GONE_WITHIN_SECONDS
