"""A NATS connection that is replaced by a new one whenever it is lost.

nats-py's own reconnection is switched off, because of what it does (measured with nats-py 2.16):

- If the network stalls while data is unsent, it waits for the old socket to close. After 20 s it had neither reported
  the loss nor tried to connect.
- Any error sent by the server, such as an expired authentication, closes its client for good.
- Commands that were buffered when the connection was lost are sent on the next one. A late acknowledgement would take
  a lane from its new holder.

So a lost connection is closed, and a new client connects and is prepared by `on_connected`. This also leaves one way
to set up a connection instead of two. This module knows neither lanes nor events.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import ssl
from collections.abc import Awaitable, Callable, Iterator
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

NATS_RESPONSE_TIMEOUT_SECONDS = 2.0
PING_INTERVAL_SECONDS = 3  # a silent connection is given up after three unanswered pings
CONNECTION_CHECK_SECONDS = 1.0
FIRST_RECONNECT_SECONDS, MAX_RECONNECT_SECONDS = 0.05, 2.0  # pause between attempts to connect
NATS_CLOSE_TIMEOUT_SECONDS = 2.0
MAX_PENDING_SUBSCRIPTION_BYTES = 32 * 2**20  # unhandled messages of one subscription
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
        options: dict[str, Any] = {"user": self.user, "password": self.password, "token": self.token}
        if self.credentials is not None:
            if not all(marker in self.credentials.read_bytes() for marker in CREDENTIALS_FILE_MARKERS):
                raise ConfigError(
                    f"{self.credentials} contains no credentials.",
                    "Name a file created by `nsc generate creds`.",
                    path="bus",
                )
            options["user_credentials"] = str(self.credentials)
        if self.is_encrypted:
            options["tls"] = self._create_tls_context()
        return options

    @property
    def is_encrypted(self) -> bool:
        return self.authority is not None or "tls://" in self.url

    def _create_tls_context(self) -> ssl.SSLContext:
        try:
            return ssl.create_default_context(cafile=self.authority)
        except (ssl.SSLError, OSError) as error:
            raise ConfigError(
                f"{self.authority} contains no certificate.", "Name a file in PEM format.", path="bus"
            ) from error


def _check_readable(file: Path) -> None:
    """Refuses anything but a readable regular file: opening a pipe without a writer would block forever."""
    try:
        os.close(os.open(file, os.O_RDONLY | os.O_NONBLOCK))
        regular = file.is_file()
    except OSError as error:
        why = f"{file} could not be read ({error.strerror})."
        raise ConfigError(why, "Fix the path in `bus`.", path="bus") from error
    if not regular:
        raise ConfigError(f"{file} is not a file.", "Fix the path in `bus`.", path="bus")


class NatsConnection:
    """One client at a time. `on_connected` prepares each new one before it becomes `client`."""

    def __init__(
        self,
        servers: NatsServers,
        *,
        name: str,
        on_connected: OnConnected,
        on_disconnected: OnDisconnected,
        on_error: OnConnectionError | None = None,
        echo: bool = True,
    ) -> None:
        self._servers = servers
        self._name = name
        self._on_connected = on_connected
        self._on_disconnected = on_disconnected
        self._on_error = on_error
        self._echo = echo
        self._addresses: list[str] = []
        self._options: dict[str, Any] = {}
        self._client: Client | None = None
        self._closed = asyncio.Event()
        self._connected = asyncio.Event()
        self._reconnecting: asyncio.Task[None] | None = None
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
            self._connected.clear()
            await self._connected.wait()
        return client

    async def start(self, timeout: float = 10.0) -> None:
        """Connects, or raises an error that says why not. Wrong credentials are not tried twice."""
        self._addresses, self._options = (
            self._servers.parse_addresses(),
            self._servers.build_connect_options(),
        )
        _require_nats_library()
        deadline = asyncio.get_running_loop().time() + timeout
        pauses = _iterate_pauses()
        while True:
            try:
                client = await self._connect()
                break
            except BusError as error:
                remaining = deadline - asyncio.get_running_loop().time()
                if remaining <= 0 or error.data.get("final"):
                    raise
                await asyncio.sleep(min(next(pauses), remaining))
        self._reconnecting = asyncio.create_task(self._keep_connected(client))

    async def stop(self) -> None:
        await cancel_tasks(self._reconnecting)
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

    async def _keep_connected(self, client: Client) -> None:
        """Replaces each lost client, indefinitely. An error is logged once, not for each attempt."""
        while True:
            await self._wait_until_lost(client)
            self._client = None
            self._on_disconnected()
            log.warning(
                "Lost the connection to NATS at %s; reconnecting", self._servers.format_without_secrets()
            )
            await _close_client(client)
            logged = ""
            for pause in _iterate_pauses():
                await asyncio.sleep(pause)
                try:
                    client = await self._connect()
                    break
                except BusError as error:
                    if str(error) != logged:
                        log.error("%s", error)
                        logged = str(error)
                except Exception:
                    log.exception("Preparing a connection to NATS failed; retrying")
            log.warning("Reconnected to NATS at %s", self._servers.format_without_secrets())

    async def _wait_until_lost(self, client: Client) -> None:
        """Waits until the client is closed.

        The client is also polled: if the network stalls while data is unsent, nats-py waits to write it before it
        calls `closed_cb` (not called within 12 s of a stall).
        """
        while client.is_connected:
            with suppress(TimeoutError):
                async with asyncio.timeout(CONNECTION_CHECK_SECONDS):
                    await self._closed.wait()
                    return

    async def _connect(self) -> Client:
        """Connects to any of the servers and prepares the connection.

        The servers are tried one by one, each with its own client: nats-py's `connect` without reconnection stops at
        the first server that accepts a connection and does not answer, although the next one would.
        """
        failure: BusError | None = None
        for address in random.sample(self._addresses, len(self._addresses)):
            try:
                client = await self._connect_to(address)
                break
            except BusError as error:
                failure = error if failure is None or error.data.get("final") else failure
        else:
            assert failure is not None
            raise failure
        try:
            await self._on_connected(client)
        except BaseException:
            await _close_client(client)
            raise
        self._client = client
        self._connected.set()
        return client

    async def _connect_to(self, address: str) -> Client:
        client = _create_client(encrypted=self._servers.is_encrypted)
        self._closed = closed = asyncio.Event()

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
                    error_cb=self._record_error,
                    closed_cb=on_closed,
                    **self._options,
                )
            if not client.is_connected:  # nats-py accepts the end of a connection in place of a greeting
                raise ConnectionResetError("the server closed the connection")
        except Exception as error:
            explained = _explain_connect_error(
                address, self._last_error or error
            )  # closing may record another
            await _close_client(client)
            raise explained from error
        except BaseException:
            await _close_client(client)
            raise
        return client

    async def _record_error(self, error: Exception) -> None:
        self._last_error = error
        if self._client is not None:
            log.debug("NATS: %r", error)
            if self._on_error is not None:
                self._on_error(error)


def _iterate_pauses() -> Iterator[float]:
    """Yields pauses that double each time up to a limit, with jitter; they do not end."""
    longest = FIRST_RECONNECT_SECONDS
    while True:
        yield random.uniform(longest / 2, longest)  # noqa: S311 - spreads load, guards nothing
        longest = min(longest * 2, MAX_RECONNECT_SECONDS)


async def cancel_tasks(*tasks: asyncio.Task[Any] | None) -> None:
    """Cancels tasks, repeatedly if needed: nats-py suppresses a cancellation that arrives while it is writing."""
    running = {task for task in tasks if task is not None and not task.done()}
    for _ in range(5):
        if not running:
            return
        for task in running:
            task.cancel()
        _, running = await asyncio.wait(running, timeout=1.0)


async def subscribe(client: Client, subject: str, handler: MessageHandler) -> Subscription:
    """Passes each message to `handler`, one at a time; beyond a limit of waiting bytes, messages are dropped."""
    return await client.subscribe(  # pyright: ignore[reportUnknownMemberType]
        subject, cb=handler, pending_bytes_limit=MAX_PENDING_SUBSCRIPTION_BYTES
    )


def list_connection_errors() -> tuple[type[Exception], ...]:
    """Exceptions that nats-py raises when a connection or an answer fails; all of them are temporary."""
    from nats.errors import Error  # noqa: PLC0415 - an extra

    return (Error, OSError, TimeoutError)


def _create_client(*, encrypted: bool) -> Client:
    from nats.aio.client import Client  # noqa: PLC0415 - an extra
    from nats.errors import Error  # noqa: PLC0415

    class SafeClient(Client):
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

    return SafeClient()


async def _try_flush(client: Client) -> bool:
    try:
        await client.flush(timeout=PING_INTERVAL_SECONDS * 4)
    except (*list_connection_errors(), RuntimeError):  # uvloop raises RuntimeError for a closed transport
        return False
    return True


async def _close_client(client: Client) -> None:
    """Closes a client permanently, whatever its state."""
    with suppress(Exception):
        async with asyncio.timeout(NATS_CLOSE_TIMEOUT_SECONDS):
            await client.close()


def _require_nats_library() -> None:
    try:
        import nats.aio.client  # noqa: F401, PLC0415 # pyright: ignore[reportUnusedImport]
    except ImportError as error:
        raise ConfigError(
            "bus.url is set, but the NATS client library is not installed.",
            format_install_hint("cluster"),
            path="bus.url",
        ) from error


def _explain_connect_error(address: str, error: Exception) -> BusError:
    """The error for a failed connection: its cause in one sentence, and what to do."""
    where = f"The NATS server at {_strip_credentials(address)}"
    if any(word in str(error).lower() for word in AUTHORIZATION_ERROR_WORDS):
        return BusError(
            f"{where} does not accept the credentials.", "Check the credentials in `bus`.", final=True
        )
    if NOT_ENCRYPTED_MESSAGE in str(error):
        return BusError(
            f"{where} does not encrypt, but encryption is required.",
            "Configure TLS on the server.",
            final=True,
        )
    if isinstance(error, ssl.SSLError):
        reason = getattr(error, "verify_message", "") or error.reason or str(error)
        return BusError(
            f"{where} cannot be trusted: {reason}.", "Set bus.tlsCa to its certificate authority.", final=True
        )
    if isinstance(error, TimeoutError):
        return BusError(f"{where} does not answer.", "Check bus.url, and that the server is running.")
    return BusError(f"{where} cannot be reached: {error}.", "Check bus.url, and that the server is running.")


def _strip_credentials(url: str) -> str:
    """The URL without user, password or token."""
    scheme, separator, rest = url.partition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}"
