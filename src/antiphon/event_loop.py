"""The event loop of a process that hosts sessions.

uvloop is used if installed, because it costs less than asyncio's own loop. The garbage collector ignores what
exists at start and runs less often: reference counting frees most of what a run allocates, and collecting
the rest was a tenth of the cost of a run. The collector counts objects, not bytes, so it is also run when the
process has grown by many bytes.
"""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import AsyncGenerator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

T = TypeVar("T")
GROWTH_CHECK_SECONDS = 1.0
MIN_GROWTH_BYTES = (
    64 * 2**20
)  # growth since the last collection that triggers the next one; at least a quarter of the size


def run(main: Coroutine[Any, Any, T]) -> T:
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
    gc.enable()
    with asyncio.Runner(loop_factory=_choose_loop_factory()) as runner:
        return runner.run(_run_with_memory_bound(main))


async def _run_with_memory_bound(main: Coroutine[Any, Any, T]) -> T:
    async with run_in_background(_collect_when_grown()):
        return await main


@asynccontextmanager
async def run_in_background(work: Coroutine[Any, Any, object]) -> AsyncGenerator[None]:
    """Run a coroutine while the context is open; it is cancelled and awaited when the context is left."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _collect_when_grown() -> None:
    """Limits garbage by bytes, on systems that report the size of the process."""
    try:
        statm = os.open(
            "/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC
        )  # kept open, in case no more files can be opened later
    except OSError:
        return
    try:
        baseline = _read_resident_bytes(statm)
        while True:
            await asyncio.sleep(GROWTH_CHECK_SECONDS)
            size = _read_resident_bytes(statm)
            if size - baseline > max(MIN_GROWTH_BYTES, baseline // 4):
                gc.collect()
                baseline = _read_resident_bytes(statm)
            else:
                baseline = min(baseline, size)
    finally:
        os.close(statm)


def _read_resident_bytes(statm: int) -> int:
    return int(os.pread(statm, 256, 0).split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _choose_loop_factory() -> Any:
    try:
        import uvloop  # noqa: PLC0415 - only for a process that runs a loop
    except ImportError:
        return None
    return uvloop.new_event_loop
