"""Sub-agents: spawning, listing, reports, stopping, and yielding a turn to wait for them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from antiphon import access, keys
from antiphon.access import Caller
from antiphon.engine import idempotency, validation
from antiphon.engine.collaboration import attachments, reports, task_rows, yields
from antiphon.engine.collaboration import subagents as tasks
from antiphon.engine.collaboration.prompts import TaskReport, TaskStats, format_report, format_stats
from antiphon.engine.collaboration.subagents import ValidatedSpawn
from antiphon.engine.collaboration.yields import WakeRequest
from antiphon.engine.idempotency import IdempotentCommand
from antiphon.engine.outbox import sanitize
from antiphon.engine.outbox.redaction import MAX_EXCERPT_SOURCE_CHARACTERS, redact_excerpt
from antiphon.engine.runs import completion, endings, lifecycle
from antiphon.engine.runs.effects import Effects
from antiphon.engine.runs.run_queue import AcceptedRun
from antiphon.engine.validation import validate_and_clamp
from antiphon.errors import Ambiguous, ChainTooLong, Conflict, InvalidInput, NotFound
from antiphon.operations.collaboration_types import KillResult, SpawnResult, TaskView, build_task_view
from antiphon.operations.context import OperationContext
from antiphon.operations.exchanges import derive_request_id
from antiphon.operations.sessions import SessionOperations
from antiphon.operations.spawn_rules import SpawnRequester, SpawnRules
from antiphon.operations.types import RequestOrigin, SpawnRequest
from antiphon.store import Row, Tx

MAX_LISTED_SUBAGENTS = 200  # of the active ones, and of the most recently spawned ones
DEFAULT_RECENT_MINUTES, MAX_RECENT_MINUTES = 30, 1440
ALL_TARGETS = frozenset({"all", "*"})

AttachmentFiles: TypeAlias = list[tuple[str, bytes]]
SpawnCall: TypeAlias = tuple[Caller, SpawnRequest, str, RequestOrigin, str]
"""The caller, the request, the task's id, the request's origin, and the requester session."""


class SubagentOperations:
    def __init__(
        self, context: OperationContext, sessions: SessionOperations, spawn_rules: SpawnRules
    ) -> None:
        self._context = context
        self._sessions = sessions
        self._spawn_rules = spawn_rules

    async def spawn(
        self,
        caller: Caller,
        request: SpawnRequest,
        origin: RequestOrigin | None = None,
        *,
        requester: str = "main",
    ) -> SpawnResult:
        """Spawn a sub-agent in its own session, durable when this returns. It reports automatically.

        An agent spawns for its own session; an operator for the session named by `requester`.
        """
        access.require_scope(caller, "spawn")
        files = self._spawn_rules.validate_request(request)
        worker = self._context.require_worker()
        if request.sandbox == "require" and self._context.sandboxes is not None:
            await self._context.sandboxes.probe()
        origin = origin or RequestOrigin()
        task_id = derive_request_id(caller, request.idempotency_key, origin)
        if caller.is_operator:
            await self._sessions.open(caller, requester)  # the first request for a session may be a spawn
        call = (caller, request, task_id, origin, requester)
        try:
            task, accepted = await self._spawn_with_files(files, call)
        except ChainTooLong as error:
            self._context.report_chain_limit(caller, error)
            raise
        if accepted is not None:
            self._context.publish_to_all_sessions(task["child_key"], "create")
            await worker.dispatch_accepted_run(accepted)
            # The report names the transcript file.
            await self._context.find_transcript_files([(task["child_session_id"], task["child_key"])])
        return _build_spawn_result(caller, task, files)

    async def _spawn_with_files(
        self, files: AttachmentFiles, call: SpawnCall
    ) -> tuple[Row, AcceptedRun | None]:
        """Write attachments only after the request passed every check; remove them if the spawn fails after all."""
        spawning = (
            await self._context.store.read(self._plan_spawn, call, self._context.clock.now())
            if files
            else None
        )
        if not isinstance(spawning, ValidatedSpawn):
            return await self._context.store.tx(self._spawn, call, self._context.clock.now())
        await asyncio.to_thread(_write_attachments, spawning, call[1], files)
        try:
            return await self._context.store.tx(self._spawn, call, self._context.clock.now())
        except Exception:
            # After any failure, which is re-raised. Not after a cancellation: the transaction may still commit a task
            # that needs its files.
            if await self._context.store.read(task_rows.load_task, spawning.id) is None:
                await asyncio.to_thread(
                    attachments.remove,
                    _get_workspace(spawning),
                    spawning.child_key.id,
                    below=spawning.options.workspace_below,
                )
            raise

    async def _spawn(self, tx: Tx, call: SpawnCall, now: int) -> tuple[Row, AcceptedRun | None]:
        plan = await self._plan_spawn(tx, call, now)
        return await tasks.begin_task(tx, plan, now) if isinstance(plan, ValidatedSpawn) else (plan, None)

    async def _plan_spawn(self, tx: Tx, call: SpawnCall, now: int) -> ValidatedSpawn | Row:
        """Return the plan of the child; or the existing task if the request is a repeated one."""
        caller, request, task_id, origin, requester = call
        # The caller has already opened it.
        requester_row = await self._context.resolve_requester(tx, caller, "send", requester, now, [])
        if requester_row is None:
            raise access.build_session_missing_error(requester)
        if before := await task_rows.load_known_task(
            tx, task_id, requester_row["id"], request.compute_digest(requester_row["key"])
        ):
            return before
        await _require_run_under_way(tx, origin)
        link = await self._context.build_chain_link(tx, origin, requester_row["id"], task_id)
        spawner = SpawnRequester(
            requester_row,
            self._context.session_resolver.resolve_acting_agent(caller, requester, requester_row),
        )
        spawning = await self._spawn_rules.plan_child(tx, caller, spawner, request, task_id, link, now)
        addressee = await completion.load_reply_target(tx, origin.run_id)
        if addressee is None:
            return spawning
        # The run reports to a given destination, and so do the sub-agents that it spawns.
        return msgspec.structs.replace(spawning, destination=addressee.destination)

    def _compute_since(self, recent_minutes: int) -> int:
        return (
            self._context.clock.now()
            - validate_and_clamp(recent_minutes, 1, MAX_RECENT_MINUTES, "recentMinutes") * 60_000
        )

    async def _load_subagents(self, tx: Tx, caller: Caller, session: str, since: int) -> list[TaskView]:
        row = await self._context.session_resolver.open(tx, caller, "read", session)
        return await self._load_spawned_by(tx, caller, row, since)

    async def _load_spawned_by(self, tx: Tx, caller: Caller, requester: Row, since: int) -> list[TaskView]:
        found = await task_rows.list_tasks_of_requester(
            tx,
            requester["id"],
            since=since,
            limit=MAX_LISTED_SUBAGENTS,
            max_characters=MAX_EXCERPT_SOURCE_CHARACTERS,
        )
        return [build_task_view(row, caller.agent_id) for row in found]

    async def get_report(self, caller: Caller, run_id: str) -> str | None:
        """Return the report of a task as it was delivered; None until the task has settled.

        For a task that was not announced, it is the report that would have been delivered.
        """
        task = await self._context.store.read(self._load_reported_task, caller, run_id)
        return await asyncio.to_thread(_format_report, task) if task["phase"] == "settled" else None

    async def _load_reported_task(self, tx: Tx, caller: Caller, run_id: str) -> Row:
        missing = NotFound(
            f"There is no sub-agent {run_id[:80]!r}.", "Check the run id that the spawn returned."
        )
        task = await task_rows.load_task(tx, run_id)
        if task is None:
            raise missing
        try:
            requester = await self._context.session_resolver.open(tx, caller, "read", task["requester_key"])
        except NotFound:
            raise missing from None
        if requester["id"] != task["requester"]:  # the key now belongs to another session
            raise missing
        return task

    async def kill(
        self,
        caller: Caller,
        target: str | None,
        session: str = "current",
        recent_minutes: int = DEFAULT_RECENT_MINUTES,
        *,
        key: str | None = None,
    ) -> KillResult:
        """Stop one of a session's sub-agents, by any of its names, or `all` of them; and everything below.

        A repeated call with the same key stops nothing, whatever the name refers to by then.
        """
        validation.validate_idempotency_key(key)
        worker = self._context.require_worker()
        since = self._compute_since(recent_minutes)
        killed, stops = await self._context.store.tx(
            self._kill, caller, target, session, since, key, self._context.clock.now()
        )
        for row, stopped in stops:
            await worker.apply_effects(stopped)
            if stopped.stopped_run_ids:
                self._context.publish_change(row, "abort")
        return killed

    async def _kill(
        self, tx: Tx, caller: Caller, target: str | None, session: str, since: int, key: str | None, now: int
    ) -> tuple[KillResult, list[tuple[Row, Effects]]]:
        requester = await self._context.session_resolver.open(tx, caller, "control", session)
        command = IdempotentCommand(key, ("kill", requester["id"], target))
        if before := await idempotency.load_recorded_answer(tx, command, KillResult):
            return before, []
        found = await self._load_spawned_by(tx, caller, requester, since)
        meant = found if target in ALL_TARGETS else [_choose_subagent(target, found)]
        over = meant[0].name if target not in ALL_TARGETS and meant[0].phase == "settled" else None
        stopped: list[tuple[TaskView, Row, Effects]] = []
        for task in meant:
            if row := await self._open_active_child(tx, caller, task):
                stopped.append((task, row, await endings.cancel_runs(tx, row["id"], None, now)))
        killed = KillResult(
            keys=[task.child_session_key for task, *_ in stopped],
            names=[task.name for task, *_ in stopped],
            finished=over,
        )
        await idempotency.record_answer(tx, command, killed, now)
        return killed, [(row, stop) for _, row, stop in stopped]

    async def _open_active_child(self, tx: Tx, caller: Caller, task: TaskView) -> Row | None:
        """Return the child's session, unless its task has settled or the session is deleted."""
        if task.phase == "settled":
            return None
        try:
            return await self._context.session_resolver.open(tx, caller, "control", task.child_session_key)
        except NotFound:  # deleted: its task is reported without it
            return None

    async def find(
        self,
        caller: Caller,
        target: str | None,
        session: str = "current",
        recent_minutes: int = DEFAULT_RECENT_MINUTES,
    ) -> TaskView:
        """Return the sub-agent of a session that a name refers to, as in the list."""
        return _choose_subagent(
            target,
            await self._context.store.read(
                self._load_subagents, caller, session, self._compute_since(recent_minutes)
            ),
        )

    async def find_steered(self, caller: Caller, run_id: str) -> str | None:
        """Return the name of the sub-agent that the run with this id redirected; None if no such run exists."""
        return await self._context.store.read(self._load_steered_subagent, caller, run_id)

    async def _load_steered_subagent(self, tx: Tx, caller: Caller, run_id: str) -> str | None:
        run = await lifecycle.load_run(tx, run_id, caller.session_key)
        if run is None:
            return None
        self._context.session_resolver.authorize(caller, "read", run, run_id)
        task = await task_rows.load_task_of_child(tx, run["key"])
        label: str | None = task["label"] if task else None
        return label or keys.display_stored_key(run["key"], viewer_agent_id=caller.agent_id)

    async def yield_turn(
        self, caller: Caller, origin: RequestOrigin, how: Literal["all", "any"] = "all"
    ) -> int:
        """Wake the caller's session when all or any of its sub-agents have reported; return how many are active.

        Reports made during the calling run count, although they are not yet in the transcript.
        """
        left, woken = await self._context.store.tx(
            self._yield, caller, origin, how, self._context.clock.now()
        )
        if woken is not None:
            await self._context.require_worker().dispatch_accepted_run(woken)
        return left

    async def _yield(
        self, tx: Tx, caller: Caller, origin: RequestOrigin, how: Literal["all", "any"], now: int
    ) -> tuple[int, AcceptedRun | None]:
        row = await self._context.session_resolver.open(tx, caller, "control", "current")
        agent_id = self._context.session_resolver.resolve_non_owner_agent(caller, "current", row)
        left, reported = await yields.load_progress(tx, row["id"], origin.run_id)
        if not left or how == "any":
            # Repeated after a crash, or after a report that wakes the session anyway: a turn has only one wake.
            if await yields.hand_to_queued_wake(tx, row["id"], origin.run_id, agent_id):
                return left, None
            if reported:
                waking = WakeRequest(row["id"], row["key"], origin.key or "", agent_id)
                woken = await yields.queue_wake(tx, waking, reported, now)
                if woken is not None:
                    await yields.assign_run_to_wake(tx, origin.run_id, woken.run_id)
                return left, woken
        if not left:
            raise Conflict(
                "There is no active sub-agent to wait for.",
                "Continue, or spawn one with sessions_spawn first.",
            )
        await yields.begin_waiting(tx, row["id"], origin.run_id, how)
        return left, None

    async def list(
        self, caller: Caller, session: str = "current", recent_minutes: int = DEFAULT_RECENT_MINUTES
    ) -> list[TaskView]:
        """Return the sub-agents of a session, newest first: all active ones and those that ended recently.

        Secrets are masked and long texts cut; `get_report` returns the whole report.
        """
        since = self._compute_since(recent_minutes)
        found = await self._context.store.read(self._load_subagents, caller, session, since)
        return await asyncio.to_thread(lambda: [_shorten_task_texts(task) for task in found])


def _shorten_task_texts(task: TaskView) -> TaskView:
    return msgspec.structs.replace(
        task,
        task=redact_excerpt(task.task),
        result=redact_excerpt(task.result),
        error=redact_excerpt(task.error),
    )


def _choose_subagent(target: str | None, found: Sequence[TaskView]) -> TaskView:
    """Return the sub-agent that a number, key, run id or label refers to; ids and labels may be abbreviated."""
    if not target:
        raise InvalidInput(
            "No sub-agent is named.", "Set target to one that action 'list' shows.", field="target"
        )
    if target == "last" and found:
        return found[0]
    if target.isdecimal() and len(target) < 5 and 0 < int(target) <= len(found):
        return found[int(target) - 1]
    exact = [t for t in found if target in (t.child_session_key, t.run_id, t.label)]
    prefix = target.lower()
    fitting = exact or [
        t for t in found if (t.label or "").lower().startswith(prefix) or t.run_id.startswith(target)
    ]
    if len(fitting) > 1:
        candidates = [task.child_session_key for task in fitting]
        raise Ambiguous(
            f"{len(fitting)} sub-agents match {target[:80]!r}: {', '.join(candidates[:10])}.",
            "Pass one of these keys.",
            candidates=candidates[:10],
        )
    if not fitting:
        raise NotFound(f"No sub-agent matches {target[:80]!r}.", "Use action 'list' to see them.")
    return fitting[0]


async def _require_run_under_way(tx: Tx, origin: RequestOrigin) -> None:
    """Refuse to spawn from an ended run: stopping it stopped its sub-agents, and no new ones may follow."""
    if await lifecycle.is_ended_or_stopping(tx, origin.run_id):
        raise Conflict(
            f"Run {origin.run_id!r} has ended or was stopped.",
            "Spawn from an active run.",
            run_id=origin.run_id,
        )


def _format_report(task: Row) -> str:
    locale = task_rows.decode_task_options(task).locale
    if task["report"] is None:
        return sanitize.sanitize_for_people(format_report(_build_unannounced_report(task), locale))
    report = msgspec.json.decode(task["report"], type=TaskReport)
    return f"{sanitize.sanitize_for_people(format_report(report, locale))}\n\n{format_stats(report.stats, locale)}"


def _build_unannounced_report(task: Row) -> TaskReport:
    return TaskReport(
        status=task["outcome"],
        result=(task["result"] or "")[: reports.MAX_RESULT_CHARACTERS],
        result_source=task["result_source"],
        notes=task["error"],
        stats=TaskStats(),
    )


def _get_workspace(spawning: ValidatedSpawn) -> Path:
    return Path(spawning.options.workspace or "")


def _write_attachments(spawning: ValidatedSpawn, request: SpawnRequest, files: AttachmentFiles) -> None:
    workspace = _get_workspace(spawning)
    workspace.mkdir(mode=0o700, parents=True, exist_ok=True)
    types = attachments.collect_mime_types(request.attachments)
    attachments.write(
        workspace,
        spawning.child_key.id,
        files,
        mime_types=types,
        below=spawning.options.workspace_below,
    )


def _build_spawn_result(caller: Caller, task: Row, files: AttachmentFiles) -> SpawnResult:
    options = task_rows.decode_task_options(task)
    folder = options.attachments
    return SpawnResult(
        run_id=task["id"],
        child_session_key=keys.display_stored_key(task["child_key"], viewer_agent_id=caller.agent_id),
        mode=options.mode,
        attachments=attachments.build_receipt(folder, files) if folder and files else msgspec.UNSET,
    )
