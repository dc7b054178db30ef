"""What the core costs, with the model's own time left out.

    uv run python benchmarks/core.py            all of it, about five minutes
    uv run python benchmarks/core.py --quick    small sizes, about a minute
    uv run python benchmarks/core.py runs lists only these

Every figure is the median of repeats; the machine's load is printed before and after, because a busy machine
makes every one of them worse. Targets are those of the project's performance budget.
"""

from __future__ import annotations

import asyncio
import os
import re
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import psutil

from antiphon.access import Caller
from antiphon.app import open_app_operations, open_operations_readonly
from antiphon.config import Config, parse
from antiphon.engine.sessions import session_rows, transcripts
from antiphon.engine.sessions.transcripts import HistoryFilter
from antiphon.messages import TextBlock, UserMessage
from antiphon.operations.operations import Operations
from antiphon.operations.types import IncomingMessage, ListFilter
from antiphon.runtimes import Prompt
from antiphon.runtimes.function import FunctionRuntime
from antiphon.store import Tx
from antiphon.store.sqlite.store import SqliteStore
from figures import Figure, at_least, at_most, main, p95, typical_p95

OPERATOR = Caller.operator()
ROOT = Path(__file__).parent.parent
COUNTS = {
    "repeats": 5,
    "latency": 300,
    "runs": 60,
    "appends": 20_000,
    "many": 1_000_000,
    "turns": 20_000,
    "http": 60,
}
QUICK = {
    "repeats": 3,
    "latency": 100,
    "runs": 20,
    "appends": 5_000,
    "many": 100_000,
    "turns": 2_000,
    "http": 20,
}


async def instant(prompt: Prompt) -> str:
    return "ok"


@asynccontextmanager
async def host(
    agent: Callable[[Prompt], Awaitable[str]] = instant, *, transcript_files: bool = False
) -> AsyncGenerator[Operations]:
    """An engine without transcript files, unless they are asked for: they are measured apart."""
    config, _ = parse({"session": {"transcripts": {"mirror": transcript_files}}})
    with tempfile.TemporaryDirectory() as folder:
        functions = {"main": FunctionRuntime(agent, history=False)}
        async with open_app_operations(config, Path(folder), functions=functions) as operations:
            yield operations


async def one_run(operations: Operations, session: str) -> None:
    accepted = await operations.messages.submit(OPERATOR, IncomingMessage(session=session, content="hello"))
    view = await operations.runs.wait(OPERATOR, accepted.run_id, 30)
    assert view.state == "ok", view


async def latency(counts: dict[str, int]) -> list[Figure]:
    """From the answer "accepted" to the agent being called, one message at a time, fsync on."""
    started: list[float] = []

    async def agent(prompt: Prompt) -> str:
        started.append(time.perf_counter())
        return "ok"

    waits: list[float] = []
    async with host(agent) as operations:
        for _ in range(counts["latency"]):
            accepted = await operations.messages.submit(
                OPERATOR, IncomingMessage(session="main", content="hello")
            )
            at = time.perf_counter()
            await operations.runs.wait(OPERATOR, accepted.run_id, 30)
            waits.append((started[-1] - at) * 1000)
    return [
        at_most("accepted → started, p50", statistics.median(waits), "ms", 2),
        at_most("accepted → started, p95", p95(waits), "ms", 10),
    ]


async def runs(counts: dict[str, int]) -> list[Figure]:
    """100 sessions: with their messages queued up, and one at a time (the next when the last is answered)."""

    async def queued(operations: Operations, session: str) -> None:
        for _ in range(counts["runs"] - 1):
            await operations.messages.submit(OPERATOR, IncomingMessage(session=session, content="hello"))
        await one_run(operations, session)

    async def in_turn(operations: Operations, session: str) -> None:
        for _ in range(counts["runs"]):
            await one_run(operations, session)

    async with host() as operations:
        throughput, cpu = await rate(partial(queued, operations), counts)
        closed, closed_cpu = await rate(partial(in_turn, operations), counts)
    async with host(transcript_files=True) as operations:
        _, mirrored_cpu = await rate(partial(queued, operations), counts)
    return [
        at_least("runs/s, instant agent, 100 sessions", throughput, "/s", 3000),
        at_most("… CPU per run", cpu, "ms", 0.5),
        at_most("… CPU per run, with transcript files", mirrored_cpu, "ms", 0.65),
        at_least("runs/s, each session waiting for its answers", closed, "/s", 1500),
        at_most("… CPU per run and wait", closed_cpu, "ms", 0.8),
    ]


async def rate(session: Callable[[str], Awaitable[None]], counts: dict[str, int]) -> tuple[float, float]:
    """Runs a second and CPU milliseconds a run, medians of repeats."""
    total = 100 * counts["runs"]
    rates: list[float] = []
    cpus: list[float] = []
    for _ in range(counts["repeats"]):
        began, cpu = time.perf_counter(), time.process_time()
        await asyncio.gather(*(session(f"agent:main:dashboard:{number}") for number in range(100)))
        rates.append(total / (time.perf_counter() - began))
        cpus.append((time.process_time() - cpu) * 1000 / total)
    return statistics.median(rates), statistics.median(cpus)


async def appends(counts: dict[str, int]) -> list[Figure]:
    """Durable appends by 100 concurrent writers to their own sessions; one append is one transaction."""

    async def append(tx: Tx, session: int) -> None:
        now = time.time_ns() // 1_000_000
        row = await tx.one(session_rows.SQL.reserve_seq_unfenced, id=session, count=1, now=now)
        assert row is not None
        message = UserMessage(content=[TextBlock(text="x" * 400)], timestamp=now)
        await transcripts.append(tx, row["transcript"], row["last_seq"], None, [message], now)

    async def writer(store: SqliteStore, session: int, times: int) -> None:
        for _ in range(times):
            await store.tx(append, session)

    rates: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "antiphon.db"
        await (await SqliteStore.open(path)).close()
        fill_sessions(path, 100)
        store = await SqliteStore.open(path)
        for _ in range(counts["repeats"]):
            each = counts["appends"] // 100
            began = time.perf_counter()
            await asyncio.gather(*(writer(store, 1 + number, each) for number in range(100)))
            rates.append(100 * each / (time.perf_counter() - began))
        await store.close()
    return [at_least("durable appends/s, 100 concurrent", statistics.median(rates), "/s", 12_000)]


def fill_sessions(path: Path, count: int) -> None:
    """Rows as if `count` sessions had been used: mostly chats, some jobs, some children."""
    kinds = ["other"] * 50 + ["group"] * 40 + ["main"] * 4 + ["hook"] * 4 + ["node"] * 2
    now = time.time_ns() // 1_000_000
    db = sqlite3.connect(path)
    db.execute("PRAGMA synchronous = OFF")

    def rows() -> Iterator[tuple[object, ...]]:
        for number in range(1, count + 1):
            kind = "cron" if number % 1000 == 0 else kinds[number % 100]
            key = f"agent:a{number % 7}:dashboard:{number}"
            parent = number // 50 if number % 10 == 0 and number > 50 else None
            label = f"label {number}" if number % 3 == 0 else None
            shuffled = now - (number * 7919 % count) * 1000
            yield (
                number,
                key,
                str(uuid.UUID(int=number)),
                number,
                f"a{number % 7}",
                kind,
                label,
                parent,
                shuffled,
            )

    db.executemany(
        "INSERT INTO sessions (id, key, session_id, transcript, agent_id, kind, label, spawned_by, created_at, "
        "updated_at) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?9)",
        rows(),
    )
    db.execute(
        "INSERT INTO session_names (rowid, names) SELECT id, id || ' ' || coalesce(label, '') FROM sessions"
    )
    db.commit()
    db.close()


FILTERS = {
    "newest": ListFilter(limit=200),
    "kinds main+group": ListFilter(limit=200, kinds=["main", "group"]),
    "kind cron (rare)": ListFilter(limit=200, kinds=["cron"]),
    "active 60 min": ListFilter(limit=200, active_minutes=60),
    "agent": ListFilter(limit=200, agent_id="a3"),
    "agent + kind": ListFilter(limit=200, agent_id="a3", kinds=["group"]),
    "label": ListFilter(limit=200, label="label 999"),
    "search": ListFilter(limit=200, search="label 99"),
    "search, common word": ListFilter(limit=200, search="label"),
    "spawned by": ListFilter(limit=200, spawned_by="agent:a1:dashboard:8"),
    "with archived": ListFilter(limit=200, include_archived=True),
}


async def lists(counts: dict[str, int]) -> list[Figure]:
    """A page of 200 through `Operations.list`, by every filter, and deep in the list."""
    figures: list[Figure] = []
    for size, most in ((10_000, 3.0), (counts["many"], 5.0)):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "antiphon.db"
            await (await SqliteStore.open(path)).close()
            fill_sessions(path, size)
            os.sync()  # what filling it has left to write is not what is measured
            async with open_operations_readonly(Config(), Path(folder)) as operations:
                nothing = await typical_p95(
                    lambda: operations.sessions.describe(OPERATOR, "agent:a1:dashboard:1")
                )
                figures.append(at_most(f"one session, {size:,}, p95: the machine's unrest", nothing, "ms", 1))
                for name, wanted in FILTERS.items():
                    figures.append(await timed_list(operations, f"list {name}, {size:,}", wanted, most))
                page = await operations.sessions.list(OPERATOR, FILTERS["newest"])
                deep = ListFilter(limit=200, cursor=page.next_cursor)
                figures.append(await timed_list(operations, f"list second page, {size:,}", deep, most))
    return figures


async def timed_list(operations: Operations, name: str, wanted: ListFilter, most: float) -> Figure:
    async def once() -> None:
        assert (await operations.sessions.list(OPERATOR, wanted)).count

    return at_most(f"{name}, p95", await typical_p95(once), "ms", most)


async def history(counts: dict[str, int]) -> list[Figure]:
    """The last 200 entries of a transcript of 100,000."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "antiphon.db"
        await (await SqliteStore.open(path)).close()
        fill_sessions(path, 1)
        db = sqlite3.connect(path)
        body = '{"role":"user","content":"' + "x" * 300 + '","timestamp":1}'
        db.executemany(
            "INSERT INTO messages (transcript, seq, entry, role, body, created_at) VALUES (1, ?, 'e', 'user', ?, 1)",
            ((seq, body) for seq in range(1, 100_001)),
        )
        db.execute(
            "INSERT INTO transcripts (id, session_id, key, reason, started_at) "
            "SELECT transcript, session_id, key, 'created', 1 FROM sessions"
        )
        db.commit()
        db.close()
        async with open_operations_readonly(Config(), Path(folder)) as operations:

            async def once() -> None:
                page = await operations.transcripts.read(
                    OPERATOR, "agent:a1:dashboard:1", HistoryFilter(limit=200)
                )
                assert len(page.messages) == 200

            return [at_most("last 200 of 100,000 entries, p95", await typical_p95(once), "ms", 10)]


async def http(counts: dict[str, int]) -> list[Figure]:
    """A whole turn against a streaming HTTP model in another process: CPU of this process only."""
    server = subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, str(ROOT / "tests" / "support" / "model_provider.py"), "--port", "0"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        port = int(re.findall(r"\d+", server.stdout.readline())[-1])
        provider = {"baseUrl": f"http://127.0.0.1:{port}/v1", "apiKey": "x", "models": [{"id": "m"}]}
        config, _ = parse({"models": {"providers": {"local": provider}}})
        cpus: list[float] = []
        walls: list[float] = []
        with tempfile.TemporaryDirectory() as folder:
            async with open_app_operations(config, Path(folder)) as operations:
                await one_run(operations, "main")
                for _ in range(counts["http"]):
                    await operations.conversations.renew(OPERATOR, "main")
                    began, cpu = time.perf_counter(), time.process_time()
                    await one_run(operations, "main")
                    walls.append((time.perf_counter() - began) * 1000)
                    cpus.append((time.process_time() - cpu) * 1000)
    finally:
        server.kill()
        server.wait()
    return [
        at_most("turn over HTTP, CPU", statistics.median(cpus), "ms", 40),
        at_most("turn over HTTP, p50", statistics.median(walls), "ms", 60),
    ]


async def memory(counts: dict[str, int]) -> list[Figure]:
    """Resident memory after a warm-up and after many more turns."""
    process = psutil.Process()
    async with host() as operations:

        async def turns(times: int) -> None:
            for _ in range(times // 100):
                await asyncio.gather(*(one_run(operations, f"agent:main:dashboard:{n}") for n in range(100)))

        await turns(max(1000, counts["turns"] // 10))
        before = process.memory_info().rss
        await turns(counts["turns"])
        growth = (process.memory_info().rss / before - 1) * 100
    return [at_most(f"memory growth over {counts['turns']:,} turns", growth, "%", 10)]


async def commands(counts: dict[str, int]) -> list[Figure]:
    """Whole processes of the command line: of `--version`, and of questions to the store while no gateway runs.

    Their modules are compiled before, as on any machine on which they have run once.
    """
    with tempfile.TemporaryDirectory() as folder:
        state = Path(folder) / "state"
        async with open_app_operations(Config(), state) as operations:
            await one_run(operations, "main")
        figures = [at_most("antiphon --version", command_time(folder, ["--version"]), "s", 0.15)]
        for words in ("status", "sessions list", "sessions history main", "deliveries"):
            arguments = [*words.split(), "--state-dir", str(state)]
            figures.append(
                at_most(f"antiphon {words}, no gateway", command_time(folder, arguments), "s", 0.3)
            )
    return figures


def command_time(folder: str, arguments: list[str]) -> float:
    """Seconds that a command takes; where its compiled modules are kept is `folder`."""
    command = [str(Path(sys.executable).parent / "antiphon"), *arguments]
    environ = {**os.environ, "PYTHONPYCACHEPREFIX": f"{folder}/compiled", "PYTHONDONTWRITEBYTECODE": ""}
    times: list[float] = []
    for _ in range(10):
        began = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environ)
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


PARTS = {
    "latency": latency,
    "runs": runs,
    "appends": appends,
    "lists": lists,
    "history": history,
    "http": http,
    "memory": memory,
    "commands": commands,
}


if __name__ == "__main__":
    main(__doc__, PARTS, COUNTS, QUICK)
