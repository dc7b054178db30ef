"""Faults of three replicas and their servers: a seeded plan as data, and the injector that carries it out.

A fault ends when what it took away is back; only a killed replica restarts while later faults happen.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from time import time
from typing import Any, Literal, get_args

from nats.aio.client import Client
from nats.js.errors import Error as JetStreamError

from chaos.worker import append
from support.replicas import ACK_WAIT, BOUND, ReplicaProcess, ReplicaSet

Kind = Literal[
    "kill", "kill all", "pause", "leave", "skew",
    "bus gone", "bus empty", "bus frozen", "purge", "drop stream", "store gone",
    "cut store", "cut bus", "stall store", "stall bus",
]  # fmt: skip
KINDS: tuple[Kind, ...] = get_args(Kind)
SKEW_SECONDS = 30.0  # seconds
LANE_STREAM_SUFFIX = "-lanes"  # suffix of the name of the stream
OVERLAP_PROBABILITY = 0.4  # share of the faults that continue while the next one starts
FAULT_LOCATIONS = {
    "bus gone": "bus", "bus empty": "bus", "bus frozen": "bus", "purge": "bus", "drop stream": "bus", "cut bus": "bus",
    "stall bus": "bus", "store gone": "store", "cut store": "store", "stall store": "store",
}  # fmt: skip
"""Location of each fault that is not in a replica."""


@dataclass(frozen=True, slots=True)
class Fault:
    after: float
    """Seconds after the previous fault ended, or began."""
    kind: Kind
    replica_index: int
    """Index of the replica, if the fault affects one."""
    lasting: float
    together: bool = False
    """Whether the next fault may start before this one ends."""

    def __str__(self) -> str:
        return f"{self.kind} r{self.replica_index} for {self.lasting:.1f} s"


def plan_faults(seed: int, count: int) -> list[Fault]:
    """Plan `count` faults; every kind occurs before any is repeated."""
    rng = random.Random(seed)
    kinds: list[Kind] = []
    while len(kinds) < count:
        kinds += rng.sample(KINDS, len(KINDS))
    return [_fault(rng, kind) for kind in kinds[:count]]


def _fault(rng: random.Random, kind: Kind) -> Fault:
    # A pause is longer than the lease, so that the paused replica has been replaced when it resumes.
    lasting = rng.uniform(1.2, 2.0) * ACK_WAIT if kind in {"pause", "stall store"} else rng.uniform(0.2, 1.5)
    return Fault(rng.uniform(0.2, 1.0), kind, rng.randrange(3), lasting, rng.random() < OVERLAP_PROBABILITY)


@dataclass
class FaultInjector:
    """Injects planned faults until `over` is set."""

    replica_set: ReplicaSet
    over: asyncio.Event = field(default_factory=asyncio.Event)
    done: list[Fault] = field(default_factory=list[Fault])
    _returning: list[asyncio.Task[None]] = field(default_factory=list[asyncio.Task[None]])
    _busy: dict[str, asyncio.Lock] = field(default_factory=dict[str, asyncio.Lock])

    async def inject_faults(self, faults: Sequence[Fault]) -> None:
        for fault in faults:
            if await self._is_over_after(fault.after):
                break
            happening = asyncio.create_task(self._inject_in_turn(fault))
            self._returning.append(happening)
            if not fault.together:
                await happening
        while any(not task.done() for task in self._returning):
            await asyncio.gather(*self._returning)
        await asyncio.gather(*self._returning)

    def report(self) -> str:
        counted = Counter(fault.kind for fault in self.done)
        return ", ".join(f"{kind} {times}" for kind, times in sorted(counted.items()))

    async def _inject_in_turn(self, fault: Fault) -> None:
        """Inject one fault at a time per location: a server that is down cannot be taken down."""
        async with self._busy.setdefault(FAULT_LOCATIONS.get(fault.kind, "replicas"), asyncio.Lock()):
            began = time()
            await self._inject_fault(fault)
            append(self.replica_set.home / "faults.txt", f"{began:.3f} {time():.3f} {fault}")
        self.done.append(fault)

    async def _is_over_after(self, seconds: float) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.over.wait()
        return self.over.is_set()

    async def _inject_fault(self, fault: Fault) -> None:
        # A replica that is restarting has its fault already.
        replicas = [
            *self.replica_set.replicas[fault.replica_index :],
            *self.replica_set.replicas[: fault.replica_index],
        ]
        replica = next((replica for replica in replicas if replica.alive), replicas[0])
        match fault.kind:
            case "kill" | "leave" | "skew" | "pause":
                await self._inject_into_replica(fault, replica)
            case "kill all":
                await asyncio.gather(*(self._inject_into_replica(fault, replica) for replica in replicas))
            case "bus gone" | "bus empty" | "bus frozen" | "store gone":
                await self._inject_into_server(fault)
            case "purge" | "drop stream":
                await self._inject_into_stream(fault.kind)
            case "cut store":
                self.replica_set.store_proxy.cut()
            case "cut bus":
                self.replica_set.bus_proxy.cut()
            case "stall store" | "stall bus":
                proxy = (
                    self.replica_set.store_proxy
                    if fault.kind == "stall store"
                    else self.replica_set.bus_proxy
                )
                proxy.stall()
                await self._is_over_after(fault.lasting)
                proxy.flow()

    async def _inject_into_replica(self, fault: Fault, replica: ReplicaProcess) -> None:
        if not replica.alive:
            return  # it is still restarting
        if fault.kind == "pause":
            replica.pause()
            await self._is_over_after(fault.lasting)
            replica.resume()
            return
        if fault.kind == "leave":
            assert await replica.leave() == 0, replica.read_log()[-3000:]
        else:
            await replica.kill()
        skew = 0.0 if fault.kind != "skew" else SKEW_SECONDS if fault.lasting > 0.85 else -SKEW_SECONDS
        self._returning.append(asyncio.create_task(self._restart(replica, fault.lasting, skew)))

    async def _restart(self, replica: ReplicaProcess, after: float, skew: float) -> None:
        await self._is_over_after(after)
        while not replica.alive:
            # It does not start while its servers are down; a supervisor would try again.
            with suppress(AssertionError):
                await replica.start(skew)

    async def _inject_into_server(self, fault: Fault) -> None:
        nats, postgres = self.replica_set.nats, self.replica_set.postgres
        if fault.kind == "bus empty":
            await asyncio.to_thread(nats.lose_everything)
            return
        if fault.kind == "bus frozen":
            nats.pause()
            await self._is_over_after(fault.lasting)
            nats.resume()
            return
        server = postgres if fault.kind == "store gone" else nats
        await asyncio.to_thread(server.kill)
        await self._is_over_after(fault.lasting)
        await asyncio.to_thread(server.start)

    async def _inject_into_stream(self, kind: str) -> None:
        client = Client()
        await client.connect(self.replica_set.nats.url, connect_timeout=int(BOUND))
        try:
            manager: Any = client.jsm(timeout=BOUND)  # pyright: ignore[reportUnknownMemberType]
            change = manager.purge_stream if kind == "purge" else manager.delete_stream
            with suppress(JetStreamError):  # another fault has just removed the stream
                for stream in await manager.streams_info():
                    if stream.config.name.endswith(LANE_STREAM_SUFFIX):
                        await change(stream.config.name)
        finally:
            await client.close()
