"""Client of the keeper: starts it when a job needs it, and speaks its protocol."""

from __future__ import annotations

import asyncio
import base64
import os
import subprocess
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec

from antiphon.errors import InvalidInput, Unavailable
from antiphon.workspace import keeper

START_TIMEOUT_SECONDS = 10.0
ANSWER_TIMEOUT_SECONDS = 10.0  # beyond the time a request asks to wait
START_RETRY_SECONDS = 0.05
MAX_LOST_CONNECTIONS = 3
KEEPER_DIRECTORY_NAME = "keeper"

_KEEPER_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"}  # nothing of the gateway's own


Connection: TypeAlias = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class ProxySpec(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The proxy of a command, which hands its listening socket out through the descriptor of `argument`."""

    argument: str
    allowed_hosts: Sequence[str]


class CommandSpec(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The complete description of a command; nothing is inherited."""

    argv: Sequence[str]
    cwd: str
    env: dict[str, str]
    timeout: float
    """Seconds after which it is stopped."""
    stdin: bool = False
    """Whether it can be written to; otherwise its input is empty."""
    pty: bool = False
    files: Mapping[str, bytes] = {}
    """Contents that the command reads from descriptors; in `argv`, a name stands for the number of its descriptor."""
    proxy: ProxySpec | None = None
    kill_after_seconds: float | None = None
    """From SIGTERM to SIGKILL; None for the keeper's own time."""
    keep_seconds: float = 1800.0
    """How long the output is kept after the end."""


class CommandStatus(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The state of a job as the keeper knows it.

    `unknown` means that it was never started, `failed` that the command could not be started, and `lost` that the
    keeper ended before the command did: it may have had effects.
    """

    state: Literal["unknown", "running", "ended", "failed", "lost"]
    exit_code: int | None = None
    signal: int | None = None
    stop_reason: str | None = None
    error: str | None = None
    output_bytes: int = 0
    refused_hosts: Sequence[str] = ()
    """Hosts that its proxy refused, with their ports."""
    started_at: float | None = None
    ended_at: float | None = None


class OutputPart(NamedTuple):
    """Output, and its offset in all that was printed."""

    offset: int
    data: bytes


class KeeperClient:
    """The keeper of one state directory. Connections are reused; a lost keeper is started again."""

    def __init__(self, state_dir: Path, max_total_output_bytes: int | None = None) -> None:
        """Create a client. `max_total_output_bytes` bounds what the outputs of all jobs occupy on disk."""
        self._max_total_output_bytes = max_total_output_bytes
        self.directory = state_dir / KEEPER_DIRECTORY_NAME
        self._idle: list[Connection] = []
        self._starting = asyncio.Lock()
        self._is_closed = False

    async def start(self, key: str, spec: CommandSpec, *, wait_seconds: float) -> CommandStatus:
        """Start a job, or join the one with this key, and wait for its end at most `wait_seconds`."""
        request = {
            "op": "start",
            "key": key,
            "spec": msgspec.to_builtins(spec),
            "seconds": wait_seconds,
            "maxTotalOutputBytes": self._max_total_output_bytes,
        }
        return msgspec.convert(await self._request(request, wait_seconds), CommandStatus)

    async def wait(self, key: str, seconds: float) -> CommandStatus:
        return msgspec.convert(
            await self._request({"op": "wait", "key": key, "seconds": seconds}, seconds), CommandStatus
        )

    async def wait_any(self, keys: Sequence[str], seconds: float) -> list[str]:
        """Wait until any of these jobs does not run. Returns the keys of those that do not."""
        answer = await self._request({"op": "wait_any", "keys": list(keys), "seconds": seconds}, seconds)
        return answer["ended"]

    async def read(self, key: str, offset: int, limit: int) -> OutputPart:
        """Return kept output of a job from `offset` on; what is not kept any more is skipped."""
        answer = await self._request({"op": "read", "key": key, "offset": offset, "limit": limit})
        return OutputPart(answer["offset"], base64.b64decode(answer["data"]))

    async def write(self, key: str, write_id: str, data: bytes, *, eof: bool) -> None:
        """Write to the input of a job, once per `write_id`.

        Raises:
            InvalidInput: the job has ended, or takes no input.
        """
        text = base64.b64encode(data).decode()
        await self._request({"op": "write", "key": key, "id": write_id, "data": text, "eof": eof})

    async def stop(self, key: str, reason: str) -> CommandStatus:
        """End the process tree of a job, and return its status."""
        return msgspec.convert(
            await self._request({"op": "stop", "key": key, "reason": reason}), CommandStatus
        )

    async def acknowledge(self, key: str) -> None:
        """Tell the keeper that the result of a job is stored and that its key will never be used again."""
        await self._request({"op": "acknowledge", "key": key})

    async def remove(self, key: str) -> None:
        await self._request({"op": "remove", "key": key})

    def release(self) -> None:
        """Close the connections that are not in use. The keeper goes on while jobs run."""
        while self._idle:
            _, writer = self._idle.pop()
            writer.close()

    async def close(self) -> None:
        """Close the connections, and those in use after their requests."""
        self._is_closed = True
        self.release()

    async def _request(self, request: dict[str, Any], wait_seconds: float = 0.0) -> dict[str, Any]:
        async with asyncio.timeout(START_TIMEOUT_SECONDS + ANSWER_TIMEOUT_SECONDS + wait_seconds):
            answer = await self._exchange(request)
        if reason := answer.get("refused"):
            raise InvalidInput(f"The command cannot be used: {reason}.", "List the commands that run.")
        return answer

    async def _exchange(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send a request. One whose connection was lost is repeated, since requests are idempotent."""
        line = msgspec.json.encode(request) + b"\n"
        losses = 0
        while True:
            reused = bool(self._idle)
            async with self._connect() as connection:
                if (answer := await _send(connection, line)) is not None:
                    return answer
                connection[1].close()
            losses += not reused
            if losses == MAX_LOST_CONNECTIONS:
                raise Unavailable(
                    "The process that runs commands ended during a request.", "Try again.", keeper=True
                )

    @asynccontextmanager
    async def _connect(self) -> AsyncGenerator[Connection]:
        connection = self._idle.pop() if self._idle else await self._open()
        try:
            yield connection
        except BaseException:  # an answer may still arrive for a request that was given up
            connection[1].close()
            raise
        if self._is_closed:
            connection[1].close()
        elif not connection[1].is_closing():
            self._idle.append(connection)

    async def _open(self) -> Connection:
        if connection := await self._try_open():
            return connection
        async with self._starting:
            until = asyncio.get_running_loop().time() + START_TIMEOUT_SECONDS
            while asyncio.get_running_loop().time() < until:
                if connection := await self._try_open():
                    return connection
                await asyncio.to_thread(self._start_keeper)
                if connection := await self._try_open():
                    return connection
                await asyncio.sleep(START_RETRY_SECONDS)  # an earlier keeper may be ending
        raise Unavailable(
            "The process that runs commands could not be started.",
            f"See {str(self.directory / 'keeper.log')!r}.",
            keeper=True,
        )

    async def _try_open(self) -> Connection | None:
        """Return a connection to a keeper of this version; None if there is none. Another version is asked to end."""
        try:
            connection = await self._dial()
        except OSError:
            return None
        is_ours, answer = False, None
        try:
            hello = await _send(connection, b'{"op": "hello"}\n')
            is_ours = bool(hello) and hello.get("version") == keeper.PROTOCOL_VERSION
            if is_ours:
                return connection
            answer = await _send(connection, b'{"op": "exit"}\n') if hello else None
        finally:
            if not is_ours:
                connection[1].close()
        if answer and (reason := answer.get("refused")):
            raise Unavailable(
                f"The process that runs commands is of another version of Antiphon, and {reason}.",
                "Wait until they end, or stop them by stopping that process.",
                keeper=True,
            )
        return None

    async def _dial(self) -> Connection:
        """Connect through an open directory, since the address of a socket may have only 108 bytes."""
        directory = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            path = f"/proc/self/fd/{directory}/{keeper.SOCKET_NAME}"
            if sys.platform != "linux":
                path = str(self.directory / keeper.SOCKET_NAME)
            return await asyncio.open_unix_connection(path, limit=2 * keeper.MAX_REQUEST_BYTES)
        finally:
            os.close(directory)

    def _start_keeper(self) -> None:
        """Start the keeper in a session of its own, so that it outlives this process."""
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (self.directory / "keeper.log").open("ab") as log, suppress(subprocess.TimeoutExpired):
            subprocess.run(
                [sys.executable, "-I", "-S", keeper.PROGRAM_PATH, str(self.directory)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=_KEEPER_ENVIRONMENT,
                cwd="/",
                timeout=START_TIMEOUT_SECONDS,
                check=False,
            )


async def _send(connection: Connection, line: bytes) -> dict[str, Any] | None:
    """Send a request and return the answer; None if the connection is lost."""
    reader, writer = connection
    with suppress(ConnectionError):
        writer.write(line)
        await writer.drain()
        if answer := await reader.readline():
            return msgspec.json.decode(answer)
    return None
