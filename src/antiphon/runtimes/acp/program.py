"""A running ACP program: its process, and the connection to it.

The library carries requests and answers; the size of messages and the waits are bounded here. This module imports it,
which takes a third of a second, so it is itself imported when the first program is started.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from typing import Any, Protocol, TypeAlias, cast

import msgspec
from acp import AGENT_METHODS, CLIENT_METHODS, PROTOCOL_VERSION, RequestError
from acp.connection import Connection

from antiphon import __version__
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
from antiphon.child_processes.text import clean_text
from antiphon.errors import AgentProgramFailed, Unavailable
from antiphon.runtimes.text import decode_foreign_json

log = logging.getLogger(__name__)

Json: TypeAlias = dict[str, Any]

INITIALIZE_TIMEOUT_SECONDS = 20.0
OPEN_SESSION_TIMEOUT_SECONDS = 30.0
EXIT_NOTICE_SECONDS = 0.5  # from the end of the output to the news that the process has ended
MAX_REASON_CHARACTERS = 400
MAX_MODEL_NAME_CHARACTERS = 200
MAX_OPEN_REQUESTS = 100  # of a program
AUTHENTICATION_REQUIRED_CODE = -32000


class _PromptCapabilities(msgspec.Struct, rename="camel"):
    image: bool | None = None


class _McpCapabilities(msgspec.Struct, rename="camel"):
    http: bool | None = None


class Capabilities(msgspec.Struct, rename="camel"):
    """The capabilities of a program that matter here."""

    load_session: bool | None = None
    prompt_capabilities: _PromptCapabilities | None = None
    mcp_capabilities: _McpCapabilities | None = None

    @property
    def reads_images(self) -> bool:
        return bool(self.prompt_capabilities and self.prompt_capabilities.image)

    @property
    def has_mcp_over_http(self) -> bool:
        return bool(self.mcp_capabilities and self.mcp_capabilities.http)


class _Initialized(msgspec.Struct, rename="camel"):
    protocol_version: int
    agent_capabilities: Capabilities | None = None
    auth_methods: list[Json] | None = None


class _Models(msgspec.Struct, rename="camel"):
    current_model_id: str


class _OpenedSession(msgspec.Struct, rename="camel"):
    session_id: str | None = None
    models: _Models | None = None
    config_options: list[Json] | None = None


class ProgramClient(Protocol):
    """Receives the updates and the permission requests of a program."""

    def take_update(self, update: Json) -> None: ...

    async def decide_permission(self, request: Json) -> Json: ...


class _PipeTransport:
    """Carries one JSON message per line. Other lines, such as logs, are ignored."""

    def __init__(self, process: ChildProcess, stdout: asyncio.StreamReader) -> None:
        self._process = process
        self._stdout = stdout
        self._lines: AsyncGenerator[bytes] = read_lines(stdout)
        self._writing = asyncio.Lock()
        self._open_requests = 0
        self.fault: str | None = None
        self.closed = asyncio.Event()

    async def send(self, message: Json) -> None:
        data = json.dumps(message, separators=(",", ":")).encode() + b"\n"
        is_answer = "method" not in message
        try:
            async with self._writing:
                await write_all(self._process.stdin, data)
        except TimeoutError:
            self._fail(f"it has read nothing for {WRITE_TIMEOUT_SECONDS:.0f} s")
        except OSError:
            self._fail(None)
        finally:
            self._open_requests -= is_answer
        if self.closed.is_set() and not is_answer:
            raise ConnectionError(self.fault)

    async def receive(self) -> Json | None:
        try:
            async for line in self._lines:
                if (message := _parse_message(line)) is None:
                    continue
                if message.get("method") is not None and "id" in message:
                    await self._count_request()
                return message
        except LineTooLong:
            self.fault = f"it sent a message of more than {MAX_LINE_BYTES} bytes"
        except ConnectionError:  # by `_fail`
            pass
        self.closed.set()
        return None

    async def _count_request(self) -> None:
        if self._open_requests >= MAX_OPEN_REQUESTS:
            await asyncio.sleep(0)  # lets those be answered that need no waiting
        if self._open_requests >= MAX_OPEN_REQUESTS:
            self._fail(f"it asked for {MAX_OPEN_REQUESTS} things without waiting for an answer")
            raise ConnectionError
        self._open_requests += 1

    def _fail(self, fault: str | None) -> None:
        """End the connection, since a message was lost or too many are open."""
        self.fault = self.fault or fault
        self.closed.set()
        self._stdout.set_exception(ConnectionError())

    async def close(self) -> None:
        self.closed.set()


def _parse_message(line: bytes) -> Json | None:
    """Return a message that the library can take; None if it is none. An answer may have any error."""
    try:
        decoded = decode_foreign_json(line)
    except (ValueError, RecursionError):
        decoded = None
    if not isinstance(decoded, dict):
        log.debug("An ACP program printed %d bytes that are not a message", len(line))
        return None
    message = cast("Json", decoded)
    if message.get("method") is not None:
        return message
    error: Any = message.get("error")
    if not isinstance(message.get("id"), int):
        return None
    if "result" not in message and not isinstance(error, dict):
        message["error"] = {"message": "an error without a reason" if error is None else str(error)}
    return message


def find_model(answer: object) -> str | None:
    """Return the model that a program names when a session begins."""
    try:
        opened = msgspec.convert(answer, _OpenedSession)
    except msgspec.ValidationError:
        return None
    if opened.models is not None:
        return clean_text(opened.models.current_model_id, MAX_MODEL_NAME_CHARACTERS)
    for option in opened.config_options or []:
        if option.get("category") == "model" and isinstance(name := option.get("currentValue"), str):
            return clean_text(name, MAX_MODEL_NAME_CHARACTERS)
    return None


class AcpProgram:
    """One process with one ACP session."""

    def __init__(self, name: str, processes: ChildProcesses, client: ProgramClient) -> None:
        self.name = name
        self.capabilities = Capabilities()
        self.session_id = ""
        self.model: str | None = None
        """The model it says it uses."""
        self.errors = ErrorOutput()
        self._processes = processes
        self._client = client
        self._resources = AsyncExitStack()
        self._auth_methods: list[Json] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._process: ChildProcess | None = None
        self._transport: _PipeTransport | None = None
        self._connection: Connection | None = None
        self._closing: asyncio.Task[None] | None = None

    @property
    def is_alive(self) -> bool:
        return (
            self._transport is not None
            and not self._transport.closed.is_set()
            and self._process is not None
            and not self._process.exited.is_set()
        )

    # --- life ---

    async def start(self, command: ChildCommand) -> None:
        """Start the process and shake hands.

        Raises:
            AgentProgramFailed: it could not be started, or does not speak the protocol.
        """
        try:
            self._process = await self._processes.start(command)
        except Unavailable as error:
            raise AgentProgramFailed(error.what, error.hint) from error
        process = self._process
        self._resources.callback(os.close, process.stdin)
        os.set_blocking(process.stdin, False)
        stdout = await self._resources.enter_async_context(open_pipe(process.stdout))
        stderr = await self._resources.enter_async_context(open_pipe(process.stderr))
        self._tasks.append(asyncio.create_task(self.errors.keep(stderr)))
        self._transport = _PipeTransport(process, stdout)
        self._connection = Connection(self._handle, self._transport)
        answer = await self._request(
            AGENT_METHODS["initialize"],
            {
                "protocolVersion": PROTOCOL_VERSION,
                "clientCapabilities": {
                    "fs": {"readTextFile": False, "writeTextFile": False},
                    "terminal": False,
                },
                "clientInfo": {"name": "antiphon", "title": "Antiphon", "version": __version__},
            },
            INITIALIZE_TIMEOUT_SECONDS,
        )
        try:
            initialized = msgspec.convert(answer, _Initialized)
        except msgspec.ValidationError as error:
            raise self._build_error(f"its answer to 'initialize' is not valid: {error}") from None
        if initialized.protocol_version != PROTOCOL_VERSION:
            raise self._build_error(
                f"it speaks version {initialized.protocol_version} of the protocol, not {PROTOCOL_VERSION}"
            )
        self.capabilities = initialized.agent_capabilities or Capabilities()
        self._auth_methods = initialized.auth_methods or []

    async def open_session(self, cwd: str, mcp_servers: Sequence[Json]) -> None:
        """Begin a conversation without memory."""
        answer = await self._request(
            AGENT_METHODS["session_new"],
            {"cwd": cwd, "mcpServers": list(mcp_servers)},
            OPEN_SESSION_TIMEOUT_SECONDS,
        )
        found = cast("Json", answer).get("sessionId") if isinstance(answer, dict) else None
        if not isinstance(found, str) or not found:
            raise self._build_error("its answer to 'session/new' has no session id")
        self.session_id = found
        self.model = find_model(cast("object", answer))

    async def load_session(self, session_id: str, cwd: str, mcp_servers: Sequence[Json]) -> bool:
        """Go on with an earlier conversation. False if the program does not have it any more."""
        if not self.capabilities.load_session:
            return False
        self.session_id = session_id
        try:
            answer = await self._request(
                AGENT_METHODS["session_load"],
                {"sessionId": session_id, "cwd": cwd, "mcpServers": list(mcp_servers)},
                OPEN_SESSION_TIMEOUT_SECONDS,
            )
        except AgentProgramFailed as error:
            if not self.is_alive:
                raise
            log.info("%s could not load session %r: %s", self.name, session_id, error.what)
            return False
        self.model = find_model(cast("object", answer))
        return True

    async def close(self) -> None:
        """End the process with all that it has started."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        if self._connection is not None:
            await self._connection.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._resources.aclose()
        if self._process is not None:
            await self._processes.stop(self._process)

    # --- turns ---

    async def prompt(self, blocks: Sequence[Json]) -> Json:
        """Send a prompt, and return the answer when the turn has ended."""
        answer = await self._request(
            AGENT_METHODS["session_prompt"], {"sessionId": self.session_id, "prompt": list(blocks)}, None
        )
        return cast("Json", answer) if isinstance(answer, dict) else {}

    async def cancel(self) -> None:
        """Ask the program to end the turn. Its answer to the prompt says when it has."""
        assert self._connection is not None
        with suppress(ConnectionError, OSError):
            await self._connection.send_notification(
                AGENT_METHODS["session_cancel"], {"sessionId": self.session_id}
            )

    # --- messages ---

    async def _request(self, method: str, params: Mapping[str, Any], timeout: float | None) -> Any:
        assert self._connection is not None
        try:
            async with asyncio.timeout(timeout):
                return await self._connection.send_request(method, params)
        except TimeoutError:
            raise self._build_error(f"it did not answer {method!r} within {timeout:.0f} s") from None
        except RequestError as error:
            raise self._build_request_error(method, error) from None
        except (ConnectionError, OSError):
            raise await self._build_lost_error() from None

    async def _handle(self, method: str, params: Any, is_notification: bool) -> Any:
        fields = cast("Json", params) if isinstance(params, dict) else {}
        is_ours = fields.get("sessionId") == self.session_id
        if method == CLIENT_METHODS["session_update"]:
            update = fields.get("update")
            if is_ours and isinstance(update, dict):
                self._client.take_update(cast("Json", update))
            return None
        if method == CLIENT_METHODS["session_request_permission"] and is_ours:
            return await self._client.decide_permission(fields)
        if is_notification:
            return None
        raise RequestError.method_not_found(method)

    def _build_request_error(self, method: str, error: RequestError) -> AgentProgramFailed:
        detail = clean_text(" ".join(str(error).split()), MAX_REASON_CHARACTERS)
        data: Any = error.data
        more = cast("Json", data).get("details") if isinstance(data, dict) else data
        if isinstance(more, str) and more not in detail:
            detail = f"{detail}: {clean_text(' '.join(more.split()), MAX_REASON_CHARACTERS)}"
        if error.code == AUTHENTICATION_REQUIRED_CODE:
            names = [str(each.get("name", "")) for each in self._auth_methods]
            ways = clean_text(", ".join(filter(None, names)), MAX_REASON_CHARACTERS)
            return AgentProgramFailed(
                f"The program {self.name!r} is not logged in ({detail}).",
                "Run it once in a terminal to log in, or set its key in 'runtime.acp.env'."
                + (f" It offers: {ways}." if ways else ""),
            )
        return self._build_error(f"it answered {method!r} with an error: {detail}")

    async def _build_lost_error(self) -> AgentProgramFailed:
        assert self._process is not None and self._transport is not None
        with suppress(TimeoutError):
            async with asyncio.timeout(EXIT_NOTICE_SECONDS):
                await self._process.exited.wait()
        if self._transport.fault is not None:
            return self._build_error(self._transport.fault)
        code = self._process.exit_code
        how = "" if code is None else f" (exit code {code})" if code >= 0 else f" (killed by signal {-code})"
        said = f"; it printed: {self.errors.telling_line}" if self.errors.telling_line else ""
        what = "ended" if self._process.exited.is_set() else "closed its input or its output"
        return self._build_error(f"it {what}{how}{said}")

    def _build_error(self, reason: str) -> AgentProgramFailed:
        return AgentProgramFailed(
            f"The program {self.name!r} failed: {clean_text(reason, 2 * MAX_REASON_CHARACTERS).rstrip('.')}.",
            "Try again; if it happens again, run the program in a terminal.",
        )
