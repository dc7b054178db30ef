"""Counts the files and functions of `src/antiphon` that one message passes through.

    uv run python benchmarks/walk.py            both messages, with the figures before the code was laid out anew
    uv run python benchmarks/walk.py --list     and their files, in the order of first entry

`chat.send` is one message over the WebSocket until its final event; `sessions_send` is one exchange between two
agents with three reply-backs and an announcement. The rehearsal model answers, and everything that runs only once
per process or session has run before. A function counts once, however often it is called; comprehensions and
lambdas count as part of the function they are in.

Each message is sent five times, at irregular intervals, and only functions that all five recordings have are counted.
Background work that merely coincides with a message (the supervisor, the sampling of metrics, the check of the token
file, the polling of the outbox) has its own timers, all slower than a message, and so is in some recordings at most.
The transcript mirror, which copies entries to files a moment later, is off. Following the tasks that a message creates
would not do: the long-lived tasks of the connection, the store's threads, the hub and the outbox carry it as well.
On a busy machine a message can take longer than a timer: count again when it is idle.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sqlite3
import sys
import tempfile
import threading
from collections.abc import Awaitable, Callable
from itertools import count
from pathlib import Path
from types import CodeType, FrameType

import antiphon
from antiphon.config import parse
from antiphon.event_loop import run
from antiphon.gateway.server import serve_gateway
from gateway import turn
from wire import Client

SOURCE_DIR = Path(antiphon.__file__).parent
BEFORE = {"chat.send": "45 files, 261 functions", "sessions_send": "64 files, 404 functions"}
"""Counted with the same rule in commit c2471e6."""
CONFIG = {
    "agents": {"list": [{"id": "main"}, {"id": "helper"}]},
    "tools": {"sessions": {"visibility": "all"}, "agentToAgent": {"enabled": True}},
    "session": {"agentToAgent": {"maxPingPongTurns": 3}, "transcripts": {"mirror": False}},
}
WAIT_SECONDS = 30
RECORDINGS = 5
PAUSE_SECONDS = 0.13  # before the first recording; twice as long before the second, and so on


class Walk:
    """The code entered in every recording of a message, in the order of first entry."""

    def __init__(self) -> None:
        self._entered: dict[CodeType, None] = {}
        self._is_recording = False
        self.functions: list[CodeType] = []
        """Named functions of the package; comprehensions, lambdas, class bodies and modules are left out."""

    def profile(self, frame: FrameType, event: str, _: object) -> None:
        if self._is_recording and event == "call":
            self._entered.setdefault(frame.f_code)

    async def record(self, send: Callable[[], Awaitable[object]]) -> None:
        """Send a message several times and keep the functions that it entered each time."""
        for number in range(RECORDINGS):
            await asyncio.sleep(
                PAUSE_SECONDS * (number + 1)
            )  # let the previous message end; out of step with timers
            self._entered.clear()
            self._is_recording = True
            await send()
            self._is_recording = False
            known = self._entered if number == 0 else self.functions
            self.functions = [code for code in known if code in self._entered and _is_counted(code)]

    @property
    def files(self) -> list[str]:
        return list(dict.fromkeys(str(Path(c.co_filename).relative_to(SOURCE_DIR)) for c in self.functions))


def _is_counted(code: CodeType) -> bool:
    return code.co_filename.startswith(f"{SOURCE_DIR}/") and not code.co_name.startswith("<")


async def exchange(client: Client, database: Path, name: str) -> None:
    """One `sessions_send` of `main` to `helper`, until it is settled."""
    call = {"sessionKey": "agent:helper:main", "message": f"say say say say {name}\nannounce {name}"}
    await turn(client, "main", f"call sessions_send {json.dumps(call)}")
    async with asyncio.timeout(WAIT_SECONDS):
        while not _is_settled(database, call["message"]):  # noqa: ASYNC110 - events would be part of the walk
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)  # its event follows the commit


def _is_settled(database: Path, message: str) -> bool:
    """Whether the exchange ended with its announcement; read beside the store, so as not to be counted."""
    with sqlite3.connect(database) as connection:
        row = connection.execute(
            "SELECT turn, announced FROM exchanges WHERE message = ? AND settled_at IS NOT NULL", (message,)
        ).fetchone()
    connection.close()
    return row == (3, "delivered")  # it is settled a moment before its announcement is delivered


async def walk(listed: bool) -> None:
    steps = Walk()
    threading.setprofile(steps.profile)  # before the store starts its threads
    sys.setprofile(steps.profile)
    config, _ = parse(CONFIG)
    with tempfile.TemporaryDirectory() as folder:
        state_dir = Path(folder)
        async with serve_gateway(config, state_dir, port=0) as served:
            token = json.loads((state_dir / "tokens.json").read_text())["tokens"][0]["token"]
            client = await Client.connect(int(served.url.rpartition(":")[2]), token)
            database = state_dir / "antiphon.db"
            await turn(client, "main")
            await exchange(client, database, "first")
            await steps.record(lambda: turn(client, "main"))
            report("chat.send", steps, listed)
            names = map(str, count())
            await steps.record(lambda: exchange(client, database, next(names)))
            report("sessions_send", steps, listed)
            client.close()


def report(name: str, steps: Walk, listed: bool) -> None:
    print(f"{name}: {len(steps.files)} files, {len(steps.functions)} functions (before: {BEFORE[name]})")
    if listed:
        functions = [Path(code.co_filename) for code in steps.functions]
        for file in steps.files:
            print(f"  {file} ({functions.count(SOURCE_DIR / file)})")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", dest="listed", help="the files, too")
    run(_walk_apart(parser.parse_args().listed))


async def _walk_apart(listed: bool) -> None:
    """Run the client in a task of its own, so that the package's entry point is not resumed during a recording."""
    await asyncio.create_task(walk(listed))


if __name__ == "__main__":
    main()
