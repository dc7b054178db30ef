"""The engine of one process: claims, executes, ends and stops runs, and finds abandoned work.

It has no state whose loss matters. `_active_runs` are the runs that this process executes; the lease in the store shows
that to other processes, and the epoch in every commit makes an error harmless.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Coroutine, Generator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import msgspec

from antiphon.bus import (
    EventBus,
    Gap,
    MessageAppended,
    RunChanged,
    RunUsage,
    SessionChanged,
    StopRequested,
    ToolPhase,
    run_topic,
    session_topic,
)
from antiphon.clock import Clock
from antiphon.engine import replicas
from antiphon.engine.collaboration import chains, subagent_archive
from antiphon.engine.outbox.sender import Outbox
from antiphon.engine.replicas import Replica
from antiphon.engine.runs import completion, lifecycle
from antiphon.engine.runs.crash_quarantine import CrashQuarantine
from antiphon.engine.runs.deltas import DeltaStream
from antiphon.engine.runs.lifecycle import Claim, Effects, EndedRun, RunEnding, RunWorker
from antiphon.engine.runs.retry import retry_while_store_full
from antiphon.engine.runs.run_loop import RunLoop, RunSetup
from antiphon.engine.runs.run_queue import NOTE_ORIGIN, AcceptedRun
from antiphon.engine.runs.steps import ANNOUNCE_ORIGIN, QUIET_ORIGINS, SANITIZED_ORIGINS, FollowUp, RunOutcome
from antiphon.engine.sessions import retention, search
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
from antiphon.messages import AssistantMessage, ToolCall, ToolResult
from antiphon.runtimes.text import repair_surrogates
from antiphon.store import Store
from antiphon.tracing import start_span

log = logging.getLogger(__name__)

STOP_TOPIC = "stops"  # stop requests for all processes
MAX_CONSECUTIVE_RUNS_PER_LANE = 64  # then other waiting lanes get their turn


class EngineTimings(msgspec.Struct, frozen=True, kw_only=True):
    """Intervals and limits of the engine. Times are in seconds."""

    lease: float = 10.0
    sweep: float = 2.0
    deadlines: float = 0.5
    stop_grace: float = 2.0
    retention: float = 600.0
    max_attempts: int = 5


class _ActiveRun(msgspec.Struct):
    """A run being executed: how to stop it, and its outcome if it is stopped."""

    lane: int
    limit: asyncio.Timeout
    outcome: RunOutcome = "timeout"


class Engine:
    def __init__(
        self,
        *,
        store: Store,
        lanes: LaneEngine,
        bus: EventBus,
        clock: Clock,
        setting: Callable[[Claim], Coroutine[Any, Any, RunSetup]],
        outbox: Outbox,
        pace: EngineTimings | None = None,
        keep: retention.RetentionPolicy | None = None,
        longest_run: float = 172_800.0,
        alone: bool = True,
        replica: Replica | None = None,
    ) -> None:
        self._store = store
        self._lanes = lanes
        self._bus = bus
        self._clock = clock
        self._load_run_setup = setting
        self._outbox = outbox
        self._timings = pace or EngineTimings()
        self._retention_policy = keep or retention.RetentionPolicy()
        self._max_run_ms = round(longest_run * 1000)
        self._is_only_replica = alone
        self._replica = replica or Replica(id=uuid.uuid4().hex, started_at=clock.now())
        self._owner = self._replica.id
        self._is_coordinator = alone
        self._stopping = False
        self._active_runs: dict[str, _ActiveRun] = {}
        self._run_ids_being_ended: set[str] = set()
        self._crash_quarantine = CrashQuarantine()
        self._background_tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Take the lease, look for work left by an earlier process, and start the background tasks."""
        await self._renew_lease(alone=self._is_only_replica)
        # Retention needs this at once.
        self._is_coordinator = self._is_only_replica or await self._acquire_coordinator_lease()
        await self._lanes.start(self._drain_lane, self._has_work)
        await self._wake_idle_lanes(older_than=0)
        chores = [
            self._repeat_every(self._timings.lease / 3, self._renew_lease),
            self._repeat_every(self._timings.sweep, self._sweep_replica),
            self._repeat_every(
                self._timings.deadlines, self._restrict_to_coordinator(self._expire_overdue_runs)
            ),
            self._repeat_every(
                self._timings.retention, self._restrict_to_coordinator(self._apply_retention), at_once=True
            ),
            self._repeat_every(
                search.INDEX_INTERVAL_SECONDS, self._restrict_to_coordinator(self._index_transcripts)
            ),
            self._listen_for_stops(),
            self._outbox.run(self._owner),
        ]
        self._background_tasks = [asyncio.create_task(chore) for chore in chores]

    async def stop(self, grace: float = 0.0) -> None:
        """Stop. Runs that do not end in time stay `running` in the store and are resumed by another process."""
        self._stopping = True
        await self._lanes.stop(grace)
        for task in self._background_tasks:
            task.cancel()
        await asyncio.gather(*self._background_tasks, return_exceptions=True)
        try:
            await self._store.tx(replicas.release_lease, self._owner)
        except StoreError as error:
            log.error("The lease could not be given back, and runs out by itself: %s", error)
        finally:
            await self._lanes.close()

    async def publish_address(self, address: str) -> None:
        """Publish the address at which this process can be reached."""
        self._replica = msgspec.structs.replace(self._replica, address=address)
        await self._renew_lease()

    async def dispatch_accepted_run(self, accepted: AcceptedRun) -> None:
        """Publish a queued run and wake its lane; called after the commit."""
        if accepted.new and not accepted.note:
            self._publish_phase(accepted.session, accepted.session_key, accepted.run_id, "queued")
        await self._lanes.activate(accepted.session)

    @contextmanager
    def release_lane_slot(self, run_id: str | None) -> Generator[None]:
        """Release the slot of a run while it waits for another session, so that other lanes can run."""
        play = self._active_runs.get(run_id or "")
        if play is None:
            yield
            return
        self._crash_quarantine.leave(play.lane)  # the awaited run may be waiting for it
        with self._release_slot(play.lane):
            yield

    @contextmanager
    def _release_slot(self, lane: int) -> Generator[None]:
        self._lanes.set_resting(lane, resting=True)
        try:
            yield
        finally:
            self._lanes.set_resting(lane, resting=False)

    def wake_outbox(self) -> None:
        """Wake the outbox after a delivery was added."""
        self._outbox.wake()

    async def apply_effects(self, stopped: Effects) -> None:
        """Publish ended runs, dispatch follow-up work and notify the owners of runs to stop; called after a commit."""
        await self._publish_all_ended(stopped.ended)
        await self._apply_follow_up(stopped.sequel)
        for run_id in stopped.asked:
            self._bus.publish(STOP_TOPIC, StopRequested(run_id=run_id))

    # --- lanes ---

    def _build_run_worker(self, *, trying: bool = False) -> RunWorker:
        return RunWorker(self._owner, self._clock.now(), self._timings.max_attempts, self._max_run_ms, trying)

    async def _drain_lane(self, lane: int) -> bool:
        """Execute the runs of a lane. True if there may be more after the maximum number of consecutive runs."""
        try:
            return await self._execute_lane(lane)
        except (StoreFull, StoreReplaced) as error:
            if not self._is_already_reported(error):
                raise
            return False

    async def _execute_lane(self, lane: int) -> bool:
        try:
            return await self._execute_runs(lane, MAX_CONSECUTIVE_RUNS_PER_LANE)
        except CrashSuspected:
            with self._release_slot(lane):
                await self._crash_quarantine.enter(lane)
            try:
                return not self._stopping and await self._execute_runs(lane, 1, trying=True)
            finally:
                self._crash_quarantine.leave(lane)

    def _is_already_reported(self, error: AntiphonError) -> bool:
        """Whether the store has already logged this problem itself."""
        return isinstance(error, StoreFull | StoreReplaced) and self._store.trouble is not None

    async def _execute_runs(self, lane: int, most: int, *, trying: bool = False) -> bool:
        try:
            claim, skipped = await self._store.tx(
                lifecycle.claim_run, lane, self._build_run_worker(trying=trying)
            )
        except Fenced:
            return False
        await self._publish_all_ended(skipped)
        for left in reversed(range(most)):
            if claim is None:
                return False
            claim = await self._execute_run(claim, going_on=left > 0 and not self._stopping)
        return True

    async def _has_work(self, lane: int) -> bool:
        return await self._store.read(lifecycle.has_work, lane, self._clock.now())

    async def _execute_run(self, claim: Claim, *, going_on: bool) -> Claim | None:
        """Execute and end a run. With `going_on`, the same commit claims the next one, which is returned."""
        self._publish_phase(claim.session, claim.session_key, claim.run_id, "running")
        self._on_entries(claim, claim.entries)
        if claim.resumed:
            log.warning(
                "Run %r is carried on where it was interrupted", claim.run_id, extra=_build_log_fields(claim)
            )
        try:
            with start_span(
                "run", run_id=claim.run_id, session_key=claim.session_key, agent_id=claim.agent_id
            ):
                ending = await self._run_to_ending(claim)
            ended, following, skipped = await self._finish_run(claim, ending, going_on=going_on)
        except Fenced:
            log.info("Run %r was taken over", claim.run_id, extra=_build_log_fields(claim))
            return None
        await self._publish_ended(ended, claim)
        await self._publish_all_ended(skipped)
        return following

    async def _finish_run(
        self, claim: Claim, ending: RunEnding, *, going_on: bool
    ) -> tuple[EndedRun, Claim | None, list[EndedRun]]:
        for on in dict.fromkeys((going_on, False)):  # claiming the next run may be what fails
            try:
                return await self._commit_end(claim, ending, going_on=on)
            except (Fenced, StoreError):
                raise
            except Exception:
                log.exception(
                    "The end of run %r could not be kept", claim.run_id, extra=_build_log_fields(claim)
                )
            await self._lanes.activate(claim.session)  # the next run is claimed separately
        # A retry would fail again: end the run without the results that could not be committed.
        return await self._commit_end(
            claim, _build_uncommittable_ending(ending, self._clock.now()), going_on=False
        )

    async def _commit_end(
        self, claim: Claim, ending: RunEnding, *, going_on: bool
    ) -> tuple[EndedRun, Claim | None, list[EndedRun]]:
        self._run_ids_being_ended.add(claim.run_id)
        try:
            return await retry_while_store_full(
                lambda: self._store.tx(
                    lifecycle.finish_run, claim, ending, self._build_run_worker(), going_on=going_on
                )
            )
        finally:
            self._run_ids_being_ended.discard(claim.run_id)

    async def _run_to_ending(self, claim: Claim) -> RunEnding:
        turn: RunLoop | None = None
        try:
            async with asyncio.timeout(self._compute_seconds_left(claim)) as limit:
                play = self._active_runs[claim.run_id] = _ActiveRun(claim.session, limit)
                if claim.cancelled:
                    self._cancel_active_run(play)
                turn = await self._build_run_loop(claim)
                return await turn.run()
        except TimeoutError:
            play = self._active_runs[claim.run_id]
            if play.limit.expired():
                return _build_stopped_ending(turn, play.outcome)
            log.exception("Run %r failed", claim.run_id, extra=_build_log_fields(claim))
            return _build_failed_ending(turn, RunFailed(claim.run_id))
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
            return _build_failed_ending(turn, error)
        except Exception:
            log.exception("Run %r failed", claim.run_id, extra=_build_log_fields(claim))
            return _build_failed_ending(turn, RunFailed(claim.run_id))
        finally:
            self._active_runs.pop(claim.run_id, None)

    async def _build_run_loop(self, claim: Claim) -> RunLoop:
        deltas = DeltaStream(
            self._bus,
            session_topic(claim.session),
            claim.session_key,
            claim.run_id,
            quiet=claim.origin in QUIET_ORIGINS,
            gated=claim.origin in SANITIZED_ORIGINS,
        )
        setting = await self._load_run_setup(claim)
        return RunLoop(self._store, self._clock, claim, setting, deltas, self._on_entries, self._on_tool)

    def _compute_seconds_left(self, claim: Claim) -> float:
        return max(0.0, (claim.deadline_at - self._clock.now()) / 1000)

    # --- stopping ---

    async def _listen_for_stops(self) -> None:
        async with self._bus.listen(STOP_TOPIC) as events:
            while True:
                event = await events.get()
                if isinstance(event, StopRequested):
                    self._cancel_run(event.run_id)
                elif event is not None:
                    # The sweep retries; the listener must survive, or stops would be slow.
                    with suppress(StoreError):
                        await self._cancel_requested_runs()

    async def _cancel_requested_runs(self) -> None:
        """Stop all runs with a stop request, even if its event was lost or came before the run started."""
        for run_id in await self._store.read(lifecycle.list_stop_requested_runs, self._owner):
            self._cancel_run(run_id)

    def _cancel_run(self, run_id: str) -> None:
        if play := self._active_runs.get(run_id):
            self._cancel_active_run(play)

    @staticmethod
    def _cancel_active_run(play: _ActiveRun) -> None:
        if not play.limit.expired():
            play.outcome = "cancelled"
            play.limit.reschedule(asyncio.get_running_loop().time())

    # --- chores ---

    async def _repeat_every(
        self, seconds: float, chore: Callable[[], Coroutine[Any, Any, None]], *, at_once: bool = False
    ) -> None:
        while True:
            if not at_once:
                await asyncio.sleep(seconds)
            at_once = False
            try:
                await chore()
            except AntiphonError as error:
                if not self._is_already_reported(error):
                    log.error("%s", error)
            except Exception:
                log.exception("A chore of the engine failed; it is tried again in %.1f s", seconds)

    async def _renew_lease(self, *, alone: bool = False) -> None:
        now = self._clock.now()
        until = now + round(self._timings.lease * 1000)
        await self._store.tx(replicas.renew_lease, self._replica, until, now, alone=alone)

    async def _sweep_replica(self) -> None:
        """Handle what a lost event, a stuck tool or a full disk left behind."""
        await self._cancel_requested_runs()
        await self._reconcile_owned_runs()
        self._is_coordinator = self._is_only_replica or await self._acquire_coordinator_lease()
        if self._is_coordinator:
            await self._sweep_as_coordinator(self._clock.now())

    async def _reconcile_owned_runs(self) -> None:
        """Compare active runs with the store: a run may have been taken over, or be owned but not executed."""
        playing = dict(self._active_runs)
        held = await self._store.read(lifecycle.load_owned_runs, self._owner)
        for run_id, lane in held.items():
            if run_id not in self._active_runs:
                await self._lanes.activate(lane)
        for run_id, play in playing.items():
            if run_id not in held and self._active_runs.get(run_id) is play:
                log.info("Run %r was taken over", run_id, extra={"run_id": run_id})
                await self._lanes.abandon(play.lane)
                await self._lanes.activate(play.lane)

    async def _acquire_coordinator_lease(self) -> bool:
        now = self._clock.now()
        until = now + round(3000 * self._timings.sweep)
        return await self._store.tx(replicas.acquire_coordinator_lease, self._owner, until, now)

    def _restrict_to_coordinator(
        self, chore: Callable[[], Coroutine[Any, Any, None]]
    ) -> Callable[[], Coroutine[Any, Any, None]]:
        """Return a function that runs the chore only on the coordinator."""

        async def done() -> None:
            if self._is_coordinator:
                await chore()

        return done

    async def _sweep_as_coordinator(self, now: int) -> None:
        """Do the work that only one of all replicas has to do."""
        await self._force_end_runs(now - round(self._timings.stop_grace * 1000), now)
        await self._wake_idle_lanes(older_than=self._timings.sweep)
        if await self._store.tx(replicas.delete_expired_replicas, now):
            # It may have committed entries without publishing them: make all feeds read again.
            self._bus.publish(session_topic(0), Gap())
        if await self._store.read(completion.has_stuck_work):
            log.error("Some exchanges or tasks had nothing left that could move them; they are settled")
            await self._apply_follow_up(await self._store.tx(completion.settle_stuck_work, now))
        for key in await subagent_archive.archive_finished_subagents(self._store, now):
            self._bus.publish("sessions", SessionChanged(session_key=key, reason="retention"))
        await self._store.tx(chains.delete_expired_waits, now)

    async def _expire_overdue_runs(self) -> None:
        """End waiting runs and tasks whose deadline has passed. A read first avoids empty commits."""
        now = self._clock.now()
        if await self._store.read(lifecycle.has_overdue_work, now):
            await self.apply_effects(await self._store.tx(lifecycle.expire_overdue_work, now))

    async def _force_end_runs(self, before: int, now: int) -> None:
        """End runs that should have stopped, each separately, so that one failure does not affect the others."""
        for run_id in await self._store.read(lifecycle.list_unstopped_runs, before):
            if run_id in self._run_ids_being_ended:
                continue  # its end is being committed and waits for disk space
            try:
                ended = await self._store.tx(lifecycle.force_end_run, run_id, before, now)
            except StoreFull:
                continue  # no disk space; another one may fit
            except Exception:
                log.exception("Run %r could not be ended", run_id, extra={"run_id": run_id})
                continue
            if ended:
                await self._publish_ended(ended)
                await self._lanes.abandon(ended.session)
                await self._lanes.activate(ended.session)

    async def _wake_idle_lanes(self, older_than: float) -> None:
        now = self._clock.now()
        after, page = 0, 1000
        while True:
            before = now - round(older_than * 1000)
            lanes = await self._store.read(lifecycle.list_idle_lanes, after, before, now, page)
            for lane in lanes:
                await self._lanes.activate(lane)
            if len(lanes) < page:
                return
            after = lanes[-1]

    async def _index_transcripts(self) -> None:
        await search.catch_up_index(self._store)

    async def _apply_retention(self) -> None:
        for key in await retention.apply_retention(self._store, self._retention_policy, self._clock.now()):
            self._bus.publish("sessions", SessionChanged(session_key=key, reason="retention"))

    # --- events, always published after their commit ---

    def _on_entries(self, claim: Claim, entries: Sequence[Entry]) -> None:
        if entries:
            self._crash_quarantine.leave(claim.session)  # the run makes progress
        self._publish_entries(
            claim.session, claim.session_key, claim.session_id, claim.run_id, claim.origin, entries
        )

    def _publish_entries(
        self,
        session: int,
        key: str,
        session_id: str,
        run_id: str | None,
        origin: str,
        entries: Sequence[Entry],
    ) -> None:
        if entries and self._bus.has_listeners("sessions"):
            self._bus.publish("sessions", SessionChanged(session_key=key, reason="message"))
        topic = session_topic(session)
        if self._bus.has_listeners(topic):
            for entry in entries:
                event = MessageAppended(
                    session_key=key,
                    session_id=session_id,
                    seq=entry.seq,
                    entry=entry.id,
                    body=entry.body,
                    run_id=run_id,
                    internal=origin == ANNOUNCE_ORIGIN or entry.is_internal,  # shown once it is posted
                )
                self._bus.publish(topic, event)

    def _on_tool(self, claim: Claim, call: ToolCall, result: ToolResult | None) -> None:
        topic = session_topic(claim.session)
        if self._bus.has_listeners(topic):
            event = ToolPhase(
                session_key=claim.session_key,
                run_id=claim.run_id,
                call_id=call.id,
                name=call.name,
                phase="result" if result else "start",
                is_error=bool(result and result.is_error),
            )
            self._bus.publish(topic, event)

    async def _publish_all_ended(self, all_ended: Sequence[EndedRun]) -> None:
        for ended in all_ended:
            await self._publish_ended(ended)

    async def _publish_ended(self, ended: EndedRun, claim: Claim | None = None) -> None:
        """Publish the end of a run and apply its effects."""
        note = ended.origin == NOTE_ORIGIN
        run_id = None if note else ended.run_id
        self._publish_entries(
            ended.session, ended.session_key, ended.session_id, run_id, ended.origin, ended.entries
        )
        topics = (run_topic(ended.run_id), session_topic(ended.session))
        if not note and any(map(self._bus.has_listeners, topics)):
            event = _build_end_event(ended, claim)
            for topic in topics:
                self._bus.publish(topic, event)
        await self.apply_effects(ended.after)

    async def _apply_follow_up(self, sequel: FollowUp) -> None:
        for accepted in sequel.runs:
            await self.dispatch_accepted_run(accepted)
        if sequel.posted:
            self._outbox.wake()

    def _publish_phase(self, session: int, session_key: str, run_id: str, state: str) -> None:
        topic = session_topic(session)
        if self._bus.has_listeners(topic):
            self._bus.publish(topic, RunChanged(session_key=session_key, run_id=run_id, state=state))


_STOP_REASONS: dict[RunOutcome, str] = {
    "timeout": "The run's time was over.",
    "cancelled": "The run was stopped.",
}


def _build_log_fields(claim: Claim) -> dict[str, str]:
    """Return the log fields of a run."""
    return {"run_id": claim.run_id, "session_key": claim.session_key}


def _build_end_event(ended: EndedRun, claim: Claim | None) -> RunChanged:
    ending, spent = ended.ending, ended.spent
    return RunChanged(
        session_key=ended.session_key,
        run_id=ended.run_id,
        state=ending.state,
        reply=ending.reply,
        error_code=ending.error_code,
        error=ending.error,
        model=ending.model_answered,
        started_at=claim.started_at if claim else None,
        ended_at=ended.at if claim else None,
        usage=RunUsage(input=spent["input"], output=spent["output"], cost=spent["cost"]) if spent else None,
        quiet=ended.origin in QUIET_ORIGINS,
        gated=ended.origin in SANITIZED_ORIGINS,
        yielded=ending.yielded,
    )


def _build_stopped_ending(turn: RunLoop | None, outcome: RunOutcome) -> RunEnding:
    reason = _STOP_REASONS[outcome]
    return (
        turn.build_stopped_ending(outcome, reason)
        if turn
        else RunEnding(state=outcome, error_code=outcome, error=reason)
    )


def _build_uncommittable_ending(ending: RunEnding, now: int) -> RunEnding:
    error = "What the run came to could not be kept. See the log for the reason, then try again."
    usage = next((said.usage for said in ending.messages if isinstance(said, AssistantMessage)), None)
    notice = AssistantMessage(
        content=[], timestamp=now, stop_reason="error", error_message=error, usage=usage
    )
    return RunEnding(state="error", error_code=RunFailed.code, error=error, messages=[notice])


def _build_failed_ending(turn: RunLoop | None, error: AntiphonError) -> RunEnding:
    if turn is not None:
        return turn.build_failed_ending(error)
    return RunEnding(state="error", error_code=error.code, error=str(error))
