"""The SQLite store: its file, its group commit, and everything that can be wrong with a disk."""

from __future__ import annotations

import asyncio
import os
import random
import re
import sqlite3
import stat
import subprocess
import threading
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

import antiphon
from antiphon.access import Caller
from antiphon.app import open_app_operations
from antiphon.config import Config
from antiphon.engine import replicas
from antiphon.engine.jobs import jobs
from antiphon.engine.replicas import Replica
from antiphon.engine.sessions import search
from antiphon.errors import StoreDamaged, StoreError, StoreFull, StoreLocked, StoreNewer, StoreReadOnly
from antiphon.store import Row, Tx, listing, migrations
from antiphon.store.factory import open_store
from antiphon.store.migrations import Migration
from antiphon.store.queries import Queries, Query
from antiphon.store.sqlite import database_file
from antiphon.store.sqlite.database_file import check_file
from antiphon.store.sqlite.store import SqliteStore
from antiphon.store.statedir import StateDir
from support.app_fixture import BOUND, open_test_store
from support.databases import dump_database, query_database
from support.privileges import drop_privileges

NAME = "antiphon.db"
OWNERS = Query("test.owners", "SELECT id FROM owners ORDER BY id")
COUNT = Query("test.count", "SELECT count(*) AS n FROM usage")
LIMIT = Query("test.limit", "PRAGMA max_page_count = 1")
UNLIMIT = Query("test.unlimit", "PRAGMA max_page_count = 1073741823")


async def put(tx: Tx, owner: str) -> None:
    await replicas.renew_lease(tx, Replica(id=owner), 1, 1)


async def put_and_raise(tx: Tx, owner: str) -> None:
    await put(tx, owner)
    raise ValueError(owner)


async def owners(tx: Tx) -> list[str]:
    return [row["id"] for row in await tx.all(OWNERS)]


async def ask(tx: Tx, query: Query) -> Row | None:
    return await tx.one(query)


class Gate:
    """Holds the writer before a commit, so that everything handed over meanwhile is one batch."""

    def __init__(self) -> None:
        self.commits = 0
        self._open = threading.Event()
        self._open.set()
        self.reached = threading.Event()

    def __call__(self, phase: str) -> None:
        if phase == "before":
            self.commits += 1
            self.reached.set()
            assert self._open.wait(BOUND)

    @contextmanager
    def shut(self) -> Generator[None]:
        self._open.clear()
        self.reached.clear()
        try:
            yield
        finally:
            self._open.set()

    async def holding(self) -> None:
        assert await asyncio.to_thread(self.reached.wait, BOUND)


# --- group commit ---


@pytest.mark.anyio
@pytest.mark.requirement("G13", "G21")
async def test_a_batch_is_one_commit_and_a_failure_in_it_is_alone(tmp_path: Path) -> None:
    gateway = Gate()
    store = await SqliteStore.open(tmp_path / NAME, on_commit=gateway)
    with gateway.shut():
        first = asyncio.create_task(store.tx(put, "first"))
        await gateway.holding()
        batch = [
            asyncio.create_task(store.tx(put_and_raise if n in {3, 17} else put, f"{n:02}"))
            for n in range(30)
        ]
        for _ in range(3):
            await asyncio.sleep(0)  # all of them are handed over while the writer is held
    outcomes = await asyncio.gather(first, *batch, return_exceptions=True)
    assert [str(o) for o in outcomes if isinstance(o, ValueError)] == ["03", "17"]
    assert sum(o is None for o in outcomes) == 29
    assert gateway.commits == 2
    assert await store.read(owners) == sorted(["first", *(f"{n:02}" for n in range(30) if n not in {3, 17})])
    await store.close()


@pytest.mark.anyio
@pytest.mark.requirement("G13")
async def test_readers_and_the_writer_do_not_wait_for_each_other(tmp_path: Path) -> None:
    gateway = Gate()
    store = await SqliteStore.open(tmp_path / NAME, on_commit=gateway)
    await store.tx(put, "old")
    with gateway.shut():
        writing = asyncio.create_task(store.tx(put, "new"))
        await gateway.holding()
        # The writer stands in the middle of its transaction, and reads go on, on what was committed.
        assert await asyncio.wait_for(store.read(owners), BOUND) == ["old"]
        assert not writing.done()
    await writing
    reading, release = threading.Event(), threading.Event()

    async def slow(tx: Tx) -> tuple[list[str], list[str]]:
        before = await owners(tx)
        reading.set()
        assert release.wait(BOUND)
        return before, await owners(tx)

    looking = asyncio.create_task(store.read(slow))
    assert await asyncio.to_thread(reading.wait, BOUND)
    await asyncio.wait_for(store.tx(put, "newer"), BOUND)  # a reader in the middle delays no writer
    release.set()
    before, after = await looking
    assert before == after == ["new", "old"]  # and it sees the moment it began with, to its end
    assert await store.read(owners) == ["new", "newer", "old"]
    await store.close()


@pytest.mark.anyio
async def test_closing_finishes_what_was_asked_for(tmp_path: Path) -> None:
    store = await SqliteStore.open(tmp_path / NAME)
    work = [asyncio.create_task(store.tx(put, f"{n:03}")) for n in range(300)]
    await asyncio.sleep(0)
    await store.close()
    await asyncio.gather(*work)
    assert len(query_database(tmp_path / NAME, "SELECT * FROM owners")) == 300
    with pytest.raises(StoreReadOnly):
        await store.tx(put, "late")
    await store.close()  # twice is as good as once


@pytest.mark.anyio
@pytest.mark.requirement("G21")
async def test_a_reader_that_could_not_be_opened_is_opened_when_it_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = database_file._connect_reader  # pyright: ignore[reportPrivateUsage]

    def connect_elsewhere(path: Path) -> sqlite3.Connection:
        return connect(path.with_name("missing"))

    monkeypatch.setattr(database_file, "_connect_reader", connect_elsewhere)
    store = await SqliteStore.open(tmp_path / NAME)
    for _ in range(10):
        with pytest.raises(StoreError, match=r"cannot be opened for reading .* limit of open files"):
            await asyncio.wait_for(store.read(owners), BOUND)
    monkeypatch.undo()
    for _ in range(20):
        assert await asyncio.wait_for(store.read(owners), BOUND) == []
    await store.close()


@pytest.mark.anyio
async def test_a_store_for_reading_refuses_to_write(tmp_path: Path) -> None:
    writer = await SqliteStore.open(tmp_path / NAME)
    await writer.tx(put, "a")
    reader = await SqliteStore.open(tmp_path / NAME, read_only=True)
    assert await reader.read(owners) == ["a"]
    with pytest.raises(StoreReadOnly):
        await reader.tx(put, "b")
    with pytest.raises(StoreReadOnly):
        await reader.read(put, "b")
    await writer.tx(put, "c")
    assert await reader.read(owners) == ["a", "c"]
    await reader.close()
    await writer.close()


SYNCHRONOUS = Query("test.synchronous", "PRAGMA synchronous")
JOURNAL = Query("test.journal", "PRAGMA journal_mode")


@pytest.mark.anyio
@pytest.mark.requirement("G2", "G21")
@pytest.mark.parametrize(("settings", "synchronous"), [({}, 2), ({"store": {"synchronous": "normal"}}, 1)])
async def test_a_commit_is_on_the_disk_unless_it_is_configured_otherwise(
    tmp_path: Path, settings: dict[str, Any], synchronous: int
) -> None:
    store = await open_store(Config.model_validate(settings), tmp_path / NAME)  # as a host does
    found = [await store.tx(ask, query) for query in (SYNCHRONOUS, JOURNAL)]
    await store.close()
    assert [tuple(row) for row in found if row] == [(synchronous,), ("wal",)]


# --- disks ---


async def append(tx: Tx, session: int, body: str) -> None:
    query = Query("test.append", "INSERT INTO usage (at, run_id, session_key, session_id, root_key, agent_id, input, "
                  "output, cache_read, cache_write) VALUES (1, :body, '', '', '', '', :n, 0, 0, 0)")  # fmt: skip
    await tx.do(query, n=session, body=body)


@pytest.mark.anyio
@pytest.mark.requirement("G21")
async def test_a_full_disk_changes_nothing_and_is_survived(tmp_path: Path) -> None:
    store = await SqliteStore.open(tmp_path / NAME)
    await store.tx(put, "before")
    await store.tx(ask, LIMIT)  # SQLite takes the present size: not a page more
    # One that fits the pages there are shares its batch with one that does not.
    outcomes = await asyncio.gather(
        store.tx(append, 1, "x"),
        store.tx(append, 2, "x" * 500_000),
        store.tx(put, "small"),
        return_exceptions=True,
    )
    assert isinstance(outcomes[1], StoreFull)
    assert "Free some disk space" in outcomes[1].hint
    kept = {row["input"] for row in query_database(tmp_path / NAME, "SELECT input FROM usage")}
    assert kept == ({1} if outcomes[0] is None else set())  # what was told is what is so
    assert ("small" in await store.read(owners)) == (outcomes[2] is None)
    assert "before" in await store.read(owners)
    await store.tx(ask, UNLIMIT)
    await store.tx(append, 3, "x" * 500_000)
    assert len(query_database(tmp_path / NAME, "SELECT 1 FROM usage WHERE input = 3")) == 1
    await store.close()
    check_file(tmp_path / NAME)


@pytest.mark.anyio
@pytest.mark.requirement("G21")
async def test_a_directory_that_cannot_be_written_is_said_to_be_so(open_path: Path) -> None:
    state = open_path / "state"
    state.mkdir(mode=0o755)
    state.chmod(0o555)
    with drop_privileges():
        with pytest.raises(StoreReadOnly) as refused:
            async with open_app_operations(Config(), state):
                pass
        assert "--state-dir" in refused.value.hint
        with pytest.raises(StoreReadOnly):
            await SqliteStore.open(state / NAME)
    assert list(state.iterdir()) == []


@pytest.mark.anyio
@pytest.mark.requirement("G21")
async def test_a_file_that_cannot_be_written_is_said_to_be_so(open_path: Path) -> None:
    store = await SqliteStore.open(open_path / NAME)
    await store.close()
    (open_path / NAME).chmod(0o444)
    with drop_privileges(), pytest.raises(StoreReadOnly, match=rf"{NAME}' cannot be opened for writing"):
        await SqliteStore.open(open_path / NAME)


@contextmanager
def _closed(folder: Path) -> Generator[None]:
    folder.chmod(0o555)
    with drop_privileges():
        yield


@contextmanager
def _mounted(folder: Path) -> Generator[None]:
    """As a snapshot or a volume that may only be read."""
    for options in (["--bind", str(folder)], ["-o", "remount,bind,ro"]):
        if subprocess.run(["mount", *options, str(folder)], capture_output=True, check=False).returncode:
            pytest.skip("this user may not mount anything")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True, timeout=10)


@pytest.mark.anyio
@pytest.mark.requirement("G21")
@pytest.mark.parametrize("locked", [_closed, _mounted])
async def test_what_may_only_be_read_can_be_read(
    open_path: Path, locked: Callable[[Path], AbstractContextManager[None]]
) -> None:
    path = open_path / "state" / NAME
    path.parent.mkdir()
    await filled(path)
    path.chmod(0o444)
    with locked(path.parent):
        store = await SqliteStore.open(path, read_only=True)
        try:
            counted = await store.read(ask, COUNT)
            assert counted and counted["n"] == 40
        finally:
            await store.close()
    assert [file.name for file in path.parent.iterdir()] == [NAME]


@pytest.mark.anyio
@pytest.mark.requirement("G21")
async def test_a_file_that_cannot_be_reached_is_said_to_be_so(open_path: Path) -> None:
    await filled(open_path / NAME)
    (open_path / "locked").mkdir(mode=0)
    with drop_privileges(), pytest.raises(StoreReadOnly):
        await SqliteStore.open(open_path / "locked" / NAME)


@pytest.mark.requirement("G21")
def test_a_path_that_is_a_file_is_said_to_be_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("hello")
    with pytest.raises(StoreError) as refused:
        StateDir.open_locked(tmp_path / "file")
    assert refused.value.hint


# --- damage ---


async def filled(path: Path) -> None:
    store = await SqliteStore.open(path)
    for n in range(40):
        await store.tx(append, n, "x" * 2000)
    await store.close()


def _noise(path: Path) -> None:
    path.write_bytes(random.Random(1).randbytes(8192))


def _text(path: Path) -> None:
    path.write_text("Dear diary, this is not a database, and never was one. " * 40)


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _scribble(path: Path) -> None:
    """A good header, and noise in every page after the first."""
    size = path.stat().st_size
    with path.open("r+b") as file:
        for at in range(4096, size, 4096):
            file.seek(at)
            file.write(random.Random(at).randbytes(200))


def _foreign(path: Path) -> None:
    path.unlink()
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE recipes (name TEXT)")
    connection.commit()
    connection.close()


@pytest.mark.anyio
@pytest.mark.requirement("G21")
@pytest.mark.parametrize("damage", [_noise, _text, _truncate, _scribble, _foreign])
async def test_what_is_not_ours_or_broken_is_refused_untouched(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    path = tmp_path / NAME
    await filled(path)
    damage(path)
    before = path.read_bytes()
    with pytest.raises(StoreDamaged) as refused:
        await SqliteStore.open(path)
    assert str(path) in str(refused.value) and refused.value.hint
    assert "\n" not in str(refused.value)
    assert path.read_bytes() == before
    with pytest.raises(StoreDamaged):
        check_file(path)


@pytest.mark.anyio
@pytest.mark.requirement("G21")
async def test_looking_where_nothing_is_creates_nothing(tmp_path: Path) -> None:
    with pytest.raises(StoreError):
        await SqliteStore.open(tmp_path / NAME, read_only=True)
    with pytest.raises(StoreError):
        check_file(tmp_path / NAME)
    assert os.listdir(tmp_path) == []  # noqa: PTH208


@pytest.mark.anyio
@pytest.mark.requirement("G45")
async def test_a_file_from_the_future_is_refused_untouched(tmp_path: Path) -> None:
    path = tmp_path / NAME
    await filled(path)
    query_database(path, "PRAGMA user_version = 9999")
    query_database(path, "PRAGMA wal_checkpoint(TRUNCATE)")
    before = path.read_bytes()
    with pytest.raises(StoreNewer) as refused:
        await SqliteStore.open(path)
    assert refused.value.data["schema"] == 9999
    assert path.read_bytes() == before


# --- who may look ---


@pytest.mark.anyio
@pytest.mark.requirement("G21")
async def test_what_is_stored_is_private(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir(mode=0o755)
    state.chmod(0o755)  # as if it had been made by hand
    mask = os.umask(0)  # the least careful one
    try:
        async with open_app_operations(Config(), state):
            modes = {item.name: stat.S_IMODE(item.stat().st_mode) for item in state.iterdir()}
    finally:
        os.umask(mask)
    assert stat.S_IMODE(state.stat().st_mode) == 0o700
    assert {NAME, "lock"} <= modes.keys()
    assert {name: mode for name, mode in modes.items() if mode & 0o077} == {}


def test_a_directory_has_one_owner(tmp_path: Path) -> None:
    with StateDir.open_locked(tmp_path / "state"), pytest.raises(StoreLocked) as refused:
        StateDir.open_locked(tmp_path / "state")
    assert str(os.getpid()) in str(refused.value)
    StateDir.open_locked(tmp_path / "state").close()  # and none when it has gone


# --- SQL ---


def topics() -> list[str]:
    folder = resources.files("antiphon.store").joinpath("sql", "queries")
    return sorted(item.name.removesuffix(".sql") for item in folder.iterdir() if item.name.endswith(".sql"))


def used() -> set[str]:
    """`topic.name` of every query that some module names, by any local name of the topic."""
    package = Path(antiphon.__file__).parent
    sources = {path: path.read_text() for path in package.rglob("*.py")}
    bound = re.compile(r"^(\w+) = Queries\(\"(\w+)\"\)", re.MULTILINE)
    names: set[str] = set()
    for path, source in sources.items():
        module = path.stem
        for variable, topic in bound.findall(source):
            names |= {f"{topic}.{name}" for name in re.findall(rf"(?<![\w.]){variable}\.(\w+)", source)}
            for other in sources.values():
                for alias in (module, *re.findall(rf"\b{module} as (\w+)", other)):
                    names |= {f"{topic}.{n}" for n in re.findall(rf"\b{alias}\.{variable}\.(\w+)", other)}
                if re.search(
                    rf"from antiphon[\w.]*\.{module} import (?:\([^)]*|[^\n]*)\b{variable}\b", other
                ):
                    names |= {f"{topic}.{n}" for n in re.findall(rf"(?<![\w.]){variable}\.(\w+)", other)}
    return names


def test_every_query_is_used_and_every_used_one_exists() -> None:
    there = {f"{topic}.{name}" for topic in topics() for name in Queries(topic).names()}
    named = {name for name in used() if not name.endswith(".names")}
    assert named - there == set(), "these are used and not there"
    assert there - named == set(), "these are there and not used"


@pytest.mark.anyio
@pytest.mark.parametrize("topic", topics())
async def test_every_query_compiles(tmp_path: Path, topic: str) -> None:
    await (await SqliteStore.open(tmp_path / NAME)).close()
    connection = sqlite3.connect(tmp_path / NAME)
    queries = Queries(topic)
    for name in sorted(queries.names()):
        query: Query = getattr(queries, name)
        if "{" in query.text or not re.match(r"(?i)(select|insert|update|delete|with)\b", query.text):
            continue  # a piece of a statement; the whole ones are compiled by the listing tests
        params = dict.fromkeys(re.findall(r"(?<!:):(\w+)", query.text), 1)
        try:
            connection.execute(f"EXPLAIN {query.text}", params)
        except sqlite3.Error as error:
            pytest.fail(f"{query.name}: {error}")
    connection.close()


def test_a_missing_query_is_named() -> None:
    with pytest.raises(AttributeError, match="no_such_query"):
        _ = Queries("runs").no_such_query


@pytest.mark.anyio
@pytest.mark.requirement("G22")
@pytest.mark.parametrize(
    "wish",
    [
        listing.SessionListQuery(limit=50),
        listing.SessionListQuery(limit=50, kinds=("main", "cron")),
        listing.SessionListQuery(limit=50, agents=["main", "other"], own_key="k", descendants=True),
        listing.SessionListQuery(
            limit=50, agents=["main"] * 99, own_key="k", descendants=True, archived=True
        ),
        listing.SessionListQuery(limit=50, agents=["main"] * 99, own_key="k", search="words"),
        listing.SessionListQuery(limit=50, label="l"),
        listing.SessionListQuery(limit=50, parent="p"),
        listing.SessionListQuery(limit=50, search="words"),
        listing.SessionListQuery(limit=50, active_since=5, cursor=(9, "k"), archived=True),
    ],
)
async def test_a_list_never_scans_the_sessions(tmp_path: Path, wish: listing.SessionListQuery) -> None:
    await (await SqliteStore.open(tmp_path / NAME)).close()
    query, params = listing.build_page_query(wish)
    plan = raw_plan(tmp_path / NAME, query.text, params)
    scans = [line for line in plan if re.match(r"SCAN (s|sessions|parent|c)\b(?! USING)", line)]
    assert scans == [], plan
    assert not [line for line in plan if "SCAN" in line and "USING INDEX sessions" in line], plan


def raw_plan(path: Path, sql: str, params: object) -> list[str]:
    connection = sqlite3.connect(path)
    try:
        return [row[3] for row in connection.execute(f"EXPLAIN QUERY PLAN {sql}", params)]  # pyright: ignore[reportArgumentType]
    finally:
        connection.close()


# --- migrations ---


def test_migrations_are_numbered_without_a_gap() -> None:
    assert [m.version for m in migrations.load_migrations()] == list(
        range(1, len(migrations.load_migrations()) + 1)
    )


@pytest.mark.requirement("G45")
def test_each_version_is_reached_from_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    connection = sqlite3.connect(tmp_path / NAME, isolation_level=None)
    known = migrations.load_migrations()
    for count in range(1, len(known) + 1):
        monkeypatch.setattr(migrations, "load_migrations", lambda upto=count: known[:upto])
        migrations.migrate(connection)
        assert migrations.read_schema_version(connection) == count
        migrations.migrate(connection)  # again changes nothing
    assert connection.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
    connection.close()


async def planted(path: Path) -> None:
    """A new file with a session in it."""
    async with open_test_store(path):
        pass
    plant(path)


@contextmanager
def schema(version: int) -> Generator[None]:
    """What is opened meanwhile becomes a file as that version of Antiphon leaves it."""
    known = migrations.load_migrations()
    with pytest.MonkeyPatch.context() as before:
        before.setattr(migrations, "load_migrations", lambda: known[:version])
        yield


def plant(path: Path) -> None:
    """A session, as every version has had them."""
    query_database(
        path / NAME,
        "INSERT INTO transcripts (session_id, key, reason, started_at) VALUES ('t', 'k', 'new', 1)",
    )
    query_database(
        path / NAME,
        "INSERT INTO sessions (key, session_id, transcript, agent_id, kind, created_at, updated_at)"
        " VALUES ('k', 't', 1, 'main', 'main', 1, 1)",
    )


def assert_carried_over(path: Path, kept: dict[str, list[tuple[Any, ...]]]) -> None:
    """The file is of the newest version and sound, and has everything that was in it."""
    assert_kept(path, kept)
    assert query_database(path / NAME, "PRAGMA user_version") == [
        {"user_version": len(migrations.load_migrations())}
    ]
    check_file(path / NAME)


@pytest.mark.anyio
@pytest.mark.requirement("G21", "G45")
async def test_a_broken_file_of_an_older_schema_is_refused_untouched(tmp_path: Path) -> None:
    path = tmp_path / NAME
    with schema(len(migrations.load_migrations()) - 1):
        await filled(path)
    end = path.stat().st_size
    with path.open("r+b") as file:  # what no migration looks at
        file.seek(end - 4096)
        file.write(random.Random(1).randbytes(4096))
    before = path.read_bytes()
    with pytest.raises(StoreDamaged):
        await SqliteStore.open(path)
    assert path.read_bytes() == before


@pytest.mark.anyio
@pytest.mark.requirement("G45")
async def test_jobs_come_to_a_file_of_schema_1_and_take_nothing_from_it(tmp_path: Path) -> None:
    with schema(1):
        # A run that has ended, one that was cut off and one that waits, as the version before leaves them.
        async with open_test_store(tmp_path) as store:
            for n in range(3):
                await store.tx(append, n, f"r{n}")
        query_database(tmp_path / NAME, "INSERT INTO owners (id, lease_until) VALUES ('somebody', 1)")
        plant(tmp_path)
        for state, ended in [("ok", 5), ("running", None), ("queued", None)]:
            query_database(
                tmp_path / NAME,
                "INSERT INTO runs (id, session, origin, digest, input, state, created_at, ended_at)"
                " VALUES (?, 1, 'cron', '', '{}', ?, 1, ?)",
                f"cron:{state}", state, ended,
            )  # fmt: skip
        assert query_database(tmp_path / NAME, "PRAGMA user_version") == [{"user_version": 1}]
        kept = dump_database(tmp_path / NAME)
    async with open_test_store(tmp_path) as store:
        assert await store.read(jobs.load_overview) == (0, None)
        unfinished = await store.read(ask, jobs.SQL.count_unfinished_runs)
        assert unfinished is not None and unfinished["runs"] == 2
    assert_carried_over(tmp_path, kept)


def assert_kept(path: Path, kept: dict[str, list[tuple[Any, ...]]]) -> None:
    """Every table that was there has the rows that it had; columns that are new come after the others."""
    now = dump_database(path / NAME)
    del kept["sqlite_sequence"]  # it lists the new tables, too
    for name, rows in kept.items():
        width = len(rows[0]) if rows else 0
        assert [row[:width] for row in now[name]] == rows


@pytest.mark.anyio
@pytest.mark.requirement("G45")
async def test_runs_of_schema_4_are_carried_on_and_lead_to_nothing(tmp_path: Path) -> None:
    """What was accepted before exchanges and tasks existed is finished after, as if they did not."""
    with schema(4):
        async with open_test_store(tmp_path):
            pass
        question = '{"role":"user","content":"say hello","timestamp":1}'
        statements: list[tuple[str, tuple[object, ...]]] = [
            (
                "INSERT INTO transcripts (session_id, key, reason, started_at)"
                " VALUES ('t', 'agent:main:main', 'new', 1)",
                (),
            ),
            (
                "INSERT INTO sessions (key, session_id, transcript, agent_id, kind, last_seq, lane_epoch, created_at,"
                " updated_at) VALUES ('agent:main:main', 't', 1, 'main', 'main', 1, 1, 1, 1)",
                (),
            ),
            (
                "INSERT INTO messages (transcript, seq, entry, role, run, body, created_at)"
                " VALUES (1, 1, 'e', 'user', 1, ?, 1)",
                (question,),
            ),
            (
                "INSERT INTO runs (id, session, origin, digest, input, state, epoch, attempts, transcript, first_seq,"
                " deadline_at, created_at, started_at)"
                " VALUES ('cut', 1, 'chat', '', ?, 'running', 1, 1, 1, 1, 99999999999999, 1, 1)",
                (question,),
            ),
            (
                "INSERT INTO runs (id, session, origin, digest, input, state, deadline_at, created_at)"
                " VALUES ('waiting', 1, 'chat', '', ?, 'queued', 99999999999999, 1)",
                (question,),
            ),
        ]
        for statement, params in statements:
            query_database(tmp_path / NAME, statement, *params)
    async with open_app_operations(Config(), tmp_path) as operations:
        for run_id in ("cut", "waiting"):
            view = await operations.runs.wait(Caller.operator(), run_id, BOUND)
            assert (view.state, view.reply) == ("ok", "hello")
    for table in ("exchanges", "tasks", "deliveries", "chains"):
        assert query_database(tmp_path / NAME, f"SELECT * FROM {table}") == []  # noqa: S608
    check_file(tmp_path / NAME)


@pytest.mark.anyio
@pytest.mark.requirement("G45", "W2")
async def test_what_was_said_before_schema_3_can_be_searched_after(tmp_path: Path) -> None:
    with schema(2):
        await planted(tmp_path)
        for seq, word in enumerate(("lost", "found", "{damaged")):
            query_database(
                tmp_path / NAME,
                "INSERT INTO messages (transcript, seq, entry, role, body, created_at)"
                " VALUES (1, ?, 'e', 'user', ?, 1)",
                seq, word if word[0] == "{" else f'{{"role":"user","content":"{word}","timestamp":1}}',
            )  # fmt: skip
        query_database(
            tmp_path / NAME, "DELETE FROM messages WHERE seq = 0"
        )  # so that the numbers have a gap
        assert query_database(tmp_path / NAME, "PRAGMA user_version") == [{"user_version": 2}]
        kept = dump_database(tmp_path / NAME)
    async with open_test_store(tmp_path) as store:
        assert await store.read(search.load_index_position) == (0, 3)
        assert await store.tx(search.index_entries, search.INDEX_BATCH_ENTRIES) == 3
        rows, _, _ = await store.read(search.find_entries, search.SearchQuery(query="found", limit=5))
        assert [(row["key"], row["seq"]) for row in rows] == [("k", 1)]
        assert (await store.read(search.find_entries, search.SearchQuery(query="lost", limit=5)))[0] == []
    assert_carried_over(tmp_path, kept)


@pytest.mark.anyio
@pytest.mark.requirement("G45", "W2")
async def test_what_schema_7_had_indexed_is_indexed_again_and_found_once(tmp_path: Path) -> None:
    with schema(7):
        await planted(tmp_path)
        for statement in (
            "INSERT INTO messages (transcript, seq, entry, role, body, created_at)"
            """ VALUES (1, 1, 'e', 'user', '{"role":"user","content":"found","timestamp":1}', 1)""",
            "INSERT INTO message_words (rowid, words, scope) VALUES (1, 'found', 's1 a6D61696E said')",
            "UPDATE search_cursor SET message = 1",
        ):
            query_database(tmp_path / NAME, statement)
    async with open_test_store(tmp_path) as store:
        assert await store.read(search.load_index_position) == (0, 1)
        await search.catch_up_index(store)
        rows, complete, _ = await store.read(search.find_entries, search.SearchQuery(query="found", limit=5))
        assert ([row["seq"] for row in rows], complete) == ([1], True)
    check_file(tmp_path / NAME)


@pytest.mark.requirement("G45")
def test_a_migration_that_fails_leaves_the_version_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = sqlite3.connect(tmp_path / NAME, isolation_level=None)
    migrations.migrate(connection)
    known = migrations.load_migrations()
    present = known[-1].version
    schema = connection.execute("SELECT * FROM sqlite_schema").fetchall()
    broken = Migration(
        present + 1,
        "broken",
        "CREATE TABLE half (id INTEGER PRIMARY KEY);\nALTER TABLE nowhere ADD COLUMN x;\n",
    )
    monkeypatch.setattr(migrations, "load_migrations", lambda: [*known, broken])
    with pytest.raises(sqlite3.OperationalError):
        migrations.migrate(connection)
    assert migrations.read_schema_version(connection) == present
    assert connection.execute("SELECT * FROM sqlite_schema").fetchall() == schema
    corrected = broken._replace(
        script="CREATE TABLE whole (id INTEGER PRIMARY KEY); -- a comment; with a semicolon\n"
    )
    monkeypatch.setattr(migrations, "load_migrations", lambda: [*known, corrected])
    migrations.migrate(connection)
    assert migrations.read_schema_version(connection) == present + 1
    assert connection.execute("SELECT count(*) FROM whole").fetchone()[0] == 0
    connection.close()


ELSEWHERE = {"doctor", "listing"}  # a person asked and can wait; put together from parts, see test_listing.py
WALK = re.compile(r"SCAN (runs|sessions|messages|usage|r|s)\b(?!.*INDEX)")
QUEUES = {
    "runs.insert",
    "runs.next_queued",
    "runs.queued_in_session",
    "runs.active_tree",
    "sessions.unused",
    "sessions.expired",
}


@pytest.mark.requirement("G22", "G24")
@pytest.mark.anyio
async def test_no_statement_walks_through_a_table_or_through_what_a_session_ever_ran(tmp_path: Path) -> None:
    async with open_test_store(tmp_path):
        connection = sqlite3.connect(tmp_path / NAME)
        for topic in sorted({*topics()} - ELSEWHERE):
            for name in sorted(Queries(topic).names()):
                query: Query = getattr(Queries(topic), name)
                given = dict.fromkeys(re.findall(r":(\w+)", query.text), 1)
                plan = [row[3] for row in connection.execute(f"EXPLAIN QUERY PLAN {query.text}", given)]
                walked = [step for step in plan if WALK.match(step)]
                assert not walked, (query.name, walked)
                if query.name in QUEUES:
                    assert any("runs_queued" in step for step in plan), (query.name, plan)
        connection.close()


@pytest.mark.anyio
@pytest.mark.requirement("G32")
@pytest.mark.parametrize("version", [(3, 36, 0), (2**31, 0, 0)])
async def test_a_library_that_cannot_do_enough_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: tuple[int, int, int]
) -> None:
    """One that is too old, and one without the functions for JSON."""

    class Less(sqlite3.Connection):
        def executescript(self, sql_script: str, /) -> sqlite3.Cursor:
            return super().executescript(sql_script.replace("json_array", "no_such_function"))

    monkeypatch.setattr(sqlite3, "sqlite_version_info", version)
    monkeypatch.setattr(sqlite3, "connect", partial(sqlite3.connect, factory=Less))
    with pytest.raises(StoreError, match=r"SQLite .* (too old|lacks required features)"):
        await SqliteStore.open(tmp_path / NAME)
    assert not (tmp_path / NAME).exists()
