"""Agents that send, spawn, steer and yield at random while an operator aborts, resets and deletes, and kill -9 strikes.

    PYTHONPATH=tests python tests/support/random_disruptions.py <state-dir> <seed> [<url> <password-file>]

Like `random_agents`, it forks a process for each line it reads, the number of calls around a COMMIT after which the
process kills itself. What only the sweeper settled is written to the file `SWEPT`.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from antiphon.app import open_app_operations
from antiphon.config import Config
from antiphon.engine.collaboration import exchanges, task_rows
from antiphon.engine.runs import completion
from antiphon.engine.runs.effects import Effects
from antiphon.errors import AntiphonError
from antiphon.operations.operations import Operations
from antiphon.operations.types import IncomingMessage, SendRequest, SpawnRequest
from antiphon.store import Tx
from chaos.killer import DatabaseLocation, Killer
from support import random_agents
from support.random_agents import OPERATOR, Planned, get_main_key

AGENTS = [f"a{number:02}" for number in range(8)]
EXTRA = [f"agent:{agent}:dashboard:extra" for agent in AGENTS[:4]]
"""Sessions that can be deleted, which main sessions cannot."""
SESSIONS = [*map(get_main_key, AGENTS), *EXTRA]
MESSAGES = 24
DISRUPTIONS = 18  # in one process
MAX_COMMITS_BETWEEN = 12
MAX_SECONDS_BETWEEN = 0.3
SWEPT = "swept.txt"
SETTINGS = random_agents.make_settings(AGENTS, ["sessions_send", "sessions_yield", "subagents"])


def plan_messages(seed: int) -> list[Planned]:
    rng, numbers = random.Random(seed), itertools.count(1)
    return [
        Planned(f"m{index}", pick_session(rng), make_script(rng, numbers, 2)) for index in range(MESSAGES)
    ]


def pick_session(rng: random.Random) -> str:
    """Pick a session, often one of two, so that several senders wait for the same one."""
    return rng.choice(SESSIONS[:2] if rng.random() < 0.5 else SESSIONS)


def make_script(rng: random.Random, numbers: Iterator[int], depth: int) -> str:
    number = next(numbers)
    if depth and rng.random() < 0.4:
        return _delegation(rng, number)
    lines = [_call(rng, numbers, depth - 1) for _ in range(rng.choice([1, 2, 2]) if depth else 0)]
    if depth and rng.random() < 0.2:
        killed = {"action": "kill", "target": rng.choice(["last", "1", "all"])}
        lines.append(f"call subagents {json.dumps(killed)}")
    if depth and rng.random() < 0.25:
        steered = {"action": "steer", "target": "last", "message": f"slow 0.05\nsay steered {number}"}
        lines.append(f"call subagents {json.dumps(steered)}")
    if depth and rng.random() < 0.5:
        how = json.dumps({"waitFor": rng.choice(["all", "any"])})
        lines.append(f"call sessions_yield {how}")
    if rng.random() < 0.4:
        lines.append(f"slow {rng.choice([0.05, 0.2])}")
    lines.append(f"fail {number}" if rng.random() < 0.06 else f"say {'say ' * rng.randrange(3)}word {number}")
    wish = rng.choice(["", f"announce told {number}", "announce ANNOUNCE_SKIP"])
    return "\n".join(filter(None, [*lines, wish, f"number {number}"]))


def _delegation(rng: random.Random, number: int) -> str:
    """Make a script that spawns a sub-agent, waits for it, and answers."""
    task = {
        "task": f"slow {rng.choice([0.05, 0.3, 0.6])}\nsay done",
        "announce": rng.choice(["parent", "none"]),
    }
    how = {"waitFor": rng.choice(["all", "any"])}
    return (
        f"call sessions_spawn {json.dumps(task)}\ncall sessions_yield {json.dumps(how)}\n"
        f"say word {number}\nnumber {number}"
    )


def _call(rng: random.Random, numbers: Iterator[int], depth: int) -> str:
    if rng.random() < 0.5:
        arguments: dict[str, Any] = {
            "sessionKey": pick_session(rng),
            "message": make_script(rng, numbers, depth),
            "timeoutSeconds": rng.choice([0, 0, 0.2, 2]),
            "announce": rng.choice(["target", "none"]),
            "replyBack": rng.choice([0, 1, 2]),
        }
        return f"call sessions_send {json.dumps(arguments)}"
    announce = rng.choice(["channel", "parent", "parent", "none"])
    return (
        f"call sessions_spawn {json.dumps({'task': make_script(rng, numbers, depth), 'announce': announce})}"
    )


# --- one process ---


class RandomDisruptions:
    """Random actions of an operator. They may be refused, but must end."""

    def __init__(self, operations: Operations, killer: Killer, rng: random.Random) -> None:
        self._operations = operations
        self._killer = killer
        self._rng = rng
        self._numbers = itertools.count(rng.randrange(10**9))
        self._tasks: list[asyncio.Task[None]] = []

    async def run(self) -> None:
        for _ in range(DISRUPTIONS):
            self._tasks.append(asyncio.create_task(self._run(self._pick_action())))
            await self._wait_for_commits()
        await asyncio.gather(*self._tasks)

    async def _wait_for_commits(self) -> None:
        """Wait for some commits, or until nothing is committed any more."""
        count = self._killer.count + 2 * self._rng.randrange(MAX_COMMITS_BETWEEN)

        async def reached() -> bool:
            return self._killer.count >= count

        with suppress(TimeoutError):
            await self._killer.until(reached, MAX_SECONDS_BETWEEN)

    async def _run(self, act: Callable[[], Awaitable[object]]) -> None:
        with suppress(AntiphonError):
            await act()

    def _pick_action(self) -> Callable[[], Awaitable[object]]:
        operations, rng = self._operations, self._rng
        session = pick_session(rng)
        text = make_script(rng, self._numbers, 1)
        acts: list[tuple[int, Callable[[], Awaitable[object]]]] = [
            (3, partial(operations.runs.stop, OPERATOR, session)),
            (2, partial(self._stop_one, session)),
            (2, partial(operations.conversations.reset, OPERATOR, session)),
            (2, partial(operations.sessions.delete, OPERATOR, rng.choice(EXTRA))),
            (2, partial(operations.messages.steer, OPERATOR, IncomingMessage(session=session, content=text))),
            (2, partial(self._steer_child, session, text)),
            (2, partial(operations.subagents.kill, OPERATOR, rng.choice(["all", "last"]), session)),
            (2, partial(operations.subagents.spawn, OPERATOR, SpawnRequest(task=text), requester=session)),
            (8, partial(self._send, session, text)),
        ]
        weights = [weight for weight, _ in acts]
        return rng.choices([act for _, act in acts], weights)[0]

    async def _stop_one(self, session: str) -> None:
        if runs := await self._operations.runs.list_unfinished(OPERATOR, session):
            await self._operations.runs.stop(OPERATOR, session, self._rng.choice(runs))

    async def _steer_child(self, session: str, text: str) -> None:
        if found := await self._operations.subagents.list(OPERATOR, session):
            child = self._rng.choice(found).child_session_key
            await self._operations.messages.steer(
                OPERATOR, IncomingMessage(session=child, content=text, origin="steer")
            )

    async def _send(self, session: str, text: str) -> None:
        requester = self._rng.choice([None, *SESSIONS])
        wanted = SendRequest(session=session, message=text, timeout_seconds=self._rng.choice([0, 1, 600]))
        await self._operations.exchanges.send(OPERATOR, wanted, requester=requester)


async def run_disrupted_agents(
    state_dir: Path, seed: int, kill: int | None, place: DatabaseLocation | None
) -> None:
    killer = Killer("" if kill is None else str(kill), place)
    config = Config.model_validate(SETTINGS | (place.settings() if place else {}))
    completion.settle_stuck_work = partial(_record_swept, state_dir / SWEPT, completion.settle_stuck_work)
    async with open_app_operations(config, state_dir, on_commit=killer) as operations:
        for session in SESSIONS:
            await operations.sessions.open(OPERATOR, session)
        for key, session, text in plan_messages(seed):
            with suppress(AntiphonError):
                await operations.messages.submit(
                    OPERATOR, IncomingMessage(session=session, content=text, idempotency_key=key)
                )
        await RandomDisruptions(operations, killer, random.Random(f"{seed} {kill}")).run()
        await killer.wait_until_idle(state_dir)


async def _record_swept(
    path: Path, settle: Callable[[Tx, int], Awaitable[Effects]], tx: Tx, now: int
) -> Effects:
    astray = [*await exchanges.list_stalled_exchanges(tx), *await task_rows.list_stalled_tasks(tx)]
    with path.open("a") as file:
        for row in astray:
            file.write(f"{row['id']} in phase {row['phase']} at run {row['current']}\n")
    return await settle(tx, now)


def main() -> None:
    state_dir, seed = Path(sys.argv[1]), int(sys.argv[2])
    random_agents.fork_for_each_line(
        lambda kill: run_disrupted_agents(state_dir, seed, kill, DatabaseLocation.of(sys.argv[3:]))
    )


if __name__ == "__main__":
    main()
