"""What three replicas are asked for while the weather is bad, and what clients see of it.

The messages are those of the crash suite (`chaos.scenario`), each of which has one right outcome. A client writes its
next message to a session when the one before is accepted, so that their order is known; all clients wait for the ends
of their runs, and some watch.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from time import monotonic

from chaos.killer import UNFINISHED
from chaos.scenario import Planned, places, talking
from chaos.verify import finally_
from support.replicas import Facts, ReplicaGone, ReplicaProcess, ReplicaRefused, ReplicaSet
from support.store_snapshot import Row, StoreSnapshot

WATCHED = 4  # sessions
AT_ONCE = 6  # messages whose ends are waited for, before there is another one
DATED = 15_000  # milliseconds between an answer and its commit, at most
ENDING = 90.0  # seconds in which everything must have come to its end when the weather is good again
WAITING = (
    '"timeoutSeconds": 20',
    '"timeoutSeconds": 100',
)  # of a send; how long an outage lasts is the weather's


def plan(seed: int, messages: int) -> list[Planned]:
    """Sends with up to five turns and announcements inside and outside, sub-agents, nested ones, ones that wait.

    Many take their time, so that there is always something under way.
    """
    rng = random.Random(seed)
    return [
        replace(planned, text=f"{planned.text.replace(*WAITING)}\nslow {rng.choice([0.1, 0.3, 1.0])}")
        for planned in talking(seed, sessions=8, messages=messages)
    ]


@dataclass
class Watcher:
    """Follows a session on any replica, and goes on at another when that one is gone."""

    replica_set: ReplicaSet
    session: str
    at: ReplicaProcess | None = None
    """The only one to ask, if there is one."""
    seen: list[Facts] = field(default_factory=list[Facts])
    moves: int = 0

    async def watch(self) -> None:
        while True:
            if replica := self.at or self.replica_set.pick_replica():
                with suppress(ReplicaGone, ReplicaRefused):
                    await self._follow(replica)
                self.moves += 1
            await self.replica_set.wait_for_news()

    async def _follow(self, replica: ReplicaProcess) -> None:
        feed = replica.follow(self.session, self.seen[-1]["seq"] if self.seen else 0)
        async with aclosing(feed):
            async for fact in feed:
                self.seen.append(fact)

    def up_to_date(self) -> bool:
        (row,) = self.replica_set.rows("SELECT last_seq FROM sessions WHERE key = $1", self.session)
        return row["last_seq"] == (self.seen[-1]["seq"] if self.seen else 0)

    def wrong(self, snapshot: StoreSnapshot) -> list[str]:
        """Each entry once and in order."""
        session = snapshot.session(self.session)
        assert session is not None
        said = [m["entry"] for m in snapshot.messages if m["transcript"] == session["transcript"]]
        seen = [fact["entry"] for fact in self.seen]
        return [] if seen == said else [f"of {self.session} was seen {seen}, and said {said}"]


@dataclass
class Load:
    replica_set: ReplicaSet
    plan: Sequence[Planned]
    accepted: list[Planned] = field(default_factory=list[Planned])
    answered: list[str] = field(default_factory=list[str])
    watchers: list[Watcher] = field(default_factory=list[Watcher])
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    """No further message, please."""
    longest: float = 0.0
    """Seconds that a message took to be accepted."""

    async def run(self) -> None:
        """Until all accepted runs have ended and all clients have seen it."""
        for place in sorted({*places(list(self.plan)), *(f"agent:main:direct:s{n}" for n in range(WATCHED))}):
            await self.replica_set.ask_until_done("open", session=place)
        self.watchers = [
            Watcher(self.replica_set, f"agent:main:direct:s{number}") for number in range(WATCHED)
        ]
        watching = [asyncio.create_task(watcher.watch()) for watcher in self.watchers]
        try:
            async with asyncio.TaskGroup() as writing:
                await self._write(writing)
            await self.replica_set.until(self._worked_off, ENDING, what="everything has ended")
            await self.replica_set.until(self._all_seen, what="all clients have seen everything")
        finally:
            for task in watching:
                task.cancel()
            await asyncio.gather(*watching, return_exceptions=True)

    async def _write(self, writing: asyncio.TaskGroup) -> None:
        room = asyncio.Semaphore(AT_ONCE)
        before: dict[str, asyncio.Event] = {}
        for planned in self.plan:
            await room.acquire()
            if self.stop.is_set():
                return
            earlier, before[planned.session] = before.get(planned.session), asyncio.Event()
            writing.create_task(self._say(planned, earlier, before[planned.session], room))

    async def _say(
        self,
        planned: Planned,
        earlier: asyncio.Event | None,
        accepted: asyncio.Event,
        room: asyncio.Semaphore,
    ) -> None:
        if earlier is not None:
            await earlier.wait()
        began = monotonic()
        await self.replica_set.ask_until_done(
            "submit", session=planned.session, text=planned.text, key=planned.key
        )
        self.longest = max(self.longest, monotonic() - began)
        self.accepted.append(planned)
        accepted.set()
        view = await self.replica_set.wait_for_run_end(planned.key, 2 * ENDING)
        self.answered.append(view["runId"])
        room.release()

    def _worked_off(self) -> bool:
        return not self.replica_set.rows(UNFINISHED)[0]["?column?"]

    def _all_seen(self) -> bool:
        return all(watcher.up_to_date() for watcher in self.watchers)

    # --- what must hold when every replica has left ---

    def wrong(self) -> list[str]:
        snapshot = StoreSnapshot(self.replica_set.home)
        places = {planned.key: place for place, planned in enumerate(self.plan)}
        accepted = sorted(self.accepted, key=lambda planned: places[planned.key])
        wrong = finally_(self.replica_set.home, accepted)
        wrong += [f"no client saw the end of {p.key}" for p in accepted if p.key not in self.answered]
        wrong += [line for watcher in self.watchers for line in watcher.wrong(snapshot)]
        return wrong + order(snapshot, accepted) + misdated(snapshot)


def misdated(snapshot: StoreSnapshot) -> list[str]:
    """An answer is dated by the shared clock, not by that of the machine on which it was given."""
    # The words of a note have waited for their turn.
    answers = [
        entry
        for run in snapshot.runs
        if run["origin"] != "note"
        for entry in snapshot.entries(run)
        if entry["role"] == "assistant"
    ]
    return [
        f"entry {answer['entry']} of {answer['created_at']} is dated {answer['json']['timestamp']}"
        for answer in answers
        if abs(answer["created_at"] - answer["json"]["timestamp"]) > DATED
    ]


def order(snapshot: StoreSnapshot, accepted: Iterable[Planned]) -> list[str]:
    """What one writer said to a session is in its transcript in that order."""
    runs: dict[str, list[Row]] = {}
    for planned in accepted:
        if run := snapshot.run(planned.key):
            runs.setdefault(planned.session, []).append(run)
    return [
        f"{later['id']} came before {earlier['id']}"
        for lane in runs.values()
        for earlier, later in pairwise(lane)
        if later["first_seq"] <= earlier["last_seq"]
    ]
