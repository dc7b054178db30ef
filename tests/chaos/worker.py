"""A real process that hosts sessions and kills itself at a chosen commit.

    PYTHONPATH=tests python tests/chaos/worker.py <state-dir> <plan> [--kill K]

`on_commit` is called before and after every COMMIT; at the K-th call the process sends itself SIGKILL. Every
start submits the whole plan again under the same idempotency keys, which must be harmless. It prints
`accepted <key>` when a submission has returned, and `done` when every run in the store has ended.

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
import sqlite3
import sys
import traceback
from functools import partial
from pathlib import Path

from antiphon.access import Caller
from antiphon.config import Config
from antiphon.engine.toolbox import Call, Result, Tool
from antiphon.host import hosting
from antiphon.operations import Message, Operations
from antiphon.runtimes import ToolSpec
from chaos.scenario import NOTE, NOTES, TELL, plan

PATIENCE = 30  # seconds that one process may take in all; then the alarm kills it and the test fails
OPERATOR = Caller.operator()


class Killer:
    """Counts the calls around commits; the one that was chosen is the last thing this process does."""

    def __init__(self, at: int | None) -> None:
        self.count = 0
        self._at = at

    def __call__(self, phase: str) -> None:
        self.count += 1
        if self.count == self._at:
            os.kill(os.getpid(), signal.SIGKILL)


def say(line: str) -> None:
    """Past every buffer, so that what was said before the kill has been said."""
    os.write(1, f"{line}\n".encode())


def tools(state_dir: Path, operations: Operations) -> list[Tool]:
    async def tell(call: Call) -> Result:
        message = Message(
            session=call.arguments["session"],
            content=call.arguments["text"],
            idempotency_key=call.key,
            origin="tell",
        )
        accepted = await operations.submit(OPERATOR, message)
        return Result(text=f"told {accepted.run_id}")

    async def note(call: Call) -> Result:
        notes = os.open(state_dir / NOTES, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(notes, f"{call.key}\n".encode())
        os.close(notes)
        return Result(text="noted")

    def spec(name: str) -> ToolSpec:
        return ToolSpec(name=name, description=name, parameters={"type": "object"})

    return [
        Tool(spec=spec(TELL), invoke=tell, after_crash="settle"),
        Tool(spec=spec(NOTE), invoke=note, after_crash="report"),
    ]


def unfinished(state_dir: Path) -> list[str]:
    """Read beside the engine, because a run that a tool caused in an earlier process is nobody's to wait for."""
    connection = sqlite3.connect(f"file:{state_dir / 'antiphon.db'}?mode=ro", uri=True)
    rows = connection.execute("SELECT id FROM runs WHERE state IN ('queued', 'running')").fetchall()
    connection.close()
    return [row[0] for row in rows]


async def play(state_dir: Path, name: str, killer: Killer) -> None:
    async with hosting(Config(), state_dir, tools=partial(tools, state_dir), on_commit=killer) as operations:
        for planned in plan(name):
            message = Message(session=planned.session, content=planned.text, idempotency_key=planned.key)
            await operations.submit(OPERATOR, message)
            say(f"accepted {planned.key}")
        while left := unfinished(state_dir):
            for run_id in left:
                await operations.wait(OPERATOR, run_id, PATIENCE)
    say(f"commits {killer.count}")
    say("done")


def run(state_dir: Path, name: str, kill: int | None) -> None:
    signal.alarm(PATIENCE)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    asyncio.run(play(state_dir, name, Killer(kill)))


def serve() -> None:
    """One job after the other: fork, redirect, run, report how the process ended."""
    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if child == 0:
            fork(job)
        _, status = os.waitpid(child, 0)
        say(json.dumps({"exit": os.waitstatus_to_exitcode(status)}))


def fork(job: dict[str, str]) -> None:
    """The life of a forked process. It leaves by `_exit`, for it must not go on reading its parent's stdin."""
    state_dir, kill = Path(job["state_dir"]), job["kill"]
    for descriptor, name in (1, "stdout"), (2, "stderr"):
        os.dup2(os.open(f"{state_dir}.{name}", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), descriptor)
    try:
        run(state_dir, job["plan"], int(kill) if kill else None)
    except BaseException:  # noqa: BLE001 - nothing may leave this frame
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


def main() -> None:
    options = argparse.ArgumentParser(description="Host sessions, and be killed.")
    options.add_argument("state_dir", type=Path, nargs="?")
    options.add_argument("plan", nargs="?")
    options.add_argument("--kill", type=int)
    options.add_argument("--serve", action="store_true")
    chosen = options.parse_args()
    if chosen.serve:
        serve()
    else:
        run(chosen.state_dir, chosen.plan, chosen.kill)


if __name__ == "__main__":
    main()
