"""The service times that `simulate.py` is fed with: what a run costs a replica, PostgreSQL and NATS in CPU time.

    uv run python benchmarks/service.py cluster.json        measure, and write them down
    uv run python benchmarks/simulate.py --measured cluster.json

One replica plays an instant agent in two closed loops. With 10 sessions few scripts share a transaction, with 100
many do: the two give what a transaction costs and what a script in it. What a replica spends on lanes and events is
taken from the simulation's own table, and left out of it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import psutil

from antiphon.app import App, open_app
from antiphon.event_loop import run
from antiphon.operations.types import IncomingMessage
from antiphon.runtimes.function import FunctionRuntime
from cluster import BOUND, OPERATOR, config, instant, servers, settings
from figures import load
from simulate import LOADS, Times

SCRIPTS = 3  # of a run: accepted, claimed, ended
FEW, MANY = 10, 100  # sessions that speak at a time


@dataclass(slots=True)
class Cost:
    """Of one run: transactions, and milliseconds of CPU of everybody who had to do with it."""

    transactions: float = 0.0
    gateway: float = 0.0
    database: float = 0.0
    nats: float = 0.0

    def __sub__(self, other: Cost) -> Cost:
        return Cost(*(getattr(self, f.name) - getattr(other, f.name) for f in fields(self)))

    def __truediv__(self, runs: int) -> Cost:
        return Cost(*(getattr(self, f.name) / runs for f in fields(self)))


class Commits:
    def __init__(self) -> None:
        self.count = 0

    def __call__(self, phase: Literal["before", "after"]) -> None:
        self.count += phase == "after"


def spent(name: str) -> float:
    """Milliseconds of CPU of all processes of that name below this one."""
    times = [child.cpu_times() for child in psutil.Process().children(recursive=True) if child.name() == name]
    return sum(time.user + time.system for time in times) * 1000


def now(commits: Commits) -> Cost:
    return Cost(commits.count, time.process_time() * 1000, spent("postgres"), spent("nats-server"))


async def speak(one: App, session: int, runs: int) -> None:
    for _ in range(runs):
        message = IncomingMessage(session=f"agent:main:dm:{session}", content="hello")
        accepted = await one.operations.messages.submit(OPERATOR, message)
        await one.operations.runs.wait(OPERATOR, accepted.run_id, BOUND)


async def loop(one: App, commits: Commits, sessions: int, runs: int) -> Cost:
    await asyncio.gather(*(speak(one, number, 3) for number in range(sessions)))
    before = now(commits)
    await asyncio.gather(*(speak(one, number, runs // sessions) for number in range(sessions)))
    return (now(commits) - before) / (runs // sessions * sessions)


async def measure(runs: int) -> tuple[Cost, Cost]:
    async with servers() as (postgres, nats):
        given = settings((await postgres.database("service")).url, nats)
        commits = Commits()
        functions = {"main": FunctionRuntime(instant, history=False)}
        with tempfile.TemporaryDirectory() as folder:
            async with open_app(config(given), Path(folder), functions=functions, on_commit=commits) as one:
                return await loop(one, commits, FEW, runs), await loop(one, commits, MANY, runs)


def fitted(few: Cost, many: Cost) -> dict[str, float]:
    """Two loops, two unknowns: cost = transactions · t + scripts · s."""
    known, told = Times(), LOADS[0].told
    beside = known.gateway_activation + told * known.gateway_tell
    span = few.transactions - many.transactions
    times: dict[str, float] = {}
    for who, costs in (
        ("gateway", (few.gateway - beside, many.gateway - beside)),
        ("database", (few.database, many.database)),
    ):
        transaction = max(0.0, (costs[0] - costs[1]) / span)
        times[f"{who}_transaction"] = transaction
        times[f"{who}_script"] = (costs[1] - many.transactions * transaction) / SCRIPTS
    times["nats_lane"] = max(0.0, many.nats - told * known.nats_message)
    return {name: round(value, 4) for name, value in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what a run costs a replica, PostgreSQL and NATS.")
    parser.add_argument("file", type=Path, help="where to write the service times, as JSON")
    parser.add_argument("--runs", type=int, default=3000, help="in each of the two loops")
    given = parser.parse_args()
    before = load()
    few, many = run(measure(given.runs))
    facts: dict[str, Any] = {
        "service_times": fitted(few, many),
        "per_run": {
            str(FEW): {f.name: round(getattr(few, f.name), 3) for f in fields(few)},
            str(MANY): {f.name: round(getattr(many, f.name), 3) for f in fields(many)},
        },
        "load": [before, load()],
        "cores": os.cpu_count(),
    }
    given.file.write_text(json.dumps(facts, indent=2) + "\n", "utf-8")
    print(given.file.read_text("utf-8"), end="")


if __name__ == "__main__":
    main()
