"""Archives the sessions of finished sub-agents, or deletes them if the spawn asked for that.

The time until then starts when the task's announcement has settled. The task's result and cost are kept either way.

A child is archived or deleted in one commit, when nothing runs or waits in it. Then its files are removed, and finally
the task is marked as archived. After a crash in between, the task is still due and all steps are repeated: no file is
removed while its child is at work, and none is left behind.
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

MAX_TASKS_PER_SWEEP = 50  # keeps a sweep short; the next one comes soon
BUSY_CHILD_RETRY_MS = 60_000


async def archive_finished_subagents(store: Store, now: int) -> list[str]:
    """Archive or delete the children of due tasks. Returns the keys of their sessions."""
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
    """Archive or delete a child. False if it is busy; then its task is postponed."""
    if await tx.one(session_rows.SQL.running_or_queued, id=task["child"]):
        await tx.do(subagents.SQL.postpone_archive, n=task["n"], later=now + BUSY_CHILD_RETRY_MS)
        return False
    if subagents.decode_task_options(task).cleanup == "keep":
        await tx.do(session_rows.SQL.archive, id=task["child"], now=now)
    elif child := await tx.one(session_rows.SQL.by_id, id=task["child"]):
        await session_rows.delete_session(tx, child["id"], child["key"], now)
    return True


async def _mark_archived(tx: Tx, n: int, now: int) -> None:
    await tx.do(subagents.SQL.set_archived, n=n, now=now)


def _remove_files(options: TaskOptions) -> None:
    if options.attachments is None or options.workspace is None:
        return
    if options.cleanup == "keep" and options.retain:
        return
    try:
        attachments.remove(Path(options.workspace), options.attachments)
    except AntiphonError as error:  # the folder was changed by another program, so it is left alone
        log.warning("%s", error)
