"""What every store promises, whichever database is behind it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import cast

import pytest

from antiphon.engine import replicas
from antiphon.engine.replicas import Replica
from antiphon.store import Store, Tx
from antiphon.store.queries import Query
from support.databases import open_test_database

pytestmark = pytest.mark.anyio

OWNERS = Query("test.owners", "SELECT id, lease_until FROM owners ORDER BY id")
LEASES = Query("test.leases", "SELECT lease_until FROM owners WHERE id = :id")
NO_TABLE = Query("test.no_table", "SELECT 1 FROM nowhere")


@pytest.fixture
async def store(tmp_path: Path) -> AsyncGenerator[Store]:
    opened = await open_test_database(tmp_path / "contract.db")
    yield opened
    await opened.close()


async def put(tx: Tx, owner: str, until: int = 1) -> str:
    await replicas.renew_lease(tx, Replica(id=owner), until, 1)
    return owner


async def owners(tx: Tx) -> list[str]:
    return [row["id"] for row in await tx.all(OWNERS)]


class Refused(Exception):
    pass


async def put_and_refuse(tx: Tx, owner: str) -> None:
    await put(tx, owner)
    raise Refused(owner)


async def increase(tx: Tx, owner: str) -> int:
    row = await tx.one(LEASES, id=owner)
    value = row["lease_until"] + 1 if row else 1
    await put(tx, owner, value)
    return value


async def test_what_a_script_returns_is_returned_and_kept(store: Store) -> None:
    assert await store.tx(put, "a", until=5) == "a"
    assert await store.read(owners) == ["a"]
    assert await store.tx(replicas.release_lease, "a") is None
    assert await store.read(owners) == []


async def test_one_row_or_none_and_the_number_of_changes(store: Store) -> None:
    async def script(tx: Tx) -> tuple[object, int, int]:
        missing = await tx.one(LEASES, id="nobody")
        await put(tx, "a")
        await put(tx, "b")
        return missing, await tx.do(replicas.SQL.delete, id="a"), await tx.do(replicas.SQL.delete, id="a")

    assert await store.tx(script) == (None, 1, 0)


@pytest.mark.requirement("G13")
async def test_a_script_that_raises_takes_only_its_own_changes_with_it(store: Store) -> None:
    work = [store.tx(put_and_refuse if n % 7 == 3 else put, f"{n:03}") for n in range(100)]
    outcomes = await asyncio.gather(*work, return_exceptions=True)
    kept = [f"{n:03}" for n in range(100) if n % 7 != 3]
    assert [o for o in outcomes if isinstance(o, str)] == kept
    assert [str(o) for o in outcomes if isinstance(o, Refused)] == [
        f"{n:03}" for n in range(100) if n % 7 == 3
    ]
    assert await store.read(owners) == kept


async def test_a_refused_statement_is_a_store_error_and_the_store_goes_on(store: Store) -> None:
    from antiphon.errors import StoreError

    async def broken(tx: Tx) -> None:
        await put(tx, "lost")
        await tx.one(NO_TABLE)

    results = await asyncio.gather(
        store.tx(put, "a"), store.tx(broken), store.tx(put, "b"), return_exceptions=True
    )
    assert isinstance(results[1], StoreError)
    with pytest.raises(StoreError):
        await store.read(broken)
    assert await store.read(owners) == ["a", "b"]


@pytest.mark.requirement("G13")
async def test_scripts_do_not_see_half_of_each_other(store: Store) -> None:
    """Read, add one, write: a lost update would show in the sum."""
    values = await asyncio.gather(*(store.tx(increase, "counter") for _ in range(200)))
    assert sorted(values) == list(range(1, 201))


@pytest.mark.requirement("G13")
async def test_a_read_sees_one_moment(store: Store) -> None:
    """`a` and `b` are always written together, so no reader may see them differ."""

    async def both(tx: Tx, value: int) -> None:
        await put(tx, "a", value)
        await put(tx, "b", value)

    async def compared(tx: Tx) -> tuple[int, int]:
        first, second = await tx.one(LEASES, id="a"), await tx.one(LEASES, id="b")
        assert first and second
        return first["lease_until"], second["lease_until"]

    await store.tx(both, 0)
    writing = [store.tx(both, value) for value in range(1, 100)]
    reading = [store.read(compared) for _ in range(100)]
    outcomes = await asyncio.gather(*writing, *reading)
    pairs = [cast("tuple[int, int]", outcome) for outcome in outcomes[99:]]
    assert all(first == second for first, second in pairs)


async def test_a_committed_change_is_seen_by_the_next_read(store: Store) -> None:
    for value in range(50):
        assert await store.tx(increase, "a") == value + 1
        row = await store.read(_lease, "a")
        assert row == value + 1


async def _lease(tx: Tx, owner: str) -> int:
    row = await tx.one(LEASES, id=owner)
    return row["lease_until"] if row else 0


async def test_a_caller_that_gives_up_leaves_whole_work_behind(store: Store) -> None:
    tasks = [asyncio.create_task(store.tx(increase, "a")) for _ in range(20)]
    await asyncio.sleep(0)
    for task in tasks[::2]:
        task.cancel()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    told = [o for o in outcomes if isinstance(o, int)]
    assert len(told) == 10
    # Cancelled work may have happened or not, but never in part and never out of order.
    assert max(told) <= await store.read(_lease, "a") <= 20


@pytest.mark.sqlite_only  # its writer is a thread without a loop; elsewhere nothing would notice
async def test_a_script_may_not_wait_for_anything_else(store: Store) -> None:
    async def sleepy(tx: Tx) -> None:
        await put(tx, "lost")
        await asyncio.sleep(0)

    with pytest.raises(RuntimeError, match="awaited something other than its Tx"):
        await store.tx(sleepy)
    assert await store.tx(put, "a") == "a"
    assert await store.read(owners) == ["a"]
