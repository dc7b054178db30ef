"""A runtime that limits its concurrent steps. A run that waits for something else holds no slot."""

from __future__ import annotations

import asyncio

from antiphon.messages import AssistantMessage
from antiphon.runtimes import Deltas, Prompt, Runtime


class ConcurrencyLimitedRuntime:
    """Wraps `runtime` and runs a step only while holding one of `slots`, which other runtimes may share."""

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
        """Does nothing: the wrapped runtime is closed by its owner."""
