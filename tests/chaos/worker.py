"""A real process that hosts sessions and kills itself at a chosen commit.

    PYTHONPATH=tests python tests/chaos/worker.py <state-dir> <plan> [--kill K] [--store URL PASSWORD-FILE]

`on_commit` is called before and after every COMMIT; at the K-th call the process sends itself SIGKILL. K can also be
`posting` or `posted`, for the second part of a text `posting#2` or `posted#2`: before and after a channel posts it.
In plans of the kind `working`,
it can be an await (see `moments`) or `ran-front` or `ran-back`, when that command has begun; `keeper@K` kills the
process that runs commands instead, `both@K` both, and `keeper-step:N` lets that process kill itself. Every
start submits the whole plan again under the same idempotency keys, which must be harmless. It prints
`accepted <key>` when a submission has returned, and `done` when nothing in the store is under way any more.

The channels outside keep what was posted in files beside the store, one key a line: what happened there is not
undone by a kill.

Importing Antiphon takes far longer than playing a plan, so `--serve` makes it a server that has imported
everything and forks a fresh process for each line of JSON arguments it reads. It has no thread and no event
loop of its own, so the fork is a clean start.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import signal
import sys
import traceback
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from antiphon.access import Caller
from antiphon.app import open_app_operations
from antiphon.config import Config
from antiphon.engine.outbox.delivery_channel import Part, Receipt
from antiphon.engine.supervisor import EngineTimings
from antiphon.engine.toolbox import Tool, ToolOutput, ToolRequest
from antiphon.operations.operations import Operations
from antiphon.operations.types import IncomingMessage
from antiphon.runtimes import ToolSpec
from chaos.killer import DatabaseLocation, Killer
from chaos.moments import AwaitWatcher, arm_keeper
from chaos.scenario import NOTE, NOTES, TELL, WORKING, Planned, places, plan, settings
from support.agents_fixture import merge_settings
from support.line_channel import LineChannel, format_part
from support.planned_exchanges import ATTEMPTS, KEYED, POSTED, POSTING, UNKEYED
from support.planned_work import BACK, FRONT

PATIENCE = 30  # seconds that one process may take in all; then the alarm kills it and the test fails
KEEPER_STEP = "keeper-step:"
OPERATOR = Caller.operator()
SETTINGS = {
    "agents": {
        "defaults": {"subagents": {"maxSpawnDepth": 2, "allowAgents": ["*"]}},
        "list": [{"id": "main", "default": True}, {"id": "helper"}],
    },
    "tools": {"sessions": {"visibility": "all"}, "agentToAgent": {"enabled": True}},
}


@dataclass
class FileChannel(LineChannel):
    """A channel to people. An idempotent one takes the same key as the same message."""

    killer: Killer

    async def send(self, part: Part) -> Receipt:
        line = format_part(part)
        append(self.posts.with_suffix(ATTEMPTS), line)
        number = "" if part.n == 1 else f"#{part.n}"
        self.killer.reach(f"{POSTING}{number}")
        if not (self.is_idempotent and self.posts.exists() and line in self.posts.read_text().splitlines()):
            append(self.posts, line)
        self.killer.reach(f"{POSTED}{number}")
        return Receipt(f"outside-{line}")


def say(line: str) -> None:
    """Past every buffer, so that what was said before the kill has been said."""
    os.write(1, f"{line}\n".encode())


def append(path: Path, line: str) -> None:
    """One write, so that a kill leaves all of it or nothing."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(file, f"{line}\n".encode())
    os.close(file)


def tools(state_dir: Path, operations: Operations) -> list[Tool]:
    async def tell(call: ToolRequest) -> ToolOutput:
        message = IncomingMessage(
            session=call.arguments["session"],
            content=call.arguments["text"],
            idempotency_key=call.key,
            origin="tell",
        )
        accepted = await operations.messages.submit(OPERATOR, message)
        return ToolOutput(text=f"told {accepted.run_id}")

    async def note(call: ToolRequest) -> ToolOutput:
        append(state_dir / NOTES, call.key)
        return ToolOutput(text="noted")

    def spec(name: str) -> ToolSpec:
        return ToolSpec(name=name, description=name, parameters={"type": "object"})

    return [
        Tool(spec=spec(TELL), invoke=tell, after_crash="settle"),
        Tool(spec=spec(NOTE), invoke=note, after_crash="report"),
    ]


async def watch_commands(state_dir: Path, killer: Killer) -> None:
    """Reach a moment when a command has begun, which only its file tells."""
    waiting = [FRONT, BACK]
    while waiting:
        for name in [name for name in waiting if (state_dir / "workspaces" / "main" / name).exists()]:
            waiting.remove(name)
            killer.reach(name)
        await asyncio.sleep(0.005)  # another process writes the file


async def submit(operations: Operations, planned: list[Planned]) -> None:
    for place in places(planned):
        await operations.sessions.open(OPERATOR, place)
    for each in planned:
        message = IncomingMessage(session=each.session, content=each.text, idempotency_key=each.key)
        await operations.messages.submit(OPERATOR, message)
        say(f"accepted {each.key}")


async def play(state_dir: Path, name: str, kill: str, place: DatabaseLocation | None) -> None:
    planned = plan(name)
    killer = Killer(kill, place, state_dir)
    chosen = merge_settings(SETTINGS, settings(name))
    config = Config.model_validate(chosen | (place.settings() if place else {}))
    watcher = AwaitWatcher(killer.reach)
    if name.startswith(WORKING):
        asyncio.get_running_loop().set_task_factory(watcher)
    if kill.startswith(KEEPER_STEP):
        arm_keeper(state_dir, int(kill.removeprefix(KEEPER_STEP)))
    channels = {
        channel: FileChannel(state_dir / f"{channel}.txt", channel == KEYED, killer)
        for channel in (KEYED, UNKEYED)
    }
    # Children are deleted by the sweeper, which is in no hurry unless a caller waits for it.
    sweeping = any(spawned.cleanup == "delete" for each in planned for spawned in each.spawns)
    # Where others may share the store, every look around begins with a commit: not too many of them to be killed at.
    timings = EngineTimings(sweep_interval_seconds=0.5 if place else 0.05) if sweeping else EngineTimings()
    offered = partial(tools, state_dir)
    async with open_app_operations(
        config, state_dir, tools=offered, channels=channels, timings=timings, on_commit=killer
    ) as operations:
        watching = asyncio.create_task(watch_commands(state_dir, killer))
        await submit(operations, planned)
        await killer.wait_until_idle(state_dir)
        watching.cancel()
    say(f"moments {json.dumps(watcher.moments)}")
    say(f"commits {killer.count}")
    say("done")


def run(state_dir: Path, name: str, kill: str, place: DatabaseLocation | None) -> None:
    signal.alarm(PATIENCE)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    asyncio.run(play(state_dir, name, kill, place))


def serve() -> None:
    """One job after the other: fork, redirect, run, report how the process ended."""
    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if child == 0:
            fork(job)
        _, status = os.waitpid(child, 0)
        say(json.dumps({"exit": os.waitstatus_to_exitcode(status)}))


def fork(job: dict[str, Any]) -> None:
    """The life of a forked process. It leaves by `_exit`, for it must not go on reading its parent's stdin."""
    state_dir, kill = Path(job["state_dir"]), job["kill"]
    for descriptor, name in (1, "stdout"), (2, "stderr"):
        os.dup2(os.open(f"{state_dir}.{name}", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), descriptor)
    try:
        run(state_dir, job["plan"], kill, DatabaseLocation.of(job["store"]))
    except BaseException:  # noqa: BLE001 - nothing may leave this frame
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


def main() -> None:
    options = argparse.ArgumentParser(description="Host sessions, and be killed.")
    options.add_argument("state_dir", type=Path, nargs="?")
    options.add_argument("plan", nargs="?")
    options.add_argument("--kill", default="")
    options.add_argument("--store", nargs=2, default=[])
    options.add_argument("--serve", action="store_true")
    chosen = options.parse_args()
    if chosen.serve:
        serve()
    else:
        run(chosen.state_dir, chosen.plan, chosen.kill, DatabaseLocation.of(chosen.store))


if __name__ == "__main__":
    main()
