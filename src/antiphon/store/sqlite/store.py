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
import os
import queue
import sqlite3
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeAlias, TypeVar, cast

from antiphon.clock import Clock, SystemClock
from antiphon.errors import AntiphonError, StoreDamaged, StoreError, StoreFull, StoreReadOnly, StoreReplaced
from antiphon.paths import is_writable
from antiphon.store import Param, Row, Script, Tx
from antiphon.store.migrations import is_current, migrate
from antiphon.store.queries import Query
from antiphon.store.sqlite.errors import (
    NO_LOG_CODES,
    NO_LOG_INDEX_CODES,
    OpenedFiles,
    StoreHealth,
    build_damaged_error,
    build_full_error,
    build_replaced_error,
    build_unopened_error,
    is_lasting_error,
    translate_sqlite_error,
)
from antiphon.store.statedir import READ_ONLY_ERRNOS, StateDir, translate_os_error

P = ParamSpec("P")
T = TypeVar("T")

APPLICATION_ID = 0x414E5450  # "ANTP": marks the file as Antiphon's
MAX_SCRIPTS_PER_COMMIT = 256  # scripts per commit; bounds how long the first one waits for the last
MAX_WAITING_SCRIPTS = 20_000  # scripts that may wait for the writer before new ones are refused
MAX_READS_PER_SNAPSHOT = 8  # reads that share a snapshot; a slow one delays no more than these
MIN_SQLITE_VERSION = (3, 37, 0)  # RETURNING, pragma_table_list
MAX_CHECKED_AT_OPEN_BYTES = (
    32 * 2**20
)  # bytes; a larger file is checked by `antiphon doctor`, not at every start
CHECKPOINT_WAIT_SECONDS = 1.0  # seconds to wait for readers when truncating the log
BUSY_TIMEOUT_SECONDS = 10  # seconds to wait for another process that holds the file
CommitPhase = Literal["before", "after"]


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


BoundScript: TypeAlias = Callable[[Tx], Coroutine[Any, Any, T]]


def _bind_script(
    script: Callable[..., Awaitable[T]], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> BoundScript[T]:
    def run(tx: Tx) -> Coroutine[Any, Any, T]:
        return cast("Coroutine[Any, Any, T]", script(tx, *args, **kwargs))

    return run


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
        open_: Callable[[], sqlite3.Connection],
        work: BatchHandler,
        *,
        threads: int,
        batch: int,
    ) -> None:
        self._open = open_
        self._work = work
        self._batch = batch
        self._loop = asyncio.get_running_loop()
        self._jobs: queue.SimpleQueue[_ScriptJob | None] = queue.SimpleQueue()
        self._waiting = 0
        self._dismissed = False
        self._threads = [threading.Thread(target=self._run, name=name, daemon=True) for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    def submit(self, run: BoundScript[T]) -> asyncio.Future[T]:
        if self._dismissed:
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
        self._dismissed = True
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            await asyncio.to_thread(thread.join)

    def abandon(self) -> None:
        """Takes no more jobs and leaves the connections open until the process ends."""
        self._dismissed = True

    def _run(self) -> None:
        connection = self._open_connection([])
        while jobs := self._take_jobs():
            connection = connection or self._open_connection(jobs)
            if connection:
                self._work(connection, SqliteTx(connection), jobs)
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
            while len(jobs) < self._batch:
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
        self._waited = -math.inf
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
                batch=MAX_SCRIPTS_PER_COMMIT,
            )
        self._readers = _ThreadPool(
            "antiphon-reader",
            lambda: _open_reader(path),
            self._read_batch,
            threads=readers,
            batch=MAX_READS_PER_SNAPSHOT,
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
            await asyncio.to_thread(_check_readable, path)
        else:
            writer = await asyncio.to_thread(_open_writer, path, synchronous)
        return cls(path, writer, readers, on_commit)

    @property
    def trouble(self) -> StoreError | None:
        return self._health.trouble

    async def tx(self, script: Script[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        if self._writer is None:
            raise StoreReadOnly("This store is not open for writing.", "Open it without read_only to write.")
        return await self._writer.submit(_bind_script(script, args, kwargs))

    async def read(self, script: Script[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._readers.submit(_bind_script(script, args, kwargs))

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
        kept = False
        try:
            self._check_files()
            changed = _run_batch(connection, tx, jobs)
            self._signal_commit("before")
            connection.execute("COMMIT")
            self._check_files()  # again, so that writes to a deleted file are not reported as durable
            kept = changed
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
        self._health.record_commit(
            next(filter(is_lasting_error, (job.error for job in jobs)), None), kept=kept
        )
        self._translate_errors(jobs)
        if any(isinstance(job.error, StoreFull) for job in jobs):
            self._shrink_log(connection)

    def _check_files(self) -> None:
        if isinstance(self.trouble, StoreReplaced):
            raise self.trouble
        if self._files and self._files.are_replaced():
            raise build_replaced_error(self._path)

    def _shrink_log(self, connection: sqlite3.Connection) -> None:
        """Truncates the log that a failed commit has filled.

        A full disk or readers may prevent it. It waits for readers only occasionally, since all callers wait meanwhile.
        """
        now = time.monotonic()
        patient = now - self._waited >= 10 * CHECKPOINT_WAIT_SECONDS
        self._waited = now if patient else self._waited
        with suppress(sqlite3.Error):
            connection.execute(
                f"PRAGMA busy_timeout = {round(CHECKPOINT_WAIT_SECONDS * 1000) if patient else 0}"
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


def _connect(path: Path, mode: str = "rw") -> sqlite3.Connection:
    connection = sqlite3.connect(
        f"file:{_quote_path(path)}?mode={mode}",
        uri=True,
        isolation_level=None,
        timeout=BUSY_TIMEOUT_SECONDS,
        check_same_thread=False,
        cached_statements=512,
    )
    connection.row_factory = sqlite3.Row
    connection.execute("PRAGMA foreign_keys = ON")
    return connection


def _connect_reader(path: Path) -> sqlite3.Connection:
    """Opens a connection for reading, even on a full disk or without write permission.

    Readers share the index of the log with the writer, in a file that may have to be created. If there is no room for
    it, an exclusive connection keeps the index in memory, unless another process has the database open. Without a log
    and without permission to create one, the file is opened as immutable.
    """
    try:
        with _closed_on_failure(_connect(path, "ro")) as connection:
            _force_open(connection)
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", None)
        if code in NO_LOG_CODES and _has_no_writer(path):
            return _connect(path, "ro&immutable=1")
        if code not in NO_LOG_INDEX_CODES:
            raise
        with suppress(sqlite3.Error):
            return _connect_exclusive(path)
        raise
    return connection


def _has_no_writer(path: Path) -> bool:
    """Whether this user's file can have no writer: it has no log, and none can be created."""
    return not is_writable(path.parent) and not path.with_name(f"{path.name}-wal").exists()


def _connect_exclusive(path: Path) -> sqlite3.Connection:
    with _closed_on_failure(_connect(path)) as connection:
        connection.execute("PRAGMA busy_timeout = 0")
        connection.execute("PRAGMA query_only = ON")
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        _force_open(connection)
    return connection


@contextmanager
def _closed_on_failure(connection: sqlite3.Connection) -> Generator[sqlite3.Connection]:
    """Closes the connection on failure; otherwise the error's traceback would keep the file open."""
    try:
        yield connection
    except BaseException:
        connection.close()
        raise


def _force_open(connection: sqlite3.Connection) -> None:
    """Makes SQLite open its files, which it otherwise defers to the first query."""
    connection.execute("SELECT 1 FROM sqlite_schema").fetchone()


def _quote_path(path: Path) -> str:
    return str(path.absolute()).replace("%", "%25").replace("?", "%3f").replace("#", "%23")


def check_library() -> None:
    """Checks that Python's SQLite library has the required version and features.

    Raises:
        StoreError: it does not.
    """
    found = sqlite3.sqlite_version_info
    if found < MIN_SQLITE_VERSION:
        raise StoreError(
            f"SQLite {sqlite3.sqlite_version} is too old.",
            f"Use a Python that comes with SQLite {'.'.join(map(str, MIN_SQLITE_VERSION[:2]))} or newer.",
        )
    try:
        with closing(sqlite3.connect(":memory:")) as connection:
            connection.executescript("SELECT json_array(1); CREATE VIRTUAL TABLE words USING fts5(word);")
    except sqlite3.OperationalError as error:
        raise StoreError(
            f"SQLite {sqlite3.sqlite_version} was built without what is needed ({error}).",
            "Use another Python, such as the one of python.org or of `uv python install`.",
        ) from error


def _open_writer(path: Path, synchronous: str) -> tuple[sqlite3.Connection, OpenedFiles]:
    check_library()
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    except OSError as error:
        denied = error.errno in READ_ONLY_ERRNOS and os.path.exists(path)  # noqa: PTH110 - Path.exists may raise
        raise (
            build_unopened_error(str(error.strerror), path)
            if denied
            else translate_os_error(error, path.parent)
        ) from error
    files = OpenedFiles(path)
    try:
        with _closed_on_failure(_connect(path)) as connection:
            ours = _is_ours(connection, path)
            if path.stat().st_size <= MAX_CHECKED_AT_OPEN_BYTES:
                check_integrity(connection, path, quick=True)
            if not ours:
                connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute(f"PRAGMA synchronous = {synchronous.upper()}")
            connection.execute("PRAGMA wal_autocheckpoint = 4000")
            connection.execute("PRAGMA journal_size_limit = 67108864")
            migrate(connection)
            files.note_log()
    except sqlite3.Error as error:
        raise translate_sqlite_error(error, path) from error
    return connection, files


def _open_reader(path: Path) -> sqlite3.Connection:
    try:
        return _connect_reader(path)
    except sqlite3.Error as error:
        raise translate_sqlite_error(error, path, reading=True) from error


def check_exists(path: Path) -> None:
    """Raises if the file is missing or empty; opening it for writing would create it."""
    StateDir.open_unlocked(path.parent).check_readable()
    if not path.exists() or path.stat().st_size == 0:
        raise _build_missing_error(path)


def _build_missing_error(path: Path) -> StoreError:
    return StoreError(
        f"There is no Antiphon database at {str(path)!r} yet.",
        "Start a conversation with `antiphon chat` first.",
    )


def _check_readable(path: Path) -> None:
    """Raises if the file is not Antiphon's or has another version, which a reader cannot fix."""
    check_exists(path)
    try:
        with closing(_connect_reader(path)) as connection:
            if not _is_ours(connection, path):
                raise _build_missing_error(path)
            if not is_current(connection):
                raise StoreError(
                    f"The database {str(path)!r} was written by an older Antiphon.",
                    "Start `antiphon chat` once to bring it up to date.",
                )
    except sqlite3.Error as error:
        raise translate_sqlite_error(error, path, reading=True) from error


def _is_ours(connection: sqlite3.Connection, path: Path) -> bool:
    """Whether the file has Antiphon's application id; False if it is empty, an error if it is another program's."""
    owner: int = connection.execute("PRAGMA application_id").fetchone()[0]
    tables: int = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]
    if owner != APPLICATION_ID and tables:
        raise StoreDamaged(
            f"The file {str(path)!r} is a database of another program.",
            "Move it away, or choose another directory with --state-dir.",
        )
    return owner == APPLICATION_ID and tables > 0


def check_integrity(connection: sqlite3.Connection, path: Path, *, quick: bool) -> None:
    """Raises `StoreDamaged` with the first finding of SQLite's own check."""
    pragma = "quick_check(1)" if quick else "integrity_check(1)"
    found: str = connection.execute(f"PRAGMA {pragma}").fetchone()[0]
    if found != "ok":
        raise build_damaged_error(path, found)


def check_file(path: Path) -> None:
    """Fully checks a database that has no writer, for `antiphon doctor`."""
    _check_readable(path)
    with closing(_open_reader(path)) as connection:
        try:
            check_integrity(connection, path, quick=False)
        except sqlite3.Error as error:
            raise translate_sqlite_error(error, path) from error
