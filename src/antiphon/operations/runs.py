"""Runs: their state, waiting for their end, and stopping them."""

from __future__ import annotations

import asyncio

import msgspec

from antiphon import views
from antiphon.access import Caller
from antiphon.bus import RunChanged, run_topic
from antiphon.engine import validation
from antiphon.engine.runs import endings, lifecycle, run_options, run_queue
from antiphon.engine.runs.effects import NO_EFFECTS, Effects
from antiphon.errors import NotFound
from antiphon.messages import ToolCall
from antiphon.operations.context import OperationContext
from antiphon.store import Row, Tx
from antiphon.views import RunView

RUN_WAIT_POLL_SECONDS = 2.0  # a wait reads the row this often even without an event


class StopView(msgspec.Struct, frozen=True):
    """Runs that were ended or asked to end."""

    run_ids: list[str]


class RunOperations(OperationContext):
    async def get_run(self, caller: Caller, run_id: str) -> RunView:
        """Return the state of a run."""
        return await self._store.read(self._load_run_view, caller, run_id)

    async def wait(self, caller: Caller, run_id: str, timeout: float) -> RunView:
        """Wait until the run has ended or `timeout` seconds are over; `has_ended` tells which.

        A wait holds nothing: it can be dropped and repeated from anywhere, before and after the end.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout
        async with self._bus.listen(run_topic(run_id)) as events:
            while True:
                view = await self._store.read(self._load_run_view, caller, run_id)
                left = until - loop.time()
                if view.has_ended or left <= 0:
                    return view
                event = await events.get(min(left, RUN_WAIT_POLL_SECONDS))
                if isinstance(event, RunChanged) and event.ended_at is not None:
                    return views.apply_run_end(view, event)

    async def _load_run_view(self, tx: Tx, caller: Caller, run_id: str) -> RunView:
        row = await tx.one(lifecycle.SQL.by_id, id=run_id, viewer=caller.session_key)
        missing = NotFound(
            f"Run {run_id!r} was not found.", "Check the id; it is given when a message is accepted."
        )
        if row is None:
            raise missing
        try:
            self._session_resolver.authorize(caller, "read", row, run_id)
        except NotFound:
            raise missing from None
        spent = await tx.one(lifecycle.SQL.sum_usage, id=run_id) if row["ended_at"] else None
        return views.build_run_view(row, spent, self._clock.now())

    async def list_client_calls(self, caller: Caller, run_id: str) -> list[ToolCall]:
        """Return the calls of client-side tools that a run ended with, to be answered by a later request."""
        return await self._store.read(self._load_client_calls, caller, run_id)

    async def _load_client_calls(self, tx: Tx, caller: Caller, run_id: str) -> list[ToolCall]:
        await self._load_run_view(tx, caller, run_id)
        return await run_options.load_client_calls(tx, run_id)

    async def list_unfinished_runs(self, caller: Caller, session: str) -> list[str]:
        """Return the ids of the running and queued runs of a session, in their order."""
        return await self._store.read(self._load_unfinished_runs, caller, session)

    async def _load_unfinished_runs(self, tx: Tx, caller: Caller, session: str) -> list[str]:
        row = await self._session_resolver.open(tx, caller, "read", session)
        active = await tx.all(lifecycle.SQL.active_in_session, session=row["id"])
        queued = await tx.all(lifecycle.SQL.queued_in_session, session=row["id"])
        return [run["id"] for run in [*active, *queued]]

    async def stop(
        self, caller: Caller, session: str, run_id: str | None = None, *, key: str | None = None
    ) -> StopView:
        """Stop the running and queued runs of a session, and everything below it in its tree.

        A repeated call with the same key stops nothing.
        """
        validation.validate_idempotency_key(key)
        engine = self._require_engine()
        row, stopped = await self._store.tx(self._stop, caller, session, run_id, key, self._clock.now())
        await engine.apply_effects(stopped)
        run_ids = stopped.stopped_run_ids
        if run_ids:
            self._publish_change(row, "abort")
        return StopView(run_ids)

    async def _stop(
        self, tx: Tx, caller: Caller, session: str, run_id: str | None, key: str | None, now: int
    ) -> tuple[Row, Effects]:
        row = await self._session_resolver.open(tx, caller, "control", session)
        if key is not None and not await run_queue.record_command(tx, key, row["id"], "stop", now):
            return row, NO_EFFECTS
        return row, await endings.cancel_runs(tx, row["id"], run_id, now)
