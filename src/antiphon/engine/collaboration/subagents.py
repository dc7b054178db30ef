"""Sub-agents, from the spawn to the report.

    running ──▶ waiting (for what it spawned itself) ──▶ announcing ──▶ settled
       └──────────────────────────────────────────────────────▲

The session, its first run and the task are created in one commit, and so are the end of a run and its follow-up work.
`task_rows` has the rows, `reports` what is reported to whom, `yields` the sessions that wait for it, and
`subagent_archive` what happens to the child afterwards.
"""

from __future__ import annotations

import msgspec

from antiphon import keys
from antiphon.engine.collaboration import prompts, reports, task_rows, yields
from antiphon.engine.collaboration.chains import ChainLink
from antiphon.engine.collaboration.permissions import SubagentPermissions
from antiphon.engine.collaboration.prompts import TaskReport
from antiphon.engine.collaboration.task_rows import SQL, TaskOptions
from antiphon.engine.outbox import delivery_rows, sanitize
from antiphon.engine.outbox.delivery_rows import Destination, NewDelivery
from antiphon.engine.runs import run_queue
from antiphon.engine.runs.effects import DELIVERIES_DUE, NO_EFFECTS, CompletedStep, Effects, RunOutcome
from antiphon.engine.runs.run_queue import ANNOUNCE_ORIGIN, AcceptedRun, Submission
from antiphon.engine.sessions import session_rows
from antiphon.engine.sessions.session_rows import NewSession
from antiphon.errors import InvalidInput
from antiphon.messages import Provenance, ToolResult, UserMessage, decode_message
from antiphon.store import Row, Tx
from antiphon.tool_selection import SPAWN_TOOL_NAME


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
    permissions: SubagentPermissions
    options: TaskOptions
    destination: Destination
    link: ChainLink


async def begin_task(tx: Tx, spawn: ValidatedSpawn, now: int) -> tuple[Row, AcceptedRun]:
    """Create the child session, its task and its first run."""
    child = await _create_child(tx, spawn, now)
    await tx.one(
        SQL.insert,
        id=spawn.id,
        digest=spawn.digest,
        requester=spawn.requester["id"],
        requester_key=spawn.requester["key"],
        child=child["id"],
        child_key=child["key"],
        child_session_id=child["session_id"],
        agent_id=child["agent_id"],
        signature=task_rows.compute_signature(child["agent_id"], spawn.task),
        label=spawn.label,
        task=spawn.task,
        options=msgspec.json.encode(spawn.options).decode(),
        destination=spawn.destination.json_text,
        chain=spawn.link.chain,
        hop=spawn.link.hop,
        now=now,
    )
    task = await task_rows.load_task(tx, spawn.id)
    assert task is not None
    return task, await run_queue.submit(tx, _build_first_run(spawn, task, now), now)


async def _create_child(tx: Tx, spawn: ValidatedSpawn, now: int) -> Row:
    if spawn.label is not None:
        await _free_label(tx, spawn.requester["id"], spawn.child_key.agent_id, spawn.label, now)
    child = NewSession(
        label=spawn.label,
        parent=spawn.requester["id"],
        role="orchestrator" if spawn.permissions.depth > 0 else "leaf",
        sandboxed=spawn.sandboxed,
        envelope=spawn.permissions.json_text,
        model=spawn.model,
        thinking=spawn.thinking,
        reason="spawned",
    )
    return await session_rows.create_session(tx, spawn.child_key, now, child)


async def _free_label(tx: Tx, requester: int, agent_id: str, label: str, now: int) -> None:
    """Take a label from a sub-agent of the same requester that has reported, for use by a new one.

    Raises:
        Conflict: the label belongs to a sub-agent that is at work or another requester's, or to another session.
    """
    holder = await session_rows.find_and_lock_label(tx, agent_id, label)
    if holder is None:
        return
    task = await task_rows.load_task_of_child(tx, holder["key"])
    if task is None or task["requester"] != requester or task["phase"] != "settled":
        raise session_rows.make_label_conflict(label)
    await session_rows.patch_session(tx, holder["id"], {"label": None}, now)


def _build_first_run(spawn: ValidatedSpawn, task: Row, now: int) -> Submission:
    provenance = Provenance(
        kind="spawn",
        source_session_key=keys.display_full_key(spawn.requester["key"]),
        source_tool=SPAWN_TOOL_NAME,
        chain_id=spawn.link.chain,
        hop=spawn.link.hop,
    )
    return Submission(
        run_id=spawn.id,
        session=task["child"],
        session_key=task["child_key"],
        origin=SPAWN_TOOL_NAME,
        message=UserMessage(content=spawn.task, timestamp=now, provenance=provenance),
        instructions=spawn.instructions,
        deadline_at=spawn.deadline_at,
        task=task["n"],
        chain=spawn.link.chain,
        hop=spawn.link.hop,
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
    if step.state == "ok" and await task_rows.count_awaited(tx, task["child"]):
        # The child ended its turn before its own sub-agents did: it reports after their results.
        await tx.do(SQL.advance, n=task["n"], phase="waiting", current=task["current"])
        await tx.do(SQL.set_yield_if_unset, session=task["child"])
        return NO_EFFECTS
    if step.state == "ok":
        return await _queue_announce(tx, task, step, now)
    return await _report_and_settle(tx, task, None, now)


async def abandon_waiting_task(
    tx: Tx, child_key: str, now: int, outcome: RunOutcome = "cancelled", error: str = "The run was stopped."
) -> Effects:
    """End and report the task of a child that is stopped while waiting for its own sub-agents.

    No run is active then whose end could report it.
    """
    task = await task_rows.load_task_of_child(tx, child_key)
    if task is None or task["phase"] != "waiting":
        return NO_EFFECTS
    await _record_outcome_without_run(tx, task, outcome, error, now)
    return await _report_and_settle(tx, task, None, now)


async def settle_stuck_tasks(tx: Tx, now: int) -> Effects:
    """Report tasks that no run will advance."""
    effects: list[Effects] = []
    for task in await task_rows.list_stalled_tasks(tx):
        if task["outcome"] is None:
            await _record_outcome_without_run(tx, task, "interrupted", "The run was lost.", now)
        effects.append(await _report_and_settle(tx, task, None, now))
    return Effects.combine(effects)


async def _record_outcome_without_run(tx: Tx, task: Row, outcome: RunOutcome, error: str, now: int) -> None:
    kept = {name: task[name] for name in ("n", "result", "result_source", "model")}
    await tx.do(SQL.record_outcome, outcome=outcome, error=error, now=now, **kept)


async def _record_result(tx: Tx, task: Row, step: CompletedStep, now: int) -> None:
    """Record the outcome of a run. Without a reply, the latest result of a tool is the result."""
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
    """Queue the run in which the child words its result, unless nothing is to be announced."""
    options = task_rows.decode_task_options(task)
    if options.announce == "none":
        return await _settle_task(tx, task, None, "none", now)
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
        return await _report_and_settle(tx, task, None, now)
    await tx.do(SQL.advance, n=task["n"], phase="announcing", current=run_id)
    return Effects.queue(accepted)


async def _finish_announce(tx: Tx, task: Row, step: CompletedStep, now: int) -> Effects:
    reply = step.usable_reply
    if reply is not None and sanitize.is_silence(reply):
        return await _settle_task(tx, task, None, "skipped", now)
    announcement = sanitize.remove_control_tokens(reply) if reply else ""
    return await _report_and_settle(tx, task, announcement or None, now)


async def _report_and_settle(tx: Tx, task: Row, announcement: str | None, now: int) -> Effects:
    """Send the report of a task to its requester, and to the chat if wanted; then the task has settled."""
    options = task_rows.decode_task_options(task)
    if options.announce == "none":
        return await _settle_task(tx, task, None, "none", now)
    task = await task_rows.reload_task(tx, task)
    report = await reports.build_report(tx, task, announcement)
    body = sanitize.sanitize_for_agents(prompts.format_report(report, options.locale))
    stats = prompts.format_stats(report.stats, options.locale)
    queued = await reports.queue_report(tx, task, f"{body}\n\n{stats}", now)
    if options.announce != "channel":
        return queued.effects + await _settle_task(tx, task, report, "parent", now)
    delivery = NewDelivery(
        key=f"task:{task['id']}",
        kind="task",
        session=task["requester"],
        session_key=task["requester_key"],
        destination=delivery_rows.decode_destination(task["destination"]),
        body=body,
        stats=stats,
        entry_run=queued.run_id,
        task=task["n"],
    )
    await delivery_rows.enqueue_delivery(tx, delivery, now)
    return queued.effects + await _settle_task(tx, task, report, "pending", now) + DELIVERIES_DUE


async def _settle_task(tx: Tx, task: Row, report: TaskReport | None, announced: str, now: int) -> Effects:
    await tx.lock(f"family:{task['requester']}")
    options = task_rows.decode_task_options(task)
    await tx.do(
        SQL.settle,
        n=task["n"],
        announced=announced,
        report=msgspec.json.encode(report).decode() if report else None,
        archive_at=None if announced == "pending" else task_rows.compute_archive_time(options, now),
        now=now,
    )
    return await yields.wake_requester(tx, task, now)
