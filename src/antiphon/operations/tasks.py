"""Sub-agents: spawning them, seeing what becomes of them, stopping them, and ending one's turn to wait for them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, TypeAlias, overload

import msgspec

from antiphon import access, keys
from antiphon.access import Caller
from antiphon.engine import attachments, commands, gate, runs, sequels, tasks, words, yields
from antiphon.engine.admissions import Accepted
from antiphon.engine.commands import Command
from antiphon.engine.redaction import redact
from antiphon.engine.tasks import Spawning, Waking
from antiphon.engine.wording import Report, Stats, report_text, stats_line
from antiphon.errors import Ambiguous, ChainTooLong, Conflict, InvalidInput, NotFound
from antiphon.operations.checks import between
from antiphon.operations.exchanges import Exchanges, request_id
from antiphon.operations.links import Origin
from antiphon.operations.sessions import Sessions
from antiphon.operations.spawns import Requester, Spawn
from antiphon.store import Row, Tx
from antiphon.views import Spawned, TaskView, task_view

LISTED = 200  # of those at work, and of the last that were spawned
RECENT, RECENT_MOST = 30, 1440  # minutes
SHOWN = 300  # characters of a text in a list
SEEN, EDGE = 600, 200  # characters that are searched for secrets, and at their end too few to recognise one
EVERY = frozenset({"all", "*"})

Files: TypeAlias = list[tuple[str, bytes]]
Asked: TypeAlias = tuple[Caller, Spawn, str, Origin, str]
"""Who asks for what, the task's id, from where in the house, and for which session."""


class Killed(msgspec.Struct, frozen=True, kw_only=True):
    """Sub-agents that were told to stop, by what their session calls them; or the one that had nothing to stop."""

    keys: list[str]
    names: list[str]
    finished: str | None = None


class Tasks(Exchanges, Sessions):
    async def spawn(
        self, caller: Caller, wanted: Spawn, origin: Origin | None = None, *, requester: str = "main"
    ) -> Spawned:
        """A sub-agent with a session of its own, durable when this returns. Its report comes by itself.

        An agent spawns for its own session; an operator says for which (`requester`).
        """
        access.require_scope(caller, "spawn")
        files = self._rules.check(wanted)
        engine = self._running()
        origin = origin or Origin()
        task_id = request_id(caller, wanted.idempotency_key, origin)
        if caller.is_operator:
            await self.open(caller, requester)  # the first word to a session may be a spawn for it
        given = (caller, wanted, task_id, origin, requester)
        try:
            task, accepted = await self._spawn_with(files, given)
        except ChainTooLong as error:
            self.warn_of_chain(caller, error)
            raise
        if accepted is not None:
            self._tell_created(task["child_key"])
            await engine.accepted(accepted)
            await self._look_for_files([(task["child_session_id"], task["child_key"])])  # for its report
        return _spawned(caller, task, files)

    async def _spawn_with(self, files: Files, given: Asked) -> tuple[Row, Accepted | None]:
        """Whatever can be refused is refused before a file is written; if it is refused after that, they go again."""
        spawning = await self._store.read(self._plan, *given, self._clock.now()) if files else None
        if not isinstance(spawning, Spawning):
            return await self._store.tx(self._spawn, *given, self._clock.now())
        await asyncio.to_thread(_write, spawning, given[1], files)
        try:
            return await self._store.tx(self._spawn, *given, self._clock.now())
        except Exception:
            # Any refusal or failure, which is passed on. Not a cancellation: the commit may still come, with a task
            # that needs its files.
            if await self._store.read(_task, spawning.id) is None:
                await asyncio.to_thread(attachments.remove, _workspace(spawning), spawning.child_key.id)
            raise

    async def _spawn(
        self, tx: Tx, caller: Caller, wanted: Spawn, task_id: str, origin: Origin, requester: str, now: int
    ) -> tuple[Row, Accepted | None]:
        plan = await self._plan(tx, caller, wanted, task_id, origin, requester, now)
        return await tasks.begin(tx, plan, now) if isinstance(plan, Spawning) else (plan, None)

    async def _plan(
        self, tx: Tx, caller: Caller, wanted: Spawn, task_id: str, origin: Origin, requester: str, now: int
    ) -> Spawning | Row:
        """What is to be spawned; or the task, if it was before: then nothing is left to refuse."""
        above = await self._acting(tx, caller, "send", requester, now, [])  # spawn has opened it before
        if above is None:
            raise access.missing(requester)
        if before := await tasks.known(tx, task_id, above["id"], wanted.digest(above["key"])):
            return before
        await _check_at_work(tx, origin)
        link = await self._link(tx, origin, above["id"], task_id)
        asking = Requester(above, self._door.acting_agent(caller, requester, above))
        spawning = await self._rules.plan(tx, caller, asking, wanted, task_id, link, now)
        addressee = await sequels.addressee_of(tx, origin.run_id)
        if addressee is None:
            return spawning
        # Somebody is named to hear what this run comes to; what it has others do is for them, too.
        return msgspec.structs.replace(spawning, destination=addressee.destination)

    async def tasks(
        self, caller: Caller, session: str = "current", recent_minutes: int = RECENT
    ) -> list[TaskView]:
        """What a session has spawned: everything at work, and what has ended lately. The newest first.

        Secrets are masked, and of long texts there is the beginning; `task_report` has the whole.
        """
        since = self._since(recent_minutes)
        found = await self._store.read(self._tasks, caller, session, since)
        return await asyncio.to_thread(lambda: [_in_a_list(task) for task in found])

    def _since(self, recent_minutes: int) -> int:
        return self._clock.now() - between(recent_minutes, 1, RECENT_MOST, "recentMinutes") * 60_000

    async def _tasks(self, tx: Tx, caller: Caller, session: str, since: int) -> list[TaskView]:
        row = await self._door.open(tx, caller, "read", session)
        return await self._spawned_by(tx, caller, row, since)

    async def _spawned_by(self, tx: Tx, caller: Caller, requester: Row, since: int) -> list[TaskView]:
        found = await tx.all(tasks.SQL.of, requester=requester["id"], since=since, limit=LISTED, chars=SEEN)
        return [task_view(row, caller.agent_id) for row in found]

    async def task_report(self, caller: Caller, run_id: str) -> str | None:
        """What was said of a task, in the words in which it was; None while there is nothing to say.

        Of one that nobody was told of it is what there would have been to say.
        """
        task = await self._store.read(self._reported, caller, run_id)
        return await asyncio.to_thread(_report, task) if task["phase"] == "settled" else None

    async def _reported(self, tx: Tx, caller: Caller, run_id: str) -> Row:
        missing = NotFound(f"There is no sub-agent {run_id[:80]!r}.", "Check the run id its spawn answered.")
        task = await _task(tx, run_id)
        if task is None:
            raise missing
        try:
            requester = await self._door.open(tx, caller, "read", task["requester_key"])
        except NotFound:
            raise missing from None
        if requester["id"] != task["requester"]:  # the key is another session's by now
            raise missing
        return task

    async def kill(
        self,
        caller: Caller,
        target: str | None,
        session: str = "current",
        recent_minutes: int = RECENT,
        *,
        key: str | None = None,
    ) -> Killed:
        """Stop one of a session's sub-agents, by any of its names, or `all` of them; and everything below.

        Asked again with the same key, nothing is stopped again, whatever the name means by then.
        """
        words.check_key(key)
        engine = self._running()
        since = self._since(recent_minutes)
        killed, stops = await self._store.tx(
            self._kill, caller, target, session, since, key, self._clock.now()
        )
        for row, stopped in stops:
            await engine.stopping(stopped)
            if stopped.ended or stopped.asked:
                self._tell(row, "abort")
        return killed

    async def _kill(
        self, tx: Tx, caller: Caller, target: str | None, session: str, since: int, key: str | None, now: int
    ) -> tuple[Killed, list[tuple[Row, runs.Stopped]]]:
        requester = await self._door.open(tx, caller, "control", session)
        command = Command(key, ("kill", requester["id"], target))
        if before := await commands.answered(tx, command, Killed):
            return before, []
        found = await self._spawned_by(tx, caller, requester, since)
        meant = found if target in EVERY else [_chosen(target, found)]
        over = meant[0].name if target not in EVERY and meant[0].phase == "settled" else None
        stopped: list[tuple[TaskView, Row, runs.Stopped]] = []
        for task in meant:
            if row := await self._at_work(tx, caller, task):
                stopped.append((task, row, await runs.cancel(tx, row["id"], None, now)))
        killed = Killed(
            keys=[task.child_session_key for task, *_ in stopped],
            names=[task.name for task, *_ in stopped],
            finished=over,
        )
        await commands.record(tx, command, killed, now)
        return killed, [(row, stop) for _, row, stop in stopped]

    async def _at_work(self, tx: Tx, caller: Caller, task: TaskView) -> Row | None:
        """The child's session, if there is anything in it to stop."""
        if task.phase == "settled":
            return None
        try:
            return await self._door.open(tx, caller, "control", task.child_session_key)
        except NotFound:  # deleted: its task is reported without it
            return None

    async def task(self, caller: Caller, target: str | None, recent_minutes: int = RECENT) -> TaskView:
        """The sub-agent of the caller's session that is meant by a name, as it is in the list."""
        return _chosen(
            target, await self._store.read(self._tasks, caller, "current", self._since(recent_minutes))
        )

    async def steered(self, caller: Caller, run_id: str) -> str | None:
        """The sub-agent that a run of this id has redirected, by its name; None if there is no such run."""
        return await self._store.read(self._steered, caller, run_id)

    async def _steered(self, tx: Tx, caller: Caller, run_id: str) -> str | None:
        run = await tx.one(runs.SQL.by_id, id=run_id, viewer=caller.session_key)
        if run is None:
            return None
        self._door.admit(caller, "read", run, run_id)
        task = await tx.one(tasks.SQL.by_child, key=run["key"])
        label: str | None = task["label"] if task else None
        return label or keys.display_text(run["key"], viewer_agent_id=caller.agent_id)

    async def yield_to_tasks(self, caller: Caller, origin: Origin, how: Literal["all", "any"] = "all") -> int:
        """The caller's session is woken when all that it has spawned has reported, or any of it; how many are at work.

        What has reported during the run that asks is still on its way into the transcript, and counts.
        """
        left, woken = await self._store.tx(self._yield, caller, origin, how, self._clock.now())
        if woken is not None:
            await self._running().accepted(woken)
        return left

    async def _yield(
        self, tx: Tx, caller: Caller, origin: Origin, how: Literal["all", "any"], now: int
    ) -> tuple[int, Accepted | None]:
        row = await self._door.open(tx, caller, "control", "current")
        agent_id = self._door.other_agent(caller, "current", row)
        left, reported = await tasks.standing(tx, row["id"], origin.run_id)
        if not left or how == "any":
            # Repeated after a crash, or after a report that wakes by itself: there is one wake for a turn.
            if await tasks.woken_anyway(tx, row["id"], origin.run_id, agent_id):
                return left, None
            if reported:
                waking = Waking(row["id"], row["key"], origin.key or "", agent_id)
                woken = await tasks.wake(tx, waking, reported, now)
                if woken is not None:
                    await yields.hand_one(tx, origin.run_id, woken.run_id)
                return left, woken
        if not left:
            raise Conflict(
                "There is no sub-agent at work to wait for.", "Go on, or spawn one with sessions_spawn first."
            )
        await yields.begin(tx, row["id"], origin.run_id, how)
        return left, None


async def _task(tx: Tx, id: str) -> Row | None:
    return await tx.one(tasks.SQL.by_id, id=id)


def _in_a_list(task: TaskView) -> TaskView:
    return msgspec.structs.replace(
        task, task=_beginning(task.task), result=_beginning(task.result), error=_beginning(task.error)
    )


@overload
def _beginning(text: str) -> str: ...
@overload
def _beginning(text: None) -> None: ...
def _beginning(text: str | None) -> str | None:
    if not text:
        return text
    masked = redact(text)
    if len(text) >= SEEN:  # what the end cuts apart is not recognised, so it is not shown
        masked = masked[: max(0, len(masked) - EDGE)]
    return masked if len(masked) <= SHOWN and len(text) < SEEN else f"{masked[:SHOWN]}…"


def _chosen(target: str | None, found: Sequence[TaskView]) -> TaskView:
    """By what a model is likely to write: a number, a key, an id or a label, in full or its beginning."""
    if not target:
        raise InvalidInput(
            "No sub-agent is named.", "Set target to one that action 'list' shows.", field="target"
        )
    if target == "last" and found:
        return found[0]
    if target.isdecimal() and len(target) < 5 and 0 < int(target) <= len(found):
        return found[int(target) - 1]
    exact = [t for t in found if target in (t.child_session_key, t.run_id, t.label)]
    said = target.lower()
    fitting = exact or [
        t for t in found if (t.label or "").lower().startswith(said) or t.run_id.startswith(target)
    ]
    if len(fitting) > 1:
        candidates = [task.child_session_key for task in fitting]
        raise Ambiguous(
            f"{len(fitting)} sub-agents fit {target[:80]!r}: {', '.join(candidates[:10])}.",
            "Pass one of these keys.",
            candidates=candidates[:10],
        )
    if not fitting:
        raise NotFound(f"No sub-agent fits {target[:80]!r}.", "Use action 'list' to see them.")
    return fitting[0]


async def _check_at_work(tx: Tx, origin: Origin) -> None:
    """What a run had spawned was stopped with it; what it was about to spawn must not come after that."""
    if await tx.one(runs.SQL.over, id=origin.run_id):
        raise Conflict(
            f"Run {origin.run_id!r} has ended or was stopped.",
            "Spawn from a run that is under way.",
            run_id=origin.run_id,
        )


def _report(task: Row) -> str:
    locale = tasks.read_options(task).locale
    if task["report"] is None:
        return gate.clear(report_text(_unsaid(task), locale))
    report = msgspec.json.decode(task["report"], type=Report)
    return f"{gate.clear(report_text(report, locale))}\n\n{stats_line(report.stats, locale)}"


def _unsaid(task: Row) -> Report:
    return Report(
        status=task["outcome"],
        result=(task["result"] or "")[: tasks.RESULT_MOST],
        result_source=task["result_source"],
        notes=task["error"],
        stats=Stats(),
    )


def _workspace(spawning: Spawning) -> Path:
    return Path(spawning.options.workspace or "")


def _write(spawning: Spawning, wanted: Spawn, files: Files) -> None:
    workspace = _workspace(spawning)
    workspace.mkdir(mode=0o700, parents=True, exist_ok=True)
    types = attachments.mime_types(wanted.attachments)
    attachments.write(workspace, spawning.child_key.id, files, mime_types=types)


def _spawned(caller: Caller, task: Row, files: Files) -> Spawned:
    options = tasks.read_options(task)
    folder = options.attachments
    return Spawned(
        run_id=task["id"],
        child_session_key=keys.display_text(task["child_key"], viewer_agent_id=caller.agent_id),
        mode=options.mode,
        attachments=attachments.receipt(folder, files) if folder and files else msgspec.UNSET,
    )
