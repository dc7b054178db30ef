"""The event loop of a process that hosts sessions.

uvloop does the same as asyncio's own loop for less; where it cannot be had, asyncio's own will do. The garbage
collector is told that what exists at start stays, and to look less often: most of what a run makes is gone by
reference counting alone, and the collector's passes over the rest were a tenth of the cost of a run.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
    with asyncio.Runner(loop_factory=_factory()) as runner:
        return runner.run(main)


def _factory() -> Any:
    try:
        import uvloop  # noqa: PLC0415 - only for a process that runs a loop
    except ImportError:
        return None
    return uvloop.new_event_loop
