"""Random send, spawn, steer, yield, abort, reset, delete and kill -9 leave no work or wait to the sweeper.

`ANTIPHON_UPHEAVAL_SECONDS=600` goes on with further seeds for that long.
"""

from __future__ import annotations

import os
import random
import time
from itertools import count
from pathlib import Path

import pytest

from chaos.harness import KILLED
from chaos.test_random_agents import ENDS, process
from support import random_disruptions
from support.store_snapshot import StoreSnapshot

KILLS = 3
MOMENTS = 60, 500  # calls around commits after which a life may end
SECONDS = float(os.environ.get("ANTIPHON_UPHEAVAL_SECONDS") or 0)
FIRST_SEED = int(os.environ.get("ANTIPHON_UPHEAVAL_SEED") or 1)


def suffer(home: Path, seed: int) -> StoreSnapshot:
    """One house in upheaval, killed again and again and then left to work everything off."""
    rng = random.Random(seed)
    state_dir = home / f"upheaval-{seed}"
    with process(state_dir, seed, random_disruptions.__file__) as live:
        for _ in range(KILLS):
            code = live(rng.randint(*MOMENTS))
            assert code in {KILLED, 0}, f"seed {seed}: a life ended with {code}"
        assert live(None) == 0, f"seed {seed}: the last life did not end well"
    snapshot = StoreSnapshot(state_dir)
    swept = state_dir / random_disruptions.SWEPT
    wrong = left(snapshot)
    if swept.exists():
        wrong += [f"the sweeper settled {line}" for line in swept.read_text().splitlines()]
    assert not wrong, f"seed {seed}:\n" + "\n".join(wrong)
    return snapshot


def left(snapshot: StoreSnapshot) -> list[str]:
    """Work that is still in progress although everything is quiet."""
    wrong = [f"{run['id']} is {run['state']}" for run in snapshot.runs if run["ended_at"] is None]
    wrong += [f"{run['id']} waits to be woken" for run in snapshot.runs if run.get("woken_by")]
    wrong += [
        f"{s['key']} is {s['state']}" for s in snapshot.sessions if s["state"] != "idle" or s["yielded"]
    ]
    wrong += [f"{d['key']} is {d['state']}" for d in snapshot.deliveries if d["state"] not in ENDS]
    for row in (*snapshot.exchanges, *snapshot.tasks):
        if row["phase"] != "settled" or row["announced"] in (None, "pending", "interrupted"):
            wrong.append(f"{row['id']} is {row['phase']}, {row['announced']}")
    return wrong


@pytest.mark.requirement("G1", "G2", "G9", "G16", "G18", "S2", "S5")
@pytest.mark.timeout(150 + 2 * SECONDS)
def test_nothing_is_left_for_the_sweeper_after_random_stops_and_kills(tmp_path: Path) -> None:
    until = time.monotonic() + SECONDS
    seen: set[str] = set()
    for seed in count(FIRST_SEED):
        snapshot = suffer(tmp_path, seed)
        seen |= {run["origin"] for run in snapshot.runs} | {run["state"] for run in snapshot.runs}
        if time.monotonic() >= until:
            break
    assert seen >= {"sessions_send", "sessions_spawn", "wake", "steer", "cancelled", "ok"}
