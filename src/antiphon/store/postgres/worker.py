"""One connection and its transactions, which are retried after conflicts and lost connections."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from time import monotonic
from typing import Any, TypeVar
from uuid import uuid4

from antiphon.errors import StoreError, StoreUnsure
from antiphon.store import BoundScript, CommitPhase
from antiphon.store.postgres.connection import (
    CONFLICT_ERRORS,
    CONNECT_TIMEOUT_SECONDS,
    IDLE_TRANSACTION_TIMEOUT_SECONDS,
    STATEMENT_TIMEOUT_SECONDS,
    PgConnection,
    PgConnectionLost,
    PgServer,
    pg,
    translate_postgres_error,
)
from antiphon.store.postgres.transaction import GuardedScript, PgTx

T = TypeVar("T")

# Attempts of a script that hits existing rows; concurrent changes are retried for as long as there is time
MAX_ATTEMPTS_PER_SCRIPT = 10
MAX_BATCH_ATTEMPTS = 4  # attempts at a batch before its scripts are run one by one
RETRY_WINDOW_SECONDS = 20.0  # after its submission, in which a script is retried on a new connection
COMMIT_RESOLVE_SECONDS = 2.0 * IDLE_TRANSACTION_TIMEOUT_SECONDS  # to find out whether a commit took place

# One round trip each. Transactions that wait long for a row may be deadlocked; both are retried.
_TRANSACTION_SETTINGS_SQL = (
    f"SET LOCAL statement_timeout = '{STATEMENT_TIMEOUT_SECONDS}s'; "
    f"SET LOCAL idle_in_transaction_session_timeout = '{IDLE_TRANSACTION_TIMEOUT_SECONDS}s'; "
    "SET LOCAL lock_timeout = '1s'; SET LOCAL jit = off; SET LOCAL enable_seqscan = off; "
    "SET LOCAL max_parallel_workers_per_gather = 0"
)
BEGIN_WRITE_SQL = f"BEGIN ISOLATION LEVEL REPEATABLE READ; {_TRANSACTION_SETTINGS_SQL}"
_BATCH_SETTINGS_SQL = (
    "; SET LOCAL lock_timeout = '100ms'"  # two batches often lock the same rows in different order
)
BEGIN_READ_SQL = f"BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY; {_TRANSACTION_SETTINGS_SQL}"

_NOW_SECONDS_SQL = "CAST(extract(epoch FROM clock_timestamp()) AS BIGINT)"
# Both statements in one round trip, hence with inlined values: only single, prepared statements take parameters.
_COMMIT_WITH_MARKER_SQL = f"""
INSERT INTO commits (connection, number, at)
SELECT '{{connection}}', {{number}}, {_NOW_SECONDS_SQL} WHERE pg_current_xact_id_if_assigned() IS NOT NULL
ON CONFLICT (connection) DO UPDATE SET number = excluded.number, at = excluded.at; COMMIT"""
_BEGIN_MARKER_CHECK_SQL = "BEGIN ISOLATION LEVEL READ COMMITTED; SET LOCAL lock_timeout = '1s'"
_READ_MARKER_SQL = f"""
INSERT INTO commits (connection, number, at) VALUES ($1, 0, {_NOW_SECONDS_SQL})
ON CONFLICT (connection) DO UPDATE SET at = excluded.at RETURNING number
"""  # noqa: S608
_DELETE_OLD_MARKERS_SQL = f"""
DELETE FROM commits WHERE connection IN (
  SELECT connection FROM commits WHERE at < {_NOW_SECONDS_SQL} - 86400 LIMIT 1000 FOR UPDATE SKIP LOCKED
)
"""  # noqa: S608

_EXISTING_ROW_ERRORS = (pg.UniqueViolationError, pg.ForeignKeyViolationError)


class ScriptJob:
    """A script on its way to a worker, and where its outcome goes."""

    __slots__ = ("deadline", "future", "run")

    def __init__(self, run: BoundScript[Any], future: asyncio.Future[Any]) -> None:
        self.run = run
        self.future = future
        self.deadline = monotonic() + RETRY_WINDOW_SECONDS

    def succeed(self, result: Any) -> None:
        if not self.future.done():
            self.future.set_result(result)

    def fail(self, error: BaseException) -> None:
        if not self.future.done():
            self.future.set_exception(error)


class CommitMarkers:
    """Determines whether a commit of one connection whose answer was lost took place.

    Every connection has a row with the number of its last transaction that changed anything, written in that
    transaction. Checking it also writes the row, which makes the answer final: a transaction that is still open and
    writes its marker later finds the row changed since it began and fails (repeatable read). PostgreSQL's transaction
    ids would not do: after a crash, and on a promoted standby, lost ids are reused, and another commit would be taken
    for ours.
    """

    def __init__(self) -> None:
        self._connection = uuid4().hex
        self._number = 0

    def build_commit(self) -> tuple[str, int]:
        """SQL that commits the open transaction, with its marker if it changed anything, and the marker's number."""
        self._number += 1
        return _COMMIT_WITH_MARKER_SQL.format(connection=self._connection, number=self._number), self._number

    async def was_committed(self, other: PgConnection, number: int) -> bool:
        """Whether that transaction took place, checked on another connection; afterwards it no longer can.

        Raises:
            LockNotAvailableError: it is still open.
        """
        await other.execute(_BEGIN_MARKER_CHECK_SQL)
        last = await other.fetchval(_READ_MARKER_SQL, self._connection)
        await other.execute("COMMIT")
        return last == number


class PgWorker:
    """One connection, opened on demand and replaced when it breaks."""

    def __init__(
        self,
        server: PgServer,
        begin: str,
        retry_lock: asyncio.Lock,
        on_commit: Callable[[CommitPhase], None] | None = None,
    ) -> None:
        self._server = server
        self._retry_lock = retry_lock
        self._begin = begin
        self._writes = begin == BEGIN_WRITE_SQL
        self._on_commit = on_commit
        self._connection: PgConnection | None = None
        self._markers = CommitMarkers()
        self._last_connect_error: BaseException | None = None
        self._current_index = 0

    async def run_jobs(self, jobs: Sequence[ScriptJob]) -> None:
        """Runs the jobs; every one has its outcome on return."""
        waiting = [job for job in jobs if not job.future.done()]  # some callers may have stopped waiting
        for job in await self._run_batch(waiting):
            try:
                job.succeed(await self._run_alone(job))
            except (pg.PostgresError, pg.InterfaceError, PgConnectionLost) as error:
                job.fail(translate_postgres_error(error, self._server))
            except Exception as error:  # noqa: BLE001 - it is the caller's, who gets it
                job.fail(error)

    async def close(self) -> None:
        if self._connection is not None:
            connection, self._connection = self._connection, None
            await connection.close()

    def drop_connection(self) -> None:
        """Closes the connection abruptly, since the state of its transaction is unknown."""
        if self._connection is not None:
            self._connection.terminate()
            self._connection = None

    async def _run_batch(self, jobs: list[ScriptJob]) -> list[ScriptJob]:
        """Runs the jobs in one transaction; returns those without an outcome, to be run one by one."""
        aside: list[ScriptJob] = []
        for attempt in range(MAX_BATCH_ATTEMPTS):
            if len(jobs) < 2:
                break
            try:
                results = await self._attempt(attempt, [job.run for job in jobs], jobs[0].deadline)
            except PgConnectionLost:
                break
            except CONFLICT_ERRORS:
                await _pause_before_retry(attempt)
            except StoreUnsure as error:
                for job in jobs:
                    job.fail(error)
                return aside
            except Exception:  # noqa: BLE001 - it may be due to the others: it is the script's if it is raised alone
                aside.append(jobs.pop(min(self._current_index, len(jobs) - 1)))
            else:
                for job, result in zip(jobs, results, strict=True):
                    job.succeed(result)
                return aside
        return [*jobs, *aside]

    async def _run_alone(self, job: ScriptJob) -> Any:
        """Runs a job by itself, and again after each conflict, within limits."""
        for attempt in count():
            try:
                return (await self._attempt(attempt, [job.run], job.deadline))[0]
            except CONFLICT_ERRORS as error:
                if attempt + 1 >= MAX_ATTEMPTS_PER_SCRIPT and (
                    isinstance(error, _EXISTING_ROW_ERRORS) or monotonic() > job.deadline
                ):
                    raise
                await _pause_before_retry(attempt)
            except PgConnectionLost:
                if monotonic() > job.deadline:
                    raise
                await asyncio.sleep(random.uniform(0.02, 0.2))  # noqa: S311
        raise AssertionError("unreachable")

    async def _attempt(self, attempt: int, scripts: Sequence[BoundScript[Any]], deadline: float) -> list[Any]:
        """Makes one attempt. Retries run one at a time per process, since only one can have a contested row anyway."""
        if attempt == 0:
            return await self._transact(scripts, deadline)
        is_acquired = await _try_acquire(self._retry_lock)
        try:
            return await self._transact(scripts, deadline)
        finally:
            if is_acquired:
                self._retry_lock.release()

    async def _transact(self, scripts: Sequence[BoundScript[Any]], deadline: float) -> list[Any]:
        connection = await self._get_connection(deadline)
        try:
            await connection.execute(
                self._begin + (_BATCH_SETTINGS_SQL if len(scripts) > 1 else ""),
                timeout=CONNECT_TIMEOUT_SECONDS,
            )
            tx = PgTx(connection, writes=self._writes)
            results: list[Any] = []
            for self._current_index, script in enumerate(scripts):
                results.append(await GuardedScript(script(tx), tx))
        except BaseException as error:
            await self._roll_back(connection, error)
            raise
        await self._commit(connection)
        return results

    async def _commit(self, connection: PgConnection) -> None:
        """Commits; returns if the commit took place or had nothing to write."""
        self._signal_commit("before")
        commit, number = self._markers.build_commit() if self._writes else ("COMMIT", 0)
        try:
            status = await connection.execute(commit)
        except PgConnectionLost:
            self.drop_connection()
            if self._writes and not await self._was_committed(self._markers, number):
                raise  # certain not to have happened: run again
        except BaseException as error:
            await self._roll_back(connection, error)
            raise
        else:
            if status != "COMMIT":  # a script continued after a failed statement
                raise StoreError(
                    f"The database {self._server.display_name} rolled a transaction back, "
                    "because a statement in it failed.",
                    "Run `antiphon doctor`; nothing of this request was kept.",
                )
        self._signal_commit("after")

    async def _was_committed(self, markers: CommitMarkers, number: int) -> bool:
        """Whether a transaction was committed, checked on another connection.

        Raises:
            StoreUnsure: that could not be determined in time.
        """
        deadline = monotonic() + COMMIT_RESOLVE_SECONDS
        while monotonic() < deadline:
            try:
                return await markers.was_committed(await self._get_connection(deadline), number)
            except (pg.PostgresError, PgConnectionLost):
                self.drop_connection()
            await asyncio.sleep(0.1)
        raise StoreUnsure(
            f"The connection to the database {self._server.display_name} broke during a commit.",
            "Whether it took effect is unknown: retry with the same idempotency key.",
        )

    async def _roll_back(self, connection: PgConnection, error: BaseException) -> None:
        # A server that turned read-only may no longer be the primary; a new connection may find the new one.
        if isinstance(error, (PgConnectionLost, pg.ReadOnlySQLTransactionError)) or not isinstance(
            error, Exception
        ):
            self.drop_connection()
            return
        try:
            await connection.execute("ROLLBACK", timeout=CONNECT_TIMEOUT_SECONDS)
        except (pg.PostgresError, PgConnectionLost):
            self.drop_connection()

    async def _get_connection(self, deadline: float) -> PgConnection:
        if self._connection is not None and not self._connection.is_closed():
            return self._connection
        if self._last_connect_error is not None and monotonic() > deadline:
            raise PgConnectionLost(
                self._last_connect_error
            )  # a job past its deadline does not wait for another attempt
        try:
            connection = await self._server.open_connection()
        except PgConnectionLost as error:
            self._last_connect_error = error.cause
            raise
        self._connection, self._markers, self._last_connect_error = connection, CommitMarkers(), None
        if self._writes:
            await self._delete_old_markers(connection)
        return connection

    async def _delete_old_markers(self, connection: PgConnection) -> None:
        """Deletes the markers of long-gone connections."""
        with suppress(
            pg.PostgresError
        ):  # a read-only database, for example: writing scripts get the error themselves
            await connection.execute(_DELETE_OLD_MARKERS_SQL)

    def _signal_commit(self, phase: CommitPhase) -> None:
        if self._writes and self._on_commit:
            self._on_commit(phase)


async def _try_acquire(lock: asyncio.Lock) -> bool:
    """Acquires the lock unless its holder takes too long: it only saves wasted attempts."""
    try:
        async with asyncio.timeout(1.0):
            return await lock.acquire()
    except TimeoutError:
        return False


async def _pause_before_retry(attempt: int) -> None:
    await asyncio.sleep(random.uniform(0, min(0.05, 0.001 * 2**attempt)))  # noqa: S311
