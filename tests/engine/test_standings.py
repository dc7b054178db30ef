"""How the whole is doing, on both databases: silent replicas, what they left, and what waits for somebody."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from antiphon.clock import SystemClock
from antiphon.config import Config
from antiphon.engine.engine import Pace
from antiphon.host import hosting
from antiphon.operations import Message
from antiphon.operations.standings import Standing
from antiphon.paths import DATABASE
from antiphon.runtimes import Prompt
from antiphon.runtimes.function import FunctionRuntime
from bases import raw
from stage import MAIN, OPERATOR, soon

pytestmark = [pytest.mark.anyio, pytest.mark.requirement("W5")]


async def test_only_who_renews_its_lease_is_there(tmp_path: Path) -> None:
    async with hosting(Config(), tmp_path) as operations:
        now = SystemClock().now()
        insert = "INSERT INTO owners (id, lease_until) VALUES (?, ?)"
        raw(tmp_path / DATABASE, insert, "silent", now - 60_000)
        raw(tmp_path / DATABASE, insert, "other", now + 60_000)
        standing = await operations.standing(OPERATOR)
    assert standing == Standing(
        queued=0, running=0, idle_seconds=0, abandoned=0, replicas=2, pending=0, ambiguous=0, dead=0
    )


async def test_what_a_silent_replica_left_is_counted_as_abandoned(tmp_path: Path) -> None:
    started = asyncio.Event()

    async def never(prompt: Prompt) -> str:
        started.set()
        await asyncio.Event().wait()
        return ""

    functions = {"main": FunctionRuntime(never, history=False)}
    patient = Pace(lease=600, sweep=600)  # nobody mends it while the test looks
    async with hosting(Config(), tmp_path, functions=functions, pace=patient) as operations:
        await operations.submit(OPERATOR, Message(session=MAIN, content="go"))
        await soon(started)
        assert (await operations.standing(OPERATOR)).abandoned == 0
        raw(tmp_path / DATABASE, "UPDATE owners SET lease_until = 1")
        standing = await operations.standing(OPERATOR)
        assert (standing.running, standing.abandoned, standing.replicas) == (1, 1, 0)
