"""Three replicas of one gateway: real processes on a real PostgreSQL and a real NATS, controlled over pipes.

A `ReplicaProcess` can be killed, paused, stopped and started again; a `ReplicaSet` has all of them and their servers.
`ask_until_done` does what a client would: if a replica is gone, it asks another one with the same key.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chaos.worker import SETTINGS
from cluster.database import Postgres
from cluster.proxy import Proxy
from cluster.servers import NatsServer, nats_server
from support import databases
from support.app_fixture import DATABASE

ACK_WAIT = 2.0
BOUND = 30.0
START_TIMEOUT_SECONDS = 90.0  # for a start beside others, on a busy machine
POLL_SECONDS = 0.05  # after which a condition is checked again without news
HERE = Path(__file__).parents[1] / "cluster"
Facts = dict[str, Any]


class ReplicaGone(Exception):
    """The process ended before it answered."""


class ReplicaRefused(Exception):
    """The replica refused the request."""

    def __init__(self, text: str, code: str) -> None:
        super().__init__(text)
        self.code = code


class ReplicaProcess:
    """One replica, which keeps its directory across restarts."""

    def __init__(self, name: str, home: Path, settings: Facts, on_news: Callable[[], None]) -> None:
        self.name = name
        self.url = ""
        self.pid = 0
        self.skew = 0.0
        self.log = home / f"{name}.log"
        self.reports: list[Facts] = []
        """Messages that are not answers."""
        self._home = home
        self._settings = home / f"{name}.json"
        self._settings.write_text(json.dumps(settings))
        self._on_news = on_news
        self._process: Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._up = asyncio.Event()
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._feeds: dict[int, asyncio.Queue[Facts | None]] = {}

    @property
    def alive(self) -> bool:
        return self._up.is_set()

    # --- start and stop ---

    async def start(self, skew: float = 0.0) -> None:
        """Start the process, and wait until it answers."""
        self.skew = skew
        script = ["skewed.py", str(skew)] if skew else ["replica.py"]
        path = os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")]))
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, str(HERE / script[0]), *script[1:],
                str(self._settings), str(self._home / self.name), str(self._home),
                stdin=PIPE, stdout=PIPE, stderr=log, env={**os.environ, "PYTHONPATH": path},
            )  # fmt: skip
        self.pid = self._process.pid
        self._reading = asyncio.create_task(self._read(self._process))
        coming = asyncio.create_task(self._up.wait())
        await asyncio.wait(
            {coming, self._reading}, timeout=START_TIMEOUT_SECONDS, return_when=asyncio.FIRST_COMPLETED
        )
        coming.cancel()
        assert self.alive, f"{self.name} did not start: {self.read_log()[-2000:]}"

    def read_log(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)

    def pause(self) -> None:
        self.signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.signal(signal.SIGCONT)

    async def kill(self) -> None:
        self.signal(signal.SIGKILL)
        await self.wait_for_exit()

    async def leave(self) -> int:
        """Stop with SIGTERM; return the exit code."""
        self.resume()
        self.signal(signal.SIGTERM)
        return await self.wait_for_exit()

    async def wait_for_exit(self) -> int:
        if self._process is None or self._reading is None:
            return 0
        async with asyncio.timeout(BOUND):
            await asyncio.wait({self._reading})
            return await self._process.wait()

    # --- requests ---

    async def ask(self, do: str, within: float = BOUND, **given: Any) -> Any:
        """Send a request and wait for the answer; raises `ReplicaGone` or `ReplicaRefused`."""
        async with asyncio.timeout(within):
            return await self._send(next(self._numbers), do, given)

    async def _send(self, number: int, do: str, given: Facts) -> Any:
        if not self.alive or self._process is None or self._process.stdin is None:
            raise ReplicaGone(self.name)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        try:
            self._process.stdin.write(f"{json.dumps({'id': number, 'do': do, **given})}\n".encode())
            return await answer
        finally:
            self._answers.pop(number, None)

    def begin(self, do: str, **given: Any) -> None:
        """Send a request without an answer; its results arrive in `reports`."""
        assert self._process is not None and self._process.stdin is not None
        request = {"id": next(self._numbers), "do": do, **given}
        self._process.stdin.write(f"{json.dumps(request)}\n".encode())

    async def follow(self, session: str, after: int) -> AsyncGenerator[Facts]:
        """Yield the entries of a session until this process is gone."""
        number = next(self._numbers)
        feed = self._feeds[number] = asyncio.Queue[Facts | None]()
        following = asyncio.create_task(self._send(number, "follow", {"session": session, "after": after}))
        following.add_done_callback(lambda _: feed.put_nowait(None))
        try:
            while fact := await feed.get():
                yield fact
            await following
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            del self._feeds[number]

    async def _read(self, process: Process) -> None:
        assert process.stdout is not None
        with suppress(ValueError):
            while line := await process.stdout.readline():
                self._handle(json.loads(line))
                self._on_news()
        self._up.clear()
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(ReplicaGone(self.name))
        if process.stdin is not None:
            process.stdin.close()
        self._on_news()

    def _handle(self, fact: Facts) -> None:
        if "up" in fact:
            self.url = fact["up"]
            self._up.set()
        elif "on" in fact:
            if feed := self._feeds.get(fact["on"]):
                feed.put_nowait(fact)
        elif "id" in fact:
            answer = self._answers.get(fact["id"])
            if answer is None or answer.done():
                return
            if "error" in fact:
                answer.set_exception(ReplicaRefused(fact["error"], fact["code"]))
            else:
                answer.set_result(fact["told"])
        else:
            self.reports.append(fact)


@dataclass
class ReplicaSet:
    """All replicas, and the servers they share."""

    home: Path
    postgres: Postgres
    nats: NatsServer
    replicas: list[ReplicaProcess]
    store_proxy: Proxy
    """Between the last replica and PostgreSQL."""
    bus_proxy: Proxy
    """Between the last replica and NATS."""
    rng: random.Random
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    tally: Counter[str] = field(default_factory=Counter[str])
    """Counts for the report."""
    refused: Counter[str] = field(default_factory=Counter[str])
    """Refusals by code, after which clients tried again."""

    def notify(self) -> None:
        self.changed.set()

    # --- reading ---

    def rows(self, sql: str, *params: object) -> list[Facts]:
        return self.postgres.rows(self.home / DATABASE, sql, *params)

    async def look(self, sql: str, *params: object) -> list[Facts]:
        return await asyncio.to_thread(self.rows, sql, *params)

    async def wait_for_news(self) -> None:
        """Wait until a replica sends something, for a short time at most."""
        self.changed.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(POLL_SECONDS):
                await self.changed.wait()

    async def until(self, true: Callable[[], bool], seconds: float = BOUND, *, what: str = "") -> None:
        """Wait for a condition, checked whenever a replica sends something and periodically."""
        try:
            async with asyncio.timeout(seconds):
                while not await asyncio.to_thread(true):
                    await self.wait_for_news()
        except TimeoutError:
            raise AssertionError(f"not in {seconds} s: {what or true}") from None

    async def until_rows(self, sql: str, *params: object, seconds: float = BOUND) -> list[Facts]:
        """Wait until the query returns rows."""
        found: list[Facts] = []

        def look() -> bool:
            found[:] = self.rows(sql, *params)
            return bool(found)

        await self.until(look, seconds, what=sql)
        return found

    async def owner_of(self, run: str, seconds: float = BOUND) -> ReplicaProcess:
        """Wait until a replica has claimed the run; return it."""
        sql = "SELECT o.name FROM runs r JOIN owners o ON o.id = r.owner WHERE r.id = $1 AND r.state = 'running'"
        (row,) = await self.until_rows(sql, run, seconds=seconds)
        return next(replica for replica in self.replicas if row["name"].endswith(f":{replica.pid}"))

    # --- as a client ---

    def pick_replica(self, besides: ReplicaProcess | None = None) -> ReplicaProcess | None:
        able = [replica for replica in self.replicas if replica.alive and replica is not besides]
        return self.rng.choice(able) if able else None

    async def ask_until_done(self, do: str, within: float = 90.0, timeout: float = 3.0, **given: Any) -> Any:
        """Ask one replica after the other until one succeeds; give up on each after `timeout` seconds."""
        async with asyncio.timeout(within):
            while True:
                replica = self.pick_replica()
                if replica is not None:
                    try:
                        return await replica.ask(do, timeout, **given)
                    except (ReplicaGone, TimeoutError):
                        pass
                    except ReplicaRefused as error:
                        self.refused[error.code] += 1
                await self.wait_for_news()

    async def wait_for_run_end(self, run: str, seconds: float = 90.0) -> Facts:
        """Wait for the end of a run, asking any replica."""
        async with asyncio.timeout(seconds):
            while True:
                view = await self.ask_until_done("wait", seconds, 10.0, run=run, seconds=5.0)
                if "endedAt" in view:
                    return view

    def count(self) -> None:
        log = "".join(replica.read_log() for replica in self.replicas)
        self.tally["runs"] = len(self.rows("SELECT n FROM runs"))
        self.tally["taken up"] = log.count("is resumed where it was interrupted")
        self.tally["fenced"] = log.count("was taken over")


def make_replica_settings(url: str, secret: Path, bus: str, more: Facts) -> Facts:
    settings: Facts = {
        **SETTINGS,
        "store": {"url": url, "password": {"file": str(secret)}, "connections": 4},
        "bus": {"url": bus, "ackWaitSeconds": ACK_WAIT, "drainSeconds": 1},
        "gateway": {"auth": {"mode": "none"}},
    }
    for name, section in more.items():
        settings[name] = {**settings.get(name, {}), **section}
    return settings


@asynccontextmanager
async def open_replica_set(
    home: Path,
    postgres: Postgres,
    *,
    size: int = 3,
    seed: int = 0,
    **more: Any,
) -> AsyncGenerator[ReplicaSet]:
    """Start all replicas; they are killed when the block is left.

    `more` are sections of the configuration, and `timings` of the engine.
    """
    await asyncio.to_thread(home.mkdir, exist_ok=True)
    async with AsyncExitStack() as stack:
        stack.callback(postgres.drop_all)
        stack.callback(setattr, databases.chosen, "postgres", databases.chosen.postgres)
        databases.chosen.postgres = postgres
        database = (await postgres.database(home / DATABASE)).url
        nats = stack.enter_context(nats_server())
        store_proxy = await stack.enter_async_context(Proxy(postgres.port))
        bus_proxy = await stack.enter_async_context(Proxy(nats.port))
        made = ReplicaSet(home, postgres, nats, [], store_proxy, bus_proxy, random.Random(seed))
        for number in range(size):
            url, bus_url = database, nats.url
            if number == size - 1:
                url = url.replace(f":{postgres.port}/", f":{store_proxy.port}/")
                bus_url = f"nats://127.0.0.1:{bus_proxy.port}"
            settings = make_replica_settings(url, postgres.secret, bus_url, more)
            made.replicas.append(ReplicaProcess(f"r{number}", home, settings, made.notify))
            stack.push_async_callback(made.replicas[-1].kill)
        await asyncio.gather(*(replica.start() for replica in made.replicas))
        yield made
