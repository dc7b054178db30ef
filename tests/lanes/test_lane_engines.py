"""What every lane engine promises: the one of a process, and the one of several."""

from __future__ import annotations

import asyncio
import logging
import random
import uuid
from collections.abc import AsyncIterator

import pytest

from antiphon.errors import StoreError
from antiphon.lanes import LaneEngine
from antiphon.lanes.local import LocalLanes
from antiphon.lanes.nats import NatsLanes
from cluster.servers import NatsServer
from lanes.work import BOUND, Work

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["local", "nats"])
async def lanes(request: pytest.FixtureRequest) -> AsyncIterator[LaneEngine]:
    if request.param == "local":
        engine: LaneEngine = LocalLanes()
    else:
        server: NatsServer = request.getfixturevalue("nats")
        engine = NatsLanes(server.servers(), namespace=uuid.uuid4().hex)
    yield engine
    await engine.stop(0)
    await engine.close()


@pytest.mark.requirement("G9", "G13")
@pytest.mark.parametrize("seed", range(5))
async def test_no_activation_is_lost_and_no_lane_is_drained_twice(lanes: LaneEngine, seed: int) -> None:
    """The race between busy and idle: a job is added, then the lane is activated, at any moment of a drain."""
    rng = random.Random(seed)
    work = Work()
    await lanes.start(work.drain(), work.waiting)
    for _ in range(400):
        lane = rng.randrange(5)
        work.jobs[lane] += 1
        await lanes.activate(lane)
        for _ in range(rng.randrange(5)):
            await asyncio.sleep(0)
    await work.until(lambda: work.done.total() == 400)
    assert work.most > 1
    assert work.doubled == 0


async def test_a_failed_drain_is_logged_and_the_lane_continues(
    lanes: LaneEngine, caplog: pytest.LogCaptureFixture
) -> None:
    failures: list[Exception] = [ValueError("a bug"), StoreError("The disk is full.", "Free some space.")]
    looked: asyncio.Queue[bool] = asyncio.Queue()

    async def drain(lane: int) -> None:
        looked.put_nowait(bool(failures))
        if failures:
            raise failures.pop()

    caplog.set_level(logging.ERROR)
    await lanes.start(drain)
    failed = True
    while failed:  # as the sweeper does
        await lanes.activate(1)
        failed = await asyncio.wait_for(looked.get(), BOUND)
    assert "The disk is full." in caplog.text and "a bug" in caplog.text


async def test_a_lane_that_is_given_back_early_is_drained_to_its_end(lanes: LaneEngine) -> None:
    """A drain may stop after some runs, so that others have their turn."""
    left = {1: 5, 2: 1}
    turns: list[int] = []
    ended = asyncio.Event()

    async def drain(lane: int) -> bool:
        turns.append(lane)
        left[lane] -= 1
        if not any(left.values()):
            ended.set()
        return left[lane] > 0

    await lanes.start(drain)
    await lanes.activate(1)
    await lanes.activate(2)
    await asyncio.wait_for(ended.wait(), BOUND)
    assert turns.count(1) == 5 and turns.count(2) == 1
    assert turns.index(2) < 5


async def test_stopping_cancels_and_takes_nothing_new(lanes: LaneEngine) -> None:
    work = Work()
    work.hold = asyncio.Event()
    await lanes.start(work.drain())
    await lanes.activate(1)
    await work.until(lambda: work.active[1] == 1)
    await asyncio.wait_for(lanes.stop(0), BOUND)
    assert work.active.total() == 0
    await lanes.activate(2)
    await asyncio.sleep(0)
    assert work.looks == {1: 1}


async def test_stopping_with_grace_lets_a_drain_end(lanes: LaneEngine) -> None:
    work = Work()
    work.hold = asyncio.Event()
    work.jobs[1] = 3
    await lanes.start(work.drain())
    await lanes.activate(1)
    await work.until(lambda: work.active[1] == 1)
    stopping = asyncio.create_task(lanes.stop(BOUND))
    await asyncio.sleep(0)
    work.hold.set()
    await asyncio.wait_for(stopping, BOUND)
    assert work.done[1] == 3


async def test_a_hint_before_the_start_has_no_effect(lanes: LaneEngine) -> None:
    await lanes.activate(1)
    await lanes.abandon(1)


@pytest.mark.requirement("G16")
async def test_an_abandoned_drain_holds_no_lane(lanes: LaneEngine) -> None:
    drains: asyncio.Queue[int] = asyncio.Queue()
    stuck, busy = asyncio.Event(), asyncio.Event()
    ended = asyncio.Event()
    first = True

    async def drain(lane: int) -> None:
        nonlocal first
        mine, first = first, False
        drains.put_nowait(lane)
        if not mine:
            await busy.wait()
            return
        while not stuck.is_set():  # something that does not know how to stop
            try:
                await stuck.wait()
            except asyncio.CancelledError:
                continue
        ended.set()

    await lanes.start(drain)
    await lanes.activate(1)
    await asyncio.wait_for(drains.get(), BOUND)
    await lanes.activate(1)  # has to wait for the first drain
    await asyncio.sleep(0)
    assert drains.empty()
    await lanes.abandon(1)
    await lanes.abandon(2)  # nothing there: nothing happens
    await lanes.activate(1)
    await asyncio.wait_for(drains.get(), BOUND)
    await lanes.activate(1)  # for the second drain, and not for the first when that comes back
    stuck.set()
    await asyncio.wait_for(ended.wait(), BOUND)
    for _ in range(5):
        await asyncio.sleep(0)
    assert drains.empty()
    busy.set()
    await asyncio.wait_for(drains.get(), BOUND)
