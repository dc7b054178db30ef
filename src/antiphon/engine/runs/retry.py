"""Retries commits that failed because the disk was full.

The results of a run were paid for, and its tool calls may have had effects, so they must not be lost. A full disk
leaves nothing of a commit behind, so the same commit can be repeated. After any other failure the outcome of the commit
is unknown, and the run is resumed from its transcript.
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

STORE_FULL_RETRY_SECONDS = 1.0  # on average; jitter keeps waiting runs from retrying all at once


async def retry_while_store_full(commit: Callable[[], Awaitable[T]]) -> T:
    """Repeat a commit until the store has room for it. Cancel the task to give up."""
    is_logged = False
    while True:
        try:
            return await commit()
        except StoreFull as error:
            if not is_logged:
                log.warning("Commit failed, disk full; retrying: %s", error)
            is_logged = True
            await asyncio.sleep(STORE_FULL_RETRY_SECONDS * random.uniform(0.5, 1.5))  # noqa: S311 - no secret
