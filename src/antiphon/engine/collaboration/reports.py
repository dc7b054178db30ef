"""Reports of sub-agents: what they say, and the session that receives them.

The status comes from the runtime; a model may word the result, but never decides the outcome. `prompts` formats a
report, and `subagents` decides when one is sent.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from antiphon import keys
from antiphon.engine.collaboration import prompts, task_rows
from antiphon.engine.collaboration.prompts import TaskReport, TaskStats
from antiphon.engine.collaboration.task_rows import ContinuedTask, TaskOptions
from antiphon.engine.runs import run_queue
from antiphon.engine.runs.effects import NO_EFFECTS, Effects
from antiphon.engine.runs.run_queue import NOTE_ORIGIN, WAKE_ORIGIN, Submission
from antiphon.messages import INJECTED_MODEL, AssistantMessage, Provenance, TextBlock, UserMessage
from antiphon.store import Row, Tx
from antiphon.tool_selection import SPAWN_TOOL_NAME

SUBAGENT_RESULT_KIND = "subagent_result"
MAX_RESULT_CHARACTERS = 100_000  # of a result in a report


async def build_report(tx: Tx, task: Row, announcement: str | None) -> TaskReport:
    """Build the report of an ended task. `announcement` is the child's own wording, if it gave one."""
    result, source, notes = task["result"], task["result_source"], None
    if announcement is not None:
        worded, notes = prompts.parse_announce(announcement)
        if worded:
            result, source = worded, "announce"
    if task["outcome"] != "ok" and task["error"]:
        notes = "\n".join(filter(None, [notes, task["error"]]))
    if result and len(result) > MAX_RESULT_CHARACTERS:
        left_out = len(result) - MAX_RESULT_CHARACTERS
        notes = "\n".join(filter(None, [notes, f"{left_out} characters of the result were left out."]))
        result = result[:MAX_RESULT_CHARACTERS]
    return TaskReport(
        status=task["outcome"],
        result=result,
        result_source=source,
        notes=notes,
        stats=await _load_stats(tx, task),
    )


async def _load_stats(tx: Tx, task: Row) -> TaskStats:
    usage = await task_rows.sum_usage(tx, task["child_key"])
    return TaskStats(
        runtime_ms=task["ended_at"] - task["started_at"] if task["started_at"] else None,
        tokens_in=usage["input"],
        tokens_out=usage["output"],
        cost=usage["cost"],
        session_key=task["child_key"],
        session_id=task["child_session_id"],
        transcript_path=_find_transcript_path(task_rows.decode_task_options(task), task["child_session_id"]),
        model=task["model"],
    )


def _find_transcript_path(options: TaskOptions, session_id: str) -> str | None:
    """Return the path of the child's transcript file, if it exists and is not deleted with the child."""
    if not options.transcripts or options.cleanup == "delete":
        return None
    path = f"{options.transcripts}/{session_id}.jsonl"
    return path if Path(path).is_file() else None


class QueuedReport(NamedTuple):
    """The effects of queueing a report, and its run if the requester itself receives it."""

    effects: Effects = NO_EFFECTS
    run_id: str | None = None


async def queue_report(tx: Tx, task: Row, text: str, now: int) -> QueuedReport:
    """Queue a report for the transcript of the requester, or of its nearest ancestor that exists.

    The report waits its turn in the lane, so it is placed between two runs, never between a call and its result.
    """
    requester = await task_rows.find_living_requester(tx, task)
    if requester is None:
        return QueuedReport()
    session = requester.session
    is_own_requester = session["id"] == task["requester"]
    if not is_own_requester:
        text = f"{text}\n\n{prompts.format_passed_up_note(keys.display_full_key(task['requester_key']))}"
    announce = task_rows.decode_task_options(task).announce
    wakes = announce == "parent" and bool(task["wakes"]) and session["yielded"] is None
    run_id = f"note:{task['id']}"
    own_task = await task_rows.continue_task(tx, session["key"], run_id) if wakes else ContinuedTask()
    report = Submission(
        run_id=run_id,
        session=session["id"],
        session_key=session["key"],
        origin=WAKE_ORIGIN if wakes else NOTE_ORIGIN,
        message=_build_message(task, text, now, by_user=wakes),
        deadline_at=own_task.deadline_at,
        task=own_task.n,
        chain=task["chain"] if wakes else None,
        hop=task["hop"] - 1,
        agent_id=requester.agent_id if wakes else None,
    )
    effects = Effects.queue(await run_queue.submit_follow_up(tx, report, now))
    return QueuedReport(effects, run_id if is_own_requester else None)


def _build_message(task: Row, text: str, now: int, *, by_user: bool) -> UserMessage | AssistantMessage:
    provenance = Provenance(
        kind=SUBAGENT_RESULT_KIND,
        source_session_key=task["child_key"],
        source_tool=SPAWN_TOOL_NAME,
        chain_id=task["chain"],
    )
    if by_user:
        return UserMessage(content=text, timestamp=now, provenance=provenance)
    return AssistantMessage(
        content=[TextBlock(text=text)],
        timestamp=now,
        stop_reason="stop",
        provider="antiphon",
        model=INJECTED_MODEL,
        provenance=provenance,
    )
