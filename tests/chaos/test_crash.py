"""Killed at any commit, started again: nothing accepted is lost and nothing happens twice.

`--kills N` sets how many seeded kills there are besides the exhaustive ones (default 180).
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import cast

import pytest

from chaos import verify
from chaos.scenario import plan

WORKER = Path(__file__).with_name("worker.py")
TESTS = WORKER.parent.parent
KILLED = -9
BATCHES = 4


def spawn(*arguments: str) -> subprocess.Popen[str]:
    path = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, str(WORKER), *arguments]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )


@dataclass
class Servers:
    """A forking server for each thread that asks for one; each plays one process at a time."""

    _local: threading.local = field(default_factory=threading.local)
    _started: list[subprocess.Popen[str]] = field(default_factory=list[subprocess.Popen[str]])

    def play(self, state_dir: Path, name: str, kill: int | None) -> int:
        """The exit code of a process that had its turn on this directory."""
        server = cast("subprocess.Popen[str] | None", getattr(self._local, "server", None))
        if server is None:
            server = self._local.server = spawn("--serve")
            self._started.append(server)
        assert server.stdin and server.stdout
        job = {"state_dir": str(state_dir), "plan": name, "kill": str(kill or "")}
        server.stdin.write(f"{json.dumps(job)}\n")
        server.stdin.flush()
        return json.loads(server.stdout.readline())["exit"]

    def close(self) -> None:
        for server in self._started:
            server.communicate(timeout=30)


@pytest.fixture(scope="module")
def servers() -> Generator[Servers]:
    started = Servers()
    yield started
    started.close()


def said(state_dir: Path, word: str) -> list[str]:
    out = Path(f"{state_dir}.stdout")
    lines = out.read_text().splitlines() if out.exists() else []
    return [line.removeprefix(f"{word} ") for line in lines if line.startswith(f"{word} ")]


def trouble(servers: Servers, home: Path, name: str, kills: list[int]) -> tuple[int, list[str]]:
    """Play a plan under these kills and then to its end: how many kills were real, and what is wrong."""
    home.mkdir()
    state_dir = home / "state"
    died = 0
    for kill in kills:
        code = servers.play(state_dir, name, kill)
        died += code == KILLED
        if code not in {KILLED, 0}:
            return died, [f"a process ended with {code}: {Path(f'{state_dir}.stderr').read_text()}"]
        if found := verify.always(state_dir, said(state_dir, "accepted")):
            return died, [f"after {kills}: {line}" for line in found]
    if code := servers.play(state_dir, name, None):
        return died, [f"the last process ended with {code}: {Path(f'{state_dir}.stderr').read_text()}"]
    found = [f"{name} killed at {kills}: {line}" for line in verify.finally_(state_dir, plan(name))]
    if not found:
        shutil.rmtree(home)  # Some hundred databases are a lot of temporary files; only what failed is kept.
    return died, found


def suffer(servers: Servers, home: Path, cases: list[tuple[str, list[int]]]) -> int:
    """Every case, two at a time; how many kills there were. Fails with everything that went wrong."""
    home.mkdir(exist_ok=True)
    with ThreadPoolExecutor(2) as pool:
        jobs = [
            pool.submit(partial(trouble, servers, home / f"{number}", name, kills))
            for number, (name, kills) in enumerate(cases)
        ]
        results = [job.result() for job in jobs]
    wrong = [line for _, found in results for line in found]
    assert not wrong, "\n".join(wrong)
    return sum(died for died, _ in results)


def moments(servers: Servers, home: Path, name: str) -> int:
    """How often the undisturbed plan calls around a COMMIT. The dry run is checked like every other."""
    state_dir = home / "dry"
    assert servers.play(state_dir, name, None) == 0, Path(f"{state_dir}.stderr").read_text()
    assert verify.finally_(state_dir, plan(name)) == []
    return int(said(state_dir, "commits")[0])


@pytest.mark.requirement("G1", "G2", "G16", "G21", "G26")
@pytest.mark.parametrize("shape", ["tell, note", "tell + note"])
def test_a_turn_with_two_tool_calls_survives_a_kill_at_every_moment(
    servers: Servers, tmp_path: Path, shape: str, record_property: Callable[[str, object], None]
) -> None:
    name = f"single:{shape}"
    count = moments(servers, tmp_path, name)
    died = suffer(servers, tmp_path, [(name, [moment]) for moment in range(1, count + 1)])
    record_property("kills", died)
    # The very last moments may go missing when two commits of the dry run fall into one.
    assert count >= 12
    assert died >= count - 4


@pytest.mark.requirement("G2", "G5", "G16", "G21", "G26", "G28")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("batch", range(BATCHES))
def test_many_sessions_survive_seeded_kills(
    servers: Servers,
    tmp_path: Path,
    batch: int,
    pytestconfig: pytest.Config,
    record_property: Callable[[str, object], None],
) -> None:
    wanted = -(-cast(int, pytestconfig.getoption("--kills")) // BATCHES)
    dice = random.Random(batch)
    count = moments(servers, tmp_path, f"several:{batch}")
    died, number = 0, 0
    # A plan with fewer commits than the measured one may end before its moment comes; only real kills count.
    while died < wanted:
        cases: list[tuple[str, list[int]]] = []
        while len(cases) < max(2, (wanted - died) // 2):
            times = dice.choice([1, 1, 2, 3])
            # The first life does most of the work, so kills of later ones are looked for early on.
            kills = [dice.randint(1, count - 4), *(dice.randint(1, count // 3) for _ in range(times - 1))]
            cases.append((f"several:{batch * 1000 + number}", kills))
            number += 1
        killed = suffer(servers, tmp_path / f"round{number}", cases)
        assert killed, "no kill at all in a whole round"
        died += killed
    record_property("kills", died)


@pytest.mark.requirement("G2", "G21")
def test_a_kill_from_outside_at_any_time_is_survived(servers: Servers, tmp_path: Path) -> None:
    """Not only commits: start-up, migration, imports and the end are interrupted too."""
    dice = random.Random(7)
    died = 0
    for number in range(4):
        name = f"several:{number}"
        home = tmp_path / f"{number}"
        home.mkdir()
        state_dir = home / "state"
        process = spawn(str(state_dir), name)
        assert process.stdin and process.stdout
        # The point in time is the point in its output: the n-th line, or before the first one.
        for _ in range(dice.randrange(10)):
            process.stdout.readline()
        process.kill()
        heard, _ = process.communicate(timeout=30)
        died += process.returncode == KILLED
        if (state_dir / "antiphon.db").exists():
            accepted = [
                line.removeprefix("accepted ") for line in heard.splitlines() if line.startswith("acc")
            ]
            assert verify.always(state_dir, accepted) == []
        assert servers.play(state_dir, name, None) == 0
        assert verify.finally_(state_dir, plan(name)) == []
    assert died >= 3


def chat(state_dir: Path, *messages: str) -> subprocess.Popen[str]:
    said = [part for message in messages for part in ("--message", message)]
    command = [sys.executable, "-c", "from antiphon.cli import main; main()", "--state-dir", str(state_dir)]
    environment = {**os.environ, "ANTIPHON_CONFIG": ""}
    return subprocess.Popen([*command, "chat", *said], stdout=subprocess.PIPE, text=True, env=environment)


def begun(state_dir: Path) -> bool:
    """Whether a run is active. The file appears at some moment of the start, its tables a little later."""
    if not (state_dir / "antiphon.db").exists():
        return False
    try:
        return any(run["state"] == "running" for run in verify.Book(state_dir).runs)
    except sqlite3.OperationalError:
        return False


@pytest.mark.requirement("G2")
def test_a_killed_chat_is_answered_by_the_next_one(tmp_path: Path) -> None:
    """The real program: its answer was on its way when it died, and is there after the next start."""
    state_dir = tmp_path / "state"
    first = chat(state_dir, "slow 1\nsay first answer")
    looking = threading.Event()
    for _ in range(1000):
        if begun(state_dir) or first.poll() is not None:
            break
        looking.wait(0.02)  # another process writes the file; there is no event to wait for
    first.kill()
    first.communicate(timeout=30)
    assert first.returncode == KILLED
    assert verify.always(state_dir, []) == []
    second = chat(state_dir, "say second answer")
    shown, _ = second.communicate(timeout=60)
    assert second.returncode == 0
    assert "second answer" in shown
    book = verify.Book(state_dir)
    assert [(run["state"], run["reply"]) for run in book.runs] == [
        ("ok", "first answer"),
        ("ok", "second answer"),
    ]
    assert verify.always(state_dir, []) == []
    assert book.owners == []
