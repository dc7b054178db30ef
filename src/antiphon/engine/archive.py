"""Sub-agents whose time is over: out of the lists, or, where that was asked for, out of the store.

The clock of a task starts when its announcement has settled. What came of the task and what it cost stay either way.

A child is put away when nothing runs or waits in it, in one commit; only then its files are removed, and only after
that the task is on record as archived. Whoever dies in between leaves a task that is due, and all of it is done once
more: no file goes while its child is at work, and none is left behind.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from antiphon.engine import attachments, sessions, tasks
from antiphon.engine.tasks import Options
from antiphon.errors import AntiphonError
from antiphon.store import Row, Store, Tx

log = logging.getLogger(__name__)

BATCH = 50  # tasks in a sweep, which has other things to do; the next one comes soon
LATER = 60_000  # milliseconds after which a child that is busy is looked at again


async def sweep(store: Store, now: int) -> list[str]:
    """Keys of the sessions that were archived or deleted."""
    touched: list[str] = []
    for task in await store.read(_due, now):
        if await store.tx(_put_away, task, now):
            await asyncio.to_thread(_remove_files, tasks.read_options(task))
            await store.tx(_archived, task["n"], now)
            touched.append(task["child_key"])
    return touched


async def _due(tx: Tx, now: int) -> list[Row]:
    return await tx.all(tasks.SQL.to_archive, now=now, limit=BATCH)


async def _put_away(tx: Tx, task: Row, now: int) -> bool:
    """Whether the child is out of the way; if it has something to do, it is looked at again later."""
    if await tx.one(sessions.SQL.at_work, id=task["child"]):
        await tx.do(tasks.SQL.postpone_archive, n=task["n"], later=now + LATER)
        return False
    if tasks.read_options(task).cleanup == "keep":
        await tx.do(sessions.SQL.archive, id=task["child"], now=now)
    elif child := await tx.one(sessions.SQL.by_id, id=task["child"]):
        await sessions.forget(tx, child["id"], child["key"], now)
    return True


async def _archived(tx: Tx, n: int, now: int) -> None:
    await tx.do(tasks.SQL.archived, n=n, now=now)


def _remove_files(options: Options) -> None:
    if options.attachments is None or options.workspace is None:
        return
    if options.cleanup == "keep" and options.retain:
        return
    try:
        attachments.remove(Path(options.workspace), options.attachments)
    except AntiphonError as error:  # somebody changed the folder: theirs to look at, not ours to fight over
        log.warning("%s", error)
