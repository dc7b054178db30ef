"""Keeping lanes moving: claims, plays and ends runs, stops them, and finds the work that was left lying.

There is no state here whose loss matters. `_playing` is the set of runs this process has in its hands; the
lease in the store says so to others, and the epoch in every commit makes it harmless to be wrong.
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
    SessionChanged,
    Spent,
    StopAsked,
    ToolPhase,
    run_topic,
    session_topic,
)
from antiphon.clock import Clock
from antiphon.engine import archive, chains, replicas, retention, runs, search, sequels
from antiphon.engine.admissions import NOTE, Accepted
from antiphon.engine.deltas import DeltaStream
from antiphon.engine.outbox import Outbox
from antiphon.engine.patience import until_there_is_room
from antiphon.engine.replicas import Replica
from antiphon.engine.runs import Claim, Ended, Ending, Stopped, Worker
from antiphon.engine.steps import ANNOUNCE, GATED, QUIET, Outcome, Sequel
from antiphon.engine.transcripts import Entry
from antiphon.engine.trial import Trial
from antiphon.engine.turns import Setting, Turn
from antiphon.errors import (
    AntiphonError,
    Fenced,
    ProviderError,
    RunFailed,
    StoreError,
    StoreFull,
    StoreReplaced,
    Suspected,
)
from antiphon.lanes import LaneEngine
from antiphon.messages import Assistant, ToolCall, ToolResult
from antiphon.runtimes.answers import whole
from antiphon.store import Store
from antiphon.tracing import span

log = logging.getLogger(__name__)

STOPS = "stops"  # the topic on which every process hears of requests to stop
IN_A_ROW = 64  # runs of one lane, after which others that wait for a place have theirs


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """How patient the engine is. Times in seconds."""

    lease: float = 10.0
    sweep: float = 2.0
    deadlines: float = 0.5
    stop_grace: float = 2.0
    retention: float = 600.0
    max_attempts: int = 5


class _Play(msgspec.Struct):
    """A run being played: how to stop it, and as what it then ends."""

    lane: int
    limit: asyncio.Timeout
    outcome: Outcome = "timeout"


class Engine:
    def __init__(
        self,
        *,
        store: Store,
        lanes: LaneEngine,
        bus: EventBus,
        clock: Clock,
        setting: Callable[[Claim], Coroutine[Any, Any, Setting]],
        outbox: Outbox,
        pace: Pace | None = None,
        keep: retention.Keep | None = None,
        longest_run: float = 172_800.0,
        alone: bool = True,
        replica: Replica | None = None,
    ) -> None:
        self._store = store
        self._lanes = lanes
        self._bus = bus
        self._clock = clock
        self._setting = setting
        self._outbox = outbox
        self._pace = pace or Pace()
        self._keep = keep or retention.Keep()
        self._longest_ms = round(longest_run * 1000)
        self._alone = alone
        self._replica = replica or Replica(id=uuid.uuid4().hex, started_at=clock.now())
        self._owner = self._replica.id
        self._watching = alone
        self._stopping = False
        self._playing: dict[str, _Play] = {}
        self._ending_now: set[str] = set()
        self._trial = Trial()
        self._chores: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Take the lease, then look for work that an earlier process left."""
        await self._renew(alone=self._alone)
        self._watching = self._alone or await self._keep_watch()  # retention asks for it at once
        await self._lanes.start(self._drain, self._has_work)
        await self._wake_idle_lanes(older_than=0)
        chores = [
            self._every(self._pace.lease / 3, self._renew),
            self._every(self._pace.sweep, self._sweep),
            self._every(self._pace.deadlines, self._watched(self._expire)),
            self._every(self._pace.retention, self._watched(self._retain), at_once=True),
            self._every(search.EVERY, self._watched(self._index)),
            self._hear_stops(),
            self._outbox.run(self._owner),
        ]
        self._chores = [asyncio.create_task(chore) for chore in chores]

    async def stop(self, grace: float = 0.0) -> None:
        """Let go. Runs that do not end in time stay `running` in the store; others or the next start carry them on."""
        self._stopping = True
        await self._lanes.stop(grace)
        for task in self._chores:
            task.cancel()
        await asyncio.gather(*self._chores, return_exceptions=True)
        try:
            await self._store.tx(replicas.drop_lease, self._owner)
        except StoreError as error:
            log.error("The lease could not be given back, and runs out by itself: %s", error)
        finally:
            await self._lanes.close()

    async def introduce(self, address: str) -> None:
        """Tell the others where this process can be reached."""
        self._replica = msgspec.structs.replace(self._replica, address=address)
        await self._renew()

    async def accepted(self, accepted: Accepted) -> None:
        """After the commit of a submission: tell listeners, wake the lane."""
        if accepted.new and not accepted.note:
            self._publish_phase(accepted.session, accepted.session_key, accepted.run_id, "queued")
        await self._lanes.activate(accepted.session)

    @contextmanager
    def resting(self, run_id: str | None) -> Generator[None]:
        """While a run that is played here waits for another session's, it keeps no third one from running."""
        play = self._playing.get(run_id or "")
        if play is None:
            yield
            return
        self._trial.leave(play.lane)  # what it waits for may be waiting for that place
        with self._rest(play.lane):
            yield

    @contextmanager
    def _rest(self, lane: int) -> Generator[None]:
        self._lanes.rest(lane, resting=True)
        try:
            yield
        finally:
            self._lanes.rest(lane, resting=False)

    def deliver(self) -> None:
        """Something was put into the outbox."""
        self._outbox.wake()

    async def stopping(self, stopped: Stopped) -> None:
        """After a commit that stopped runs: end what ended, tell the owners of the rest."""
        await self._tell_all(stopped.ended)
        await self._follow(stopped.sequel)
        for run_id in stopped.asked:
            self._bus.publish(STOPS, StopAsked(run_id=run_id))

    # --- lanes ---

    def _worker(self, *, trying: bool = False) -> Worker:
        return Worker(self._owner, self._clock.now(), self._pace.max_attempts, self._longest_ms, trying)

    async def _drain(self, lane: int) -> bool:
        """Play what is in a lane; True if there may be more, and it is the turn of other lanes."""
        try:
            return await self._play_lane(lane)
        except (StoreFull, StoreReplaced) as error:
            if not self._is_known(error):
                raise
            return False

    async def _play_lane(self, lane: int) -> bool:
        try:
            return await self._play_some(lane, IN_A_ROW)
        except Suspected:
            with self._rest(lane):
                await self._trial.enter(lane)
            try:
                return not self._stopping and await self._play_some(lane, 1, trying=True)
            finally:
                self._trial.leave(lane)

    def _is_known(self, error: AntiphonError) -> bool:
        """Whether the store has said so itself, once for everybody who waits."""
        return isinstance(error, StoreFull | StoreReplaced) and self._store.trouble is not None

    async def _play_some(self, lane: int, most: int, *, trying: bool = False) -> bool:
        try:
            claim, skipped = await self._store.tx(runs.claim, lane, self._worker(trying=trying))
        except Fenced:
            return False
        await self._tell_all(skipped)
        for left in reversed(range(most)):
            if claim is None:
                return False
            claim = await self._play(claim, going_on=left > 0 and not self._stopping)
        return True

    async def _has_work(self, lane: int) -> bool:
        return await self._store.read(runs.has_work, lane, self._clock.now())

    async def _play(self, claim: Claim, *, going_on: bool) -> Claim | None:
        """Play a run to its end; going on, the claim of the next one comes with the commit that ends this."""
        self._publish_phase(claim.session, claim.session_key, claim.run_id, "running")
        self._on_entries(claim, claim.entries)
        if claim.resumed:
            log.warning("Run %r is carried on where it was interrupted", claim.run_id, extra=_about(claim))
        try:
            with span("run", run_id=claim.run_id, session_key=claim.session_key, agent_id=claim.agent_id):
                ending = await self._ending(claim)
            ended, following, skipped = await self._finish(claim, ending, going_on=going_on)
        except Fenced:
            log.info("Run %r was taken over", claim.run_id, extra=_about(claim))
            return None
        await self._tell_ended(ended, claim)
        await self._tell_all(skipped)
        return following

    async def _finish(
        self, claim: Claim, ending: Ending, *, going_on: bool
    ) -> tuple[Ended, Claim | None, list[Ended]]:
        for on in dict.fromkeys((going_on, False)):  # it may be what follows that cannot be had
            try:
                return await self._commit_end(claim, ending, going_on=on)
            except (Fenced, StoreError):
                raise
            except Exception:
                log.exception("The end of run %r could not be kept", claim.run_id, extra=_about(claim))
            await self._lanes.activate(claim.session)  # the lane goes on by itself
        # Played again, it would come to the same: it ends here, with nothing of what could not be kept.
        return await self._commit_end(claim, _unkept(ending, self._clock.now()), going_on=False)

    async def _commit_end(
        self, claim: Claim, ending: Ending, *, going_on: bool
    ) -> tuple[Ended, Claim | None, list[Ended]]:
        self._ending_now.add(claim.run_id)
        try:
            return await until_there_is_room(
                lambda: self._store.tx(runs.finish, claim, ending, self._worker(), going_on=going_on)
            )
        finally:
            self._ending_now.discard(claim.run_id)

    async def _ending(self, claim: Claim) -> Ending:
        turn: Turn | None = None
        try:
            async with asyncio.timeout(self._seconds_left(claim)) as limit:
                play = self._playing[claim.run_id] = _Play(claim.session, limit)
                if claim.cancelled:
                    self._cut(play)
                turn = await self._turn(claim)
                return await turn.play()
        except TimeoutError:
            play = self._playing[claim.run_id]
            if play.limit.expired():
                return _stopped(turn, play.outcome)
            log.exception("Run %r failed", claim.run_id, extra=_about(claim))
            return _failed(turn, RunFailed(claim.run_id))
        except (Fenced, StoreError):
            raise  # Nothing can be committed now; the run is taken up again from its transcript.
        except AntiphonError as error:
            if isinstance(error, ProviderError):  # of the others, whoever asked is told
                log.warning("Run %r failed: %s", claim.run_id, whole(error.what), extra=_about(claim))
            return _failed(turn, error)
        except Exception:
            log.exception("Run %r failed", claim.run_id, extra=_about(claim))
            return _failed(turn, RunFailed(claim.run_id))
        finally:
            self._playing.pop(claim.run_id, None)

    async def _turn(self, claim: Claim) -> Turn:
        deltas = DeltaStream(
            self._bus,
            session_topic(claim.session),
            claim.session_key,
            claim.run_id,
            quiet=claim.origin in QUIET,
            gated=claim.origin in GATED,
        )
        setting = await self._setting(claim)
        return Turn(self._store, self._clock, claim, setting, deltas, self._on_entries, self._on_tool)

    def _seconds_left(self, claim: Claim) -> float:
        return max(0.0, (claim.deadline_at - self._clock.now()) / 1000)

    # --- stopping ---

    async def _hear_stops(self) -> None:
        async with self._bus.listen(STOPS) as events:
            while True:
                event = await events.get()
                if isinstance(event, StopAsked):
                    self._cut_run(event.run_id)
                elif event is not None:
                    with suppress(
                        StoreError
                    ):  # The sweeper asks again; without this listener stops would be slow.
                        await self._cut_asked()

    async def _cut_asked(self) -> None:
        """Whatever was asked to stop, also when the hint got lost or came before the run was in hand."""
        for run_id in await self._store.read(runs.asked_to_stop, self._owner):
            self._cut_run(run_id)

    def _cut_run(self, run_id: str) -> None:
        if play := self._playing.get(run_id):
            self._cut(play)

    @staticmethod
    def _cut(play: _Play) -> None:
        if not play.limit.expired():
            play.outcome = "cancelled"
            play.limit.reschedule(asyncio.get_running_loop().time())

    # --- chores ---

    async def _every(
        self, seconds: float, chore: Callable[[], Coroutine[Any, Any, None]], *, at_once: bool = False
    ) -> None:
        while True:
            if not at_once:
                await asyncio.sleep(seconds)
            at_once = False
            try:
                await chore()
            except AntiphonError as error:
                if not self._is_known(error):
                    log.error("%s", error)
            except Exception:
                log.exception("A chore of the engine failed; it is tried again in %.1f s", seconds)

    async def _renew(self, *, alone: bool = False) -> None:
        now = self._clock.now()
        until = now + round(self._pace.lease * 1000)
        await self._store.tx(replicas.renew_lease, self._replica, until, now, alone=alone)

    async def _sweep(self) -> None:
        """Whatever a lost hint, a stuck tool or a full disk left behind."""
        await self._cut_asked()
        await self._compare()
        self._watching = self._alone or await self._keep_watch()
        if self._watching:
            await self._look_after_all(self._clock.now())

    async def _compare(self) -> None:
        """What is in our hands with what the store says: a run may have been taken from us, or lie there unplayed."""
        playing = dict(self._playing)
        held = await self._store.read(runs.held_by, self._owner)
        for run_id, lane in held.items():
            if run_id not in self._playing:
                await self._lanes.activate(lane)
        for run_id, play in playing.items():
            if run_id not in held and self._playing.get(run_id) is play:
                log.info("Run %r was taken over", run_id, extra={"run_id": run_id})
                await self._lanes.abandon(play.lane)
                await self._lanes.activate(play.lane)

    async def _keep_watch(self) -> bool:
        now = self._clock.now()
        until = now + round(3000 * self._pace.sweep)
        return await self._store.tx(replicas.keep_watch, self._owner, until, now)

    def _watched(
        self, chore: Callable[[], Coroutine[Any, Any, None]]
    ) -> Callable[[], Coroutine[Any, Any, None]]:
        """A chore of whoever has the watch."""

        async def done() -> None:
            if self._watching:
                await chore()

        return done

    async def _look_after_all(self, now: int) -> None:
        """What is nobody's in particular, done by one of all replicas."""
        await self._force(now - round(self._pace.stop_grace * 1000), now)
        await self._wake_idle_lanes(older_than=self._pace.sweep)
        if await self._store.tx(replicas.drop_expired, now):
            # It may have committed what it did not live to tell: whoever follows a session looks for it.
            self._bus.publish(session_topic(0), Gap())
        if await self._store.read(sequels.astray):
            log.error("Some exchanges or tasks had nothing left that could move them; they are settled")
            await self._follow(await self._store.tx(sequels.mend, now))
        for key in await archive.sweep(self._store, now):
            self._bus.publish("sessions", SessionChanged(session_key=key, reason="retention"))
        await self._store.tx(chains.forget_waits, now)

    async def _expire(self) -> None:
        """What waits has its time as well, by the second; looking is cheaper than a commit of nothing."""
        now = self._clock.now()
        if await self._store.read(runs.overdue, now):
            await self.stopping(await self._store.tx(runs.expire, now))

    async def _force(self, before: int, now: int) -> None:
        """End runs that should have ended, each by itself: one that cannot be ended must not save the others."""
        for run_id in await self._store.read(runs.not_stopping, before):
            if run_id in self._ending_now:
                continue  # it has come to its end, which waits for room
            try:
                ended = await self._store.tx(runs.force, run_id, before, now)
            except StoreFull:
                continue  # it waits for room; another may fit
            except Exception:
                log.exception("Run %r could not be ended", run_id, extra={"run_id": run_id})
                continue
            if ended:
                await self._tell_ended(ended)
                await self._lanes.abandon(ended.session)
                await self._lanes.activate(ended.session)

    async def _wake_idle_lanes(self, older_than: float) -> None:
        now = self._clock.now()
        after, page = 0, 1000
        while True:
            before = now - round(older_than * 1000)
            lanes = await self._store.read(runs.idle_lanes, after, before, now, page)
            for lane in lanes:
                await self._lanes.activate(lane)
            if len(lanes) < page:
                return
            after = lanes[-1]

    async def _index(self) -> None:
        await search.catch_up(self._store)

    async def _retain(self) -> None:
        for key in await retention.sweep(self._store, self._keep, self._clock.now()):
            self._bus.publish("sessions", SessionChanged(session_key=key, reason="retention"))

    # --- events, always after the commit they tell of ---

    def _on_entries(self, claim: Claim, entries: Sequence[Entry]) -> None:
        if entries:
            self._trial.leave(claim.session)  # it gets on
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
        if entries and self._bus.wanted("sessions"):
            self._bus.publish("sessions", SessionChanged(session_key=key, reason="message"))
        topic = session_topic(session)
        if self._bus.wanted(topic):
            for entry in entries:
                event = MessageAppended(
                    session_key=key,
                    session_id=session_id,
                    seq=entry.seq,
                    entry=entry.id,
                    body=entry.body,
                    run_id=run_id,
                    internal=origin == ANNOUNCE or entry.internal,  # until it is posted
                )
                self._bus.publish(topic, event)

    def _on_tool(self, claim: Claim, call: ToolCall, result: ToolResult | None) -> None:
        topic = session_topic(claim.session)
        if self._bus.wanted(topic):
            event = ToolPhase(
                session_key=claim.session_key,
                run_id=claim.run_id,
                call_id=call.id,
                name=call.name,
                phase="result" if result else "start",
                is_error=bool(result and result.is_error),
            )
            self._bus.publish(topic, event)

    async def _tell_all(self, all_ended: Sequence[Ended]) -> None:
        for ended in all_ended:
            await self._tell_ended(ended)

    async def _tell_ended(self, ended: Ended, claim: Claim | None = None) -> None:
        """Whoever listens, and whatever the end has led to."""
        note = ended.origin == NOTE
        run_id = None if note else ended.run_id
        self._publish_entries(
            ended.session, ended.session_key, ended.session_id, run_id, ended.origin, ended.entries
        )
        topics = (run_topic(ended.run_id), session_topic(ended.session))
        if not note and any(map(self._bus.wanted, topics)):
            event = _end_event(ended, claim)
            for topic in topics:
                self._bus.publish(topic, event)
        await self.stopping(ended.after)

    async def _follow(self, sequel: Sequel) -> None:
        for accepted in sequel.runs:
            await self.accepted(accepted)
        if sequel.posted:
            self._outbox.wake()

    def _publish_phase(self, session: int, session_key: str, run_id: str, state: str) -> None:
        topic = session_topic(session)
        if self._bus.wanted(topic):
            self._bus.publish(topic, RunChanged(session_key=session_key, run_id=run_id, state=state))


_REASONS: dict[Outcome, str] = {
    "timeout": "The run's time was over.",
    "cancelled": "The run was stopped.",
}


def _about(claim: Claim) -> dict[str, str]:
    """For the log, which can be searched by either."""
    return {"run_id": claim.run_id, "session_key": claim.session_key}


def _end_event(ended: Ended, claim: Claim | None) -> RunChanged:
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
        usage=Spent(input=spent["input"], output=spent["output"], cost=spent["cost"]) if spent else None,
        quiet=ended.origin in QUIET,
        gated=ended.origin in GATED,
        yielded=ending.yielded,
    )


def _stopped(turn: Turn | None, outcome: Outcome) -> Ending:
    reason = _REASONS[outcome]
    return turn.stopped(outcome, reason) if turn else Ending(state=outcome, error_code=outcome, error=reason)


def _unkept(ending: Ending, now: int) -> Ending:
    error = "What the run came to could not be kept. See the log for the reason, then try again."
    usage = next((said.usage for said in ending.messages if isinstance(said, Assistant)), None)
    notice = Assistant(content=[], timestamp=now, stop_reason="error", error_message=error, usage=usage)
    return Ending(state="error", error_code=RunFailed.code, error=error, messages=[notice])


def _failed(turn: Turn | None, error: AntiphonError) -> Ending:
    if turn is not None:
        return turn.failed(error)
    return Ending(state="error", error_code=error.code, error=str(error))
