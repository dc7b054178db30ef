"""The SQLite store: one writer thread with group commit, a pool of snapshot readers.

The writer takes every script that is waiting, runs them in one transaction and commits them together: a
hundred concurrent callers share one fsync, and a script that raises takes only its own changes with it.
Callers are answered after the commit, never before. Readers have connections of their own in WAL mode, so
they neither wait for the writer nor delay it.

A script is driven by a single `send(None)`: its awaits are answered on the spot and never suspend.
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
from antiphon.paths import may_write
from antiphon.store import Param, Row, Script, Tx
from antiphon.store.migrations import is_current, migrate
from antiphon.store.mishaps import (
    NO_INDEX,
    NO_LOG,
    Health,
    OpenedFiles,
    damaged,
    full,
    lasts,
    replaced,
    told,
    unopened,
)
from antiphon.store.queries import Query
from antiphon.store.statedir import READ_ONLY, StateDir, explain

P = ParamSpec("P")
T = TypeVar("T")

APPLICATION_ID = 0x414E5450  # "ANTP": says that the file is ours before anything else is read
BATCH = 256  # scripts per commit; bounds how long the first one waits for the last
BACKLOG = 20_000  # scripts that may wait for the writer before callers are told to come back
READ_BATCH = 8  # reads that share a snapshot; a long one holds up no more than these
LEAST = (3, 37, 0)  # RETURNING, pragma_table_list
CHECKED_AT_OPEN = 32 * 2**20  # bytes; a larger file is checked by `antiphon doctor`, not at every start
ROOM = 1.0  # seconds to wait for readers, where the log could be made smaller without them
PATIENCE = 10  # seconds to wait for another process that holds the file
Phase = Literal["before", "after"]


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

    async def alone(self, name: str) -> None:
        """There is one writer."""


Bound: TypeAlias = Callable[[Tx], Coroutine[Any, Any, T]]


def _bound(script: Callable[..., Awaitable[T]], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Bound[T]:
    def run(tx: Tx) -> Coroutine[Any, Any, T]:
        return cast("Coroutine[Any, Any, T]", script(tx, *args, **kwargs))

    return run


Work: TypeAlias = "Callable[[sqlite3.Connection, SqliteTx, list[_Job]], None]"


class _Job:
    """A script on its way to the writer, and where its outcome goes."""

    __slots__ = ("error", "future", "result", "run")

    def __init__(self, run: Bound[Any], future: asyncio.Future[Any]) -> None:
        self.run = run
        self.future = future
        self.result: Any = None
        self.error: BaseException | None = None


def drive(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a script to its end without an event loop."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return cast(T, stop.value)
    coroutine.close()
    raise RuntimeError(
        "a transaction script awaited something other than its Tx; move that out of the script"
    )


class _Crew:
    """Threads that take jobs off one queue, several at a time, and answer them in the event loop.

    Each thread opens its own connection and is the only one to use it. Answering a whole batch with one
    `call_soon_threadsafe` is most of the speed: waking the loop costs more than a statement.
    """

    def __init__(
        self, name: str, open_: Callable[[], sqlite3.Connection], work: Work, *, threads: int, batch: int
    ) -> None:
        self._open = open_
        self._work = work
        self._batch = batch
        self._loop = asyncio.get_running_loop()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._waiting = 0
        self._dismissed = False
        self._threads = [threading.Thread(target=self._run, name=name, daemon=True) for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    def hand(self, run: Bound[T]) -> asyncio.Future[T]:
        if self._dismissed:
            raise StoreError("The store is closed.", "Open it again.")
        if self._waiting >= BACKLOG:
            raise StoreError(
                f"{BACKLOG} transactions are already waiting for the disk.", "Try again in a moment."
            )
        self._waiting += 1
        job = _Job(run, self._loop.create_future())
        self._jobs.put(job)
        return job.future

    async def dismiss(self) -> None:
        """Finish what is waiting, then end the threads."""
        self._dismissed = True
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            await asyncio.to_thread(thread.join)

    def abandon(self) -> None:
        """Take no more jobs and leave the connections open, to be dropped with the process."""
        self._dismissed = True

    def _run(self) -> None:
        connection = self._connected([])
        while jobs := self._take():
            connection = connection or self._connected(jobs)
            if connection:
                self._work(connection, SqliteTx(connection), jobs)
            self._loop.call_soon_threadsafe(self._settle, jobs)
            jobs = []  # an idle thread keeps no page in memory that was read long ago
        if connection:
            connection.close()

    def _connected(self, jobs: list[_Job]) -> sqlite3.Connection | None:
        """Without a connection these jobs have the error; what is in the way may be gone when the next ones come."""
        try:
            return self._open()
        except AntiphonError as error:
            for job in jobs:
                job.error = error
            return None

    def _take(self) -> list[_Job]:
        """At least one job, and whatever else is waiting; nothing when it is time to go."""
        jobs: list[_Job] = []
        try:
            while len(jobs) < self._batch:
                job = self._jobs.get(block=not jobs)
                if job is None:
                    if jobs:
                        self._jobs.put(None)  # meant for a thread that has nothing in its hands
                    break
                jobs.append(job)
        except queue.Empty:
            pass
        return jobs

    def _settle(self, jobs: list[_Job]) -> None:
        self._waiting -= len(jobs)
        for job in jobs:
            if job.future.done():
                continue  # The caller stopped waiting; what it asked for has happened, or not, as a whole.
            if job.error is None:
                job.future.set_result(job.result)
            else:
                job.future.set_exception(job.error)


class SqliteStore:
    """See the module. Open with `SqliteStore.open`, from a running event loop."""

    shared = False
    identity = "file"
    clock: Clock = SystemClock()

    def __init__(
        self,
        path: Path,
        writer: tuple[sqlite3.Connection, OpenedFiles] | None,
        readers: int,
        on_commit: Callable[[Phase], None] | None,
    ) -> None:
        self._health = Health(path)
        self._waited = -math.inf
        self._path = path
        self._on_commit = on_commit
        self._writer = None
        self._files = writer[1] if writer else None
        if writer:
            self._writer = _Crew("antiphon-writer", lambda: writer[0], self._commit, threads=1, batch=BATCH)
        self._readers = _Crew(
            "antiphon-reader",
            lambda: _open_reader(path),
            self._look,
            threads=readers,
            batch=READ_BATCH,
        )

    @classmethod
    async def open(
        cls,
        path: Path,
        *,
        synchronous: Literal["full", "normal"] = "full",
        readers: int = 2,
        read_only: bool = False,
        on_commit: Callable[[Phase], None] | None = None,
    ) -> SqliteStore:
        """Open, check and migrate. `on_commit` is called around each COMMIT; crash tests kill there."""
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
        return await self._writer.hand(_bound(script, args, kwargs))

    async def read(self, script: Script[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._readers.hand(_bound(script, args, kwargs))

    async def close(self) -> None:
        """Finish what is waiting, then let go of the file."""
        if self._files and await asyncio.to_thread(self._files.has_foreign_log):
            self._readers.abandon()
            if self._writer is not None:
                self._writer.abandon()
            return
        await self._readers.dismiss()
        if self._writer is not None:
            writer, self._writer = self._writer, None
            await writer.dismiss()

    def _commit(self, connection: sqlite3.Connection, tx: SqliteTx, jobs: list[_Job]) -> None:
        """One transaction for the whole batch. Afterwards every job has its result or its error."""
        kept = False
        try:
            self._check_files()
            changed = _run(connection, tx, jobs)
            self._signal("before")
            connection.execute("COMMIT")
            self._check_files()  # again, so that what went into a file that is gone is not answered as kept
            kept = changed
            self._signal("after")
        except Exception as error:  # noqa: BLE001 - the writer thread must outlive any batch
            with suppress(sqlite3.Error):  # SQLite may have rolled back by itself
                connection.execute("ROLLBACK")
            if len(jobs) > 1 and self._is_full(error):
                # What does not fit must not keep back what does.
                for job in jobs:
                    self._commit(connection, tx, [job])
                return
            for job in jobs:
                job.error = job.error or error
        self._health.judge(next(filter(lasts, (job.error for job in jobs)), None), kept=kept)
        self._tell(jobs)
        if any(isinstance(job.error, StoreFull) for job in jobs):
            self._shrink(connection)

    def _check_files(self) -> None:
        if isinstance(self.trouble, StoreReplaced):
            raise self.trouble
        if self._files and self._files.are_replaced():
            raise replaced(self._path)

    def _shrink(self, connection: sqlite3.Connection) -> None:
        """Give back what a commit that did not fit has taken up in the log.

        The disk may be in the way, or readers: these are waited for only now and then, since everybody waits with it.
        """
        now = time.monotonic()
        patient = now - self._waited >= 10 * ROOM
        self._waited = now if patient else self._waited
        with suppress(sqlite3.Error):
            connection.execute(f"PRAGMA busy_timeout = {round(ROOM * 1000) if patient else 0}")
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        connection.execute(f"PRAGMA busy_timeout = {PATIENCE * 1000}")

    def _is_full(self, error: Exception) -> bool:
        return isinstance(told(error, self._path) if isinstance(error, sqlite3.Error) else error, StoreFull)

    def _look(self, connection: sqlite3.Connection, tx: SqliteTx, jobs: list[_Job]) -> None:
        """One snapshot for the whole batch."""
        try:
            connection.execute("BEGIN")
            for job in jobs:
                _try(tx, job)
            connection.execute("ROLLBACK")
        except sqlite3.Error as error:
            for job in jobs:
                job.error = job.error or error
        self._tell(jobs, reading=True)

    def _tell(self, jobs: list[_Job], *, reading: bool = False) -> None:
        for job in jobs:
            if isinstance(job.error, sqlite3.Error):
                job.error = told(job.error, self._path, reading=reading)

    def _signal(self, phase: Phase) -> None:
        if self._on_commit:
            self._on_commit(phase)


def _run(connection: sqlite3.Connection, tx: SqliteTx, jobs: list[_Job]) -> bool:
    """Begin, and run every script; whether those that did not raise have changed anything.

    One that raises is rare, so they run bare first; only when one did are all of them undone and run again, each in a
    savepoint of its own. What is undone counts as a change for SQLite.
    """
    connection.execute("BEGIN IMMEDIATE")
    before = connection.total_changes
    if all(_try(tx, job) for job in jobs):
        return connection.total_changes > before
    if connection.in_transaction:
        connection.execute("ROLLBACK")
    connection.execute("BEGIN IMMEDIATE")
    return any([_try_apart(connection, tx, job) for job in jobs])


def _try(tx: SqliteTx, job: _Job) -> bool:
    job.error = None
    try:
        job.result = drive(job.run(tx))
    except BaseException as error:  # noqa: BLE001 - it is the caller's, who will get it
        job.error = error
        return False
    return True


def _try_apart(connection: sqlite3.Connection, tx: SqliteTx, job: _Job) -> bool:
    connection.execute("SAVEPOINT script")
    before = connection.total_changes
    done = _try(tx, job)
    if not done:
        if not connection.in_transaction:
            # SQLite gives up a whole transaction when the disk is full: nothing is kept.
            raise job.error if isinstance(job.error, sqlite3.Error) else full()
        connection.execute("ROLLBACK TO script")
    connection.execute("RELEASE script")
    return done and connection.total_changes > before


def _connect(path: Path, mode: str = "rw") -> sqlite3.Connection:
    connection = sqlite3.connect(
        f"file:{_quoted(path)}?mode={mode}",
        uri=True,
        isolation_level=None,
        timeout=PATIENCE,
        check_same_thread=False,
        cached_statements=512,
    )
    connection.row_factory = sqlite3.Row
    connection.execute("PRAGMA foreign_keys = ON")
    return connection


def _connect_reader(path: Path) -> sqlite3.Connection:
    """For reading, also on a full disk, and where this user may write nothing.

    Readers share an index of the log with the writer, in a file that may have to be made. Whoever has the database to
    itself keeps it in memory: that is how it can be read where there is no room for the file, unless somebody else is
    there, who has made it. Where there is no log, nothing of it has to be known.
    """
    try:
        with _closed_on_failure(_connect(path, "ro")) as connection:
            _touch(connection)
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", None)
        if code in NO_LOG and _is_still(path):
            return _connect(path, "ro&immutable=1")
        if code not in NO_INDEX:
            raise
        with suppress(sqlite3.Error):
            return _connect_alone(path)
        raise
    return connection


def _is_still(path: Path) -> bool:
    """Whether this user can have nobody beside it who writes: there is no log, and none can be made."""
    return not may_write(path.parent) and not path.with_name(f"{path.name}-wal").exists()


def _connect_alone(path: Path) -> sqlite3.Connection:
    with _closed_on_failure(_connect(path)) as connection:
        connection.execute("PRAGMA busy_timeout = 0")
        connection.execute("PRAGMA query_only = ON")
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        _touch(connection)
    return connection


@contextmanager
def _closed_on_failure(connection: sqlite3.Connection) -> Generator[sqlite3.Connection]:
    """An error remembers where it came from, and would hold the file for as long as it is looked at."""
    try:
        yield connection
    except BaseException:
        connection.close()
        raise


def _touch(connection: sqlite3.Connection) -> None:
    """Have SQLite open its files; it puts that off to the first question."""
    connection.execute("SELECT 1 FROM sqlite_schema").fetchone()


def _quoted(path: Path) -> str:
    return str(path.absolute()).replace("%", "%25").replace("?", "%3f").replace("#", "%23")


def check_library() -> None:
    """Whether the SQLite that Python was built with can do what is asked of it.

    Raises:
        StoreError: it cannot.
    """
    found = sqlite3.sqlite_version_info
    if found < LEAST:
        raise StoreError(
            f"SQLite {sqlite3.sqlite_version} is too old.",
            f"Use a Python that comes with SQLite {'.'.join(map(str, LEAST[:2]))} or newer.",
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
        denied = error.errno in READ_ONLY and os.path.exists(path)  # noqa: PTH110 - Path.exists may raise
        raise unopened(str(error.strerror), path) if denied else explain(error, path.parent) from error
    files = OpenedFiles(path)
    try:
        with _closed_on_failure(_connect(path)) as connection:
            ours = _is_ours(connection, path)
            if path.stat().st_size <= CHECKED_AT_OPEN:
                check(connection, path, quick=True)
            if not ours:
                connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute(f"PRAGMA synchronous = {synchronous.upper()}")
            connection.execute("PRAGMA wal_autocheckpoint = 4000")
            connection.execute("PRAGMA journal_size_limit = 67108864")
            migrate(connection)
            files.note_log()
    except sqlite3.Error as error:
        raise told(error, path) from error
    return connection, files


def _open_reader(path: Path) -> sqlite3.Connection:
    try:
        return _connect_reader(path)
    except sqlite3.Error as error:
        raise told(error, path, reading=True) from error


def check_begun(path: Path) -> None:
    """That there is something in the file; whoever opens it to write would make it."""
    StateDir.look(path.parent).check()
    if not path.exists() or path.stat().st_size == 0:
        raise _missing(path)


def _missing(path: Path) -> StoreError:
    return StoreError(
        f"There is no Antiphon database at {str(path)!r} yet.",
        "Start a conversation with `antiphon chat` first.",
    )


def _check_readable(path: Path) -> None:
    """That the file is ours and of this version; a reader cannot put either right."""
    check_begun(path)
    try:
        with closing(_connect_reader(path)) as connection:
            if not _is_ours(connection, path):
                raise _missing(path)
            if not is_current(connection):
                raise StoreError(
                    f"The database {str(path)!r} was written by an older Antiphon.",
                    "Start `antiphon chat` once to bring it up to date.",
                )
    except sqlite3.Error as error:
        raise told(error, path, reading=True) from error


def _is_ours(connection: sqlite3.Connection, path: Path) -> bool:
    """Whether the file carries our mark; False for an empty one, an error for anybody else's."""
    owner: int = connection.execute("PRAGMA application_id").fetchone()[0]
    tables: int = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]
    if owner != APPLICATION_ID and tables:
        raise StoreDamaged(
            f"The file {str(path)!r} is a database of another program.",
            "Move it away, or choose another directory with --state-dir.",
        )
    return owner == APPLICATION_ID and tables > 0


def check(connection: sqlite3.Connection, path: Path, *, quick: bool) -> None:
    """Raise `StoreDamaged` with the first finding of SQLite's own check."""
    pragma = "quick_check(1)" if quick else "integrity_check(1)"
    found: str = connection.execute(f"PRAGMA {pragma}").fetchone()[0]
    if found != "ok":
        raise damaged(path, found)


def check_file(path: Path) -> None:
    """The full check of a database nobody has to be writing to; for `antiphon doctor`."""
    _check_readable(path)
    with closing(_open_reader(path)) as connection:
        try:
            check(connection, path, quick=False)
        except sqlite3.Error as error:
            raise told(error, path) from error
