"""Runs: where they are, waiting for their end, and stopping them."""

from __future__ import annotations

import asyncio

import msgspec

from antiphon import views
from antiphon.access import Caller
from antiphon.bus import RunChanged, run_topic
from antiphon.engine import admissions, runs, words
from antiphon.errors import NotFound
from antiphon.messages import ToolCall
from antiphon.operations.core import Core
from antiphon.store import Row, Tx
from antiphon.views import RunView

LOOK_AGAIN = 2.0  # seconds after which a wait reads the row though no event came


class StopView(msgspec.Struct, frozen=True):
    """Runs that were ended or told to end."""

    run_ids: list[str]


class Runs(Core):
    async def run(self, caller: Caller, run_id: str) -> RunView:
        """Where a run is."""
        return await self._store.read(self._run, caller, run_id)

    async def wait(self, caller: Caller, run_id: str, timeout: float) -> RunView:
        """Until the run has ended or `timeout` seconds are over; look at `ended` to see which.

        A wait holds nothing: it can be dropped and repeated from anywhere, before and after the end.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout
        async with self._bus.listen(run_topic(run_id)) as events:
            while True:
                view = await self._store.read(self._run, caller, run_id)
                left = until - loop.time()
                if view.ended or left <= 0:
                    return view
                event = await events.get(min(left, LOOK_AGAIN))
                if isinstance(event, RunChanged) and event.ended_at is not None:
                    return views.ended_view(view, event)

    async def _run(self, tx: Tx, caller: Caller, run_id: str) -> RunView:
        row = await tx.one(runs.SQL.by_id, id=run_id, viewer=caller.session_key)
        missing = NotFound(
            f"Run {run_id!r} was not found.", "Check the id; it is given when a message is accepted."
        )
        if row is None:
            raise missing
        try:
            self._door.admit(caller, "read", row, run_id)
        except NotFound:
            raise missing from None
        spent = await tx.one(runs.SQL.spent, id=run_id) if row["ended_at"] else None
        return views.run_view(row, spent, self._clock.now())

    async def client_calls(self, caller: Caller, run_id: str) -> list[ToolCall]:
        """The calls of client-side tools that a run ended with, to be answered by a later request."""
        return await self._store.read(self._client_calls, caller, run_id)

    async def _client_calls(self, tx: Tx, caller: Caller, run_id: str) -> list[ToolCall]:
        await self._run(tx, caller, run_id)
        return await runs.client_calls(tx, run_id)

    async def unfinished(self, caller: Caller, session: str) -> list[str]:
        """Ids of the runs that play or wait in a session, in their order."""
        return await self._store.read(self._unfinished, caller, session)

    async def _unfinished(self, tx: Tx, caller: Caller, session: str) -> list[str]:
        row = await self._door.open(tx, caller, "read", session)
        active = await tx.all(runs.SQL.active_in, session=row["id"])
        queued = await tx.all(runs.SQL.queued_in, session=row["id"])
        return [run["id"] for run in [*active, *queued]]

    async def stop(
        self, caller: Caller, session: str, run_id: str | None = None, *, key: str | None = None
    ) -> StopView:
        """Stop what runs or waits in a session, and everything below it in its tree.

        Asked again with the same key, nothing is stopped again.
        """
        words.check_key(key)
        engine = self._running()
        row, stopped = await self._store.tx(self._stop, caller, session, run_id, key, self._clock.now())
        await engine.stopping(stopped)
        run_ids = [*(ended.run_id for ended in stopped.ended), *stopped.asked]
        if run_ids:
            self._tell(row, "abort")
        return StopView(run_ids)

    async def _stop(
        self, tx: Tx, caller: Caller, session: str, run_id: str | None, key: str | None, now: int
    ) -> tuple[Row, runs.Stopped]:
        row = await self._door.open(tx, caller, "control", session)
        if key is not None and not await admissions.record_command(tx, key, row["id"], "stop", now):
            return row, runs.Stopped([], [])
        return row, await runs.cancel(tx, row["id"], run_id, now)
