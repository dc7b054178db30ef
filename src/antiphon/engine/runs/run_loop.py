"""Executes one run: model step, commit, tool step, commit, until the model answers.

The transcript is the checkpoint. An interrupted run is loaded from it and continues where it stopped: calls without a
result are repeated (our own tools, which are idempotent by key) or reported as interrupted (all others), and then the
model is asked again. No transcript entry is published before its commit; partial text is streamed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, cast

import msgspec

from antiphon.access import Caller
from antiphon.clock import Clock
from antiphon.engine.collaboration import framing
from antiphon.engine.outbox import sanitize
from antiphon.engine.runs import compaction, context, lifecycle
from antiphon.engine.runs.approval_gate import DEFAULT_APPROVAL_TIMEOUT_SECONDS, ApprovalGate
from antiphon.engine.runs.context import ModelContext
from antiphon.engine.runs.deltas import DeltaStream
from antiphon.engine.runs.effects import RunEnding, RunOutcome
from antiphon.engine.runs.lifecycle import Claim, retry_while_store_full
from antiphon.engine.runs.loop_detection import RepeatedCalls
from antiphon.engine.runs.tool_invocation import (
    build_request,
    build_tool_result,
    contain_tool_errors,
    find_call_error,
    invoke_tool,
)
from antiphon.engine.runs.whole_turns import EngineTurnHost
from antiphon.engine.sessions import transcripts
from antiphon.engine.sessions.transcripts import Entry
from antiphon.engine.toolbox import OutputListener, Tool, ToolOutput
from antiphon.errors import AntiphonError, ContextOverflow, InvalidInput
from antiphon.messages import (
    INJECTED_MODEL,
    AssistantMessage,
    Message,
    TextBlock,
    ThinkingBlock,
    ToolCall,
    ToolResult,
    decode_message,
)
from antiphon.runtimes import Prompt, Runtime, ToolSpec
from antiphon.runtimes.text import repair_surrogates
from antiphon.runtimes.tool_calls import (
    MAX_KEPT_TOOL_CALLS,
    MAX_TOOL_CALLS_PER_ANSWER,
    make_storable_id,
)
from antiphon.runtimes.turns import TurnIdentity, TurnRuntime
from antiphon.store import Store
from antiphon.tracing import start_span

if TYPE_CHECKING:
    from antiphon.config.agents import LoopDetectionSettings

MAX_CONSECUTIVE_COMPACTIONS = 3  # a conversation that is still too long then will not get shorter
MAX_CONCURRENT_CALLS_PER_ANSWER = 16


_TOO_MANY_CALLS = ToolOutput(
    text=f"The answer made more than {MAX_TOOL_CALLS_PER_ANSWER} tool calls. The ones before this one were run; this "
    f"one and those after it were not. Make at most {MAX_TOOL_CALLS_PER_ANSWER} in one answer.",
    is_error=True,
)


class RunSetup(msgspec.Struct, frozen=True, kw_only=True):
    """Runtime, tools and limits of a run; computed once, when it starts."""

    runtime: Runtime | TurnRuntime
    caller: Caller
    """The identity with which the session calls tools."""
    instructions: str
    nonce: str
    """The number in the markers around framed text (`framing`); the instructions name it."""
    tools: Mapping[str, Tool]
    max_steps: int
    reserve_tokens: int
    keep_tokens: int
    max_result_chars: int
    thinking: str | None = None
    """Thinking level if neither the run nor its session sets one."""
    approval_timeout_seconds: float = DEFAULT_APPROVAL_TIMEOUT_SECONDS
    loop_detection: LoopDetectionSettings | None = None
    """When a repeated tool call is refused; None: never."""
    model: str | None = None
    """The configured id of the model; replaces a model name from the provider that is unsafe to show."""
    session_tool_names: Set[str] = frozenset()
    """The tools of the session that a runtime with its own tools may offer in addition (`TurnIdentity`)."""


class RunLoop:
    """Executes one run that this process has claimed."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        claim: Claim,
        setup: RunSetup,
        deltas: DeltaStream,
        approval_gate: ApprovalGate,
        on_entries: Callable[[Claim, Sequence[Entry]], None],
        on_tool: Callable[[Claim, ToolCall, ToolResult | None], None],
        open_tool_output: Callable[[Claim, ToolCall], OutputListener],
    ) -> None:
        self._store = store
        self._clock = clock
        self._claim = claim
        self._setup = setup
        self._deltas = deltas
        self._approval_gate = approval_gate
        self._on_entries = on_entries
        self._on_tool = on_tool
        self._open_tool_output = open_tool_output
        self._context = ModelContext()
        self._call_ids: set[str] = set()  # of the whole run; the context may no longer have its beginning
        self._excess_call_id: str | None = None
        self._compactions = 0
        self._repeated_calls = RepeatedCalls(setup.loop_detection) if setup.loop_detection else None
        self._may_have_usage = claim.resumed
        self._client_tools = claim.options.tool_names if claim.options else frozenset[str]()

    async def run(self) -> RunEnding:
        """Execute the run and return its ending, which is not yet committed."""
        await self._load_context()
        if self._claim.resumed:
            await self._run_tool_calls(
                self._select_own_calls(
                    transcripts.find_unanswered_calls(
                        self._context.list_messages_since(self._claim.first_seq)
                    )
                ),
                resumed=True,
            )
            if ending := self._find_tool_ending():
                return ending
        if isinstance(self._setup.runtime, TurnRuntime):
            return await self._run_whole_turn(self._setup.runtime)
        for _ in range(self._setup.max_steps):
            answer = await self._request_answer(self._setup.runtime)
            if not answer.tool_calls:
                self._deltas.flush()  # nothing may be streamed after the entry that completes it
                return _build_ending(answer, has_usage=self._may_have_usage or answer.usage is not None)
            await self._commit_messages([answer])
            await self._run_tool_calls(self._select_own_calls(answer.tool_calls), resumed=False)
            if ending := self._find_tool_ending():
                return ending
        return RunEnding(
            state="incomplete",
            error_code="max_steps",
            error=f"The run took {self._setup.max_steps} steps without an answer. "
            "Ask for less at once, or raise agents.defaults.maxSteps.",
        )

    async def _run_whole_turn(self, runtime: TurnRuntime) -> RunEnding:
        """Let the runtime answer the turn with its own tools."""
        claim, setup = self._claim, self._setup
        if claim.options is not None and claim.options.tools:
            raise InvalidInput(
                f"Agent {claim.agent_id!r} is a program with its own tools, so requests cannot add any.",
                "Leave out 'tools', or use another agent.",
                field="tools",
            )
        host = EngineTurnHost(
            identity=TurnIdentity(
                run_id=claim.run_id,
                run_number=claim.n,
                session_key=claim.session_key,
                session_id=claim.session_id,
                first_seq=claim.first_seq,
                caller=setup.caller,
                tool_names=setup.session_tool_names,
                is_resumed=claim.resumed,
            ),
            claim=claim,
            store=self._store,
            clock=self._clock,
            nonce=setup.nonce,
            gate=self._approval_gate,
            approval_timeout_seconds=setup.approval_timeout_seconds,
            used_call_ids=self._call_ids,
            commit=self._commit_messages,
            on_tool=self._on_tool,
        )
        with start_span("turn", run_id=claim.run_id):
            answer = await runtime.run_turn(self._build_prompt(), host, self._deltas)
        self._deltas.flush()
        return _build_ending(
            self._replace_unsafe_model_name(answer),
            has_usage=self._may_have_usage or answer.usage is not None,
        )

    def _find_tool_ending(self) -> RunEnding | None:
        """Return the ending if the last calls end the run."""
        if self._repeated_calls is not None and self._repeated_calls.ending is not None:
            return RunEnding(state="error", error_code="tool_loop", error=self._repeated_calls.ending)
        return self._find_yield_ending() or self._find_client_call_ending()

    def _find_yield_ending(self) -> RunEnding | None:
        """Return the ending if a tool has ended the turn; the tool's message is the reply."""
        for message in reversed(self._context.list_messages_since(self._claim.first_seq)):
            if not isinstance(message, ToolResult):
                break
            tool = self._setup.tools.get(message.tool_name)
            if tool is not None and tool.ends_turn and not message.is_error:
                reply = _extract_closing_reply(message)
                answer = AssistantMessage(
                    content=[TextBlock(text=reply)],
                    timestamp=self._clock.now(),
                    stop_reason="stop",
                    provider="antiphon",
                    model=INJECTED_MODEL,
                )
                return RunEnding(state="ok", reply=reply, messages=[answer], yielded=True)
        return None

    def _select_own_calls(self, calls: Sequence[ToolCall]) -> Sequence[ToolCall]:
        """Return the calls that are executed here, not by the client."""
        return (
            [call for call in calls if call.name not in self._client_tools] if self._client_tools else calls
        )

    def _find_client_call_ending(self) -> RunEnding | None:
        """Return the ending if the last answer calls client-side tools; their results come with a later request."""
        if not self._client_tools:
            return None
        for message in reversed(self._context.list_messages_since(self._claim.first_seq)):
            if isinstance(message, AssistantMessage):
                if not any(call.name in self._client_tools for call in message.tool_calls):
                    return None
                return RunEnding(state="ok", reply=message.text, model_answered=_format_model_name(message))
        return None

    def build_stopped_ending(self, outcome: RunOutcome, reason: str) -> RunEnding:
        """Return the ending of a stopped run, with its partial answer."""
        self._deltas.flush()
        text = self._deltas.uncommitted_text
        partial = AssistantMessage(
            content=[TextBlock(text=text)] if text else [],
            timestamp=self._clock.now(),
            stop_reason="aborted",
            error_message=reason,
        )
        return RunEnding(
            state=outcome, reply=text or None, error_code=outcome, error=reason, messages=[partial]
        )

    def build_failed_ending(self, error: AntiphonError) -> RunEnding:
        self._deltas.flush()
        return RunEnding(state="error", error_code=error.code, error=repair_surrogates(str(error)))

    # --- what the model is shown ---

    async def _load_context(self) -> None:
        claim, runtime = self._claim, self._setup.runtime
        if not runtime.reads_history and not claim.resumed:
            self._context.add(claim.first_seq, decode_message(claim.input))
            return
        loaded = await self._store.read(
            context.load_model_context, claim.transcript, claim.first_seq, runtime.context_window
        )
        for seq, message in zip(loaded.seqs, loaded.messages, strict=True):
            if runtime.reads_history or seq >= claim.first_seq:
                self._context.add(seq, message)
        if claim.resumed:
            if self._repeated_calls is not None:
                self._repeated_calls.load(self._context.list_messages_since(claim.first_seq))
            self._call_ids = await self._store.read(
                context.load_call_ids_since, claim.transcript, claim.first_seq
            )

    async def _request_answer(self, runtime: Runtime) -> AssistantMessage:
        """Request one answer from the runtime, compacting the context first if necessary."""
        while True:
            if self._is_too_long():
                await self._compact_context(runtime)
            try:
                with start_span("model_step", run_id=self._claim.run_id, model=self._claim.model):
                    answer = await runtime.step(self._build_prompt(), self._deltas)
            except ContextOverflow:
                if not await self._compact_context(runtime):
                    raise
            else:
                if not self._is_too_long():
                    self._compactions = 0
                return self._make_call_ids_unique(self._replace_unsafe_model_name(answer))

    def _replace_unsafe_model_name(self, answer: AssistantMessage) -> AssistantMessage:
        """Return the answer with a model name that is safe to show; providers may report any text."""
        name = answer.model
        if name is None or name == self._setup.model or sanitize.is_plain_name(name):
            return answer
        return msgspec.structs.replace(answer, model=self._setup.model)

    def _make_call_ids_unique(self, answer: AssistantMessage) -> AssistantMessage:
        """Return the answer with call ids that are unique in this run, since they serve as idempotency keys.

        Tools that are called by an alias get their name.

        If it has too many calls, only those that are executed are kept, and one more that is refused.
        """
        if not answer.tool_calls:
            return answer
        content: list[TextBlock | ThinkingBlock | ToolCall] = []
        name_by_alias = self._map_aliases()
        calls = 0
        for block in answer.content:
            if isinstance(block, ToolCall):
                calls += 1
                if calls > MAX_KEPT_TOOL_CALLS:
                    continue
                number, call_id = 1, make_storable_id(block.id)
                name = name_by_alias.get(block.name, block.name)
                call = msgspec.structs.replace(block, id=call_id, name=name)
                while call.id in self._call_ids:
                    number, call = number + 1, msgspec.structs.replace(call, id=f"{call_id}-{number + 1}")
                self._call_ids.add(call.id)
                content.append(call)
            else:
                content.append(block)
        return msgspec.structs.replace(answer, content=content)

    def _map_aliases(self) -> dict[str, str]:
        tools = self._setup.tools
        return {
            alias: tool.spec.name
            for tool in tools.values()
            for alias in tool.aliases
            if alias not in tools and alias not in self._client_tools
        }

    def _build_prompt(self) -> Prompt:
        claim, setup = self._claim, self._setup
        return Prompt(
            run_id=claim.run_id,
            session_key=claim.session_key,
            agent_id=claim.agent_id,
            instructions=setup.instructions,
            messages=framing.frame_messages(context.repair_messages(self._context.messages), setup.nonce),
            tools=self._list_offered_tools(),
            thinking=claim.thinking or setup.thinking,
            sampling=claim.options.sampling if claim.options else None,
        )

    def _list_offered_tools(self) -> list[ToolSpec]:
        """Return the session's and the client's tools; only the client's if the client requires a call."""
        own = [tool.spec for tool in self._setup.tools.values()]
        options = self._claim.options
        if options is None or not options.tools:
            return own
        required = options.sampling is not None and options.sampling.tool_required
        return options.tools if required else [*own, *options.tools]

    def _is_too_long(self) -> bool:
        window = self._setup.runtime.context_window
        return window is not None and self._context.tokens > max(
            window // 2, window - self._setup.reserve_tokens
        )

    async def _compact_context(self, runtime: Runtime) -> bool:
        """Replace the older part of the context with a summary. False if nothing was replaced."""
        cut = context.find_cut_index(self._context, self._setup.keep_tokens)
        if cut == 0 or self._compactions >= MAX_CONSECUTIVE_COMPACTIONS:
            return False
        self._compactions += 1
        older = self._context.messages[:cut]
        summary = self._replace_unsafe_model_name(
            await compaction.summarize(runtime, self._build_prompt(), older)
        )
        now = self._clock.now()
        # An empty summary is charged for, but must not replace the conversation.
        text = context.truncate_summary(summary.text.strip(), older)
        entry = compaction.build_compaction(self._context, cut, text, now) if text else None

        def on_committed(entries: list[Entry]) -> None:
            if entry is not None:
                before = self._context
                self._context = ModelContext(
                    [entries[0].seq, *before.seqs[cut:]], [entry, *before.messages[cut:]]
                )

        await self._commit(on_committed, lifecycle.commit_summary, self._claim, entry, summary, now)
        return entry is not None

    # --- tools ---

    async def _run_tool_calls(self, calls: Sequence[ToolCall], *, resumed: bool) -> None:
        """Execute the calls and commit each result as soon as possible, together with others that are ready."""
        self._excess_call_id = self._find_excess_call()
        if len(calls) == 1:
            await self._commit_results([(calls[0], await self._run_tool_call(calls[0], resumed=resumed))])
            return
        pending = iter(calls)
        ready: list[tuple[ToolCall, ToolResult]] = []
        has_ready = asyncio.Event()

        async def execute_pending() -> None:
            for call in pending:
                ready.append((call, await self._run_tool_call(call, resumed=resumed)))
                has_ready.set()

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(len(calls), MAX_CONCURRENT_CALLS_PER_ANSWER)):
                    group.create_task(execute_pending())
                remaining = len(calls)
                while remaining:
                    await has_ready.wait()
                    has_ready.clear()
                    remaining -= await self._commit_results(ready)
        except BaseExceptionGroup as group_error:
            raise group_error.exceptions[0] from None
        except asyncio.CancelledError:
            await self._commit_results(ready)  # finished calls keep their results, even if the run is stopped
            raise

    async def _commit_results(self, ready: list[tuple[ToolCall, ToolResult]]) -> int:
        batch = ready[:]
        ready.clear()
        if batch:
            await self._commit_messages([result for _, result in batch])
        for call, result in batch:
            self._on_tool(self._claim, call, result)
        return len(batch)

    async def _run_tool_call(self, call: ToolCall, *, resumed: bool) -> ToolResult:
        setup = self._setup
        tool = setup.tools.get(call.name)
        if resumed and (tool is None or (tool.after_crash == "report" and not tool.may_ask)):
            return context.build_interrupted_result(call, self._clock.now())
        self._on_tool(self._claim, call, None)
        repeated = self._repeated_calls
        output: ToolOutput | None = _TOO_MANY_CALLS
        if call.id != self._excess_call_id:
            output = repeated.find_refusal(call) if repeated is not None and not resumed else None
            output = output or await self._invoke_when_allowed(call, tool, resumed=resumed)
        if output is None:
            return context.build_interrupted_result(call, self._clock.now())
        result = build_tool_result(call, output, setup.max_result_chars, self._clock.now())
        return result if repeated is None else repeated.record(call, result)

    async def _invoke_when_allowed(
        self, call: ToolCall, tool: Tool | None, *, resumed: bool
    ) -> ToolOutput | None:
        """Make a call once it is approved, if it needs that. Returns None if it may already have run before a crash."""
        setup, claim = self._setup, self._claim
        if tool is not None and tool.may_ask and find_call_error(call, setup.tools) is None:
            request = build_request(call, setup.tools, setup.caller, claim)
            refusal = await contain_tool_errors(
                call,
                claim,
                self._approval_gate.find_refusal(
                    claim, tool, request, setup.approval_timeout_seconds, resumed=resumed
                ),
            )
            if refusal is not None:
                return None if refusal == "interrupted" else refusal
        listener = self._open_tool_output(claim, call)
        return await invoke_tool(call, setup.tools, setup.caller, claim, listener)

    def _find_excess_call(self) -> str | None:
        """Return the id of the first call of the latest answer beyond the limit, or None."""
        answers = (
            message for message in reversed(self._context.messages) if isinstance(message, AssistantMessage)
        )
        latest = next(answers, None)
        excess = latest.tool_calls[MAX_TOOL_CALLS_PER_ANSWER:] if latest else []
        return excess[0].id if excess else None

    # --- commits ---

    async def _commit_messages(self, messages: Sequence[Message]) -> None:
        def on_committed(entries: list[Entry]) -> None:
            for entry, message in zip(entries, messages, strict=True):
                self._context.add(entry.seq, message)

        await self._commit(on_committed, lifecycle.commit_messages, self._claim, messages, self._clock.now())

    async def _commit(
        self,
        on_committed: Callable[[list[Entry]], None],
        script: Callable[..., Coroutine[Any, Any, list[Entry]]],
        *args: object,
    ) -> None:
        """Commit, waiting while the store is full, and apply the new entries with `on_committed`."""
        self._may_have_usage = True
        await retry_while_store_full(lambda: self._commit_shielded(on_committed, script, *args))

    async def _commit_shielded(
        self,
        on_committed: Callable[[list[Entry]], None],
        script: Callable[..., Coroutine[Any, Any, list[Entry]]],
        *args: object,
    ) -> None:
        """Await a commit even if the run is stopped meanwhile, so that memory agrees with the store."""
        task = asyncio.ensure_future(self._store.tx(script, *args))
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            await asyncio.wait([task])
            raise
        finally:
            if task.done() and not task.cancelled() and task.exception() is None:
                on_committed(task.result())
                self._deltas.finish_step()
                self._on_entries(self._claim, task.result())


def _format_model_name(answer: AssistantMessage) -> str | None:
    return f"{answer.provider}/{answer.model}" if answer.provider and answer.model else answer.model


def _build_ending(answer: AssistantMessage, *, has_usage: bool) -> RunEnding:
    """Build the ending from what the runtime reported, never from the text of the answer."""
    reply = answer.text
    model = _format_model_name(answer)
    if answer.stop_reason == "length":
        error = "The answer reached the model's length limit and is not complete."
    elif not reply.strip():
        error = "The model ended its turn without an answer."
    else:
        return RunEnding(
            state="ok", reply=reply, model_answered=model, messages=[answer], has_usage=has_usage
        )
    return RunEnding(
        state="incomplete",
        reply=reply or None,
        error_code="incomplete",
        error=error,
        model_answered=model,
        messages=[answer],
    )


def _extract_closing_reply(result: ToolResult) -> str:
    """Return the message with which a tool ends the turn."""
    details = result.details
    message: object = cast("dict[str, Any]", details).get("message") if isinstance(details, dict) else None
    return message if isinstance(message, str) and message else result.text
