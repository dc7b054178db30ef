"""The simulation of `benchmarks/simulate.py` agrees with what is known of queues, and says the same thing twice."""

from __future__ import annotations

import importlib.util
import json
import math
import random
import sys
from pathlib import Path
from typing import Any

import pytest

FILE = Path(__file__).parents[2] / "benchmarks" / "simulate.py"


def _loaded() -> Any:
    spec = importlib.util.spec_from_file_location("simulate", FILE)
    assert spec is not None and spec.loader is not None
    module = sys.modules["simulate"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


sim = _loaded()
INSTANT, STREAMING = sim.LOADS


def mean_wait(servers: int, load: float, jobs: int = 60_000) -> float:
    """In the queue of a station, for arrivals and work at random; work takes 1 on average."""
    clock, rng = sim.Clock(), random.Random(3)
    station = sim.Station(clock, servers)
    waits: list[float] = []

    def arrive() -> None:
        came, work = clock.now, rng.expovariate(1.0)
        station.ask(work, lambda: waits.append(clock.now - came - work))

    at = 0.0
    for _ in range(jobs):
        at += rng.expovariate(load * servers)
        clock.after(at, arrive)
    clock.run()
    assert len(waits) == jobs
    return sum(waits) / jobs


@pytest.mark.parametrize("load", [0.3, 0.5, 0.8])
def test_one_server_waits_as_the_formula_of_m_m_1_says(load: float) -> None:
    assert mean_wait(1, load) == pytest.approx(load / (1 - load), rel=0.08)


def test_several_servers_wait_as_erlang_says() -> None:
    servers, load = 4, 0.8
    offered = servers * load
    busy = offered**servers / math.factorial(servers) / (1 - load)
    waiting = busy / (sum(offered**k / math.factorial(k) for k in range(servers)) + busy)
    assert mean_wait(servers, load) == pytest.approx(waiting / (servers * (1 - load)), rel=0.08)


def test_commits_that_wait_share_the_next_flush() -> None:
    clock = sim.Clock()
    disk = sim.Disk(clock, 2.0)
    done: list[float] = []
    for at in (0.0, 0.5, 1.0, 1.5):
        clock.after(at, lambda: disk.ask(lambda: done.append(clock.now)))
    clock.run()
    assert done == [2.0, 4.0, 4.0, 4.0]
    assert disk.flushes == 2


def test_every_run_that_came_has_ended_in_order() -> None:
    cluster = sim.Cluster(sim.Times(), INSTANT, sim.Size(replicas=3), 200, seed=5)
    cluster.play(500)
    assert len(cluster.runs) == 500
    assert all(0 < run.accepted < run.started < run.ended for run in cluster.runs)


def test_the_same_seed_says_the_same() -> None:
    size = sim.Size(replicas=3)
    one, two, other = (sim.explore(sim.Times(), INSTANT, size, 300, seed) for seed in (1, 1, 2))
    assert one == two != other


@pytest.mark.parametrize(
    ("load", "size", "changed", "on"),
    [
        (INSTANT, sim.Size(replicas=1), {}, "replicas"),
        (INSTANT, sim.Size(replicas=50, database_cores=2, interest=0.02), {}, "database"),
        (INSTANT, sim.Size(replicas=300, nats_cores=1), {}, "NATS"),
        (INSTANT, sim.Size(replicas=20, nats_cores=64), {"gateway_hear": 1.0}, "replicas, by hearing of each other"),
        (STREAMING, sim.Size(replicas=2), {}, "slots"),
    ],
)  # fmt: skip
def test_what_is_scarce_is_what_saturates(load: Any, size: Any, changed: dict[str, float], on: str) -> None:
    found = sim.explore(sim.Times(**changed), load, size, 600, 1)
    assert found.on == on
    # The formula knows nothing of shared transactions, so it is a lower bound, but for what the dice do.
    least = min(sim.bounds(sim.Times(**changed), load, size).values())
    assert 0.85 * least < found.most < 3 * least
    assert found.half[0] <= found.nearly[0] * 1.1


def test_measured_times_take_the_place_of_ours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "cluster.json"
    file.write_text(json.dumps({"service_times": {"flush": 4, "no_such_time": 9}, "figures": []}))
    assert sim.measured(file) == sim.Times(flush=4.0)
    sim.main(["--measured", str(file), "--replicas", "1", "--runs", "200"])
    assert capsys.readouterr().out.count("| 1 |") == 4
    file.write_text("{}")
    with pytest.raises(SystemExit, match="has none of"):
        sim.measured(file)
