"""Runs: their state, waiting for their end, and stopping them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

import msgspec

from antiphon.access import Caller
from antiphon.bus import RunChanged, run_topic
from antiphon.engine import validation
from antiphon.engine.runs import client_history, endings, lifecycle, run_queue
from antiphon.engine.runs.effects import NO_EFFECTS, Effects
from antiphon.engine.sessions import session_rows
from antiphon.errors import Conflict, NotFound
from antiphon.messages import ToolCall
from antiphon.operations import types
from antiphon.operations.context import INTERNAL_CALLER, OperationContext
from antiphon.operations.types import RunView, StopView
from antiphon.store import Row, Tx

MAX_STOP_ROUNDS = 10  # rounds of stopping runs that were queued by stopping others
RUN_WAIT_POLL_SECONDS = 2.0  # a wait reads the row this often even without an event


class IdleChange(msgspec.Struct, frozen=True):
    """A change to apply once a session is idle: whether it was already done, its precondition, and the change."""

    was_done: Callable[[Tx, int], Awaitable[bool]]
    check: Callable[[Row], None]
    change: Callable[[Tx, Row, int], Awaitable[Row]]


class RunOperations:
    def __init__(self, context: OperationContext) -> None:
        self._context = context

    async def get(self, caller: Caller, run_id: str) -> RunView:
        """Return the state of a run."""
        return await self._context.store.read(self.load_view, caller, run_id)

    async def wait(self, caller: Caller, run_id: str, timeout: float) -> RunView:
        """Wait until the run has ended or `timeout` seconds are over; `has_ended` shows which.

        A wait holds nothing: it can be dropped and repeated from anywhere, before and after the end.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout
        async with self._context.bus.listen(run_topic(run_id)) as events:
            while True:
                view = await self._context.store.read(self.load_view, caller, run_id)
                left = until - loop.time()
                if view.has_ended or left <= 0:
                    return view
                event = await events.get(min(left, RUN_WAIT_POLL_SECONDS))
                if isinstance(event, RunChanged) and event.ended_at is not None:
                    return types.apply_run_end(view, event)

    async def load_view(self, tx: Tx, caller: Caller, run_id: str) -> RunView:
        row = await lifecycle.load_run(tx, run_id, caller.session_key)
        missing = NotFound(
            f"Run {run_id!r} was not found.", "Check the id; it is given when a message is accepted."
        )
        if row is None:
            raise missing
        try:
            self._context.session_resolver.authorize(caller, "read", row, run_id)
        except NotFound:
            raise missing from None
        spent = await lifecycle.load_run_usage(tx, run_id) if row["ended_at"] else None
        return types.build_run_view(row, spent, self._context.clock.now())

    async def list_client_calls(self, caller: Caller, run_id: str) -> list[ToolCall]:
        """Return the calls of client-side tools that a run ended with, to be answered by a later request."""
        return await self._context.store.read(self._load_client_calls, caller, run_id)

    async def _load_client_calls(self, tx: Tx, caller: Caller, run_id: str) -> list[ToolCall]:
        await self.load_view(tx, caller, run_id)
        return await client_history.load_client_calls(tx, run_id)

    async def list_unfinished(self, caller: Caller, session: str) -> list[str]:
        """Return the ids of the running and queued runs of a session, in their order."""
        return await self._context.store.read(self.load_unfinished, caller, session)

    async def load_unfinished(self, tx: Tx, caller: Caller, session: str) -> list[str]:
        row = await self._context.session_resolver.open(tx, caller, "read", session)
        return await lifecycle.list_unfinished_run_ids(tx, row["id"])

    async def stop(
        self, caller: Caller, session: str, run_id: str | None = None, *, key: str | None = None
    ) -> StopView:
        """Stop the running and queued runs of a session, and everything below it in its tree.

        A repeated call with the same key stops nothing.
        """
        validation.validate_idempotency_key(key)
        worker = self._context.require_worker()
        row, stopped = await self._context.store.tx(
            self._stop, caller, session, run_id, key, self._context.clock.now()
        )
        await worker.apply_effects(stopped)
        run_ids = stopped.stopped_run_ids
        if run_ids:
            self._context.publish_change(row, "abort")
        return StopView(run_ids)

    async def _stop(
        self, tx: Tx, caller: Caller, session: str, run_id: str | None, key: str | None, now: int
    ) -> tuple[Row, Effects]:
        row = await self._context.session_resolver.open(tx, caller, "control", session)
        if key is not None and not await run_queue.record_command(tx, key, row["id"], "stop", now):
            return row, NO_EFFECTS
        return row, await endings.cancel_runs(tx, row["id"], run_id, now)

    # --- changes of an idle session ---

    async def change_when_idle(
        self, caller: Caller, session: str, plan: IdleChange, timeout: float
    ) -> Row | None:
        """Stop everything that runs or waits in a session, and change it in the transaction that finds it idle.

        Returns None if the change was already done.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout
        while True:
            row, stopped, active = await self._context.store.tx(
                self._try_change_idle, caller, session, plan, self._context.clock.now()
            )
            if (
                self._context.worker is not None
            ):  # without a worker, the effects are applied at the next start
                await self._context.worker.apply_effects(stopped)
            if row is None or active is None:
                return row
            left = until - loop.time()
            if left <= 0:
                raise Conflict(
                    f"Session {row['key']} is still active;", "try again in a moment.", key=row["key"]
                )
            with suppress(NotFound):  # deleted by another caller; the next iteration handles it
                # The right to manage a session does not include reading it, so the wait uses an internal caller.
                await self.wait(INTERNAL_CALLER, active["id"], left)

    async def _try_change_idle(
        self, tx: Tx, caller: Caller, session: str, plan: IdleChange, now: int
    ) -> tuple[Row | None, Effects, Row | None]:
        if await plan.was_done(tx, now):
            return None, NO_EFFECTS, None
        row = await self._context.session_resolver.open(tx, caller, "manage", session)
        plan.check(row)
        stopped = await self._stop_all(tx, row["id"], now)
        active = await session_rows.find_unfinished_run(tx, row["id"])
        return row if active else await plan.change(tx, row, now), stopped, active

    async def _stop_all(self, tx: Tx, session: int, now: int) -> Effects:
        """Stop the running run of a session and drop queued ones, also those queued because others were dropped."""
        stopped = NO_EFFECTS
        for _ in range(MAX_STOP_ROUNDS):
            stopped += await endings.cancel_runs(tx, session, None, now)
            stopped += await self.end_abandoned(tx, session, now)
            left = await session_rows.find_unfinished_run(tx, session)
            # The process that executes it was asked to stop; the caller waits for it.
            if left is None or left["running"]:
                break
        return stopped

    async def end_abandoned(self, tx: Tx, session: int, now: int) -> Effects:
        """End a run whose process is gone. Without a worker this process owns the store, so no other executes it."""
        if self._context.worker is not None:
            return NO_EFFECTS
        return await endings.end_abandoned_run(tx, session, now, shared=self._context.store.shared)
