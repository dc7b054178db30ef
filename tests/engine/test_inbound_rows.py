"""Rows of messages from chat services: leases of receivers, context of groups, and codes of pairings."""

from __future__ import annotations

from pathlib import Path

import pytest

from antiphon.engine.inbound import inbound_rows, pairing_rows
from support.app_fixture import open_test_store

pytestmark = pytest.mark.anyio

HERE = ("telegram", "default")


@pytest.mark.requirement("CH11")
async def test_one_process_at_a_time_receives_for_an_account(tmp_path: Path) -> None:
    async with open_test_store(tmp_path) as store:
        acquire = inbound_rows.acquire_receiver
        assert await store.tx(acquire, *HERE, "a", 30, 0)
        assert not await store.tx(acquire, *HERE, "b", 40, 10)
        assert await store.tx(acquire, "telegram", "work", "b", 40, 10), "another account"
        assert await store.tx(acquire, *HERE, "a", 50, 20), "renewed"
        assert not await store.tx(acquire, *HERE, "b", 79, 49)
        assert await store.tx(acquire, *HERE, "b", 80, 50), "expired"
        assert not await store.tx(acquire, *HERE, "a", 80, 51)
        await store.tx(inbound_rows.release_receiver, *HERE, "a")
        assert not await store.tx(acquire, *HERE, "a", 81, 52), "only the holder releases"
        await store.tx(inbound_rows.release_receiver, *HERE, "b")
        assert await store.tx(acquire, *HERE, "a", 82, 53)


@pytest.mark.requirement("CH17")
async def test_the_context_of_a_group_is_bounded_and_taken_once(tmp_path: Path) -> None:
    async with open_test_store(tmp_path) as store:
        for number in range(5):
            for place in ("one", "two"):
                await store.tx(inbound_rows.add_context, place, "Ann", f"{place}{number}", number, 3)
        taken = await store.tx(inbound_rows.take_context, "one")
        assert [row["text"] for row in taken] == ["one2", "one3", "one4"]
        assert await store.tx(inbound_rows.take_context, "one") == []
        await store.tx(inbound_rows.delete_old_rows, inbound_rows.CONTEXT_LIFETIME_MS + 3)
        assert [row["text"] for row in await store.tx(inbound_rows.take_context, "two")] == ["two4"]


@pytest.mark.requirement("CH18")
async def test_codes_end_after_an_hour_and_are_told_once(tmp_path: Path) -> None:
    async with open_test_store(tmp_path) as store:
        request, later = pairing_rows.request_pairing, pairing_rows.CODE_LIFETIME_MS
        code = await store.tx(request, *HERE, "7", "Ann", 0)
        assert code and len(code) == 8 and not set(code) & set("01OI")
        assert await store.tx(request, *HERE, "7", "Ann", 1) is None
        assert (
            await store.tx(pairing_rows.approve_pairing, *HERE, code, later, has_configured_owner=False)
            is None
        )
        again = await store.tx(request, *HERE, "7", "Ann", later)
        assert again and again != code
        row = await store.tx(
            pairing_rows.approve_pairing, *HERE, again, later + 1, has_configured_owner=False
        )
        assert row is not None and row["is_owner"] == 1
        assert await store.read(pairing_rows.load_grant, *HERE, "7") == (True, True)
        assert await store.read(pairing_rows.load_grant, "telegram", "work", "7") == (False, False)
        assert await store.tx(request, *HERE, "7", "Ann", later + 2) is None, "approved already"


@pytest.mark.requirement("CH1")
async def test_an_event_that_fails_is_tried_again_some_times_and_then_kept_as_given_up(
    tmp_path: Path,
) -> None:
    async with open_test_store(tmp_path) as store:
        results = [
            await store.tx(
                inbound_rows.record_failure, *HERE, "e1", "x" * 900, number, expires_at=1000, most=3
            )
            for number in range(4)
        ]
        assert results == [False, False, True, True]
        assert await store.read(inbound_rows.count_dead_events) == {HERE: 1}
        await store.tx(inbound_rows.delete_old_rows, 1000)
        assert await store.read(inbound_rows.count_dead_events) == {}
