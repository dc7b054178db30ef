"""Sub-agents whose time is over: out of the lists, or, where that was asked for, out of the store.

The clock of a task starts when its announcement has settled. What came of the task and what it cost stay either way.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from antiphon.engine import attachments, sessions, tasks
from antiphon.engine.tasks import Options
from antiphon.errors import AntiphonError, Conflict
from antiphon.store import Row, Store, Tx

log = logging.getLogger(__name__)

BATCH = 50  # tasks at a time
LATER = 60_000  # milliseconds after which a child that is busy is looked at again


async def sweep(store: Store, now: int) -> list[str]:
    """Keys of the sessions that were archived or deleted."""
    touched: list[str] = []
    while True:
        due = await store.read(_due, now)
        for task in due:
            await asyncio.to_thread(_remove_files, tasks.read_options(task))
            if await store.tx(_put_away, task, now):
                touched.append(task["child_key"])
        if len(due) < BATCH:
            return touched


async def _due(tx: Tx, now: int) -> list[Row]:
    return await tx.all(tasks.SQL.to_archive, now=now, limit=BATCH)


async def _put_away(tx: Tx, task: Row, now: int) -> bool:
    child = await tx.one(sessions.SQL.by_id, id=task["child"])
    if child is not None:
        try:
            await sessions.check_idle(tx, child)
        except Conflict:
            await tx.do(tasks.SQL.postpone_archive, n=task["n"], later=now + LATER)
            return False
        if tasks.read_options(task).cleanup == "delete":
            await sessions.forget(tx, child["id"], child["key"])
        else:
            await tx.do(sessions.SQL.archive, id=child["id"], now=now)
    await tx.do(tasks.SQL.archived, n=task["n"], now=now)
    return child is not None


def _remove_files(options: Options) -> None:
    if options.attachments is None or options.workspace is None:
        return
    if options.cleanup == "keep" and options.retain:
        return
    try:
        attachments.remove(Path(options.workspace), options.attachments)
    except AntiphonError as error:  # somebody changed the folder: theirs to look at, not ours to fight over
        log.warning("%s", error)
