"""What replicas on PostgreSQL and NATS cost, all of them on this one machine: ratios matter more than figures.

    uv run python benchmarks/cluster.py            all of it, about five minutes
    uv run python benchmarks/cluster.py --quick    small sizes
    uv run python benchmarks/cluster.py runs       only this part

Both servers come from wheels of the development group; PostgreSQL flushes every commit (`fsync=on`).
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.cluster.database import PASSWORD, Postgres
from tests.cluster.servers import NatsServer, nats_server

from antiphon.access import Caller
from antiphon.app import App, open_app
from antiphon.config import Config, parse
from antiphon.event_loop import run
from antiphon.lanes.nats import NatsLanes
from antiphon.operations.types import IncomingMessage, ListFilter
from antiphon.runtimes import Prompt
from antiphon.runtimes.function import FunctionRuntime
from antiphon.store.postgres import PgStore
from antiphon.store.postgres.connection import PgServer
from figures import Figure, at_least, at_most, main, p95, typical_p95

OPERATOR = Caller.operator()
COUNTS = {"turns": 300, "runs": 3_000, "sessions": 1_000_000, "lanes": 10_000, "idle": 20, "ack": 10}
QUICK = {"turns": 50, "runs": 500, "sessions": 20_000, "lanes": 1_000, "idle": 5, "ack": 2}
BOUND = 120.0
DURABLE = {"fsync": "on", "full_page_writes": "on", "shared_buffers": "512MB", "max_wal_size": "4GB"}
REPLICA = "--replica"  # as the first argument, followed by the configuration: be one


async def instant(prompt: Prompt) -> str:
    return "ok"


def settings(url: str, nats: NatsServer, ack_wait: float = 10.0) -> dict[str, Any]:
    store = {"url": url, "password": PASSWORD}
    return {"store": store, "bus": {"url": nats.url, "ackWaitSeconds": ack_wait, "drainSeconds": 0}}


def config(given: dict[str, Any]) -> Config:
    return parse(given)[0]


@asynccontextmanager
async def servers() -> AsyncGenerator[tuple[Postgres, NatsServer]]:
    postgres = await asyncio.to_thread(Postgres, **DURABLE)
    try:
        with nats_server() as nats:
            yield postgres, nats
    finally:
        await asyncio.to_thread(postgres.stop)


@asynccontextmanager
async def replicas(count: int, given: dict[str, Any], agent: Any = instant) -> AsyncGenerator[list[App]]:
    """In this process, as far from each other as processes are: they share servers and nothing else."""
    async with AsyncExitStack() as stack:
        houses: list[App] = []
        for _ in range(count):
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            functions = {"main": FunctionRuntime(agent, history=False)}
            houses.append(
                await stack.enter_async_context(open_app(config(given), folder, functions=functions))
            )
        yield houses


async def turns(counts: dict[str, int]) -> list[Figure]:
    started: list[float] = []
    waits: list[float] = []
    whole: list[float] = []

    async def marking(prompt: Prompt) -> str:
        started.append(time.perf_counter())
        return "ok"

    async with servers() as (postgres, nats):
        given = settings((await postgres.database("turns")).url, nats)
        async with replicas(1, given, marking) as (one,):
            for number in range(counts["turns"]):
                message = IncomingMessage(session=f"agent:main:dm:{number % 20}", content="hello")
                began = time.perf_counter()
                accepted = await one.operations.messages.submit(OPERATOR, message)
                at = time.perf_counter()
                await one.operations.runs.wait(OPERATOR, accepted.run_id, BOUND)
                whole.append((time.perf_counter() - began) * 1000)
                waits.append(max(0.0, started[-1] - at) * 1000)
    waits, whole = waits[20:], whole[20:]
    return [
        at_most("accepted → started, p50", statistics.median(waits), "ms", 6),
        at_most("accepted → started, p95", p95(waits), "ms", 30),
        at_most("submitted → answered, p50", statistics.median(whole), "ms", 30),
    ]


async def runs(counts: dict[str, int]) -> list[Figure]:
    async with servers() as (postgres, nats):
        given = settings((await postgres.database("runs")).url, nats)
        async with replicas(2, given) as houses:

            async def speak(number: int) -> None:
                operations = houses[number % 2].operations
                for _ in range(counts["runs"] // 100):
                    message = IncomingMessage(session=f"agent:main:dm:{number}", content="hello")
                    accepted = await operations.messages.submit(OPERATOR, message)
                    await operations.runs.wait(OPERATOR, accepted.run_id, BOUND)

            await asyncio.gather(*(speak(number) for number in range(10)))
            began = time.perf_counter()
            await asyncio.gather(*(speak(number) for number in range(100)))
            rate = counts["runs"] / (time.perf_counter() - began)
    return [at_least("runs/s, two replicas, 100 sessions", rate, "/s", 250)]


async def takeover(counts: dict[str, int]) -> list[Figure]:
    """Replicas in processes of their own; the one that has the run is killed in the middle of it."""
    seconds: list[float] = []
    async with servers() as (postgres, nats):
        given = settings((await postgres.database("takeover")).url, nats, counts["ack"])
        async with replicas(1, given, instant) as (watcher,):
            for number in range(3):
                seconds.append(await _killed(watcher, given, number))
    return [at_most("takeover of a killed replica's run", max(seconds), "s", counts["ack"] + 1)]


async def _killed(watcher: App, given: dict[str, Any], number: int) -> float:
    """One that never answers is started first and gets the run; then it is killed, and the watcher has it."""
    given = {**given, "agents": {"list": [{"id": "main"}, {"id": f"slow{number}"}]}}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        __file__,
        REPLICA,
        json.dumps(given),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin and process.stdout
    session = f"agent:main:dm:takeover{number}"
    process.stdin.write(f"{session}\n".encode())
    run_id = (await asyncio.wait_for(process.stdout.readline(), BOUND)).decode().strip()
    process.send_signal(signal.SIGKILL)
    await process.wait()
    began = time.perf_counter()
    view = await watcher.operations.runs.wait(OPERATOR, run_id, BOUND)
    assert view.state == "ok", view
    return time.perf_counter() - began


async def be_replica(given: dict[str, Any]) -> None:
    """Take lanes until one has a run of ours, tell which, and never end it."""
    begun = asyncio.Event()

    async def forever(prompt: Prompt) -> str:
        begun.set()
        await asyncio.Event().wait()
        return ""

    async with replicas(1, given, forever) as (one,):
        session = sys.stdin.readline().strip()
        while not begun.is_set():  # the watcher may be quicker: then another message is tried
            accepted = await one.operations.messages.submit(
                OPERATOR, IncomingMessage(session=session, content="hello")
            )
            view = await one.operations.runs.wait(OPERATOR, accepted.run_id, 1.0)
            if view.state == "ok":
                continue
            await asyncio.wait_for(begun.wait(), BOUND)
            print(accepted.run_id, flush=True)
        await asyncio.Event().wait()


async def lists(counts: dict[str, int]) -> list[Figure]:
    async with servers() as (postgres, _):
        server = await postgres.database("lists")
        await _fill(server, counts["sessions"])
        with tempfile.TemporaryDirectory() as folder:
            store = {"url": server.url, "password": PASSWORD}
            async with open_app(config({"store": store}), Path(folder)) as one:
                newest = await typical_p95(
                    lambda: one.operations.sessions.list(OPERATOR, ListFilter(limit=200))
                )
                kinds = ListFilter(limit=200, kinds=["main", "group"])
                some = await typical_p95(lambda: one.operations.sessions.list(OPERATOR, kinds))
                agent = ListFilter(limit=200, agent_id="a3")
                own = await typical_p95(lambda: one.operations.sessions.list(OPERATOR, agent))
    what = f"list, 200 of {counts['sessions']:,}"
    return [
        at_most(f"{what}, newest, p95", newest, "ms", 10),
        at_most(f"{what}, two kinds, p95", some, "ms", 10),
        at_most(f"{what}, one agent, p95", own, "ms", 10),
    ]


_SESSIONS = """
INSERT INTO sessions (key, session_id, transcript, agent_id, kind, label, created_at, updated_at)
SELECT 'agent:a' || i % 7 || ':dashboard:' || i, 'id-' || i, i, 'a' || i % 7,
       CASE WHEN i % 1000 = 0 THEN 'cron' WHEN i % 100 < 50 THEN 'other' WHEN i % 100 < 90 THEN 'group'
            WHEN i % 100 < 94 THEN 'main' ELSE 'hook' END,
       CASE WHEN i % 3 = 0 THEN 'label ' || i END,
       CAST($1 AS BIGINT), CAST($1 AS BIGINT) - (CAST(i AS BIGINT) * 7919 % CAST($2 AS BIGINT)) * 1000
FROM generate_series(1, CAST($2 AS BIGINT)) AS i
"""


async def _fill(server: PgServer, count: int) -> None:
    store = await PgStore.open(server)
    await store.close()
    connection = await server.connect()
    now = time.time_ns() // 1_000_000
    await connection.execute(_SESSIONS, now, count)
    await connection.execute("VACUUM ANALYZE sessions")
    await connection.execute("CHECKPOINT")  # what filling it has left to write is not what is measured
    await connection.close(timeout=BOUND)


async def lanes(counts: dict[str, int]) -> list[Figure]:
    """Time from `activate` to the drain, with none and with many lanes in flight."""
    hold, times, begun = asyncio.Event(), dict[int, float](), asyncio.Event()

    async def drain(lane: int) -> bool:
        times[lane] = time.perf_counter()
        if lane <= counts["lanes"]:
            if len(times) >= counts["lanes"]:
                begun.set()
            await hold.wait()
        return False

    async with servers() as (_, nats):
        engine = NatsLanes(nats.servers(), slots=counts["lanes"] + 100)
        await engine.start(drain)
        free = await _activations(engine, times, counts["lanes"] + 1)
        times.clear()
        for lane in range(1, counts["lanes"] + 1):
            await engine.activate(lane)
        await asyncio.wait_for(begun.wait(), BOUND)
        full = await _activations(engine, times, counts["lanes"] + 1_001)
        hold.set()
        await engine.stop(1.0)
        await engine.close()
    return [
        at_most("activate → drain, nothing in flight, p50", free, "ms", 6),
        at_most(f"activate → drain, {counts['lanes']:,} in flight, p50", full, "ms", max(6.0, 2 * free)),
    ]


async def _activations(engine: NatsLanes, times: dict[int, float], first: int) -> float:
    waits: list[float] = []
    for lane in range(first, first + 200):
        began = time.perf_counter()
        await engine.activate(lane)
        while lane not in times:  # noqa: ASYNC110 - an event would cost as much as what is measured
            await asyncio.sleep(0)
        waits.append((times[lane] - began) * 1000)
    return statistics.median(waits)


async def idle(counts: dict[str, int]) -> list[Figure]:
    """CPU of a replica that has nothing to do, servers not counted."""
    async with servers() as (postgres, nats):
        given = settings((await postgres.database("idle")).url, nats)
        async with replicas(1, given) as (_,):
            await asyncio.sleep(3)
            began, cpu = time.perf_counter(), time.process_time()
            await asyncio.sleep(counts["idle"])
            share = (time.process_time() - cpu) / (time.perf_counter() - began) * 100
    return [at_most("CPU of an idle replica", share, "%", 1)]


PARTS = {"turns": turns, "runs": runs, "takeover": takeover, "lists": lists, "lanes": lanes, "idle": idle}

if __name__ == "__main__":
    if sys.argv[1:2] == [REPLICA]:
        os.setpgrp()
        run(be_replica(json.loads(sys.argv[2])))
    else:
        main(__doc__, PARTS, COUNTS, QUICK)
