"""A real `antiphon up` beside the commands of a test. A gateway that still runs when its test ends is killed."""

from __future__ import annotations

import json
import signal
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager
from subprocess import Popen
from typing import Any

from antiphon.client import Client, Site
from cli.terminal import BOUND, Program


class Gateway:
    def __init__(self, process: Popen[str], facts: dict[str, Any]) -> None:
        self.process = process
        self.facts = facts

    @property
    def url(self) -> str:
        return self.facts["url"]

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def stop(self, how: signal.Signals = signal.SIGTERM) -> int:
        """Signal it, and wait for its exit code."""
        self.process.send_signal(how)
        self.process.communicate(timeout=BOUND)
        return self.process.returncode


@contextmanager
def up(
    program: Program, port: int = 0, *, join: bool = False, options: Sequence[str] = ()
) -> Generator[Gateway]:
    """A gateway that takes connections."""
    process = program.start("up", "--port", str(port), "--json", *(["--join"] if join else []), *options)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, process.communicate(timeout=BOUND)[1]
        yield Gateway(process, json.loads(line))
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate(timeout=BOUND)


def token(program: Program) -> str:
    """The owner's, from its file."""
    return json.loads((program.state / "tokens.json").read_text())["tokens"][0]["token"]


@asynccontextmanager
async def connect(gateway: Gateway, program: Program) -> AsyncGenerator[Client]:
    """A client with the owner's token."""

    async def find() -> Site:
        return Site(gateway.url, token(program))

    async with Client(find) as client:
        yield client


async def send_and_wait(client: Client, text: str) -> dict[str, Any]:
    """Send a message to the main session, and return how its run ended."""
    sent = await client.call("chat.send", {"sessionKey": "main", "message": text, "idempotencyKey": text})
    waiting = {"runId": sent["runId"], "timeoutMs": int(BOUND * 1000)}
    return await client.call("agent.wait", waiting, seconds=BOUND)
