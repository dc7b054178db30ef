"""Sub-agent tasks, from the spawn to the report and the archiving of the child session.

    running ──▶ waiting (for what it spawned itself) ──▶ announcing ──▶ settled
       └──────────────────────────────────────────────────────▲

The session, its first run and the task are created in one commit, and so are the end of a run and its follow-up work.
The status comes from the runtime; a model may word the result, but never decides the outcome. The destination and
language of the report, and what happens to the child afterwards, are stored in the row when the task begins.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from antiphon import keys
from antiphon.engine.collaboration import prompts, yields
from antiphon.engine.collaboration.chains import ChainLink
from antiphon.engine.collaboration.permissions import SPAWN_TOOL_NAME, SubagentPermissions
from antiphon.engine.collaboration.prompts import TaskReport, TaskStats
from antiphon.engine.outbox import delivery_rows, sanitize
from antiphon.engine.outbox.delivery_rows import Destination, NewDelivery
from antiphon.engine.runs import run_queue
from antiphon.engine.runs.effects import DELIVERY_POSTED, NO_EFFECTS, CompletedStep, Effects, RunOutcome
from antiphon.engine.runs.run_queue import ANNOUNCE_ORIGIN, NOTE_ORIGIN, WAKE_ORIGIN, AcceptedRun, Submission
from antiphon.engine.sessions import session_rows
from antiphon.engine.sessions.session_rows import NewSession
from antiphon.errors import InvalidInput
from antiphon.messages import (
    INJECTED_MODEL,
    AssistantMessage,
    Provenance,
    TextBlock,
    ToolResult,
    UserMessage,
    decode_message,
)
from antiphon.store import Row, Tx
from antiphon.store.queries import Queries

SQL = Queries("tasks")
SESSIONS_SQL = Queries("sessions")
RUNS_SQL = Queries("runs")
SUBAGENT_RESULT_KIND = "subagent_result"
MILLISECONDS_PER_MINUTE = 60_000
MAX_ANCESTOR_LEVELS = 16  # levels searched upwards for a session that can receive a report
MAX_RESULT_CHARACTERS = 100_000  # of a result in a report

TaskAnnounce = Literal["channel", "parent", "none"]


class TaskOptions(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """How a task ends, decided when it begins."""

    announce: TaskAnnounce = "channel"
    cleanup: Literal["keep", "delete"] = "keep"
    mode: Literal["run", "session"] = "run"
    locale: Literal["en", "pt"] = "en"
    announce_ms: int = 90_000
    archive_minutes: int = 60
    transcripts: str = ""
    """The directory of transcript files; empty where none are written."""
    workspace: str | None = None
    attachments: str | None = None
    """The folder of the child's files (`attachments.write`)."""
    retain: bool = False
    """Whether the files stay when the child is archived."""
    mount_path: str | None = None
    requester_agent: str | None = None
    """The agent that requested the task, if it is not the requester's own agent."""


class ValidatedSpawn(msgspec.Struct, frozen=True, kw_only=True):
    """A spawn whose arguments and permissions were checked. `id` is also the id of its first run."""

    id: str
    digest: str
    requester: Row
    child_key: keys.SessionKey
    task: str
    label: str | None
    model: str | None
    thinking: str | None
    deadline_at: int | None
    instructions: str
    sandboxed: bool
    envelope: SubagentPermissions
    options: TaskOptions
    destination: Destination
    link: ChainLink


def compute_signature(agent_id: str, task: str) -> str:
    """Return a hash of agent and task text; tasks with the same signature likely fail for the same reason."""
    return hashlib.sha256(f"{agent_id}\n{' '.join(task.split())}".encode()).hexdigest()[:32]


async def load_known_task(tx: Tx, id: str, requester: int, digest: str) -> Row | None:
    """Return the task that this id was already used for, if any.

    Raises:
        Conflict: the id was used for another task or by another requester.
    """
    before = await tx.one(SQL.by_id, id=id)
    if before is not None and (before["requester"], before["digest"]) != (requester, digest):
        raise run_queue.make_idempotency_conflict(id)
    return before


async def _free_label(tx: Tx, requester: int, agent_id: str, label: str, now: int) -> None:
    """Take a label from a sub-agent of the same requester that has reported, for use by a new one.

    Raises:
        Conflict: the label belongs to a sub-agent that is at work or another requester's, or to another session.
    """
    holder = await session_rows.find_and_lock_label(tx, agent_id, label)
    if holder is None:
        return
    task = await tx.one(SQL.by_child, key=holder["key"])
    if task is None or task["requester"] != requester or task["phase"] != "settled":
        raise session_rows.make_label_conflict(label)
    await session_rows.patch_session(tx, holder["id"], {"label": None}, now)


async def begin_task(tx: Tx, spawning: ValidatedSpawn, now: int) -> tuple[Row, AcceptedRun]:
    """Create the child session, its task and its first run."""
    child = await _create_child(tx, spawning, now)
    await tx.one(
        SQL.insert,
        id=spawning.id,
        digest=spawning.digest,
        requester=spawning.requester["id"],
        requester_key=spawning.requester["key"],
        child=child["id"],
        child_key=child["key"],
        child_session_id=child["session_id"],
        agent_id=child["agent_id"],
        signature=compute_signature(child["agent_id"], spawning.task),
        label=spawning.label,
        task=spawning.task,
        options=msgspec.json.encode(spawning.options).decode(),
        destination=spawning.destination.json_text,
        chain=spawning.link.chain,
        hop=spawning.link.hop,
        now=now,
    )
    task = await tx.one(SQL.by_id, id=spawning.id)
    assert task is not None
    return task, await run_queue.submit(tx, _build_first_run(spawning, task, now), now)


async def _create_child(tx: Tx, spawning: ValidatedSpawn, now: int) -> Row:
    if spawning.label is not None:
        await _free_label(tx, spawning.requester["id"], spawning.child_key.agent_id, spawning.label, now)
    birth = NewSession(
        label=spawning.label,
        parent=spawning.requester["id"],
        role="orchestrator" if spawning.envelope.depth > 0 else "leaf",
        sandboxed=spawning.sandboxed,
        envelope=spawning.envelope.json_text,
        model=spawning.model,
        thinking=spawning.thinking,
        reason="spawned",
    )
    return await session_rows.create_session(tx, spawning.child_key, now, birth)


def _build_first_run(spawning: ValidatedSpawn, task: Row, now: int) -> Submission:
    provenance = Provenance(
        kind="spawn",
        source_session_key=keys.display_full_key(spawning.requester["key"]),
        source_tool=SPAWN_TOOL_NAME,
        chain_id=spawning.link.chain,
        hop=spawning.link.hop,
    )
    return Submission(
        run_id=spawning.id,
        session=task["child"],
        session_key=task["child_key"],
        origin=SPAWN_TOOL_NAME,
        message=UserMessage(content=spawning.task, timestamp=now, provenance=provenance),
        instructions=spawning.instructions,
        deadline_at=spawning.deadline_at,
        task=task["n"],
        chain=spawning.link.chain,
        hop=spawning.link.hop,
    )


# --- progress ---


async def advance_task(tx: Tx, step: CompletedStep, now: int) -> Effects:
    """Advance a task after its current run has ended."""
    task = await tx.one(SQL.by_current_run, n=step.task, run_id=step.run_id)
    if task is None:
        return NO_EFFECTS
    if task["phase"] == "announcing":
        return await _finish_announce(tx, task, step, now)
    await _record_result(tx, task, step, now)
    if step.state == "ok" and await _count_awaited(tx, task["child"]):
        # The child ended its turn before its own sub-agents did: it reports after their results.
        await tx.do(SQL.advance, n=task["n"], phase="waiting", current=task["current"])
        await tx.do(SQL.set_yield_if_unset, session=task["child"])
        return NO_EFFECTS
    return await _queue_announce(tx, task, step, now)


async def abandon_waiting_task(
    tx: Tx, child_key: str, now: int, outcome: RunOutcome = "cancelled", error: str = "The run was stopped."
) -> Effects:
    """End and report the task of a child that is stopped while waiting for its own sub-agents.

    No run is active then whose end could report it.
    """
    task = await tx.one(SQL.by_child, key=child_key)
    if task is None or task["phase"] != "waiting":
        return NO_EFFECTS
    kept = {name: task[name] for name in ("n", "result", "result_source", "model")}
    await tx.do(SQL.record_outcome, outcome=outcome, error=error, now=now, **kept)
    if decode_task_options(task).announce == "none":
        return await _settle_task(tx, task, None, "none", now)
    return await _send_report(tx, task, None, now)


async def settle_stuck_tasks(tx: Tx, now: int) -> Effects:
    """Report tasks that no run will advance."""
    effects = NO_EFFECTS
    for task in await tx.all(SQL.stalled):
        if task["outcome"] is None:
            kept = {name: task[name] for name in ("n", "result", "result_source", "model")}
            await tx.do(SQL.record_outcome, outcome="interrupted", error="The run was lost.", now=now, **kept)
        if decode_task_options(task).announce == "none":
            effects += await _settle_task(tx, task, None, "none", now)
        else:
            effects += await _send_report(tx, task, None, now)
    return effects


async def _record_result(tx: Tx, task: Row, step: CompletedStep, now: int) -> None:
    result, source = step.reply, "reply"
    if not (result and result.strip()):
        result = await _load_latest_tool_result(tx, task)
        source = "tool" if result else "none"
    await tx.do(
        SQL.record_outcome,
        n=task["n"],
        outcome=step.state,
        error=step.error,
        result=result,
        result_source=source,
        model=step.model,
        now=now,
    )


async def _load_latest_tool_result(tx: Tx, task: Row) -> str | None:
    row = await tx.one(SQL.latest_tool_result, child=task["child"])
    if row is None:
        return None
    try:
        message = decode_message(row["body"])
    except InvalidInput:
        return None
    return message.text.strip() or None if isinstance(message, ToolResult) else None


async def _queue_announce(tx: Tx, task: Row, step: CompletedStep, now: int) -> Effects:
    """Queue the run in which the child words its result, if it succeeded and is to be announced."""
    options = decode_task_options(task)
    if options.announce == "none":
        return await _settle_task(tx, task, None, "none", now)
    if step.state != "ok":
        return await _send_report(tx, task, None, now)
    run_id = f"announce:{task['id']}"
    submission = Submission(
        run_id=run_id,
        session=task["child"],
        session_key=task["child_key"],
        origin=ANNOUNCE_ORIGIN,
        message=UserMessage(
            content=prompts.build_task_announce_message(task["task"], step.reply),
            timestamp=now,
            provenance=Provenance(kind="announce_step", source_tool=SPAWN_TOOL_NAME, chain_id=task["chain"]),
        ),
        instructions=prompts.build_task_announce_context(),
        deadline_at=now + options.announce_ms,
        task=task["n"],
        chain=task["chain"],
        hop=task["hop"],
    )
    accepted = await run_queue.submit_follow_up(tx, submission, now)
    if accepted is None or not accepted.new:  # not new: steered in its announce step, which is not repeated
        return await _send_report(tx, task, None, now)
    await tx.do(SQL.advance, n=task["n"], phase="announcing", current=run_id)
    return Effects.queue(accepted)


async def _finish_announce(tx: Tx, task: Row, step: CompletedStep, now: int) -> Effects:
    said = step.usable_reply
    if said is not None and sanitize.is_silence(said):
        return await _settle_task(tx, task, None, "skipped", now)
    return await _send_report(
        tx, task, None if said is None else sanitize.remove_control_tokens(said) or None, now
    )


# --- the report ---


async def _send_report(tx: Tx, task: Row, announced: str | None, now: int) -> Effects:
    task = await _reload_task(tx, task)
    options = decode_task_options(task)
    report = _build_report(task, announced, await _load_stats(tx, task, options))
    body = sanitize.sanitize_for_agents(prompts.format_report(report, options.locale))
    stats = prompts.format_stats(report.stats, options.locale)
    told, entry_run = await _queue_report(tx, task, options, f"{body}\n\n{stats}", now)
    if options.announce != "channel":
        return told + await _settle_task(tx, task, report, "parent", now)
    parcel = NewDelivery(
        key=f"task:{task['id']}",
        kind="task",
        session=task["requester"],
        session_key=task["requester_key"],
        destination=delivery_rows.decode_destination(task["destination"]),
        body=body,
        stats=stats,
        entry_run=entry_run,
        task=task["n"],
    )
    await delivery_rows.enqueue_delivery(tx, parcel, now)
    return told + await _settle_task(tx, task, report, "pending", now) + DELIVERY_POSTED


def _build_report(task: Row, announced: str | None, stats: TaskStats) -> TaskReport:
    result, source, notes = task["result"], task["result_source"], None
    if announced is not None:
        worded, notes = prompts.parse_announce(announced)
        if worded:
            result, source = worded, "announce"
    if task["outcome"] != "ok" and task["error"]:
        notes = "\n".join(filter(None, [notes, task["error"]]))
    if result and len(result) > MAX_RESULT_CHARACTERS:
        left = len(result) - MAX_RESULT_CHARACTERS
        notes = "\n".join(filter(None, [notes, f"{left} characters of the result were left out."]))
        result = result[:MAX_RESULT_CHARACTERS]
    return TaskReport(status=task["outcome"], result=result, result_source=source, notes=notes, stats=stats)


async def _load_stats(tx: Tx, task: Row, options: TaskOptions) -> TaskStats:
    spent = await tx.one(SQL.sum_usage, key=task["child_key"])
    assert spent is not None
    return TaskStats(
        runtime_ms=task["ended_at"] - task["started_at"] if task["started_at"] else None,
        tokens_in=spent["input"],
        tokens_out=spent["output"],
        cost=spent["cost"],
        session_key=task["child_key"],
        session_id=task["child_session_id"],
        transcript_path=_find_transcript_path(options, task["child_session_id"]),
        model=task["model"],
    )


def _find_transcript_path(options: TaskOptions, session_id: str) -> str | None:
    """Return the path of the child's transcript file, if it exists and is not deleted with the child."""
    if not options.transcripts or options.cleanup == "delete":
        return None
    path = f"{options.transcripts}/{session_id}.jsonl"
    return path if Path(path).is_file() else None


async def _queue_report(
    tx: Tx, task: Row, options: TaskOptions, text: str, now: int
) -> tuple[Effects, str | None]:
    """Queue the report for the requester's transcript. Returns the run id too, unless an ancestor receives it.

    The report waits its turn in the lane, so it is placed between two runs, never between a call and its result.
    """
    living = await _find_living_requester(tx, task)
    if living is None:
        return NO_EFFECTS, None
    session, agent_id = living
    if session["id"] != task["requester"]:
        text = f"{text}\n\n{prompts.format_passed_up_note(keys.display_full_key(task['requester_key']))}"
    direct = options.announce == "parent" and bool(task["wakes"]) and session["yielded"] is None
    run_id = f"note:{task['id']}"
    own, deadline_at = await _hand_task_to_run(tx, session["key"], run_id) if direct else (None, None)
    submission = Submission(
        run_id=run_id,
        session=session["id"],
        session_key=session["key"],
        origin=WAKE_ORIGIN if direct else NOTE_ORIGIN,
        message=_build_report_message(task, text, now, by_user=direct),
        deadline_at=deadline_at,
        task=own,
        chain=task["chain"] if direct else None,
        hop=task["hop"] - 1,
        agent_id=agent_id if direct else None,
    )
    accepted = await run_queue.submit_follow_up(tx, submission, now)
    return Effects.queue(accepted), run_id if session["id"] == task["requester"] else None


def _build_report_message(task: Row, text: str, now: int, *, by_user: bool) -> UserMessage | AssistantMessage:
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


async def _find_living_requester(tx: Tx, task: Row) -> tuple[Row, str | None] | None:
    """Return the requester and its agent (`TaskOptions.requester_agent`), or its nearest existing ancestor."""
    for _ in range(MAX_ANCESTOR_LEVELS):
        session = await tx.one(SESSIONS_SQL.by_id, id=task["requester"])
        if session is not None:
            return session, decode_task_options(task).requester_agent
        above = await tx.one(SQL.by_child, key=task["requester_key"])
        if above is None:
            return None
        task = above
    return None


async def _hand_task_to_run(tx: Tx, key: str, run_id: str) -> tuple[int | None, int | None]:
    """Make a wake run finish its session's own task. Returns the task and its deadline.

    The waiting run may not have ended yet; its reply is then not the task's result.
    """
    task = await tx.one(SQL.by_child, key=key)
    if task is None or task["phase"] not in {"running", "waiting"}:
        return None, None
    await tx.do(SQL.advance, n=task["n"], phase="running", current=run_id)
    return task["n"], await _load_deadline(tx, task)


async def _load_deadline(tx: Tx, task: Row) -> int | None:
    """Return the deadline of a task's first run, which applies to all later runs of the task."""
    run = await tx.one(SQL.run_deadline, id=task["id"])
    return run["deadline_at"] if run else None


async def _settle_task(tx: Tx, task: Row, report: TaskReport | None, announced: str, now: int) -> Effects:
    await tx.lock(f"family:{task['requester']}")
    settled = announced != "pending"
    await tx.do(
        SQL.settle,
        n=task["n"],
        announced=announced,
        report=msgspec.json.encode(report).decode() if report else None,
        archive_at=_compute_archive_time(decode_task_options(task), now) if settled else None,
        now=now,
    )
    return await _wake_requester(tx, task, now)


async def _wake_requester(tx: Tx, task: Row, now: int) -> Effects:
    """Wake the requester if it yielded and has nothing more to wait for."""
    living = await _find_living_requester(tx, task)
    if living is None or living[0]["yielded"] is None or not task["wakes"]:
        return NO_EFFECTS
    session, agent_id = living
    if session["yielded"] == "all" and await _count_awaited(tx, session["id"]):
        return NO_EFFECTS
    effects, wakes = NO_EFFECTS, dict[str | None, str]()
    for agent in await yields.list_waiting_agents(tx, session) or [agent_id]:
        accepted = await queue_wake(
            tx, WakeRequest(session["id"], session["key"], task["id"], agent), task, now
        )
        if accepted is not None:
            wakes[agent] = accepted.run_id
            effects += Effects.queue(accepted)
    if wakes:
        await yields.hand_waiting_runs_to_wakes(tx, session, wakes)
    return effects


async def _count_awaited(tx: Tx, session: int) -> int:
    """Count the active sub-agents that can still wake a session; those stopped with it do not.

    The lock serialises this with the end of each sub-agent, which decides by the same count; otherwise the last one
    could go unnoticed.
    """
    await tx.lock(f"family:{session}")
    row = await tx.one(SQL.count_awaited, requester=session)
    return row["awaited"] if row else 0


class WakeRequest(NamedTuple):
    """A session to wake, the id that makes this wake unique, and the agent that yielded (`runs.agent_id`)."""

    session: int
    key: str
    id: str
    agent_id: str | None = None

    @property
    def run_id(self) -> str:
        return f"wake:{self.id}" if self.agent_id is None else f"wake:{self.id}:{self.agent_id}"


async def queue_wake(tx: Tx, waking: WakeRequest, reported: Row, now: int) -> AcceptedRun | None:
    """Queue a run for a session after the reports it was waiting for; `reported` is the task of the last one.

    The run finishes the session's own task, and the exchanges of yielded runs are handed to it (`yields`).
    """
    session, key, run_id = waking.session, waking.key, waking.run_id
    own, deadline_at = await _hand_task_to_run(tx, key, run_id)
    submission = Submission(
        run_id=run_id,
        session=session,
        session_key=key,
        origin=WAKE_ORIGIN,
        message=UserMessage(
            content=prompts.WAKE_MESSAGE,
            timestamp=now,
            provenance=Provenance(kind="wake", source_tool=SPAWN_TOOL_NAME, chain_id=reported["chain"]),
        ),
        deadline_at=deadline_at,
        task=own,
        chain=reported["chain"],
        hop=reported["hop"] - 1,  # same hop as when it spawned; the chain's limit of runs bounds repetition
        agent_id=waking.agent_id,
    )
    return await run_queue.submit_follow_up(tx, submission, now)


async def load_progress(tx: Tx, session: int, run_id: str | None) -> tuple[int, Row | None]:
    """Return how many tasks of a session are active, and the last one reported since the given run began."""
    reported = await tx.one(SQL.last_report_during_run, requester=session, run_id=run_id)
    return await _count_awaited(tx, session), reported


async def hand_to_queued_wake(tx: Tx, session: int, run_id: str | None, agent_id: str | None) -> bool:
    """Hand a run to a wake that is already queued for this agent in its session. False if none is queued."""
    waking = await tx.one(RUNS_SQL.queued_wake, session=session, agent_id=agent_id)
    if waking is None:
        return False
    await yields.hand_run_to_wake(tx, run_id, waking["id"])
    return True


async def redirect_task(tx: Tx, child_key: str, run_id: str) -> tuple[int | None, int | None]:
    """Make another run finish the current task of a session. Returns the task and its deadline, if any."""
    task = await tx.one(SQL.by_child, key=child_key)
    if task is None or task["phase"] == "settled":
        return None, None
    await tx.do(SQL.advance, n=task["n"], phase="running", current=run_id)
    return task["n"], await _load_deadline(tx, task)


async def record_announce_outcome(tx: Tx, task_n: int, state: str, now: int) -> None:
    """Record that the delivery of the report has settled, which starts the time until archiving."""
    task = await tx.one(SQL.by_n, n=task_n)
    if task is not None:
        await tx.do(
            SQL.set_announced,
            n=task_n,
            announced=state,
            archive_at=_compute_archive_time(decode_task_options(task), now),
        )


def _compute_archive_time(options: TaskOptions, now: int) -> int | None:
    if options.cleanup == "delete":
        return now
    if options.mode == "session" or options.archive_minutes == 0:
        return None
    return now + options.archive_minutes * MILLISECONDS_PER_MINUTE


def decode_task_options(task: Row) -> TaskOptions:
    return msgspec.json.decode(task["options"], type=TaskOptions)


async def _reload_task(tx: Tx, task: Row) -> Row:
    row = await tx.one(SQL.by_n, n=task["n"])
    assert row is not None
    return row
