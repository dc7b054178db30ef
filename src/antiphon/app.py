"""Assembles the app: one process that hosts sessions.

`open_app` owns a state directory, runs its lanes, fires its jobs and provides everything a gateway needs;
`open_app_operations` is the same for callers that only need the `Operations`. Access to a directory without running
anything in it is in `state_access`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterable, Mapping
from contextlib import aclosing, asynccontextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, Unpack

import msgspec

from antiphon import __version__, keys
from antiphon.bus import EventBus
from antiphon.clock import Clock
from antiphon.config import AgentConfig, Config
from antiphon.config.tool_lists import find_lists_without_tools
from antiphon.coordination import CoordinationBackend, open_coordination
from antiphon.engine.collaboration import framing
from antiphon.engine.engine import Engine
from antiphon.engine.jobs.jobs import FiringContext
from antiphon.engine.jobs.scheduler import Scheduler
from antiphon.engine.outbox.delivery_channel import DeliveryChannel
from antiphon.engine.outbox.sender import Outbox
from antiphon.engine.replicas import Replica
from antiphon.engine.runs.lifecycle import Claim
from antiphon.engine.runs.run_loop import RunSetup
from antiphon.engine.sessions.identity import (
    SessionIdentity,
    SessionIdentityResolver,
    get_answering_model,
)
from antiphon.engine.sessions.resolver import SessionResolver
from antiphon.engine.sessions.retention import RetentionPolicy
from antiphon.engine.supervisor import EngineTimings
from antiphon.engine.toolbox import Tool, Toolbox
from antiphon.errors import Forbidden, NotFound
from antiphon.event_loop import run_in_background
from antiphon.operations.operations import Operations
from antiphon.runtimes import Runtime
from antiphon.runtimes.model import ModelRuntime
from antiphon.runtimes.registry import ConcurrencyLimitedRuntime, RuntimeRegistry
from antiphon.state_access import create_operations, open_operations_readonly
from antiphon.store import CommitPhase, Store
from antiphon.store.factory import open_store
from antiphon.store.statedir import StateDir
from antiphon.tool_selection import ToolAudience
from antiphon.tools import (
    create_chat_tools,
    create_command_launcher,
    create_command_tools,
    create_session_tools,
    create_work_tools,
)
from antiphon.transfers.mirror import TranscriptMirror, remove_mark
from antiphon.workspace.bootstrap import BootstrapReader
from antiphon.workspace.sandbox import Sandboxes
from antiphon.workspace.sandbox_pruning import SandboxPruner

if TYPE_CHECKING:
    from antiphon.mcp.servers import McpServers

__all__ = ["MAX_TOOL_RESULT_CHARACTERS", "App", "open_app", "open_app_operations", "open_operations_readonly"]

log = logging.getLogger(__name__)

MAX_TOOL_RESULT_CHARACTERS = 200_000  # more would not fit a prompt anyway


class AppOptions(TypedDict, total=False):
    """Options of an app besides its configuration."""

    tools: Callable[[Operations], Iterable[Tool]] | None
    """Called with the operations before anything runs, since a resumed run may need its tools at once."""
    functions: Mapping[str, Runtime] | None
    channels: Mapping[str, DeliveryChannel] | None
    clock: Clock | None
    timings: EngineTimings | None
    on_commit: Callable[[CommitPhase], None] | None


class App(msgspec.Struct, frozen=True):
    """One process that hosts sessions: its operations, and the parts that a gateway shares."""

    operations: Operations
    toolbox: Toolbox
    coordination: CoordinationBackend
    config: Config
    clock: Clock
    publish_address: Callable[[str], Awaitable[None]]
    """Publishes the address of this replica to the others."""
    preload_libraries: Callable[[], None]
    """Imports the configured providers' libraries in the background (`RuntimeRegistry.preload_libraries`)."""
    examine_commands: Callable[[], None]
    """Finds out in the background which agents can run commands (`CommandLauncher.begin_examination`)."""
    store: Store
    mcp_servers: McpServers | None = None
    """The configured MCP servers. Without any, their client is not even imported."""

    @property
    def bus(self) -> EventBus:
        return self.coordination.bus


@asynccontextmanager
async def open_app_operations(
    config: Config, state_dir: Path, **options: Unpack[AppOptions]
) -> AsyncGenerator[Operations]:
    """`open_app` for callers that only need its operations."""
    async with open_app(config, state_dir, **options) as opened:
        yield opened.operations


@asynccontextmanager
async def open_app(config: Config, state_dir: Path, **options: Unpack[AppOptions]) -> AsyncGenerator[App]:
    """Owns the directory, resumes unfinished work, and hosts sessions until the context is left."""
    with await asyncio.to_thread(StateDir.open_locked, state_dir) as home:
        async with (
            _open_app_store(config, home, options.get("on_commit")) as store,
            open_coordination(config, store) as coordination,
            aclosing(
                RuntimeRegistry(config, options.get("functions"), options.get("clock") or store.clock)
            ) as runtimes,
        ):
            clock = options.get("clock") or store.clock
            toolbox, session_resolver = Toolbox(), SessionResolver(config)
            sandboxes = Sandboxes(config, home.path)
            launcher = create_command_launcher(config, sandboxes, home.path)
            mcp_servers = _create_mcp_servers(config, home.path, clock, toolbox, sandboxes)
            load_run_setup = _RunSetupLoader(
                config,
                runtimes,
                SessionIdentityResolver(config, session_resolver, toolbox),
                await store.tx(framing.load_installation_secret),
                home.path,
                launcher.wait_until_examined,
                mcp_servers,
            )
            engine = _build_engine(config, store, coordination, load_run_setup, session_resolver, options)
            scheduler = Scheduler(
                context=FiringContext(config, session_resolver, frozenset(options.get("channels") or {})),
                store=store,
                bus=coordination.bus,
                clock=clock,
                worker=engine.worker,
            )
            mirror = None
            if config.mirrors_transcripts:
                mirror = TranscriptMirror(store, coordination.bus, home.transcripts, clock)
            operations = create_operations(
                config,
                store,
                home,
                bus=coordination.bus,
                clock=clock,
                worker=engine.worker,
                toolbox=toolbox,
                transcript_files=mirror.files if mirror else None,
                scheduler=scheduler,
                sandboxes=sandboxes,
            )
            create_tools = options.get("tools")
            command_tools = create_command_tools(
                config,
                launcher,
                store,
                coordination.bus,
                clock,
                home.path,
                owner=engine.owner,
                apply_effects=engine.worker.apply_effects,
            )
            for tool in [
                *create_work_tools(config, store, clock, home.path, runtimes.get_model_runtime),
                *command_tools.tools,
                *create_session_tools(operations),
                *create_chat_tools(operations, config),
                *(create_tools(operations) if create_tools else ()),
            ]:
                toolbox.add(tool)
            for tool in await _load_configured_tools(config, toolbox.names):
                toolbox.add(tool)
            if mcp_servers is not None:
                await mcp_servers.load()
            for warning in find_lists_without_tools(config, sorted(toolbox.names)):
                log.warning("%s", warning)
            async with (
                aclosing(mcp_servers) if mcp_servers is not None else nullcontext(),
                aclosing(launcher),
                aclosing(command_tools.commands),
                _run_mirror(mirror, home),
                run_in_background(SandboxPruner(config, store, clock, home.path).run()),
                _run_engine(engine, scheduler, coordination.drain_seconds),
            ):
                await command_tools.commands.start()
                yield App(
                    operations=operations,
                    toolbox=toolbox,
                    coordination=coordination,
                    config=config,
                    clock=clock,
                    publish_address=engine.supervisor.publish_address,
                    preload_libraries=runtimes.preload_libraries,
                    examine_commands=launcher.begin_examination,
                    store=store,
                    mcp_servers=mcp_servers,
                )


def _create_mcp_servers(
    config: Config, state_dir: Path, clock: Clock, toolbox: Toolbox, sandboxes: Sandboxes
) -> McpServers | None:
    if not config.enabled_mcp_servers:
        return None
    from antiphon.mcp.servers import McpServers  # noqa: PLC0415

    return McpServers(config, state_dir, clock, toolbox, sandboxes.wrap)


async def _load_configured_tools(config: Config, reserved_names: Collection[str]) -> list[Tool]:
    """Return the tools of `tools.python`. Without any, their loader is not even imported."""
    if not config.tools.python:
        return []
    from antiphon.tools.python_tools import load_python_tools  # noqa: PLC0415

    return await asyncio.to_thread(load_python_tools, config.tools.python, set(reserved_names))


def _build_engine(
    config: Config,
    store: Store,
    coordination: CoordinationBackend,
    load_run_setup: _RunSetupLoader,
    session_resolver: SessionResolver,
    options: AppOptions,
) -> Engine:
    clock = options.get("clock") or store.clock
    retention = config.session.retention
    return Engine(
        store=store,
        lanes=coordination.lanes,
        bus=coordination.bus,
        clock=clock,
        load_run_setup=load_run_setup,
        outbox=Outbox(store, coordination.bus, clock, session_resolver, options.get("channels") or {}),
        timings=options.get("timings") or coordination.timings,
        retention=RetentionPolicy(
            archive_after_days=retention.archive_after_days,
            delete_archived_after_days=retention.delete_archived_after_days,
        ),
        max_run_seconds=config.agents.defaults.timeout_seconds,
        is_only_replica=not store.shared,
        replica=Replica(
            id=uuid.uuid4().hex,
            name=f"{socket.gethostname()}:{os.getpid()}",
            version=__version__,
            started_at=clock.now(),
        ),
    )


@asynccontextmanager
async def _open_app_store(
    config: Config, home: StateDir, on_commit: Callable[[CommitPhase], None] | None
) -> AsyncGenerator[Store]:
    store = await open_store(config, home.database, on_commit=on_commit)
    try:
        yield store
    finally:
        await store.close()


@asynccontextmanager
async def _run_engine(engine: Engine, scheduler: Scheduler, grace: float) -> AsyncGenerator[None]:
    try:
        await engine.start()
        # Jobs are fired between the engine's start and its stop, so that the runs they submit are always executed.
        async with run_in_background(scheduler.run()):
            yield
    finally:
        await engine.stop(grace)


@asynccontextmanager
async def _run_mirror(mirror: TranscriptMirror | None, home: StateDir) -> AsyncGenerator[None]:
    """Keeps transcript files beside the store, if configured; they are up to date when the context is left."""
    if mirror is None:
        await asyncio.to_thread(remove_mark, home.transcripts)
        yield
        return
    try:
        async with run_in_background(mirror.run()):
            await asyncio.sleep(0)  # let it subscribe before the first run
            yield
    finally:
        await mirror.flush()


class _RunSetupLoader:
    """Builds the setup of a run from the configuration and, for a spawned session, its limits."""

    def __init__(
        self,
        config: Config,
        runtimes: RuntimeRegistry,
        identities: SessionIdentityResolver,
        secret: bytes,
        state_dir: Path,
        wait_until_examined: Callable[[], Awaitable[None]],
        mcp_servers: McpServers | None,
    ) -> None:
        self._config = config
        self._secret = secret
        self._bootstrap = BootstrapReader(state_dir)
        self._wait_until_examined = wait_until_examined
        self._mcp_servers = mcp_servers
        self._runtimes = runtimes
        self._agents = {agent_id: config.get_agent(agent_id) for agent_id in config.agent_ids}
        self._identities = identities
        self._approval_timeout_seconds = config.tools.approvals.timeout_seconds
        self._max_subagent_steps = config.agents.defaults.subagents.max_concurrent
        self._subagent_slots: dict[str | None, asyncio.Semaphore] = {}
        """By provider, with None for agents without one, so that a stuck provider does not delay the others."""

    async def __call__(self, claim: Claim) -> RunSetup:
        agent = self._agents.get(claim.agent_id)
        if agent is None:
            raise NotFound(
                f"Agent {claim.agent_id!r} is not configured any more.",
                "Add it to agents.list, or archive the session.",
            )
        key = keys.parse(claim.session_key)
        runtime = await self._runtimes.get_runtime(agent.id, claim.model)
        spec = runtime.spec if isinstance(runtime, ModelRuntime) else None
        if key.shape == "subagent":
            runtime = ConcurrencyLimitedRuntime(
                runtime, self._get_subagent_slots(spec.provider if spec else None)
            )
        await self._wait_until_examined()
        if self._mcp_servers is not None:
            await self._mcp_servers.prepare_run(agent.tools.selection)
        identity = self._identities.resolve(
            agent.id,
            claim.session_key,
            sandboxed=claim.sandboxed,
            envelope=claim.envelope,
            model=claim.model,
        )
        if identity.caller.sandboxed and agent.runtime.type == "function":
            raise Forbidden(
                f"The session {claim.session_key!r} is sandboxed, but agent {agent.id!r} is a Python function, which"
                " runs outside any sandbox ('agents.list[].runtime').",
                "Start a new session, or let a model answer for the agent.",
            )
        nonce = framing.derive_nonce(self._secret, claim.session_key, claim.session_id)
        return RunSetup(
            nonce=nonce,
            runtime=runtime,
            caller=identity.caller,
            instructions=_build_instructions(
                agent,
                claim,
                nonce,
                await self._bootstrap.read(agent, claim.session_key),
                self._describe_mcp_servers(agent, claim, identity, nonce),
            ),
            tools=identity.tools,
            max_steps=agent.max_steps,
            reserve_tokens=agent.compaction.reserve_tokens,
            keep_tokens=agent.compaction.keep_recent_tokens,
            max_result_chars=MAX_TOOL_RESULT_CHARACTERS,
            thinking=agent.thinking_default,
            approval_timeout_seconds=self._approval_timeout_seconds,
            loop_detection=agent.loop_detection,
            model=spec.model if spec else None,
        )

    def _describe_mcp_servers(
        self, agent: AgentConfig, claim: Claim, identity: SessionIdentity, nonce: str
    ) -> str:
        if self._mcp_servers is None:
            return ""
        audience = ToolAudience(
            model=get_answering_model(self._config, agent.id, claim.model),
            is_sandboxed=identity.caller.sandboxed,
        )
        return self._mcp_servers.describe_for_run(identity.tools, agent.tools.selection, audience, nonce)

    def _get_subagent_slots(self, provider: str | None) -> asyncio.Semaphore:
        return self._subagent_slots.setdefault(provider, asyncio.Semaphore(self._max_subagent_steps))


def _build_instructions(
    agent: AgentConfig, claim: Claim, nonce: str, workspace_texts: str, mcp_texts: str
) -> str:
    own = agent.instructions or f"You are {agent.name or agent.id}, a helpful assistant."
    here = f"This conversation is the session {keys.display_full_key(claim.session_key)!r}."
    parts = [own, workspace_texts, here, framing.explain_frames(nonce), mcp_texts, claim.instructions]
    return "\n\n".join(filter(None, parts))
