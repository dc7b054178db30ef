"""Task rows: what a sub-agent was asked to do, how it ends, and who receives the report.

The destination and language of the report, and what happens to the child afterwards, are stored in the row when the
task begins. `subagents` decides what follows from a row.
"""

from __future__ import annotations

import hashlib
from typing import Literal, NamedTuple

import msgspec

from antiphon.engine.runs import run_queue
from antiphon.engine.sessions import session_rows
from antiphon.messages import Locale
from antiphon.store import Row, Tx
from antiphon.store.queries import Queries

SQL = Queries("tasks")
MILLISECONDS_PER_MINUTE = 60_000
MAX_ANCESTOR_LEVELS = 16  # levels searched upwards for a session that can receive a report

TaskAnnounce = Literal["channel", "parent", "none"]


class TaskOptions(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """How a task ends, decided when it begins."""

    announce: TaskAnnounce = "channel"
    cleanup: Literal["keep", "delete"] = "keep"
    mode: Literal["run", "session"] = "run"
    locale: Locale = "en"
    announce_ms: int = 90_000
    archive_minutes: int = 60
    transcripts: str = ""
    """The directory of transcript files; empty where none are written."""
    workspace: str | None = None
    workspace_below: str = ""
    """The child's directory in the workspace of its agent; empty in tasks of older releases."""
    attachments: str | None = None
    """The folder of the child's files (`attachments.write`)."""
    retain: bool = False
    """Whether the files stay when the child is archived."""
    mount_path: str | None = None
    requester_agent: str | None = None
    """The agent that requested the task, if it is not the requester's own agent."""


def decode_task_options(task: Row) -> TaskOptions:
    return msgspec.json.decode(task["options"], type=TaskOptions)


def compute_signature(agent_id: str, task: str) -> str:
    """Return a hash of agent and task text; tasks with the same signature likely fail for the same reason."""
    return hashlib.sha256(f"{agent_id}\n{' '.join(task.split())}".encode()).hexdigest()[:32]


async def load_task(tx: Tx, id: str) -> Row | None:
    return await tx.one(SQL.by_id, id=id)


async def reload_task(tx: Tx, task: Row) -> Row:
    row = await tx.one(SQL.by_n, n=task["n"])
    assert row is not None
    return row


async def load_task_of_child(tx: Tx, child_key: str) -> Row | None:
    """Return the latest task of a session; None if it is not a sub-agent."""
    return await tx.one(SQL.by_child, key=child_key)


async def load_known_task(tx: Tx, id: str, requester: int, digest: str) -> Row | None:
    """Return the task that this id was already used for, if any.

    Raises:
        Conflict: the id was used for another task or by another requester.
    """
    before = await load_task(tx, id)
    if before is not None and (before["requester"], before["digest"]) != (requester, digest):
        raise run_queue.build_idempotency_conflict_error(id)
    return before


async def list_tasks_of_requester(
    tx: Tx, requester: int, *, since: int, limit: int, max_characters: int
) -> list[Row]:
    """Return the active tasks of a session and those that ended since then, newest first, with texts cut."""
    return await tx.all(SQL.of_requester, requester=requester, since=since, limit=limit, chars=max_characters)


async def count_active_children(tx: Tx, requester: int) -> int:
    row = await tx.one(SQL.count_unsettled, requester=requester)
    return row["under_way"] if row else 0


async def list_latest_similar_tasks(tx: Tx, agent_id: str, task: str, limit: int) -> list[Row]:
    """Return the latest ended tasks with the same text for the same agent, newest first."""
    return await tx.all(SQL.latest_with_signature, signature=compute_signature(agent_id, task), limit=limit)


async def sum_usage(tx: Tx, child_key: str) -> Row:
    """Return the tokens and cost of all runs in a sub-agent's session."""
    row = await tx.one(SQL.sum_usage, key=child_key)
    assert row is not None
    return row


async def list_tasks_to_archive(tx: Tx, now: int, limit: int) -> list[Row]:
    return await tx.all(SQL.to_archive, now=now, limit=limit)


async def postpone_archive(tx: Tx, n: int, until: int) -> None:
    await tx.do(SQL.postpone_archive, n=n, later=until)


async def set_archived(tx: Tx, n: int, now: int) -> None:
    await tx.do(SQL.set_archived, n=n, now=now)


async def list_stalled_tasks(tx: Tx) -> list[Row]:
    """Return tasks that no run will advance."""
    return await tx.all(SQL.stalled)


class LivingRequester(NamedTuple):
    """The session that a report goes to, and the agent in it (`runs.agent_id`)."""

    session: Row
    agent_id: str | None


async def find_living_requester(tx: Tx, task: Row) -> LivingRequester | None:
    """Return the requester of a task or, if it was deleted, its nearest existing ancestor."""
    for _ in range(MAX_ANCESTOR_LEVELS):
        session = await session_rows.find_by_id(tx, task["requester"])
        if session is not None:
            return LivingRequester(session, decode_task_options(task).requester_agent)
        above = await load_task_of_child(tx, task["requester_key"])
        if above is None:
            return None
        task = above
    return None


async def count_awaited(tx: Tx, session: int) -> int:
    """Count the active sub-agents that can still wake a session; those stopped with it do not.

    The lock serializes this with the end of each sub-agent, which decides by the same count; otherwise the last one
    could go unnoticed.
    """
    await tx.lock(f"family:{session}")
    row = await tx.one(SQL.count_awaited, requester=session)
    return row["awaited"] if row else 0


class ContinuedTask(NamedTuple):
    """The task that a run continues, with the deadline of its first run; both None if there is none."""

    n: int | None = None
    deadline_at: int | None = None


async def continue_task(
    tx: Tx, child_key: str, run_id: str, *, even_announcing: bool = False
) -> ContinuedTask:
    """Make another run finish the current task of a session.

    The previous run may not have ended yet; its reply is then not the task's result.
    """
    task = await load_task_of_child(tx, child_key)
    phases = {"running", "waiting", *(["announcing"] if even_announcing else [])}
    if task is None or task["phase"] not in phases:
        return ContinuedTask()
    await tx.do(SQL.advance, n=task["n"], phase="running", current=run_id)
    first_run = await tx.one(SQL.run_deadline, id=task["id"])
    return ContinuedTask(task["n"], first_run["deadline_at"] if first_run else None)


async def replace_task_text(tx: Tx, n: int, text: str) -> None:
    """Replace what a sub-agent is to do, for its report and for lists."""
    await tx.do(SQL.replace_text, n=n, task=text)


async def record_announce_outcome(tx: Tx, task_n: int, state: str, now: int) -> None:
    """Record that the delivery of the report has settled, which starts the time until archiving."""
    task = await tx.one(SQL.by_n, n=task_n)
    if task is not None:
        await tx.do(
            SQL.set_announced,
            n=task_n,
            announced=state,
            archive_at=compute_archive_time(decode_task_options(task), now),
        )


def compute_archive_time(options: TaskOptions, now: int) -> int | None:
    if options.cleanup == "delete":
        return now
    if options.mode == "session" or options.archive_minutes == 0:
        return None
    return now + options.archive_minutes * MILLISECONDS_PER_MINUTE
