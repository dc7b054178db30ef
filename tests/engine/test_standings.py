"""How the whole is doing, on both databases: silent replicas, what they left, and what waits for a person."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from antiphon.app import open_app_operations
from antiphon.clock import SystemClock
from antiphon.config import Config
from antiphon.engine.supervisor import EngineTimings
from antiphon.operations.types import IncomingMessage, SystemStatus
from antiphon.paths import DATABASE_FILE_NAME
from antiphon.runtimes import Prompt
from antiphon.runtimes.function import FunctionRuntime
from support.app_fixture import MAIN, OPERATOR, wait_for_event
from support.databases import query_database

pytestmark = [pytest.mark.anyio, pytest.mark.requirement("W5")]


async def test_only_who_renews_its_lease_is_there(tmp_path: Path) -> None:
    async with open_app_operations(Config(), tmp_path) as operations:
        now = SystemClock().now()
        insert = "INSERT INTO owners (id, lease_until) VALUES (?, ?)"
        query_database(tmp_path / DATABASE_FILE_NAME, insert, "silent", now - 60_000)
        query_database(tmp_path / DATABASE_FILE_NAME, insert, "other", now + 60_000)
        standing = await operations.status.get(OPERATOR)
    assert standing == SystemStatus(
        queued=0,
        running=0,
        oldest_unclaimed_run_seconds=0,
        abandoned=0,
        replicas=2,
        pending=0,
        ambiguous=0,
        dead=0,
    )


async def test_what_a_silent_replica_left_is_counted_as_abandoned(tmp_path: Path) -> None:
    started = asyncio.Event()

    async def never(prompt: Prompt) -> str:
        started.set()
        await asyncio.Event().wait()
        return ""

    functions = {"main": FunctionRuntime(never, history=False)}
    patient = EngineTimings(
        lease_seconds=600, sweep_interval_seconds=600
    )  # nothing repairs it while the test looks
    async with open_app_operations(Config(), tmp_path, functions=functions, timings=patient) as operations:
        await operations.messages.submit(OPERATOR, IncomingMessage(session=MAIN, content="go"))
        await wait_for_event(started)
        assert (await operations.status.get(OPERATOR)).abandoned == 0
        query_database(tmp_path / DATABASE_FILE_NAME, "UPDATE owners SET lease_until = 1")
        standing = await operations.status.get(OPERATOR)
        assert (standing.running, standing.abandoned, standing.replicas) == (1, 1, 0)
