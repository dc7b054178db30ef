"""What every lane engine promises. Local now; NATS joins the list."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Callable

import pytest

from antiphon.errors import StoreError
from antiphon.lanes import LaneEngine
from antiphon.lanes.local import LocalLanes

pytestmark = pytest.mark.anyio

BOUND = 10.0


@pytest.fixture(params=[LocalLanes])
def lanes(request: pytest.FixtureRequest) -> LaneEngine:
    make: Callable[[], LaneEngine] = request.param
    return make()


class Work:
    """Lanes with jobs, and a drain that works them off as the engine does."""

    def __init__(self) -> None:
        self.waiting: Counter[int] = Counter()
        self.done: Counter[int] = Counter()
        self.active: Counter[int] = Counter()
        self.most = 0
        self.all_done = asyncio.Event()
        self.total = 0
        self.hold: asyncio.Event | None = None
        self.begun = asyncio.Event()

    async def drain(self, lane: int) -> None:
        self.active[lane] += 1
        assert self.active[lane] == 1, "two drains of one lane"
        self.most = max(self.most, sum(self.active.values()))
        self.begun.set()
        try:
            if self.hold:
                await self.hold.wait()
            while self.waiting[lane]:
                self.waiting[lane] -= 1
                await asyncio.sleep(0)
                self.done[lane] += 1
            await asyncio.sleep(0)  # the moment between the last look and going idle
            if self.done.total() == self.total:
                self.all_done.set()
        finally:
            self.active[lane] -= 1


@pytest.mark.requirement("G9", "G13")
@pytest.mark.parametrize("seed", range(5))
async def test_no_activation_is_lost_and_no_lane_is_drained_twice(lanes: LaneEngine, seed: int) -> None:
    """The race between busy and idle: a job is added, then the lane is activated, at any moment of a drain."""
    dice = random.Random(seed)
    work = Work()
    work.total = 400
    await lanes.start(work.drain)
    for _ in range(work.total):
        lane = dice.randrange(5)
        work.waiting[lane] += 1
        await lanes.activate(lane)
        for _ in range(dice.randrange(5)):
            await asyncio.sleep(0)
    await asyncio.wait_for(work.all_done.wait(), BOUND)
    assert work.most > 1
    await lanes.stop(0)


async def test_a_drain_that_fails_is_told_of_and_the_lane_goes_on(
    lanes: LaneEngine, caplog: pytest.LogCaptureFixture
) -> None:
    again = asyncio.Event()
    failures: list[Exception] = [ValueError("a bug"), StoreError("The disk is full.", "Free some space.")]

    async def drain(lane: int) -> None:
        if failures:
            raise failures.pop()
        again.set()

    caplog.set_level(logging.ERROR)
    await lanes.start(drain)
    async with asyncio.timeout(BOUND):
        while not again.is_set():
            await lanes.activate(1)
            await asyncio.sleep(0)
    assert "The disk is full." in caplog.text and "a bug" in caplog.text
    await lanes.stop(0)


async def test_stopping_cancels_and_takes_nothing_new(lanes: LaneEngine) -> None:
    work = Work()
    work.hold = asyncio.Event()
    await lanes.start(work.drain)
    await lanes.activate(1)
    await asyncio.wait_for(work.begun.wait(), BOUND)
    await asyncio.wait_for(lanes.stop(0), BOUND)
    assert work.active.total() == 0
    work.begun.clear()
    await lanes.activate(2)
    await asyncio.sleep(0)
    assert not work.begun.is_set()


async def test_stopping_with_grace_lets_a_drain_end(lanes: LaneEngine) -> None:
    work = Work()
    work.hold = asyncio.Event()
    work.waiting[1] = work.total = 3
    await lanes.start(work.drain)
    await lanes.activate(1)
    await asyncio.wait_for(work.begun.wait(), BOUND)
    stopping = asyncio.create_task(lanes.stop(BOUND))
    await asyncio.sleep(0)
    work.hold.set()
    await asyncio.wait_for(stopping, BOUND)
    assert work.done[1] == 3


async def test_before_the_start_a_hint_is_nothing(lanes: LaneEngine) -> None:
    await lanes.activate(1)
    await lanes.stop(0)


@pytest.mark.requirement("G16")
async def test_an_abandoned_drain_holds_no_lane(lanes: LaneEngine) -> None:
    drains: list[int] = []
    stuck, second, busy = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def drain(lane: int) -> None:
        drains.append(lane)
        if len(drains) == 1:
            await stuck.wait()
        else:
            second.set()
            await busy.wait()

    await lanes.start(drain)
    await lanes.activate(1)
    await asyncio.sleep(0)
    await lanes.activate(1)  # has to wait for the first drain
    await asyncio.sleep(0)
    assert drains == [1]
    await lanes.abandon(1)
    await lanes.abandon(2)  # nothing there: nothing happens
    await lanes.activate(1)
    await asyncio.wait_for(second.wait(), BOUND)
    await lanes.activate(1)  # for the second drain, and not for the first when that comes back
    stuck.set()
    for _ in range(5):
        await asyncio.sleep(0)
    assert drains == [1, 1]
    busy.set()
    for _ in range(5):
        await asyncio.sleep(0)
    assert drains == [1, 1, 1]
    await lanes.stop(0)
