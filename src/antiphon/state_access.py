"""Access to a state directory without running its sessions.

`open_operations_readonly` gives `Operations` for reading beside a running owner; `open_store_readonly` and
`open_store_exclusive` give the bare store, for work on the directory itself. No session runs meanwhile, and nothing
here imports what a run would need.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from antiphon.access import Caller
from antiphon.bus.local import LocalBus
from antiphon.clock import Clock
from antiphon.engine.sessions.resolver import SessionResolver
from antiphon.engine.toolbox import Toolbox
from antiphon.errors import Unavailable
from antiphon.operations.context import OperationContext
from antiphon.operations.operations import Operations
from antiphon.store.factory import open_store
from antiphon.store.statedir import StateDir
from antiphon.store.transcript_files import TranscriptFiles

if TYPE_CHECKING:
    from antiphon.bus import EventBus
    from antiphon.config import Config
    from antiphon.engine.jobs.scheduler import Scheduler
    from antiphon.engine.worker import Worker
    from antiphon.store import Store
    from antiphon.workspace.sandbox import Sandboxes


@asynccontextmanager
async def open_operations_readonly(config: Config, state_dir: Path) -> AsyncGenerator[Operations]:
    """Opens operations on a state directory without owning it; every change is refused."""
    async with open_store_readonly(config, state_dir) as store:
        yield create_operations(config, store, StateDir.open_unlocked(state_dir))


@asynccontextmanager
async def open_store_readonly(config: Config, state_dir: Path) -> AsyncGenerator[Store]:
    """Opens the store of a state directory for reading, whether or not a process owns it."""
    store = await open_store(config, StateDir.open_unlocked(state_dir).database, read_only=True)
    try:
        yield store
    finally:
        await store.close()


@asynccontextmanager
async def open_store_exclusive(
    config: Config, state_dir: Path, command: str | None = None
) -> AsyncGenerator[Store]:
    """Owns the directory without executing the runs that wait in it."""
    with await asyncio.to_thread(StateDir.open_locked, state_dir, command) as home:
        store = await open_store(config, home.database)
        try:
            yield store
        finally:
            await store.close()


async def require_no_live_replicas(config: Config, state_dir: Path) -> None:
    """Checks that no gateway is hosting the store, before a command hosts it and would take over its work.

    Raises:
        Unavailable: at least one gateway is.
    """
    if config.store_url is None:
        return
    async with open_operations_readonly(config, state_dir) as operations:
        others = [found for found in await operations.status.list_replicas(Caller.operator()) if found.alive]
    if others:
        address = next((found.address for found in others if found.address), None)
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        raise Unavailable(
            f"This store is hosted by the gateway {others[0].name!r}{more}.",
            f"Connect to a gateway: use --url {address or 'ADDRESS'} and --token-file FILE.",
            url=address,
        )


def create_operations(
    config: Config,
    store: Store,
    home: StateDir,
    *,
    bus: EventBus | None = None,
    clock: Clock | None = None,
    worker: Worker | None = None,
    scheduler: Scheduler | None = None,
    toolbox: Toolbox | None = None,
    transcript_files: TranscriptFiles | None = None,
    sandboxes: Sandboxes | None = None,
) -> Operations:
    """Build the operations on this store. Without a worker and a scheduler, they start no run.

    Without `transcript_files`, rows name the transcript files that exist, if the configuration has them.
    """
    if transcript_files is None and config.mirrors_transcripts:
        transcript_files = TranscriptFiles(home.transcripts)
    context = OperationContext(
        config=config,
        store=store,
        bus=bus or LocalBus(),
        clock=clock or store.clock,
        session_resolver=SessionResolver(config),
        worker=worker,
        toolbox=toolbox or Toolbox(),
        state_dir=home.path,
        transcript_files=transcript_files,
        sandboxes=sandboxes,
    )
    return Operations(context, scheduler)
