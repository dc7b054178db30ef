"""A process that runs one command for an agent, and kills itself at a chosen commit.

python tests/tools/command_gateway.py STATE-DIR COMMAND KILL-AT
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

from antiphon.access import Caller
from antiphon.app import open_app_operations
from antiphon.config import Config
from antiphon.operations.types import IncomingMessage

SETTINGS = {"tools": {"exec": {"host": "gateway", "security": "full", "ask": "off"}}}
MAX_SECONDS = 60
RUN_ID = "the-run"


async def run(state_dir: Path, command: str, kill_at: int) -> None:
    commits = 0

    def count(_: str) -> None:
        nonlocal commits
        commits += 1
        if commits == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    config = Config.model_validate(SETTINGS)
    async with open_app_operations(config, state_dir, on_commit=count) as operations:
        commits = 0
        message = IncomingMessage(
            session="agent:main:main",
            content=f"call exec {json.dumps({'command': command})}",
            idempotency_key=RUN_ID,
        )
        await operations.messages.submit(Caller.operator(), message)
        await operations.runs.wait(Caller.operator(), RUN_ID, MAX_SECONDS)


if __name__ == "__main__":
    signal.alarm(MAX_SECONDS)
    asyncio.run(run(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
