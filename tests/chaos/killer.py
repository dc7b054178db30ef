"""What ends the processes of the crash suite, and what lets them end by themselves."""

from __future__ import annotations

import os
import signal
import sqlite3
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from antiphon.store.postgres.connection import PgServer
from chaos.moments import find_keepers
from support.app_fixture import BOUND, DATABASE
from support.commit_watcher import CommitWatcher

# Everything that is under way, read beside the engine: what an earlier process began has no one waiting for it.
UNFINISHED = """
SELECT EXISTS (SELECT 1 FROM runs WHERE state IN ('queued', 'running'))
    OR EXISTS (SELECT 1 FROM exchanges WHERE phase <> 'settled')
    OR EXISTS (SELECT 1 FROM tasks WHERE phase <> 'settled'
               OR (archived_at IS NULL AND options LIKE '%"cleanup":"delete"%'))
    OR EXISTS (SELECT 1 FROM deliveries WHERE state IN ('pending', 'sending'))
    OR EXISTS (SELECT 1 FROM exec_commands WHERE state IN ('starting', 'running'))
"""


@dataclass(frozen=True, slots=True)
class DatabaseLocation:
    """A database of PostgreSQL, and the file with its password."""

    url: str
    password: Path

    @classmethod
    def of(cls, words: Sequence[str]) -> DatabaseLocation | None:
        """From the command line: nothing, or both."""
        return cls(words[0], Path(words[1])) if words else None

    def settings(self) -> dict[str, Any]:
        """As a configuration names it; with few connections, for each costs a life more than most of its work."""
        return {"store": {"url": self.url, "password": {"file": str(self.password)}, "connections": 3}}


class Killer(CommitWatcher):
    """Counts the calls around commits. The one that was chosen, or a moment with a name, is this process's last.

    `keeper@<moment>` kills the keeper of `state_dir` instead, and `both@<moment>` the two of them.
    """

    def __init__(self, at: str, place: DatabaseLocation | None = None, state_dir: Path | None = None) -> None:
        super().__init__()
        self._place = place
        self._state_dir = state_dir
        self.count = 0
        victim, _, self._at = at.rpartition("@")
        self._kills_keeper, self._kills_process = victim in ("keeper", "both"), victim != "keeper"

    def __call__(self, phase: str) -> None:
        self.count += 1
        self.reach(str(self.count))
        super().__call__(phase)

    def reach(self, moment: str) -> None:
        if moment != self._at:
            return
        if self._kills_keeper and self._state_dir:
            for keeper in find_keepers(self._state_dir):
                os.kill(keeper, signal.SIGKILL)
                os.write(1, b"killed keeper\n")
        if self._kills_process:
            os.kill(os.getpid(), signal.SIGKILL)

    async def wait_until_idle(self, state_dir: Path) -> None:
        """Until nothing is under way. How long that may take is the alarm's business."""
        async with open_unfinished_check(state_dir, self._place) as unfinished:

            async def over() -> bool:
                return not await unfinished()

            await self.until(over, None)


@asynccontextmanager
async def open_unfinished_check(
    state_dir: Path, place: DatabaseLocation | None
) -> AsyncGenerator[Callable[[], Awaitable[bool]]]:
    """Whether anything is under way, asked past the engine."""
    if place is None:
        with closing(sqlite3.connect(f"file:{state_dir / DATABASE}?mode=ro", uri=True)) as file:

            async def look() -> bool:
                return bool(file.execute(UNFINISHED).fetchone()[0])

            yield look
        return
    connection = await PgServer(place.url, place.password.read_text()).connect()
    try:
        yield lambda: connection.fetchval(UNFINISHED)
    finally:
        await connection.close(timeout=BOUND)
