"""A process that answers one message for an agent, and kills itself at a chosen commit.

python tests/tools/command_gateway.py STATE-DIR CONFIG MESSAGE KILL-AT [COUNT-FROM]

Each commit counts twice, before and after it; none counts before the file COUNT-FROM is there.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

from antiphon.access import Caller
from antiphon.app import open_app_operations
from antiphon.config import Config
from antiphon.operations.types import IncomingMessage

MAX_SECONDS = 60
RUN_ID = "the-run"


async def run(state_dir: Path, config: str, message: str, kill_at: int, count_from: Path | None) -> None:
    settings = Config.model_validate_json(config)
    commits = 0

    def count(_: str) -> None:
        nonlocal commits
        if count_from is not None and not count_from.exists():
            return
        commits += 1
        if commits == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    async with open_app_operations(settings, state_dir, on_commit=count) as operations:
        commits = 0
        incoming = IncomingMessage(session="agent:main:main", content=message, idempotency_key=RUN_ID)
        await operations.messages.submit(Caller.operator(), incoming)
        await operations.runs.wait(Caller.operator(), RUN_ID, MAX_SECONDS)


if __name__ == "__main__":
    signal.alarm(MAX_SECONDS)
    state_dir, config, message, kill_at, *count_from = sys.argv[1:]
    asyncio.run(
        run(Path(state_dir), config, message, int(kill_at), Path(count_from[0]) if count_from else None)
    )
