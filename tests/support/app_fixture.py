"""Antiphon's core with its parts accessible: a real store, a real engine, an optional manual clock.

A program uses `open_app_operations`; tests also need the store, the bus and the engine.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from antiphon import keys
from antiphon.access import Caller
from antiphon.bus.local import LocalBus
from antiphon.clock import Clock
from antiphon.config import Config
from antiphon.config.agents import LoopDetectionSettings
from antiphon.engine.collaboration.framing import derive_nonce
from antiphon.engine.engine import Engine
from antiphon.engine.outbox.sender import Outbox
from antiphon.engine.runs.lifecycle import Claim
from antiphon.engine.runs.run_loop import RunSetup
from antiphon.engine.sessions import session_rows
from antiphon.engine.sessions.resolver import SessionResolver
from antiphon.engine.sessions.retention import RetentionPolicy
from antiphon.engine.sessions.session_rows import NewSession
from antiphon.engine.sessions.transcripts import HistoryFilter
from antiphon.engine.supervisor import EngineTimings
from antiphon.engine.toolbox import ApprovalQuestion, Tool, Toolbox, ToolOutput, ToolRequest
from antiphon.lanes.local import LocalLanes
from antiphon.messages import AssistantMessage, TextBlock, ToolCall
from antiphon.operations.context import OperationContext
from antiphon.operations.operations import Operations
from antiphon.operations.types import IncomingMessage, RunView
from antiphon.runtimes import Runtime, ToolSpec
from antiphon.runtimes.function import AgentFunction, FunctionRuntime
from antiphon.store import CommitPhase, Row, Store, Tx
from antiphon.store.transcript_files import TranscriptFiles
from support.databases import open_test_database, query_database

OPERATOR = Caller.operator()
MAIN = "agent:main:main"
BOUND = 10.0  # seconds after which any wait of a test is a failure
DATABASE = "antiphon.db"


@dataclass(frozen=True, slots=True)
class AppFixture:
    """The operations and the parts behind them."""

    operations: Operations
    engine: Engine
    store: Store
    bus: LocalBus
    clock: Clock
    path: Path

    async def say(self, text: str, session: str = MAIN, **options: Any) -> str:
        """Submit a message; return the id of its run."""
        message = IncomingMessage(session=session, content=text, **options)
        return (await self.operations.messages.submit(OPERATOR, message)).run_id

    async def wait_for_end(self, run_id: str) -> RunView:
        view = await self.operations.runs.wait(OPERATOR, run_id, BOUND)
        assert view.has_ended, f"{run_id} is still {view.state} after {BOUND} seconds"
        return view

    async def ask(self, text: str, session: str = MAIN, **options: Any) -> RunView:
        """Submit a message and wait for the end of its run."""
        return await self.wait_for_end(await self.say(text, session, **options))

    async def transcript(self, session: str = MAIN) -> list[dict[str, Any]]:
        wanted = HistoryFilter(limit=1000, include_tools=True, after=0)
        return (await self.operations.transcripts.read(OPERATOR, session, wanted)).messages

    async def create(self, key: str, parent: str | None = None) -> Row:
        """Create a session, as a child of `parent` if given."""
        return await self.store.tx(_create, key, parent, self.clock.now())

    def rows(self, sql: str, *params: object) -> list[dict[str, Any]]:
        """Query the database directly."""
        return query_database(self.path, sql, *params)


async def _create(tx: Tx, key: str, parent: str | None, now: int) -> Row:
    above = await session_rows.find_session(tx, keys.parse(parent), None) if parent else None
    return await session_rows.create_session(
        tx, keys.parse(key), now, NewSession(parent=above["id"] if above else None)
    )


@asynccontextmanager
async def open_test_store(
    path: Path, on_commit: Callable[[CommitPhase], None] | None = None
) -> AsyncGenerator[Store]:
    store = await open_test_database(path / DATABASE, on_commit=on_commit)
    try:
        yield store
    finally:
        await store.close()


@asynccontextmanager
async def open_app_fixture(
    path: Path,
    agent: AgentFunction | Runtime,
    *,
    tools: Iterable[Tool] = (),
    config: Config | None = None,
    clock: Clock | None = None,
    timings: EngineTimings | None = None,
    retention: RetentionPolicy | None = None,
    bus: LocalBus | None = None,
    store: Store | None = None,
    is_only_replica: bool = True,
    max_steps: int = 20,
    reserve_tokens: int = 100,
    keep_tokens: int = 50,
    approval_timeout_seconds: float = 1800.0,
    loop_detection: LoopDetectionSettings | None = None,
    on_commit: Callable[[CommitPhase], None] | None = None,
) -> AsyncGenerator[AppFixture]:
    """Start an engine on this directory (or beside others on `store`); stop it when the block is left."""
    config = config or Config()
    bus = bus or LocalBus()
    own = None if store else await open_test_database(path / DATABASE, on_commit=on_commit)
    shared = store or own
    assert shared is not None
    clock = clock or shared.clock
    runtime = FunctionRuntime(agent, clock=clock) if callable(agent) else agent
    toolbox = {tool.spec.name: tool for tool in tools}

    async def load_run_setup(claim: Claim) -> RunSetup:
        return RunSetup(
            runtime=runtime,
            caller=Caller.agent(claim.agent_id, claim.session_key, sandboxed=claim.sandboxed),
            instructions=f"You are {claim.agent_id}.",
            nonce=derive_nonce(b"test", claim.session_key, claim.session_id),
            tools=toolbox,
            max_steps=max_steps,
            reserve_tokens=reserve_tokens,
            keep_tokens=keep_tokens,
            max_result_chars=1000,
            approval_timeout_seconds=approval_timeout_seconds,
            loop_detection=loop_detection,
        )

    engine = Engine(
        store=shared,
        lanes=LocalLanes(),
        bus=bus,
        clock=clock,
        load_run_setup=load_run_setup,
        outbox=Outbox(shared, bus, clock, SessionResolver(config)),
        timings=timings,
        retention=retention,
        is_only_replica=is_only_replica,
    )
    operations = Operations(
        OperationContext(
            config=config,
            store=shared,
            bus=bus,
            clock=clock,
            session_resolver=SessionResolver(config),
            worker=engine.worker,
            state_dir=path,
            transcript_files=TranscriptFiles(path / "transcripts"),
            toolbox=Toolbox(),
        )
    )
    try:
        await engine.start()
        try:
            yield AppFixture(operations, engine, shared, bus, clock, path / DATABASE)
        finally:
            await asyncio.wait_for(engine.stop(), BOUND)
    finally:
        if own:
            await own.close()


def make_tool(
    name: str,
    invoke: Callable[[ToolRequest], Awaitable[ToolOutput]],
    *,
    settle: bool = False,
    has_side_effects: bool = True,
    ask: bool = False,
    needs_approval: Callable[[ToolRequest], Awaitable[ApprovalQuestion | None]] | None = None,
    unavailable: Callable[[str, bool], str | None] | None = None,
) -> Tool:
    spec = ToolSpec(name=name, description=name, parameters={"type": "object"})
    return Tool(
        spec=spec,
        invoke=invoke,
        after_crash="settle" if settle else "report",
        has_side_effects=has_side_effects,
        ask=ask,
        needs_approval=needs_approval,
        unavailable=unavailable,
    )


def make_tool_calls(*names: str, **arguments: Any) -> AssistantMessage:
    """Make an answer that calls these tools."""
    blocks = [ToolCall(id=f"{name}_{i}", name=name, arguments=arguments) for i, name in enumerate(names)]
    return AssistantMessage(content=[*blocks], timestamp=1)


def make_answer(words: str, **options: Any) -> AssistantMessage:
    return AssistantMessage(content=[TextBlock(text=words)], timestamp=1, **options)


async def wait_for_event(happened: asyncio.Event) -> None:
    """Wait for an event that must happen."""
    await asyncio.wait_for(happened.wait(), BOUND)


async def wait_until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Poll a condition that no event announces."""
    async with asyncio.timeout(BOUND):
        while not await condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0)


def make_config(settings: Mapping[str, Any]) -> Config:
    return Config.model_validate(settings)


def strip_frame(text: str) -> str:
    """Return the content of a framed text; other texts are returned unchanged."""
    found = re.search(r"<<<data (\w+)>>>\n(.*)\n<<<end \1>>>$", text, re.DOTALL)
    return found[2] if found else text
