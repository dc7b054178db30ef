"""Connections to PostgreSQL that break or stall, servers that are killed: nothing is lost, repeated or kept waiting."""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import cast

import pytest

from antiphon.errors import StoreError, StoreUnsure
from antiphon.store import Tx
from antiphon.store.postgres import PgStore, connection, worker
from antiphon.store.postgres.connection import PgServer
from cluster.database import Postgres
from cluster.proxy import Proxy, Side
from cluster.stores import (
    BOUND,
    COMMIT,
    ask,
    increase,
    lease,
    opened,
    owners,
    port_of,
    proxied,
    put,
    through,
    within,
)

pytestmark = pytest.mark.anyio


# --- commits of unknown outcome ---


@pytest.mark.requirement("G2", "G13")
@pytest.mark.parametrize("side", ["before", "after"])
@pytest.mark.parametrize("batch", [1, 5])
async def test_a_commit_that_is_cut_off_happens_once(server: PgServer, side: Side, batch: int) -> None:
    async with proxied(server, writers=1) as (proxy, store):
        await store.tx(put, "n")
        moment = proxy.cut_at(COMMIT, side)
        values = await within(asyncio.gather(*(store.tx(increase, "n") for _ in range(batch))))
        assert moment.reached.is_set()
        assert sorted(values) == list(range(1, batch + 1))
        assert await store.read(lease, "n") == batch


@pytest.mark.requirement("G2", "G21")
@pytest.mark.parametrize("side", ["before", "after"])
async def test_a_commit_during_which_the_server_is_killed_happens_once(
    postgres: Postgres, server: PgServer, side: Side
) -> None:
    async def power_cut() -> None:
        await asyncio.to_thread(postgres.kill)
        await asyncio.to_thread(postgres.start)

    async with proxied(server, writers=2) as (proxy, store):
        await store.tx(put, "n")
        moment = proxy.cut_at(COMMIT, side, power_cut)
        assert await within(store.tx(increase, "n")) == 1
        assert moment.reached.is_set()
        assert await within(store.read(lease, "n")) == 1


@pytest.mark.requirement("G2", "G21")
async def test_another_transaction_with_the_number_of_a_lost_one_is_not_taken_for_it(
    postgres: Postgres, server: PgServer
) -> None:
    """After a crash the database gives out again the numbers of transactions of which nothing was written down."""
    numbers: list[str] = []

    async def noted(tx: Tx) -> int:
        value = await increase(tx, "n")
        row = await ask(tx, "SELECT CAST(pg_current_xact_id() AS TEXT) AS number")
        assert row
        numbers.append(row["number"])
        return value

    async def power_cut() -> None:
        await asyncio.to_thread(postgres.kill)
        await asyncio.to_thread(postgres.start)
        async with opened(server, writers=1) as other:
            for _ in range(10):
                await other.tx(increase, "other")

    async with proxied(server, writers=1) as (proxy, store):
        await store.tx(put, "n")
        proxy.cut_at(COMMIT, "before", power_cut)
        assert await within(store.tx(noted)) == 1
        assert len(numbers) == 2
        assert await store.read(lease, "n") == 1
        assert await store.read(lease, "other") == 10


@pytest.mark.requirement("G2")
async def test_a_commit_whose_outcome_cannot_be_found_out_is_said_to_be_so(
    server: PgServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also to all whose script was in the same transaction; none of them is run again."""
    monkeypatch.setattr(worker, "COMMIT_RESOLVE_SECONDS", 0.3)
    runs = 0

    async def counted(tx: Tx) -> int:
        nonlocal runs
        runs += 1
        return await increase(tx, "n")

    async with proxied(server, writers=1) as (proxy, store):
        await store.tx(put, "n")

        async def gone() -> None:
            proxy.refuse()

        proxy.cut_at(COMMIT, "after", gone)
        outcomes = await within(
            asyncio.gather(*(store.tx(counted) for _ in range(3)), return_exceptions=True)
        )
        assert [type(outcome) for outcome in outcomes] == [StoreUnsure] * 3
        assert all("unknown" in cast("StoreError", outcome).hint for outcome in outcomes)
        assert runs == 3
        proxy.refuse(refusing=False)
        assert await within(store.tx(lease, "n")) == 3  # it did take place, once


@pytest.mark.requirement("G13")
async def test_reads_go_on_over_a_connection_that_breaks(server: PgServer) -> None:
    async with proxied(server, readers=2) as (proxy, store):
        await store.tx(put, "a")
        for _ in range(3):
            reading = [asyncio.create_task(store.read(owners)) for _ in range(20)]
            await asyncio.sleep(0)
            proxy.cut()
            assert await within(asyncio.gather(*reading)) == [["a"]] * 20
        proxy.cut_at(COMMIT, "before")
        assert await within(store.read(owners)) == ["a"]


@pytest.mark.requirement("G2", "G13")
async def test_connections_cut_at_random_lose_and_repeat_nothing(server: PgServer) -> None:
    async with proxied(server, writers=4) as (proxy, store):
        work = [asyncio.create_task(store.tx(increase, f"n{n % 3}")) for n in range(150)]
        while not all(task.done() for task in work):
            await asyncio.wait(work, timeout=0.05)
            proxy.cut()
            if proxy.connections > 60:  # long enough to have met every moment
                break
        values = await within(asyncio.gather(*work))
        assert sorted(values) == sorted([*range(1, 51)] * 3)
        assert [await store.read(lease, f"n{n}") for n in range(3)] == [50, 50, 50]


@pytest.mark.requirement("G2", "G21")
async def test_a_server_killed_under_load_keeps_what_it_acknowledged(
    postgres: Postgres, server: PgServer
) -> None:
    async with opened(server, writers=4) as one, opened(server, writers=4) as other:
        done = asyncio.Event()

        async def noted(tx: Tx, owner: str) -> str:
            await put(tx, owner, await lease(tx, owner) + 1)
            return owner

        async def one_by_one(store: PgStore, n: int) -> list[str]:
            kept: list[str] = []
            for turn in range(12):
                try:
                    kept.append(await store.tx(noted, f"{n}-{turn}"))
                except StoreUnsure:
                    continue
                if turn == 3:
                    done.set()
            return kept

        stores = [one, other]
        load = [asyncio.create_task(one_by_one(stores[n % 2], n)) for n in range(50)]
        for _ in range(2):
            await within(done.wait())
            done.clear()
            await asyncio.to_thread(postgres.kill)
            await asyncio.to_thread(postgres.start)
            if all(task.done() for task in load):
                break
            done.set()
        acknowledged = [name for kept in await within(asyncio.gather(*load)) for name in kept]
        assert len(acknowledged) == len({*acknowledged})
        for name in acknowledged:
            assert await one.read(lease, name) == 1
        assert len(acknowledged) > 500


# --- nothing hangs ---


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "CONNECT_TIMEOUT_SECONDS", 0.3)
    monkeypatch.setattr(connection, "COMMAND_TIMEOUT_SECONDS", 0.5)
    monkeypatch.setattr(worker, "CONNECT_TIMEOUT_SECONDS", 0.3)
    monkeypatch.setattr(worker, "RETRY_WINDOW_SECONDS", 0.6)
    monkeypatch.setattr(worker, "COMMIT_RESOLVE_SECONDS", 0.6)


@pytest.mark.usefixtures("impatient")
async def test_a_connection_on_which_nothing_comes_is_given_up(server: PgServer) -> None:
    async with proxied(server, writers=1, readers=1) as (proxy, store):
        await store.tx(put, "a")
        assert await store.read(owners) == ["a"]
        proxy.stall()
        began = monotonic()
        outcomes = await within(
            asyncio.gather(
                *(store.tx(put, f"b{n}") for n in range(40)),
                *(store.read(owners) for _ in range(40)),
                return_exceptions=True,
            )
        )
        assert monotonic() - began < 10
        assert all(
            isinstance(outcome, StoreError) and not isinstance(outcome, StoreUnsure) for outcome in outcomes
        )
        proxy.flow()
        assert await within(store.tx(put, "c")) == "c"
        assert await store.read(owners) == ["a", "c"]


@pytest.mark.usefixtures("impatient")
async def test_an_idle_connection_that_died_silently_costs_a_moment_and_no_error(
    server: PgServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        worker, "RETRY_WINDOW_SECONDS", BOUND
    )  # that the new one comes in time is not the question
    async with proxied(server, writers=1, readers=1) as (proxy, store):
        await store.tx(put, "a")
        proxy.stall()
        waiting = asyncio.create_task(store.tx(put, "b"))
        await asyncio.wait([waiting], timeout=0.35)  # the old connection is given up, and a new one begun
        proxy.flow()
        assert await within(waiting) == "b"


@pytest.mark.usefixtures("impatient")
async def test_an_unreachable_server_fails_every_waiting_caller(server: PgServer) -> None:
    async with proxied(server, writers=2, readers=1) as (proxy, store):
        await store.tx(put, "a")
        proxy.refuse()
        proxy.cut()
        began = monotonic()
        outcomes = await within(
            asyncio.gather(*(store.tx(put, f"b{n}") for n in range(300)), return_exceptions=True)
        )
        assert monotonic() - began < 10
        assert {type(outcome) for outcome in outcomes} == {StoreError}
        assert "nothing of this request was kept" in cast("StoreError", outcomes[0]).hint
        proxy.refuse(refusing=False)
        assert await within(store.tx(put, "c")) == "c"
        assert await store.read(owners) == ["a", "c"]


async def test_cancelled_callers_break_nothing(server: PgServer) -> None:
    async with opened(server, writers=2) as store:
        for turn in range(20):
            work = [asyncio.create_task(store.tx(increase, "n")) for _ in range(10)]
            await asyncio.wait(work, timeout=0.001 * turn)
            for task in work[::2]:
                task.cancel()
            outcomes = await within(asyncio.gather(*work, return_exceptions=True))
            assert not [o for o in outcomes if isinstance(o, Exception)]
        assert 100 <= await store.read(lease, "n") <= 200


async def test_closing_finishes_what_was_asked_for(server: PgServer) -> None:
    store = await PgStore.open(server, writers=2)
    work = [asyncio.create_task(store.tx(put, f"{n:03}")) for n in range(300)]
    reading = asyncio.create_task(store.read(owners))
    await asyncio.sleep(0)
    await within(store.close())
    assert len(await within(asyncio.gather(*work))) == 300
    assert await reading is not None
    for late in (store.tx, store.read):
        with pytest.raises(StoreError, match="closed"):
            await within(late(owners))
    await within(store.close())  # twice is as good as once
    async with opened(server) as again:
        assert len(await again.read(owners)) == 300


async def test_a_cancelled_close_leaves_no_caller_waiting(server: PgServer) -> None:
    async with Proxy(port_of(server)) as proxy:
        store = await PgStore.open(through(proxy, server), writers=2)
        await store.tx(put, "a")
        proxy.stall()
        work = [asyncio.create_task(store.tx(put, f"{n:03}")) for n in range(200)]
        await asyncio.sleep(0)
        closing = asyncio.create_task(store.close())
        await asyncio.wait([closing], timeout=0.1)
        assert not closing.done()
        closing.cancel()
        outcomes = await within(asyncio.gather(*work, return_exceptions=True), 5)
        assert all(isinstance(outcome, StoreError) for outcome in outcomes)
        await within(store.close(), 5)


async def test_no_connection_is_left_behind(server: PgServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("antiphon.store.postgres.CLOCK_SYNC_INTERVAL_SECONDS", 0.01)
    async with Proxy(port_of(server)) as proxy:
        async with opened(through(proxy, server), writers=2, readers=2) as store:
            await within(asyncio.gather(*(store.tx(put, f"{n}") for n in range(20))))
            for _ in range(20):
                await store.read(owners)
        assert proxy.connections <= 5  # that of opening, and one for each worker
    asked = await server.connect()
    try:
        left = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        until = monotonic() + BOUND
        while await asked.fetchval(left):
            assert monotonic() < until
    finally:
        await asked.close(timeout=5)
