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

from antiphon.engine.collaboration import attachments, subagents
from antiphon.engine.collaboration.subagents import TaskOptions
from antiphon.engine.sessions import session_rows
from antiphon.errors import AntiphonError
from antiphon.store import Row, Store, Tx

log = logging.getLogger(__name__)

MAX_TASKS_PER_SWEEP = 50  # tasks in a sweep, which has other things to do; the next one comes soon
BUSY_CHILD_RETRY_MS = 60_000  # milliseconds after which a child that is busy is looked at again


async def archive_finished_subagents(store: Store, now: int) -> list[str]:
    """Keys of the sessions that were archived or deleted."""
    touched: list[str] = []
    for task in await store.read(_list_due_tasks, now):
        if await store.tx(_archive_or_delete_child, task, now):
            await asyncio.to_thread(_remove_files, subagents.decode_task_options(task))
            await store.tx(_mark_archived, task["n"], now)
            touched.append(task["child_key"])
    return touched


async def _list_due_tasks(tx: Tx, now: int) -> list[Row]:
    return await tx.all(subagents.SQL.to_archive, now=now, limit=MAX_TASKS_PER_SWEEP)


async def _archive_or_delete_child(tx: Tx, task: Row, now: int) -> bool:
    """Whether the child is out of the way; if it has something to do, it is looked at again later."""
    if await tx.one(session_rows.SQL.at_work, id=task["child"]):
        await tx.do(subagents.SQL.postpone_archive, n=task["n"], later=now + BUSY_CHILD_RETRY_MS)
        return False
    if subagents.decode_task_options(task).cleanup == "keep":
        await tx.do(session_rows.SQL.archive, id=task["child"], now=now)
    elif child := await tx.one(session_rows.SQL.by_id, id=task["child"]):
        await session_rows.delete_session(tx, child["id"], child["key"], now)
    return True


async def _mark_archived(tx: Tx, n: int, now: int) -> None:
    await tx.do(subagents.SQL.archived, n=n, now=now)


def _remove_files(options: TaskOptions) -> None:
    if options.attachments is None or options.workspace is None:
        return
    if options.cleanup == "keep" and options.retain:
        return
    try:
        attachments.remove(Path(options.workspace), options.attachments)
    except AntiphonError as error:  # somebody changed the folder: theirs to look at, not ours to fight over
        log.warning("%s", error)
