"""The stdio transport: one JSON-RPC message per line, over the pipes of a process that the launcher has started.

Lines are bounded, and so is the time that a server takes to read what is written to it. Whether a request was written
as a whole is recorded, since a server that died before cannot have acted on it.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

import anyio
import mcp_types
from mcp.client._transport import TransportStreams
from mcp.shared.message import SessionMessage

from antiphon.child_processes.pipes import (
    MAX_LINE_BYTES,
    WRITE_TIMEOUT_SECONDS,
    ErrorOutput,
    LineTooLong,
    open_pipe,
    read_lines,
    write_all,
)
from antiphon.child_processes.processes import ChildCommand, ChildProcess, ChildProcesses
from antiphon.mcp.requests import SentRequests

log = logging.getLogger(__name__)


class StdioTransport:
    """Starts a server when it is opened, and ends its whole process tree when it is closed."""

    def __init__(
        self,
        processes: ChildProcesses,
        build_command: Callable[[], Awaitable[ChildCommand]],
        sent: SentRequests,
    ) -> None:
        self._processes = processes
        self._build_command = build_command
        self._sent = sent
        self.closed = asyncio.Event()
        self.errors = ErrorOutput()
        self.fault: str | None = None
        """Why the connection was closed, if this side did it."""

    @asynccontextmanager
    async def open(self) -> AsyncGenerator[TransportStreams]:
        command = await self._build_command()
        process = await self._processes.start(command)
        incoming, incoming_reader = anyio.create_memory_object_stream[SessionMessage | Exception](0)
        outgoing, outgoing_reader = anyio.create_memory_object_stream[SessionMessage](0)
        os.set_blocking(process.stdin, False)
        try:
            async with (
                anyio.create_task_group() as tasks,
                open_pipe(process.stdout) as stdout,
                open_pipe(process.stderr) as stderr,
            ):

                async def read_messages() -> None:
                    try:
                        async with incoming:
                            await self._read_messages(stdout, incoming.send)
                    except (anyio.BrokenResourceError, anyio.ClosedResourceError):
                        pass  # nothing reads any more
                    finally:
                        self.closed.set()

                async def write_messages() -> None:
                    async with outgoing_reader:
                        async for message in outgoing_reader:
                            if not await self._write_message(process, message):
                                break
                    self.closed.set()
                    await incoming.aclose()  # so that no request waits for an answer that cannot come

                tasks.start_soon(read_messages)
                tasks.start_soon(write_messages)
                tasks.start_soon(self.errors.keep, stderr)
                try:
                    yield incoming_reader, outgoing
                finally:
                    tasks.cancel_scope.cancel()
        finally:
            self.closed.set()
            os.close(process.stdin)
            for stream in (incoming, incoming_reader, outgoing, outgoing_reader):
                stream.close()
            with anyio.CancelScope(shield=True):
                await self._processes.stop(process)

    async def _read_messages(
        self, stdout: asyncio.StreamReader, deliver: Callable[[SessionMessage], Awaitable[None]]
    ) -> None:
        try:
            async for line in read_lines(stdout):
                if (message := _parse_message(line)) is not None:
                    await deliver(message)
        except LineTooLong:
            self.fault = f"it sent a message of more than {MAX_LINE_BYTES} bytes"

    async def _write_message(self, process: ChildProcess, message: SessionMessage) -> bool:
        """Write a message. False if the server does not take it."""
        text = message.message.model_dump_json(by_alias=True, exclude_unset=True)
        try:
            await write_all(process.stdin, text.encode(errors="replace") + b"\n")
        except TimeoutError:
            self.fault = f"it has read nothing for {WRITE_TIMEOUT_SECONDS:.0f} s"
            return False
        except OSError:
            return False
        self._sent.record(message.message)
        return True


def _parse_message(line: bytes) -> SessionMessage | None:
    """Return a message, or None for any other line, such as a log that a server prints there by mistake."""
    try:
        message = mcp_types.jsonrpc_message_adapter.validate_json(line, by_name=False)
    except ValueError:
        log.debug("An MCP server printed %d bytes that are not a message", len(line))
        return None
    return SessionMessage(message)
