"""The PostgreSQL store: transaction scripts of any number of processes, as if they ran one after the other.

A script sees one snapshot (repeatable read) and is run again if a row that it changes has changed since. The
serializable level would detect every other conflict too, but with many false positives: it tracks index pages, and
a queue has few of them, so hardly any run would succeed at the first attempt. Scripts that decide by rows they do
not change take a `Tx.lock` instead. A few workers with a connection each take waiting scripts; under load one runs
several in one transaction, which share its round trips and its flush (group commit).

If the connection breaks during a commit, `CommitMarkers` determine whether it took place; a caller is told that
nothing happened only if that is certain. No session state is used, so PgBouncer in transaction mode works.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from time import monotonic
from typing import ParamSpec, TypeVar

from antiphon.clock import Clock
from antiphon.errors import StoreError
from antiphon.store import CommitPhase, Script, Tx
from antiphon.store.postgres.connection import (
    PgConnection,
    PgConnectionLost,
    PgServer,
    pg,
    translate_postgres_error,
)
from antiphon.store.postgres.pool import WorkerPool
from antiphon.store.postgres.schema import prepare_schema
from antiphon.store.postgres.transaction import PgTx
from antiphon.store.postgres.worker import BEGIN_READ_SQL, BEGIN_WRITE_SQL, PgWorker
from antiphon.store.queries import Query

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

CLOCK_SYNC_INTERVAL_SECONDS = 10.0
CLOCK_SAMPLES = 3
MAX_ROUND_TRIP_SECONDS = 0.5  # of a usable clock sample, which is uncertain by half of it
_NOW_QUERY = Query(
    "clock.now", "SELECT CAST(extract(epoch FROM clock_timestamp()) AS DOUBLE PRECISION) AS seconds"
)


class SharedClock:
    """The database's clock, extrapolated with the local monotonic clock. It never goes back and ignores wall clocks."""

    def __init__(self) -> None:
        self._offset: float | None = None
        self._last = 0

    def now(self) -> int:
        self._last = max(self._last, round((monotonic() + (self._offset or 0.0)) * 1000))
        return self._last

    async def synchronize(self, tx: Tx) -> None:
        """Reads the clock several times and uses the fastest answer, since the network may stall during one."""
        round_trip, offset = min([await _sample_clock(tx) for _ in range(CLOCK_SAMPLES)])
        if self._offset is None or round_trip < MAX_ROUND_TRIP_SECONDS:
            self._offset = offset


async def _sample_clock(tx: Tx) -> tuple[float, float]:
    """The round-trip time, and the offset of the database's clock to the local monotonic one."""
    started = monotonic()
    row = await tx.one(_NOW_QUERY)
    ended = monotonic()
    assert row is not None
    return ended - started, row["seconds"] - (started + ended) / 2


class PgStore:
    """The store on PostgreSQL. Open it with `PgStore.open` from a running event loop."""

    shared = True
    write_error = None  # Unknown without a request to the server; requests raise what is wrong.

    def __init__(
        self,
        server: PgServer,
        identity: str,
        clock: SharedClock,
        writers: int,
        readers: int,
        on_commit: Callable[[CommitPhase], None] | None,
    ) -> None:
        self.identity = identity
        self._clock = clock
        retry_lock = asyncio.Lock()
        self._writers = WorkerPool(
            [PgWorker(server, BEGIN_WRITE_SQL, retry_lock, on_commit) for _ in range(writers)]
        )
        self._readers = WorkerPool([PgWorker(server, BEGIN_READ_SQL, retry_lock) for _ in range(readers)])
        self._clock_task = asyncio.create_task(self._synchronize_clock())

    @classmethod
    async def open(
        cls,
        server: PgServer,
        *,
        writers: int = 8,
        readers: int = 4,
        migrate: bool = True,
        on_commit: Callable[[CommitPhase], None] | None = None,
    ) -> PgStore:
        """Connects, migrates and reads the clock. `on_commit` is called around each COMMIT; crash tests kill there."""
        clock = SharedClock()
        try:
            connection = await server.open_connection()
            try:
                await prepare_schema(connection, migrate=migrate)
                identity = await _load_identity(connection)
                await clock.synchronize(PgTx(connection))
            finally:
                await connection.close()
        except (pg.PostgresError, pg.InterfaceError, ValueError, PgConnectionLost) as error:
            raise translate_postgres_error(error, server) from error
        return cls(server, identity, clock, writers, readers, on_commit)

    @property
    def clock(self) -> Clock:
        return self._clock

    async def tx(self, script: Script[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._writers.submit(lambda tx: script(tx, *args, **kwargs))

    async def read(self, script: Script[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._readers.submit(lambda tx: script(tx, *args, **kwargs))

    async def close(self) -> None:
        """Finishes accepted scripts, in bounded time, and closes every connection."""
        self._clock_task.cancel()
        await asyncio.gather(
            self._clock_task, self._readers.shut_down(), self._writers.shut_down(), return_exceptions=True
        )

    async def _synchronize_clock(self) -> None:
        while True:
            await asyncio.sleep(CLOCK_SYNC_INTERVAL_SECONDS)
            try:
                await self.read(self._clock.synchronize)
            except StoreError as error:
                log.debug("The database's clock could not be read; retrying (%s)", error)


async def _load_identity(connection: PgConnection) -> str:
    """Identifies the database itself, not its contents: a copy of the rows elsewhere is another store."""
    database: int = await connection.fetchval(
        "SELECT oid::bigint FROM pg_database WHERE datname = current_database()"
    )
    try:
        cluster: int = await connection.fetchval("SELECT system_identifier FROM pg_control_system()")
    except pg.InsufficientPrivilegeError:
        return f"{database}"  # some hosts hide the system identifier; then `bus.namespace` must distinguish deployments
    return f"{cluster}-{database}"
