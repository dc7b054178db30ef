"""Counts the files and functions of `src/antiphon` that one message passes through.

    uv run python benchmarks/walk.py            both messages, with the figures before the code was laid out anew
    uv run python benchmarks/walk.py --list     and their files, in the order of first entry

`chat.send` is one message over the WebSocket until its final event; `sessions_send` is one exchange between two
agents with three reply-backs and an announcement. The rehearsal model answers, and everything that runs only once
per process or session has run before. A function counts once, however often it is called; comprehensions and
lambdas count as part of the function they are in.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sqlite3
import sys
import tempfile
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType

import antiphon
from antiphon.config import parse
from antiphon.event_loop import run
from antiphon.gateway.server import serve_gateway
from gateway import turn
from wire import Client

SOURCE_DIR = Path(antiphon.__file__).parent
BEFORE = {"chat.send": "43 files, 236 functions", "sessions_send": "67 files"}
CONFIG = {
    "agents": {"list": [{"id": "main"}, {"id": "helper"}]},
    "tools": {"sessions": {"visibility": "all"}, "agentToAgent": {"enabled": True}},
    "session": {"agentToAgent": {"maxPingPongTurns": 3}},
}
WAIT_SECONDS = 30


class Walk:
    """The code entered while recording, in the order of first entry."""

    def __init__(self) -> None:
        self.entered: dict[CodeType, None] = {}
        self._recording = False

    def profile(self, frame: FrameType, event: str, _: object) -> None:
        if self._recording and event == "call":
            self.entered.setdefault(frame.f_code)

    @contextmanager
    def record(self) -> Generator[None]:
        self.entered.clear()
        self._recording = True
        try:
            yield
        finally:
            self._recording = False

    @property
    def functions(self) -> list[CodeType]:
        """Named functions of the package; comprehensions, lambdas, class bodies and modules are left out."""
        inside = f"{SOURCE_DIR}/"
        return [
            code
            for code in self.entered
            if code.co_filename.startswith(inside) and not code.co_name.startswith("<")
        ]

    @property
    def files(self) -> list[str]:
        return list(dict.fromkeys(str(Path(c.co_filename).relative_to(SOURCE_DIR)) for c in self.functions))


async def exchange(client: Client, database: Path, name: str) -> None:
    """One `sessions_send` of `main` to `helper`, until it is settled."""
    call = {"sessionKey": "agent:helper:main", "message": f"say say say say {name}\nannounce {name}"}
    await turn(client, "main", f"call sessions_send {json.dumps(call)}")
    async with asyncio.timeout(WAIT_SECONDS):
        while not _is_settled(database, call["message"]):  # noqa: ASYNC110 - events would be part of the walk
            await asyncio.sleep(0.01)


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
            with steps.record():
                await turn(client, "main")
            report("chat.send", steps, listed)
            with steps.record():
                await exchange(client, database, "second")
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
    run(walk(parser.parse_args().listed))


if __name__ == "__main__":
    main()
