"""What the gateway costs: the real process behind a real socket, with the model's own time left out.

    uv run python benchmarks/gateway.py                 all of it, about three minutes
    uv run python benchmarks/gateway.py --quick         small sizes, about one minute
    uv run python benchmarks/gateway.py start fanout    only these
    ANTIPHON_SOAK=1800 uv run python benchmarks/gateway.py growth     half an hour of load

The model is the built-in one, which answers at once; `http turns` uses a streaming model behind HTTP instead.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from antiphon.store.sqlite.store import SqliteStore
from core import command_time, fill_sessions
from figures import Figure, at_least, at_most, main, timed, typical_p95
from wire import Client, Wire

ROOT = Path(__file__).parent.parent
COUNTS = {
    "starts": 5,
    "trips": 20_000,
    "subscribers": 1000,
    "messages": 20,
    "turns": 100,
    "each": 20,
    "soak": 60,
}
QUICK = {"starts": 3, "trips": 5_000, "subscribers": 1000, "messages": 5, "turns": 40, "each": 6, "soak": 10}


class Up(NamedTuple):
    port: int
    token: str
    process: psutil.Process
    ready: float
    """Seconds from the start of the process until it answered that it is ready."""


@asynccontextmanager
async def up(folder: Path, config: dict[str, Any] | None = None) -> AsyncGenerator[Up]:
    """`antiphon up` in a process of its own."""
    settings = folder / "config.json5"
    settings.write_text(json.dumps(config or {}))
    command = [str(Path(sys.executable).parent / "antiphon"), "up", "--port", "0"]
    began = time.perf_counter()
    process = await asyncio.create_subprocess_exec(
        *command, "--state-dir", str(folder), "--config", str(settings), stdout=subprocess.DEVNULL
    )
    try:
        note = folder / "gateway.json"
        while not note.exists() or not note.read_bytes():
            assert process.returncode is None, "the gateway did not start"
            await asyncio.sleep(0.002)
        port = int(json.loads(note.read_text())["url"].rpartition(":")[2])
        await _ready(port)
        ready = time.perf_counter() - began
        token = json.loads((folder / "tokens.json").read_text())["tokens"][0]["token"]
        yield Up(port, token, psutil.Process(process.pid), ready)
    finally:
        if process.returncode is None:
            process.terminate()
        await asyncio.wait_for(process.wait(), 30)


async def _ready(port: int) -> None:
    while True:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /readyz HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
        line = await reader.readline()
        writer.close()
        if b" 200 " in line:
            return


@asynccontextmanager
async def temporary(config: dict[str, Any] | None = None) -> AsyncGenerator[Up]:
    with tempfile.TemporaryDirectory() as folder:
        async with up(Path(folder), config) as running:
            yield running


async def start(counts: dict[str, int]) -> list[Figure]:
    """From nothing to ready, and what it weighs then."""
    times: list[float] = []
    sizes: list[float] = []
    for _ in range(counts["starts"]):
        async with temporary() as running:
            times.append(running.ready)
            sizes.append(running.process.memory_info().rss / 2**20)
    return [
        at_most("cold start to ready", statistics.median(times), "s", 1),
        at_most("resident memory, idle", statistics.median(sizes), "MB", 100),
    ]


async def trips(counts: dict[str, int]) -> list[Figure]:
    """`health` over one socket: one after the other, and sixteen on their way at a time."""
    async with temporary() as running:
        client = await Client.connect(running.port, running.token)
        rates: dict[int, float] = {}
        for width in (1, 16):

            async def lane(times: int) -> None:
                for _ in range(times):
                    await client.ask("health")

            began = time.perf_counter()
            await asyncio.gather(*(lane(counts["trips"] // width) for _ in range(width)))
            rates[width] = counts["trips"] / (time.perf_counter() - began)
        client.close()
    return [
        at_least("health round trips/s, one socket, 16 under way", rates[16], "/s", 8000),
        at_least("… strictly one after the other", rates[1], "/s", 3000),
    ]


async def lists(counts: dict[str, int]) -> list[Figure]:
    """`sessions.list` of 200 among 10,000."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "antiphon.db"
        await (await SqliteStore.open(path)).close()
        fill_sessions(path, 10_000)
        async with up(Path(folder)) as running:
            client = await Client.connect(running.port, running.token)
            plain = await typical_p95(lambda: client.ask("sessions.list", limit=200))
            agent = await typical_p95(lambda: client.ask("sessions.list", limit=200, agentId="a3"))
            last = await typical_p95(lambda: client.ask("sessions.list", limit=200, includeLastMessage=True))
            client.close()
    return [
        at_most("sessions.list of 200, 10,000 sessions, p95", plain, "ms", 10),
        at_most("… of one agent, p95", agent, "ms", 10),
        at_most("… with last messages, p95", last, "ms", 30),
    ]


async def commands(counts: dict[str, int]) -> list[Figure]:
    """Whole processes of the command line that ask a running gateway."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as compiled:
        figures: list[Figure] = []
        async with up(Path(folder)) as running:
            client = await Client.connect(running.port, running.token)
            await _founded(client)
            client.close()
            for words in ("status", "sessions list", "sessions history main", "deliveries"):
                arguments = [*words.split(), "--state-dir", folder]
                took = await asyncio.to_thread(command_time, compiled, arguments)
                figures.append(at_most(f"antiphon {words}, beside a gateway", took, "s", 0.3))
    return figures


class _Watch:
    """How many of the subscribers have seen the message that is on its way."""

    def __init__(self, expected: int) -> None:
        self.expected = expected
        self.marker = b""
        self.seen = 0
        self.done = asyncio.Event()

    def text(self, text: bytes) -> None:
        if self.marker and self.marker in text and b'"session.message"' in text:
            self.seen += 1
            if self.seen == self.expected:
                self.done.set()

    def expect(self, marker: str) -> None:
        self.marker, self.seen = marker.encode(), 0
        self.done.clear()


async def fanout(counts: dict[str, int]) -> list[Figure]:
    """One message to a thousand subscribers, one of whom does not read."""
    size = counts["subscribers"]
    async with temporary() as running:
        sender = await Client.connect(running.port, running.token)
        await sender.ask("chat.inject", sessionKey=(await _founded(sender)), message="first")
        watch = _Watch(size)
        wires = [await _subscriber(running, watch) for _ in range(size)]
        stalled = await _stalled(running)
        times: list[float] = []
        for _ in range(counts["messages"]):
            marker = uuid.uuid4().hex
            watch.expect(marker)
            began = time.perf_counter()
            asking = asyncio.create_task(
                sender.ask("chat.inject", sessionKey="main", message=f"{marker} {'x' * 1000}")
            )
            await asyncio.wait_for(watch.done.wait(), 30)
            times.append((time.perf_counter() - began) * 1000)
            await asking
        for wire in wires:
            wire.close()
        stalled.close()
        sender.close()
    return [
        at_most(f"one message to {size:,} subscribers, one stalled, p50", statistics.median(times), "ms", 50)
    ]


async def _founded(client: Client) -> str:
    run = await client.ask("chat.send", sessionKey="main", message="hello", idempotencyKey=uuid.uuid4().hex)
    await client.ask("agent.wait", runId=run["runId"])
    return "main"


async def _subscriber(running: Up, watch: _Watch) -> Wire:
    """Connects and subscribes, then only watches for the marker: a client that decoded would be the bottleneck."""
    client = await Client.connect(running.port, running.token)
    await client.ask("sessions.messages.subscribe", key="main")
    wire = client.wire
    wire.on_text = watch.text
    return wire


async def _stalled(running: Up) -> Wire:
    """Subscribes like the others and never reads again."""
    client = await Client.connect(running.port, running.token)
    await client.ask("sessions.messages.subscribe", key="main")
    transport = client.wire.transport
    assert transport is not None
    transport.pause_reading()
    return client.wire


async def turn(client: Client, session: str, message: str = "say ok") -> None:
    """One `chat.send` until its final event."""
    key = uuid.uuid4().hex
    final = client.finals[key] = asyncio.get_running_loop().create_future()
    await client.ask("chat.send", sessionKey=session, message=message, idempotencyKey=key)
    await asyncio.wait_for(final, 60)


async def turns(counts: dict[str, int]) -> list[Figure]:
    async with temporary() as running:
        return await _turns(running, counts, "instant model")


async def _turns(running: Up, counts: dict[str, int], model: str) -> list[Figure]:
    """One after the other, in conversations of ten turns; then fifty conversations at once."""
    client = await Client.connect(running.port, running.token)
    await turn(client, "main")
    cpu = sum(running.process.cpu_times()[:2])
    numbers = count()
    alone = await timed(
        lambda: turn(client, f"agent:main:dashboard:alone-{next(numbers) // 10}"), counts["turns"]
    )
    cost = (sum(running.process.cpu_times()[:2]) - cpu) * 1000 / counts["turns"]

    async def lane(number: int) -> None:
        for _ in range(counts["each"]):
            await turn(client, f"agent:main:dashboard:{number}")

    began = time.perf_counter()
    await asyncio.gather(*map(lane, range(50)))
    rate = 50 * counts["each"] / (time.perf_counter() - began)
    client.close()
    return [
        at_most(f"chat.send → final, {model}, p50", statistics.median(alone), "ms", 25),
        at_most("… CPU per turn", cost, "ms", 25),
        at_least(f"turns/s, 50 sessions, {model}", rate, "/s", 60),
    ]


async def http_turns(counts: dict[str, int]) -> list[Figure]:
    """The same with a model that streams over HTTP, from a process beside this one."""
    provider = await asyncio.create_subprocess_exec(
        sys.executable,
        str(ROOT / "tests" / "support" / "model_provider.py"),
        "--port",
        "0",
        stdout=subprocess.PIPE,
    )
    try:
        assert provider.stdout is not None
        port = int(await provider.stdout.readline())
        local = {
            "baseUrl": f"http://127.0.0.1:{port}/v1",
            "apiKey": "x",
            "api": "openai-completions",
            "models": [{"id": "m1"}],
        }
        config = {
            "models": {"providers": {"local": local}},
            "agents": {"defaults": {"model": {"primary": "local/m1"}}},
        }
        async with temporary(config) as running:
            return await _turns(running, counts, "HTTP model")
    finally:
        provider.terminate()
        await provider.wait()


async def growth(counts: dict[str, int]) -> list[Figure]:
    """Memory over minutes of turns in 50 sessions: what it holds after the first fifth is all it ever holds."""
    seconds = float(os.environ.get("ANTIPHON_SOAK", counts["soak"]))
    async with temporary() as running:
        client = await Client.connect(running.port, running.token)
        sizes: list[float] = []
        count = 0

        async def lane(number: int, until: float) -> None:
            nonlocal count
            while time.perf_counter() < until:
                await turn(client, f"agent:main:dashboard:{number}-{count // 500}")
                count += 1

        began = time.perf_counter()
        for step in range(5):
            until = began + seconds * (step + 1) / 5
            await asyncio.gather(*(lane(number, until) for number in range(50)))
            sizes.append(running.process.memory_info().rss / 2**20)
        client.close()
    grown = (sizes[-1] / sizes[0] - 1) * 100
    return [
        at_most(
            f"memory after {count:,} turns in {seconds:.0f} s, {sizes[-1]:.0f} MB, grown by", grown, "%", 10
        )
    ]


PARTS = {
    "start": start,
    "trips": trips,
    "lists": lists,
    "commands": commands,
    "fanout": fanout,
    "turns": turns,
    "http_turns": http_turns,
    "growth": growth,
}

if __name__ == "__main__":
    main(__doc__, PARTS, COUNTS, QUICK)
