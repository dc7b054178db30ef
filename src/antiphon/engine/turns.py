"""Playing one run: model step, commit, tool step, commit, until there is an answer.

The transcript is the checkpoint. A run that was cut off is loaded from it and goes on where it stopped: calls
without a result are settled (our own tools, by their key) or reported as interrupted (everybody else's), and
then the model is asked again. Nothing is shown to be done before the commit that did it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import msgspec

from antiphon.access import Caller
from antiphon.clock import Clock
from antiphon.engine import compaction, context, framing, gate, runs, transcripts
from antiphon.engine.context import Context
from antiphon.engine.deltas import DeltaStream
from antiphon.engine.patience import until_there_is_room
from antiphon.engine.runs import Claim, Ending
from antiphon.engine.steps import Outcome
from antiphon.engine.toolbox import Call, Result, Tool
from antiphon.engine.transcripts import Entry
from antiphon.errors import AntiphonError, ContextOverflow, Fenced, StoreError, ToolFailed
from antiphon.messages import INJECTED, Assistant, Message, Text, Thinking, ToolCall, ToolResult, decode
from antiphon.runtimes import Prompt, Runtime, ToolSpec
from antiphon.runtimes.answers import whole
from antiphon.runtimes.function import ENDINGS
from antiphon.runtimes.model import INVALID_ARGUMENTS
from antiphon.runtimes.tool_calls import KEPT_TOOL_CALLS, MAX_ARGUMENT_LEVELS, MAX_TOOL_CALLS_PER_ANSWER
from antiphon.store import Store
from antiphon.tracing import span

log = logging.getLogger(__name__)
T = TypeVar("T")

TOOL_GRACE = 1.0  # seconds
COMPACTIONS = 3  # without room for an answer; a conversation that is still too long then will not get shorter
MAX_CONCURRENT_CALLS = 16  # of one answer
LEAST_SUMMARISED = 64  # tokens; a model that finds these too long will not be asked for less


_TOO_MANY_CALLS = Result(
    text=f"The answer made more than {MAX_TOOL_CALLS_PER_ANSWER} tool calls. The ones before this one were run; this "
    f"one and those after it were not. Make at most {MAX_TOOL_CALLS_PER_ANSWER} in one answer.",
    is_error=True,
)


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """What a run is played with; computed once, when it starts."""

    runtime: Runtime
    caller: Caller
    """Who the session is to the tools it calls."""
    instructions: str
    nonce: str
    """The number in the markers around framed text (`framing`); the instructions name it."""
    tools: Mapping[str, Tool]
    max_steps: int
    reserve_tokens: int
    keep_tokens: int
    max_result_chars: int
    thinking: str | None = None
    """What holds where neither the run nor its session says how much to think."""
    model: str | None = None
    """The configured id of the model; it stands in for a name of the provider's that is not fit to be shown."""


class Turn:
    """One run in the hands of this process."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        claim: Claim,
        setting: Setting,
        deltas: DeltaStream,
        on_entries: Callable[[Claim, Sequence[Entry]], None],
        on_tool: Callable[[Claim, ToolCall, ToolResult | None], None],
    ) -> None:
        self._store = store
        self._clock = clock
        self._claim = claim
        self._setting = setting
        self._deltas = deltas
        self._on_entries = on_entries
        self._on_tool = on_tool
        self._context = Context()
        self._call_ids: set[str] = set()  # of the whole run, which the context may have lost the beginning of
        self._excess: str | None = None
        self._compactions = 0
        self._used = claim.resumed
        self._client_tools = claim.options.tool_names if claim.options else frozenset[str]()

    async def play(self) -> Ending:
        """To the end, which is returned and not yet committed."""
        await self._load()
        if self._claim.resumed:
            await self._answer_all(
                self._own(transcripts.unanswered(self._context.since(self._claim.first_seq))), resumed=True
            )
            if ending := self._yielded() or self._left_to_client():
                return ending
        for _ in range(self._setting.max_steps):
            answer = await self._step()
            if not answer.tool_calls:
                self._deltas.flush()  # nothing may be streamed after the entry that completes it
                return _ending(answer, used=self._used or answer.usage is not None)
            await self._commit([answer])
            await self._answer_all(self._own(answer.tool_calls), resumed=False)
            if ending := self._yielded() or self._left_to_client():
                return ending
        return Ending(
            state="incomplete",
            error_code="max_steps",
            error=f"The run took {self._setting.max_steps} steps without coming to an answer. "
            "Ask for less at once, or raise agents.defaults.maxSteps.",
        )

    def _yielded(self) -> Ending | None:
        """The ending of a run that a tool has ended; its words are the last ones."""
        for message in reversed(self._context.since(self._claim.first_seq)):
            if not isinstance(message, ToolResult):
                break
            tool = self._setting.tools.get(message.tool_name)
            if tool is not None and tool.ends_turn and not message.is_error:
                words = _words_of(message)
                said = Assistant(
                    content=[Text(text=words)],
                    timestamp=self._clock.now(),
                    stop_reason="stop",
                    provider="antiphon",
                    model=INJECTED,
                )
                return Ending(state="ok", reply=words, messages=[said], yielded=True)
        return None

    def _own(self, calls: Sequence[ToolCall]) -> Sequence[ToolCall]:
        """The calls that are executed here, not by the client."""
        return (
            [call for call in calls if call.name not in self._client_tools] if self._client_tools else calls
        )

    def _left_to_client(self) -> Ending | None:
        """The ending of a run whose last answer calls client-side tools; the results come with a later request."""
        if not self._client_tools:
            return None
        for message in reversed(self._context.since(self._claim.first_seq)):
            if isinstance(message, Assistant):
                if not any(call.name in self._client_tools for call in message.tool_calls):
                    return None
                return Ending(state="ok", reply=message.text, model_answered=_model_of(message))
        return None

    def stopped(self, outcome: Outcome, reason: str) -> Ending:
        """The ending of a run that was stopped: what had been said is kept."""
        self._deltas.flush()
        said = self._deltas.said
        partial = Assistant(
            content=[Text(text=said)] if said else [],
            timestamp=self._clock.now(),
            stop_reason="aborted",
            error_message=reason,
        )
        return Ending(state=outcome, reply=said or None, error_code=outcome, error=reason, messages=[partial])

    def failed(self, error: AntiphonError) -> Ending:
        self._deltas.flush()
        return Ending(state="error", error_code=error.code, error=whole(str(error)))

    # --- what the model is shown ---

    async def _load(self) -> None:
        claim, runtime = self._claim, self._setting.runtime
        if not runtime.reads_history and not claim.resumed:
            self._context.add(claim.first_seq, decode(claim.input))
            return
        loaded = await self._store.read(
            context.load, claim.transcript, claim.first_seq, runtime.context_window
        )
        for seq, message in zip(loaded.seqs, loaded.messages, strict=True):
            if runtime.reads_history or seq >= claim.first_seq:
                self._context.add(seq, message)
        if claim.resumed:
            self._call_ids = await self._store.read(context.calls_since, claim.transcript, claim.first_seq)

    async def _step(self) -> Assistant:
        """One answer of the runtime, after making room for it if need be."""
        while True:
            if self._too_long():
                await self._compact()
            try:
                with span("model_step", run_id=self._claim.run_id, model=self._claim.model):
                    answer = await self._setting.runtime.step(self._prompt(), self._deltas)
            except ContextOverflow:
                if not await self._compact():
                    raise
            else:
                if not self._too_long():
                    self._compactions = 0
                return self._distinct(self._named(answer))

    def _named(self, answer: Assistant) -> Assistant:
        """The answer with a model name that people and agents can be shown: providers report what they like."""
        name = answer.model
        if name is None or name == self._setting.model or gate.is_plain_name(name):
            return answer
        return msgspec.structs.replace(answer, model=self._setting.model)

    def _distinct(self, answer: Assistant) -> Assistant:
        """The answer with call ids that are unique in this run, since they make an effect happen once.

        If it has too many calls, only those that are run are kept, and one more that is refused.
        """
        content: list[Text | Thinking | ToolCall] = []
        calls = 0
        for block in answer.content:
            if isinstance(block, ToolCall):
                calls += 1
                if calls > KEPT_TOOL_CALLS:
                    continue
                number, call = 1, block
                while call.id in self._call_ids:
                    number, call = number + 1, msgspec.structs.replace(block, id=f"{block.id}-{number + 1}")
                self._call_ids.add(call.id)
                content.append(call)
            else:
                content.append(block)
        return msgspec.structs.replace(answer, content=content)

    def _prompt(self) -> Prompt:
        claim, setting = self._claim, self._setting
        return Prompt(
            run_id=claim.run_id,
            session_key=claim.session_key,
            agent_id=claim.agent_id,
            instructions=setting.instructions,
            messages=framing.framed(context.mend(self._context.messages), setting.nonce),
            tools=self._offered_tools(),
            thinking=claim.thinking or setting.thinking,
            sampling=claim.options.sampling if claim.options else None,
        )

    def _offered_tools(self) -> list[ToolSpec]:
        """The session's tools and the client's; only the client's if the client requires a call."""
        own = [tool.spec for tool in self._setting.tools.values()]
        options = self._claim.options
        if options is None or not options.tools:
            return own
        required = options.sampling is not None and options.sampling.tool_required
        return options.tools if required else [*own, *options.tools]

    def _too_long(self) -> bool:
        window = self._setting.runtime.context_window
        return window is not None and self._context.tokens > max(
            window // 2, window - self._setting.reserve_tokens
        )

    async def _compact(self) -> bool:
        """Put a summary in the place of the older part. False when there is nothing to put, or to put it for."""
        cut = context.cut(self._context, self._setting.keep_tokens)
        if cut == 0 or self._compactions >= COMPACTIONS:
            return False
        self._compactions += 1
        older = self._context.messages[:cut]
        summary = await self._summary(older)
        now = self._clock.now()
        # A model with nothing to say must not cost the conversation: it is charged for, and that is all.
        words = context.brief(summary.text.strip(), older)
        short = msgspec.structs.replace(summary, content=[Text(text=words)])
        entry = compaction.entry(self._context, cut, short, now) if words else None

        def committed(entries: list[Entry]) -> None:
            if entry is not None:
                shown = self._context
                self._context = Context([entries[0].seq, *shown.seqs[cut:]], [entry, *shown.messages[cut:]])

        await self._write(committed, runs.commit_summary, self._claim, entry, summary, now)
        return entry is not None

    async def _summary(self, messages: Sequence[Message]) -> Assistant:
        """Of messages that may be too long for the model themselves: then of as much of each as it takes."""
        tokens = sum(map(context.weigh, messages))
        while True:
            try:
                return self._named(
                    await compaction.summarise(self._setting.runtime, self._prompt(), messages)
                )
            except ContextOverflow:
                tokens //= 4
                if tokens < LEAST_SUMMARISED:
                    raise
                messages = context.clipped(messages, tokens)

    # --- tools ---

    async def _answer_all(self, calls: Sequence[ToolCall], *, resumed: bool) -> None:
        """Run the calls and commit each result as soon as possible, together with others that are ready."""
        self._excess = self._excess_call()
        if len(calls) == 1:
            await self._commit_results([(calls[0], await self._answer(calls[0], resumed=resumed))])
            return
        waiting = iter(calls)
        ready: list[tuple[ToolCall, ToolResult]] = []
        news = asyncio.Event()

        async def work() -> None:
            for call in waiting:
                ready.append((call, await self._answer(call, resumed=resumed)))
                news.set()

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(len(calls), MAX_CONCURRENT_CALLS)):
                    group.create_task(work())
                left = len(calls)
                while left:
                    await news.wait()
                    news.clear()
                    left -= await self._commit_results(ready)
        except BaseExceptionGroup as group_error:
            raise group_error.exceptions[0] from None
        except asyncio.CancelledError:
            await self._commit_results(ready)  # finished calls keep their results, even if the run is stopped
            raise

    async def _commit_results(self, ready: list[tuple[ToolCall, ToolResult]]) -> int:
        batch = ready[:]
        ready.clear()
        if batch:
            await self._commit([result for _, result in batch])
        for call, result in batch:
            self._on_tool(self._claim, call, result)
        return len(batch)

    async def _answer(self, call: ToolCall, *, resumed: bool) -> ToolResult:
        tool = self._setting.tools.get(call.name)
        if resumed and (tool is None or tool.after_crash == "report"):
            return context.interrupted(call, self._clock.now())
        self._on_tool(self._claim, call, None)
        refused = call.id == self._excess
        return self._result(call, _TOO_MANY_CALLS if refused else await self._invoke(call, tool))

    def _excess_call(self) -> str | None:
        """The id of the first call of the latest answer that exceeds the limit; None if none does."""
        answers = (message for message in reversed(self._context.messages) if isinstance(message, Assistant))
        latest = next(answers, None)
        after = latest.tool_calls[MAX_TOOL_CALLS_PER_ANSWER:] if latest else []
        return after[0].id if after else None

    async def _invoke(self, call: ToolCall, tool: Tool | None) -> Result:
        if tool is None:
            known = ", ".join(self._setting.tools) or "none"
            return Result(text=f"There is no tool {call.name!r}. The tools are: {known}.", is_error=True)
        if call.native and INVALID_ARGUMENTS in call.native:
            return Result(
                text=f"The arguments of {call.name!r} were not a JSON object, or were nested deeper than "
                f"{MAX_ARGUMENT_LEVELS} levels. Call it again.",
                is_error=True,
            )
        claim = self._claim
        try:
            given = Call(
                caller=self._setting.caller, run_id=claim.run_id, call_id=call.id, arguments=call.arguments
            )
            with span("tool", run_id=claim.run_id, tool=call.name, call_id=call.id):
                if tool.after_crash == "report":
                    return await obedient(tool.invoke(given))
                return await until_there_is_room(lambda: obedient(tool.invoke(given)))
        except (Fenced, StoreError):
            raise
        except AntiphonError as error:
            return Result(text=str(error), is_error=True, details={"code": error.code, **error.data})
        except Exception as error:
            about = {"run_id": claim.run_id, "session_key": claim.session_key}
            log.exception("Tool %r failed in run %r", call.name, claim.run_id, extra=about)
            return Result(
                text=f"The tool {call.name!r} failed: {type(error).__name__}: {error}", is_error=True
            )

    def _result(self, call: ToolCall, result: Result) -> ToolResult:
        most = self._setting.max_result_chars
        text = whole(result.text)
        if len(text) > most:
            text = f"{text[:most]}\n[{len(text) - most} of {len(text)} characters left out]"
        return ToolResult(
            tool_call_id=call.id,
            tool_name=call.name,
            content=[Text(text=text)],
            is_error=result.is_error,
            details=result.details if _small(result.details, most) else None,
            timestamp=self._clock.now(),
        )

    # --- commits ---

    async def _commit(self, messages: Sequence[Message]) -> None:
        def committed(entries: list[Entry]) -> None:
            for entry, message in zip(entries, messages, strict=True):
                self._context.add(entry.seq, message)

        await self._write(committed, runs.commit, self._claim, messages, self._clock.now())

    async def _write(
        self,
        committed: Callable[[list[Entry]], None],
        script: Callable[..., Awaitable[list[Entry]]],
        *args: object,
    ) -> None:
        """Commit, and take over what was committed."""
        self._used = True
        await until_there_is_room(lambda: self._try_to_write(committed, script, *args))

    async def _try_to_write(
        self,
        committed: Callable[[list[Entry]], None],
        script: Callable[..., Awaitable[list[Entry]]],
        *args: object,
    ) -> None:
        """Await a commit to its end even when the run is stopped meanwhile: memory has to agree with the store."""
        task = asyncio.ensure_future(self._store.tx(script, *args))
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            await asyncio.wait([task])
            raise
        finally:
            if task.done() and not task.cancelled() and task.exception() is None:
                committed(task.result())
                self._deltas.committed()
                self._on_entries(self._claim, task.result())


def _model_of(answer: Assistant) -> str | None:
    return f"{answer.provider}/{answer.model}" if answer.provider and answer.model else answer.model


def _ending(answer: Assistant, *, used: bool) -> Ending:
    """From what the runtime reported, never from what the text says."""
    reply = answer.text
    model = _model_of(answer)
    if answer.stop_reason == "length":
        error = "The answer reached the model's length limit and is not complete."
    elif not reply.strip():
        error = "The model ended its turn without an answer."
    else:
        return Ending(state="ok", reply=reply, model_answered=model, messages=[answer], used=used)
    return Ending(
        state="incomplete",
        reply=reply or None,
        error_code="incomplete",
        error=error,
        model_answered=model,
        messages=[answer],
    )


def _words_of(result: ToolResult) -> str:
    """What a tool says for the session whose turn it ends."""
    details = result.details
    message: object = cast("dict[str, Any]", details).get("message") if isinstance(details, dict) else None
    return message if isinstance(message, str) and message else result.text


def _small(details: object, most: int) -> bool:
    """Whether a tool's data for machines can be stored; its text says the same to the model."""
    try:
        return len(msgspec.json.encode(details)) <= most
    except (TypeError, ValueError):
        return False


async def obedient(work: Awaitable[T]) -> T:
    """Await foreign code; when cancelled, give it `TOOL_GRACE` to wind up and then leave it behind.

    A tool that does not let itself be cancelled must not hold its session's lane.
    """
    task = asyncio.ensure_future(_tamed(work))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.cancel()
        _, running = await asyncio.wait([task], timeout=TOOL_GRACE)
        if running:
            log.warning("A tool ignored being cancelled and was left behind")
        raise


async def _tamed(work: Awaitable[T]) -> T:
    """A tool that wants to end the process has failed, and no more."""
    try:
        return await work
    except ENDINGS as error:
        raise ToolFailed(f"The tool tried to end the process ({error!r}).", "Mend the tool.") from error
