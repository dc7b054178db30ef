"""A NATS connection that reconnects by itself.

A lost connection is not repaired: it is closed and a new one is opened, indefinitely, with growing and randomised
pauses. So nothing written to a dead server is sent late, and callers set up a new connection in one place (the
`joined` callback). This module knows neither lanes nor events.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import ssl
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from antiphon.config.addresses import parse_bus_addresses
from antiphon.errors import BusError, ConfigError, format_install_hint

if TYPE_CHECKING:
    from nats.aio.client import Client
    from nats.aio.msg import Msg
    from nats.aio.subscription import Subscription

log = logging.getLogger(__name__)

NATS_RESPONSE_TIMEOUT_SECONDS = 2.0  # seconds a server has to answer
PING_INTERVAL_SECONDS = (
    3  # seconds between pings on a silent connection; it is given up after three unanswered ones
)
CONNECTION_CHECK_SECONDS = 1.0  # seconds between checks that a connection is still alive
FIRST_RECONNECT_SECONDS, MAX_RECONNECT_SECONDS = 0.05, 2.0  # seconds between attempts to connect
NATS_CLOSE_TIMEOUT_SECONDS = 2.0  # seconds a connection has to close
MAX_PENDING_SUBSCRIPTION_BYTES = 32 * 2**20  # per subscription, waiting to be handled
CREDENTIALS_FILE_MARKERS = (b"BEGIN NATS USER JWT", b"BEGIN USER NKEY SEED")
NOT_ENCRYPTED_MESSAGE = "it does not encrypt"
AUTHORIZATION_ERROR_WORDS = ("authorization violation", "authentication")

OnConnected = Callable[["Client"], Awaitable[None]]
OnDisconnected = Callable[[], None]
OnConnectionError = Callable[[Exception], None]
MessageHandler = Callable[["Msg"], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class NatsServers:
    """Addresses of the NATS servers (`nats://host:port`, `tls://…`, comma-separated) and our credentials."""

    url: str
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)
    credentials: Path | None = None
    """A file with a JWT and its seed, as written by `nsc`."""
    authority: Path | None = None
    """The certificate authority of the servers, if the system does not know it."""

    def parse_addresses(self) -> list[str]:
        return parse_bus_addresses(self.url)

    def format_without_secrets(self) -> str:
        """The addresses without their credentials."""
        return ", ".join(_strip_credentials(url.strip()) for url in self.url.split(","))

    def build_connect_options(self) -> dict[str, Any]:
        """Options for nats-py's `connect`."""
        for file in (self.credentials, self.authority):
            if file is not None:
                _check_readable(file)
        given: dict[str, Any] = {"user": self.user, "password": self.password, "token": self.token}
        if self.credentials is not None:
            if not all(mark in self.credentials.read_bytes() for mark in CREDENTIALS_FILE_MARKERS):
                raise ConfigError(
                    f"{self.credentials} holds no credentials.",
                    "Name a file that `nsc generate creds` made.",
                    path="bus",
                )
            given["user_credentials"] = str(self.credentials)
        if self.is_encrypted:
            given["tls"] = self._create_tls_context()
        return given

    @property
    def is_encrypted(self) -> bool:
        return self.authority is not None or "tls://" in self.url

    def _create_tls_context(self) -> ssl.SSLContext:
        try:
            return ssl.create_default_context(cafile=self.authority)
        except (ssl.SSLError, OSError) as error:
            raise ConfigError(
                f"{self.authority} holds no certificate.", "Name a file in PEM format.", path="bus"
            ) from error


def _check_readable(file: Path) -> None:
    """Refuses anything but a readable regular file: opening a pipe without a writer would block forever."""
    try:
        os.close(os.open(file, os.O_RDONLY | os.O_NONBLOCK))
        regular = file.is_file()
    except OSError as error:
        why = f"{file} cannot be read ({error.strerror})."
        raise ConfigError(why, "Correct the path in `bus`.", path="bus") from error
    if not regular:
        raise ConfigError(f"{file} is no file.", "Correct the path in `bus`.", path="bus")


class NatsConnection:
    """One connection at a time. `joined` prepares each new one; `client` is the current one, or None."""

    def __init__(
        self,
        servers: NatsServers,
        *,
        name: str,
        joined: OnConnected,
        left: OnDisconnected,
        troubled: OnConnectionError | None = None,
        echo: bool = True,
    ) -> None:
        self._servers = servers
        self._name = name
        self._joined = joined
        self._left = left
        self._troubled = troubled
        self._echo = echo
        self._client: Client | None = None
        self._connected_event = asyncio.Event()
        self._keep_task: asyncio.Task[None] | None = None
        self._last_error: Exception | None = None
        self._flushes: set[asyncio.Task[bool]] = set()

    @property
    def client(self) -> Client | None:
        """The current client; None also between the loss of a connection and its detection here."""
        client = self._client
        return client if client is not None and client.is_connected else None

    async def wait_until_connected(self) -> Client:
        """Waits for a connection and returns its client."""
        while (client := self.client) is None:
            self._connected_event.clear()
            await self._connected_event.wait()
        return client

    async def start(self, patience: float = 10.0) -> None:
        """Connects, or raises an error that says why not. Wrong credentials are not tried twice."""
        addresses, options = self._servers.parse_addresses(), self._servers.build_connect_options()
        _require_nats_library()
        until = asyncio.get_running_loop().time() + patience
        pauses = _Backoff()
        while True:
            try:
                client, closed = await self._connect_and_prepare(addresses, options)
                break
            except BusError as error:
                left = until - asyncio.get_running_loop().time()
                if left <= 0 or error.data.get("final"):
                    raise
                await asyncio.sleep(min(pauses.next(), left))
        self._keep_task = asyncio.create_task(self._keep_connected(client, closed, addresses, options))

    async def stop(self) -> None:
        await cancel_tasks(self._keep_task)
        client, self._client = self._client, None
        if client is not None:
            await _close_client(client)
        await cancel_tasks(*self._flushes)

    async def confirm_flushed(self, client: Client, timeout: float = NATS_RESPONSE_TIMEOUT_SECONDS) -> bool:
        """Whether the server has confirmed, within `timeout`, everything written so far.

        The wait for its answer must not be cancelled: nats-py stops reading when an answer meets a cancelled wait.
        """
        flushing = asyncio.create_task(_try_flush(client))
        self._flushes.add(flushing)
        flushing.add_done_callback(self._flushes.discard)
        done, _ = await asyncio.wait([flushing], timeout=timeout)
        return bool(done) and flushing.result()

    async def _keep_connected(
        self, client: Client, closed: asyncio.Event, addresses: list[str], options: dict[str, Any]
    ) -> None:
        while True:
            await _wait_until_lost(client, closed)
            self._client = None
            self._left()
            log.warning(
                "The connection to NATS at %s is lost; trying to get it back",
                self._servers.format_without_secrets(),
            )
            await _close_client(client)
            client, closed = await self._reconnect(addresses, options)
            log.warning("Connected to NATS at %s again", self._servers.format_without_secrets())

    async def _reconnect(self, addresses: list[str], options: dict[str, Any]) -> tuple[Client, asyncio.Event]:
        pauses = _Backoff()
        told = ""
        while True:
            await asyncio.sleep(pauses.next())
            try:
                return await self._connect_and_prepare(addresses, options)
            except BusError as error:
                if str(error) != told:
                    log.error("%s", error)
                    told = str(error)
            except Exception:
                log.exception("The connection to NATS could not be used")

    async def _connect_and_prepare(
        self, addresses: list[str], options: dict[str, Any]
    ) -> tuple[Client, asyncio.Event]:
        """Opens a connection and prepares it."""
        client, closed = await self._connect(addresses, options)
        try:
            await self._joined(client)
        except BaseException:
            await _close_client(client)
            raise
        self._client = client
        self._connected_event.set()
        return client, closed

    async def _connect(self, addresses: list[str], options: dict[str, Any]) -> tuple[Client, asyncio.Event]:
        error: BusError | None = None
        for address in random.sample(addresses, len(addresses)):
            try:
                return await self._connect_to(address, options)
            except BusError as failed:
                error = failed if error is None or failed.data.get("final") else error
        assert error is not None
        raise error

    async def _connect_to(self, address: str, options: dict[str, Any]) -> tuple[Client, asyncio.Event]:
        client, closed = _create_client(encrypted=self._servers.is_encrypted), asyncio.Event()

        async def on_closed() -> None:
            closed.set()

        self._last_error = None
        try:
            async with asyncio.timeout(3 * NATS_RESPONSE_TIMEOUT_SECONDS):
                await client.connect(
                    servers=[address],
                    name=self._name,
                    allow_reconnect=False,
                    max_reconnect_attempts=1,
                    reconnect_time_wait=0,
                    connect_timeout=int(NATS_RESPONSE_TIMEOUT_SECONDS),
                    ping_interval=PING_INTERVAL_SECONDS,
                    no_echo=not self._echo,
                    error_cb=self._on_error,
                    closed_cb=on_closed,
                    **options,
                )
            if not client.is_connected:  # nats-py takes the end of a connection for a greeting
                raise ConnectionResetError("it ended the connection")
        except Exception as error:
            told = _explain_connect_error(address, self._last_error or error)
            await _close_client(client)
            raise told from error
        except BaseException:
            await _close_client(client)
            raise
        return client, closed

    async def _on_error(self, error: Exception) -> None:
        self._last_error = error
        if self._client is not None:
            log.debug("NATS: %r", error)
            if self._troubled is not None:
                self._troubled(error)


class _Backoff:
    """Pauses that double each time up to a limit, with jitter."""

    def __init__(self) -> None:
        self._longest = FIRST_RECONNECT_SECONDS

    def next(self) -> float:
        pause = random.uniform(self._longest / 2, self._longest)  # noqa: S311 - spreads load, guards nothing
        self._longest = min(self._longest * 2, MAX_RECONNECT_SECONDS)
        return pause


async def cancel_tasks(*tasks: asyncio.Task[Any] | None) -> None:
    """Cancels tasks, repeatedly if needed: nats-py swallows a cancellation that arrives while it is writing."""
    running = {task for task in tasks if task is not None and not task.done()}
    for _ in range(5):
        if not running:
            return
        for task in running:
            task.cancel()
        _, running = await asyncio.wait(running, timeout=1.0)


async def subscribe(
    client: Client, subject: str, hear: MessageHandler, most_bytes: int = MAX_PENDING_SUBSCRIPTION_BYTES
) -> Subscription:
    """Passes each message to `hear`, one at a time; messages beyond `most_bytes` waiting are dropped."""
    return await client.subscribe(  # pyright: ignore[reportUnknownMemberType]
        subject, cb=hear, pending_bytes_limit=most_bytes
    )


def list_connection_errors() -> tuple[type[Exception], ...]:
    """Exceptions that nats-py raises when a connection or an answer fails; all of them are temporary."""
    from nats.errors import Error  # noqa: PLC0415 - an extra

    return (Error, OSError, TimeoutError)


def _create_client(*, encrypted: bool) -> Client:
    from nats.aio.client import Client  # noqa: PLC0415 - an extra
    from nats.errors import Error  # noqa: PLC0415

    class Wary(Client):
        """Fixes two gaps in nats-py: credentials sent without encryption, and resources left open on close."""

        def _connect_command(self) -> bytes:
            """Sends credentials only once the connection is encrypted as required, which the server decides."""
            if encrypted and not self._server_info.get("tls_required"):
                raise Error(NOT_ENCRYPTED_MESSAGE)
            return super()._connect_command()

        async def _close(self, status: int, do_cbs: bool = True) -> None:
            """Closes even if the last bytes cannot be written; otherwise tasks and the socket would leak."""
            try:
                await super()._close(status, do_cbs)
            except (OSError, RuntimeError):  # uvloop raises RuntimeError for a closed transport
                self._pending, self._pending_data_size = [], 0
                self._status = Client.DISCONNECTED
                await super()._close(status, do_cbs)

    return Wary()


async def _try_flush(client: Client) -> bool:
    try:
        await client.flush(timeout=PING_INTERVAL_SECONDS * 4)
    except (*list_connection_errors(), RuntimeError):  # uvloop raises RuntimeError for a closed transport
        return False
    return True


async def _wait_until_lost(client: Client, closed: asyncio.Event) -> None:
    """Waits until the connection is lost; it is also polled, in case nats-py does not report the loss."""
    while client.is_connected:
        with suppress(TimeoutError):
            async with asyncio.timeout(CONNECTION_CHECK_SECONDS):
                await closed.wait()
                return


async def _close_client(client: Client) -> None:
    """Closes a client for good, whatever its state."""
    with suppress(Exception):
        async with asyncio.timeout(NATS_CLOSE_TIMEOUT_SECONDS):
            await client.close()


def _require_nats_library() -> None:
    try:
        import nats.aio.client  # noqa: F401, PLC0415 # pyright: ignore[reportUnusedImport]
    except ImportError as error:
        raise ConfigError(
            "bus.url is set, but nothing that could speak to NATS is installed.",
            format_install_hint("cluster"),
            path="bus.url",
        ) from error


def _explain_connect_error(address: str, error: Exception) -> BusError:
    """The error for a failed connection: its cause in one sentence, and what to do."""
    where = f"The NATS server at {_strip_credentials(address)}"
    if any(word in str(error).lower() for word in AUTHORIZATION_ERROR_WORDS):
        return BusError(
            f"{where} does not accept our credentials.", "Check those given in `bus`.", final=True
        )
    if NOT_ENCRYPTED_MESSAGE in str(error):
        return BusError(
            f"{where} does not encrypt, and we were told to.", "Give it a certificate.", final=True
        )
    if isinstance(error, ssl.SSLError):
        reason = getattr(error, "verify_message", "") or error.reason or str(error)
        return BusError(
            f"{where} cannot be trusted: {reason}.", "Name its certificate authority in `bus`.", final=True
        )
    if isinstance(error, TimeoutError):
        return BusError(f"{where} does not answer.", "Check bus.url, and that it runs.")
    return BusError(f"{where} cannot be reached: {error}.", "Check bus.url, and that it runs.")


def _strip_credentials(url: str) -> str:
    """The URL without user, password or token."""
    scheme, separator, rest = url.partition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}"
