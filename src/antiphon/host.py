"""Putting the house together: one process that hosts sessions.

`house` owns a state directory, runs its lanes, fires its jobs and gives what is needed to ask for anything;
`hosting` is the same for who only needs the `Operations`. Reaching a directory without running anything in it is
in `visits`.
"""

from __future__ import annotations

import asyncio
import os
import socket
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import TypedDict, Unpack

import msgspec

from antiphon import __version__, keys
from antiphon.bus import EventBus
from antiphon.clock import Clock
from antiphon.config import AgentConfig, Config
from antiphon.engine import framing
from antiphon.engine.actors import Actors
from antiphon.engine.door import Door
from antiphon.engine.engine import Engine, Pace
from antiphon.engine.jobs import Terms
from antiphon.engine.outbox import Channel, Outbox
from antiphon.engine.replicas import Replica
from antiphon.engine.retention import Keep
from antiphon.engine.runs import Claim
from antiphon.engine.scheduler import Scheduler
from antiphon.engine.toolbox import Tool, Toolbox
from antiphon.engine.turns import Setting
from antiphon.errors import NotFound, StoreError
from antiphon.links import Links, linked
from antiphon.operations import Operations
from antiphon.runtimes import Runtime
from antiphon.runtimes.catalog import Catalog
from antiphon.runtimes.model import ModelRuntime
from antiphon.runtimes.slots import Slotted
from antiphon.schedules import Schedules
from antiphon.store import Store
from antiphon.store.opening import Phase, open_store
from antiphon.store.statedir import StateDir
from antiphon.tools import session_tools
from antiphon.transfers.mirror import Mirror, leave
from antiphon.visits import looking, operations_on

__all__ = ["RESULT_CHARS", "House", "hosting", "house", "looking"]

RESULT_CHARS = 200_000  # of one tool result; more would not fit a prompt anyway


class Options(TypedDict, total=False):
    """What a house can be given beside its configuration."""

    tools: Callable[[Operations], Iterable[Tool]] | None
    """Given the operations before anything runs: a run that is taken up may need them at once."""
    functions: Mapping[str, Runtime] | None
    channels: Mapping[str, Channel] | None
    clock: Clock | None
    pace: Pace | None
    on_commit: Callable[[Phase], None] | None


class House(msgspec.Struct, frozen=True):
    """One process that hosts sessions: what can be asked of it, and what whoever opens a door to it needs."""

    operations: Operations
    schedules: Schedules
    toolbox: Toolbox
    links: Links
    config: Config
    clock: Clock
    trouble: Callable[[], StoreError | None]
    """Why the store can keep nothing now, as far as it knows."""
    introduce: Callable[[str], Awaitable[None]]
    """Tell the other replicas where this one can be reached."""
    store: Store

    @property
    def bus(self) -> EventBus:
        return self.links.bus


@asynccontextmanager
async def hosting(config: Config, state_dir: Path, **options: Unpack[Options]) -> AsyncGenerator[Operations]:
    """`house`, for who only needs its operations."""
    async with house(config, state_dir, **options) as opened:
        yield opened.operations


@asynccontextmanager
async def house(config: Config, state_dir: Path, **options: Unpack[Options]) -> AsyncGenerator[House]:
    """Own the directory, take up what was left in it, and host until the context is left."""
    with await asyncio.to_thread(StateDir.own, state_dir) as home:
        async with (
            _opened(config, home, options.get("on_commit")) as store,
            linked(config, store) as links,
            aclosing(
                Catalog(config, options.get("functions"), options.get("clock") or store.clock)
            ) as catalog,
        ):
            clock = options.get("clock") or store.clock
            secret = await store.tx(framing.installation_secret)
            toolbox = Toolbox()
            door = Door(config)
            engine = Engine(
                store=store,
                lanes=links.lanes,
                bus=links.bus,
                clock=clock,
                setting=_Settings(config, catalog, Actors(config, door, toolbox), secret),
                outbox=Outbox(store, links.bus, clock, door, options.get("channels") or {}),
                pace=options.get("pace") or links.pace,
                keep=_keep(config),
                longest_run=config.agents.defaults.timeout_seconds,
                alone=not store.shared,
                replica=_replica(clock),
            )
            mirror = Mirror(store, links.bus, home.transcripts, clock) if config.mirrors_transcripts else None
            operations = operations_on(
                config,
                store,
                home,
                bus=links.bus,
                clock=clock,
                engine=engine,
                toolbox=toolbox,
                files=mirror.files if mirror else None,
            )
            scheduler = Scheduler(
                terms=Terms(config, door, frozenset(options.get("channels") or {})),
                store=store,
                bus=links.bus,
                clock=clock,
                engine=engine,
            )
            schedules = Schedules(store=store, clock=clock, scheduler=scheduler)
            more = options.get("tools")
            for tool in [*session_tools(operations), *(more(operations) if more else ())]:
                toolbox.add(tool)
            async with (
                _mirroring(mirror, home),
                _playing(engine, scheduler, links.grace),
            ):
                yield House(
                    operations,
                    schedules,
                    toolbox,
                    links,
                    config,
                    clock,
                    lambda: store.trouble,
                    engine.introduce,
                    store,
                )


@asynccontextmanager
async def _opened(
    config: Config, home: StateDir, on_commit: Callable[[Phase], None] | None
) -> AsyncGenerator[Store]:
    store = await open_store(config, home.database, on_commit=on_commit)
    try:
        yield store
    finally:
        await store.close()


@asynccontextmanager
async def _playing(engine: Engine, scheduler: Scheduler, grace: float) -> AsyncGenerator[None]:
    try:
        await engine.start()
        async with _firing(scheduler):
            yield
    finally:
        await engine.stop(grace)


@asynccontextmanager
async def _firing(scheduler: Scheduler) -> AsyncGenerator[None]:
    """Jobs fire between the engine's start and its stop, so that what they submit is always taken up."""
    task = asyncio.create_task(scheduler.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def _mirroring(mirror: Mirror | None, home: StateDir) -> AsyncGenerator[None]:
    """Transcript files beside the store, if they are wanted; up to date when the context is left."""
    if mirror is None:
        await asyncio.to_thread(leave, home.transcripts)
        yield
        return
    task = asyncio.create_task(mirror.run())
    try:
        await asyncio.sleep(0)  # so that it listens before the first run
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await mirror.flush()


def _replica(clock: Clock) -> Replica:
    return Replica(
        id=uuid.uuid4().hex,
        name=f"{socket.gethostname()}:{os.getpid()}",
        version=__version__,
        started_at=clock.now(),
    )


def _keep(config: Config) -> Keep:
    retention = config.session.retention
    return Keep(
        archive_after_days=retention.archive_after_days,
        delete_archived_after_days=retention.delete_archived_after_days,
    )


class _Settings:
    """What a run is played with, from the configuration and, for a spawned session, within its envelope."""

    def __init__(self, config: Config, catalog: Catalog, actors: Actors, secret: bytes) -> None:
        self._secret = secret
        self._catalog = catalog
        self._agents = {agent_id: config.agent(agent_id) for agent_id in config.agent_ids}
        self._actors = actors
        self._max_subagent_steps = config.agents.defaults.subagents.max_concurrent
        self._subagent_slots: dict[str | None, asyncio.Semaphore] = {}
        """By provider, and None for agents without one: what is stuck at one provider delays no other."""

    async def __call__(self, claim: Claim) -> Setting:
        agent = self._agents.get(claim.agent_id)
        if agent is None:
            raise NotFound(
                f"Agent {claim.agent_id!r} is not configured any more.",
                "Add it to agents.list, or archive the session.",
            )
        key = keys.parse(claim.session_key)
        runtime = await self._catalog.runtime(agent.id, claim.model)
        spec = runtime.spec if isinstance(runtime, ModelRuntime) else None
        if key.shape == "subagent":
            runtime = Slotted(runtime, self._slots_of(spec.provider if spec else None))
        actor = self._actors.of(
            agent.id, claim.session_key, sandboxed=claim.sandboxed, envelope=claim.envelope
        )
        nonce = framing.nonce_of(self._secret, claim.session_key, claim.session_id)
        return Setting(
            nonce=nonce,
            runtime=runtime,
            caller=actor.caller,
            instructions=_instructions(agent, claim, nonce),
            tools=actor.tools,
            max_steps=agent.max_steps,
            reserve_tokens=agent.compaction.reserve_tokens,
            keep_tokens=agent.compaction.keep_recent_tokens,
            max_result_chars=RESULT_CHARS,
            thinking=agent.thinking_default,
            model=spec.model if spec else None,
        )

    def _slots_of(self, provider: str | None) -> asyncio.Semaphore:
        return self._subagent_slots.setdefault(provider, asyncio.Semaphore(self._max_subagent_steps))


def _instructions(agent: AgentConfig, claim: Claim, nonce: str) -> str:
    own = agent.instructions or f"You are {agent.name or agent.id}, a helpful assistant."
    here = f"This conversation is the session {keys.spoken(claim.session_key)!r}."
    return "\n\n".join(filter(None, [own, here, framing.explanation(nonce), claim.instructions]))
