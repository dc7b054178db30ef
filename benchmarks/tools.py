"""What the session tools cost, with instant models: the tool call as an agent makes it, to its result.

    uv run python benchmarks/tools.py            all of it, about two minutes
    uv run python benchmarks/tools.py --quick    small sizes
    uv run python benchmarks/tools.py sends      only this part

Searching a million messages is `benchmarks/search.py`.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import tempfile
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from antiphon.access import Caller
from antiphon.app import App, open_app
from antiphon.bus import EVERY_SESSION_TOPIC, Delivered, Listener
from antiphon.config import Config, parse
from antiphon.engine.toolbox import ToolOutput, ToolRequest
from antiphon.operations.types import IncomingMessage
from antiphon.runtimes import Prompt
from antiphon.runtimes.function import FunctionRuntime
from antiphon.store.sqlite.store import SqliteStore
from core import fill_sessions
from figures import Figure, at_least, at_most, main, p95, typical_p95
from search import fill_messages, indexed

OPERATOR = Caller.operator()
MAIN = Caller.agent("main", "agent:main:main")
COUNTS = {"sessions": 10_000, "sends": 200, "exchanges": 40, "spawns": 1_000}
QUICK = {"sessions": 2_000, "sends": 50, "exchanges": 10, "spawns": 100}
SETTINGS = {
    "agents": {
        "defaults": {"subagents": {"maxChildrenPerAgent": 1000}},
        "list": [{"id": "main", "default": True}, {"id": "helper"}],
    },
    "tools": {"sessions": {"visibility": "all"}, "agentToAgent": {"enabled": True}},
}


def config() -> Config:
    return parse(SETTINGS)[0]


async def instant(prompt: Prompt) -> str:
    return "ok"


@asynccontextmanager
async def hosted(folder: Path, agent: Callable[[Prompt], Awaitable[str]] = instant) -> AsyncGenerator[App]:
    functions = {name: FunctionRuntime(agent, history=False) for name in ("main", "helper")}
    async with open_app(config(), folder, functions=functions) as opened:
        for name in functions:
            await opened.operations.sessions.open(OPERATOR, f"agent:{name}:main")
        yield opened


async def call(opened: App, tool: str, **arguments: Any) -> ToolOutput:
    """As a run's step would, without the run."""
    made = ToolRequest(caller=MAIN, run_id="benchmark", call_id=uuid.uuid4().hex, arguments=arguments)
    result = await opened.toolbox.tools[tool].invoke(made)
    assert not result.is_error, result.text
    return result


async def lists(counts: dict[str, int]) -> list[Figure]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "antiphon.db"
        await (await SqliteStore.open(path)).close()
        fill_sessions(path, counts["sessions"])
        fill_messages(path, 5 * counts["sessions"], counts["sessions"])
        await indexed(path)  # else that goes on beside what is measured
        async with hosted(Path(folder)) as opened:
            rows = await typical_p95(lambda: call(opened, "sessions_list", limit=200))
            said = await typical_p95(lambda: call(opened, "sessions_list", limit=200, messageLimit=3))
            found = (await call(opened, "sessions_list", limit=200)).details
            assert found["count"] == 200, found["count"]
    return [
        at_most(f"sessions_list, 200 of {counts['sessions']:,}, p95", rows, "ms", 10),
        at_most("sessions_list with 3 messages each, p95", said, "ms", 30),
    ]


async def sends(counts: dict[str, int]) -> list[Figure]:
    times: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        async with hosted(Path(folder)) as opened:
            for _ in range(counts["sends"]):
                began = time.perf_counter()
                arguments = {"sessionKey": "agent:helper:main", "message": "hello", "announce": "none"}
                result = await call(opened, "sessions_send", **arguments, replyBack=0)
                times.append((time.perf_counter() - began) * 1000)
                assert result.details["status"] == "ok", result
    return [
        at_most("sessions_send, call to reply, p50", statistics.median(times), "ms", 30),
        at_most("sessions_send, call to reply, p95", p95(times), "ms", 60),
    ]


async def exchanges(counts: dict[str, int]) -> list[Figure]:
    """From the call to the announcement in the target's chat: the first reply, five turns, the announce step."""
    times: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        async with hosted(Path(folder)) as opened, opened.bus.listen(EVERY_SESSION_TOPIC) as events:
            for _ in range(counts["exchanges"]):
                began = time.perf_counter()
                await call(opened, "sessions_send", sessionKey="agent:helper:main", message="hello")
                await delivered(events, 1)
                times.append((time.perf_counter() - began) * 1000)
    return [
        at_most("exchange: five turns and an announce, p50", statistics.median(times), "ms", 200),
        at_most("exchange: five turns and an announce, p95", p95(times), "ms", 400),
    ]


async def spawns(counts: dict[str, int]) -> list[Figure]:
    """From the first call to the last report in the requester's chat."""
    count = counts["spawns"]
    with tempfile.TemporaryDirectory() as folder:
        async with hosted(Path(folder)) as opened, opened.bus.listen(EVERY_SESSION_TOPIC) as events:
            began = time.perf_counter()
            hearing = asyncio.create_task(delivered(events, count))
            for start in range(0, count, 100):
                batch = range(start, min(start + 100, count))
                await asyncio.gather(*(call(opened, "sessions_spawn", task=f"task {n}") for n in batch))
            accepted = time.perf_counter() - began
            await hearing
            settled = time.perf_counter() - began
    return [
        at_least("spawns accepted per second, 100 at once", count / accepted, "/s", 100),
        at_most(f"{count:,} spawns reported", settled, "s", 60 * count / 1000),
    ]


async def delivered(events: Listener, count: int) -> None:
    """Until so many deliveries were heard of."""
    left = count
    async with asyncio.timeout(120):
        while left:
            left -= isinstance(await events.get(), Delivered)


async def turns(counts: dict[str, int]) -> list[Figure]:
    """A model-driven send: the whole run of an agent that asks another one and then answers."""
    with tempfile.TemporaryDirectory() as folder:
        async with open_app(config(), Path(folder)) as opened:
            await opened.operations.sessions.open(OPERATOR, "agent:helper:main")
            asked = {
                "sessionKey": "agent:helper:main",
                "message": "say yes",
                "replyBack": 0,
                "announce": "none",
            }
            text = f"call sessions_send {json.dumps(asked)}\nsay done"
            times: list[float] = []
            for _ in range(counts["sends"]):
                began = time.perf_counter()
                accepted = await opened.operations.messages.submit(
                    OPERATOR, IncomingMessage(session="main", content=text)
                )
                view = await opened.operations.runs.wait(OPERATOR, accepted.run_id, 30)
                times.append((time.perf_counter() - began) * 1000)
                assert view.reply == "done", view
    return [at_most("a whole turn with a send in it, p50", statistics.median(times), "ms", 60)]


PARTS = {"lists": lists, "sends": sends, "turns": turns, "exchanges": exchanges, "spawns": spawns}

if __name__ == "__main__":
    main(__doc__, PARTS, COUNTS, QUICK)
