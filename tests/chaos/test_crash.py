"""Killed at any commit, started again: nothing accepted is lost and nothing happens twice.

`--kills N` sets how many seeded kills there are besides the exhaustive ones (default 180).
"""

from __future__ import annotations

import json
import os
import random
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

from chaos import verify
from chaos.harness import (
    BATCHES,
    ELSEWHERE,
    KILLED,
    Servers,
    expire_leases,
    get_store_arguments,
    run_with_kill_at_every_commit,
    run_with_random_kills,
    spawn,
)
from chaos.killer import DatabaseLocation
from chaos.scenario import plan
from support.app_fixture import DATABASE
from support.databases import chosen


@pytest.mark.timeout(300)
@pytest.mark.requirement("G1", "G2", "G16", "G21", "G26")
@pytest.mark.parametrize("shape", ["tell, note", pytest.param("tell + note", marks=ELSEWHERE)])
def test_a_turn_with_two_tool_calls_survives_a_kill_at_every_moment(
    servers: Servers, tmp_path: Path, shape: str, record_property: Callable[[str, object], None]
) -> None:
    name = f"single:{shape}"
    died = run_with_kill_at_every_commit(servers, tmp_path, name)
    record_property("kills", died)
    assert died >= 12


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
    kills = cast(int, pytestconfig.getoption("--kills"))
    died = run_with_random_kills(servers, tmp_path, "several", batch, kills)
    record_property("kills", died)


@pytest.mark.requirement("G2", "G21")
def test_a_kill_from_outside_at_any_time_is_survived(servers: Servers, tmp_path: Path) -> None:
    """Not only commits: start-up, migration, imports and the end are interrupted too."""
    rng = random.Random(7)
    died = 0
    for number in range(4):
        name = f"several:{number}"
        home = tmp_path / f"{number}"
        home.mkdir()
        state_dir = home / "state"
        process = spawn(str(state_dir), name, *stored(state_dir))
        assert process.stdin and process.stdout
        # The point in time is the point in its output: the n-th line, or before the first one.
        for _ in range(rng.randrange(10)):
            process.stdout.readline()
        process.kill()
        heard, _ = process.communicate(timeout=30)
        died += process.returncode == KILLED
        expire_leases(state_dir)
        if chosen.postgres or (state_dir / DATABASE).exists():
            accepted = [
                line.removeprefix("accepted ") for line in heard.splitlines() if line.startswith("acc")
            ]
            assert verify.always(state_dir, accepted) == []
        assert servers.play(state_dir, name, None) == 0
        assert verify.finally_(state_dir, plan(name)) == []
    assert died >= 3


def stored(state_dir: Path) -> list[str]:
    return ["--store", *there] if (there := get_store_arguments(state_dir)) else []


def chat(state_dir: Path, *messages: str) -> subprocess.Popen[str]:
    said = [part for message in messages for part in ("--message", message)]
    command = [sys.executable, "-c", "from antiphon.cli import main; main()", "--state-dir", str(state_dir)]
    config = ""
    if there := DatabaseLocation.of(get_store_arguments(state_dir)):
        file = state_dir.with_suffix(".json5")
        file.write_text(json.dumps(there.settings()))
        config = str(file)
    environment = {**os.environ, "ANTIPHON_CONFIG": config}
    return subprocess.Popen([*command, "chat", *said], stdout=subprocess.PIPE, text=True, env=environment)


def begun(state_dir: Path) -> bool:
    """Whether a run is active. The file appears at some moment of the start, its tables a little later."""
    if not chosen.postgres and not (state_dir / DATABASE).exists():
        return False
    try:
        return any(run["state"] == "running" for run in verify.StoreSnapshot(state_dir).runs)
    except sqlite3.OperationalError:
        return False


@pytest.mark.requirement("G2")
def test_a_killed_chat_is_answered_by_the_next_one(tmp_path: Path) -> None:
    """The real program: its answer was on its way when it died, and is there after the next start."""
    state_dir = tmp_path / "state"
    first = chat(state_dir, "slow 3\nsay first answer")
    looking = threading.Event()
    for _ in range(1000):
        if begun(state_dir) or first.poll() is not None:
            break
        looking.wait(0.02)  # another process writes the file; there is no event to wait for
    first.kill()
    first.communicate(timeout=30)
    assert first.returncode == KILLED
    expire_leases(state_dir)
    assert verify.always(state_dir, []) == []
    second = chat(state_dir, "say second answer")
    shown, _ = second.communicate(timeout=60)
    assert second.returncode == 0
    assert "second answer" in shown
    snapshot = verify.StoreSnapshot(state_dir)
    assert [(run["state"], run["reply"]) for run in snapshot.runs] == [
        ("ok", "first answer"),
        ("ok", "second answer"),
    ]
    assert verify.always(state_dir, []) == []
    assert snapshot.owners == []
