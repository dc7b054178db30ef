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

from antiphon.engine.collaboration import attachments, task_rows
from antiphon.engine.collaboration.task_rows import TaskOptions
from antiphon.engine.sessions import session_rows
from antiphon.engine.sessions.retention import RemovedSession
from antiphon.errors import AntiphonError
from antiphon.store import Row, Store, Tx

log = logging.getLogger(__name__)

MAX_TASKS_PER_SWEEP = 50  # keeps a sweep short; the next one comes soon
BUSY_CHILD_RETRY_MS = 60_000


async def archive_finished_subagents(store: Store, now: int) -> list[RemovedSession]:
    """Archive or delete the children of due tasks. Returns their sessions."""
    archived: list[RemovedSession] = []
    for task in await store.read(task_rows.list_tasks_to_archive, now, MAX_TASKS_PER_SWEEP):
        if await store.tx(_archive_or_delete_child, task, now):
            await asyncio.to_thread(_remove_files, task_rows.decode_task_options(task))
            await store.tx(task_rows.set_archived, task["n"], now)
            archived.append(RemovedSession(task["child_key"], task["child_session_id"]))
    return archived


async def _archive_or_delete_child(tx: Tx, task: Row, now: int) -> bool:
    """Archive or delete a child. False if it is busy; then its task is postponed."""
    if await session_rows.find_unfinished_run(tx, task["child"]):
        await task_rows.postpone_archive(tx, task["n"], now + BUSY_CHILD_RETRY_MS)
        return False
    if task_rows.decode_task_options(task).cleanup == "keep":
        await session_rows.archive_session(tx, task["child"], now)
    elif child := await session_rows.find_by_id(tx, task["child"]):
        await session_rows.delete_session(tx, child["id"], child["key"], now)
    return True


def _remove_files(options: TaskOptions) -> None:
    if options.attachments is None or options.workspace is None:
        return
    if options.cleanup == "keep" and options.retain:
        return
    try:
        attachments.remove(Path(options.workspace), options.attachments, below=options.workspace_below)
    except AntiphonError as error:  # the folder was changed by another program, so it is left alone
        log.warning("%s", error)
