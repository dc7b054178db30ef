"""Waiting for room on the disk with a commit that must not be lost.

What a run has come to was paid for, and calls may have had effects. A full disk has kept nothing of a commit, so the
same one can be made again; any other failure leaves it open what became of it, and the run is taken up from its
transcript.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

from antiphon.errors import StoreFull

T = TypeVar("T")

log = logging.getLogger(__name__)

STORE_FULL_RETRY_SECONDS = (
    1.0  # seconds between two tries, more or less: those that wait are not to come all at once
)


async def retry_while_store_full(commit: Callable[[], Awaitable[T]]) -> T:
    """Make a commit, however often that takes. Whoever no longer wants it cancels this."""
    told = False
    while True:
        try:
            return await commit()
        except StoreFull as error:
            if not told:
                log.warning("What a run came to waits for room: %s", error)
            told = True
            await asyncio.sleep(STORE_FULL_RETRY_SECONDS * random.uniform(0.5, 1.5))  # noqa: S311 - no secret
