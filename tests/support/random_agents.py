"""Fifty agents that message and spawn each other at random, in a real process that is killed.

    PYTHONPATH=tests python tests/support/random_agents.py <state-dir> <seed> [<url> <password-file>]

It imports everything once and forks a process for each line it reads: the number of calls around a COMMIT after which
that process kills itself, or an empty line to let it finish all work. It prints the exit code. Each process submits the
whole plan again under the same keys.

Messages are scripts for the rehearsal model, and so are the messages that they send to other agents. Every script has a
unique number, so that it can be found wherever it went.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import random
import signal
import sys
import traceback
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from antiphon.access import Caller
from antiphon.app import open_app_operations
from antiphon.config import Config
from antiphon.operations.operations import Operations
from antiphon.operations.types import IncomingMessage
from chaos.killer import DatabaseLocation, Killer

AGENT_COUNT = 50
MESSAGES_PER_AGENT = 2  # messages from a person
SCRIPT_DEPTH = 2  # nesting of scripts in scripts
PROCESS_TIMEOUT_SECONDS = 100  # for one process; then the alarm kills it and the test fails
OPERATOR = Caller.operator()
AGENTS = [f"a{number:02}" for number in range(AGENT_COUNT)]


def make_settings(agents: Sequence[str], child_tools: Sequence[str]) -> dict[str, Any]:
    """Configure these agents, which reach and spawn each other; sub-agents also have `child_tools`."""
    return {
        "agents": {
            "defaults": {"subagents": {"maxSpawnDepth": 2, "allowAgents": ["*"]}},
            "list": [{"id": agent, "default": agent == agents[0]} for agent in agents],
        },
        "tools": {
            "sessions": {"visibility": "all"},
            "agentToAgent": {"enabled": True},
            "subagents": {"tools": {"alsoAllow": [*child_tools]}},
        },
    }


SETTINGS = make_settings(AGENTS, ["sessions_send"])
CONFIG = Config.model_validate(SETTINGS)

# --- the plan ---


class Planned(NamedTuple):
    key: str
    session: str
    text: str


def plan_messages(seed: int) -> list[Planned]:
    """Plan the first messages to all agents, in random order."""
    rng = random.Random(seed)
    numbers = itertools.count(1)
    agents = rng.sample(AGENTS * MESSAGES_PER_AGENT, AGENT_COUNT * MESSAGES_PER_AGENT)
    return [
        Planned(f"m{index}", get_main_key(agent), make_script(rng, numbers, SCRIPT_DEPTH))
        for index, agent in enumerate(agents)
    ]


def get_main_key(agent: str) -> str:
    return f"agent:{agent}:main"


def make_script(rng: random.Random, numbers: Iterator[int], depth: int, *, sent: bool = False) -> str:
    number = next(numbers)
    lines = [_call(rng, numbers, depth - 1) for _ in range(rng.choice([1, 1, 2]) if depth else 0)]
    # Not during an exchange: see the test of a session that yields when it was already woken.
    if depth and not sent and rng.random() < 0.2:
        lines.append("call sessions_yield {}")
    if rng.random() < 0.2:
        lines.append(f"slow {rng.choice([0.05, 0.3])}")
    lines.append(f"fail {number}" if rng.random() < 0.06 else f"say {'say ' * rng.randrange(3)}word {number}")
    wish = rng.choice(["", f"announce told {number}", "announce ANNOUNCE_SKIP"])
    return "\n".join(filter(None, [*lines, wish, f"number {number}"]))


def _call(rng: random.Random, numbers: Iterator[int], depth: int) -> str:
    agent = rng.choice(AGENTS)
    if rng.random() < 0.7:
        arguments: dict[str, Any] = {
            "sessionKey": get_main_key(agent),
            "message": make_script(rng, numbers, depth, sent=True),
            "timeoutSeconds": rng.choice([0, 0, 0.2, 2, 10]),
            "announce": rng.choice(["target", "target", "none"]),
        }
        if rng.random() < 0.5:
            arguments["replyBack"] = rng.choice([0, 1, 2, 5])
        return f"call sessions_send {json.dumps(arguments)}"
    task = make_script(rng, numbers, depth)
    arguments = {"task": task, "agentId": agent, "announce": rng.choice(["channel", "parent", "none"])}
    return f"call sessions_spawn {json.dumps(arguments)}"


# --- one process ---


async def run_agents(
    state_dir: Path, planned: list[Planned], kill: int | None, place: DatabaseLocation | None
) -> None:
    killer = Killer("" if kill is None else str(kill), place)
    config = Config.model_validate(SETTINGS | (place.settings() if place else {}))
    async with open_app_operations(config, state_dir, on_commit=killer) as operations:
        await _submit(operations, planned)
        await killer.wait_until_idle(state_dir)


async def _submit(operations: Operations, planned: list[Planned]) -> None:
    for agent in AGENTS:
        await operations.sessions.open(OPERATOR, get_main_key(agent))
    for key, session, text in planned:
        await operations.messages.submit(
            OPERATOR, IncomingMessage(session=session, content=text, idempotency_key=key)
        )


def fork(work: Coroutine[Any, Any, None]) -> int:
    """Run a coroutine in a child process; return its exit code.

    The child leaves by `_exit`, because it must not read its parent's input.
    """
    child = os.fork()
    if child:
        work.close()
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    signal.alarm(PROCESS_TIMEOUT_SECONDS)
    logging.basicConfig(level=logging.ERROR, stream=sys.stderr)
    code = 1
    try:
        asyncio.run(work)
        code = 0
    except BaseException:  # noqa: BLE001 - nothing may leave this frame
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(code)


def fork_for_each_line(start: Callable[[int | None], Coroutine[Any, Any, None]]) -> None:
    """Fork a process for each line of standard input."""
    for line in sys.stdin:
        code = fork(start(int(line) if line.strip() else None))
        os.write(1, f"{code}\n".encode())


def main() -> None:
    state_dir, planned = Path(sys.argv[1]), plan_messages(int(sys.argv[2]))
    fork_for_each_line(lambda kill: run_agents(state_dir, planned, kill, DatabaseLocation.of(sys.argv[3:])))


if __name__ == "__main__":
    main()
