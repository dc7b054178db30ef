"""The processes of ACP agents: one per session, started by its first turn and ended when nothing has used it for long.

A program is lost when its process ends during a turn: the turn fails with the reason, and the next one starts another
process, which loads the conversation if the program supports that. Otherwise, the program is given what it has missed.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from antiphon.access import Caller
from antiphon.child_processes.processes import ChildCommand, ChildProcesses
from antiphon.errors import AgentProgramFailed, InvalidInput, Unavailable
from antiphon.messages import (
    AssistantMessage,
    CompactionEntry,
    Cost,
    ImageBlock,
    Message,
    StopReason,
    TextBlock,
    TokenUsage,
)
from antiphon.runtimes import Deltas, Prompt
from antiphon.runtimes.acp.memory import MemoryFiles, ProgramMemory, compute_program_digest
from antiphon.runtimes.acp.permissions import (
    CANCELLED_OUTCOME,
    PermissionRules,
    build_question,
    choose_option,
    decide,
)
from antiphon.runtimes.acp.session_tools import OfferedTools, ProgramConnection, SessionToolServer
from antiphon.runtimes.acp.turn_recorder import Json, TurnRecorder
from antiphon.runtimes.turns import TurnHost, TurnIdentity, TurnRuntime

if TYPE_CHECKING:
    from antiphon.config import AgentConfig, Config
    from antiphon.config.acp import AcpProgramConfig, ToolKind
    from antiphon.runtimes.acp.program import AcpProgram

log = logging.getLogger(__name__)

CANCEL_GRACE_SECONDS = 5.0  # for a program to end a cancelled turn; then its process is ended
SWEEP_SECONDS = 15.0
CHILD_PURPOSE = "acp"
RESUMED_NOTICE = (
    "(The gateway was stopped while you worked on the following message, so your turn was cut off. What you did before"
    " may have had effects: check before you repeat anything, then go on.)"
)
HIDDEN_IMAGE_TEXT = "[an image that this program cannot be shown]"
_STOP_REASONS: dict[object, StopReason] = {
    "end_turn": "stop",
    "max_tokens": "length",
    "max_turn_requests": "length",
}


class LaunchableProgram(Protocol):
    """A session's program, ready to be started (`workspace.agent_programs`)."""

    @property
    def command(self) -> ChildCommand: ...
    @property
    def cwd(self) -> str: ...
    @property
    def is_sandboxed(self) -> bool: ...
    @property
    def tools_listener(self) -> asyncio.Future[socket.socket] | None: ...
    @property
    def release_descriptors(self) -> Callable[[], None]: ...
    @property
    def close(self) -> Callable[[], None]: ...


PrepareProgram = Callable[[Caller], Awaitable[LaunchableProgram]]


class AgentSession:
    """The process of one session, and the turn that it answers."""

    def __init__(self, agent: AgentConfig, owner: AcpSessions, conversation: str) -> None:
        assert agent.runtime.acp is not None
        self.conversation = conversation
        self.program: AcpProgram | None = None
        self.is_starting = False
        """Whether it was given room for a process that does not run yet (`AcpSessions.make_room`)."""
        self.used_at = time.monotonic()
        self.turn: str | None = None
        """The run that is answered now."""
        self._agent = agent
        self._config = agent.runtime.acp
        self._owner = owner
        self._prepared: LaunchableProgram | None = None
        self._tools: OfferedTools | None = None
        self._settling: asyncio.Task[None] | None = None
        self._ending_count = 0
        self._instructions = ""
        """Those that the process was told."""
        self._has_reacted = False
        """Whether the program has said anything in this turn."""
        self._recorder: TurnRecorder | None = None
        self._host: TurnHost | None = None
        self._asking: set[asyncio.Task[bool]] = set()
        self._counted: dict[str, int] = {}
        self._cost: float | None = 0.0
        self._latest_cost: float | None = None

    @property
    def agent_id(self) -> str:
        return self._agent.id

    @property
    def is_oneshot(self) -> bool:
        return self._config.mode == "oneshot"

    @property
    def takes_room(self) -> bool:
        """Whether a process of it runs, is about to, or has not ended yet."""
        return self.program is not None or self.is_starting or self._ending_count > 0

    @property
    def is_idle(self) -> bool:
        return self.turn is None and (self._settling is None or self._settling.done())

    # --- turns ---

    async def run_turn(self, prompt: Prompt, host: TurnHost, deltas: Deltas) -> AssistantMessage:
        self.turn = host.identity.run_id
        try:
            if self._settling is not None:
                await asyncio.wait([self._settling])
            program, memory = await self._require_program(host)
            told_instructions, self._has_reacted = self._instructions, False
            try:
                blocks = await self._build_blocks(prompt, host, memory, program)
                await self._remember(program, host)
                if self._tools is not None:
                    self._tools.begin_turn(host.identity)
                return await self._answer(program, blocks, host, deltas)
            except BaseException:
                if not self._has_reacted:  # it may not have read what it was told, so it is told again
                    self._instructions = told_instructions
                    with suppress(OSError):  # why the turn ended is what is reported
                        await self._owner.save_memory(self.conversation, memory)
                raise
        finally:
            self.turn = None
            self.used_at = time.monotonic()
            if self._tools is not None:
                await self._tools.end_turn()

    async def _answer(
        self, program: AcpProgram, blocks: Sequence[Json], host: TurnHost, deltas: Deltas
    ) -> AssistantMessage:
        recorder = TurnRecorder(host, deltas, program.model, self._config.name)
        self._recorder, self._host, self._latest_cost = recorder, host, None
        answering = asyncio.create_task(program.prompt(blocks))
        try:
            await self._record(recorder, answering)
            answer = answering.result()
            return await recorder.finish(self._read_stop_reason(answer), self._read_usage(answer))
        except AgentProgramFailed:
            if not program.is_alive or not answering.done():
                await self._abandon(answering)
            raise
        except BaseException:
            self._settling = asyncio.create_task(self._settle(program, answering))
            self._settling.add_done_callback(lambda _: self._owner.note_change())
            raise
        finally:
            self._recorder = self._host = None
            for task in self._asking:
                task.cancel()

    async def _record(self, recorder: TurnRecorder, answering: asyncio.Task[Json]) -> None:
        """Commit what the program says until it has answered."""
        while True:
            has_work = asyncio.ensure_future(recorder.has_work.wait())
            try:
                await asyncio.wait({answering, has_work}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                has_work.cancel()
            is_done = answering.done()
            await recorder.flush()
            if recorder.fault is not None:
                raise recorder.fault
            if is_done:
                return

    async def _settle(self, program: AcpProgram, answering: asyncio.Task[Json]) -> None:
        """Wait until the program ends a cancelled turn, or end the program."""
        if not answering.done():
            await program.cancel()
            await asyncio.wait([answering], timeout=CANCEL_GRACE_SECONDS)
        if answering.done():
            _ = answering.cancelled() or answering.exception()
        if not answering.done() or not program.is_alive:
            await self._abandon(answering)

    async def _abandon(self, answering: asyncio.Task[Json]) -> None:
        answering.cancel()
        await self.end_program()
        await asyncio.gather(answering, return_exceptions=True)

    def _read_stop_reason(self, answer: Json) -> StopReason:
        reason = answer.get("stopReason")
        if reason in _STOP_REASONS:
            return _STOP_REASONS[reason]
        what = {"refusal": "refused to answer", "cancelled": "cancelled the turn by itself"}.get(
            str(reason), "ended the turn without a known reason"
        )
        raise AgentProgramFailed(
            f"The program {self._config.name!r} {what}.", "Rephrase the message, or try again."
        )

    def _read_usage(self, answer: Json) -> TokenUsage | None:
        """Return the tokens of the turn, if known. By the protocol, programs report those of the whole session."""
        usage = answer.get("usage")
        names = ("inputTokens", "outputTokens", "cachedReadTokens", "cachedWriteTokens", "totalTokens")
        found = cast("Json", usage) if isinstance(usage, dict) else {}
        counts = {name: value for name in names if isinstance(value := found.get(name), int) and value >= 0}
        cost = self._take_cost()
        if "inputTokens" not in counts and "outputTokens" not in counts:
            return None if cost is None else TokenUsage(cost=cost)
        before, self._counted = self._counted, counts
        if all(counts.get(name, 0) >= value for name, value in before.items()) and counts != before:
            counts = {name: value - before.get(name, 0) for name, value in counts.items()}
        read, written = counts.get("inputTokens", 0), counts.get("outputTokens", 0)
        return TokenUsage(
            input=read,
            output=written,
            cache_read=counts.get("cachedReadTokens", 0),
            cache_write=counts.get("cachedWriteTokens", 0),
            total_tokens=counts.get("totalTokens", read + written),
            cost=cost,
        )

    def _take_cost(self) -> Cost | None:
        """Return the cost of the turn, if it is known: programs report the cost of the session."""
        before, now = self._cost, self._latest_cost
        if now is None:
            return None
        self._cost = now
        if before is None:
            return None
        return Cost(total=now - before if now >= before else now)

    # --- what the program tells and asks ---

    def take_update(self, update: Json) -> None:
        if update.get("sessionUpdate") == "usage_update":
            match update.get("cost"):
                case {"amount": float() | int() as amount, "currency": "USD"} if amount >= 0:
                    self._latest_cost = float(amount)
                case _:
                    pass
        elif self._recorder is not None:
            self._has_reacted = True
            self._recorder.apply(update)

    async def decide_permission(self, request: Json) -> Json:
        recorder, host, fields = self._recorder, self._host, request.get("toolCall")
        if recorder is None or host is None or not isinstance(fields, dict):
            return CANCELLED_OUTCOME
        self._has_reacted = True
        call = recorder.apply_call(cast("Json", fields), starts=True)
        if call is None or self._prepared is None:
            return CANCELLED_OUTCOME
        rules = PermissionRules(
            settings=self._agent.exec,
            allowed_kinds=self._owner.get_allowed_kinds(self._config),
            is_sandboxed=self._prepared.is_sandboxed,
        )
        decision = decide(call.kind, rules)
        if decision != "ask":
            return choose_option(request.get("options"), is_allowed=decision == "allow")
        question = build_question(
            call, self._config.name, self._prepared.cwd, is_sandboxed=self._prepared.is_sandboxed
        )

        async def ask() -> bool:
            await recorder.flush()  # the call must be in the transcript before a person is asked
            return await host.ask(question)

        asking = asyncio.create_task(ask())
        self._asking.add(asking)
        asking.add_done_callback(self._asking.discard)
        await asyncio.wait([asking])
        if asking.cancelled():
            return CANCELLED_OUTCOME
        if error := asking.exception():
            log.warning("The permission for a call of %r could not be asked: %s", self._config.name, error)
            return CANCELLED_OUTCOME
        return choose_option(request.get("options"), is_allowed=asking.result())

    # --- the process ---

    async def _require_program(self, host: TurnHost) -> tuple[AcpProgram, ProgramMemory | None]:
        """Return the running program, and what is known of its memory; None if it has none."""
        if self.program is not None and not self.program.is_alive:
            await self.end_program()
        if self.program is not None:
            return self.program, await self._owner.load_memory(self.conversation, self._digest)
        try:
            await self._owner.make_room(self)
            module = await asyncio.to_thread(importlib.import_module, "antiphon.runtimes.acp.program")
            prepared = self._prepared = await self._owner.prepare(host.identity.caller)
            program: AcpProgram = module.AcpProgram(self._config.name, self._owner.processes, self)
            self.program = program
            self._instructions = ""
            self._counted, self._cost, self._latest_cost = {}, 0.0, None
            try:
                await program.start(prepared.command)
            finally:
                prepared.release_descriptors()
            memory = await self._owner.load_memory(self.conversation, self._digest)
            servers = await self._open_tools(program, prepared, host.identity)
            if memory is not None and not await program.load_session(
                memory.session_id, prepared.cwd, servers
            ):
                memory = None
            if memory is None:
                await program.open_session(prepared.cwd, servers)
            elif self._latest_cost is None:
                self._cost = None  # it may count what earlier processes cost
        except BaseException:
            await asyncio.shield(self.end_program())
            raise
        finally:
            self.is_starting = False
            self._owner.note_change()
        return program, memory

    async def _open_tools(
        self, program: AcpProgram, prepared: LaunchableProgram, identity: TurnIdentity
    ) -> Sequence[Json]:
        """Return the MCP servers of a program that has just been started."""
        if self._owner.tool_server is None:
            return ()
        connection = ProgramConnection(
            is_alive=lambda: program.is_alive,
            has_http=program.capabilities.has_mcp_over_http,
            keeps_headers_private=self._config.keeps_headers_private,
            is_sandboxed=prepared.is_sandboxed,
            listener=prepared.tools_listener,
        )
        self._tools = await self._owner.tool_server.open(identity, connection)
        return () if self._tools is None else (self._tools.server,)

    @property
    def _digest(self) -> str:
        assert self._prepared is not None
        return compute_program_digest(self._config.argv, self._prepared.cwd)

    async def _remember(self, program: AcpProgram, host: TurnHost) -> None:
        """Note what the program is about to be told, so that another process can go on."""
        memory = ProgramMemory(
            program=self._digest,
            session_id=program.session_id,
            seen_seq=host.identity.first_seq,
            run_number=host.identity.run_number,
        )
        await self._owner.save_memory(self.conversation, memory)

    async def end_program(self) -> None:
        """End the process, if it runs."""
        program, self.program = self.program, None
        prepared, self._prepared = self._prepared, None
        tools, self._tools = self._tools, None
        self._ending_count += 1
        try:
            if tools is not None:
                await tools.close()
            if program is not None:
                await program.close()
            if prepared is not None:
                prepared.close()
        finally:
            self._ending_count -= 1
            self._owner.note_change()

    # --- the prompt ---

    async def _build_blocks(
        self, prompt: Prompt, host: TurnHost, memory: ProgramMemory | None, program: AcpProgram
    ) -> list[Json]:
        if prompt.sampling is not None:
            raise InvalidInput(
                f"Agent {prompt.agent_id!r} is a program, which does not accept model settings.",
                "Leave out 'temperature' and similar fields, or use another agent.",
                field="temperature",
            )
        blocks: list[Json] = []
        if prompt.instructions != self._instructions:
            blocks.append(_build_text(f"Instructions for this session:\n\n{prompt.instructions}"))
            self._instructions = prompt.instructions
        since, known_run = (1, None) if memory is None else (memory.seen_seq, memory.run_number)
        if missed := await host.render_missed(since, known_run):
            blocks.append(_build_text(missed))
        if host.identity.is_resumed:
            blocks.append(_build_text(RESUMED_NOTICE))
        blocks += _build_message_blocks(prompt.messages[0], reads_images=program.capabilities.reads_images)
        return _separate_texts(blocks)


def _build_text(text: str) -> Json:
    return {"type": "text", "text": text}


def _separate_texts(blocks: Sequence[Json]) -> list[Json]:
    """Return the blocks with a blank line between two texts: many programs join them as they are."""
    last = max((number for number, block in enumerate(blocks) if block["type"] == "text"), default=0)
    return [
        _build_text(f"{block['text']}\n\n") if number < last and block["type"] == "text" else block
        for number, block in enumerate(blocks)
    ]


def _build_message_blocks(message: Message, *, reads_images: bool) -> list[Json]:
    if isinstance(message, CompactionEntry):
        return [_build_text(message.summary)]
    if isinstance(message.content, str):
        return [_build_text(message.content)]
    blocks: list[Json] = []
    for block in message.content:
        match block:
            case TextBlock(text=text):
                blocks.append(_build_text(text))
            case ImageBlock(data=data, mime_type=mime_type) if reads_images:
                blocks.append({"type": "image", "data": data, "mimeType": mime_type})
            case ImageBlock():
                blocks.append(_build_text(HIDDEN_IMAGE_TEXT))
            case _:
                pass
    return blocks


class AcpSessions:
    """All processes of ACP agents in this gateway."""

    def __init__(
        self,
        config: Config,
        state_dir: Path,
        prepare: PrepareProgram,
        tool_server: SessionToolServer | None = None,
    ) -> None:
        """Without `tool_server`, programs are not offered the tools of their sessions."""
        self.processes = ChildProcesses(state_dir, CHILD_PURPOSE, adopts=True)
        self.prepare = prepare
        self.tool_server = tool_server
        self._config = config
        self._memories = MemoryFiles(state_dir)
        self._sessions: dict[str, AgentSession] = {}
        self._has_changed = asyncio.Event()
        self._sweeping: asyncio.Task[None] | None = None
        self._is_closed = False

    def get_runtime(self, agent_id: str) -> AcpRuntime:
        return AcpRuntime(self, self._config.get_agent(agent_id))

    def get_allowed_kinds(self, program: AcpProgramConfig) -> Sequence[ToolKind]:
        own = program.allow_kinds
        return self._config.acp.allow_kinds if own is None else own

    async def run_turn(
        self, agent: AgentConfig, prompt: Prompt, host: TurnHost, deltas: Deltas
    ) -> AssistantMessage:
        if not self._config.acp.enabled:
            raise Unavailable("Agents that are ACP programs are switched off.", "Set 'acp.enabled' to true.")
        if self._is_closed:
            raise Unavailable("The gateway is stopping.", "Try again later.")
        if self._sweeping is None:
            self._sweeping = asyncio.create_task(self._sweep())
        key, conversation = host.identity.session_key, host.identity.session_id
        session = self._sessions.get(key)
        if session is not None and (session.conversation != conversation or session.agent_id != agent.id):
            del self._sessions[key]
            await session.end_program()
            session = None
        if session is None:
            session = self._sessions[key] = AgentSession(agent, self, conversation)
        try:
            return await session.run_turn(prompt, host, deltas)
        finally:
            self._has_changed.set()
            if session.is_oneshot:
                await asyncio.shield(self._end_oneshot(key, session))

    async def _end_oneshot(self, key: str, session: AgentSession) -> None:
        await session.end_program()
        await asyncio.to_thread(self._memories.remove, session.conversation)
        self._sessions.pop(key, None)

    async def load_memory(self, conversation: str, program: str) -> ProgramMemory | None:
        return await asyncio.to_thread(self._memories.load, conversation, program)

    async def save_memory(self, conversation: str, memory: ProgramMemory | None) -> None:
        if memory is None:
            await asyncio.to_thread(self._memories.remove, conversation)
        else:
            await asyncio.to_thread(self._memories.save, conversation, memory)

    async def make_room(self, for_session: AgentSession) -> None:
        """Wait until a session may start its process, ending the one that has been idle for longest if necessary."""
        while True:
            others = [session for session in self._sessions.values() if session is not for_session]
            running = [session for session in others if session.takes_room]
            if len(running) < self._config.acp.max_concurrent_sessions:
                for_session.is_starting = True
                return
            idle = [session for session in running if session.is_idle and session.program is not None]
            if idle:
                await min(idle, key=lambda session: session.used_at).end_program()
            else:
                self._has_changed.clear()
                await self._has_changed.wait()

    def note_change(self) -> None:
        """Have those look again that wait for room."""
        self._has_changed.set()

    async def _sweep(self) -> None:
        """End the processes that were idle for too long."""
        await asyncio.to_thread(self._memories.prune)
        ttl_seconds = 60 * self._config.acp.runtime.ttl_minutes
        while ttl_seconds:
            await asyncio.sleep(min(SWEEP_SECONDS, ttl_seconds))
            for key, session in list(self._sessions.items()):
                if session.is_idle and time.monotonic() - session.used_at >= ttl_seconds:
                    self._sessions.pop(key, None)
                    await session.end_program()

    def describe(self) -> list[dict[str, Any]]:
        """Return the sessions that have a process."""
        return [
            {"sessionKey": key, "agentId": session.agent_id, "runId": session.turn}
            for key, session in self._sessions.items()
            if session.program is not None
        ]

    async def aclose(self) -> None:
        """End every process."""
        self._is_closed = True
        if self._sweeping is not None:
            self._sweeping.cancel()
            await asyncio.wait([self._sweeping])
        await asyncio.gather(*(session.end_program() for session in self._sessions.values()))
        self._sessions.clear()
        await self.processes.aclose()


class AcpRuntime(TurnRuntime):
    """The program of one agent."""

    context_window = None
    reads_history = False

    def __init__(self, sessions: AcpSessions, agent: AgentConfig) -> None:
        self._sessions = sessions
        self._agent = agent

    async def run_turn(self, prompt: Prompt, host: TurnHost, deltas: Deltas) -> AssistantMessage:
        return await self._sessions.run_turn(self._agent, prompt, host, deltas)

    async def close(self) -> None:
        """Do nothing: the processes belong to `AcpSessions`."""
