"""One connection and its transactions, which are retried after conflicts and lost connections."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from itertools import count
from time import monotonic
from typing import Any, Literal, TypeAlias, TypeVar

from antiphon.errors import StoreError, StoreUnsure
from antiphon.store import Tx
from antiphon.store.postgres.commit_markers import CommitMarkers, delete_old_markers
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
CommitPhase = Literal["before", "after"]
BoundScript: TypeAlias = Callable[[Tx], Coroutine[Any, Any, T]]

# Attempts of a script that hits existing rows; concurrent changes are retried for as long as there is time
MAX_ATTEMPTS_PER_SCRIPT = 10
MAX_BATCH_ATTEMPTS = 4  # attempts at a batch before its scripts are run one by one
RETRY_WINDOW_SECONDS = 20.0  # seconds after its submission in which a script is retried on a new connection
COMMIT_RESOLVE_SECONDS = (
    2.0 * IDLE_TRANSACTION_TIMEOUT_SECONDS
)  # seconds to find out whether a commit took place

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

_EXISTING_ROW_ERRORS = (pg.UniqueViolationError, pg.ForeignKeyViolationError)


class ScriptJob:
    """A script on its way to a worker, and where its outcome goes."""

    __slots__ = ("future", "run", "until")

    def __init__(self, run: BoundScript[Any], future: asyncio.Future[Any]) -> None:
        self.run = run
        self.future = future
        self.until = monotonic() + RETRY_WINDOW_SECONDS

    def succeed(self, result: Any) -> None:
        if not self.future.done():
            self.future.set_result(result)

    def fail(self, error: BaseException) -> None:
        if not self.future.done():
            self.future.set_exception(error)


class PgWorker:
    """One connection, opened on demand and replaced when it breaks."""

    def __init__(
        self,
        server: PgServer,
        begin: str,
        again: asyncio.Lock,
        on_commit: Callable[[CommitPhase], None] | None = None,
    ) -> None:
        self._server = server
        self._again = again
        self._begin = begin
        self._writes = begin == BEGIN_WRITE_SQL
        self._on_commit = on_commit
        self._link: PgConnection | None = None
        self._marks = CommitMarkers()
        self._refused: BaseException | None = None
        self._running = 0

    async def run_jobs(self, jobs: Sequence[ScriptJob]) -> None:
        """Runs the jobs; every one has its outcome on return."""
        wanted = [job for job in jobs if not job.future.done()]  # some callers may have stopped waiting
        for job in await self._run_batch(wanted):
            try:
                job.succeed(await self._run_alone(job))
            except (pg.PostgresError, pg.InterfaceError, PgConnectionLost) as error:
                job.fail(translate_postgres_error(error, self._server))
            except Exception as error:  # noqa: BLE001 - it is the caller's, who gets it
                job.fail(error)

    async def close(self) -> None:
        if self._link is not None:
            link, self._link = self._link, None
            await link.close()

    def drop_connection(self) -> None:
        """Closes the connection abruptly, since the state of its transaction is unknown."""
        if self._link is not None:
            self._link.terminate()
            self._link = None

    async def _run_batch(self, jobs: list[ScriptJob]) -> list[ScriptJob]:
        """Runs the jobs in one transaction; returns those without an outcome, to be run one by one."""
        aside: list[ScriptJob] = []
        for attempt in range(MAX_BATCH_ATTEMPTS):
            if len(jobs) < 2:
                break
            try:
                results = await self._attempt(attempt, [job.run for job in jobs], jobs[0].until)
            except PgConnectionLost:
                break
            except CONFLICT_ERRORS:
                await _pause_before_retry(attempt)
            except StoreUnsure as error:
                for job in jobs:
                    job.fail(error)
                return aside
            except Exception:  # noqa: BLE001 - it may be due to the others: it is the script's if it is raised alone
                aside.append(jobs.pop(min(self._running, len(jobs) - 1)))
            else:
                for job, result in zip(jobs, results, strict=True):
                    job.succeed(result)
                return aside
        return [*jobs, *aside]

    async def _run_alone(self, job: ScriptJob) -> Any:
        """Runs a job by itself, and again after each conflict, within limits."""
        for attempt in count():
            try:
                return (await self._attempt(attempt, [job.run], job.until))[0]
            except CONFLICT_ERRORS as error:
                if attempt + 1 >= MAX_ATTEMPTS_PER_SCRIPT and (
                    isinstance(error, _EXISTING_ROW_ERRORS) or monotonic() > job.until
                ):
                    raise
                await _pause_before_retry(attempt)
            except PgConnectionLost:
                if monotonic() > job.until:
                    raise
                await asyncio.sleep(random.uniform(0.02, 0.2))  # noqa: S311
        raise AssertionError("unreachable")

    async def _attempt(self, attempt: int, scripts: Sequence[BoundScript[Any]], until: float) -> list[Any]:
        """Makes one attempt. Retries run one at a time per process, since only one can have a contested row anyway."""
        if attempt == 0:
            return await self._transact(scripts, until)
        mine = await _try_acquire(self._again)
        try:
            return await self._transact(scripts, until)
        finally:
            if mine:
                self._again.release()

    async def _transact(self, scripts: Sequence[BoundScript[Any]], until: float) -> list[Any]:
        link = await self._get_connection(until)
        try:
            await link.execute(
                self._begin + (_BATCH_SETTINGS_SQL if len(scripts) > 1 else ""),
                timeout=CONNECT_TIMEOUT_SECONDS,
            )
            results = await self._run_scripts(scripts, PgTx(link, writes=self._writes))
        except BaseException as error:
            await self._roll_back(link, error)
            raise
        await self._commit(link)
        return results

    async def _run_scripts(self, scripts: Sequence[BoundScript[Any]], tx: PgTx) -> list[Any]:
        results: list[Any] = []
        for self._running, script in enumerate(scripts):
            results.append(await GuardedScript(script(tx), tx))
        return results

    async def _commit(self, link: PgConnection) -> None:
        """Commits; returns if the commit took place or had nothing to write."""
        self._signal_commit("before")
        commit, mark = self._marks.build_commit() if self._writes else ("COMMIT", 0)
        try:
            status = await link.execute(commit)
        except PgConnectionLost:
            self.drop_connection()
            if self._writes and not await self._was_committed(self._marks, mark):
                raise  # certain not to have happened: run again
        except BaseException as error:
            await self._roll_back(link, error)
            raise
        else:
            if status != "COMMIT":  # a script continued after a failed statement
                raise StoreError(
                    f"The database {self._server.display_name} rolled a transaction back, "
                    "because a statement in it failed.",
                    "Run `antiphon doctor`; nothing of this request was kept.",
                )
        self._signal_commit("after")

    async def _was_committed(self, marks: CommitMarkers, mark: int) -> bool:
        """Whether a transaction was committed, checked on another connection.

        Raises:
            StoreUnsure: that could not be determined in time.
        """
        until = monotonic() + COMMIT_RESOLVE_SECONDS
        while monotonic() < until:
            try:
                return await marks.was_committed(await self._get_connection(until), mark)
            except (pg.PostgresError, PgConnectionLost):
                self.drop_connection()
            await asyncio.sleep(0.1)
        raise StoreUnsure(
            f"The connection to the database {self._server.display_name} broke in the middle of a commit.",
            "Whether it took place is not known: ask again with the same idempotency key.",
        )

    async def _roll_back(self, link: PgConnection, error: BaseException) -> None:
        # A server that turned read-only may no longer be the primary; a new connection may find the new one.
        if isinstance(error, (PgConnectionLost, pg.ReadOnlySQLTransactionError)) or not isinstance(
            error, Exception
        ):
            self.drop_connection()
            return
        try:
            await link.execute("ROLLBACK", timeout=CONNECT_TIMEOUT_SECONDS)
        except (pg.PostgresError, PgConnectionLost):
            self.drop_connection()

    async def _get_connection(self, until: float) -> PgConnection:
        if self._link is not None and not self._link.is_closed():
            return self._link
        if self._refused is not None and monotonic() > until:
            raise PgConnectionLost(self._refused)  # a job past its deadline does not wait for another attempt
        try:
            link = await self._server.open_connection()
        except PgConnectionLost as error:
            self._refused = error.cause
            raise
        self._link, self._marks, self._refused = link, CommitMarkers(), None
        if self._writes:
            await self._delete_old_markers(link)
        return link

    async def _delete_old_markers(self, link: PgConnection) -> None:
        try:
            await delete_old_markers(link)
        except pg.PostgresError:
            return  # a read-only database, for example: writing scripts get the error themselves

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
