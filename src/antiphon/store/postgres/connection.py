"""Connects to a PostgreSQL server and translates its errors."""

from __future__ import annotations

import re
import ssl
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Protocol, TypeVar, cast
from urllib.parse import urlsplit

import msgspec

from antiphon.errors import AntiphonError, StoreError, StoreFull, StoreReadOnly, format_install_hint
from antiphon.store import Row

try:
    import asyncpg
    from asyncpg import exceptions as pg
except ImportError as error:
    raise StoreError(
        "PostgreSQL needs packages that are not installed.", format_install_hint("cluster")
    ) from error

T = TypeVar("T")

CONNECT_TIMEOUT_SECONDS = 10.0  # also to begin a transaction
STATEMENT_TIMEOUT_SECONDS = 30  # the server cancels a statement after that
COMMAND_TIMEOUT_SECONDS = 35.0  # a server that has not answered by then is given up
IDLE_TRANSACTION_TIMEOUT_SECONDS = 15  # the server ends a transaction whose process is silent

_HOST_PATTERN = re.compile(r"(\[[0-9a-fA-F:.]+\]|[\w.-]*)(:\d+)?")

CONFLICT_ERRORS = (  # Another transaction interfered: run again, on top of its changes.
    pg.SerializationError,
    pg.DeadlockDetectedError,
    pg.UniqueViolationError,
    pg.ForeignKeyViolationError,
    pg.LockNotAvailableError,
    pg.InvalidCachedStatementError,  # another process has migrated
)
CONNECTION_ERRORS = (  # The connection is no longer usable.
    OSError,
    TimeoutError,
    pg.PostgresConnectionError,
    pg.InterfaceError,
    pg.InternalClientError,
    pg.AdminShutdownError,
    pg.CrashShutdownError,
    pg.CannotConnectNowError,
    pg.DatabaseDroppedError,
    pg.TooManyConnectionsError,
    pg.IdleInTransactionSessionTimeoutError,
    pg.IdleSessionTimeoutError,
    pg.StatementCompletionUnknownError,
)
_MISUSE_ERRORS = (pg.ClientConfigurationError, pg.DataError)  # raised by asyncpg for invalid arguments


class PgConnectionLost(Exception):
    """The connection is no longer usable; `cause` says why. The last request on it may have taken effect."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(str(cause))
        self.cause = cause


class AsyncpgConnection(Protocol):
    """The subset of asyncpg's connection that is used here; asyncpg itself is untyped."""

    async def execute(self, query: str, *args: object, timeout: float | None = None) -> str: ...

    async def fetch(self, query: str, *args: object) -> list[Row]: ...

    async def fetchrow(self, query: str, *args: object) -> Row | None: ...

    async def fetchval(self, query: str, *args: object) -> Any: ...

    async def close(self, *, timeout: float) -> None: ...

    def terminate(self) -> None: ...

    def is_closed(self) -> bool: ...


class PgConnection:
    """A connection that raises `PgConnectionLost` for every loss of it, and never for a script's own exceptions."""

    def __init__(self, connection: AsyncpgConnection) -> None:
        self._connection = connection

    async def execute(self, query: str, *args: object, timeout: float | None = None) -> str:
        return await _detect_loss(self._connection.execute(query, *args, timeout=timeout))

    async def fetch(self, query: str, *args: object) -> list[Row]:
        return await _detect_loss(self._connection.fetch(query, *args))

    async def fetchrow(self, query: str, *args: object) -> Row | None:
        return await _detect_loss(self._connection.fetchrow(query, *args))

    async def fetchval(self, query: str, *args: object) -> Any:
        return await _detect_loss(self._connection.fetchval(query, *args))

    async def close(self) -> None:
        """Closes gracefully if that is quick, else at once."""
        with suppress(*CONNECTION_ERRORS):
            await self._connection.close(timeout=2.0)

    def terminate(self) -> None:
        self._connection.terminate()

    def is_closed(self) -> bool:
        return self._connection.is_closed()


async def _detect_loss(answer: Awaitable[T]) -> T:
    try:
        return await answer
    except _MISUSE_ERRORS:
        raise
    except CONNECTION_ERRORS as error:
        raise PgConnectionLost(error) from error


class PgServer(msgspec.Struct, frozen=True):
    """The address and credentials of the database, where the URL does not have them already."""

    url: str
    password: str | None = None
    tls: ssl.SSLContext | None = None
    prepared: bool = True
    """False behind a PgBouncer that does not support prepared statements."""

    async def connect(self) -> AsyncpgConnection:
        connect = cast("Callable[..., Awaitable[AsyncpgConnection]]", asyncpg.connect)  # pyright: ignore[reportUnknownMemberType]
        return await connect(
            self.url,
            password=self.password,
            ssl=self.tls,
            timeout=CONNECT_TIMEOUT_SECONDS,
            command_timeout=COMMAND_TIMEOUT_SECONDS,
            statement_cache_size=512 if self.prepared else 0,
            server_settings={"application_name": "antiphon"},
        )

    async def open_connection(self) -> PgConnection:
        return PgConnection(await _detect_loss(self.connect()))

    @property
    def display_name(self) -> str:
        """The server's name for messages, without secrets; empty of detail where a password may have been split."""
        try:
            parts = urlsplit(self.url)
        except ValueError:
            return _FALLBACK_DISPLAY_NAME
        hosts = parts.netloc.rpartition("@")[2]
        rest = f"{parts.path}{parts.query}{parts.fragment}"
        if "@" in rest or not all(_HOST_PATTERN.fullmatch(host) for host in hosts.split(",")):
            return _FALLBACK_DISPLAY_NAME
        return repr(f"{hosts}{parts.path}".removeprefix("/"))


_FALLBACK_DISPLAY_NAME = "of 'store.url'"


def translate_postgres_error(error: BaseException, server: PgServer) -> AntiphonError:
    """Translates a database error to one sentence with a next step."""
    if isinstance(error, AntiphonError):
        return error
    cause = error.cause if isinstance(error, PgConnectionLost) else error
    lines = str(cause.args[0] if isinstance(cause, pg.PostgresError) else cause).splitlines()
    reason = lines[0].rstrip(".") if lines else type(cause).__name__
    kind, what, hint = next(
        (kind, what, hint) for classes, kind, what, hint in _ERROR_TRANSLATIONS if isinstance(cause, classes)
    )
    return kind(what.format(server=server.display_name, reason=reason), hint)


_NOTHING_KEPT_TEXT = "nothing of this request was kept"
_UNREADABLE_URL = (  # Their messages may quote a part of the URL, which may be a part of a password.
    StoreError,
    "'store.url' cannot be read as the address of a database.",
    "Write postgresql://user@host/database, and the password as store.password.",
)
_ERROR_TRANSLATIONS: list[tuple[tuple[type[BaseException], ...], type[StoreError], str, str]] = [
    ((pg.ClientConfigurationError, UnicodeError), *_UNREADABLE_URL),
    (
        (pg.InvalidPasswordError, pg.InvalidAuthorizationSpecificationError),
        StoreError,
        "The database {server} rejected the login ({reason}).",
        "Check the user in store.url and store.password.",
    ),
    (
        (pg.InvalidCatalogNameError,),
        StoreError,
        "There is no database {server} ({reason}).",
        "Create it with createdb, or correct its name in store.url.",
    ),
    (
        (pg.InsufficientPrivilegeError,),
        StoreReadOnly,
        "The database {server} refuses this user ({reason}).",
        "Give the user the right to create and write tables in its schema.",
    ),
    (
        (pg.ReadOnlySQLTransactionError,),
        StoreReadOnly,
        "The database {server} is read only; " + _NOTHING_KEPT_TEXT + ".",
        "Point store.url at the primary: add target_session_attrs=read-write.",
    ),
    (
        (pg.DiskFullError,),
        StoreFull,
        "The database {server} has no room left ({reason}); " + _NOTHING_KEPT_TEXT + ".",
        "Free disk space on its server and try again.",
    ),
    (
        (pg.OutOfMemoryError,),
        StoreError,
        "The database {server} has no memory left ({reason}); " + _NOTHING_KEPT_TEXT + ".",
        "Try again in a moment; if it keeps happening, give its server more memory.",
    ),
    (
        (pg.QueryCanceledError,),
        StoreError,
        "The database {server} did not finish a statement in time ({reason}); " + _NOTHING_KEPT_TEXT + ".",
        "Try again in a moment; if it keeps happening, check what its server is busy with.",
    ),
    (
        (pg.InvalidSQLStatementNameError, pg.DuplicatePreparedStatementError),
        StoreError,
        "A connection pooler in front of the database {server} mixes up prepared statements; "
        + _NOTHING_KEPT_TEXT
        + ".",
        "Set store.preparedStatements to false.",
    ),
    (
        (ssl.SSLError,),
        StoreError,
        "A TLS connection to the database {server} could not be established ({reason}).",
        "Check store.tlsCa, the server's certificate and the host name in store.url.",
    ),
    (
        _MISUSE_ERRORS,
        StoreError,
        "A value does not fit into the database {server} ({reason}); " + _NOTHING_KEPT_TEXT + ".",
        "Run `antiphon doctor`.",
    ),
    (
        CONNECTION_ERRORS,
        StoreError,
        "The database {server} cannot be reached ({reason}).",
        "Check store.url and that PostgreSQL is running; " + _NOTHING_KEPT_TEXT + ".",
    ),
    (
        (pg.SerializationError, pg.DeadlockDetectedError, pg.LockNotAvailableError),
        StoreError,
        "The database {server} had too many concurrent changes of the same rows ({reason}).",
        "Try again in a moment; " + _NOTHING_KEPT_TEXT + ".",
    ),
    ((ValueError,), *_UNREADABLE_URL),
    (
        (BaseException,),
        StoreError,
        "The database {server} refused a statement ({reason}).",
        "Run `antiphon doctor`; " + _NOTHING_KEPT_TEXT + ".",
    ),
]
