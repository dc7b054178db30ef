"""A runtime whose steps wait for one of a number of slots. Whoever waits for something else holds none."""

from __future__ import annotations

import asyncio

from antiphon.messages import AssistantMessage
from antiphon.runtimes import Deltas, Prompt, Runtime


class ConcurrencyLimitedRuntime:
    """`runtime`, at most as many steps of it at once as `slots` has; it is shared with other runtimes."""

    def __init__(self, runtime: Runtime, slots: asyncio.Semaphore) -> None:
        self._runtime = runtime
        self._slots = slots

    @property
    def context_window(self) -> int | None:
        return self._runtime.context_window

    @property
    def reads_history(self) -> bool:
        return self._runtime.reads_history

    async def step(self, prompt: Prompt, deltas: Deltas) -> AssistantMessage:
        async with self._slots:
            return await self._runtime.step(prompt, deltas)

    async def close(self) -> None:
        """It is closed by whoever opened it."""
