"""One configured server: its connections, its state, and the calls of its tools.

There is one connection per server and, for a program that sandboxed sessions use, one per sandbox. It is opened by the
first call and opened again after the server has gone. A call that may have reached a server that then went away is
never made again, unless the operator trusts the server and it says that the tool may be called twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec

from antiphon.access import Caller
from antiphon.child_processes.processes import ChildCommand, ChildProcesses, build_environment
from antiphon.child_processes.text import clean_text
from antiphon.clock import Clock
from antiphon.config.mcp import McpServerConfig, reveal_all
from antiphon.config.secrets import SECRET_MASK
from antiphon.engine.toolbox import ToolOutput
from antiphon.errors import AntiphonError, McpServerUnavailable, ToolFailed
from antiphon.mcp.listings import (
    MAX_REASON_CHARACTERS,
    Listing,
    ServerRecord,
    ServerState,
    build_file_prefix,
    describe_server,
    load_record,
    save_record,
)
from antiphon.mcp.offers import Offer
from antiphon.mcp.requests import RequestLost, SentRequests
from antiphon.paths import expand_home
from antiphon.workspace.sandbox_backend import SandboxedCommand

if TYPE_CHECKING:
    from antiphon.mcp.session import ServerSession

log = logging.getLogger(__name__)
T = TypeVar("T")

CONNECT_TIMEOUT_SECONDS = 30.0
MAX_CONCURRENT_CALLS = 16
MAX_WAITING_CALLS = 64
MAX_SANDBOXED_CONNECTIONS = 16  # per server; the one that was idle the longest makes room
SANDBOX_IDLE_SECONDS = 600.0
RETRY_DELAYS_SECONDS = (1.0, 2.0, 5.0, 15.0, 60.0, 300.0)
FAST_FAILURE_SECONDS = 1.0
"""A server that failed within this time is tried again by every run, since that delays it by no more."""
HOST_SCOPE = ""
MIN_MASKED_CHARACTERS = 8  # shorter values, and paths, are no secrets


class WrapCommand(Protocol):
    """Returns the command line that runs a program in the sandbox of a session (`Sandboxes.wrap`)."""

    async def __call__(
        self,
        caller: Caller,
        command: list[str],
        *,
        workdir: str | None,
        env: Mapping[str, str],
        has_proxy: bool,
    ) -> SandboxedCommand: ...


class ServerContext(msgspec.Struct, frozen=True, kw_only=True):
    """The parts that all servers share."""

    state_dir: Path
    clock: Clock
    processes: ChildProcesses
    wrap_command: WrapCommand | None = None
    """None where there are no sessions, as in a command such as `antiphon mcp test`."""
    keep_file: Callable[[Caller, str, bytes], Awaitable[str]] | None = None
    """Keeps a file in the workspace of a session, and returns its path."""
    find_sandbox: Callable[[Caller], str] = lambda _caller: ""
    """Returns what identifies the sandbox of a session."""


class _Connection:
    """A connection, and the attempt to open it that is under way."""

    def __init__(self) -> None:
        self.session: ServerSession | None = None
        self.opening: asyncio.Task[ServerSession] | None = None
        self.began_at = 0.0
        self.slots = asyncio.Semaphore(MAX_CONCURRENT_CALLS)
        self.calls = 0
        self.used_at = time.monotonic()
        self.is_legacy = False


class ServerActor:
    """A configured server. `on_change` is called when its state or its tools have changed."""

    def __init__(
        self,
        name: str,
        config: McpServerConfig,
        context: ServerContext,
        on_change: Callable[[], None],
    ) -> None:
        self.name = name
        self.config = config
        self.state: ServerState = "idle"
        self.reason: str | None = None
        self.last_contact_at: int | None = None
        self.listing: Listing | None = None
        self._record = ServerRecord(fingerprint="")
        self._context = context
        self._on_change = on_change
        self._connections: dict[str, _Connection] = {}
        self._failures = 0
        self._failed_fast = False
        self._failed_login_version: int | None = None
        self._retry: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._saving = asyncio.Lock()
        self._secrets: set[str] = set()
        """Secrets that the server was given, and may repeat in its errors."""
        self._is_closed = False

    # --- state ---

    def load(self) -> None:
        """Load the stored record of the server. Blocks."""
        self._record = load_record(self._context.state_dir, self.name, self.config)
        self.listing = self._record.listing
        self.last_contact_at = self._record.last_contact_at

    @property
    def is_usable(self) -> bool:
        return self.state not in ("failed", "needs_auth")

    @property
    def process_count(self) -> int:
        """How many connections are open, each with a process if the server is a program."""
        return sum(
            connection.session is not None and connection.session.is_open
            for connection in self._connections.values()
        )

    @property
    def seconds_since_start(self) -> float:
        """How long the connection has been opening; 0 if it is not."""
        connection = self._connections.get(HOST_SCOPE)
        if connection is None or connection.opening is None or connection.opening.done():
            return 0.0
        return time.monotonic() - connection.began_at

    def explain_absence(self) -> str | None:
        """Return why the tools cannot be used now, or None if they can."""
        if self.is_usable:
            return None
        hint = f" Run: antiphon mcp login {self.name}" if self.state == "needs_auth" else ""
        return f"The MCP server {self.name!r} cannot be used now: {self.reason}.{hint}"

    def describe(self) -> dict[str, Any]:
        facts = {
            **describe_server(self.name, self.config, self.listing),
            "state": self.state,
            "reason": self.reason,
            "lastContactAt": self.last_contact_at,
            "connections": self.process_count,
        }
        return {name: value for name, value in facts.items() if value is not None}

    def _set_state(self, state: ServerState, reason: str | None = None) -> None:
        if (state, reason) == (self.state, self.reason):
            return
        self.state, self.reason = state, reason
        self._on_change()
        if state != "starting":
            self._run_in_background(self._save())

    async def _save(self) -> None:
        record = msgspec.structs.replace(
            self._record,
            listing=self.listing,
            state=self.state if self.state in ("failed", "needs_auth") else "idle",
            reason=self.reason,
            last_contact_at=self.last_contact_at,
        )
        async with self._saving:
            try:
                await asyncio.to_thread(save_record, self._context.state_dir, self.name, record)
            except OSError as error:
                log.warning("The record of the MCP server %r could not be stored: %s", self.name, error)

    def _run_in_background(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- connections ---

    async def try_connect(self, seconds: float) -> None:
        """Connect, and wait for it at most this long. The state shows whether it succeeded."""
        opening = asyncio.ensure_future(self._require_session(HOST_SCOPE, None))
        opening.add_done_callback(_ignore_result)
        await asyncio.wait([opening], timeout=seconds)

    def should_retry_now(self) -> bool:
        """Whether a run should try an unusable server again: it fails fast, or a new login was stored."""
        if self.state == "needs_auth":
            return self._read_login_version() != self._failed_login_version
        return self._failed_fast

    async def _require_session(self, scope: str, caller: Caller | None) -> ServerSession:
        """Return an open connection.

        Raises:
            McpServerUnavailable: there is none.
        """
        connection = self._connections.setdefault(scope, _Connection())
        if connection.session is not None and connection.session.is_open:
            return connection.session
        if connection.opening is None or connection.opening.done():
            connection.began_at = time.monotonic()
            connection.opening = asyncio.create_task(self._open(connection, scope, caller))
            connection.opening.add_done_callback(_ignore_result)
        opening = connection.opening
        await asyncio.wait([opening])  # its cancellation is not ours
        if opening.cancelled():
            raise self._build_error("the gateway is stopping")
        return opening.result()

    async def _open(self, connection: _Connection, scope: str, caller: Caller | None) -> ServerSession:
        if self._is_closed:
            raise self._build_error("the gateway is stopping")
        began = time.monotonic()
        if connection.session is not None:
            await connection.session.close()
            connection.session = None
        if scope == HOST_SCOPE:
            self._failed_login_version = self._read_login_version()
            if self.state == "idle":
                self._set_state("starting")
        try:
            session, listing = await self._connect(connection, scope, caller)
        except AntiphonError as error:
            return self._fail(scope, f"{error.what} {error.hint}".rstrip("."), began, error)
        except Exception as error:  # noqa: BLE001 - whatever the library or the server does, the server is unusable
            needs_login = getattr(error, "needs_login", False) is True
            connection.is_legacy = not connection.is_legacy
            return self._fail(
                scope, str(error) or type(error).__name__, began, error, needs_login=needs_login
            )
        connection.session = session
        connection.used_at = time.monotonic()
        if scope == HOST_SCOPE:
            self._failures, self._failed_fast = 0, False
            self._cancel_retry()
            self._note_contact()
            self._take_listing(listing)
            self._set_state("ready")
        return session

    async def _connect(
        self, connection: _Connection, scope: str, caller: Caller | None
    ) -> tuple[ServerSession, Listing]:
        module = await asyncio.to_thread(importlib.import_module, "antiphon.mcp.session")
        sent = SentRequests()
        transport = await self._build_transport(scope, caller, sent)
        session: ServerSession = module.ServerSession(
            transport,
            sent,
            is_legacy=connection.is_legacy,
            on_listing=self._take_listing if scope == HOST_SCOPE else None,
            on_closed=self._handle_closed if scope == HOST_SCOPE else None,
        )
        is_open = False
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_SECONDS):
                listing = await session.open()
            is_open = True
        except TimeoutError:
            raise module.ConnectionFailed(
                f"it did not answer within {CONNECT_TIMEOUT_SECONDS:.0f} s"
            ) from None
        finally:
            if not is_open:
                await asyncio.shield(asyncio.ensure_future(session.close()))
        return session, listing

    async def _build_transport(self, scope: str, caller: Caller | None, sent: SentRequests) -> Any:
        """Return the transport; secrets are read for every connection, so that rotated ones are used."""
        config, shared = self.config, self._context
        if config.url is None:
            from antiphon.mcp.stdio import StdioTransport  # noqa: PLC0415 - imports the library

            def build_command() -> Awaitable[ChildCommand]:
                return self._build_command(scope, caller)

            return StdioTransport(shared.processes, build_command, sent)
        from antiphon.mcp.http import HttpTransport  # noqa: PLC0415
        from antiphon.mcp.oauth import LoginFile, OAuthSession  # noqa: PLC0415

        headers = await asyncio.to_thread(reveal_all, config.headers)
        self._note_secrets(word for value in headers.values() for word in (value, value.rpartition(" ")[2]))
        auth = None
        if config.oauth is not None:
            auth = OAuthSession(config.url, config.oauth, LoginFile(shared.state_dir, self.name, config.url))
        return HttpTransport(config.url, headers, auth, config.timeout)

    async def _build_command(self, scope: str, caller: Caller | None) -> ChildCommand:
        config = self.config
        assert config.command is not None
        configured = await asyncio.to_thread(reveal_all, config.env)
        self._note_secrets(configured.values())
        argv = [str(expand_home(config.command)), *config.args]
        if scope == HOST_SCOPE:
            cwd = expand_home(config.directory or "~")
            return ChildCommand(argv=argv, cwd=str(cwd), env=build_environment(configured))
        assert caller is not None and self._context.wrap_command is not None
        wrapped = await self._context.wrap_command(
            caller, argv, workdir=config.directory, env=configured, has_proxy=False
        )
        return ChildCommand(argv=wrapped.argv, cwd="/", env=wrapped.env, files=wrapped.files)

    def _note_secrets(self, values: Iterable[str]) -> None:
        self._secrets = {
            value
            for value in values
            if len(value) >= MIN_MASKED_CHARACTERS and not value.startswith(("/", "~"))
        }

    def _mask_secrets(self, text: str) -> str:
        """Return a text of the server without the secrets that it was given, since models and people read it."""
        for secret in sorted(self._secrets, key=len, reverse=True):
            text = text.replace(secret, SECRET_MASK)
        return text

    def _fail(
        self, scope: str, reason: str, began: float, error: Exception, *, needs_login: bool = False
    ) -> ServerSession:
        """Record that a connection could not be made.

        Raises:
            McpServerUnavailable: always.
        """
        reason = self._mask_secrets(clean_text(reason, MAX_REASON_CHARACTERS))
        if scope == HOST_SCOPE:
            self._failed_fast = time.monotonic() - began < FAST_FAILURE_SECONDS
            self._failures += 1
            if self.state in ("starting", "ready", "idle"):
                log.warning("The MCP server %r cannot be used: %s", self.name, reason)
            self._set_state("needs_auth" if needs_login else "failed", reason)
            if not needs_login:
                self._schedule_retry()
        raise self._build_error(reason) from error

    def _build_error(self, reason: str) -> McpServerUnavailable:
        hint = (
            f"Ask a person to run: antiphon mcp login {self.name}"
            if self.state == "needs_auth"
            else "Work without its tools, or try again later."
        )
        return McpServerUnavailable(
            f"The MCP server {self.name!r} cannot be used: {reason}.", hint, server=self.name
        )

    def _schedule_retry(self) -> None:
        self._cancel_retry()
        if not self._is_closed:
            delay = RETRY_DELAYS_SECONDS[min(self._failures, len(RETRY_DELAYS_SECONDS)) - 1]
            loop = asyncio.get_running_loop()
            self._retry = loop.call_later(delay, lambda: self._run_in_background(self.try_connect(delay)))

    def _cancel_retry(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None

    def _handle_closed(self, session: ServerSession, reason: str) -> None:
        """Record that the connection has ended. The next call opens it again."""
        connection = self._connections.get(HOST_SCOPE)
        if connection is not None and connection.session is session and self.state == "ready":
            log.info(
                "The connection to the MCP server %r has ended: %s", self.name, self._mask_secrets(reason)
            )
            self._set_state("idle")

    def _take_listing(self, listing: Listing) -> None:
        if listing != self.listing:
            for note in listing.notes:
                log.warning("MCP server %r: %s", self.name, note)
            self.listing = listing
            self._on_change()
            self._run_in_background(self._save())

    def _note_contact(self) -> None:
        self.last_contact_at = self._context.clock.now()

    def _read_login_version(self) -> int | None:
        if self.config.url is None:
            return None
        from antiphon.mcp.logins import read_login_version  # noqa: PLC0415

        return read_login_version(self._context.state_dir, self.name)

    async def _make_room(self) -> None:
        """Close connections of sandboxes that were idle for long, and the longest idle one if there are too many.

        Raises:
            McpServerUnavailable: there is no room for another one.
        """
        now = time.monotonic()
        idle = sorted(
            (connection.used_at, scope)
            for scope, connection in self._connections.items()
            if scope != HOST_SCOPE and connection.calls == 0
        )
        excess = self._count_sandboxes() + 1 - MAX_SANDBOXED_CONNECTIONS
        closing = [
            self._connections.pop(scope)
            for number, (used_at, scope) in enumerate(idle)
            if number < excess or now - used_at > SANDBOX_IDLE_SECONDS
        ]
        await asyncio.gather(*map(self._close_connection, closing))
        if self._count_sandboxes() >= MAX_SANDBOXED_CONNECTIONS:
            raise self._build_error("too many sandboxes use it at once")

    def _count_sandboxes(self) -> int:
        return sum(scope != HOST_SCOPE for scope in self._connections)

    async def _close_connection(self, connection: _Connection) -> None:
        if connection.opening is not None and not connection.opening.done():
            connection.opening.cancel()
            await asyncio.wait([connection.opening])
        if connection.session is not None:
            await connection.session.close()

    # --- calls ---

    async def call(self, offer: Offer, caller: Caller, arguments: Mapping[str, Any], key: str) -> ToolOutput:
        """Call a tool, and return what the model reads.

        Raises:
            McpServerUnavailable: the server cannot be used; the call was not made.
            ToolFailed: the call may have been made, but there is no result.
        """
        scope = self._find_scope(caller)
        connection = await self._enter(scope)
        try:
            async with connection.slots:
                return await self._call(connection, scope, offer, caller, arguments, key)
        finally:
            connection.calls -= 1
            connection.used_at = time.monotonic()

    def _find_scope(self, caller: Caller) -> str:
        """Return which process serves a session: for a sandboxed one, a program in its sandbox."""
        if self.config.command is None or not caller.sandboxed:
            return HOST_SCOPE
        return self._context.find_sandbox(caller)

    async def _enter(self, scope: str) -> _Connection:
        """Return a connection, which need not be open yet, with one more call. It is not closed to make room."""
        if scope != HOST_SCOPE and scope not in self._connections:
            await self._make_room()
        connection = self._connections.setdefault(scope, _Connection())
        if connection.calls >= MAX_CONCURRENT_CALLS + MAX_WAITING_CALLS:
            raise McpServerUnavailable(
                f"{connection.calls} calls of the MCP server {self.name!r} are under way; this one was not made.",
                "Try again later.",
                server=self.name,
            )
        connection.calls += 1
        return connection

    async def _call(
        self,
        connection: _Connection,
        scope: str,
        offer: Offer,
        caller: Caller,
        arguments: Mapping[str, Any],
        key: str,
    ) -> ToolOutput:
        for attempt in (1, 2):
            session = await self._require_session(scope, caller)
            try:
                output = await self._request(session, offer, caller, arguments, key)
            except RequestLost as lost:
                # Over HTTP each request has a connection of its own, and other calls go on.
                concerns_others = self.config.url is None or not lost.was_sent
                if concerns_others and scope == HOST_SCOPE and connection.session is session:
                    await session.close()
                if attempt == 1 and (not lost.was_sent or self.may_repeat(offer)):
                    continue
                raise self._explain_loss(lost) from lost
            self._note_contact()
            return output
        raise AssertionError("unreachable")

    async def _request(
        self, session: ServerSession, offer: Offer, caller: Caller, arguments: Mapping[str, Any], key: str
    ) -> ToolOutput:
        from antiphon.mcp.calls import perform_call  # noqa: PLC0415 - imports the library, which is loaded by now
        from antiphon.mcp.session import CallFailed, CallTimedOut  # noqa: PLC0415

        timeout = self.config.timeout
        try:
            return await perform_call(
                session,
                offer,
                arguments,
                key=key,
                timeout=timeout,
                keep_file=self._choose_file_keeper(caller),
            )
        except CallTimedOut:
            raise ToolFailed(
                f"The MCP server {self.name!r} did not answer within {timeout:g} s. The request had been sent, so it "
                "may have had effects.",
                "Check before repeating it.",
                server=self.name,
            ) from None
        except CallFailed as error:
            self._note_contact()
            raise ToolFailed(
                f"The MCP server {self.name!r} refused the call: {self._mask_secrets(str(error))}.",
                "Change the call.",
                server=self.name,
            ) from error

    def _choose_file_keeper(self, caller: Caller) -> Callable[[str, bytes], Awaitable[str]] | None:
        """Return the function that keeps files of a result, or None for a caller without a workspace."""
        keep = self._context.keep_file
        if keep is None or caller.session_key is None:
            return None
        prefix = build_file_prefix(self.name)

        async def keep_file(name: str, data: bytes) -> str:
            return await keep(caller, f"{prefix}-{name}", data)

        return keep_file

    def may_repeat(self, offer: Offer) -> bool:
        """Whether a call may be made twice: the operator trusts the server, and it says so."""
        return self.config.trust and (offer.tool.is_idempotent or offer.tool.only_reads)

    def _explain_loss(self, lost: RequestLost) -> ToolFailed:
        if lost.was_sent:
            return ToolFailed(
                f"The connection to the MCP server {self.name!r} was lost after the request had been sent ({lost}). It "
                "may have had effects.",
                "Check before repeating it.",
                server=self.name,
                sent=True,
            )
        return ToolFailed(
            f"The MCP server {self.name!r} could not be reached ({lost}); the request was not sent.",
            "Try again later, or work without its tools.",
            server=self.name,
            sent=False,
        )

    async def aclose(self) -> None:
        """Close every connection and end every process."""
        self._is_closed = True
        self._cancel_retry()
        connections = list(self._connections.values())
        self._connections.clear()
        await asyncio.gather(*map(self._close_connection, connections), return_exceptions=True)
        if self.last_contact_at != self._record.last_contact_at:
            await self._save()
        while self._tasks:
            await asyncio.wait(self._tasks)


def _ignore_result(task: asyncio.Future[Any]) -> None:
    """Retrieve the error of an attempt, which the state of the server shows."""
    with contextlib.suppress(asyncio.CancelledError):
        task.exception()
