"""Whether a store on SQLite can keep anything: it knows, and says so when that changes."""

from __future__ import annotations

import asyncio
import logging
import random
import shutil
import sqlite3
import threading
from collections.abc import AsyncGenerator
from contextlib import closing
from pathlib import Path

import pytest

from antiphon.engine import replicas
from antiphon.engine.replicas import Replica
from antiphon.errors import StoreDamaged, StoreFull, StoreReadOnly
from antiphon.store import STORE_TROUBLE_LOGGER, Tx
from antiphon.store.queries import Query
from antiphon.store.sqlite.store import SqliteStore
from antiphon.store.statedir import StateDir
from support.app_fixture import BOUND
from support.disks import mount_small_disk

pytestmark = [pytest.mark.anyio, pytest.mark.requirement("G21")]

NAME = "antiphon.db"
LIMIT = Query("test.limit", "PRAGMA max_page_count = 1")  # SQLite takes the present size: not a page more
UNLIMIT = Query("test.unlimit", "PRAGMA max_page_count = 1073741823")
LOCKED = Query("test.locked", "PRAGMA query_only = ON")
UNLOCKED = Query("test.unlocked", "PRAGMA query_only = OFF")
NOTHING = Query("test.nothing", "DELETE FROM owners WHERE id = 'nobody'")
ALL = Query("test.all", "SELECT sum(length(run_id)) AS n FROM usage")
APPEND = Query("test.append", "INSERT INTO usage (at, run_id, session_key, session_id, root_key, agent_id, input, "
               "output, cache_read, cache_write) VALUES (1, :body, '', '', '', '', 0, 0, 0, 0)")  # fmt: skip


async def put(tx: Tx, owner: str) -> None:
    await replicas.renew_lease(tx, Replica(id=owner), 1, 1)


async def append(tx: Tx, size: int) -> None:
    await tx.do(APPEND, body="x" * size)


async def ask(tx: Tx, query: Query) -> None:
    await tx.one(query)


async def refused(tx: Tx) -> None:
    await put(tx, "refused")
    raise ValueError


async def put_where_nothing_can_be_written(tx: Tx) -> None:
    await ask(tx, LOCKED)
    try:
        await put(tx, "a")
    finally:
        await ask(tx, UNLOCKED)


@pytest.fixture
async def store(tmp_path: Path) -> AsyncGenerator[SqliteStore]:
    opened = await SqliteStore.open(tmp_path / NAME)
    yield opened
    await opened.close()


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == STORE_TROUBLE_LOGGER]


async def test_it_lasts_from_the_first_failure_to_the_next_change_that_is_kept(
    store: SqliteStore, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert store.write_error is None
    await store.tx(ask, LIMIT)
    for _ in range(3):
        with pytest.raises(StoreFull):
            await store.tx(append, 500_000)
        assert isinstance(store.write_error, StoreFull)
    await store.tx(ask, NOTHING)  # kept nothing, so it tells nothing
    with pytest.raises(ValueError):
        await store.tx(refused)
    assert isinstance(store.write_error, StoreFull)
    assert said(caplog) == ["There is no room left for the database; work continues once space is freed."]
    await store.tx(ask, UNLIMIT)
    await store.tx(append, 500_000)
    assert store.write_error is None
    await store.tx(append, 500_000)
    assert said(caplog)[1:] == ["The database is writable again"]


async def test_what_does_not_fit_keeps_back_nothing_that_does(store: SqliteStore) -> None:
    """However they come together: those that wait for room try again and again."""
    await store.tx(put, "a")
    await store.tx(ask, LIMIT)
    for _ in range(5):
        large, *small = await asyncio.gather(
            store.tx(append, 500_000), *(store.tx(put, "a") for _ in range(3)), return_exceptions=True
        )
        assert isinstance(large, StoreFull)
        assert small == [None] * 3


async def test_a_disk_that_cannot_be_written_is_one_and_a_script_that_fails_is_none(
    store: SqliteStore, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ValueError):
        await store.tx(refused)
    assert store.write_error is None
    with pytest.raises(StoreReadOnly):
        await store.tx(put_where_nothing_can_be_written)
    assert isinstance(store.write_error, StoreReadOnly)
    assert "write access" in said(caplog)[0]
    await store.tx(put, "a")
    assert store.write_error is None


async def test_what_is_kept_on_a_full_disk_does_not_say_that_there_is_room(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await store.tx(put, "a")
    await store.tx(ask, LIMIT)
    with pytest.raises(StoreFull):
        await store.tx(append, 500_000)
    monkeypatch.setattr("antiphon.store.sqlite.errors.MIN_FREE_DISK_BYTES", 2**62)  # no disk has that
    await store.tx(put, "a")  # fits the pages that are there
    assert isinstance(store.write_error, StoreFull)
    monkeypatch.undo()
    await store.tx(put, "a")
    assert store.write_error is None
    assert len(said(caplog)) == 2


async def test_within_a_quota_it_does_not_come_and_go_with_every_commit(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await store.tx(put, "a")
    await store.tx(ask, LIMIT)
    for _ in range(5):
        with pytest.raises(StoreFull):
            await store.tx(append, 500_000)
        await store.tx(put, "a")  # fits the pages that are there
    assert isinstance(store.write_error, StoreFull)
    assert len(said(caplog)) == 3
    monkeypatch.setattr("antiphon.store.sqlite.errors.RECOVERY_QUIET_SECONDS", 0.0)
    await store.tx(put, "a")
    assert store.write_error is None


async def test_what_was_undone_does_not_count_as_kept(store: SqliteStore) -> None:
    together = threading.Event()

    async def hold(tx: Tx) -> None:
        assert together.wait(BOUND)

    await store.tx(ask, LIMIT)
    with pytest.raises(StoreFull):
        await store.tx(append, 500_000)
    batch = asyncio.gather(store.tx(hold), store.tx(refused), store.tx(ask, NOTHING), return_exceptions=True)
    await asyncio.sleep(0)  # all of them are waiting
    together.set()
    await asyncio.wait_for(batch, BOUND)
    assert isinstance(store.write_error, StoreFull)
    await store.tx(put, "a")
    assert store.write_error is None


async def test_damage_does_not_go_away_by_itself(tmp_path: Path) -> None:
    path = tmp_path / NAME
    store = await SqliteStore.open(path)
    await store.tx(append, 2_000_000)
    await store.tx(put, "a")
    await store.close()
    store = await SqliteStore.open(path)
    with closing(sqlite3.connect(path)) as other:  # so that what is remembered of the file is read again
        other.execute("DELETE FROM owners")
        other.commit()
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(size // 4)  # behind everything but the long row
        file.write(random.Random(1).randbytes(size // 2))
    with pytest.raises(StoreDamaged):
        await store.tx(ask, ALL)
    await store.tx(put, "b")
    assert isinstance(store.write_error, StoreDamaged)
    await store.close()


async def test_a_full_disk_is_one_from_the_first_commit_that_fails_and_until_there_is_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with mount_small_disk(tmp_path / "disk") as disk:
        store = await SqliteStore.open(disk.path / NAME)
        disk.fill()
        with pytest.raises(StoreFull):
            await store.tx(append, 100_000)
        assert isinstance(store.write_error, StoreFull)
        disk.clear()
        await store.tx(append, 100_000)
        assert store.write_error is None
        with pytest.raises(StoreFull):
            await store.tx(append, 4_000_000)
        for n in range(3):
            await store.tx(put, f"{n}")  # in the room that the failure has taken up and left unused
            assert isinstance(store.write_error, StoreFull)
        assert len(said(caplog)) == 3
        await store.close()


async def test_a_commit_that_is_too_large_does_not_keep_the_disk_full(tmp_path: Path) -> None:
    with mount_small_disk(tmp_path / "disk") as disk:
        await (await SqliteStore.open(disk.path / NAME)).close()
        store = await SqliteStore.open(disk.path / NAME)
        before = shutil.disk_usage(disk.path).free
        with pytest.raises(StoreFull):
            await store.tx(append, 4_000_000)
        assert shutil.disk_usage(disk.path).free >= before
        await store.tx(put, "a")
        assert store.write_error is None
        await store.close()


async def test_a_reader_does_not_delay_writers_on_a_full_disk(tmp_path: Path) -> None:
    """It keeps the log from being made smaller; a backup may last for as long as the disk is full."""
    with mount_small_disk(tmp_path / "disk") as disk:
        store = await SqliteStore.open(disk.path / NAME)
        await store.tx(put, "a")
        with closing(sqlite3.connect(disk.path / NAME, isolation_level=None)) as reader:
            reader.execute("BEGIN").execute("SELECT * FROM owners").fetchall()
            await store.tx(put, "b")
            async with asyncio.timeout(BOUND):
                large = (store.tx(append, 4_000_000) for _ in range(20))
                *errors, fits = await asyncio.gather(*large, store.tx(put, "c"), return_exceptions=True)
        assert {type(error) for error in errors} == {StoreFull} and fits is None
        await store.close()


async def test_a_directory_for_which_there_is_no_room_is_said_to_be_so(tmp_path: Path) -> None:
    with mount_small_disk(tmp_path / "disk", files=1) as disk:
        with pytest.raises(StoreFull, match="no room left"):
            StateDir.open_locked(disk.path / "state")
        assert not (disk.path / "state").exists()
