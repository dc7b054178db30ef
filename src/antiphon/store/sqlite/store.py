"""The SQLite store: one writer thread with group commit, and a pool of snapshot readers.

The writer takes every waiting script, runs them in one transaction and commits them together: a
hundred concurrent callers share one fsync, and a script that raises loses only its own changes.
Callers are answered after the commit, never before. Readers have connections of their own in WAL mode, so
they neither wait for the writer nor delay it.

A script is driven by a single `send(None)`: its awaits return immediately and never suspend.
"""

from __future__ import annotations

import asyncio
import math
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeAlias, TypeVar, cast

from antiphon.clock import Clock, SystemClock
from antiphon.errors import AntiphonError, StoreError, StoreFull, StoreReadOnly, StoreReplaced
from antiphon.store import BoundScript, CommitPhase, Param, Row, Script
from antiphon.store.queries import Query
from antiphon.store.sqlite.database_file import (
    BUSY_TIMEOUT_SECONDS,
    OpenedFiles,
    check_readable,
    open_reader,
    open_writer,
)
from antiphon.store.sqlite.errors import (
    StoreHealth,
    build_full_error,
    build_replaced_error,
    is_lasting_error,
    translate_sqlite_error,
)

P = ParamSpec("P")
T = TypeVar("T")

MAX_SCRIPTS_PER_COMMIT = 256  # bounds how long the first one waits for the last
MAX_WAITING_SCRIPTS = 20_000  # per pool; more are refused
MAX_READS_PER_SNAPSHOT = 8  # bounds how many reads a slow one delays
CHECKPOINT_WAIT_SECONDS = 1.0  # for readers, when the log is truncated
MAX_FILE_CHECK_AGE_SECONDS = 0.005  # as long as a commit, during which a file may be replaced anyway


class SqliteTx:
    """A transaction on one connection. Only the thread that owns the connection uses it."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._execute = connection.execute

    async def one(self, query: Query, /, **params: Param) -> Row | None:
        return self._execute(query.text, params).fetchone()

    async def all(self, query: Query, /, **params: Param) -> list[Row]:
        return self._execute(query.text, params).fetchall()

    async def do(self, query: Query, /, **params: Param) -> int:
        return self._execute(query.text, params).rowcount

    async def lock(self, name: str) -> None:
        """Does nothing: the store has a single writer."""


BatchHandler: TypeAlias = "Callable[[sqlite3.Connection, SqliteTx, list[_ScriptJob]], None]"


class _ScriptJob:
    """A script on its way to the writer, and where its outcome goes."""

    __slots__ = ("error", "future", "result", "run")

    def __init__(self, run: BoundScript[Any], future: asyncio.Future[Any]) -> None:
        self.run = run
        self.future = future
        self.result: Any = None
        self.error: BaseException | None = None


def run_to_completion(coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs a script to its end without an event loop."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return cast(T, stop.value)
    coroutine.close()
    raise RuntimeError(
        "a transaction script awaited something other than its Tx; move that out of the script"
    )


class _ThreadPool:
    """Threads that take jobs off one queue, several at a time, and resolve them in the event loop.

    Each thread opens its own connection and is the only one to use it. Resolving a whole batch with one
    `call_soon_threadsafe` gives most of the speed: waking the loop costs more than a statement.
    """

    def __init__(
        self,
        name: str,
        open_connection: Callable[[], sqlite3.Connection],
        handle_batch: BatchHandler,
        *,
        threads: int,
        max_batch: int,
    ) -> None:
        self._open = open_connection
        self._handle_batch = handle_batch
        self._max_batch = max_batch
        self._loop = asyncio.get_running_loop()
        self._jobs: queue.SimpleQueue[_ScriptJob | None] = queue.SimpleQueue()
        self._waiting = 0
        self._is_closed = False
        self._threads = [threading.Thread(target=self._run, name=name, daemon=True) for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    def submit(self, run: BoundScript[T]) -> asyncio.Future[T]:
        if self._is_closed:
            raise StoreError("The store is closed.", "Open it again.")
        if self._waiting >= MAX_WAITING_SCRIPTS:
            raise StoreError(
                f"{MAX_WAITING_SCRIPTS} transactions are already waiting for the disk.",
                "Try again in a moment.",
            )
        self._waiting += 1
        job = _ScriptJob(run, self._loop.create_future())
        self._jobs.put(job)
        return job.future

    async def shut_down(self) -> None:
        """Finishes the waiting jobs, then ends the threads."""
        self._is_closed = True
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            await asyncio.to_thread(thread.join)

    def abandon(self) -> None:
        """Takes no more jobs and leaves the connections open until the process ends."""
        self._is_closed = True

    def _run(self) -> None:
        connection = self._open_connection([])
        while jobs := self._take_jobs():
            connection = connection or self._open_connection(jobs)
            if connection:
                self._handle_batch(connection, SqliteTx(connection), jobs)
            self._loop.call_soon_threadsafe(self._resolve_futures, jobs)
            jobs = []  # so that an idle thread does not keep old results in memory
        if connection:
            connection.close()

    def _open_connection(self, jobs: list[_ScriptJob]) -> sqlite3.Connection | None:
        """Opens a connection, or fails these jobs; the cause may be gone when the next ones arrive."""
        try:
            return self._open()
        except AntiphonError as error:
            for job in jobs:
                job.error = error
            return None

    def _take_jobs(self) -> list[_ScriptJob]:
        """At least one job, plus any others waiting; empty when the thread should end."""
        jobs: list[_ScriptJob] = []
        try:
            while len(jobs) < self._max_batch:
                job = self._jobs.get(block=not jobs)
                if job is None:
                    if jobs:
                        self._jobs.put(None)  # leave it to an idle thread
                    break
                jobs.append(job)
        except queue.Empty:
            pass
        return jobs

    def _resolve_futures(self, jobs: list[_ScriptJob]) -> None:
        self._waiting -= len(jobs)
        for job in jobs:
            if job.future.done():
                continue  # The caller stopped waiting; the script has taken effect as a whole, or not at all.
            if job.error is None:
                job.future.set_result(job.result)
            else:
                job.future.set_exception(job.error)


class SqliteStore:
    """The store on SQLite. Open it with `SqliteStore.open` from a running event loop."""

    shared = False
    identity = "file"
    clock: Clock = SystemClock()

    def __init__(
        self,
        path: Path,
        writer: tuple[sqlite3.Connection, OpenedFiles] | None,
        readers: int,
        on_commit: Callable[[CommitPhase], None] | None,
    ) -> None:
        self._health = StoreHealth(path)
        self._last_checkpoint_wait = -math.inf
        self._files_checked_at = -math.inf
        self._path = path
        self._on_commit = on_commit
        self._writer = None
        self._files = writer[1] if writer else None
        if writer:
            self._writer = _ThreadPool(
                "antiphon-writer",
                lambda: writer[0],
                self._commit_batch,
                threads=1,
                max_batch=MAX_SCRIPTS_PER_COMMIT,
            )
        self._readers = _ThreadPool(
            "antiphon-reader",
            lambda: open_reader(path),
            self._read_batch,
            threads=readers,
            max_batch=MAX_READS_PER_SNAPSHOT,
        )

    @classmethod
    async def open(
        cls,
        path: Path,
        *,
        synchronous: Literal["full", "normal"] = "full",
        readers: int = 2,
        read_only: bool = False,
        on_commit: Callable[[CommitPhase], None] | None = None,
    ) -> SqliteStore:
        """Opens, checks and migrates the file. `on_commit` is called around each COMMIT; crash tests kill there."""
        if read_only:
            writer = None
            await asyncio.to_thread(check_readable, path)
        else:
            writer = await asyncio.to_thread(open_writer, path, synchronous)
        return cls(path, writer, readers, on_commit)

    @property
    def write_error(self) -> StoreError | None:
        return self._health.write_error

    async def tx(self, script: Script[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        if self._writer is None:
            raise StoreReadOnly("This store is not open for writing.", "Open it without read_only to write.")
        return await self._writer.submit(lambda tx: script(tx, *args, **kwargs))

    async def read(self, script: Script[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._readers.submit(lambda tx: script(tx, *args, **kwargs))

    async def close(self) -> None:
        """Finishes the waiting scripts, then closes the file."""
        if self._files and await asyncio.to_thread(self._files.has_foreign_log):
            self._readers.abandon()
            if self._writer is not None:
                self._writer.abandon()
            return
        await self._readers.shut_down()
        if self._writer is not None:
            writer, self._writer = self._writer, None
            await writer.shut_down()

    def _commit_batch(self, connection: sqlite3.Connection, tx: SqliteTx, jobs: list[_ScriptJob]) -> None:
        """Commits the whole batch in one transaction. Every job then has its result or its error."""
        has_changed = False
        try:
            if isinstance(self.write_error, StoreReplaced):
                raise self.write_error
            if time.monotonic() - self._files_checked_at > MAX_FILE_CHECK_AGE_SECONDS:
                self._check_files()
            changed = _run_batch(connection, tx, jobs)
            self._signal_commit("before")
            connection.execute("COMMIT")
            self._check_files()  # again, so that writes to a deleted file are not reported as durable
            has_changed = changed
            self._signal_commit("after")
        except Exception as error:  # noqa: BLE001 - the writer thread must outlive any batch
            with suppress(sqlite3.Error):  # SQLite may have rolled back by itself
                connection.execute("ROLLBACK")
            if len(jobs) > 1 and self._is_disk_full(error):
                # A script that does not fit must not hold back those that do.
                for job in jobs:
                    self._commit_batch(connection, tx, [job])
                return
            for job in jobs:
                job.error = job.error or error
        failed = [job for job in jobs if job.error is not None]
        self._health.record_commit(
            next(filter(is_lasting_error, (job.error for job in failed)), None), changed=has_changed
        )
        self._translate_errors(failed)
        if any(isinstance(job.error, StoreFull) for job in failed):
            self._shrink_log(connection)

    def _check_files(self) -> None:
        if self._files and self._files.are_replaced():
            raise build_replaced_error(self._path)
        self._files_checked_at = time.monotonic()

    def _shrink_log(self, connection: sqlite3.Connection) -> None:
        """Truncates the log that a failed commit has filled.

        A full disk or readers may prevent it. It waits for readers only occasionally, since all callers wait meanwhile.
        """
        now = time.monotonic()
        may_wait = now - self._last_checkpoint_wait >= 10 * CHECKPOINT_WAIT_SECONDS
        self._last_checkpoint_wait = now if may_wait else self._last_checkpoint_wait
        with suppress(sqlite3.Error):
            connection.execute(
                f"PRAGMA busy_timeout = {round(CHECKPOINT_WAIT_SECONDS * 1000) if may_wait else 0}"
            )
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        connection.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_SECONDS * 1000}")

    def _is_disk_full(self, error: Exception) -> bool:
        return isinstance(
            translate_sqlite_error(error, self._path) if isinstance(error, sqlite3.Error) else error,
            StoreFull,
        )

    def _read_batch(self, connection: sqlite3.Connection, tx: SqliteTx, jobs: list[_ScriptJob]) -> None:
        """Runs the whole batch on one snapshot."""
        try:
            connection.execute("BEGIN")
            for job in jobs:
                _run_job(tx, job)
            connection.execute("ROLLBACK")
        except sqlite3.Error as error:
            for job in jobs:
                job.error = job.error or error
        self._translate_errors(jobs, reading=True)

    def _translate_errors(self, jobs: list[_ScriptJob], *, reading: bool = False) -> None:
        for job in jobs:
            if isinstance(job.error, sqlite3.Error):
                job.error = translate_sqlite_error(job.error, self._path, reading=reading)

    def _signal_commit(self, phase: CommitPhase) -> None:
        if self._on_commit:
            self._on_commit(phase)


def _run_batch(connection: sqlite3.Connection, tx: SqliteTx, jobs: list[_ScriptJob]) -> bool:
    """Begins a transaction and runs every script; returns whether the successful ones changed anything.

    Exceptions are rare, so scripts first run without savepoints; if one raises, all are rolled back and run again, each
    in its own savepoint. SQLite counts rolled-back changes as changes.
    """
    connection.execute("BEGIN IMMEDIATE")
    before = connection.total_changes
    if all(_run_job(tx, job) for job in jobs):
        return connection.total_changes > before
    if connection.in_transaction:
        connection.execute("ROLLBACK")
    connection.execute("BEGIN IMMEDIATE")
    return any([_run_job_in_savepoint(connection, tx, job) for job in jobs])


def _run_job(tx: SqliteTx, job: _ScriptJob) -> bool:
    job.error = None
    try:
        job.result = run_to_completion(job.run(tx))
    except BaseException as error:  # noqa: BLE001 - it is the caller's, who will get it
        job.error = error
        return False
    return True


def _run_job_in_savepoint(connection: sqlite3.Connection, tx: SqliteTx, job: _ScriptJob) -> bool:
    connection.execute("SAVEPOINT script")
    before = connection.total_changes
    done = _run_job(tx, job)
    if not done:
        if not connection.in_transaction:
            # SQLite rolls back the whole transaction when the disk is full: nothing was written.
            raise job.error if isinstance(job.error, sqlite3.Error) else build_full_error()
        connection.execute("ROLLBACK TO script")
    connection.execute("RELEASE script")
    return done and connection.total_changes > before
