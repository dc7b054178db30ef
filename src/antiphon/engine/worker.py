"""Claims, executes, ends and stops the runs of one process, lane by lane.

A worker keeps nothing in memory that must survive a crash. `active_runs` are the runs that it executes; after a crash,
another process resumes them from their transcripts. What a commit leads to is applied here (`apply_effects`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Generator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeAlias

import msgspec

from antiphon.bus import COMMANDS_TOPIC, CommandStopRequested, EventBus, Gap, StopRequested, session_topic
from antiphon.clock import Clock
from antiphon.engine.events import EventPublisher
from antiphon.engine.outbox.sender import Outbox
from antiphon.engine.runs import approval_rows, endings, lifecycle
from antiphon.engine.runs.approval_gate import ApprovalGate
from antiphon.engine.runs.deltas import DeltaStream
from antiphon.engine.runs.effects import Effects, EndedRun, ExpiredApproval, RunEnding, RunOutcome
from antiphon.engine.runs.lifecycle import Claim, Claimant, retry_while_store_full
from antiphon.engine.runs.run_loop import RunLoop, RunSetup
from antiphon.engine.runs.run_queue import QUIET_ORIGINS, SANITIZED_ORIGINS, AcceptedRun
from antiphon.engine.sessions.transcripts import Entry
from antiphon.errors import (
    AntiphonError,
    CrashSuspected,
    Fenced,
    ProviderError,
    RunFailed,
    StoreError,
    StoreFull,
    StoreReplaced,
)
from antiphon.lanes import LaneEngine
from antiphon.messages import AssistantMessage
from antiphon.runtimes.text import repair_surrogates
from antiphon.store import Store
from antiphon.tracing import start_span

log = logging.getLogger(__name__)

STOP_TOPIC = "stops"  # stop requests for all processes
MAX_CONSECUTIVE_RUNS_PER_LANE = 64  # then other waiting lanes get their turn
MAX_SUSPECT_TURN_SECONDS = (
    15.0  # then the next crash suspect may start too, so a long answer does not block the others
)
ALL_SUSPECTS_START_SECONDS = 60.0  # all suspects start within this time; most crashes happen immediately

RunSetupLoader: TypeAlias = Callable[[Claim], Coroutine[Any, Any, RunSetup]]


class ActiveRun(msgspec.Struct):
    """A run being executed: how to stop it, and its outcome if it is stopped."""

    lane: int
    timeout: asyncio.Timeout
    outcome: RunOutcome = "timeout"

    def cancel(self) -> None:
        if not self.timeout.expired():
            self.outcome = "cancelled"
            self.timeout.reschedule(asyncio.get_running_loop().time())


def compute_turn_seconds(left: float, behind: int) -> float:
    """Return how long a suspect runs alone, given the time left and the number of suspects waiting behind it."""
    return min(MAX_SUSPECT_TURN_SECONDS, max(0.0, left) / (1 + behind))


class CrashQuarantine:
    """Retries crash suspects one at a time.

    A crash interrupts every active run and does not show which one caused it. A run that was interrupted several times
    without progress is a suspect, and suspects are not started concurrently. So a run that kills its process
    immediately is quarantined without affecting the others. A run that kills it later, or after waiting for another
    session, may still interrupt suspects that were started in the meantime.
    """

    def __init__(self) -> None:
        self._slot = asyncio.Lock()
        self._waiting = 0
        self._until = 0.0
        self._lane: int | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def enter(self, lane: int) -> None:
        """Wait until no other suspect has the slot, then hold it for a limited time."""
        loop = asyncio.get_running_loop()
        if not self._waiting:
            self._until = loop.time() + ALL_SUSPECTS_START_SECONDS
            if self._slot.locked():
                log.warning("Starting runs that were interrupted several times one at a time")
        self._waiting += 1
        try:
            await self._slot.acquire()
        finally:
            self._waiting -= 1
        self._lane = lane
        seconds = compute_turn_seconds(self._until - loop.time(), self._waiting)
        self._timer = loop.call_later(seconds, self.leave, lane)

    def leave(self, lane: int) -> None:
        """Release the slot if this lane holds it: its run made progress, ended, takes long or waits for another."""
        if self._lane == lane and self._timer:
            self._timer.cancel()
            self._lane = self._timer = None
            self._slot.release()


class Worker:
    def __init__(
        self,
        *,
        store: Store,
        lanes: LaneEngine,
        bus: EventBus,
        clock: Clock,
        events: EventPublisher,
        outbox: Outbox,
        load_run_setup: RunSetupLoader,
        owner: str,
        max_attempts: int,
        max_run_ms: int,
    ) -> None:
        self._store = store
        self._lanes = lanes
        self._bus = bus
        self._clock = clock
        self._events = events
        self._outbox = outbox
        self._load_run_setup = load_run_setup
        self._owner = owner
        self._max_attempts = max_attempts
        self._max_run_ms = max_run_ms
        self._crash_quarantine = CrashQuarantine()
        self._waits_by_lane: dict[int, int] = {}
        self._approval_gate = ApprovalGate(store, bus, clock, self.release_lane_slot)
        self.active_runs: dict[str, ActiveRun] = {}
        self.run_ids_committing_end: set[str] = set()
        """Runs whose end is being committed, which may wait for disk space."""
        self.is_stopping = False
        """Whether lanes claim no further runs, because the process stops."""

    # --- after a commit ---

    async def dispatch_accepted_run(self, accepted: AcceptedRun) -> None:
        """Publish a queued run and wake its lane; called after the commit."""
        if accepted.new and not accepted.note:
            self._events.publish_phase(accepted.session, accepted.session_key, accepted.run_id, "queued")
        await self._lanes.activate(accepted.session)

    def wake_outbox(self) -> None:
        """Wake the outbox after a delivery was added."""
        self._outbox.wake()

    async def apply_effects(self, effects: Effects) -> None:
        """Publish what a commit led to, wake the lanes of queued runs, and ask the owners of runs to stop them."""
        for item in effects.items:
            match item:
                case EndedRun():
                    self._events.publish_ended_run(item)
                case AcceptedRun():
                    await self.dispatch_accepted_run(item)
                case StopRequested():
                    self._bus.publish(STOP_TOPIC, item)
                case CommandStopRequested():
                    self._bus.publish(COMMANDS_TOPIC, item)
                case ExpiredApproval():
                    approval_rows.publish_approval(self._bus, item.session, item.event)
        if effects.has_deliveries:
            self._outbox.wake()

    # --- lanes ---

    async def has_work(self, lane: int) -> bool:
        """Whether a lane has runs that no live process owns."""
        return await self._store.read(lifecycle.has_work, lane, self._clock.now())

    async def drain_lane(self, lane: int) -> bool:
        """Execute the runs of a lane. Returns True if it stopped at the limit and more runs may be queued."""
        try:
            try:
                return await self._execute_runs(lane, MAX_CONSECUTIVE_RUNS_PER_LANE)
            except CrashSuspected:
                return await self._execute_crash_suspect(lane)
        except (StoreFull, StoreReplaced) as error:
            if not self.is_already_reported(error):
                raise
            return False

    def is_already_reported(self, error: AntiphonError) -> bool:
        """Whether the store has already logged this problem itself."""
        return isinstance(error, StoreFull | StoreReplaced) and self._store.write_error is not None

    async def _execute_crash_suspect(self, lane: int) -> bool:
        with self._release_slot(lane):
            await self._crash_quarantine.enter(lane)
        try:
            return not self.is_stopping and await self._execute_runs(lane, 1, is_quarantined=True)
        finally:
            self._crash_quarantine.leave(lane)

    @contextmanager
    def release_lane_slot(self, run_id: str | None) -> Generator[None]:
        """Release the slot of a run while it waits for another session or a person, so that other lanes can run."""
        active = self.active_runs.get(run_id or "")
        if active is None:
            yield
            return
        self._crash_quarantine.leave(active.lane)  # the awaited run may be waiting for it
        with self._release_slot(active.lane):
            yield

    @contextmanager
    def _release_slot(self, lane: int) -> Generator[None]:
        """Release the slot of a lane until nothing in it waits any more; calls of one answer may wait at once."""
        self._waits_by_lane[lane] = self._waits_by_lane.get(lane, 0) + 1
        self._lanes.set_resting(lane, resting=True)
        try:
            yield
        finally:
            self._waits_by_lane[lane] -= 1
            if not self._waits_by_lane[lane]:
                del self._waits_by_lane[lane]
                self._lanes.set_resting(lane, resting=False)

    def _build_claimant(self, *, is_quarantined: bool = False) -> Claimant:
        return Claimant(self._owner, self._clock.now(), self._max_attempts, self._max_run_ms, is_quarantined)

    async def _execute_runs(self, lane: int, max_runs: int, *, is_quarantined: bool = False) -> bool:
        try:
            claim, effects = await self._store.tx(
                lifecycle.claim_run, lane, self._build_claimant(is_quarantined=is_quarantined)
            )
        except Fenced:
            return False
        await self.apply_effects(effects)
        for remaining in reversed(range(max_runs)):
            if claim is None:
                return False
            claim = await self._execute_run(claim, claim_next=remaining > 0 and not self.is_stopping)
        return True

    # --- one run ---

    async def _execute_run(self, claim: Claim, *, claim_next: bool) -> Claim | None:
        """Execute and end a run. With `claim_next`, the same commit claims the next one, which is returned."""
        self._events.publish_phase(claim.session, claim.session_key, claim.run_id, "running")
        self._on_entries_committed(claim, claim.entries)
        if claim.resumed:
            log.warning(
                "Run %r is resumed where it was interrupted", claim.run_id, extra=_build_log_fields(claim)
            )
        try:
            with start_span(
                "run", run_id=claim.run_id, session_key=claim.session_key, agent_id=claim.agent_id
            ):
                ending = await self._execute_claimed_run(claim)
            effects, next_claim = await self._finish_run(claim, ending, claim_next=claim_next)
        except Fenced:
            log.info("Run %r was taken over by another process", claim.run_id, extra=_build_log_fields(claim))
            return None
        await self.apply_effects(effects)
        return next_claim

    async def _execute_claimed_run(self, claim: Claim) -> RunEnding:
        loop: RunLoop | None = None
        try:
            async with asyncio.timeout(max(0.0, (claim.deadline_at - self._clock.now()) / 1000)) as timeout:
                active = self.active_runs[claim.run_id] = ActiveRun(claim.session, timeout)
                if claim.cancelled:
                    active.cancel()
                loop = await self._build_run_loop(claim)
                return await loop.run()
        except TimeoutError:
            active = self.active_runs[claim.run_id]
            if active.timeout.expired():
                return _build_stopped_ending(claim, loop, active.outcome)
            log.exception("Run %r failed", claim.run_id, extra=_build_log_fields(claim))
            return _build_failed_ending(loop, RunFailed(claim.run_id))
        except (Fenced, StoreError):
            raise  # Nothing can be committed now; the run is resumed from its transcript.
        except AntiphonError as error:
            if isinstance(error, ProviderError):  # other errors are only reported to the caller
                log.warning(
                    "Run %r failed: %s",
                    claim.run_id,
                    repair_surrogates(error.what),
                    extra=_build_log_fields(claim),
                )
            return _build_failed_ending(loop, error)
        except Exception:
            log.exception("Run %r failed", claim.run_id, extra=_build_log_fields(claim))
            return _build_failed_ending(loop, RunFailed(claim.run_id))
        finally:
            self.active_runs.pop(claim.run_id, None)

    async def _build_run_loop(self, claim: Claim) -> RunLoop:
        deltas = DeltaStream(
            self._bus,
            session_topic(claim.session),
            claim.session_key,
            claim.run_id,
            quiet=claim.origin in QUIET_ORIGINS,
            sanitized=claim.origin in SANITIZED_ORIGINS,
        )
        setup = await self._load_run_setup(claim)
        return RunLoop(
            self._store,
            self._clock,
            claim,
            setup,
            deltas,
            self._approval_gate,
            self._on_entries_committed,
            self._events.publish_tool_phase,
            self._events.open_tool_output,
        )

    def _on_entries_committed(self, claim: Claim, entries: Sequence[Entry]) -> None:
        if entries:
            self._crash_quarantine.leave(claim.session)  # the run makes progress
        self._events.publish_entries(claim, entries)

    async def _finish_run(
        self, claim: Claim, ending: RunEnding, *, claim_next: bool
    ) -> tuple[Effects, Claim | None]:
        for with_next in dict.fromkeys((claim_next, False)):  # claiming the next run may be what fails
            try:
                return await self._commit_end(claim, ending, claim_next=with_next)
            except (Fenced, StoreError):
                raise
            except Exception:
                log.exception(
                    "Failed to commit the end of run %r", claim.run_id, extra=_build_log_fields(claim)
                )
            await self._lanes.activate(claim.session)  # the next run is claimed separately
        # A retry would fail again: end the run without the results that could not be committed.
        return await self._commit_end(
            claim, _build_commit_failed_ending(ending, self._clock.now()), claim_next=False
        )

    async def _commit_end(
        self, claim: Claim, ending: RunEnding, *, claim_next: bool
    ) -> tuple[Effects, Claim | None]:
        self.run_ids_committing_end.add(claim.run_id)
        try:
            return await retry_while_store_full(
                lambda: self._store.tx(
                    lifecycle.finish_run, claim, ending, self._build_claimant(), claim_next=claim_next
                )
            )
        finally:
            self.run_ids_committing_end.discard(claim.run_id)

    # --- stopping ---

    async def listen_for_stops(self) -> None:
        """Stop runs on request of any process, until cancelled."""
        async with self._bus.listen(STOP_TOPIC) as events:
            while True:
                event = await events.get()
                if isinstance(event, StopRequested):
                    self._cancel_run(event.run_id)
                elif isinstance(event, Gap):
                    # Requests may have been lost. If the store cannot be read now, the sweep repeats this.
                    with suppress(StoreError):
                        await self.cancel_requested_runs()

    async def cancel_requested_runs(self) -> None:
        """Stop all runs with a stop request, even if its event was lost or came before the run started."""
        for run_id in await self._store.read(endings.list_stop_requested_runs, self._owner):
            self._cancel_run(run_id)

    def _cancel_run(self, run_id: str) -> None:
        if active := self.active_runs.get(run_id):
            active.cancel()


def _build_log_fields(claim: Claim) -> dict[str, str]:
    return {"run_id": claim.run_id, "session_key": claim.session_key}


def _build_stopped_ending(claim: Claim, loop: RunLoop | None, outcome: RunOutcome) -> RunEnding:
    timeout_seconds = (claim.deadline_at - claim.created_at) / 1000
    reason = (
        f"The run timed out after {timeout_seconds:.10g} s."
        if outcome == "timeout"
        else "The run was stopped."
    )
    if loop is not None:
        return loop.build_stopped_ending(outcome, reason)
    return RunEnding(state=outcome, error_code=outcome, error=reason)


def _build_failed_ending(loop: RunLoop | None, error: AntiphonError) -> RunEnding:
    if loop is not None:
        return loop.build_failed_ending(error)
    return RunEnding(state="error", error_code=error.code, error=str(error))


def _build_commit_failed_ending(ending: RunEnding, now: int) -> RunEnding:
    error = "The result of the run could not be stored. See the log for the reason, then try again."
    usage = next((answer.usage for answer in ending.messages if isinstance(answer, AssistantMessage)), None)
    notice = AssistantMessage(
        content=[], timestamp=now, stop_reason="error", error_message=error, usage=usage
    )
    return RunEnding(state="error", error_code=RunFailed.code, error=error, messages=[notice])
