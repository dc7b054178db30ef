"""Playing plans in processes that are killed: what the crash tests share."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue

import pytest

from chaos import verify
from chaos.scenario import plan
from support.app_fixture import DATABASE
from support.databases import chosen, query_database

WORKER = Path(__file__).with_name("worker.py")
TESTS = WORKER.parent.parent
KILLED = -9
BATCHES = 4  # in which each kind of plan gets its half of the seeded kills
SHARE = 6  # of the seeded kills; on PostgreSQL a life takes twice as long
ELSEWHERE = pytest.mark.sqlite_only
"""Of plans that are killed at every moment, those that there is no time for on a second database."""

Kill = int | str
"""The number of a call around a commit, or a moment with a name (see `worker`)."""
Case = tuple[str, Sequence[Kill]]
"""A plan, and when its processes are killed."""
Look = Callable[[Path, Sequence[Kill]], list[str]]
"""Given the state directory of a case that went well, before it is removed, and its kills; returns what is wrong."""


def get_store_arguments(state_dir: Path) -> list[str]:
    """What a process is given to find its store, if that is not a file in its directory."""
    server, path = chosen.postgres, state_dir / DATABASE
    return [server.made(path).url, str(server.secret)] if server else []


def expire_leases(state_dir: Path) -> None:
    """End the leases of the dead: a process that shares its store waits for that, which would take too long here."""
    if chosen.postgres:
        query_database(state_dir / DATABASE, "UPDATE owners SET lease_until = 0")
        query_database(state_dir / DATABASE, "UPDATE watch SET until = 0")


def remove_state(state_dir: Path) -> None:
    shutil.rmtree(state_dir.parent)
    if chosen.postgres:
        chosen.postgres.drop(state_dir / DATABASE)


def spawn(*arguments: str) -> subprocess.Popen[str]:
    path = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, str(WORKER), *arguments]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )


@dataclass
class Servers:
    """Forking servers, as many as are used at once; each plays one process at a time."""

    _idle: SimpleQueue[subprocess.Popen[str]] = field(default_factory=SimpleQueue[subprocess.Popen[str]])

    def play(self, state_dir: Path, name: str, kill: Kill | None) -> int:
        """The exit code of a process that had its turn on this directory."""
        try:
            server = self._idle.get_nowait()
        except Empty:
            server = spawn("--serve")
        assert server.stdin and server.stdout
        job = {
            "state_dir": str(state_dir),
            "plan": name,
            "kill": str(kill or ""),
            "store": get_store_arguments(state_dir),
        }
        server.stdin.write(f"{json.dumps(job)}\n")
        server.stdin.flush()
        code: int = json.loads(server.stdout.readline())["exit"]
        self._idle.put(server)
        if code == KILLED:
            expire_leases(state_dir)
        return code

    def close(self) -> None:
        while not self._idle.empty():
            self._idle.get().communicate(timeout=30)


def said(state_dir: Path, word: str) -> list[str]:
    out = Path(f"{state_dir}.stdout")
    lines = out.read_text().splitlines() if out.exists() else []
    return [line.removeprefix(f"{word} ") for line in lines if line.startswith(f"{word} ")]


def find_problems(
    servers: Servers, home: Path, name: str, kills: Sequence[Kill], look: Look | None = None
) -> tuple[int, list[str]]:
    """Play a plan under these kills and then to its end: how many kills were real, and what is wrong."""
    home.mkdir()
    state_dir = home / "state"
    died = keepers = 0
    for kill in kills:
        code = servers.play(state_dir, name, kill)
        died += code == KILLED or len(said(state_dir, "killed")) > keepers
        keepers = len(said(state_dir, "killed"))
        if code not in {KILLED, 0}:
            return died, [f"a process ended with {code}: {Path(f'{state_dir}.stderr').read_text()}"]
        if found := verify.always(state_dir, said(state_dir, "accepted")):
            return died, [f"after {kills}: {line}" for line in found]
    if code := servers.play(state_dir, name, None):
        return died, [f"the last process ended with {code}: {Path(f'{state_dir}.stderr').read_text()}"]
    found = verify.finally_(state_dir, plan(name)) or (look(state_dir, kills) if look else [])
    if not found:
        remove_state(
            state_dir
        )  # Some hundred databases are a lot of temporary files; only what failed is kept.
    return died, [f"{name} killed at {kills}: {line}" for line in found]


def run_with_kills(servers: Servers, home: Path, cases: Sequence[Case], look: Look | None = None) -> int:
    """Every case, two at a time; how many kills there were. Fails with everything that went wrong."""
    home.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(2) as pool:
        jobs = [
            pool.submit(partial(find_problems, servers, home / f"{number}", name, kills, look))
            for number, (name, kills) in enumerate(cases)
        ]
        results = [job.result() for job in jobs]
    wrong = [line for _, found in results for line in found]
    assert not wrong, "\n".join(wrong)
    return sum(died for died, _ in results)


def count_commit_calls(servers: Servers, home: Path, name: str) -> int:
    """How often the undisturbed plan calls around a COMMIT. The dry run is checked like every other."""
    state_dir = home / "dry"
    assert servers.play(state_dir, name, None) == 0, Path(f"{state_dir}.stderr").read_text()
    assert verify.finally_(state_dir, plan(name)) == []
    return int(said(state_dir, "commits")[0])


def run_with_kill_at_every_commit(servers: Servers, home: Path, name: str, look: Look | None = None) -> int:
    """A kill before and one after every commit of a plan; how many there were.

    Commits that come at the same time are one, so that not every play has as many: it goes on until the plan is
    over before its moment comes.
    """
    last = count_commit_calls(servers, home, name)
    died = run_with_kills(
        servers, home / "measured", [(name, [moment]) for moment in range(1, last + 1)], look
    )
    while killed := run_with_kills(servers, home / f"{last}", [(name, [last + 1]), (name, [last + 2])], look):
        died, last = died + killed, last + 2
    return died


def run_with_random_kills(servers: Servers, home: Path, kind: str, batch: int, total: int) -> int:
    """One to three kills in a row at seeded moments, of one plan after the other, until there were enough."""
    wanted = -(-total // (2 * BATCHES * (SHARE if chosen.postgres else 1)))
    rng = random.Random(f"{kind} {batch}")

    def plans(number: int) -> str:
        return f"{kind}:{batch * 1000 + number}"

    count = count_commit_calls(servers, home, plans(0))
    died, number, vain = 0, 0, 0
    # A plan with fewer commits than the measured one may end before its moment comes; only real kills count.
    while died < wanted:
        cases: list[Case] = []
        while len(cases) < max(2, (wanted - died) // 2):
            times = rng.choice([1, 1, 2, 3])
            # The first life does most of the work, so kills of later ones are looked for early on.
            kills = [rng.randint(1, count - 4), *(rng.randint(1, count // 3) for _ in range(times - 1))]
            cases.append((plans(number), kills))
            number += 1
        killed = run_with_kills(servers, home / f"round{number}", cases)
        vain = 0 if killed else vain + 1
        assert vain < 3, "no kill at all in three whole rounds"
        died += killed
    return died
