"""Runs functions of users in separate threads, since they may block for any time.

The gateway's own work in threads, such as looking up names, does not wait for them, and neither does its shutdown.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeAlias

MAX_FUNCTION_THREADS = 64  # calls at once; further ones wait for one that returns

_Outcome: TypeAlias = tuple[Any, BaseException | None]


class FunctionThreads:
    """Runs blocking functions. An abandoned one still counts until it returns."""

    def __init__(self, max_threads: int = MAX_FUNCTION_THREADS) -> None:
        self._free = asyncio.Semaphore(max_threads)

    async def run(self, function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        """Return what a function returns, or raise what it raises."""
        await self._free.acquire()
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[_Outcome] = loop.create_future()
        context = contextvars.copy_context()

        def finish(result: Any, error: BaseException | None) -> None:
            self._free.release()
            if not outcome.done():
                outcome.set_result((result, error))

        def work() -> None:
            result, error = None, None
            try:
                result = context.run(function, **arguments)
            except BaseException as caught:  # noqa: BLE001 - raised again where the call is awaited
                error = caught
            with suppress(RuntimeError):  # the event loop has ended
                loop.call_soon_threadsafe(finish, result, error)

        try:
            threading.Thread(target=work, name="python-tool", daemon=True).start()
        except RuntimeError:  # the system has no more threads
            self._free.release()
            raise
        result, error = await outcome
        if error is not None:
            raise error
        return result
