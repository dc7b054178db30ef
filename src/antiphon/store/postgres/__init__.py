"""The PostgreSQL store: transaction scripts of any number of processes, as if they ran one after the other.

A script sees one snapshot (repeatable read) and is run again if a row that it changes has changed since. The
serializable level would detect every other conflict too, but with many false positives: it tracks index pages, and
a queue has few of them, so hardly any run would succeed at the first attempt. Scripts that decide by rows they do
not change take a `Tx.lock` instead. A few workers with a connection each take waiting scripts; under load one runs
several in one transaction, which share its round trips and its flush (group commit).

If the connection breaks during a commit, `commit_markers` finds out whether it took place; a caller is told that
nothing happened only if that is certain. No session state is used, so PgBouncer in transaction mode works.
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

CLOCK_SYNC_INTERVAL_SECONDS = 10.0  # seconds between reads of the database's clock


class PgStore:
    """The store on PostgreSQL. Open it with `PgStore.open` from a running event loop."""

    shared = True
    trouble = None  # Unknown without a request to the server; requests raise what is wrong.

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
        """Connects, migrates and reads the clock. `on_commit` is called around each COMMIT; crash tests kill there."""
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
        """Finishes accepted scripts, in bounded time, and closes every connection."""
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
    """Identifies the database itself, not its contents: a copy of the rows elsewhere is another store."""
    place: int = await link.fetchval("SELECT oid::bigint FROM pg_database WHERE datname = current_database()")
    try:
        cluster: int = await link.fetchval("SELECT system_identifier FROM pg_control_system()")
    except pg.InsufficientPrivilegeError:
        return f"{place}"  # some hosts hide the system identifier; then `bus.namespace` has to tell deployments apart
    return f"{cluster}-{place}"


def _bind_script(
    script: Callable[..., Awaitable[T]], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> BoundScript[T]:
    def run(tx: Tx) -> Coroutine[Any, Any, T]:
        return cast("Coroutine[Any, Any, T]", script(tx, *args, **kwargs))

    return run
