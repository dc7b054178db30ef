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
from typing import TYPE_CHECKING, NamedTuple, TypedDict, Unpack

import msgspec

from antiphon import __version__
from antiphon.bus import EventBus
from antiphon.clock import Clock
from antiphon.config import Config
from antiphon.config.tool_lists import find_lists_without_tools
from antiphon.coordination import CoordinationBackend, open_coordination
from antiphon.engine.collaboration import framing
from antiphon.engine.engine import Engine
from antiphon.engine.jobs.jobs import FiringContext
from antiphon.engine.jobs.scheduler import Scheduler
from antiphon.engine.outbox.delivery_channel import DeliveryChannel
from antiphon.engine.outbox.sender import Outbox
from antiphon.engine.replicas import Replica
from antiphon.engine.sessions.identity import SessionIdentityResolver
from antiphon.engine.sessions.resolver import SessionResolver
from antiphon.engine.sessions.retention import RetentionPolicy
from antiphon.engine.supervisor import EngineTimings
from antiphon.engine.toolbox import Tool, Toolbox
from antiphon.engine.worker import RunSetupLoader
from antiphon.event_loop import run_in_background
from antiphon.operations.operations import Operations
from antiphon.run_setup import RunSetupBuilder
from antiphon.runtimes import Runtime
from antiphon.runtimes.registry import RuntimeRegistry
from antiphon.state_access import create_operations, open_operations_readonly
from antiphon.store import CommitPhase, Store
from antiphon.store.factory import open_store
from antiphon.store.statedir import StateDir
from antiphon.tools import (
    create_chat_tools,
    create_command_launcher,
    create_command_tools,
    create_session_tools,
    create_work_tools,
)
from antiphon.transfers.mirror import TranscriptMirror, remove_mark
from antiphon.workspace.command_launch import CommandLauncher
from antiphon.workspace.commands import Commands
from antiphon.workspace.sandbox import Sandboxes
from antiphon.workspace.sandbox_pruning import SandboxPruner

if TYPE_CHECKING:
    from antiphon.channels.host import ChannelHost
    from antiphon.mcp.servers import McpServers
    from antiphon.runtimes.acp.session_tools import SessionToolServer
    from antiphon.runtimes.acp.sessions import AcpSessions

__all__ = ["App", "open_app", "open_app_operations", "open_operations_readonly"]

log = logging.getLogger(__name__)


class AppOptions(TypedDict, total=False):
    """Options of an app besides its configuration."""

    tools: Callable[[Operations], Iterable[Tool]] | None
    """Called with the operations before anything runs, since a resumed run may need its tools at once."""
    functions: Mapping[str, Runtime] | None
    channels: Mapping[str, DeliveryChannel] | None
    clock: Clock | None
    timings: EngineTimings | None
    on_commit: Callable[[CommitPhase], None] | None
    session_tool_server: SessionToolServer | None
    """Offers the programs of ACP agents the tools of their sessions."""
    command: str | None
    """The command that this process was started as; other processes are told it while they wait for the directory."""


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
    channels: ChannelHost | None = None
    """The configured chat channels. Without any, nothing of them is imported."""
    replica_id: str = ""

    @property
    def bus(self) -> EventBus:
        return self.coordination.bus

    @asynccontextmanager
    async def run_channels(self) -> AsyncGenerator[None]:
        """Receive and send for the configured chat channels while the context is open; only a gateway does."""
        if self.channels is None:
            yield
            return
        inbound = self.operations.create_inbound()
        wake = self.operations.context.require_worker().wake_outbox
        async with self.channels.run(inbound, self.store, self.bus, self.replica_id, wake):
            yield


@asynccontextmanager
async def open_app_operations(
    config: Config, state_dir: Path, **options: Unpack[AppOptions]
) -> AsyncGenerator[Operations]:
    """`open_app` for callers that only need its operations."""
    async with open_app(config, state_dir, **options) as opened:
        yield opened.operations


class _Foundation(NamedTuple):
    """The base of the parts of an app: its store and bus, and the resources of runs."""

    config: Config
    home: StateDir
    store: Store
    coordination: CoordinationBackend
    clock: Clock
    runtimes: RuntimeRegistry
    toolbox: Toolbox
    session_resolver: SessionResolver
    sandboxes: Sandboxes
    launcher: CommandLauncher
    mcp_servers: McpServers | None
    acp_sessions: AcpSessions | None
    channels: ChannelHost | None
    options: AppOptions


@asynccontextmanager
async def open_app(config: Config, state_dir: Path, **options: Unpack[AppOptions]) -> AsyncGenerator[App]:
    """Owns the directory, resumes unfinished work, and hosts sessions until the context is left."""
    with await asyncio.to_thread(StateDir.open_locked, state_dir, options.get("command")) as home:
        async with (
            _open_app_store(config, home, options.get("on_commit")) as store,
            open_coordination(config, store) as coordination,
            aclosing(
                RuntimeRegistry(config, options.get("functions"), options.get("clock") or store.clock)
            ) as runtimes,
        ):
            clock, toolbox = options.get("clock") or store.clock, Toolbox()
            sandboxes = Sandboxes(config, home.path)
            channels = _create_channel_host(config, clock)
            if channels is not None:
                options["channels"] = {**channels.outlets, **(options.get("channels") or {})}
            base = _Foundation(
                config=config,
                home=home,
                store=store,
                coordination=coordination,
                clock=clock,
                runtimes=runtimes,
                toolbox=toolbox,
                session_resolver=SessionResolver(config),
                sandboxes=sandboxes,
                launcher=create_command_launcher(config, sandboxes, home.path),
                mcp_servers=_create_mcp_servers(config, home.path, clock, toolbox, sandboxes),
                acp_sessions=_create_acp_sessions(
                    config, home.path, sandboxes, options.get("session_tool_server")
                ),
                channels=channels,
                options=options,
            )
            async with _host_sessions(base) as app:
                yield app


@asynccontextmanager
async def _host_sessions(base: _Foundation) -> AsyncGenerator[App]:
    """Builds the parts of the app and runs those that work by themselves."""
    config, store, bus, clock = base.config, base.store, base.coordination.bus, base.clock
    engine = _build_engine(base, await _build_run_setups(base))
    scheduler = Scheduler(
        context=FiringContext(config, base.session_resolver, frozenset(base.options.get("channels") or {})),
        store=store,
        bus=bus,
        clock=clock,
        worker=engine.worker,
    )
    mirror = None
    if config.mirrors_transcripts:
        mirror = TranscriptMirror(store, bus, base.home.transcripts, clock)
    operations = create_operations(
        config,
        store,
        base.home,
        bus=bus,
        clock=clock,
        worker=engine.worker,
        toolbox=base.toolbox,
        transcript_files=mirror.files if mirror else None,
        scheduler=scheduler,
        sandboxes=base.sandboxes,
    )
    commands = await _fill_toolbox(base, operations, engine)
    async with (
        aclosing(base.mcp_servers) if base.mcp_servers is not None else nullcontext(),
        aclosing(base.acp_sessions) if base.acp_sessions is not None else nullcontext(),
        aclosing(base.channels) if base.channels is not None else nullcontext(),
        aclosing(base.launcher),
        aclosing(commands),
        _run_mirror(mirror, base.home),
        run_in_background(SandboxPruner(config, store, clock, base.home.path).run()),
        _run_engine(engine, scheduler, base.coordination.drain_seconds),
    ):
        await commands.start()
        yield App(
            operations=operations,
            toolbox=base.toolbox,
            coordination=base.coordination,
            config=config,
            clock=clock,
            publish_address=engine.supervisor.publish_address,
            preload_libraries=base.runtimes.preload_libraries,
            examine_commands=base.launcher.begin_examination,
            store=store,
            mcp_servers=base.mcp_servers,
            channels=base.channels,
            replica_id=engine.owner,
        )


def _create_acp_sessions(
    config: Config, state_dir: Path, sandboxes: Sandboxes, tool_server: SessionToolServer | None
) -> AcpSessions | None:
    if not config.acp_agent_ids:
        return None
    from antiphon.runtimes.acp.sessions import AcpSessions  # noqa: PLC0415
    from antiphon.workspace.agent_programs import AgentProgramLauncher  # noqa: PLC0415

    launcher = AgentProgramLauncher(config, state_dir, sandboxes, offers_tools=tool_server is not None)
    return AcpSessions(config, state_dir, launcher.prepare, tool_server)


def _create_channel_host(config: Config, clock: Clock) -> ChannelHost | None:
    if not config.enabled_channels:
        return None
    from antiphon.channels.host import ChannelHost  # noqa: PLC0415

    return ChannelHost(config, clock)


def _create_mcp_servers(
    config: Config, state_dir: Path, clock: Clock, toolbox: Toolbox, sandboxes: Sandboxes
) -> McpServers | None:
    if not config.enabled_mcp_servers:
        return None
    from antiphon.mcp.servers import McpServers  # noqa: PLC0415

    return McpServers(config, state_dir, clock, toolbox, sandboxes.wrap)


async def _fill_toolbox(base: _Foundation, operations: Operations, engine: Engine) -> Commands:
    """Add all tools, and check the lists that name them. Returns the commands that the tools for them start."""
    config = base.config
    command_tools = create_command_tools(
        config,
        base.launcher,
        base.store,
        base.coordination.bus,
        base.clock,
        base.home.path,
        owner=engine.owner,
        apply_effects=engine.worker.apply_effects,
    )
    create_tools = base.options.get("tools")
    for tool in (
        *create_work_tools(config, base.store, base.clock, base.home.path, base.runtimes.get_model_runtime),
        *command_tools.tools,
        *create_session_tools(operations),
        *create_chat_tools(operations, config),
        *(create_tools(operations) if create_tools else ()),
    ):
        base.toolbox.add(tool)
    for tool in await _load_configured_tools(config, base.toolbox.names):
        base.toolbox.add(tool)
    if base.mcp_servers is not None:
        await base.mcp_servers.load()
    for warning in find_lists_without_tools(config, sorted(base.toolbox.names)):
        log.warning("%s", warning)
    return command_tools.commands


async def _load_configured_tools(config: Config, reserved_names: Collection[str]) -> list[Tool]:
    """Return the tools of `tools.python`. Without any, their loader is not even imported."""
    if not config.tools.python:
        return []
    from antiphon.tools.python_tools import load_python_tools  # noqa: PLC0415

    return await asyncio.to_thread(load_python_tools, config.tools.python, set(reserved_names))


async def _build_run_setups(base: _Foundation) -> RunSetupBuilder:
    return RunSetupBuilder(
        base.config,
        base.runtimes,
        SessionIdentityResolver(base.config, base.session_resolver, base.toolbox),
        await base.store.tx(framing.load_installation_secret),
        base.home.path,
        base.launcher.wait_until_examined,
        base.sandboxes.explain_unavailable,
        base.mcp_servers,
        base.acp_sessions,
    )


def _build_engine(base: _Foundation, load_run_setup: RunSetupLoader) -> Engine:
    config, store, coordination, clock = base.config, base.store, base.coordination, base.clock
    channels = base.options.get("channels") or {}
    retention = config.session.retention
    return Engine(
        store=store,
        lanes=coordination.lanes,
        bus=coordination.bus,
        clock=clock,
        load_run_setup=load_run_setup,
        outbox=Outbox(store, coordination.bus, clock, base.session_resolver, channels),
        timings=base.options.get("timings") or coordination.timings,
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
