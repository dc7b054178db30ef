"""Sub-agents: spawning them, seeing what becomes of them, and ending one's turn to wait for them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Literal

import msgspec

from antiphon import access, keys
from antiphon.access import Caller
from antiphon.engine import attachments, chains, gate, tasks
from antiphon.engine.admissions import Accepted
from antiphon.engine.attachments import Receipt
from antiphon.engine.chains import Limits
from antiphon.engine.tasks import Spawning
from antiphon.engine.wording import Report, report_text, stats_line
from antiphon.errors import ChainTooLong, Conflict
from antiphon.operations.checks import between
from antiphon.operations.exchanges import Exchanges, Origin, request_id
from antiphon.operations.sessions import Sessions
from antiphon.operations.spawns import Spawn
from antiphon.store import Row, Tx
from antiphon.views import Spawned, TaskView, task_view

LISTED = 200
RECENT, RECENT_MOST = 30, 1440  # minutes


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
        receipt = None
        given = (caller, wanted, task_id, origin, requester)
        try:
            if files:
                # Whatever can be refused is refused before a file is written.
                spawning = await self._store.read(self._plan, *given, self._clock.now())
                receipt = await asyncio.to_thread(_write, spawning, wanted, files)
            task, accepted = await self._store.tx(self._spawn, *given, self._clock.now())
        except ChainTooLong as error:
            self.warn_of_chain(caller, error)
            raise
        if accepted is not None:
            self._tell_created(task["child_key"])
            await engine.accepted(accepted)
        return _spawned(caller, task, receipt)

    async def _spawn(
        self, tx: Tx, caller: Caller, wanted: Spawn, task_id: str, origin: Origin, requester: str, now: int
    ) -> tuple[Row, Accepted | None]:
        if before := await tasks.known(tx, task_id, wanted.digest):
            return before, None
        return await tasks.begin(
            tx, await self._plan(tx, caller, wanted, task_id, origin, requester, now), now
        )

    async def _plan(
        self, tx: Tx, caller: Caller, wanted: Spawn, task_id: str, origin: Origin, requester: str, now: int
    ) -> Spawning:
        above = await self._acting(tx, caller, "send", requester)
        if above is None:
            raise access.missing(requester)
        limits = self.config.session.agent_to_agent
        bounds = Limits(limits.max_hops, limits.max_runs)
        link = await chains.link(tx, origin.run_id, above["id"], task_id, bounds)
        return await self._rules.plan(tx, caller, above, wanted, task_id, link, now)

    async def tasks(
        self, caller: Caller, session: str = "current", recent_minutes: int = RECENT
    ) -> list[TaskView]:
        """What a session has spawned: everything at work, and what has ended lately. The newest first."""
        minutes = between(recent_minutes, 1, RECENT_MOST, "recentMinutes")
        since = self._clock.now() - minutes * 60_000
        rows = await self._store.read(self._tasks, caller, session, since)
        return [msgspec.structs.replace(task_view(row, caller.agent_id), report=_report(row)) for row in rows]

    async def _tasks(self, tx: Tx, caller: Caller, session: str, since: int) -> list[Row]:
        row = await self._door.open(tx, caller, "read", session)
        return await tx.all(tasks.SQL.of, requester=row["id"], since=since, limit=LISTED)

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
        left, reported = await tasks.standing(tx, row["id"], origin.run_id)
        # Repeated after a crash, or after a report that wakes by itself: there is one wake for a turn.
        waking = await tasks.waking(tx, row["id"])
        if left and not (how == "any" and (reported or waking)):
            await tx.do(tasks.SQL.yield_to, session=row["id"], how=how)
            return left, None
        if waking:
            return left, None
        if not reported:
            raise Conflict(
                "There is no sub-agent at work to wait for.", "Go on, or spawn one with sessions_spawn first."
            )
        return left, await tasks.wake(tx, row["id"], row["key"], origin.key or "", reported, now)


def _report(task: Row) -> str | None:
    """What was said of it, in the words in which it was."""
    if task["report"] is None:
        return None
    report = msgspec.json.decode(task["report"], type=Report)
    locale = tasks.read_options(task).locale
    return f"{gate.clear(report_text(report, locale))}\n\n{stats_line(report.stats, locale)}"


def _write(spawning: Spawning, wanted: Spawn, files: list[tuple[str, bytes]]) -> Receipt:
    workspace = Path(spawning.options.workspace or "")
    workspace.mkdir(mode=0o700, parents=True, exist_ok=True)
    return attachments.write(
        workspace, spawning.child_key.id, files, mime_types=attachments.mime_types(wanted.attachments)
    )


def _spawned(caller: Caller, task: Row, receipt: Receipt | None) -> Spawned:
    options = tasks.read_options(task)
    return Spawned(
        run_id=task["id"],
        child_session_key=keys.display_text(task["child_key"], viewer_agent_id=caller.agent_id),
        mode=options.mode,
        attachments=msgspec.UNSET if receipt is None else receipt,
    )
