"""Keepers that tests have started, and the processes of commands."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import psutil

from antiphon.workspace import keeper

GONE_BOUND_SECONDS = 15.0  # it is promised within 2 s, which a busy machine does not keep


def find_keeper(state_dir: Path) -> psutil.Process | None:
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if str(state_dir / "keeper") in process.cmdline() and keeper.PROGRAM_PATH in process.cmdline():
                return process
    return None


def end_keeper(state_dir: Path) -> None:
    """End the keeper of a directory with its commands, if it has one."""
    if process := find_keeper(state_dir):
        process.terminate()
        try:
            process.wait(10)
        except psutil.TimeoutExpired:
            process.kill()


def find_marked(marker: str) -> list[int]:
    """Return the processes with the marker on their command line, without those that were there before the tests."""
    found: list[int] = []
    began = psutil.Process().create_time()
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if (
                marker in " ".join(process.cmdline())
                and process.pid != os.getpid()
                and process.create_time() >= began
            ):
                found.append(process.pid)
    return found


async def wait_until_true(condition: Callable[[], Awaitable[bool]], seconds: float = 20.0) -> None:
    async with asyncio.timeout(seconds):
        while not await condition():  # noqa: ASYNC110 - processes have no event
            await asyncio.sleep(0.01)


async def wait_until_gone(marker: str, seconds: float = GONE_BOUND_SECONDS) -> None:
    async def is_gone() -> bool:
        return not find_marked(marker)

    await wait_until_true(is_gone, seconds)


async def wait_until_running(marker: str, seconds: float = 20.0) -> None:
    async def is_running() -> bool:
        return bool(find_marked(marker))

    await wait_until_true(is_running, seconds)
