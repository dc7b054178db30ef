"""A real gateway process of several, which does what its standard input asks and says on its standard output what came.

    PYTHONPATH=tests python tests/cluster/replica.py <settings.json> <own-directory> <common-directory>

One line of JSON is one request: `{"id": 1, "do": "submit", …}`, answered by `{"id": 1, "told": …}` or
`{"id": 1, "error": …, "code": …}` whenever that is; what is followed comes as `{"on": 1, …}`. It says
`{"up": url}` first. SIGTERM, or the end of its input, is its orderly end. The channels outside and the tools keep
what they did in the common directory, as those of `chaos.worker` do.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from antiphon.access import Caller
from antiphon.bus import MessageAppended, SessionChanged
from antiphon.config import Config
from antiphon.coordination import LEASE_FRACTION_OF_ACK_WAIT
from antiphon.engine.outbox.delivery_channel import Part, Receipt
from antiphon.engine.supervisor import EngineTimings
from antiphon.errors import AntiphonError, StoreError, Unavailable
from antiphon.event_loop import run
from antiphon.gateway.server import ListeningGateway, serve_gateway
from antiphon.operations.jobs import JobSpec
from antiphon.operations.types import IncomingMessage, SendRequest, SpawnRequest
from chaos.worker import append, tools
from support.line_channel import LineChannel, format_part
from support.planned_exchanges import ATTEMPTS, KEYED, UNKEYED

OPERATOR = Caller.operator()
Given = dict[str, Any]


def say(**facts: Any) -> None:
    """In one write: there is no half of a line when this process is killed."""
    os.write(1, f"{json.dumps(facts)}\n".encode())


@dataclass(slots=True)
class FileChannel(LineChannel):
    """A channel to people that every replica shares. An idempotent one takes the same key as the same message."""

    async def send(self, part: Part) -> Receipt:
        key = format_part(part)
        append(self.posts.with_suffix(ATTEMPTS), key)
        with self.posts.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (
                self.is_idempotent and self.posts.exists() and key in self.posts.read_text().splitlines()
            ):
                append(self.posts, key)
        return Receipt(f"outside-{key}")


class RequestHandler:
    """What can be asked of this process."""

    def __init__(self, served: ListeningGateway, stopping: asyncio.Event) -> None:
        self._stopping = stopping
        self._app = served.gateway.app
        self._operations = self._app.operations
        self._asked: set[asyncio.Task[None]] = set()

    def take(self, line: bytes) -> None:
        given: Given = json.loads(line)
        task = asyncio.create_task(self._answer(given.pop("id"), given.pop("do"), given))
        self._asked.add(task)
        task.add_done_callback(self._asked.discard)

    async def close(self) -> None:
        for task in self._asked:
            task.cancel()
        await asyncio.gather(*self._asked, return_exceptions=True)

    async def _answer(self, id: int, do: str, given: Given) -> None:
        work: Callable[..., Awaitable[Any]] = getattr(self, f"do_{do}")
        try:
            told = await work(id, **given) if do == "follow" else await work(**given)
        except AntiphonError as error:
            # A client that waits here until the store is closed would by then have lost the socket of a real gateway.
            closed = isinstance(error, StoreError) and self._stopping.is_set()
            say(id=id, error=str(error), code=Unavailable.code if closed else error.code)
        else:
            say(id=id, told=msgspec.to_builtins(told))

    async def do_open(self, session: str) -> None:
        await self._operations.sessions.open(OPERATOR, session)

    async def do_submit(self, session: str, text: str, key: str | None = None) -> object:
        return await self._operations.messages.submit(
            OPERATOR, IncomingMessage(session=session, content=text, idempotency_key=key)
        )

    async def do_send(self, **given: Any) -> object:
        return await self._operations.exchanges.send(OPERATOR, SendRequest(**given))

    async def do_spawn(self, requester: str, **given: Any) -> object:
        return await self._operations.subagents.spawn(OPERATOR, SpawnRequest(**given), requester=requester)

    async def do_wait(self, run: str, seconds: float) -> object:
        return await self._operations.runs.wait(OPERATOR, run, seconds)

    async def do_stop(self, session: str) -> object:
        return await self._operations.runs.stop(OPERATOR, session)

    async def do_delete(self, session: str) -> object:
        return await self._operations.sessions.delete(OPERATOR, session)

    async def do_replicas(self) -> object:
        return await self._operations.status.list_replicas(OPERATOR)

    async def do_job(self, **given: Any) -> object:
        return (await self._app.operations.jobs.add(OPERATOR, msgspec.convert(given, JobSpec))).id

    async def do_remove_job(self, job: str) -> object:
        return await self._app.operations.jobs.remove(OPERATOR, job)

    async def do_changes(self) -> None:
        """Tell of every session that retention touches here."""
        async with self._app.bus.listen("sessions") as events:
            say(changes=None)
            while True:
                event = await events.get()
                if isinstance(event, SessionChanged) and event.reason == "retention":
                    say(changes=event.session_key)

    async def do_follow(self, id: int, session: str, after: int) -> None:
        feed = self._operations.transcripts.follow(OPERATOR, session, after)
        async with aclosing(feed):
            async for event in feed:
                if isinstance(event, MessageAppended):
                    say(on=id, seq=event.seq, entry=event.entry)


async def run_replica(settings: Given, own: Path, common: Path) -> None:
    overrides: Given = settings.pop("timings", {})
    config = Config.model_validate(settings)
    channels = {
        name: FileChannel(common / f"{name}.txt", keyed)
        for name, keyed in {KEYED: True, UNKEYED: False}.items()
    }
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stopping.set)
    # The lease is the default of `open_coordination`.
    timings = EngineTimings(
        lease_seconds=LEASE_FRACTION_OF_ACK_WAIT * config.bus.ack_wait_seconds, **overrides
    )
    offered = partial(tools, common)
    async with serve_gateway(
        config, own, port=0, channels=channels, tools=offered, timings=timings
    ) as served:
        handler = RequestHandler(served, stopping)
        say(up=served.url.replace("ws", "http", 1))
        asking = asyncio.create_task(_read_requests(handler, stopping))
        await stopping.wait()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        say(leaving=True)
    await handler.close()
    say(left=True)


async def _read_requests(handler: RequestHandler, stopping: asyncio.Event) -> None:
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    try:
        while line := await reader.readline():
            handler.take(line)
    finally:
        transport.close()
        stopping.set()


def main() -> None:
    settings, own, common = sys.argv[1:]
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(relativeCreated)d %(name)s %(levelname)s %(message)s"
    )
    try:
        run(run_replica(json.loads(Path(settings).read_text()), Path(own), Path(common)))
    except AntiphonError as error:  # as the command line tells it: in one sentence
        sys.exit(str(error))


if __name__ == "__main__":
    main()
