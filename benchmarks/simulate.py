"""Where a cluster saturates, and on what: a discrete-event simulation of replicas on one PostgreSQL and one NATS.

    uv run python benchmarks/simulate.py                           the tables of docs/operations/scaling.md
    uv run python benchmarks/simulate.py --measured cluster.json   with service times from a file
    uv run python benchmarks/simulate.py --replicas 3,10 --database-cores 32 --seed 7

It takes half a minute of one core. Runs arrive at random at any replica and pass the stages of the real thing:
accepted (a commit), a lane is activated over NATS, claimed by some replica (a commit), ended (a commit), and after
each commit the events. A replica is one core; its store has eight writers that take several scripts into one
transaction when many wait; a commit waits for a flush that it shares with others (group commit). The model's time
occupies only a slot, so it is not simulated: slots are counted. What is not modelled: conflicts between
transactions, a network that is full, and anything that fails.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import count
from pathlib import Path

SECOND = 1000.0  # everything is in milliseconds
BATCH = 32  # scripts in one transaction at most, as in `store/postgres`
WRITERS = 8  # of the 12 connections of a replica; `store/opening.py`
REST = 0.05  # of a core is left to a replica that hears more than it can


@dataclass(frozen=True, kw_only=True)
class Times:
    """Milliseconds, each with where it comes from. `--measured` replaces those it names.

    "Measured": by `benchmarks/service.py` on the reference machine (2 shared cores, load about 1, PostgreSQL 18, NATS
    2.15), a fit to the CPU time per run of two closed loops, of 10 and of 100 sessions; one session alone costs half
    as much again to twice as much, which is left out. "Apart": measured with the shipped code by itself, at a load of
    about 10. "Prototype": measured on the same machine with the prototype that came before this code.
    """

    gateway_transaction: float = 0.36
    """CPU of a replica for a transaction. Measured."""
    gateway_script: float = 0.51
    """CPU of a replica for a script, with everything around it. Measured."""
    gateway_activation: float = 0.07
    """CPU of a replica to activate, take and acknowledge a lane. Prototype: a work queue alone."""
    gateway_tell: float = 0.014
    """CPU to publish one event. Apart."""
    gateway_hear: float = 0.016
    """CPU to receive one event of another replica. Apart, for an event that no connected client waits for."""
    database_transaction: float = 0.44
    """CPU of PostgreSQL for a transaction. Measured."""
    database_script: float = 0.62
    """CPU of PostgreSQL for a script. Measured."""
    database_chores: float = 2.8
    """CPU of PostgreSQL per second for a replica that does nothing: 2.6 transactions (lease, sweep, outbox) and a look
    at the clock every 10 s. Computed from the two above."""
    flush: float = 0.5
    """One flush of the log, however many commits share it. Prototype: 0.15 to 1.3, on a disk with a write cache."""
    nats_lane: float = 0.22
    """CPU of NATS for a lane: published, fetched, renewed, acknowledged. Measured."""
    nats_message: float = 0.0035
    """CPU of NATS for one event in or out. Apart: 0.007 for one in and one out."""
    network: float = 0.2
    """A round trip between machines. Assumed: nothing was measured over a real network."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """What a run does. Counts are those of the engine."""

    name: str
    model: float
    """Milliseconds until the model has answered; so long a run holds one of the slots of its replica."""
    pieces: int
    """Of the streamed answer; each is an event."""
    trips_per_transaction: int = 3
    trips_per_script: int = 4
    told: int = 8
    """Events of a run without its pieces: accepted, started, ended (twice), two messages, and that of each in lists."""


LOADS = (
    Load(name="an instant agent", model=0.0, pieces=0),
    Load(name="a model that streams 20 pieces in 3 s", model=3000.0, pieces=20),
)


@dataclass(frozen=True, kw_only=True)
class Size:
    replicas: int
    database_cores: int = 16
    nats_cores: int = 4
    slots: int = 256
    """Runs that a replica plays at a time: the smaller of `bus.lanes` and `agents.defaults.maxConcurrent`."""
    interest: float = 1.0
    """Of the replicas, how many hear an event. 1 is how it is: every replica listens to every session."""

    @property
    def hearers(self) -> float:
        return max(0.0, self.replicas - 1) * self.interest


# --- the machine ---

Then = Callable[[], None]


class Clock:
    """What happens when. Ties are in the order in which they were planned."""

    def __init__(self) -> None:
        self.now = 0.0
        self._numbers = count()
        self._plan: list[tuple[float, int, Then]] = []

    def after(self, wait: float, then: Then) -> None:
        heapq.heappush(self._plan, (self.now + wait, next(self._numbers), then))

    def run(self) -> None:
        while self._plan:
            self.now, _, then = heapq.heappop(self._plan)
            then()


class Station:
    """Servers with one queue, first come, first served. `stretch` is how much slower they are for other work."""

    def __init__(self, clock: Clock, servers: int, stretch: float = 1.0) -> None:
        self._clock = clock
        self._free = self._servers = servers
        self._queue: deque[tuple[float, Then]] = deque()
        self._stretch = stretch
        self.busy = 0.0
        """Time spent working, of all servers."""

    def ask(self, work: float, then: Then) -> None:
        self._queue.append((work * self._stretch, then))
        self._begin()

    def utilisation(self, time: float) -> float:
        return self.busy / (time * self._servers) if time else 0.0

    def _begin(self) -> None:
        while self._free and self._queue:
            work, then = self._queue.popleft()
            self._free -= 1
            self.busy += work
            self._clock.after(work, lambda then=then: self._done(then))

    def _done(self, then: Then) -> None:
        self._free += 1
        self._begin()
        then()


class Disk:
    """One flush at a time; all who wait when it begins are done when it ends (group commit)."""

    def __init__(self, clock: Clock, flush: float) -> None:
        self._clock = clock
        self._flush = flush
        self._waiting: list[Then] = []
        self._flushing = False
        self.busy = 0.0
        self.flushes = 0

    def ask(self, then: Then) -> None:
        self._waiting.append(then)
        if not self._flushing:
            self._begin()

    def _begin(self) -> None:
        shared, self._waiting = self._waiting, []
        self._flushing = bool(shared)
        if shared:
            self.busy += self._flush
            self.flushes += 1
            self._clock.after(self._flush, lambda: self._done(shared))

    def _done(self, shared: list[Then]) -> None:
        self._begin()
        for then in shared:
            then()


class Crew:
    """The writers of a replica's store: each takes its share of the scripts that wait into one transaction."""

    def __init__(self, cluster: Cluster, processor: Station) -> None:
        self._cluster = cluster
        self._processor = processor
        self._free = WRITERS
        self._scripts: deque[Then] = deque()

    def hand(self, then: Then) -> None:
        self._scripts.append(then)
        self._begin()

    def _begin(self) -> None:
        while self._free and self._scripts:
            share = min(BATCH, -(-len(self._scripts) // WRITERS))
            scripts = [self._scripts.popleft() for _ in range(share)]
            self._free -= 1
            self._transact(scripts)

    def _transact(self, scripts: list[Then]) -> None:
        cluster, times, load, many = self._cluster, self._cluster.times, self._cluster.load, len(scripts)
        here = cluster.about(times.gateway_transaction + many * times.gateway_script)
        there = cluster.about(times.database_transaction + many * times.database_script)
        trips = times.network * (load.trips_per_transaction + many * load.trips_per_script)

        def done() -> None:
            self._free += 1
            self._begin()
            for then in scripts:
                then()

        def travelled() -> None:
            cluster.database.ask(there, lambda: cluster.disk.ask(done))

        self._processor.ask(here, lambda: cluster.clock.after(trips, travelled))


@dataclass(slots=True)
class _Run:
    accepted: float = 0.0
    started: float = 0.0
    ended: float = 0.0


class Cluster:
    """One size under one load. `rate` is runs per second that come, `done` those that are played and so heard of."""

    def __init__(
        self, times: Times, load: Load, size: Size, rate: float, seed: int, done: float | None = None
    ) -> None:
        self.times, self.load, self.size, self.rate = times, load, size, rate
        self.random = random.Random(seed)
        self.clock = clock = Clock()
        chores = size.replicas * times.database_chores / SECOND / size.database_cores
        self.database = Station(clock, size.database_cores, 1 / max(REST, 1 - chores))
        self.disk = Disk(clock, times.flush)
        self.nats = Station(clock, size.nats_cores)
        self.heard = min(1 - REST, (rate if done is None else done) / SECOND * hearing(times, load, size))
        """Of each replica's time, what it spends on events of others."""
        self.processors = [Station(clock, 1, 1 / (1 - self.heard)) for _ in range(size.replicas)]
        self.crews = [Crew(self, processor) for processor in self.processors]
        self.runs: list[_Run] = []

    def about(self, mean: float) -> float:
        """Service times vary: exponentially, which is more than was seen and so errs towards longer queues."""
        return self.random.expovariate(1 / mean) if mean else 0.0

    def play(self, runs: int) -> None:
        at = 0.0
        for _ in range(runs):
            at += self.about(SECOND / self.rate)
            self.clock.after(at, self._arrive)
        self.clock.run()

    @property
    def most(self) -> tuple[float, str]:
        """Runs per second that what was busiest could have done, and what that was.

        From the work that was done, so with as many scripts in a transaction as there were. The disk is not among
        them: the more commits wait for a flush, the more share it.
        """
        runs, size = SECOND * len(self.runs), self.size
        replicas = "replicas, by hearing of each other" if self.heard > 0.5 else "replicas"
        return min(
            (runs * size.replicas / sum(station.busy for station in self.processors), replicas),
            (runs * size.database_cores / self.database.busy, "database"),
            (runs * size.nats_cores / self.nats.busy, "NATS"),
        )

    def _arrive(self) -> None:
        run = _Run()
        here = self.random.randrange(self.size.replicas)

        def accepted() -> None:
            run.accepted = self.clock.now
            self._tell(here, 1)
            self._activate(here, lambda there: self.crews[there].hand(lambda: started(there)))

        def started(there: int) -> None:
            run.started = self.clock.now
            self._tell(there, 3 + self.load.pieces)
            self.crews[there].hand(lambda: ended(there))

        def ended(there: int) -> None:
            run.ended = self.clock.now
            self.runs.append(run)
            self._tell(there, self.load.told - 4)
            self.crews[here].hand(lambda: None)  # the waiting client reads the row

        self.crews[here].hand(accepted)

    def _activate(self, here: int, then: Callable[[int], None]) -> None:
        there = self.random.randrange(self.size.replicas)
        half = self.times.gateway_activation / 2

        def taken() -> None:
            self.processors[there].ask(half, lambda: then(there))

        def published() -> None:
            self.nats.ask(
                self.about(self.times.nats_lane), lambda: self.clock.after(self.times.network, taken)
            )

        self.processors[here].ask(half, published)

    def _tell(self, here: int, events: int) -> None:
        self.processors[here].ask(events * self.times.gateway_tell, lambda: None)
        if self.size.replicas > 1:
            self.nats.ask(events * (1 + self.size.hearers) * self.times.nats_message, lambda: None)


# --- what is learnt from it ---


def hearing(times: Times, load: Load, size: Size) -> float:
    """Milliseconds that a run of anybody costs each replica, only for hearing of it."""
    if size.replicas < 2:
        return 0.0
    return (load.told - 1 + load.pieces) * times.gateway_hear * size.hearers / size.replicas


def bounds(times: Times, load: Load, size: Size) -> dict[str, float]:
    """Runs per second that each resource can do alone, if no transactions were shared."""
    scripts = 4  # accepted, claimed, ended, and the read of the waiting client
    own = scripts * (times.gateway_transaction + times.gateway_script) + times.gateway_activation
    own += (load.told + load.pieces) * times.gateway_tell
    database = scripts * (times.database_transaction + times.database_script)
    chores = size.replicas * times.database_chores / SECOND
    events = (load.told + load.pieces) * (1 + size.hearers) if size.replicas > 1 else 0
    return {
        "replicas": SECOND / (own / size.replicas + hearing(times, load, size)),
        "database": SECOND * max(REST, size.database_cores - chores) / database,
        "NATS": SECOND * size.nats_cores / (times.nats_lane + events * times.nats_message),
        "slots": SECOND * size.replicas * size.slots / load.model if load.model else float("inf"),
    }


@dataclass(frozen=True, slots=True)
class Finding:
    size: Size
    most: float
    """Runs per second at saturation."""
    on: str
    half: tuple[float, float]
    """p50 and p95 of accepted → started, milliseconds, at half of that."""
    nearly: tuple[float, float]
    """The same at nine tenths."""


def explore(times: Times, load: Load, size: Size, runs: int, seed: int) -> Finding:
    """More than there is room for, then half and nine tenths of what came out."""
    slots = bounds(times, load, size)["slots"], "slots"
    most, on = min(saturated(times, load, size, runs, seed), slots)
    half, nearly = (starts(times, load, size, share * most, runs, seed) for share in (0.5, 0.9))
    return Finding(size, most, on, half, nearly)


def saturated(times: Times, load: Load, size: Size, runs: int, seed: int) -> tuple[float, str]:
    """What a crowd can be done with. How much that is depends on what is heard, and that on how much is done."""
    offered = 2 * min(can for what, can in bounds(times, load, size).items() if what != "slots")

    def doing(done: float) -> tuple[float, str]:
        cluster = Cluster(times, load, size, offered, seed, done)
        cluster.play(runs)
        return cluster.most

    most, on = doing(0.0)
    heard = hearing(times, load, size) / SECOND
    low, high = most / (1 + most * heard), most
    for _ in range(5 if heard else 0):
        middle = (low + high) / 2
        most, on = doing(middle)
        low, high = (middle, high) if most > middle else (low, middle)
    return most, on


def starts(times: Times, load: Load, size: Size, rate: float, runs: int, seed: int) -> tuple[float, float]:
    cluster = Cluster(times, load, size, rate, seed)
    cluster.play(runs)
    waits = sorted(run.started - run.accepted for run in cluster.runs[len(cluster.runs) // 5 :])
    return waits[len(waits) // 2], waits[int(len(waits) * 0.95)]


# --- the command ---


def measured(path: Path) -> Times:
    """Service times of a file: an object with names of `Times`, by themselves or under `service_times`."""
    found: dict[str, object] = json.loads(path.read_text("utf-8"))
    inner = found.get("service_times", found)
    if not isinstance(inner, dict):
        raise SystemExit(f"{path}: 'service_times' is not an object.")
    names = {field.name for field in fields(Times)}
    given = {str(name): float(str(value)) for name, value in inner.items() if name in names}  # pyright: ignore
    if not given:
        raise SystemExit(f"{path} has none of: {', '.join(sorted(names))}.")
    return replace(Times(), **given)


def table(findings: Sequence[Finding]) -> str:
    lines = [
        "| replicas | runs/s at saturation | on | accepted → started at 50 %, p50 / p95 | at 90 % |",
        "|---|---|---|---|---|",
    ]
    for found in findings:
        waits = [f"{p50:.1f} / {p95:.1f} ms" for p50, p95 in (found.half, found.nearly)]
        most = f"{round(found.most, -1 if found.most < 1000 else -2):,.0f}"
        lines.append(f"| {found.size.replicas:,} | {most} | {found.on} | {waits[0]} | {waits[1]} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Where a cluster saturates, and on what.")
    parser.add_argument("--measured", type=Path, help="service times in milliseconds, as JSON")
    parser.add_argument("--replicas", default="1,3,10,100,1000")
    parser.add_argument("--database-cores", type=int, default=16)
    parser.add_argument("--nats-cores", type=int, default=4)
    parser.add_argument("--slots", type=int, default=256, help="runs that a replica executes at a time")
    parser.add_argument("--runs", type=int, default=2500, help="simulated for each figure")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args(arguments)
    times = measured(given.measured) if given.measured else Times()
    for load in LOADS:
        for interest, words in ((1.0, "every replica hears everything"), (None, "two hear of each session")):
            sizes = [
                Size(
                    replicas=number,
                    database_cores=given.database_cores,
                    nats_cores=given.nats_cores,
                    slots=given.slots,
                    interest=interest if interest is not None else min(1.0, 1 / max(1, number - 1)),
                )
                for number in map(int, given.replicas.split(","))
            ]
            findings = [explore(times, load, size, given.runs, given.seed) for size in sizes]
            print(f"\n{load.name}; {words}\n\n{table(findings)}")


if __name__ == "__main__":
    main()
