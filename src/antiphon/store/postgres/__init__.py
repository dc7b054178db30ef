"""The PostgreSQL store: transaction scripts of any number of processes, as if they ran one after the other.

A script sees one moment (repeatable read) and is run again when a row that it changes was changed since. The stricter
level of PostgreSQL, which would find every other conflict as well, finds far more than there are: it goes by pages of
an index, and those of a queue are few, so that hardly any run would end at the first attempt. What is decided by rows
that are not changed says so instead (`Tx.alone`). A few workers with a connection each take what is waiting; under
load one takes several scripts into one transaction, so that they share its round trips and its flush (group commit).

Whether a commit whose connection broke took place is found out (see `commits`); nobody is told that nothing happened
unless it is known. No session state is used, so a PgBouncer in transaction mode may stand in between.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, ParamSpec, TypeVar, cast

from antiphon.clock import Clock
from antiphon.errors import StoreError
from antiphon.store import Script, Tx
from antiphon.store.postgres.clock import SharedClock
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
from antiphon.store.postgres.worker import BEGIN_READ_SQL, BEGIN_WRITE_SQL, BoundScript, CommitPhase, PgWorker

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

CLOCK_SYNC_INTERVAL_SECONDS = 10.0  # seconds between looks at the database's clock


class PgStore:
    """See the module. Open with `PgStore.open`, from a running event loop."""

    shared = True
    trouble = None  # It is the server that knows; whoever asks it anything hears of it.

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
        again = asyncio.Lock()
        self._writers = WorkerPool(
            [PgWorker(server, BEGIN_WRITE_SQL, again, on_commit) for _ in range(writers)]
        )
        self._readers = WorkerPool([PgWorker(server, BEGIN_READ_SQL, again) for _ in range(readers)])
        self._watching = asyncio.create_task(self._watch_clock())

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
        """Connect, migrate and read the clock. `on_commit` is called around each COMMIT; crash tests kill there."""
        clock = SharedClock()
        try:
            link = await server.open_connection()
            try:
                await prepare_schema(link, migrate=migrate)
                identity = await _load_identity(link)
                await clock.synchronize(PgTx(link))
            finally:
                await link.close()
        except (pg.PostgresError, pg.InterfaceError, ValueError, PgConnectionLost) as error:
            raise translate_postgres_error(error, server) from error
        return cls(server, identity, clock, writers, readers, on_commit)

    @property
    def clock(self) -> Clock:
        return self._clock

    async def tx(self, script: Script[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._writers.submit(_bind_script(script, args, kwargs))

    async def read(self, script: Script[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._readers.submit(_bind_script(script, args, kwargs))

    async def close(self) -> None:
        """Finish what was handed over, in bounded time, and let go of every connection."""
        self._watching.cancel()
        await asyncio.gather(
            self._watching, self._readers.shut_down(), self._writers.shut_down(), return_exceptions=True
        )

    async def _watch_clock(self) -> None:
        while True:
            await asyncio.sleep(CLOCK_SYNC_INTERVAL_SECONDS)
            try:
                await self.read(self._clock.synchronize)
            except StoreError as error:
                log.debug("The database's clock could not be read; it is looked at again (%s)", error)


async def _load_identity(link: PgConnection) -> str:
    """Of the database, not of what is in it: a copy of the rows elsewhere is another store."""
    place: int = await link.fetchval("SELECT oid::bigint FROM pg_database WHERE datname = current_database()")
    try:
        cluster: int = await link.fetchval("SELECT system_identifier FROM pg_control_system()")
    except pg.InsufficientPrivilegeError:
        return f"{place}"  # some hosts keep that to themselves; then `bus.namespace` has to tell houses apart
    return f"{cluster}-{place}"


def _bind_script(
    script: Callable[..., Awaitable[T]], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> BoundScript[T]:
    def run(tx: Tx) -> Coroutine[Any, Any, T]:
        return cast("Coroutine[Any, Any, T]", script(tx, *args, **kwargs))

    return run
