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
from antiphon.engine.sessions.identity import (
    SessionIdentityResolver,
)
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
from antiphon.workspace.sandbox import Sandboxes
from antiphon.workspace.sandbox_pruning import SandboxPruner

if TYPE_CHECKING:
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
            acp_sessions = _create_acp_sessions(
                config, home.path, sandboxes, options.get("session_tool_server")
            )
            load_run_setup = RunSetupBuilder(
                config,
                runtimes,
                SessionIdentityResolver(config, session_resolver, toolbox),
                await store.tx(framing.load_installation_secret),
                home.path,
                launcher.wait_until_examined,
                sandboxes.explain_unavailable,
                mcp_servers,
                acp_sessions,
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
            create_tools = options.get("tools")
            await _fill_toolbox(
                toolbox,
                config,
                [
                    *create_work_tools(config, store, clock, home.path, runtimes.get_model_runtime),
                    *command_tools.tools,
                    *create_session_tools(operations),
                    *create_chat_tools(operations, config),
                    *(create_tools(operations) if create_tools else ()),
                ],
                mcp_servers,
            )
            async with (
                aclosing(mcp_servers) if mcp_servers is not None else nullcontext(),
                aclosing(acp_sessions) if acp_sessions is not None else nullcontext(),
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


def _create_acp_sessions(
    config: Config, state_dir: Path, sandboxes: Sandboxes, tool_server: SessionToolServer | None
) -> AcpSessions | None:
    if not config.acp_agent_ids:
        return None
    from antiphon.runtimes.acp.sessions import AcpSessions  # noqa: PLC0415
    from antiphon.workspace.agent_programs import AgentProgramLauncher  # noqa: PLC0415

    launcher = AgentProgramLauncher(config, state_dir, sandboxes, offers_tools=tool_server is not None)
    return AcpSessions(config, state_dir, launcher.prepare, tool_server)


def _create_mcp_servers(
    config: Config, state_dir: Path, clock: Clock, toolbox: Toolbox, sandboxes: Sandboxes
) -> McpServers | None:
    if not config.enabled_mcp_servers:
        return None
    from antiphon.mcp.servers import McpServers  # noqa: PLC0415

    return McpServers(config, state_dir, clock, toolbox, sandboxes.wrap)


async def _fill_toolbox(
    toolbox: Toolbox, config: Config, tools: Iterable[Tool], mcp_servers: McpServers | None
) -> None:
    """Add the built-in tools, those of the configuration and of MCP servers, and check the lists that name them."""
    for tool in tools:
        toolbox.add(tool)
    for tool in await _load_configured_tools(config, toolbox.names):
        toolbox.add(tool)
    if mcp_servers is not None:
        await mcp_servers.load()
    for warning in find_lists_without_tools(config, sorted(toolbox.names)):
        log.warning("%s", warning)


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
    load_run_setup: RunSetupLoader,
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
